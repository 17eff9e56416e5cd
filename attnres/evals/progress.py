"""What the user sees while a model is scored: a bar on a terminal, plain lines elsewhere, nothing if not wanted."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINES_EVERY = 20.0
"""Seconds between two plain lines."""


class Bar:
    """The progress of one model over all its tasks, in tokens; `shown=False` shows nothing."""

    def __init__(self, name: str, tokens: int, *, shown: bool = True, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self.name, self.tokens, self.shown = name, max(1, tokens), shown
        self.live = shown and self.console.is_terminal
        self.done, self.began = 0, time.monotonic()
        self.said = self.began
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task(name, total=self.tokens, figures="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def advance(self, tokens: int, task: str) -> None:
        """So many more tokens were run, for `task`."""
        self.done += tokens
        now = time.monotonic()
        rate = self.done / max(1e-9, now - self.began)
        figures = f"{task}  {rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=self.done, figures=figures)
        if self.shown and not self.live and now - self.said >= LINES_EVERY:
            self.said = now
            left = (self.tokens - self.done) / rate
            text = f"{self.name}  {self.done / self.tokens:.0%}  {figures}  left {left:.0f} s"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
