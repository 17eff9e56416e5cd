"""Documents to ids: split off held-out ones, and store slow sources on the disk while they are read.

An interrupted call continues from these files, in a folder beside the prepared data:

    documents.jsonl  the documents that were read of a slow source, a JSON string a line
    read.json        how many bytes of it count, and where in the source to go on
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from tokenizers import Tokenizer

from attnres.data.sources import TextSource
from attnres.errors import foreign
from attnres.files import write_json, writing
from attnres.reading import read_json
from attnres.typed import Count, checked


class DocumentEncoder:
    """Encodes documents and decides which are held out: those whose hash is below `threshold`."""

    def __init__(self, tokenizer: Tokenizer, eos: int, threshold: int) -> None:
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is ordinary text, and ends no document
        self.tokenizer, self.eos, self.threshold = tokenizer, eos, threshold

    def encode(self, texts: list[str]) -> list[tuple[np.ndarray, bool]]:
        """Return the uint32 ids of each text, with the end-of-text id, and whether it is held out. Raises UserError."""
        with foreign(
            "the tokenizer cannot read the text", "give one that encodes every character, or has an unknown token"
        ):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [
            (np.array([*encoding.ids, self.eos], dtype=np.uint32), hash_of(text.encode()) < self.threshold)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

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
