"""What the user sees while several runs train at once."""

import time

from rich.console import Console
from rich.progress import MofNCompleteColumn, TaskID

from attnres.progress import Bars
from attnres.studies.children import Child
from attnres.text import duration

SHARE, SECONDS = 0.1, 60.0
"""A line for a run comes after so much more of its steps, or after so many seconds, whichever is sooner."""


class Watch(Bars):
    """The progress of the running children, read from their metrics; `shown=False` shows nothing."""

    def __init__(self, console: Console, *, shown: bool):
        super().__init__(MofNCompleteColumn(), left=False, shown=shown, console=console)
        self.tasks: dict[str, TaskID] = {}
        self.starts: dict[str, tuple[float, int]] = {}
        self.said: dict[str, tuple[float, int]] = {}

    def add(self, child: Child) -> None:
        """Begin to watch a child."""
        step, _ = child.latest()
        self.tasks[child.name] = self.progress.add_task(child.name, total=child.steps, completed=step, figures="")
        self.starts[child.name] = self.said[child.name] = (time.monotonic(), step)

    def update(self, running: list[Child]) -> None:
        """Look where the children are."""
        for child in running if self.shown else []:
            step, loss = child.latest()
            now, (began, first) = time.monotonic(), self.starts[child.name]
            if loss is None or step <= first:
                continue
            left = duration((now - began) / (step - first) * (child.steps - step))
            figures = f"loss {loss:.3f}  left {left}"
            self.progress.update(self.tasks[child.name], completed=step, figures=figures)
            then, before = self.said[child.name]
            due = step - before >= SHARE * child.steps or now - then >= SECONDS
            if not self.live and step > before and due:
                self.said[child.name] = (now, step)
                self.say(f"{child.name}  step {step}/{child.steps}  {figures}")

    def remove(self, child: Child) -> None:
        """The child has ended."""
        self.progress.remove_task(self.tasks.pop(child.name))
