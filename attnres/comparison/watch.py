"""Show the progress of runs: time left, steps done, and a table of held-out losses."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from attnres.comparison.children import Child, Runner, Watch, run_children
from attnres.comparison.plan import ComparisonPlan
from attnres.progress import STEPS, Bar, Bars, grid
from attnres.text import duration, label_and_seed, number, run_name
from attnres.training.records import growing


class Ended(NamedTuple):
    """A finished run: its name, its size (`Child.size`), and its wall-clock seconds."""

    name: str
    size: float
    seconds: float


@dataclass
class ProgressRate:
    """Estimates the time left from the finished runs: from those that differ only in their seed, if there are any, else
    from all."""

    left: dict[str, float]
    """Work left of each unfinished run, by name, in units of `Child.size`."""
    done: list[Ended] = field(default_factory=list)

    def ended(self, name: str, seconds: float) -> None:
        """Record a run that has ended."""
        self.done.append(Ended(name, self.left.pop(name), seconds))

    @property
    def seconds_left(self) -> float:
        """Return the seconds left if the runs follow one another. At least one run must have ended."""
        groups = dict[str, list[Ended]]()
        for run in self.done:
            groups.setdefault(_without_seed(run.name), []).append(run)
        return math.fsum(size * _rate(groups.get(_without_seed(name), self.done)) for name, size in self.left.items())


def _without_seed(name: str) -> str:
    parsed = label_and_seed(name)
    return parsed[0] if parsed else name


def _rate(runs: Sequence[Ended]) -> float:
    """Return the seconds per unit of size; 0 if all steps had been made before."""
    size = math.fsum(run.size for run in runs)
    return math.fsum(run.seconds for run in runs) / size if size else 0.0


class RunStatus:
    """Reads the held-out losses of a comparison's runs from their folders while they are written.

    Args:
        folder: the comparison's folder. plan: its variants and runs.
    """

    def __init__(self, folder: Path, plan: ComparisonPlan) -> None:
        self.folder, self.baseline, self.names = folder, plan.baseline, list(plan.runs)
        self._losses: dict[str, tuple[int, dict[int, float]]] = {}

    def losses(self, name: str) -> dict[int, float]:
        """Return the held-out losses of a run so far, by step."""
        path = self.folder / name / "metrics.jsonl"
        try:
            size = path.stat().st_size
            if self._losses.get(name, (-1, {}))[0] != size:
                self._losses[name] = size, dict(growing(path, "val"))
        except OSError:
            return {}
        return self._losses[name][1]

    def finished(self) -> list[str]:
        """Return the names of the runs that have ended."""
        return [name for name in self.names if (self.folder / name / "summary.json").is_file()]

    def comparable(self) -> bool:
        """Return whether a run of the baseline and one of another variant have ended."""
        labels = {label for label, _ in filter(None, map(label_and_seed, self.finished()))}
        return self.baseline in labels and len(labels) > 1

    def measured(self) -> bool:
        """Return whether the baseline and another variant have held-out losses at the same step and seed."""
        return any(self._gap(name) is not None for name in self.names)

    def _gap(self, name: str) -> tuple[int, float] | None:
        """Return the last step at which both the run and the baseline of its seed were evaluated, and the loss
        difference there."""
        label, seed = label_and_seed(name) or ("", 0)
        losses, base = self.losses(name), {} if label == self.baseline else self.losses(run_name(self.baseline, seed))
        step = max(losses.keys() & base.keys(), default=None)
        return None if step is None else (step, losses[step] - base[step])

    def table(self) -> Table | None:
        """Return a row for each evaluated run: step, loss, and the difference to the baseline of its seed at their last
        common step. None before the first evaluation."""
        table = grid("run", right=("step", "held-out loss", f"minus {self.baseline}", "at step"))
        for name in self.names:
            losses = self.losses(name)
            if not losses:
                continue
            gap = self._gap(name)
            cells = ("", "") if gap is None else (number(gap[1], 3, signed=True), f"{gap[0]:,}")
            table.add_row(name, f"{max(losses):,}", number(losses[max(losses)], 3), *cells)
        return table if table.row_count else None


@dataclass
class ProgressWatch(Watch):
    """Shows runs in the terminal: before each a line with the total time left, bars if several run at once, and the
    table of losses."""

    bars: Bars
    rate: ProgressRate
    jobs: int
    number: int  # number of the last run that was started
    total: int
    status: Callable[[], Table | None]
    on_end: Callable[[Child], None]
    on_poll: Callable[[], None]
    shown: dict[Path, Bar] = field(default_factory=dict)

    def start(self, child: Child) -> None:
        self.number += 1
        when = f", about {duration(self.rate.seconds_left / self.jobs)} left in all" if self.rate.done else ""
        self._print(f"run {self.number}/{self.total} {child.name}{when}", style="bold")
        self.shown[child.folder] = self.bars.add(child.name, child.steps, child.latest()[0])

    def end(self, child: Child) -> None:
        wall = time.monotonic() - child.began
        self.shown.pop(child.folder).remove()
        if child.has_failed:
            self.rate.left.pop(child.name)
            return self._print(f"{child.name} failed in {duration(wall)}: the others go on")
        self.rate.ended(child.name, wall)
        if self.jobs > 1:
            self._print(f"{child.name} {'diverged' if child.has_diverged else 'finished'} in {duration(wall)}")
        self.on_end(child)
        if self.rate.left and self.bars.progress.disable and (table := self.status()) is not None:
            self._print(table)

    def poll(self, running: list[Child]) -> None:
        for child in running:
            step, loss = child.latest()
            if loss is not None:
                self.shown[child.folder].update(step, f"loss {loss:.3f}")
        self.on_poll()

    def log_of(self, child: Child) -> Path | None:
        return child.folder.parent / "logs" / f"{child.folder.name}.log" if self.jobs > 1 else None

    def _print(self, what: str | Table, style: str | None = None) -> None:
        self.bars.console.print(what, style=style, highlight=False)


def train_all(
    children: list[Child],
    done: Sequence[Ended],
    *,
    jobs: int,
    say: Console,
    run: Runner | None = None,
    until: float = math.inf,
    status: Callable[[], Table | None] = lambda: None,
    on_end: Callable[[Child], None] = lambda child: None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Run all children and show their progress: a line with the total time left before each, and bars if several run at
    once.

    Args:
        done: earlier finished runs, to estimate times from.
        run: the function that runs the children; None is `run_children`.
        until: no run begins after this moment (`time.monotonic`).
        status: returns the table of losses, which stands above the bars, or is printed whenever a run has ended.
        on_end: called with each run that has ended. on_poll: called several times a second.

    Raises:
        UserError, Interrupted: as `run_children`.
    """
    rate = ProgressRate({child.name: child.left for child in children}, list(done))
    total = len(done) + len(children)
    if done:
        say.print(f"{len(done)} of {total} runs are finished already", highlight=False)
    if not children:
        return
    with Bars(STEPS, shown=jobs > 1, stays=False, above=status, console=say) as bars:
        watch = ProgressWatch(bars, rate, jobs, len(done), total, status, on_end, on_poll)
        (run or run_children)(children, watch, jobs=jobs, until=until)
