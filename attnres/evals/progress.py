"""What the user sees while a model is scored."""

import time

from rich.console import Console
from rich.progress import TaskProgressColumn

from attnres.progress import LINES_EVERY, Bars


class Bar(Bars):
    """The progress of one model over all its tasks, in tokens; `shown=False` shows nothing."""

    def __init__(self, name: str, tokens: int, *, shown: bool = True, console: Console | None = None):
        super().__init__(TaskProgressColumn(), shown=shown, console=console)
        self.name, self.tokens = name, max(1, tokens)
        self.done, self.began = 0, time.monotonic()
        self.said = self.began
        self.task = self.progress.add_task(name, total=self.tokens, figures="")

    def advance(self, tokens: int, task: str) -> None:
        """So many more tokens were run, for `task`."""
        self.done += tokens
        now = time.monotonic()
        rate = self.done / max(1e-9, now - self.began)
        figures = f"{task}  {rate:,.0f} tokens/s"
        self.progress.update(self.task, completed=self.done, figures=figures)
        if not self.live and now - self.said >= LINES_EVERY:
            self.said = now
            left = (self.tokens - self.done) / rate
            self.say(f"{self.name}  {self.done / self.tokens:.0%}  {figures}  left {left:.0f} s")
