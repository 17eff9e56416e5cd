"""Determine the kind of a folder, and whether a command may write into it.

A command writes into a folder that does not exist, is empty, or holds content of the command's kind; content of another
kind is never replaced.
"""

from pathlib import Path
from typing import Literal

from attnres.errors import UserError
from attnres.files import LOCK, in_the_way, is_half_written, refuse_special, user_path
from attnres.reading import read_json

Kind = Literal["comparison", "prepared data", "run", "model", "inspection", "figures", "report", "study", "other"]

_NAMES: dict[Kind, str] = {
    "comparison": "a comparison of runs",
    "prepared data": "prepared data",
    "run": "a training run",
    "model": "a model",
    "inspection": "an inspection",
    "figures": "figures",
    "report": "a report",
    "study": "a study",
    "other": "other files",
}
_MARKS: dict[str, Kind] = {
    "compare.json": "comparison",
    "study.json": "study",
    "header.json": "prepared data",
    "config.json": "model",
    "inspection.json": "inspection",
    "captions.md": "figures",
    "report.html": "report",
}
"""Files by which a folder's kind is known; the first one present counts, so a run with a report in it is a run."""


def kind_of(folder: Path) -> Kind | None:
    """Return the kind of a folder's content; None if it does not exist or holds only a lock or half-written files.

    Raises:
        UserError: the path is a file, or a folder that cannot be read.
    """
    refuse_special(folder)
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: expected a folder to write into, choose another")
    try:
        names = {path.name for path in folder.iterdir() if path.name != LOCK and not is_half_written(path.name)}
    except OSError as error:
        raise UserError(f"cannot look into {folder}: {error.strerror or error}") from error
    kind: Kind = next((kind for name, kind in _MARKS.items() if name in names), "other")
    if kind == "model":
        fields = read_json(folder / "config.json", ours=False)
        if isinstance(fields, dict) and "optim" in fields:
            return "run"
    return kind if names else None


def refuse_other(folder: str | Path, *kinds: Kind) -> Path:
    """Return the folder if a command that writes one of these kinds may write into it; without kinds it must be empty.

    Raises:
        UserError: the folder holds something else, or cannot be written to.
    """
    path = user_path(folder)
    present = kind_of(path)
    if present is not None and present not in kinds:
        expected = " or ".join(["an empty folder", *(_NAMES[kind] for kind in kinds)])
        raise UserError(f"{path} is not empty and holds {_NAMES[present]}: expected {expected}, choose another folder")
    if barrier := in_the_way(path):
        raise UserError(f"cannot write into {path}: {barrier} is no folder that this user may write into")
    return path


def refuse_other_file(path: str | Path, keys: set[str], companion: str | None = None) -> Path:
    """Return the path of a JSON file to write, if the path is free or holds an earlier file of its kind, which has
    `keys`.

    Args:
        companion: the name of a second file, which may exist only together with the first.

    Raises:
        UserError: the path holds another file, or its folder cannot be written to.
    """
    target = user_path(path)
    refuse_special(target)
    if target.is_dir():
        raise UserError(f"{target} is a folder: give the name of a file to write")
    if target.is_file():
        try:
            fields = read_json(target)
        except UserError:
            fields = None
        if not isinstance(fields, dict) or not keys <= set(fields):
            raise UserError(f"{target} is there and is no earlier result of this command: choose another name")
    elif companion is not None and target.with_name(companion).exists():
        raise UserError(f"{target.with_name(companion)} exists and would be replaced: choose another name")
    if barrier := in_the_way(target.parent):
        raise UserError(f"cannot write into {target.parent}: {barrier} is no folder that this user may write into")
    return target
