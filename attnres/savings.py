"""Express a lower loss as savings: how many more tokens another curve needs for it, and the compute or time saved.

Between measured points a curve follows the shape of a fit to all points, L = E + A n^-a, stretched to pass through both
neighbours: a straight line in log n would favour the better curve, because losses fall ever more slowly. Beyond the
last point it follows the fit, and the result is marked as extrapolated.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

UNDERSTATED = "The learning rate falls along a curve, so that a saving and a loss are both understated."
"""A note for savings that were read within one learning-rate schedule (`saving`)."""
EXPONENTS = (0.005, 2.0)
"""The smallest and the largest exponent that is tried."""


class CurveReading(NamedTuple):
    """Tokens at which a loss is reached; infinity for a loss below the fit's floor, NaN for one above the first
    point."""

    tokens: float
    extrapolated: bool


@dataclass(frozen=True)
class PowerLaw:
    """L = floor + scale (n / unit)^-exponent: `scale` is the reducible loss at n = unit, of tokens or compute."""

    floor: float
    scale: float
    exponent: float
    unit: float = 1.0

    def loss(self, n: float) -> float:
        """Return the loss at n."""
        return self.floor + self.scale * (n / self.unit) ** -self.exponent

    def reached(self, loss: float) -> float:
        """Return the n at which this loss is reached; infinity if it never is."""
        if loss <= self.floor:
            return math.inf
        return self.unit * ((loss - self.floor) / self.scale) ** (-1 / self.exponent)


def fit(n: Sequence[float], losses: Sequence[float], floor: float | None = None, unit: float | None = None) -> PowerLaw:
    """Fit a power law by least squares, floor and scale >= 0: for each exponent of a fine grid these two are linear.

    Args:
        n, losses: at least three points, or two with a fixed `floor`.
        unit: unit of n; None is the geometric mean of `n`.

    Source: the form of Kaplan et al. (2020) and Hoffmann et al. (2022); with floor 0 that of arXiv 2603.15031.
    """
    return fits(n, np.asarray(losses, dtype=float)[None], floor, unit)[0]


def fits(
    n: Sequence[float], losses: np.ndarray, floor: float | None = None, unit: float | None = None
) -> list[PowerLaw]:
    """Return `fit` for each row of losses (rows, points)."""
    x = np.asarray(n, dtype=float)
    needed = 3 if floor is None else 2
    if len(set(x.tolist())) < needed:
        raise ValueError(f"{len(set(x.tolist()))} places: a fit needs {needed}")
    unit = unit or float(np.exp(np.log(x).mean()))
    rows = np.arange(len(losses))
    low, high = np.full(len(losses), EXPONENTS[0]), np.full(len(losses), EXPONENTS[1])
    for _ in range(4):  # a finer grid each time
        exponents = low[:, None] * (high / low)[:, None] ** np.linspace(0, 1, 41)
        squares, level, scale = _linear((x / unit) ** -exponents[..., None], losses[:, None], floor)
        best = squares.argmin(1)
        exponent = exponents[rows, best]
        step = (high / low) ** (1 / 40)
        low, high = np.maximum(EXPONENTS[0], exponent / step), np.minimum(EXPONENTS[1], exponent * step)
    columns = level[rows, best], scale[rows, best], exponent
    return [PowerLaw(float(e), float(s), float(a), unit) for e, s, a in zip(*columns, strict=True)]


def _linear(power: np.ndarray, y: np.ndarray, floor: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return residual squares, floor and scale of y = floor + scale * power along the last axis; if losses do not fall
    the floor is their mean."""
    if floor is None:
        centred = power - power.mean(-1, keepdims=True)
        scale = (centred * y).sum(-1) / (centred**2).sum(-1)
        level = y.mean(-1) - scale * power.mean(-1)
        below = level < 0
        level = np.where(below, 0.0, level)
        scale = np.where(below, (power * y).sum(-1) / (power**2).sum(-1), scale)
        level = np.where(scale <= 0, y.mean(-1), level)
    else:
        scale = (power * (y - floor)).sum(-1) / (power**2).sum(-1)
        level = np.full_like(scale, floor)
    scale = np.maximum(scale, 1e-12)
    return ((level[..., None] + scale[..., None] * power - y) ** 2).sum(-1), level, scale


class LossCurve:
    """Held-out losses of one mechanism over tokens.

    Args:
        points: (tokens, loss) in any order, tokens > 0. A point whose loss is not below all earlier ones is left out,
            so a loss counts as reached where it is first measured.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        kept: list[tuple[float, float]] = []
        for tokens, loss in sorted(points):
            if tokens > 0 and (not kept or loss < kept[-1][1]):
                kept.append((float(tokens), float(loss)))
        self.at, self.losses = np.array(kept).T if kept else (np.zeros(0), np.zeros(0))

    @cached_property
    def law(self) -> PowerLaw | None:
        return fit(self.at.tolist(), self.losses.tolist()) if len(self.at) > 2 else None

    def tokens(self, loss: float) -> CurveReading:
        """Return the tokens at which the curve reaches this loss; NaN if it began below it, or beyond its end if it has
        no fit."""
        n, losses = self.at, self.losses
        if not len(n) or loss > losses[0]:
            return CurveReading(math.nan, False)
        after = int(np.searchsorted(-losses, -loss))  # the first point at or below the loss
        if after == len(n):
            if self.law is None or not math.isfinite(end := self.law.reached(float(losses[-1]))):
                return CurveReading(math.nan, True)
            return CurveReading(float(n[-1] * self.law.reached(loss) / end), True)
        if losses[after] == loss:
            return CurveReading(float(n[after]), False)
        (high, low), (first, last) = losses[after - 1 : after + 1], n[after - 1 : after + 1]
        share = (high - loss) / (high - low)
        if self.law is not None and math.isfinite(late := self.law.reached(float(low))):
            early, here = self.law.reached(float(high)), self.law.reached(loss)
            share = math.log(here / early) / math.log(late / early)
        return CurveReading(float(first * (last / first) ** share), False)


class Saving(NamedTuple):
    """How many times the tokens the base needs for the same loss: above 1 saves, below 1 costs.

    Attributes:
        tokens: that factor. extrapolated: whether it was read from a fit, beyond the measured points.
        loss: the loss at which it was read.
    """

    tokens: float
    extrapolated: bool
    loss: float

    def of_compute(self, ratio: float) -> float:
        """Return the saving in FLOPs or time, if a token costs `ratio` times as much as the base's."""
        return self.tokens / ratio


def saving(curve: LossCurve, base: LossCurve, loss: float | None = None) -> Saving:
    """Compare a curve with the base's at a loss; by default the lowest that both have reached, which is measured.

    Within one learning-rate schedule a saving or a loss is understated (`UNDERSTATED`): the curve that reaches the loss
    later has a lower learning rate there.
    """
    if loss is None:
        if not len(curve.losses) or not len(base.losses):
            return Saving(math.nan, False, math.nan)
        loss = float(max(curve.losses[-1], base.losses[-1]))
    reading, base_reading = curve.tokens(loss), base.tokens(loss)
    return Saving(base_reading.tokens / reading.tokens, reading.extrapolated or base_reading.extrapolated, loss)
