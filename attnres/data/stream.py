"""Read a source while a model trains on it, only as far as the steps need its tokens.

The first part of the source, the head, is prepared as any text is; the tokenizer and the held-out windows come from it.
The rest is tokenised when a step needs it and stored, so that a resumed run, and other runs on the same source, read it
from the disk:

    STREAM/train.bin      ids, as a prepared folder has them, documents in the source's order
    STREAM/position.json  how many ids of train.bin count, and where in the source to go on
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypedDict

import numpy as np

from attnres.data.batches import Batches
from attnres.data.build import Prepared, held_below
from attnres.data.encode import DocumentEncoder
from attnres.data.shards import prepared_folder
from attnres.data.sources import open_source
from attnres.data.tokenizer import load_tokenizer
from attnres.errors import UserError
from attnres.files import cache_dir, lock, write_json, writing
from attnres.reading import read_json
from attnres.typed import Count, checked

HEAD = 1 << 24
"""Characters of a source that are prepared before the first step, if no limit is given."""
AHEAD = 1 << 20
"""Characters that are tokenised at a time."""


class Position(TypedDict):
    """How far a source has been read.

    Attributes:
        tokens: number of ids in train.bin. documents: number read, with held-out ones and the head's. ended: the source
            has no more.
        place: where to continue, for sources that can; None for those that are read from the start.
    """

    tokens: Count
    documents: Count
    ended: bool
    place: dict[str, Any] | None


def refuse_prepared(spec: str) -> None:
    """Raise UserError if a source is a prepared folder, which cannot be streamed."""
    if prepared_folder(spec) is not None:
        raise UserError(f"{spec} is prepared already, so nothing of it can be streamed: leave out data.stream")


class StreamedTokens:
    """The training tokens of a source: those of its head, then those tokenised so far.

    `tokens[a:b]` is an int64 array; the source is read further if needed. Several processes may do so: one reads, the
    others wait. Documents that the rule of `prepare` holds out are skipped.

    Args:
        head: the result of `prepare` for the source's first `limit` characters.
        spec, column, held_out, limit: the arguments of `prepare`.
    """

    def __init__(self, head: Prepared, spec: str, *, column: str, held_out: float, limit: int) -> None:
        refuse_prepared(spec)
        self.spec, self.column, self.held_out, self.limit = spec, column, held_out, limit
        self.split, self.folder, self.head = "train", head.path, head.tokens("train")
        key = hashlib.sha256(f"stream 1 {head.header['key']}".encode()).hexdigest()
        self.kept = cache_dir() / "streams" / key[:16]
        self.dtype = np.dtype(head.header["dtype"]).newbyteorder("<")
        self.prepared, self.ids = head, np.empty(0, self.dtype)
        self.position: Position | None = None
        self.encoder: DocumentEncoder | None = None
        self.documents: Iterator[str] | None = None
        self.where: Callable[[], dict[str, Any] | None] = lambda: None
        self.read = -1  # number of documents read so far, with the head's

    def __len__(self) -> int:
        return len(self.head) + len(self.ids)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop = span.start, self.reach(span.stop)
        first = len(self.head)
        before, after = self.head[min(start, first) : min(stop, first)], self.ids[max(0, start - first) : stop - first]
        return np.concatenate([before, after.astype(np.int64)]) if stop > first else before

    def reach(self, stop: int) -> int:
        """Read until there are `stop` tokens or the source ends; return the number of tokens, at most `stop`.

        Raises:
            UserError: the source cannot be read, or the disk is full.
        """
        if stop > len(self) and not (self.position and self.position["ended"]):
            with writing(self.kept):
                self.kept.mkdir(parents=True, exist_ok=True)
                with lock(self.kept / ".lock", wait=True):
                    position = self._look()
                    while len(self) < stop and not position["ended"]:
                        position = self._read_on(position)
        return min(stop, len(self))

    def _look(self) -> Position:
        """Load the position from the disk, where another process may have advanced it."""
        file = self.kept / "position.json"
        if file.is_file():
            position = checked(read_json(file), Position, file, f"remove {self.kept}")
        else:
            documents = sum(split["documents"] for split in self.prepared.header["splits"].values())
            position = Position(tokens=0, documents=documents, ended=False, place=None)
        self._take(position)
        return position

    def _take(self, position: Position) -> None:
        count, file = position["tokens"], self.kept / "train.bin"
        if count * self.dtype.itemsize > (file.stat().st_size if file.is_file() else 0):
            raise UserError(f"{file} is shorter than {file.parent / 'position.json'} says: remove {self.kept}")
        self.position = position
        self.ids = np.memmap(file, self.dtype, "r", shape=(count,)) if count else np.empty(0, self.dtype)

    def _read_on(self, position: Position) -> Position:
        """Tokenise the next `AHEAD` characters."""
        if self.documents is None or self.encoder is None or self.read != position["documents"]:
            head = open_source(self.spec, column=self.column, limit=self.limit)
            self.encoder = DocumentEncoder(
                load_tokenizer(self.folder), self.prepared.eos_id, held_below(head, self.held_out)
            )
            # A pass over the documents after the head's position.
            source, place, read = open_source(self.spec, column=self.column), position["place"], position["documents"]
            if source.read_from is None:
                self.documents, self.where = islice(source.read(), read, None), lambda: None
            else:
                documents, self.where = source.read_from(place)
                self.documents = islice(documents, read if place is None else 0, None)
        texts, size = list[str](), 0
        for text in self.documents or ():
            texts.append(text)
            size += len(text)
            if size >= AHEAD:
                break
        self.read = position["documents"] + len(texts)
        data = b"".join(ids.astype(self.dtype).tobytes() for ids, held in self.encoder.encode(texts) if not held)
        self.ids = np.empty(0, self.dtype)  # unmap the file, which is about to change
        with open(self.kept / "train.bin", "ab") as file:
            # written by a killed process after the last update of position.json
            file.truncate(position["tokens"] * self.dtype.itemsize)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        after = Position(
            tokens=position["tokens"] + len(data) // self.dtype.itemsize,
            documents=self.read,
            ended=size < AHEAD,
            place=self.where(),
        )
        write_json(self.kept / "position.json", after)
        self._take(after)
        return after


class StreamedBatches(Batches):
    """Training batches in the order of the source: step s has the windows [i T, (i + 1) T], s B <= i < (s + 1) B.

    Nothing is shuffled. When the source has ended, the windows begin again from the first. A batch is still a function
    of the step alone.
    """

    def __init__(self, tokens: StreamedTokens, *, seq_len: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(tokens, seq_len=seq_len, batch_size=batch_size, seed=seed)
        self.stream = tokens

    def starts(self, step: int) -> np.ndarray:
        """Return the first token of each window of a step, (batch_size,) int64."""
        index = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        needed = int(index[-1] + 1) * self.seq_len + 1
        reached = self.stream.reach(needed)
        return (index if reached == needed else index % ((reached - 1) // self.seq_len)) * self.seq_len
