"""What a residual learned between two steps of its training, from the snapshots that a run keeps.

A query w with key gain g chooses by its direction and its length: how far the direction turned, and how sharp the read
is before and after. What a text's reads are made of at a step needs all weights of that step, a checkpoint (`keep_at`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnres.errors import UserError
from attnres.inspect import notebook
from attnres.inspect.geometry import directions, sharpness
from attnres.inspect.routing import Named
from attnres.models.model_files import residual_at, snapshots
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.residuals import Read, Residual
from attnres.text import short


@dataclass(frozen=True, repr=False)
class StepChange(Named):
    """What changed from one step of a run to a later one.

    Attributes:
        first, last: the steps. layout: the reads.
        turned: of each read the cosine of w * g at both steps; None where it has no query, or one of zero length.
        before, after: sharpness of each read, |w g| sqrt(d); None where it has no query.
        tables: of what is learned besides queries (gates, coefficients) the largest change of a number, by name.
    """

    first: int
    last: int
    layout: Sequence[Read]
    turned: list[float | None]
    before: list[float | None]
    after: list[float | None]
    tables: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if name != "layout"} | {"reads": self.reads}

    def __repr__(self) -> str:
        return f"StepChange(step {self.first:,} to {self.last:,}: {len(self.layout)} reads)"

    def frame(self) -> Any:
        """A data frame with a row a read: turned, before, after."""
        rows = zip(self.reads, self.turned, self.before, self.after, strict=True)
        return notebook.frame({"read": r, "turned": t, "before": b, "after": a} for r, t, b, a in rows)

    def _repr_html_(self) -> str:
        rows = [
            (read, short(turned), short(before), short(after))
            for read, turned, before, after in zip(self.reads, self.turned, self.before, self.after, strict=True)
        ]
        head = ("read", "cosine of its query at both", f"sharpness at {self.first:,}", f"at {self.last:,}")
        return notebook.table(repr(self), head, rows)


def step_change(first: Residual, last: Residual, steps: tuple[int, int]) -> StepChange:
    """What changed from one state of a residual to another, those of two steps."""
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
    """What the residual of a run, a folder, learned from step `first` to step `last`; None is the last that was kept.

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
    """Which steps there are."""
    if not kept:
        return "a run that kept some (one of a residual that learns nothing keeps none, nor one that learns matrices)"
    return f"one of its evaluations, {', '.join(f'{step:,}' for step in kept)}"
