"""Text tokenised by several processes at once, in parts that lie on the disk: a killed preparation finds them again.

Documents are dealt out in parts of about `PART` characters, in order, whatever the number of processes; each part is
a file of its own, whole or not there, that names the text and the tokenizer it was made of. Read in order they are
what one process would have made.
"""

import hashlib
import io
import multiprocessing
import os
import threading
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from attnres.data.encode import Encoded, Encoder
from attnres.errors import UserError
from attnres.files import write_bytes, writing

PART = 1 << 23


class Work(NamedTuple):
    """A part to be tokenised.

    Attributes:
        file: where it goes; `sign` is a hash of its text and of what it is tokenised with.
    """

    file: Path
    sign: str
    texts: list[str]


def encoded_in_parts(documents: Iterable[str], encoder: Encoder, folder: Path, workers: int) -> Iterator[Encoded]:
    """Give the documents encoded, in order, by so many processes; parts that are in `folder` are not made again.

    The folder is left as it is, for who was killed or had no more room to go on from.

    Raises:
        UserError: a part cannot be written, the tokenizer cannot read a text, or a process was killed.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(encoder.tokenizer.to_str(), encoding="utf-8")
    context = multiprocessing.get_context("spawn")
    start = (folder / "tokenizer.json", encoder.eos, encoder.threshold)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=start) as pool:
        ahead: deque[tuple[Work, Future[None] | None]] = deque()
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
                f"a process that tokenises was killed, maybe for want of memory: give the same command again, which "
                f"goes on from the parts in {folder}, with fewer workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _dealt_out(documents: Iterable[str], encoder: Encoder, folder: Path) -> Iterator[Work]:
    made_by = hashlib.sha256(encoder.sign.encode())
    for number, texts in enumerate(encoder.batches(documents, PART)):
        sign = made_by.copy()
        for text in texts:
            data = text.encode()
            sign.update(len(data).to_bytes(8, "big") + data)
        yield Work(folder / f"{number:06d}.npz", sign.hexdigest(), texts)


def _result(work: Work, making: Future[None] | None) -> Encoded:
    if making is not None:
        making.result()
    encoded = _read(work)
    if encoded is None:
        raise UserError(f"{work.file} was changed while the data were prepared: give the same command again")
    return encoded


def _read(work: Work) -> Encoded | None:
    """Return a part that is there and of this text; None for none, or a damaged one."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), work.file.open("rb") as file:
        part = np.load(file, allow_pickle=False)
        if str(part["sign"]) == work.sign:
            ids = np.split(part["ids"], part["ends"][:-1].astype(np.int64))
            return Encoded(ids, part["held"].tolist(), int(part["size"]))
    return None


# ------------------------------------------------------------------ in a process of its own

_encoder: Encoder | None = None


def _begin(tokenizer: Path, eos: int, threshold: int) -> None:
    """Make ready to tokenise with one thread, and end when the parent does, however that ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _encoder = Encoder(Tokenizer.from_file(str(tokenizer)), eos, threshold)


def _make(work: Work) -> None:
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
