"""Sources of text: the standard library of the running Python, local files, the Hugging Face hub, two synthetic tasks,
and data sets in memory."""

import glob
import hashlib
import itertools
import json
import os
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from attnres.data.folder import choose, matching, walk
from attnres.data.readers import KINDS, SUFFIXES, field_of, read_documents, suffix_of, text_bytes
from attnres.errors import UserError, unknown
from attnres.files import cache_dir, refuse_special, user_path, write_text
from attnres.hub import streamed_rows
from attnres.text import whole_characters

# Not the library itself, or (the last) its own build: paths and flags of one machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__"}
_BUILD = ("_sysconfigdata", "config-")
NO_PATHS = ("hub:", "task:")
"""Prefixes of sources that name no file or folder."""
_SAMPLE = 100
"""Documents of a task that are hashed to tell one version of its generator from another."""
Rows = Iterable[Mapping[str, Any]]
"""A data set in memory: rows by column, such as a `datasets.Dataset`."""
Pass = tuple[Iterator[str], Callable[[], dict[str, Any]]]
"""An iterator over documents, and a function that returns the current place in the source."""


def title_of(source: str) -> str:
    """Return the name of a source without its folders.

    >>> title_of("books/a.jsonl"), title_of("hub:team/corpus")
    ('a.jsonl', 'hub:team/corpus')
    """
    return source if source.startswith(NO_PATHS) else Path(source).name


class Document(str):
    """A text that carries the `name` of its file."""

    name: str

    def __new__(cls, text: str, name: str) -> "Document":
        document = super().__new__(cls, text)
        document.name = name
        return document


@dataclass(frozen=True)
class TextSource:
    """Documents that can be read several times, always in the same order.

    Attributes:
        name: the source as the user gave it.
        fingerprint: changes whenever the text may have changed; computed without reading the text.
        size: approximate bytes of text, or None.
        read: starts a pass over the documents.
        read_from: starts a pass at a place in the source (None is its start), and returns with it a function that gives
            the place after the last document; None for sources that are read from the start.
        spool: a pass is slow (a download) and short enough to be stored on the disk: see `data.encode.spooled`.
        files: a line for a folder or pattern: which of its files are read, and which are not and why.
    """

    name: str
    fingerprint: str
    size: int | None
    read: Callable[[], Iterator[str]]
    read_from: Callable[[dict[str, Any] | None], Pass] | None = None
    spool: bool = False
    files: tuple[str, ...] = ()


def open_source(spec: str | Path | Rows, *, column: str = "text", limit: int | None = None) -> TextSource:
    """Return the source that `spec` names.

    Args:
        spec: `stdlib`; the path of a text file (`readers.SUFFIXES`) or of a folder, whose files `folder.choose`
            selects; a pattern of paths (`data/**/*.txt`); `hub:NAME[:CONFIG[:SPLIT]]`; `task:NAME[:COUNT]` of `TASKS`.
            Or a `datasets.Dataset`, or other rows that can be iterated several times; this call iterates them once.
        column: the JSON field or the column that holds the text.
        limit: at most this many characters; the last document is truncated.

    Raises:
        UserError: nothing there, or nothing of a known kind.
    """
    if limit is not None and not 1 <= limit < 1 << 63:  # the largest number that a header can hold
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
    """Return a pass over the documents of a source, beginning at `place`. With a limit, the place also holds how many
    characters are left."""
    if limit is None:
        texts, where = read_from(place)
        return iter(_Documents(texts, None)), where
    texts, where = read_from(place and place["rows"])
    documents = _Documents(texts, limit if place is None else place["left"])
    return iter(documents), lambda: {"rows": where(), "left": documents.left}


def _unlimited(spec: str, column: str) -> TextSource:
    """Return the source named by `spec`, without a limit; `spool` says that a pass is slow."""
    if spec.startswith("hub:"):
        repository, *_ = where = resolve_hub(spec)
        revision = revision_of(repository)
        return TextSource(
            spec,
            json.dumps([*where, revision]),
            None,
            lambda: read_hub(spec, column, revision),
            None if _joins(repository) else lambda place: read_hub_from(spec, column, revision, place),
            spool=True,
        )
    if spec.startswith("task:"):
        read = task_documents(spec)
        return TextSource(spec, f"{spec} {_digest(itertools.islice(read(), _SAMPLE))[0]}", None, read)
    if spec == "stdlib":
        return _files("stdlib", stdlib_files(), column, sys.version)
    return _local(spec, column)


def _in_memory(rows: Rows, column: str, limit: int | None) -> TextSource:
    """Return a source of rows in memory; its fingerprint is a hash of their text up to the limit."""
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
    return TextSource(f"{kind} {digest[:12]}", digest, size, read)


def _digest(texts: Iterable[str]) -> tuple[str, int]:
    """Return the SHA-256 of documents and their boundaries, and their number of bytes."""
    state, size = hashlib.sha256(), 0
    for text in texts:
        data = text.encode()
        state.update(len(data).to_bytes(8, "big") + data)
        size += len(data)
    return state.hexdigest(), size


def stdlib_files() -> list[Path]:
    """Return the files of the running Python's standard library: every *.py without site-packages, tests and idlelib,
    sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {folder for folder in _NOT_STDLIB if folder not in root.parts}
    every = walk(root, lambda name: name in skip or name.startswith("config-"))
    files = [path for path in every if path.suffix == ".py" and not path.name.startswith(_BUILD)]
    if not files:
        raise UserError(f"this Python has no library source files under {root}: give text with a path instead")
    return files


def _local(spec: str, column: str) -> TextSource:
    path = user_path(spec)
    is_pattern = not path.exists() and glob.has_magic(spec)
    if path.is_dir() or is_pattern:
        choice = matching(path) if is_pattern else choose(path, column)
        return replace(_files(spec, choice.read, column, ""), files=(choice.sentence(spec),))
    if not path.exists():
        raise UserError(
            f"source '{spec}' does not exist: give stdlib, a file or folder, a pattern such as 'FOLDER/*.txt', "
            "hub:NAME or task:NAME"
        )
    if suffix_of(path) not in SUFFIXES:
        raise UserError(f"{path} ends in '{path.suffix}', expected {KINDS}")
    return _files(spec, [path], column, "")


def _files(name: str, files: list[Path], column: str, salt: str) -> TextSource:
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

    root = os.path.commonpath([file.parent for file in files]) if files else ""

    def read() -> Iterator[str]:
        alone = len(files) == 1
        for file in files:
            for text in read_documents(file, column, alone=alone):
                yield Document(text, os.path.relpath(file, root))

    return TextSource(name, state.hexdigest(), size, read)


class _Documents:
    """Iterates over the texts that are not blank, at most `limit` characters of them.

    Attributes:
        left: characters left under the limit, None without a limit.
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


HUB = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", None),
    "wikitext": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
"""Short name -> repository and configuration."""
# configurations of repositories given by full name: not all of FineWeb-Edu unless asked for
_CONFIGURATION = dict(HUB.values())
_TITLE = re.compile(r"^ = [^=].*[^=] = \n?$")


def resolve_hub(spec: str) -> tuple[str, str | None, str]:
    """Split `hub:NAME[:CONFIG[:SPLIT]]` into (repository, configuration or None, split). NAME may be a key of `HUB`.

    The repositories of `HUB` have the configuration given there unless another is named.

    >>> resolve_hub("hub:fineweb-edu")
    ('HuggingFaceFW/fineweb-edu', 'sample-10BT', 'train')
    >>> resolve_hub("hub:HuggingFaceFW/fineweb-edu:default")
    ('HuggingFaceFW/fineweb-edu', 'default', 'train')
    >>> resolve_hub("hub:me/corpus::validation")
    ('me/corpus', None, 'validation')
    """
    name, _, rest = spec.removeprefix("hub:").partition(":")
    config, _, split = rest.partition(":")
    if not name or ":" in split:
        raise UserError(f"source '{spec}' is not hub:NAME[:CONFIG[:SPLIT]], for example hub:fineweb-edu")
    repository = HUB[name][0] if name in HUB else name
    return repository, config or _CONFIGURATION.get(repository), split or "train"


def revision_of(repository: str) -> str | None:
    """Return the current commit of a data set on the hub; without a connection the last one known, or None."""
    from huggingface_hub import dataset_info

    note = cache_dir() / "hub" / f"{repository.replace('/', '--')}.txt"
    try:
        sha = dataset_info(repository, timeout=10).sha
    except Exception:  # reading the data set raises the error
        return note.read_text(encoding="utf-8") if note.is_file() else None
    with suppress(UserError):
        write_text(note, sha or "")
    return sha


def read_hub(spec: str, column: str, revision: str | None = None) -> Iterator[str]:
    """Return the texts of a hub data set in its order; WikiText's rows are lines, and are joined into articles.

    Raises:
        UserError: see `streamed_rows`; or the column is missing.
    """
    texts, _ = read_hub_from(spec, column, revision, None)
    return articles(texts) if _joins(resolve_hub(spec)[0]) else texts


def _joins(repository: str) -> bool:
    """Return whether the rows of a data set are lines that have to be joined."""
    return repository == HUB["wikitext"][0]


def read_hub_from(
    spec: str, column: str, revision: str | None, place: dict[str, Any] | None
) -> tuple[Iterator[str], Callable[[], dict[str, Any]]]:
    """Return the texts of a hub data set from a place on, unjoined, and a function that returns the place after the
    last one.

    Raises:
        UserError: as for `read_hub`.
    """
    what = f"source '{spec}'"
    rows, where = streamed_rows(what, *resolve_hub(spec), revision, place)
    return (text for row in rows for text in field_of(row, what, column)), where


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Yield WikiText's lines joined to articles, each starting at a title of the first level, ` = Title = `."""
    article: list[str] = []
    for line in lines:
        if _TITLE.match(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    yield "".join(article)


DOCUMENTS = 40_000
LETTERS, NAMES = "abcdefgh", "PQRS"
MODULUS = 5
STEPS = 6
"""The longest composition, and the deepest nesting."""
LENGTH = 24
"""Approximate number of steps of a document."""


_DRAW = random.Random("permutations")
PERMUTATIONS = {name: dict(zip(LETTERS, _DRAW.sample(LETTERS, len(LETTERS)), strict=True)) for name in NAMES}


def composition(draw: random.Random, steps: int, count: int) -> str:
    """Return a letter, then `count` times `steps` names of permutations with the letter that they lead to."""
    text = letter = draw.choice(LETTERS)
    for _ in range(count):
        names = draw.choices(NAMES, k=steps)
        for name in names:
            letter = PERMUTATIONS[name][letter]
        text += "".join(names) + letter
    return text


def arithmetic(draw: random.Random, steps: int, count: int) -> str:
    """Return `count` expressions of depth `steps`, each with its value modulo five."""
    return "".join(_expression(draw, steps) for _ in range(count))


def _expression(draw: random.Random, depth: int) -> str:
    text, value = str(digit := draw.randrange(MODULUS)), digit
    for _ in range(depth):
        sign, digit = draw.choice("+*"), draw.randrange(MODULUS)
        text = f"({text}{sign}{digit})" if draw.random() < 0.5 else f"({digit}{sign}{text})"
        value = (value + digit if sign == "+" else value * digit) % MODULUS
    return f"{text}{value}"


TASKS: dict[str, Callable[[random.Random, int, int], str]] = {"composition": composition, "arithmetic": arithmetic}
"""Name -> function that returns a text with `count` answers of `steps` steps each. Answers are known and take several
steps in a row:

    task:composition    letters, and where named permutations lead from one to the next, two at a time:   2bPPePQdRPa
    task:arithmetic     nested sums and products modulo five with their values:   2((3+4)*2)4(1+(3*1))4

With the tokenizer bpe:257 a character is a token. A document begins with the number of steps of its answers (the length
of a composition, the depth of nesting). The permutations are the same in all documents. Half of a document of one step
are answers: with fewer a small model learns nothing in four million tokens.

Source: synthetic tasks for depth are from Physics of Language Models 4.1 (Depo, Mano), compositions of permutations
from work on state tracking (Merrill et al., The Illusion of State); these two are ours.
"""


def task_documents(spec: str) -> Callable[[], Iterator[str]]:
    """Return a function that yields the documents of `task:NAME[:COUNT]`, the same ones every time. Raises
    UserError."""
    _, name, *rest = spec.split(":")
    make = _task(name)
    if len(rest) > 1 or not all(part.isdecimal() and int(part) > 1 for part in rest):
        raise UserError(f"source '{spec}': expected task:{name} or task:{name}:COUNT, a number of documents from 2")
    count = int(rest[0]) if rest else DOCUMENTS

    def read() -> Iterator[str]:
        for index in range(count):
            draw = random.Random(f"{name} {index}")
            # documents with few steps are more frequent: longer answers are learned on top of them
            steps = min(draw.randint(1, STEPS), draw.randint(1, STEPS))
            yield f"{steps}{make(draw, steps, LENGTH // steps)}"

    return read


def task_problems(name: str, steps: int, count: int) -> list[tuple[str, str]]:
    """Return beginnings of documents of `steps` steps up to one of the first four answers, each with that answer; none
    is in the documents. Raises UserError."""
    make = _task(name)
    draw = random.Random(f"{name} held out {steps}")
    texts = (f"{steps}{make(draw, steps, draw.randint(1, 4))}" for _ in range(count))
    return [(text[:-1], text[-1]) for text in texts]


def _task(name: str) -> Callable[[random.Random, int, int], str]:
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
