"""Documents to ids: split off held-out ones, spool slow sources to disk, and tokenise parts in several processes.

An interrupted call continues from these files, in a folder beside the prepared data:

    documents.jsonl  the documents that were read of a slow source, a JSON string a line
    read.json        how many bytes of it count, and where in the source to go on
    tokenizer.json   what the processes tokenise with
    NNNNNN.npz       a part of about `PART` characters with a hash of its text and tokenizer

Parts are cut in the order of the documents, whatever the number of processes. Concatenated in order they are what one
process would have made.
"""

import hashlib
import io
import json
import multiprocessing
import os
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from tokenizers import Tokenizer

from attnres.data.sources import TextSource
from attnres.errors import UserError, foreign
from attnres.files import write_bytes, write_json, writing
from attnres.reading import read_json
from attnres.typed import Count, checked


class EncodedDocuments(NamedTuple):
    """The ids of some documents.

    Attributes:
        ids: uint32 ids of each document, with its end-of-text id.
        held: whether each document is held out.
        size: bytes of text of all of them.
    """

    ids: list[np.ndarray]
    held: list[bool]
    size: int


class DocumentEncoder:
    """Encodes documents and decides which are held out: those whose hash is below `threshold`."""

    def __init__(self, tokenizer: Tokenizer, eos: int, threshold: int) -> None:
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is ordinary text, and ends no document
        self.tokenizer, self.eos, self.threshold = tokenizer, eos, threshold

    @property
    def sign(self) -> str:
        """Return a hash of the tokenizer, the end-of-text id and the threshold."""
        return hashlib.sha256(f"{self.eos} {self.threshold} {self.tokenizer.to_str()}".encode()).hexdigest()

    def encode(self, texts: list[str]) -> EncodedDocuments:
        """Encode some texts as documents. Raises UserError."""
        data = [text.encode() for text in texts]
        with foreign(
            "the tokenizer cannot read the text", "give one that encodes every character, or has an unknown token"
        ):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array([*encoding.ids, self.eos], dtype=np.uint32) for encoding in encodings]
        return EncodedDocuments(ids, [hash_of(raw) < self.threshold for raw in data], sum(map(len, data)))

    @staticmethod
    def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
        """Yield the documents in order, in lists of about `size` characters."""
        batch: list[str] = []
        total = 0
        for text in documents:
            batch.append(text)
            total += len(text)
            if total >= size:
                yield batch
                batch, total = [], 0
        if batch:
            yield batch


def hash_of(data: bytes) -> int:
    """Return the hash of a document's UTF-8 text, below 2^64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


AHEAD = 1 << 20
"""Characters that are read between two updates of read.json."""


class ReadDocuments(TypedDict):
    """How far a source has been read.

    Attributes:
        size: bytes of documents.jsonl. text: bytes of text in it. ended: the source has no more.
        place: where to continue, for sources that can; None for those that are read from the start.
    """

    size: Count
    text: Count
    ended: bool
    place: dict[str, Any] | None


def spooled(source: TextSource, folder: Path, advance: Callable[[float], None] = lambda size: None) -> TextSource:
    """Return a source that reads from disk: if `source.spool` is set, the source is first read into a folder; any other
    source is returned unchanged.

    The folder stays on the disk, so that a call that was killed or lost its connection can be continued.

    Args:
        advance: called with the number of bytes of text that were added.

    Raises:
        UserError: the source cannot be read, or the disk is full.
    """
    if not source.spool:
        return source
    file, note = folder / "documents.jsonl", folder / "read.json"
    past = ReadDocuments(size=0, text=0, ended=False, place=None)
    if note.is_file():
        past = checked(read_json(note), ReadDocuments, note, f"remove {folder}")
    if not file.is_file() or file.stat().st_size < past["size"]:
        past = ReadDocuments(size=0, text=0, ended=False, place=None)
    advance(past["text"])
    if not past["ended"]:
        _read_on(source, file, note, past, advance)

    def read() -> Iterator[str]:
        with open(file, encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    return replace(source, read=read, read_from=None)


def _read_on(source: TextSource, file: Path, note: Path, past: ReadDocuments, advance: Callable[[float], None]) -> None:
    """Read a source from the recorded position to its end."""
    if source.read_from is None:
        past, documents, where = ReadDocuments(size=0, text=0, ended=False, place=None), source.read(), None
    else:
        documents, where = source.read_from(past["place"])
    size, text, ahead = past["size"], past["text"], 0
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        with open(file, "r+b") as lines:
            lines.truncate(size)  # written by a killed process after the last update of read.json
            lines.seek(size)
            for document in documents:
                line = json.dumps(document).encode() + b"\n"
                lines.write(line)
                length = len(document.encode())
                size, text, ahead = size + len(line), text + length, ahead + length
                if where is not None and ahead >= AHEAD:
                    _note(lines, note, ReadDocuments(size=size, text=text, ended=False, place=where()))
                    advance(ahead)
                    ahead = 0
            advance(ahead)
            _note(lines, note, ReadDocuments(size=size, text=text, ended=True, place=None))


def _note(lines: Any, note: Path, read: ReadDocuments) -> None:
    """Record how far the source was read, once the text itself is on the disk."""
    lines.flush()
    os.fsync(lines.fileno())
    write_json(note, read)


PART = 1 << 23


class EncodePart(NamedTuple):
    """A part to be tokenised.

    Attributes:
        file: the file to write; `sign` is a hash of the part's text and of the tokenizer.
    """

    file: Path
    sign: str
    texts: list[str]


def encoded_in_parts(
    documents: Iterable[str], encoder: DocumentEncoder, folder: Path, workers: int
) -> Iterator[EncodedDocuments]:
    """Yield the encoded documents, in order, using `workers` processes; parts that `folder` already holds are reused.

    The folder stays on the disk, so that a call that was killed or ran out of space can be continued.

    Raises:
        UserError: a part cannot be written, the tokenizer cannot read a text, or a process was killed.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(encoder.tokenizer.to_str(), encoding="utf-8")
    context = multiprocessing.get_context("spawn")
    start = (folder / "tokenizer.json", encoder.eos, encoder.threshold)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=start) as pool:
        ahead: deque[tuple[EncodePart, Future[None] | None]] = deque()
        try:
            for work in _dealt_out(documents, encoder, folder):
                there = _read(work) is not None
                ahead.append((work, None if there else pool.submit(_make, work)))
                if len(ahead) > 2 * workers:
                    yield _result(*ahead.popleft())
            while ahead:
                yield _result(*ahead.popleft())
        except BrokenProcessPool:
            raise UserError(
                "a process that tokenises was killed, maybe because memory ran out: give the same command again, "
                f"which continues from the parts in {folder}, with fewer workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _dealt_out(documents: Iterable[str], encoder: DocumentEncoder, folder: Path) -> Iterator[EncodePart]:
    made_by = hashlib.sha256(encoder.sign.encode())
    for number, texts in enumerate(encoder.batches(documents, PART)):
        sign = made_by.copy()
        for text in texts:
            data = text.encode()
            sign.update(len(data).to_bytes(8, "big") + data)
        yield EncodePart(folder / f"{number:06d}.npz", sign.hexdigest(), texts)


def _result(work: EncodePart, making: Future[None] | None) -> EncodedDocuments:
    if making is not None:
        making.result()
    encoded = _read(work)
    if encoded is None:
        raise UserError(f"{work.file} was changed while the data were prepared: give the same command again")
    return encoded


def _read(work: EncodePart) -> EncodedDocuments | None:
    """Read a part from its file if it is there and made from this text; None if it is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), work.file.open("rb") as file:
        part = np.load(file, allow_pickle=False)
        if str(part["sign"]) == work.sign:
            ids = np.split(part["ids"], part["ends"][:-1].astype(np.int64))
            return EncodedDocuments(ids, part["held"].tolist(), int(part["size"]))
    return None


# ------------------------------------------------------------------ in a process of its own

_encoder: DocumentEncoder | None = None


def _begin(tokenizer: Path, eos: int, threshold: int) -> None:
    """Prepare the worker process: one thread, and an end with its parent, however the parent ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _encoder = DocumentEncoder(Tokenizer.from_file(str(tokenizer)), eos, threshold)


def _make(work: EncodePart) -> None:
    """Tokenise a part and write it."""
    assert _encoder is not None
    encoded = _encoder.encode(work.texts)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        sign=np.array(work.sign),
        ids=np.concatenate(encoded.ids),
        ends=np.cumsum([len(ids) for ids in encoded.ids], dtype=np.uint64),
        held=np.array(encoded.held),
        size=np.array(encoded.size),
    )
    write_bytes(work.file, buffer.getvalue())
