"""Whether a gap shrinks as training goes on: its slope against the logarithm of the budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lab.analyses.noise import Noise


@dataclass(frozen=True)
class Trend:
    """gap = a + slope log2(budget): `slope` is what a doubling of the budget adds, `margin` what that has to exceed."""

    slope: float
    margin: float
    gaps: dict[float, float]

    @property
    def answer(self) -> str:
        """In words, of a gap that is negative where the mechanism is better."""
        if not abs(self.slope) > self.margin:
            return "undecided"
        gaps = list(self.gaps.values())
        middle = math.fsum(gaps) / len(gaps)
        half = (math.log2(max(self.gaps)) - math.log2(min(self.gaps))) / 2
        if (abs(self.slope) - self.margin) * half > abs(middle):
            return "changes its sign"
        return "shrinks" if self.slope * middle < 0 else "grows"


def trend(losses: Mapping[float, Sequence[float]], base: Mapping[float, Sequence[float]], noise: Noise) -> Trend:
    """The gap of two mechanisms at each budget, from their losses over seeds there, and its slope.

    The noise of a budget's gap is sigma sqrt(1/n1 + 1/n2), of one size at all budgets and independent: runs that branch
    off one trunk share a part of theirs, which makes the margin too wide rather than too narrow.
    """
    budgets = sorted(budget for budget in losses if budget in base and len(losses[budget]) and len(base[budget]))
    gaps = {budget: float(np.mean(losses[budget]) - np.mean(base[budget])) for budget in budgets}
    if len(budgets) < 2:
        return Trend(math.nan, math.nan, gaps)
    x = np.log2(budgets) - np.mean(np.log2(budgets))
    slope = float(x @ np.array(list(gaps.values())) / (x @ x))
    if noise.degrees < 1:
        return Trend(slope, math.inf, gaps)
    errors = np.array([noise.error(len(losses[budget]), len(base[budget])) for budget in budgets])
    error = float(np.sqrt(((x / (x @ x)) ** 2 * errors**2).sum()))
    return Trend(slope, noise.factor() * error, gaps)
