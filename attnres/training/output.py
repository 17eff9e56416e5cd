"""The folder of a run while it goes on: what describes it, the metrics, a folder beside one that is taken away.

The first process opens it and writes; of the others' nothing comes.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnres.files import write_json, write_text
from attnres.training import checkpoint, environment
from attnres.training.config import TrainConfig, to_dict
from attnres.training.metrics import TRACKED, Metrics, Tracker, tracked
from attnres.training.parallel import Processes
from attnres.training.run_folder import DIVERGED, forget_after, free_beside


class Output:
    """The files of a run but for its checkpoints and its model.

    Attributes:
        config: the run's; its `out` is where the run is written, which changes when the folder is taken away.
        gone: the folder that was taken away, if one was.
    """

    def __init__(self, config: TrainConfig, who: Processes, in_place: Callable[[], bool] | None = None) -> None:
        """Touch nothing yet. `in_place` says whether the folder is still there: somebody may rename or remove it."""
        self.config, self.who = config, who
        self.in_place = in_place
        self.gone: Path | None = None
        self.metrics: Metrics | None = None
        self.environment: dict[str, Any] = {}
        self.records: dict[str, dict[str, Any]] = {}

    @property
    def folder(self) -> Path:
        """Where the run is written, now."""
        return folder_of(self.config)

    def open(self, described: dict[str, Any], records: dict[str, dict[str, Any]], kept: int) -> None:
        """Make the folder, or make it what it was at step `kept` (-1: before anything was measured).

        Only the first process does.

        Args:
            described: the machine (`attnres.training.environment.describe`).
            records: what the run begins with, by file.
        """
        config, folder, tracker = self.config, self.folder, None
        if config.track != "none":  # before anything is written: it may not start
            records = {TRACKED: {**tracked(folder)}} | records
            same = records[TRACKED]["id"]
            try:
                tracker = Tracker(config.track, folder, config.name or "", same, to_dict(config), max(0, kept))
            except BaseException:
                if not (folder / "config.json").exists():  # no run yet, and what the tracker began would be no run's
                    shutil.rmtree(folder / config.track, ignore_errors=True)
                raise
        self.records = records
        write_json(folder / "config.json", to_dict(config))  # first: it makes the folder one of ours
        for name, content in records.items():
            write_json(folder / name, content)
        self.describe(described, resumed=kept > 0)
        (folder / DIVERGED).unlink(missing_ok=True)
        forget_after(folder, kept)
        if self.gone is None and kept in config.keep_at and not checkpoint.kept(folder, kept).exists():
            checkpoint.keep(folder, kept)  # killed after it was saved
        self.metrics = Metrics(folder, kept, tracker)

    def describe(self, described: dict[str, Any], *, resumed: bool) -> None:
        """Write environment.json, of a run that was resumed beside what it was."""
        self.environment = described
        environment.record(self.folder / "environment.json", described, resumed=resumed)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        if self.metrics:
            self.metrics.write(kind, step, **values)

    def sync(self) -> None:
        """Return when the metrics are on the disk."""
        if self.metrics:
            self.metrics.sync()

    def is_away(self) -> bool:
        """Whether the folder, or the metrics in it, are no longer where they were; False but in the first process."""
        here = self.in_place is None or self.in_place()
        return self.metrics is not None and not (here and self.metrics.in_place())

    def move_beside(self, step: int) -> None:
        """Go on in a folder beside the one that was taken away, with the metrics so far."""
        self.gone, self.in_place = self.folder, None
        self.config = dataclasses.replace(self.config, out=self.who.share(str(free_beside(self.gone))))
        if self.metrics:
            lines = self.metrics.text()
            self.metrics.close()
            write_text(self.folder / "metrics.jsonl", lines)
            self.open(self.environment, self.records, step)

    def close(self) -> None:
        """Close the metrics and the tracker."""
        if self.metrics:
            self.metrics.close()


def folder_of(config: TrainConfig) -> Path:
    """The folder of a run."""
    return Path(config.out or ".")
