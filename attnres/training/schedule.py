"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore.

Steps count from 1: `step` is the update about to be made, `steps` the last one. Every function returns the
learning rate as a fraction of its peak.
"""

import math
from typing import TYPE_CHECKING

from attnres.errors import unknown

if TYPE_CHECKING:
    from attnres.training.config import OptimConfig


def rates(step: int, steps: int, optim: "OptimConfig") -> tuple[float, float]:
    """What an update of a run takes of each parameter's peak rate, and the share of that which those of the residual
    take."""
    rate = fraction_of_peak(
        step, steps, schedule=optim.schedule, warmup=optim.warmup, decay=optim.decay, floor=optim.min_lr_ratio
    )
    return rate, residual_fraction(step, steps, hold=optim.residual_hold, warmup=optim.residual_warmup)


def warm_up(step: int, steps: int) -> float:
    """Linear from 1/steps at the first update to 1 at update `steps`; 1 after it and where there is no warm-up."""
    return min(1.0, step / steps) if steps > 0 else 1.0


def cosine(step: int, steps: int, *, warmup: int = 0, floor: float = 0.0) -> float:
    """Half a cosine from 1 at the end of the warm-up to `floor` at the last step.

        floor + (1 - floor) (1 + cos(pi p)) / 2,   p = (step - warmup) / (steps - warmup)

    >>> [round(cosine(step, 4), 3) for step in (1, 2, 4)]
    [0.854, 0.5, 0.0]
    """
    if step <= warmup:
        return warm_up(step, warmup)
    progress = min(1.0, (step - warmup) / (steps - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def wsd(step: int, steps: int, *, warmup: int = 0, decay: int = 0, floor: float = 0.0) -> float:
    """Warm-up, stable, decay: 1 until `decay` steps before the end, then a line down to `floor` at the last step.

    >>> [wsd(step, 10, warmup=2, decay=4) for step in (1, 2, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step <= steps - decay:
        return warm_up(step, warmup)
    return floor + (1 - floor) * max(0.0, (steps - step) / decay)


def residual_fraction(step: int, steps: int, *, hold: float = 0.0, warmup: float = 0.0) -> float:
    """What the residual's own parameters take of the schedule: 0 for the first `hold` of the steps, then a line up to
    1 over the next `warmup` of them.

    >>> [residual_fraction(step, 10, hold=0.2, warmup=0.4) for step in (2, 3, 4, 6, 10)]
    [0.0, 0.25, 0.5, 1.0, 1.0]
    """
    held = round(hold * steps)
    return warm_up(step - held, round(warmup * steps)) if step > held else 0.0


def fraction_of_peak(
    step: int, steps: int, *, schedule: str = "cosine", warmup: float = 0.0, decay: float = 0.2, floor: float = 0.0
) -> float:
    """The schedule by name, `warmup` and `decay` as fractions of `steps`; raises UserError for an unknown name."""
    warm = round(warmup * steps)
    if schedule == "cosine":
        return cosine(step, steps, warmup=warm, floor=floor)
    if schedule == "wsd":
        return wsd(step, steps, warmup=warm, decay=min(round(decay * steps), steps - warm), floor=floor)
    raise unknown("schedule", schedule, ("cosine", "wsd"))
