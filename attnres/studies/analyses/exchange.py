"""What a lower loss is worth: how many steps the standard model needs for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnres.studies.analyses.scaling import Fit, fit


@dataclass(frozen=True)
class Exchange:
    """Final losses of the standard model over how long it was trained, each with a whole schedule of its own.

    Through three lengths or more goes L = E + A n^-a; through two a line in the logarithm of the steps, which flatters
    what is better, as losses fall ever more slowly. Beyond the lengths that were trained it goes on: `within` says
    where that is.

    Attributes:
        steps: lengths, ascending. losses: means over seeds, falling; lengths whose losses
            noise has in another order are taken together.
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]

    def equal(self, loss: float) -> float:
        """The steps at which the standard model has this loss; NaN where fewer than two losses differ."""
        if len(self.steps) < 2:
            return math.nan
        if len(self.steps) > 2:
            return self._curve.compute(loss)
        (first, last), (high, low) = self.steps, self.losses
        return first * (last / first) ** ((loss - high) / (low - high))

    @cached_property
    def _curve(self) -> Fit:
        return fit(self.steps, self.losses)

    def within(self, loss: float) -> float:
        """The nearest loss that was trained."""
        return min(max(loss, self.losses[-1]), self.losses[0])

    def saved(self, loss: float, base: float, step_ratio: float = 1.0) -> float:
        """The share of steps that a mechanism with this loss saves against one with the loss `base` after as many: 0.2
        is 20 % fewer. Of wall-clock, where a step of it takes `step_ratio` times as long."""
        return 1 - step_ratio * self.equal(base) / self.equal(loss)


def exchange(steps: Sequence[float], losses: Sequence[float]) -> Exchange:
    """Return the exchange rate from lengths and their mean losses, in any order."""
    order = np.argsort(steps)
    lengths, fallen = np.asarray(steps, dtype=float)[order], np.array(falling(np.asarray(losses)[order].tolist()))
    distinct = list(dict.fromkeys(fallen.tolist()))
    together = [float(np.exp(np.log(lengths[fallen == loss]).mean())) for loss in distinct]
    return Exchange(tuple(together), tuple(distinct))


def falling(values: Sequence[float]) -> list[float]:
    """The nearest sequence in least squares that nowhere rises: neighbours that do are averaged.

    >>> falling([3.0, 1.0, 2.0, 0.5])
    [3.0, 1.5, 1.5, 0.5]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] < mean:
            last, number = blocks.pop()
            mean, count = (mean * count + last * number) / (count + number), count + number
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
