"""Where text comes from: the standard library of the running Python, local files, the Hugging Face hub."""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from attnres.data.hub import read_hub, resolve, revision_of
from attnres.data.readers import SUFFIXES, read_documents, text_bytes
from attnres.data.tasks import documents
from attnres.errors import UserError
from attnres.paths import refuse_special, user_path

# Not the library itself, or (the last) its own build: paths and flags of one machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}
_BUILD = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Source:
    """Documents that can be read several times, always in the same order.

    Attributes:
        name: as the user gave it.
        fingerprint: differs where the text may differ; made without reading it.
        size: about how many bytes of text there are, or None.
        read: starts a pass over the documents.
        spool: a pass is slow (a download) and short enough to be kept on the disk meanwhile: see `spooled`.
    """

    name: str
    fingerprint: str
    size: int | None
    read: Callable[[], Iterator[str]]
    spool: bool = False


def open_source(spec: str, *, column: str = "text", limit: int | None = None) -> Source:
    """The source that `spec` names.

    Args:
        spec: `stdlib`; the path of a .txt, .jsonl or .parquet file or of a folder of such files and .py files;
            `hub:NAME[:CONFIG[:SPLIT]]`; or `task:NAME[:COUNT]` of `attnres.data.tasks`.
        column: the JSON field, Parquet or hub column that holds the text.
        limit: at most this many characters, the last document cut short.

    Raises:
        UserError: nothing there, or nothing of a known kind.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit} characters, expected at least 1 (or none)")
    if spec.startswith("hub:"):
        repository, *_ = where = resolve(spec)
        revision = revision_of(repository)
        source = Source(spec, json.dumps([*where, revision]), None, lambda: read_hub(spec, column, revision))
    elif spec.startswith("task:"):
        source = Source(spec, spec, None, documents(spec))
    elif spec == "stdlib":
        source = _files("stdlib", stdlib_files(), column, sys.version)
    else:
        source = _local(spec, column)
    size = min((size for size in (source.size, limit) if size is not None), default=None)
    spool = spec.startswith("hub:") and limit is not None
    return replace(source, size=size, read=lambda: _documents(source.read(), limit), spool=spool)


@contextmanager
def spooled(source: Source, path: Path) -> Generator[Source]:
    """The same source, read once into the file `path` for the length of the block where `source.spool` asks for it."""
    if not source.spool:
        yield source
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(text) + "\n" for text in source.read())

        def read() -> Iterator[str]:
            with open(path, encoding="utf-8") as file:
                yield from map(json.loads, file)

        yield replace(source, read=read)
    finally:
        path.unlink(missing_ok=True)


def stdlib_files() -> list[Path]:
    """The running Python's own library: every *.py file without site-packages, tests and idlelib, in order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {folder for folder in _NOT_STDLIB if folder not in root.parts}
    files = [path for path in _walk(root, skip) if path.suffix == ".py" and not path.name.startswith(_BUILD)]
    if not files:
        raise UserError(f"this Python has no library source files under {root}: give text with a path instead")
    return files


def _local(spec: str, column: str) -> Source:
    path = user_path(spec)
    if path.is_dir():
        files = [file for file in _walk(path, {"__pycache__"}) if file.suffix in SUFFIXES]
        if not files:
            raise UserError(f"folder {path} has no file that ends in {', '.join(SUFFIXES)}")
        return _files(spec, files, column, "")
    if not path.exists():
        raise UserError(
            f"source '{spec}' does not exist: give stdlib, a file or folder ({', '.join(SUFFIXES)}), or hub:NAME"
        )
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} ends in '{path.suffix}', expected {', '.join(SUFFIXES)}")
    return _files(spec, [path], column, "")


def _files(name: str, files: list[Path], column: str, salt: str) -> Source:
    state = hashlib.sha256(f"{salt}\n{column}\n".encode())
    size = 0
    for file in files:
        refuse_special(file)
        try:
            stat = file.stat()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from error
        state.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        size += text_bytes(file, column)

    def read() -> Iterator[str]:
        alone = len(files) == 1
        for file in files:
            yield from read_documents(file, column, alone=alone)

    return Source(name, state.hexdigest(), size, read)


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    """Files under `root`, folders and names in order, without hidden ones and folders in `skip`."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith((".", "config-")))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _clean(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _documents(texts: Iterator[str], limit: int | None) -> Iterator[str]:
    """The texts that are not blank, `limit` characters of them at most."""
    for text in map(_clean, texts):
        if limit is not None:
            text = text[:limit]
            limit -= len(text)
        if text and not text.isspace():
            yield text
        if limit == 0:
            return
