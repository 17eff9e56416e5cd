"""Runs that were trained elsewhere, in a comparison or another arm: a study takes them instead of training again."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from attnres.comparison.plan import ComparisonPlan
from attnres.errors import UserError
from attnres.files import is_half_written, locked, replaced_folder
from attnres.reading import read_json
from attnres.training.checkpoint import kept, reconfigure
from attnres.training.config import TrainConfig, differences, to_dict
from attnres.training.records import ADVICE, RunConfig
from attnres.training.run_folder import DIVERGED, ended
from attnres.typed import checked
from lab.measures import MEASURES, Measures, measures_of

PLACES = ("images",)
"""Arguments of a computed run that say where something lies."""


def runs_in(folders: Iterable[Path], *, unfinished: bool = False) -> dict[Path, dict[str, Any]]:
    """The configurations of the finished runs in these folders, or in folders in them, by their folder.

    Args:
        unfinished: those with a checkpoint too, after the finished ones.

    Raises:
        UserError: a folder that is not there.
    """
    runs: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give one with the run folders to adopt, or a file runs.jsonl")
        for name in ("summary.json", DIVERGED, *(["checkpoint"] if unfinished else [])):
            for path in _inside(folder, name):
                if (path.parent / "config.json").is_file():
                    config = path.parent / "config.json"
                    runs.setdefault(path.parent, dict(checked(read_json(config), RunConfig, config, ADVICE)))
    return runs


def _inside(folder: Path, name: str) -> list[Path]:
    """What has this name in a run folder, or in one of a folder of them, a study, or a folder OUT of studies; not what
    is being written there."""
    paths = (path for depth in range(5) for path in folder.glob("*/" * depth + name))
    return sorted(path for path in paths if not any(map(is_half_written, path.relative_to(folder).parts)))


def alike(run: TrainConfig, runs: dict[Path, dict[str, Any]]) -> Iterator[Path]:
    """The folders of those runs that are trained as this one, elsewhere, whatever text they call theirs; first those
    which have the checkpoints that it is to keep, of these the finished ones."""
    folder, ours = Path(run.out or "."), to_dict(run)

    def rank(there: Path) -> tuple[bool, bool]:
        return not all(kept(there, step).is_dir() for step in run.keep_at), not ended(there)

    for there in sorted(runs, key=rank):
        if there.resolve() != folder.resolve() and set(differences(ours, runs[there])) <= {"data.source"}:
            yield there


def is_among(run: dict[str, Any], others: Iterable[dict[str, Any]]) -> bool:
    """Whether one of the others is trained as this run, of `to_dict`, and keeps the same checkpoints."""
    same = (other for other in others if sorted(other["keep_at"]) == sorted(run["keep_at"]))
    return any(not differences(run, other) for other in same)


def adopt(plan: ComparisonPlan, data: dict[str, Any], runs: dict[Path, dict[str, Any]]) -> list[str]:
    """Copy into a plan's folders what was trained with the same configuration on the same data, wherever that lay; of
    finished runs no checkpoint, which only a run that goes on needs, but for those that they are to keep.

    Returns:
        The names of the runs that were adopted.

    Raises:
        UserError: a process is training such a run.
    """
    names = []
    for name, run in plan.runs.items():
        folder = Path(run.out or ".")
        same = (there for there in alike(run, runs) if _same_data(there, data))
        there = None if folder.exists() else next(same, None)
        if there is None:
            continue
        left_out = [".*", *([] if run.keep_at else ["kept"])]
        left_out += ["checkpoint"] if ended(there) else []
        with nullcontext() if ended(there) else locked(there), replaced_folder(folder) as temporary:
            shutil.copytree(there, temporary, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
            reconfigure(temporary, to_dict(run))
        names.append(name)
    return names


def same_text(plan: ComparisonPlan, data: dict[str, Any], runs: dict[Path, dict[str, Any]]) -> None:
    """Refuse data.json's content `data` where finished `runs` with the plan's settings of data, from a text of the same
    name, had other data: UserError. Runs of one study are compared whatever arm they are of."""
    ours = to_dict(plan.first)["data"]
    for folder, config in runs.items():
        theirs = config["data"]
        asked = same_name(theirs.get("source"), ours["source"]) and {**theirs, "source": ours["source"]} == ours
        if asked and (folder / "data.json").is_file() and not _same_data(folder, data):
            raise UserError(
                f"{folder} was trained on another text than {ours['source']} has now: give the same --source, or "
                "choose another --out"
            )


def same_name(there: str | None, here: str | None) -> bool:
    """Whether two places may hold the same text or images, wherever they are: their last names are the same."""
    return Path(there or "").name == Path(here or "").name


def computed_in(folders: Iterable[Path]) -> list[Measures]:
    """What the computed runs in these folders, or in folders in them, gave."""
    paths = (path for folder in folders for path in _inside(folder, MEASURES))
    return [measures for path in paths if "arguments" in (measures := measures_of(path.parent))]


def same_computation(run: Measures, function: str, arguments: dict[str, Any]) -> bool:
    """Whether it was this call, wherever its images lay: folders or archives of the same name."""
    theirs = run.get("arguments") or {}
    return (
        run.get("function") == function
        and arguments.keys() == theirs.keys()
        and all(same_name(theirs[k], v) if k in PLACES else theirs[k] == v for k, v in arguments.items())
    )


def _same_data(folder: Path, data: dict[str, Any]) -> bool:
    path = folder / "data.json"
    return path.is_file() and read_json(path) == data
