"""Token shards: flat little-endian files of ids, and a JSON header that describes them.

    FOLDER/header.json describes the other files; written last FOLDER/train-00000.bin ... ids, uint16 where the
    vocabulary allows it, otherwise uint32 FOLDER/train-documents.bin uint64 offset of each document's first token in
    its split FOLDER/val-*.bin the held-out documents, the same way FOLDER/tokenizer.json the tokenizer that made the
    ids

Documents follow each other, each closed by the end-of-text id.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np

from attnres.data.sources import NO_PATHS
from attnres.data.tokenizer import file_sha256, load_tokenizer
from attnres.errors import UserError
from attnres.files import user_path
from attnres.reading import read_json
from attnres.typed import Count, Least, checked

VERSION = 1
SPLITS = ("train", "val")
FILE_TOKENS = 1 << 27
VERIFY_BYTES = 256 * 1024 * 1024  # splits up to this size are checksummed whenever they are opened


class ShardFile(TypedDict):
    """Entry of a header: a file of ids."""

    name: str
    tokens: Annotated[int, Least(1)]
    crc32: Count
    max_id: Count


class Split(TypedDict):
    """Entry of a header: a split."""

    files: list[ShardFile]
    tokens: Count
    documents: Count
    documents_file: str


class Header(TypedDict):
    """The entries of header.json that are used."""

    version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Least(1)]
    eos_id: Count
    tokenizer_sha256: str
    splits: dict[str, Split]
    settings: NotRequired[dict[str, Any]]


class SplitWriter:
    """Writes one split: `add` documents, then `close`, which returns the split's part of the header."""

    def __init__(self, folder: Path, split: str, dtype: str, *, file_tokens: int = FILE_TOKENS) -> None:
        self._folder, self._split, self._file_tokens = folder, split, file_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: list[dict[str, Any]] = []
        self._room = 0
        self.tokens = self.documents = 0
        self._bin = None
        self._starts = open(folder / f"{split}-documents.bin", "wb")  # noqa: SIM115 (closed in `close`)

    def add(self, ids: np.ndarray) -> None:
        """Append the ids of one document, its end-of-text id included."""
        self._starts.write(np.array([self.tokens], dtype="<u8").tobytes())
        self.documents += 1
        self.tokens += len(ids)
        ids = ids.astype(self._dtype)
        while len(ids):
            if self._room == 0:
                if self._bin is not None:
                    self._bin.close()
                name = f"{self._split}-{len(self._files):05d}.bin"
                self._bin = open(self._folder / name, "wb")  # noqa: SIM115 (closed in `close`)
                self._files.append({"name": name, "tokens": 0, "crc32": 0, "max_id": 0})
                self._room = self._file_tokens
            assert self._bin is not None
            part, ids = ids[: self._room], ids[self._room :]
            data, entry = part.tobytes(), self._files[-1]
            self._bin.write(data)
            entry["tokens"] += len(part)
            entry["crc32"] = zlib.crc32(data, entry["crc32"])
            entry["max_id"] = max(entry["max_id"], int(part.max()))
            self._room -= len(part)

    def close(self) -> dict[str, Any]:
        """Close the files; return {files, tokens, documents, documents_file}."""
        for file in (self._bin, self._starts):
            if file is not None:
                file.close()
        return {
            "files": self._files,
            "tokens": self.tokens,
            "documents": self.documents,
            "documents_file": f"{self._split}-documents.bin",
        }

    def abandon(self) -> None:
        """Close the files after a failure, without raising."""
        for file in (self._bin, self._starts):
            with suppress(OSError):  # the disk is full: these files are deleted anyway
                if file is not None:
                    file.close()


class Tokens:
    """One split of a prepared folder as a sequence of token ids, memory-mapped. `open_tokens` makes it.

    `len(tokens)` is the number of ids; `tokens[a:b]` is an int64 array of them, checked against the vocabulary.

    Attributes:
        folder, split: where the ids come from.
        vocab_size: larger than every id.
        eos_id: the id that ends each document.
        documents: how many documents there are.
    """

    def __init__(self, folder: Path, split: str, header: dict[str, Any]) -> None:
        part = header["splits"][split]
        self.folder, self.split = folder, split
        self.vocab_size: int = header["vocab_size"]
        self.eos_id: int = header["eos_id"]
        self.documents: int = part["documents"]
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        self._maps = [np.memmap(folder / file["name"], dtype=dtype, mode="r") for file in part["files"]]
        self._ends = np.cumsum([len(m) for m in self._maps], dtype=np.int64)
        self._documents_file = folder / part["documents_file"]

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, step = span.indices(len(self))
        assert step == 1, "tokens are read in one piece"
        out = np.empty(max(0, stop - start), dtype=np.int64)
        done = 0
        while done < len(out):
            index = int(np.searchsorted(self._ends, start + done, side="right"))
            first = start + done - (int(self._ends[index - 1]) if index else 0)
            part = self._maps[index][first : first + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
        if len(out) and out.max() >= self.vocab_size:
            raise _too_large(self.folder, self.split, int(out.max()), self.vocab_size)
        return out

    def document_starts(self) -> np.ndarray:
        """Return the position of each document's first token, in order: (documents,) uint64."""
        if not self.documents:
            return np.empty(0, dtype="<u8")
        return np.memmap(self._documents_file, dtype="<u8", mode="r")

    def starts_follow_ends(self) -> bool:
        """Return whether the first document begins at 0 and each other one, in order, right after an end-of-text id."""
        starts = self.document_starts().astype(np.int64)
        if not len(starts):
            return True
        if starts[0] != 0 or starts[-1] >= len(self) or not (starts[1:] > starts[:-1]).all():
            return False
        ends = np.split(starts[1:] - 1, np.searchsorted(starts[1:] - 1, self._ends[:-1]))
        firsts = [0, *self._ends[:-1]]
        return all((ids[at - first] == self.eos_id).all() for ids, at, first in zip(self._maps, ends, firsts))


def open_tokens(
    folder: str | Path, split: str = "train", *, tokenizer: str | Path | None = None, verify: bool | None = None
) -> Tokens:
    """Open a split, after checking the files against the header.

    Args:
        folder: a folder that `prepare` wrote.
        split: `train` or `val`.
        tokenizer: file or folder of a tokenizer.json, for example a trained model's, which must be the one that made
            the tokens.
        verify: read every token to compare checksums and the largest id. None does so for splits below `VERIFY_BYTES`.
            Sizes and the tokenizer are always compared.

    Raises:
        UserError: no such folder or split, files missing, truncated, changed, or of another tokenizer.
    """
    folder = Path(folder)
    header = read_header(folder)
    if split not in header["splits"]:
        raise UserError(f"{folder} has no split '{split}': it has {', '.join(header['splits'])}")
    made_by = header["tokenizer_sha256"]
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file() or file_sha256(tokenizer_file) != made_by:
        raise UserError(f"{tokenizer_file} is not the tokenizer that made the tokens beside it: prepare the data again")
    if tokenizer is not None:
        tokenizer_path = Path(tokenizer)
        tokenizer_path = tokenizer_path / "tokenizer.json" if tokenizer_path.is_dir() else tokenizer_path
        if not tokenizer_path.is_file() or file_sha256(tokenizer_path) != made_by:
            raise UserError(
                f"{tokenizer_path} is not the tokenizer that made the tokens in {folder}: prepare the data with it "
                "again"
            )
    part = header["splits"][split]
    width = np.dtype(header["dtype"]).itemsize
    _check_size(folder / part["documents_file"], part["documents"] * 8)
    for file in part["files"]:
        _check_size(folder / file["name"], file["tokens"] * width)
        if file["max_id"] >= header["vocab_size"]:
            raise _too_large(folder, split, file["max_id"], header["vocab_size"])
    if sum(file["tokens"] for file in part["files"]) != part["tokens"]:
        raise UserError(f"{folder}/header.json disagrees with itself on the tokens of {split}: prepare the data again")
    tokens = Tokens(folder, split, header)
    if verify or (verify is None and part["tokens"] * width <= VERIFY_BYTES):
        for file in part["files"]:
            _check_content(folder / file["name"], file, header)
        if not tokens.starts_follow_ends():
            raise UserError(
                f"{folder / part['documents_file']} has changed since it was written (documents begin where none has "
                "ended): prepare the data again"
            )
    return tokens


def prepared_folder(source: str) -> Path | None:
    """Return the folder of token shards, written by `prepare`, that `source` names; None for any other source.

    Raises:
        UserError: `source` cannot be a file's name.
    """
    if source.startswith(NO_PATHS):
        return None
    folder = user_path(source)
    return folder if (folder / "header.json").is_file() else None


def read_header(folder: Path) -> dict[str, Any]:
    """Return the header of a prepared folder.

    Raises:
        UserError: no header, or one of another version or form.
    """
    path = folder / "header.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no prepared data (it has no {path.name}): prepare it")
    values = read_json(path)
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        raise UserError(f"{path} has format version {version}, expected {VERSION}: prepare the data again")
    header = checked(values, Header, path, "prepare the data again")
    files = [file["name"] for part in header["splits"].values() for file in part["files"]]
    names = [*files, *(part["documents_file"] for part in header["splits"].values())]
    if header["eos_id"] >= header["vocab_size"] or not all(map(_plain_name, names)):
        raise UserError(f"{path} is damaged (its names or its eos_id): prepare the data again")
    return dict(header)


def _plain_name(name: Any) -> bool:
    """Return whether `name` names a file in the folder itself, not outside it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        problem = "is missing" if size is None else f"has {size} bytes"
        raise UserError(f"{path} {problem}, but its header says {expected}: prepare the data again")


def _check_content(path: Path, file: dict[str, Any], header: dict[str, Any]) -> None:
    data = np.memmap(path, dtype=np.dtype(header["dtype"]).newbyteorder("<"), mode="r")
    largest = int(data.max())
    if largest >= header["vocab_size"]:
        raise _too_large(path.parent, path.name, largest, header["vocab_size"])
    if zlib.crc32(data.data) != file["crc32"]:
        raise UserError(f"{path} has changed since it was written (checksum): prepare the data again")


def _too_large(folder: Path, what: str, id: int, vocab_size: int) -> UserError:
    return UserError(
        f"{folder} ({what}) holds token id {id}, outside its vocabulary of {vocab_size}: prepare the data again"
    )


def decoded(folder: Path) -> Iterator[str]:
    """Yield the documents of a prepared folder as text, held-out ones first, without end-of-text tokens.

    Raises:
        UserError: its files are missing, truncated, changed, or of another tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    for split in reversed(SPLITS):
        tokens = open_tokens(folder, split)
        for start, stop in pairwise([*tokens.document_starts().tolist(), len(tokens)]):
            yield tokenizer.decode(tokens[start : stop - 1].tolist())
