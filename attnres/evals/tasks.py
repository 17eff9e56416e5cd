"""Tasks as data: the source of their items, and the text that a model is given.

The texts are lm-eval's (0.4.13). A local file has one JSON object a line, in one of three shapes:

    {"query", "choices", "gold"}                    the choices continue the query after one space
    {"context_options", "continuation", "gold"}     one continuation after each context (WinoGrande)
    {"context", "continuation"}                     a word to predict (LAMBADA)

or it is plain text (`readers.PROSE`), whose perplexity is taken. Rows of the hub are brought into the same shapes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attnres.data.readers import PROSE
from attnres.errors import UserError, install, unknown
from attnres.files import user_path
from attnres.hub import dataset_rows
from attnres.reading import parse_json, read_text
from attnres.text import listed
from attnres.typed import is_text

LM_EVAL = "lm-eval:"
"""Prefix of the name of a task that lm-eval runs."""

Row = dict[str, Any]


class Item(NamedTuple):
    """One item of a task.

    Attributes:
        pairs: (context, continuation) of each choice; the space between them belongs to the continuation.
        gold: the index of the right choice.
        characters: length of each choice without that space, the divisor of length-normalised accuracy.
    """

    pairs: tuple[tuple[str, str], ...]
    gold: int
    characters: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A task with its items in memory.

    Attributes:
        name: the name that was asked for.
        kind: choice (accuracy), word (LAMBADA), or text (perplexity).
        source: the file, or repository, configuration and split.
        items: for `choice` and `word`; `text`: for `text`.
        per_token: whether one normalised by tokens has been published.
    """

    name: str
    kind: Literal["choice", "word", "text"]
    source: str
    items: tuple[Item, ...] = ()
    text: str = ""
    per_token: bool = False


@dataclass(frozen=True, kw_only=True)
class KnownTask:
    """A built-in task: its repository on the hub, how a row becomes an item, and its local file (else NAME*.jsonl)."""

    title: str
    hub: tuple[str, str | None, str]
    files: str = ""
    row: Callable[[Row], Row] = dict
    per_token: bool = False


def wikitext(lines: Sequence[str]) -> str:
    """Return WikiText's lines as its hub version has them, blank ones empty and others with their end, joined by blank
    lines.

    WikiText-2's test split is 287,644 tokens of GPT-2 then, the number that its perplexities are known by.
    """
    return "\n\n".join(f"{line}\n" if line.strip() else "" for line in lines)


def _hellaswag(row: Row) -> Row:
    def clean(text: str) -> str:  # WikiHow's markup
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return {"query": clean(query), "choices": [clean(end) for end in row["endings"]], "gold": int(row["label"])}


def _lambada(row: Row) -> Row:
    context, _, word = row["text"].rpartition(" ")
    return {"context": context, "continuation": word}


TASKS: dict[str, KnownTask] = {
    "wikitext2": KnownTask(
        title="WikiText-2", files="wikitext2*", hub=("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
    ),
    "lambada": KnownTask(title="LAMBADA", hub=("EleutherAI/lambada_openai", "default", "test"), row=_lambada),
    "hellaswag": KnownTask(
        title="HellaSwag",
        hub=("Rowan/hellaswag", None, "validation"),
        row=_hellaswag,
        per_token=True,
    ),
}
OF_LM_EVAL = ("arc_easy", "arc_challenge", "piqa", "winogrande", "boolq")
"""Former names of built-in tasks that lm-eval now runs, with the same items and scores."""


def read_task(name: str, data: str | Path | None = None, limit: int | None = None) -> Task:
    """Read a task by name, from the folder `data` or, without one, from the hub; or from the file at a path.

    Args:
        limit: at most this many items; perplexity is limited later, in windows.

    Raises:
        UserError: an unknown name, a missing or malformed file (with its line), a hub that cannot be read.
    """
    if name in TASKS:
        known = TASKS[name]
        path = None if data is None else _file_in(user_path(data), known.files or f"{name}*.jsonl", name)
        if known.hub[0] == "Salesforce/wikitext":
            if path is None:
                lines = [row["text"].rstrip("\n") for row in _hub_rows(name, known)]
            else:
                lines = read_text(path).removesuffix("\n").split("\n")
            return Task(name, "text", _source(known, path), text=_some(wikitext(lines), str(path or name)))
        rows = enumerate(_hub_rows(name, known) if path is None else (), 1)
        of_hub = (_item(known.row(row), f"{known.hub[0]} row {number}") for number, row in rows)
        items = of_hub if path is None else _lines(path)
        return _task(name, _source(known, path), items, limit, per_token=known.per_token)
    if name in OF_LM_EVAL:
        raise UserError(f"task {name} is lm-eval's: name it {LM_EVAL}{name} ({install('eval')})")
    path = user_path(name)
    # A path of a file is read as a file, even if a task has that name.
    name_of_file = path.name if path.stem in TASKS else path.stem
    if path.suffix == ".jsonl":
        return _task(name_of_file, str(path), _lines(path), limit)
    if path.suffix in PROSE:
        return Task(name_of_file, "text", str(path), text=_some(read_text(path), str(path)))
    raise unknown("task", name, [*TASKS, f"{LM_EVAL}NAME", "FILE.jsonl", "FILE.txt"])


def _task(name: str, source: str, items: Iterator[Item], limit: int | None, **options: Any) -> Task:
    kept_items = []
    for item in items:
        if limit is not None and len(kept_items) == limit:
            break
        kept_items.append(item)
    if not kept_items:
        raise UserError(f"{source} has no items")
    kinds = {len(item.pairs) == 1 for item in kept_items}
    if len(kinds) > 1:
        raise UserError(f"{source} mixes words to predict and choices: expected one of them in all lines")
    return Task(name, "word" if kinds.pop() else "choice", source, tuple(kept_items), **options)


def _source(known: KnownTask, path: Path | None) -> str:
    return str(path) if path is not None else ":".join(part for part in known.hub if part)


def _file_in(folder: Path, pattern: str, name: str) -> Path:
    if not folder.is_dir():
        fault = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {fault}: --data is the folder of the tasks' files; without it they come from the hub"
        )
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        what = f"has {listed([file.name for file in files])}" if files else f"has no {pattern}"
        raise UserError(f"{folder} {what}: expected one file for the task {name}")
    return files[0]


def _some(text: str, source: str) -> str:
    if not text.strip():
        raise UserError(f"{source} holds no text")
    return text


def _lines(path: Path) -> Iterator[Item]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        yield _item(parse_json(line, where, ours=False), where)


def _item(row: Any, where: str) -> Item:
    """Return a row of one of the three shapes as an item. Raises UserError with the row's place."""
    shape = set(row) if isinstance(row, Mapping) else set()
    if shape >= {"query", "choices", "gold"}:
        text, choices = row["query"], row["choices"]
        if isinstance(text, str) and is_text(text) and _texts(choices, 2) and _index(row["gold"], len(choices)):
            pairs = tuple((text, f" {choice}") for choice in choices)
            return Item(pairs, row["gold"], tuple(len(choice) for choice in choices))
    elif shape >= {"context_options", "continuation", "gold"}:
        options, rest = row["context_options"], row["continuation"]
        if _texts(options, 2) and _texts([rest], 1) and _index(row["gold"], len(options)):
            pairs = tuple((option, f" {rest}") for option in options)
            return Item(pairs, row["gold"], (len(rest),) * len(options))
    elif shape >= {"context", "continuation"} and _texts([row["context"], row["continuation"]], 2):
        return Item(((row["context"], f" {row['continuation']}"),), 0, (len(row["continuation"]),))
    raise UserError(
        f"{where}: expected query (text), choices (two or more texts) and gold (the right one's number, from 0); or "
        "context_options, continuation and gold; or context and continuation"
    )


def _texts(value: Any, least: int) -> bool:
    return (
        isinstance(value, list) and len(value) >= least and all(isinstance(v, str) and v and is_text(v) for v in value)
    )


def _index(value: Any, count: int) -> bool:
    return type(value) is int and 0 <= value < count


def _hub_rows(name: str, known: KnownTask) -> Iterator[Row]:
    return dataset_rows(f"task {name}", *known.hub, otherwise=", or give the folder of its file with --data")
