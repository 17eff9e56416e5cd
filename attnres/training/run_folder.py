"""Claim, write and resume the folder of a run. Only the first process writes."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnres.errors import UserError
from attnres.files import write_json, write_text
from attnres.folders import kind_of, refuse_other
from attnres.models.model_files import snapshots
from attnres.reading import read_json
from attnres.training import checkpoint, environment
from attnres.training.config import TrainConfig, same_configuration, same_text, to_dict
from attnres.training.parallel import Processes
from attnres.training.records import ADVICE, TRACKED, Finished, Metrics, RunConfig, Tracker, tracked
from attnres.training.validate import windows_files
from attnres.typed import checked

DIVERGED = "diverged.json"
"""File in the folder of a run whose loss or gradient was not finite, with the step."""


def ended(folder: Path) -> bool:
    """Return whether the run in this folder is finished, or diverged and would do so again."""
    return any((folder / name).is_file() for name in ("summary.json", DIVERGED))


def claim(folder: str | Path, config: dict[str, Any], *, resume: bool) -> dict[str, Any] | None:
    """Return the summary of a finished run of `config` in `folder`; None if it may be started or continued there.

    Raises UserError for a folder that holds something else, a run of another configuration, or a run without `resume`.
    Changes nothing, because another process may be using the folder: see `attnres.files.locked`.
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
    stored = dict(checked(read_json(path), RunConfig, path, ADVICE))
    same_configuration(config, stored, f"the run in {folder}")
    return dict(checked(read_json(summary), Finished, summary, ADVICE)) if summary.exists() else None


def same_data(folder: str | Path, record: dict[str, Any]) -> None:
    """Refuse to continue a run whose data.json differs from `record` (`attnres.training.data.data_record`). Raises
    UserError.

    A folder without data.json (a new run, or one of an earlier version) passes.
    """
    path = Path(folder) / "data.json"
    if path.exists():
        same_text(record, read_json(path), f"the run in {folder}")


# ------------------------------------------------------------------ the folder of a run in progress


class Output:
    """The files of a run, except its checkpoints and its model.

    Attributes:
        config: the run's configuration; its `out` is the folder to which it is written, which changes if the folder is
            removed.
        gone: the folder that was removed or renamed, if one was.
    """

    def __init__(self, config: TrainConfig, who: Processes, in_place: Callable[[], bool] | None = None) -> None:
        """Store the arguments, without touching the disk. `in_place` returns whether the folder still exists, since
        somebody may rename or remove it."""
        self.config, self.who = config, who
        self.in_place = in_place
        self.gone: Path | None = None
        self.metrics: Metrics | None = None
        self.environment: dict[str, Any] = {}
        self.records: dict[str, dict[str, Any]] = {}

    @property
    def folder(self) -> Path:
        """Return the folder to which the run is written now."""
        return Path(self.config.out or ".")

    def open(self, described: dict[str, Any], records: dict[str, dict[str, Any]], kept: int) -> None:
        """Create the folder, or restore its state at step `kept` (-1: before any measurement).

        Only the first process does this.

        Args:
            described: the machine (`attnres.training.environment.describe`).
            records: the records to write at the start, by file name.
        """
        config, folder, tracker = self.config, self.folder, None
        if config.track != "none":  # before anything is written, because it may fail to start
            records = {TRACKED: {**tracked(folder)}} | records
            same = records[TRACKED]["id"]
            try:
                tracker = Tracker(config.track, folder, config.name or "", same, to_dict(config), max(0, kept))
            except BaseException:
                if not (folder / "config.json").exists():  # not a run yet, so the tracker's file would belong to none
                    shutil.rmtree(folder / config.track, ignore_errors=True)
                raise
        self.records = records
        write_json(folder / "config.json", to_dict(config))  # first: it marks the folder as a run
        for name, content in records.items():
            write_json(folder / name, content)
        self.describe(described, resumed=kept > 0)
        (folder / DIVERGED).unlink(missing_ok=True)
        for step, path in (*windows_files(folder).items(), *snapshots(folder).items()):
            if step > kept:  # `Metrics` drops the lines of later steps
                path.unlink()
        if self.gone is None and kept in config.keep_at and not checkpoint.kept(folder, kept).exists():
            checkpoint.keep(folder, kept)  # the run was killed after the checkpoint was saved
        self.metrics = Metrics(folder, kept, tracker)

    def describe(self, described: dict[str, Any], *, resumed: bool) -> None:
        """Write environment.json; for a resumed run, add to its first environment."""
        self.environment = described
        environment.record(self.folder / "environment.json", described, resumed=resumed)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        if self.metrics:
            self.metrics.write(kind, step, **values)

    def sync(self) -> None:
        """Flush the metrics to the disk."""
        if self.metrics:
            self.metrics.sync()

    def is_away(self) -> bool:
        """Return whether the folder, or the metrics in it, were removed or renamed; False on all but the first
        process."""
        here = self.in_place is None or self.in_place()
        return self.metrics is not None and not (here and self.metrics.in_place())

    def move_beside(self, step: int) -> None:
        """Continue in a folder beside the one that was removed, with the metrics so far."""
        gone = self.gone = self.folder
        self.in_place = None
        names = (gone.with_name(f"{gone.name}.saved{number}") for number in ["", *range(2, 1000)])
        free = next(path for path in names if not path.exists())
        self.config = dataclasses.replace(self.config, out=self.who.share(str(free)))
        if self.metrics:
            lines = self.metrics.text()
            self.metrics.close()
            write_text(self.folder / "metrics.jsonl", lines)
            self.open(self.environment, self.records, step)

    def close(self) -> None:
        """Close the metrics and the tracker."""
        if self.metrics:
            self.metrics.close()
