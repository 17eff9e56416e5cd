"""What the user sees of long work: bars on a terminal, plain lines elsewhere, nothing if not wanted."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnres.terminal import say

LINES_EVERY = 20.0
"""Seconds between two plain lines."""


class Bars:
    """Bars that stand on a terminal while the block runs; a task's text `figures` is beside its bar.

    Args:
        count: the column that says how much is done.
        left: whether a column says how much time is left.
        shown: False shows nothing.
        stays: whether the bars stay on the terminal after the block.
        console: standard error by default.

    Attributes:
        live: whether there are bars; where there are none, lines have to do.
    """

    def __init__(
        self,
        count: ProgressColumn,
        *,
        left: bool = True,
        shown: bool = True,
        stays: bool = True,
        console: Console | None = None,
    ):
        self.console = console or Console(stderr=True)
        self.shown, self.live = shown, shown and self.console.is_terminal
        self.progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(bar_width=None), count),
            *(TextColumn("{task.fields[figures]}"), TimeElapsedColumn()),
            *((TextColumn("left"), TimeRemainingColumn()) if left else ()),
            console=self.console,
            transient=not stays,
            disable=not self.live,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """A line, above the bars where there are some."""
        if self.shown:
            say(self.console, text)


@contextmanager
def counting(what: str, total: int | None, unit: str, *, shown: bool = True) -> Generator[Callable[[int], None]]:
    """A bar on a terminal, gone when the block ends; the block gets what it calls with how many more are done."""
    with Bars(TextColumn("{task.completed:,.0f} " + unit), shown=shown, stays=False) as bars:
        task = bars.progress.add_task(what, total=total, figures="")
        yield lambda more: bars.progress.advance(task, more)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hides Transformers' own progress bars for a while; they would break into ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
