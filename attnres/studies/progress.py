"""What the user sees while several runs train at once: a bar each on a terminal, lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from attnres.studies.children import Child

SHARE, SECONDS = 0.1, 60.0
"""A line for a run comes after so much more of its steps, or after so many seconds, whichever is sooner."""


class Watch:
    """The progress of the running children, read from their metrics; `shown=False` shows nothing."""

    def __init__(self, say: Console, *, shown: bool):
        self.say, self.shown = say, shown
        self.live = shown and say.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        self.progress = Progress(
            *columns, TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), console=say, disable=not self.live
        )
        self.tasks: dict[str, TaskID] = {}
        self.starts: dict[str, tuple[float, int]] = {}
        self.said: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

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
                self.say.print(
                    f"{child.name}  step {step}/{child.steps}  {figures}", highlight=False, markup=False, soft_wrap=True
                )

    def remove(self, child: Child) -> None:
        """The child has ended."""
        self.progress.remove_task(self.tasks.pop(child.name))


def duration(seconds: float) -> str:
    """Hours, minutes or seconds, to the precision that an estimate deserves.

    >>> duration(42), duration(310), duration(8000)
    ('42 s', '5 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
