"""What a lower loss is worth: how many steps the standard model needs for it."""

import bisect
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lab.analyses.scaling import Fit, fit


@dataclass(frozen=True)
class Exchange:
    """Final losses of the standard model over how long it was trained, each with a whole schedule of its own.

    At a measured length `equal` is that length. Between two of them it follows the shape of a fit to all, L = E + A
    n^-a, stretched so that it meets both. Beyond them (`extrapolates`) it follows the fit from the nearest one. Two
    lengths alone are joined by a line in the logarithm of the steps, which flatters what is better, as losses fall
    ever more slowly.

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
        after = min(max(bisect.bisect_left(self.losses, -loss, key=operator.neg), 1), len(self.losses) - 1)
        (high, low), (first, last) = self.losses[after - 1 : after + 1], self.steps[after - 1 : after + 1]
        if len(self.steps) > 2:
            early, late, here = (self._curve.compute(one) for one in (high, low, loss))
            if self.extrapolates(loss):
                end, fitted = (first, early) if loss > high else (last, late)
                return math.inf if math.isinf(here) else end * here / fitted
            if math.isfinite(late):  # else the fit ends above the lower loss and has no shape there
                return first * (last / first) ** (math.log(here / early) / math.log(late / early))
        return first * (last / first) ** ((loss - high) / (low - high))

    @cached_property
    def _curve(self) -> Fit:
        return fit(self.steps, self.losses)

    def within(self, loss: float) -> float:
        """The nearest loss that was trained."""
        return min(max(loss, self.losses[-1]), self.losses[0])

    def extrapolates(self, loss: float) -> bool:
        """Whether a loss lies beyond those that were trained, so that its steps are the fit's."""
        return self.within(loss) != loss

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
