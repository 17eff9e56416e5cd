"""Choose the documents among the files of a folder or of a path pattern, and say which files are left out and why."""

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from attnres.data.readers import CODE, KINDS, PROSE, SUFFIXES, opened, suffix_of
from attnres.errors import UserError
from attnres.reading import read_json
from attnres.text import counted, first_of
from attnres.typed import checked

_SAVED, _SPLITS = "state.json", "dataset_dict.json"
"""Files by which the folders of the library datasets are known: one data set, or its splits in folders of their
names."""
_ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|citation|changelog|requirements)([-_.].*)?|"
    r"(notice|authors|contributing|code_of_conduct|security|changes|cmakelists|urls|manifest|checksums|md5sums?|"
    r"sha\d*sums?|vocab|merges)(\.[a-z]+)*"
)
"""Names of plain-text files about data or code."""
_DESCRIPTION = re.compile(
    r"(dataset_infos?|dataset_dict|state|header|info|.*config|.*\.index|tokenizer.*|special_tokens_map|added_tokens|"
    r"vocab|package(-lock)?|croissant)\.json"
)
"""Names of JSON files that describe a data set, a model, a tokenizer or a package."""
_TRAIN = {"train", "training"}
_HELD_OUT = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation", "heldout", "holdout"}
_FIRST = 1 << 16
"""Characters at the start of a JSON file in which its first row is searched first."""


class _SavedFile(TypedDict):
    filename: str


class _Saved(TypedDict):
    """The fields of a data set's `state.json` that are used here."""

    _data_files: list[_SavedFile]


class _Splits(TypedDict):
    splits: list[str]


@dataclass
class Choice:
    """The files to read, in order, and the names of the files left out, by reason."""

    read: list[Path]
    left: dict[str, list[str]] = field(default_factory=dict)

    def leave(self, reason: str, paths: list[Path], root: Path | None = None) -> None:
        """Remove paths from the files to read, and record them, relative to `root`, under the reason."""
        if paths:
            self.left[reason] = [str(path if root is None else path.relative_to(root)) for path in paths]
            without = set(paths)
            self.read = [path for path in self.read if path not in without]

    def sentence(self, name: str) -> str:
        """Return one line for the source `name`: how many files are read, and which are left out and why."""
        read = counted(len(self.read), "file")
        if not self.left:
            return f"source {name}: {read} read, none left out"
        left = ", ".join(f"{first_of(names, 'other')} ({reason})" for reason, names in self.left.items())
        return f"source {name}: {read} read; left out: {left}. To read those, name them or a pattern"


def walk(root: Path, skipped: Callable[[str], bool], left: list[Path] | None = None) -> Iterator[Path]:
    """Yield files under `root`, sorted by name, without hidden files, links to folders, and folders whose name is in
    `skipped`; append what is left out to `left`."""
    for folder, folders, names in os.walk(root):
        out = {name for name in folders if skipped(name) or os.path.islink(os.path.join(folder, name))}
        out |= {name for name in (*folders, *names) if name.startswith(".")}
        if left is not None:
            left += [Path(folder, name) for name in sorted(out)]
        folders[:] = sorted(set(folders) - out)
        yield from (Path(folder, name) for name in sorted(set(names) - out))


def matching(pattern: Path) -> Choice:
    """Choose the files of a known kind that match a pattern of paths, whatever they are called.

    Raises:
        UserError: no file matches.
    """
    matches = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True)) if not os.path.isdir(path)]
    choice = Choice(matches)
    choice.leave("not of a kind that is read", [path for path in matches if suffix_of(path) not in SUFFIXES])
    if not choice.read:
        raise UserError(f"no file that matches {pattern} is {KINDS}")
    return choice


def choose(folder: Path, column: str) -> Choice:
    """Choose the documents in a folder: those of the split `train` if files or folders have such a name, without files
    that only describe the others.

    Args:
        folder: a folder of files, of `datasets.save_to_disk`, or of a data set in the hub's cache.
        column: the field or column that holds the text.

    Raises:
        UserError: no file of text, or only files named as a test or validation split.
    """
    if (folder / "snapshots").is_dir() and (folder / "refs").is_dir():
        folder = _snapshot(folder)
    if (folder / _SPLITS).is_file():
        return _saved_splits(folder)
    if (folder / _SAVED).is_file():
        return Choice(_saved(folder))
    hidden: list[Path] = []
    choice = Choice(list(walk(folder, lambda name: name == "__pycache__", hidden)))
    choice.leave("hidden, cached or linked", hidden, folder)
    choice.leave("not of a kind that is read", [p for p in choice.read if suffix_of(p) not in SUFFIXES], folder)
    if not choice.read:
        raise UserError(f"folder {folder} has no file that is {KINDS}")
    _leave_descriptions(choice, folder, column)
    _leave_splits(choice, folder)
    return choice


def _snapshot(folder: Path) -> Path:
    """Return the folder of a revision of a data set in the hub's cache: that of `main`, or the only one."""
    revisions = sorted(path.name for path in (folder / "snapshots").iterdir())
    with suppress(OSError):
        main = (folder / "refs" / "main").read_text(encoding="utf-8", errors="replace").strip()
        revisions = [main] if main in revisions else revisions
    if len(revisions) != 1:
        raise UserError(f"{folder} has {counted(len(revisions), 'revision')}: give one, a folder in {folder}/snapshots")
    return folder / "snapshots" / revisions[0]


def _saved_splits(folder: Path) -> Choice:
    splits = checked(read_json(folder / _SPLITS, ours=False), _Splits, folder / _SPLITS, "save it again")["splits"]
    if "train" not in splits and len(splits) != 1:
        raise UserError(f"{folder} has the splits {', '.join(splits)}: name one, for example {folder / splits[0]}")
    split = "train" if "train" in splits else Path(splits[0]).name
    other_splits = [name for name in splits if name != split]
    return Choice(_saved(folder / split), {"another split": other_splits} if other_splits else {})


def _saved(folder: Path) -> list[Path]:
    saved = checked(read_json(folder / _SAVED, ours=False), _Saved, folder / _SAVED, "save it again")
    return [folder / Path(file["filename"]).name for file in saved["_data_files"]]


def _leave_descriptions(choice: Choice, folder: Path, column: str) -> None:
    """Leave out files that only describe other files, unless nothing else is there."""
    every = choice.read
    about = [path for path in every if suffix_of(path) in PROSE and _ABOUT.fullmatch(path.name.lower())]
    described = [path for path in every if _DESCRIPTION.fullmatch(path.name.lower())]
    others = [path for path in every if path not in {*about, *described}]
    if not others:
        return
    choice.leave("about other files", [*about, *described], folder)

    # A few files without the column may belong to a program or describe others. Many are a data set with another
    # column: reading them raises the error for that.
    code = [path for path in others if suffix_of(path) in CODE]
    code_folders = {path.parent for path in code}
    objects, fixtures = [], []
    for path in others:
        first, alone = _first_row(path) if path.suffix.lower() in (".json", ".csv") else (None, False)
        if first is None or (isinstance(first, dict) and column in first):
            continue
        if alone or not isinstance(first, dict):
            objects.append(path)
        elif not code_folders.isdisjoint(path.parents):
            fixtures.append(path)
    left = objects if 2 * len(objects) <= len(others) else []
    left += fixtures if 2 * len(fixtures) < len(others) else []
    choice.leave(f"without rows that have '{column}'", left, folder)
    rows = [path for path in choice.read if suffix_of(path) not in (*PROSE, *CODE)]
    above = {parent for path in rows for parent in path.parents}
    choice.leave("code beside rows", [path for path in code if path.parent in above], folder)


def _first_row(path: Path) -> tuple[object, bool]:
    """Return the first row of a .json or .csv as its values by column, and whether it is a JSON object that stands
    alone.

    The row is None if it cannot be read; reading the file raises the error.
    """
    with suppress(UserError, OSError, ValueError, RecursionError, csv.Error), opened(path) as file:
        if path.suffix.lower() == ".csv":
            header = next(csv.reader(file), None)
            return header and dict.fromkeys(header), False
        text = file.read(_FIRST).lstrip()
        in_list = text.startswith("[")
        while True:
            try:
                first, end = json.JSONDecoder().raw_decode(text[1:].lstrip() if in_list else text)
                return first, not in_list and not (text[end:] + file.read(_FIRST)).strip()
            except ValueError:
                more = file.read(len(text))
                if not more:
                    return None, False
                text += more
    return None, False


def _leave_splits(choice: Choice, folder: Path) -> None:
    """Leave out files named as a test or validation split."""
    splits = {path: _split_of(path.relative_to(folder)) for path in choice.read}
    held_out = [path for path, split in splits.items() if split == "held out"]
    if "train" not in splits.values():  # program folders are called test, too
        held_out = [path for path in held_out if suffix_of(path) not in CODE]
    if len(held_out) == len(choice.read):
        raise UserError(
            f"all text in {folder} is called a test or validation split: to read it, name it, for example {held_out[0]}"
        )
    choice.leave("a test or validation split", held_out, folder)


def _split_of(path: Path) -> str | None:
    """Return `train`, `held out` or None, judged by the words in a file's name or else in its nearest folder's.

    >>> _split_of(Path("data/train-00000-of-00001.parquet")), _split_of(Path("test/a.txt"))
    ('train', 'held out')
    >>> _split_of(Path("c4-validation.00000-of-00008.json.gz")), _split_of(Path("a test of wills.txt"))
    ('held out', None)
    """
    parts = [(path.name, suffix_of(path)), *((part, "") for part in reversed(path.parent.parts))]
    for name, suffix in parts:
        if suffix in CODE:  # train.py and test.py are programs, not splits
            continue
        words = set(re.split(r"[-._\d]+" if suffix in PROSE else r"[^a-z]+", name.lower()))  # a title has spaces
        if words & _HELD_OUT:
            return "held out"
        if words & _TRAIN:
            return "train"
    return None
