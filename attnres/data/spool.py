"""Text of a slow source, read once and kept on the disk while it is prepared: a call that is cut short goes on from it.

FOLDER/documents.jsonl  the documents that were read, a JSON string a line
FOLDER/read.json        how many bytes of it count, and where in the source to go on
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from attnres.data.sources import Source
from attnres.files import write_json, writing
from attnres.reading import read_json
from attnres.typed import Count, checked

AHEAD = 1 << 20
"""Characters that are read between two notes of how far."""


class Read(TypedDict):
    """How far a source has been read.

    Attributes:
        size: bytes of documents.jsonl. text: of the documents in it. ended: there are no more.
        place: where to go on, for sources that can go on from there; None for those that are read from the start.
    """

    size: Count
    text: Count
    ended: bool
    place: dict[str, Any] | None


def spooled(source: Source, folder: Path, advance: Callable[[float], None] = lambda size: None) -> Source:
    """Return the same source, read into a folder where `source.spool` asks for it, else as it is.

    The folder is left as it is, for who was killed or lost the connection to go on from.

    Args:
        advance: called with how many more bytes of text there are.

    Raises:
        UserError: the source cannot be read, or the disk is full.
    """
    if not source.spool:
        return source
    file, note = folder / "documents.jsonl", folder / "read.json"
    past = Read(size=0, text=0, ended=False, place=None)
    if note.is_file():
        past = checked(read_json(note), Read, note, f"remove {folder}")
    if not file.is_file() or file.stat().st_size < past["size"]:
        past = Read(size=0, text=0, ended=False, place=None)
    advance(past["text"])
    if not past["ended"]:
        _read_on(source, file, note, past, advance)

    def read() -> Iterator[str]:
        with open(file, encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    return replace(source, read=read, read_from=None)


def _read_on(source: Source, file: Path, note: Path, past: Read, advance: Callable[[float], None]) -> None:
    """Read a source to its end, from where it was left."""
    if source.read_from is None:
        past, documents, where = Read(size=0, text=0, ended=False, place=None), source.read(), None
    else:
        documents, where = source.read_from(past["place"])
    size, text, ahead = past["size"], past["text"], 0
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        with open(file, "r+b") as lines:
            lines.truncate(size)  # what a killed process left behind
            lines.seek(size)
            for document in documents:
                line = json.dumps(document).encode() + b"\n"
                lines.write(line)
                length = len(document.encode())
                size, text, ahead = size + len(line), text + length, ahead + length
                if where is not None and ahead >= AHEAD:
                    _note(lines, note, Read(size=size, text=text, ended=False, place=where()))
                    advance(ahead)
                    ahead = 0
            advance(ahead)
            _note(lines, note, Read(size=size, text=text, ended=True, place=None))


def _note(lines: Any, note: Path, read: Read) -> None:
    """Write how far the source was read, once that is on the disk."""
    lines.flush()
    os.fsync(lines.fileno())
    write_json(note, read)
