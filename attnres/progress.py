"""Print lines and tables in the terminal, and show progress: bars on a terminal, plain lines in a pipe, or nothing."""

import logging
import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnres.errors import DEBUG
from attnres.text import duration


def wide(console: Console | None = None) -> Console:
    """Return the console to print on; in a file or a pipe lines do not wrap. Text in brackets is not markup."""
    console = console or Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 400
    return console


def say(console: Console, line: str) -> None:
    """Print a line of text without interpreting markup."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def grid(*left: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without lines: some columns aligned left, then `right` aligned right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in left:
        table.add_column(title)
    for title in right:
        table.add_column(title, justify="right")
    return table


LINES_EVERY = 30.0
"""Seconds between two plain lines of a bar."""
STEPS = "step {task.completed:.0f}/{task.total:.0f}"
"""Format of the column that shows how many steps are done, for `Bars`."""


class _BarsBelow(Progress):
    """Bars with a renderable above them."""

    def __init__(self, above: Callable[[], RenderableType | None], *columns: ProgressColumn, **options: Any) -> None:
        self._above = above
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        if (above := self._above()) is not None:
            yield above
        yield from super().get_renderables()


class Bars:
    """Shows bars on a terminal while the block runs; otherwise each prints a line now and then.

    Args:
        count: the column for the work done: a format of rich's `task`, or a column; by default a percentage.
        rate: formats the work done a second.
        shown: whether anything is shown.
        stays: whether finished work stays visible: the bar on a terminal, otherwise a last line.
        above: returns a renderable to show above the bars on a terminal, or None.
        console: standard error by default.
    """

    def __init__(
        self,
        count: str | ProgressColumn = "{task.percentage:.0f}%",
        *,
        rate: Callable[[float], str] = lambda rate: "",
        shown: bool = True,
        stays: bool = True,
        above: Callable[[], RenderableType | None] = lambda: None,
        console: Console | None = None,
    ):
        self.console = console or Console(stderr=True)
        self.rate, self.shown, self.stays = rate, shown, stays
        self.count = TextColumn(count) if isinstance(count, str) else count
        self.progress = _BarsBelow(
            above,
            *(TextColumn("{task.description}"), BarColumn(bar_width=None), self.count),
            *(TextColumn("{task.fields[figures]}"), TimeElapsedColumn()),
            console=self.console,
            transient=not stays,
            disable=not (shown and self.console.is_terminal),
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are some."""
        if self.shown:
            say(self.console, text)

    def add(self, name: str, total: float | None, done: float = 0) -> "Bar":
        """Add a bar for work of size `total`, of which `done` was done before."""
        return Bar(self, name, total, done)


class Bar:
    """One piece of work: a bar on a terminal, otherwise a line every `LINES_EVERY` seconds."""

    def __init__(self, bars: Bars, name: str, total: float | None, done: float):
        self.bars, self.name, self.total, self.done, self.first = bars, name, total, done, done
        self.began = self.said = time.monotonic()
        self.ended = False
        self.task = bars.progress.add_task(name, total=total, completed=int(done), figures="")

    def begin(self, name: str) -> None:
        """Start the next piece of work, as large as the last one."""
        self.name, self.first, self.began, self.ended = name, 0.0, time.monotonic(), False
        self.update(0)

    def advance(self, more: float, figures: str = "") -> None:
        """Add `more` to the work done."""
        self.update(self.done + more, figures)

    def update(self, done: float, figures: str = "") -> None:
        """Set the work done; the line shows `figures`, the rate and the time left."""
        self.done, now = done, time.monotonic()
        rate = (done - self.first) / max(1e-9, now - self.began)
        parts = [figures, self.bars.rate(rate)]
        if self.total is not None and rate > 0:
            parts.append(f"left {duration(max(0.0, self.total - done) / rate)}")
        figures = "  ".join(filter(None, parts))
        self.bars.progress.update(self.task, description=self.name, total=self.total, completed=done, figures=figures)
        last = self.bars.stays and self.total is not None and done >= self.total and not self.ended
        if self.bars.progress.disable and (last or now - self.said >= LINES_EVERY):
            self.said, self.ended = now, self.ended or last
            task = next(task for task in self.bars.progress.tasks if task.id == self.task)
            self.bars.say("  ".join(filter(None, (self.name, str(self.bars.count.render(task)).strip(), figures))))

    def finish(self) -> None:
        """Show the work as complete, even if `total` was an estimate."""
        self.total = self.done
        self.update(self.done)

    def remove(self) -> None:
        """Remove the bar."""
        self.bars.progress.remove_task(self.task)


@contextmanager
def counting(what: str, total: int | None, unit: str, *, shown: bool = True) -> Generator[Callable[[float], None]]:
    """Show a bar on a terminal while the block runs; give the block a function to call with the number of items
    done."""
    with Bars("{task.completed:,.0f} " + unit, shown=shown, stays=False) as bars:
        yield bars.add(what, total).advance


@contextmanager
def errors_alone(name: str) -> Generator[None]:
    """Let the logger of this name show nothing but errors inside the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hide Transformers' progress bars inside the block, which would disturb this package's, and its report of a model
    that does not load, which becomes one sentence; --debug shows it."""
    from transformers.utils import logging as transformers_logging

    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    if DEBUG not in os.environ:
        transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()
