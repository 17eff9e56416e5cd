"""What a lower loss is worth: how many tokens another curve needs for it, and how much compute or time that saves.

Between measured points a curve follows the shape of a fit to all of it, L = E + A n^-a, stretched so that it meets
both: a straight line in log n would flatter what is better, as losses fall ever more slowly. Beyond the last point it
follows the fit itself, and says that it does.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

EXPONENTS = np.geomspace(0.01, 3, 400)


class Reading(NamedTuple):
    """Tokens at which a loss is reached; infinity for one below the fit's floor, NaN for one above the first point."""

    tokens: float
    extrapolated: bool


@dataclass(frozen=True)
class PowerLaw:
    """L = floor + scale n^-exponent."""

    floor: float
    scale: float
    exponent: float

    def tokens(self, loss: float) -> float:
        """Where this loss is reached; infinity where it never is."""
        return math.inf if loss <= self.floor else ((loss - self.floor) / self.scale) ** (-1 / self.exponent)


def fit(tokens: np.ndarray, losses: np.ndarray) -> PowerLaw | None:
    """The power law that is nearest in least squares, floor >= 0; None of fewer than three points.

    For each exponent of a grid floor and scale are linear.
    """
    if len(tokens) < 3:
        return None
    best, least = None, math.inf
    unit = float(np.exp(np.log(tokens).mean()))
    for exponent in EXPONENTS:
        power = (tokens / unit) ** -exponent
        scale = float(np.cov(power, losses, ddof=0)[0, 1] / power.var())
        floor = float(losses.mean() - scale * power.mean())
        if floor < 0:
            floor, scale = 0.0, float(power @ losses / (power @ power))
        squares = float(((floor + scale * power - losses) ** 2).sum())
        if scale > 0 and squares < least:
            best, least = PowerLaw(floor, scale * unit**exponent, float(exponent)), squares
    return best


class LossCurve:
    """Held-out losses over tokens of one mechanism.

    Args:
        points: (tokens, loss) in any order, of tokens > 0; one whose loss is not below all before it is left out, so
            that a loss is reached where it is measured first.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        kept: list[tuple[float, float]] = []
        for tokens, loss in sorted(points):
            if tokens > 0 and (not kept or loss < kept[-1][1]):
                kept.append((float(tokens), float(loss)))
        self.at, self.losses = np.array(kept).T if kept else (np.zeros(0), np.zeros(0))

    @cached_property
    def law(self) -> PowerLaw | None:
        return fit(self.at, self.losses)

    def tokens(self, loss: float) -> Reading:
        """The tokens at which the curve has this loss. NaN where it began below, or beyond its end has no fit."""
        n, losses = self.at, self.losses
        if not len(n) or loss > losses[0]:
            return Reading(math.nan, False)
        after = int(np.searchsorted(-losses, -loss))  # the first point that has it
        if after == len(n):
            if self.law is None or not math.isfinite(end := self.law.tokens(float(losses[-1]))):
                return Reading(math.nan, True)
            return Reading(float(n[-1] * self.law.tokens(loss) / end), True)
        if losses[after] == loss:
            return Reading(float(n[after]), False)
        (high, low), (first, last) = losses[after - 1 : after + 1], n[after - 1 : after + 1]
        share = (high - loss) / (high - low)
        if self.law is not None and math.isfinite(late := self.law.tokens(float(low))):
            early, here = self.law.tokens(float(high)), self.law.tokens(loss)
            share = math.log(here / early) / math.log(late / early)
        return Reading(float(first * (last / first) ** share), False)


class Saving(NamedTuple):
    """How many times the tokens the base needs for the same loss: above 1 saves, below 1 costs.

    Attributes:
        tokens: that factor. extrapolated: it is read beyond what was measured, by a fit.
        loss: at which it was read.
    """

    tokens: float
    extrapolated: bool
    loss: float

    def of_compute(self, ratio: float) -> float:
        """The same in what a token costs `ratio` times as much of: FLOPs, or the time of a step."""
        return self.tokens / ratio


def saving(curve: LossCurve, base: LossCurve, loss: float | None = None) -> Saving:
    """Hold a curve against the base's at a loss; by default the lowest that both have reached, which is measured.

    Read inside one schedule it is a lower bound of either sign: the one that comes later has a lower learning rate.
    """
    if loss is None:
        if not len(curve.losses) or not len(base.losses):
            return Saving(math.nan, False, math.nan)
        loss = float(max(curve.losses[-1], base.losses[-1]))
    own, other = curve.tokens(loss), base.tokens(loss)
    return Saving(other.tokens / own.tokens, own.extrapolated or other.extrapolated, loss)
