"""Where text comes from: the standard library of the running Python, local files, the Hugging Face hub, data sets in
memory, and mixtures of these."""

import glob
import hashlib
import itertools
import json
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnres.data.folder import choose, matching, walk
from attnres.data.hub import joins, read_hub, read_hub_from, resolve, revision_of
from attnres.data.readers import KINDS, SUFFIXES, field_of, read_documents, suffix_of, text_bytes
from attnres.data.tasks import documents
from attnres.errors import UserError
from attnres.paths import refuse_special, user_path
from attnres.text import whole_characters

# Not the library itself, or (the last) its own build: paths and flags of one machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}
_BUILD = ("_sysconfigdata", "config-")
NO_PATHS = ("mix:", "hub:", "task:")
"""What sources that name no file or folder begin with."""
_SAMPLE = 100
"""Documents of a task by which it is known which version made them."""
Rows = Iterable[Mapping[str, Any]]
"""A data set in memory: rows by column, such as a `datasets.Dataset`."""
Pass = tuple[Iterator[str], Callable[[], dict[str, Any]]]
"""Documents, and a function that says where in the source one is."""


def title_of(source: str) -> str:
    """A source without the folders that it lies in.

    >>> title_of("books/a.jsonl"), title_of("mix:books/a.jsonl=3,stdlib=1"), title_of("hub:team/corpus")
    ('a.jsonl', 'mix:a.jsonl=3,stdlib=1', 'hub:team/corpus')
    """
    if source.startswith("mix:"):
        return "mix:" + ",".join(title_of(part.strip()) for part in source.removeprefix("mix:").split(","))
    return source if source.startswith(NO_PATHS) else Path(source).name


@dataclass(frozen=True)
class Source:
    """Documents that can be read several times, always in the same order.

    Attributes:
        name: as the user gave it.
        fingerprint: differs where the text may differ; made without reading it.
        size: about how many bytes of text there are, or None.
        read: starts a pass over the documents.
        read_from: starts one at a place in the source (None is its start), and gives with it a function that says the
            place after the last document; None where a pass always begins at the first.
        spool: a pass is slow (a download) and short enough to be kept on the disk meanwhile: see `data.spool`.
        files: a line for each folder or pattern that was named: which of its files are read, and which are not and why.
    """

    name: str
    fingerprint: str
    size: int | None
    read: Callable[[], Iterator[str]]
    read_from: Callable[[dict[str, Any] | None], Pass] | None = None
    spool: bool = False
    files: tuple[str, ...] = ()


def open_source(spec: str | Path | Rows, *, column: str = "text", limit: int | None = None) -> Source:
    """The source that `spec` names.

    Args:
        spec: `stdlib`; the path of a file of text (`readers.SUFFIXES`), of a folder, of which `folder.choose` takes
            files, or a pattern of paths (`data/**/*.txt`); `hub:NAME[:CONFIG[:SPLIT]]`; `task:NAME[:COUNT]` of
            `attnres.data.tasks`; `mix:SOURCE,SOURCE,...`, all of each in turn, or `mix:SOURCE=WEIGHT,...`, documents of
            each so that their texts are as long as the weights say, until one is used up. Or a `datasets.Dataset`, or
            other rows that can be gone through several times; they are gone through once here.
        column: the JSON field or the column that holds the text.
        limit: at most this many characters, the last document cut short.

    Raises:
        UserError: nothing there, or nothing of a known kind.
    """
    if limit is not None and not 1 <= limit < 1 << 63:  # what a header can hold
        raise UserError(f"limit is {limit} characters, expected 1 to 2**63 - 1 (or none)")
    source = _unlimited(str(spec), column) if isinstance(spec, str | Path) else _in_memory(spec, column, limit)
    size = min((size for size in (source.size, limit) if size is not None), default=None)
    return replace(
        source,
        size=size,
        read=lambda: iter(_Documents(source.read(), limit)),
        read_from=source.read_from and partial(_read_from, source.read_from, limit),
        spool=source.spool and limit is not None,
    )


def _read_from(
    read_from: Callable[[dict[str, Any] | None], Pass], limit: int | None, place: dict[str, Any] | None
) -> Pass:
    """A pass over the documents of a source from a place on, which says with a limit also what is left of that."""
    if limit is None:
        texts, where = read_from(place)
        return iter(_Documents(texts, None)), where
    texts, where = read_from(place and place["rows"])
    documents = _Documents(texts, limit if place is None else place["left"])
    return iter(documents), lambda: {"rows": where(), "left": documents.left}


def _unlimited(spec: str, column: str) -> Source:
    """The source of that name, whole; `spool` says that a pass is slow."""
    if spec.startswith("mix:"):
        return _mixture(spec, column)
    if spec.startswith("hub:"):
        repository, *_ = where = resolve(spec)
        revision = revision_of(repository)
        return Source(
            spec,
            json.dumps([*where, revision]),
            None,
            lambda: read_hub(spec, column, revision),
            None if joins(repository) else lambda place: read_hub_from(spec, column, revision, place),
            spool=True,
        )
    if spec.startswith("task:"):
        read = documents(spec)
        return Source(spec, f"{spec} {_digest(itertools.islice(read(), _SAMPLE))[0]}", None, read)
    if spec == "stdlib":
        return _files("stdlib", stdlib_files(), column, sys.version)
    return _local(spec, column)


def _in_memory(rows: Rows, column: str, limit: int | None) -> Source:
    """Rows that a program has, known by what they hold up to the limit."""
    kind = type(rows).__name__
    if isinstance(rows, Mapping):
        raise UserError(
            f"a {kind} was given: expected one data set, for example its split {next(iter(rows), 'train')!r}"
        )
    if iter(rows) is rows:
        raise UserError(
            f"a {kind} was given, which can be gone through once: expected a datasets.Dataset or a list of rows"
        )

    def read() -> Iterator[str]:
        for number, row in enumerate(rows):
            yield from field_of(row, f"row {number} of the {kind}", column)

    digest, size = _digest(_Documents(read(), limit))
    return Source(f"{kind} {digest[:12]}", digest, size, read)


def _digest(texts: Iterable[str]) -> tuple[str, int]:
    """SHA-256 of documents and where they end, and their bytes."""
    state, size = hashlib.sha256(), 0
    for text in texts:
        data = text.encode()
        state.update(len(data).to_bytes(8, "big") + data)
        size += len(data)
    return state.hexdigest(), size


def _mixture(spec: str, column: str) -> Source:
    """Several sources, in turn or by their weights."""
    parts = [_weighted(part.strip()) for part in spec.removeprefix("mix:").split(",")]
    sources, weights = [], [weight for _, weight in parts if weight is not None]
    for name, _ in parts:
        if not name or name.startswith("mix:"):
            raise UserError(f"source '{spec}' is not mix:SOURCE,SOURCE,... or mix:SOURCE=WEIGHT,SOURCE=WEIGHT,...")
        sources.append(_unlimited(name, column))
    if weights and len(weights) < len(sources):
        raise UserError(
            f"source '{spec}' has weights for {len(weights)} of {len(sources)}: give all of them one, or none"
        )
    sizes = [source.size for source in sources if source.size is not None]
    size = None if len(sizes) < len(sources) else sum(sizes)
    if size is not None and weights:
        size = int(min(one / weight for one, weight in zip(sizes, weights, strict=True)) * sum(weights))
    fingerprint = json.dumps([[source.fingerprint for source in sources], weights])
    spool = any(source.spool for source in sources)
    files = tuple(line for source in sources for line in source.files)
    return Source(spec, fingerprint, size, lambda: _interleaved(sources, weights), spool=spool, files=files)


def _weighted(part: str) -> tuple[str, float | None]:
    """A source and its weight: "a.txt=2" is ("a.txt", 2.0), where what follows the last = is a number."""
    name, _, number = part.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return part, None
    if not name:
        return part, None
    if not 0 < weight < math.inf:
        raise UserError(f"the weight of source '{name}' is {number}: expected a number above 0")
    return name, weight


def _interleaved(sources: Sequence[Source], weights: Sequence[float]) -> Iterator[str]:
    """All documents of each source in turn; with weights always one of the source that lags most behind its weight,
    until that one has no more."""
    passes = [iter(_Documents(source.read(), None)) for source in sources]
    if not weights:
        for texts in passes:
            yield from texts
        return
    taken = [0] * len(passes)
    while True:
        turn = min(range(len(passes)), key=lambda place: taken[place] / weights[place])
        text = next(passes[turn], None)
        if text is None:
            return
        taken[turn] += len(text)
        yield text


def stdlib_files() -> list[Path]:
    """The running Python's own library: every *.py file without site-packages, tests and idlelib, in order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {folder for folder in _NOT_STDLIB if folder not in root.parts}
    every = walk(root, lambda name: name in skip or name.startswith("config-"))
    files = [path for path in every if path.suffix == ".py" and not path.name.startswith(_BUILD)]
    if not files:
        raise UserError(f"this Python has no library source files under {root}: give text with a path instead")
    return files


def _local(spec: str, column: str) -> Source:
    path = user_path(spec)
    is_pattern = not path.exists() and glob.has_magic(spec)
    if path.is_dir() or is_pattern:
        choice = matching(path) if is_pattern else choose(path, column)
        return replace(_files(spec, choice.read, column, ""), files=(choice.sentence(spec),))
    if not path.exists():
        raise UserError(
            f"source '{spec}' does not exist: give stdlib, a file or folder, a pattern such as 'FOLDER/*.txt', "
            "hub:NAME, task:NAME or mix:SOURCE,SOURCE"
        )
    if suffix_of(path) not in SUFFIXES:
        raise UserError(f"{path} ends in '{path.suffix}', expected {KINDS}")
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
        state.update(os.fsencode(file.resolve()) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        size += text_bytes(file, column)

    def read() -> Iterator[str]:
        alone = len(files) == 1
        for file in files:
            yield from read_documents(file, column, alone=alone)

    return Source(name, state.hexdigest(), size, read)


class _Documents:
    """The texts that are not blank, `limit` characters of them at most.

    Attributes:
        left: characters that the limit leaves, None without one.
    """

    def __init__(self, texts: Iterator[str], limit: int | None) -> None:
        self.texts, self.left = texts, limit

    def __iter__(self) -> Iterator[str]:
        for text in map(whole_characters, self.texts):
            if self.left is not None:
                text = text[: self.left]
                self.left -= len(text)
            if text and not text.isspace():
                yield text
            if self.left == 0:
                return
