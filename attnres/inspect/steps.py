"""What a residual learned between two steps of its training, from the snapshots that a run keeps.

A query w with key gain g chooses by its direction and its length: how far the direction turned, and how sharp the read
is before and after. Contributions at a step need all weights of that step, a checkpoint (`keep_at`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnres.errors import UserError
from attnres.inspect import notebook
from attnres.inspect.geometry import directions, sharpness
from attnres.models.model_files import residual_at, snapshots
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.residuals import Read, Residual


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

    def as_table(self) -> notebook.Table:
        head = ("read", "cosine of its query at both", f"sharpness at {self.first:,}", f"at {self.last:,}")
        labels = [read.label for read in self.layout]
        return notebook.Table(repr(self), head, zip(labels, self.turned, self.before, self.after, strict=True))


def step_change(first: Residual, last: Residual, steps: tuple[int, int]) -> StepChange:
    """Compare the states of one residual at two steps."""
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
    """Return how the residual of a run, a folder, changed from step `first` to `last`, by default the last that was
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
    """Return the steps that were kept, as a phrase for an error."""
    if not kept:
        return "a run that kept some (one of a residual that learns nothing keeps none, nor one that learns matrices)"
    return f"one of its evaluations, {', '.join(f'{step:,}' for step in kept)}"
