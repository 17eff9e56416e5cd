"""What a study takes instead of running it: of what is adopted, of its own runs.jsonl, of the studies beside it."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnres.training.run_folder import ended
from lab.adopt import computed_in, runs_in, same_computation
from lab.archive import ARCHIVE, archived_in, unpacked
from lab.begin import RECORD
from lab.design import Arm, Computed
from lab.measures import MEASURES, Measures


@dataclass(frozen=True)
class Elsewhere:
    """Trained runs by their folder, and what computed ones gave."""

    trained: dict[Path, dict[str, Any]]
    computed: list[Measures]

    def trained_for(self, arm: Arm) -> dict[Path, dict[str, Any]]:
        """The trained runs that will do for an arm's: with weights where others start from them, and where something is
        still to be measured of a finished one."""

        def will_do(path: Path) -> bool:
            measured = not arm.measure or not ended(path) or (path / MEASURES).is_file()
            return (path / "model").is_dir() or (measured and not arm.started_from)

        return {path: run for path, run in self.trained.items() if will_do(path)}

    def computed_as(self, runs: Computed, name: str) -> Measures | None:
        """What the same call as this run's gave there, if it is there."""
        ours = runs.function, runs.runs[name].arguments
        return next((one for one in self.computed if same_computation(one, *ours)), None)


def archived_alone(folder: Path) -> list[tuple[str, str]]:
    """Arm and name of the runs that a study's runs.jsonl alone has, as in a repository."""
    lines = archived_in(folder / ARCHIVE) if (folder / ARCHIVE).is_file() else []
    names = [(line["arm"], line["run"]) for line in lines if "run" in line]
    return [(arm, run) for arm, run in names if not (folder / arm / run).exists()]


@contextmanager
def elsewhere(folder: Path, adopted: Sequence[Path], archived: Sequence[tuple[str, str]]) -> Generator[Elsewhere]:
    """What a study in `folder` may take: what is adopted, what its own runs.jsonl alone has (`archived`), and the
    finished runs of the studies beside it."""
    siblings = [path for path in sorted(folder.parent.glob("*")) if path != folder and (path / RECORD).is_file()]
    alone = [path / ARCHIVE for path in siblings if archived_alone(path)]
    with unpacked([folder / ARCHIVE] if archived else []) as own, unpacked(alone) as theirs:
        taken = [*adopted, *own]
        yield Elsewhere(runs_in(taken, unfinished=True) | runs_in([*siblings, *theirs]), computed_in(taken))
