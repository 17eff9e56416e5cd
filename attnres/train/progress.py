"""What the user sees while a model trains: a bar on a terminal, plain lines elsewhere, nothing if not wanted."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINES_EVERY = 20.0
"""Seconds between two plain lines."""


class Bar:
    """The progress of one run, `name`, over `steps` steps; `shown=False` shows nothing."""

    def __init__(self, name: str, steps: int, start: int = 0, *, shown: bool = True, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self.name, self.steps, self.shown = name, steps, shown
        self.live = shown and self.console.is_terminal
        self.start, self.began, self.said = start, time.monotonic(), 0.0
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.task = self.progress.add_task(name, total=steps, completed=start, figures="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def update(self, step: int, loss: float, val_loss: float | None, tokens_per_s: float) -> None:
        """Show where the run is; losses in nats a token."""
        if not self.shown:
            return
        figures = f"loss {loss:.3f}" + (f"  held-out {val_loss:.3f}" if val_loss is not None else "")
        figures += f"  {tokens_per_s:,.0f} tokens/s"
        self.progress.update(self.task, completed=step, figures=figures)
        now = time.monotonic()
        if not self.live and (now - self.said >= LINES_EVERY or step == self.steps):
            self.said = now
            left = (now - self.began) / max(1, step - self.start) * (self.steps - step)
            self.say(f"{self.name}  step {step}/{self.steps}  {figures}  left {left:.0f} s")

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.shown:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
