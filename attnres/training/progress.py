"""What the user sees while a model trains."""

import time

from rich.console import Console
from rich.progress import MofNCompleteColumn

from attnres.progress import LINES_EVERY, Bars


class Bar(Bars):
    """The progress of one run, `name`, over `steps` steps; `shown=False` shows nothing."""

    def __init__(self, name: str, steps: int, start: int = 0, *, shown: bool = True, console: Console | None = None):
        super().__init__(MofNCompleteColumn(), shown=shown, console=console)
        self.name, self.steps = name, steps
        self.start, self.began, self.said = start, time.monotonic(), 0.0
        self.task = self.progress.add_task(name, total=steps, completed=start, figures="")

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
