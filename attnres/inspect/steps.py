"""What a residual learned between two steps of its training, from the snapshots that a run keeps.

A query w with key gain g chooses by its direction and its length: how far the direction turned, and how sharp the read
is before and after. What a text's reads are made of at a step needs all weights of that step, a checkpoint (`keep_at`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from attnres.errors import UserError
from attnres.inspect import notebook
from attnres.inspect.attribution import by_size
from attnres.inspect.geometry import directions, sharpness
from attnres.inspect.inspection import By, Inspection, Routing
from attnres.models.model_files import residual_at, snapshots
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.progress import grid, say
from attnres.residuals import Read, Residual
from attnres.text import number, short
from attnres.training.checkpoint import kept


@dataclass(frozen=True, repr=False)
class StepChange(notebook.Named, notebook.Result):
    """What changed from one step of a run to a later one.

    Attributes:
        first, last: the steps. layout: the reads.
        turned: of each read the cosine of w * g at both steps; None where it has no query, or one of zero length.
        before, after: sharpness of each read, |w g| sqrt(d); None where it has no query.
        tables: of what is learned besides queries (gates, coefficients) the largest change of a number, by name.

    The data frame has a row a read: turned, before, after.
    """

    first: int
    last: int
    layout: Sequence[Read]
    turned: list[float | None]
    before: list[float | None]
    after: list[float | None]
    tables: dict[str, float]

    def _about(self) -> str:
        return f"step {self.first:,} to {self.last:,}: {len(self.layout)} reads"

    def _records(self) -> Iterator[dict[str, Any]]:
        rows = zip(self.reads, self.turned, self.before, self.after, strict=True)
        return ({"read": r, "turned": t, "before": b, "after": a} for r, t, b, a in rows)

    def _repr_html_(self) -> str:
        head = ("read", "cosine of its query at both", f"sharpness at {self.first:,}", f"at {self.last:,}")
        rows = ((read, *map(short, values)) for read, *values in (row.values() for row in self._records()))
        return notebook.table(repr(self), head, rows)


def step_change(first: Residual, last: Residual, steps: tuple[int, int]) -> StepChange:
    """Compare one state of a residual with another, those of two steps."""
    one, two = directions(first), directions(last)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
    cosines = (one * two).sum(1) / lengths
    turned = [float(np.clip(value, -1.0, 1.0)) if np.isfinite(value) else None for value in cosines]
    nothing: list[float | None] = [None] * len(turned)
    tables, others = first.tables(), last.tables()
    moved = {
        name: float(
            np.nan_to_num((others[name].values - tables[name].values).detach().abs().double().cpu().numpy()).max()
        )
        for name in tables.keys() & others.keys()
        if tables[name].values.numel()
    }
    before, after = sharpness(first) or nothing, sharpness(last) or nothing
    return StepChange(*steps, last.layout(), turned, before, after, dict(sorted(moved.items())))


def between(run: str | Path | Checkpoint, first: int, last: int | None = None) -> StepChange:
    """Return what the residual of a run, a folder, learned from step `first` to step `last`; None is the last that was
    kept.

    Raises:
        UserError: no run there, no snapshots of these steps, or the first is not before the last.
    """
    checkpoint = run if isinstance(run, Checkpoint) else open_checkpoint(run)
    if checkpoint.run is None:
        raise UserError(f"{run} is no run's folder: snapshots of a residual lie in that of its training")
    kept = snapshots(checkpoint.run)
    last = max(kept, default=0) if last is None else last
    for step in (first, last):
        if step not in kept:
            raise UserError(
                f"{checkpoint.name} kept no snapshot of its residual at step {step:,}: expected {_there(kept)}"
            )
    if first >= last:
        raise UserError(
            f"step {first:,} of {checkpoint.name} is not before step {last:,}: expected an earlier one first, "
            f"{_there(kept)}"
        )
    residuals = [residual_at(checkpoint.config, kept[step]) for step in (first, last)]
    return step_change(residuals[0], residuals[1], (first, last))


def _there(kept: Mapping[int, Any]) -> str:
    """Name the steps that there are."""
    if not kept:
        return "a run that kept some (one of a residual that learns nothing keeps none, nor one that learns matrices)"
    return f"one of its evaluations, {', '.join(f'{step:,}' for step in kept)}"


EDGES = 10
"""Of which the change is listed."""


def change_since(checkpoint: Checkpoint, step: int) -> StepChange:
    """Return what the residual of a run's model learned since that step.

    Raises:
        UserError: no run, or no snapshot of that step.
    """
    if checkpoint.run is None or checkpoint.step is None:
        raise UserError(f"--since looks at an earlier step of a run's training: {checkpoint.name} is no run's folder")
    return between(checkpoint, step, checkpoint.step)


def since_table(
    change: StepChange,
    checkpoint: Checkpoint,
    now: Inspection,
    load: Callable[[Checkpoint], Any],
    inspected: Callable[[Any, str], Inspection],
    by: By,
    console: Console,
) -> dict[str, Any]:
    """Tables and record of what changed.

    Args:
        now: what the model makes of the text.
        load: the model of a checkpoint, as that one was loaded.
        inspected: what another model makes of the text, with its name.
    """
    console.print()
    record = change.to_dict()
    if any(value is not None for value in change.after):
        table = grid("read", right=("cosine of its query", f"sharpness at {change.first:,}", f"at {change.last:,}"))
        for row in zip(change.reads, change.turned, change.before, change.after, strict=True):
            table.add_row(row[0], *map(short, row[1:]))
        console.print(table)
    for name, largest in change.tables.items():
        say(console, f"{name}: a number changed by {number(largest)} at most")
    assert checkpoint.run is not None
    folder = kept(checkpoint.run, change.first)
    if not folder.is_dir():
        say(console, not_kept(change.first))
        return record
    then = inspected(
        load(open_checkpoint(folder, trust_remote_code=checkpoint.trusted)),
        f"{checkpoint.title()} at step {change.first:,}",
    )
    losses = [number(one.losses["mean"]) for one in (then, now)]
    say(console, f"\nloss {losses[0]} at step {change.first:,}, {losses[1]} at {change.last:,}")
    earlier, later = Routing.of(then, by), Routing.of(now, by)
    if earlier is None or later is None:
        return record
    rows = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(earlier.values, later.values, strict=True)]
    names = [read.name for read in later.layout], [[one.name for one in read.sources] for read in later.layout]
    edges = by_size(*names, rows)
    table = grid("edge", right=(f"{later.by} at {change.first:,}", f"at {change.last:,}", "change"))
    before = {edge[:2]: edge[2] for edge in by_size(*names, earlier.values)}
    for read, source, moved in edges[:EDGES]:
        value = before[read, source]
        table.add_row(f"{read} ← {source}", short(value), short(value + moved), short(moved, signed=True))
    console.print(table)
    return record | {later.by: [{"read": r, "source": s, "change": value} for r, s, value in edges]}


def not_kept(step: int) -> str:
    """Say why a step's residual was kept and nothing else."""
    return (
        f"what reads were made of at step {step:,} needs all weights of that step, and only the residual's were kept: "
        f"train with --keep-at {step}"
    )
