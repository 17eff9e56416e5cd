"""Runs with what their user sees of them: the time left, how far each is, how they stand."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attnres.progress import STEPS, Bar, Bars
from attnres.studies.child import Child
from attnres.studies.children import Runner, run_children
from attnres.studies.pace import Ended, Pace
from attnres.text import duration


@dataclass
class Watch:
    """What the user sees of children: a line before each with the time left in all, bars of several at once, and how
    the runs stand."""

    bars: Bars
    pace: Pace
    jobs: int
    number: int  # of the last one that began
    total: int
    standing: Callable[[], Table | None]
    on_end: Callable[[Child], None]
    shown: dict[Path, Bar] = field(default_factory=dict)

    def start(self, child: Child) -> None:
        """One begins."""
        self.number += 1
        when = f", about {duration(self.pace.seconds_left / self.jobs)} left in all" if self.pace.done else ""
        self._print(f"run {self.number}/{self.total} {child.name}{when}", style="bold")
        self.shown[child.folder] = self.bars.add(child.name, child.steps, child.latest()[0])

    def end(self, child: Child) -> None:
        """One has ended."""
        wall = time.monotonic() - child.began
        self.shown.pop(child.folder).remove()
        if child.has_failed:
            self.pace.left.pop(child.name)
            return self._print(f"{child.name} failed in {duration(wall)}: the others go on")
        self.pace.ended(child.name, wall)
        if self.jobs > 1:
            self._print(f"{child.name} {'diverged' if child.has_diverged else 'finished'} in {duration(wall)}")
        self.on_end(child)
        if self.pace.left and self.bars.progress.disable and (table := self.standing()) is not None:
            self._print(table)

    def poll(self, running: list[Child]) -> None:
        """Time goes by."""
        for child in running:
            step, loss = child.latest()
            if loss is not None:
                self.shown[child.folder].update(step, f"loss {loss:.3f}")

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
    standing: Callable[[], Table | None] = lambda: None,
    on_end: Callable[[Child], None] = lambda child: None,
) -> None:
    """Run all of them, one line before each with the time left in all; of several at once there are bars.

    Args:
        done: finished runs like these.
        run: what runs them; none is `run_children`.
        until: none begins after this moment (`time.monotonic`).
        standing: gives a table of how the runs stand: above the bars, or printed whenever one has ended.
        on_end: called with one that has ended.

    Raises:
        UserError, Interrupted: as `run_children`.
    """
    pace = Pace({child.name: child.left for child in children}, list(done))
    total = len(done) + len(children)
    if done:
        say.print(f"{len(done)} of {total} runs are finished already", highlight=False)
    if not children:
        return
    with Bars(STEPS, shown=jobs > 1, stays=False, above=standing, console=say) as bars:
        watch = Watch(bars, pace, jobs, len(done), total, standing, on_end)
        (run or run_children)(
            children,
            jobs=jobs,
            on_start=watch.start,
            on_end=watch.end,
            on_poll=watch.poll,
            log_of=lambda child: child.folder.parent / "logs" / f"{child.folder.name}.log" if jobs > 1 else None,
            until=until,
        )
