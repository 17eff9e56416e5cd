"""When a folder may be used for a run, and what a resumed run leaves of it."""

from pathlib import Path
from typing import Any

from attnres.errors import UserError
from attnres.folders import kind_of, refuse_other
from attnres.models.model_files import snapshots
from attnres.reading import read_json
from attnres.training.records import ADVICE, Finished, RunConfig
from attnres.training.sameness import same_configuration, same_text
from attnres.training.validate import windows_files
from attnres.typed import checked

DIVERGED = "diverged.json"
"""In the folder of a run whose loss or gradient was not finite: the step at which that was seen."""


def ended(folder: Path) -> bool:
    """Whether a run of this folder is finished, or diverged and would again."""
    return any((folder / name).is_file() for name in ("summary.json", DIVERGED))


def claim(folder: str | Path, config: dict[str, Any], *, resume: bool) -> dict[str, Any] | None:
    """Whether a run of `config` may be (re)started in `folder`; returns the summary if it is finished already.

    Raises UserError for a folder that holds something else, a run of another configuration, or a run and no `resume`.
    Changes nothing, for another process may be working there: see `attnres.files.locked`.
    """
    folder = refuse_other(folder, "run")
    if kind_of(folder) is None:
        return None
    summary = folder / "summary.json"
    if not resume:
        state = "a finished run" if summary.exists() else "an unfinished run"
        advice = "choose another --out" if summary.exists() else "continue it with --resume, choose another --out"
        raise UserError(f"{folder} holds {state}: {advice}, or remove the folder")
    path = folder / "config.json"
    theirs = dict(checked(read_json(path), RunConfig, path, ADVICE))
    same_configuration(config, theirs, f"the run in {folder}")
    return dict(checked(read_json(summary), Finished, summary, ADVICE)) if summary.exists() else None


def free_beside(folder: Path) -> Path:
    """A folder that is not there yet, beside one that was taken away: NAME.saved, NAME.saved2, ..."""
    names = (folder.with_name(f"{folder.name}.saved{number}") for number in ["", *range(2, 1000)])
    return next(path for path in names if not path.exists())


def same_data(folder: str | Path, record: dict[str, Any]) -> None:
    """Refuse to go on with a run whose data.json is not `record` (`attnres.training.data.data_record`): UserError.

    A folder without data.json (a new run, or one of an earlier version) passes.
    """
    path = Path(folder) / "data.json"
    if path.exists():
        same_text(record, read_json(path), f"the run in {folder}")


def forget_after(folder: str | Path, step: int) -> None:
    """Remove the held-out losses and snapshots of steps past `step`; metrics.jsonl does the same for its lines."""
    for measured, path in (*windows_files(folder).items(), *snapshots(folder).items()):
        if measured > step:
            path.unlink()
