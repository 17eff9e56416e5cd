"""Loss against compute, L = E + A C^-a: the fit, its intervals, and how much compute one mechanism saves another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.analyses.noise import Noise

EXPONENTS = (0.005, 2.0)
DRAWS = 2000
PERCENT = (2.5, 97.5)
SURE = (0.135, 99.865)
"""Percentiles at three standard errors of a normal distribution."""


@dataclass(frozen=True)
class Fit:
    """L = E + A C^-a, with C in units of `unit`: A is the part that can still be lost there."""

    floor: float
    scale: float
    exponent: float
    unit: float

    def loss(self, compute: float) -> float:
        """Return the loss at this compute."""
        return self.floor + self.scale * (compute / self.unit) ** -self.exponent

    def compute(self, loss: float) -> float:
        """Return the compute for this loss; infinity for one that is never reached."""
        if loss <= self.floor:
            return math.inf
        return self.unit * ((loss - self.floor) / self.scale) ** (-1 / self.exponent)


@dataclass(frozen=True)
class Fitted:
    """A fit, and those of redrawn losses: what its numbers might as well have been."""

    fit: Fit
    draws: tuple[Fit, ...]

    def interval(self, name: str) -> tuple[float, float]:
        """The 95 % interval of floor, scale or exponent (percentiles of the redrawn fits)."""
        return _interval([getattr(fit, name) for fit in self.draws])


def fit(
    compute: Sequence[float], losses: Sequence[float], floor: float | None = None, unit: float | None = None
) -> Fit:
    """Fit by least squares, E and A >= 0: for each exponent of a fine grid E and A are linear.

    Args:
        compute, losses: at least three points, with a fixed `floor` two.
        unit: of the compute; none is the middle of its logarithms.

    Source: the form of Kaplan et al. (2020) and Hoffmann et al. (2022); with floor 0 that of arXiv 2603.15031.
    """
    return _fits(compute, np.asarray(losses, dtype=float)[None], floor, unit)[0]


def _fits(compute: Sequence[float], losses: np.ndarray, floor: float | None, unit: float | None) -> list[Fit]:
    """`fit` of each row of losses (rows, points)."""
    x = np.asarray(compute, dtype=float)
    needed = 3 if floor is None else 2
    if len(set(x.tolist())) < needed:
        raise ValueError(f"{len(set(x.tolist()))} amounts of compute: a fit needs {needed}")
    unit = unit or float(np.exp(np.log(x).mean()))
    rows = np.arange(len(losses))
    low, high = np.full(len(losses), EXPONENTS[0]), np.full(len(losses), EXPONENTS[1])
    for _ in range(4):  # each time nearer
        exponents = low[:, None] * (high / low)[:, None] ** np.linspace(0, 1, 41)
        squares, level, scale = _linear((x / unit) ** -exponents[..., None], losses[:, None], floor)
        best = squares.argmin(1)
        exponent = exponents[rows, best]
        step = (high / low) ** (1 / 40)
        low, high = np.maximum(EXPONENTS[0], exponent / step), np.minimum(EXPONENTS[1], exponent * step)
    columns = level[rows, best], scale[rows, best], exponent
    return [Fit(float(e), float(s), float(a), unit) for e, s, a in zip(*columns, strict=True)]


def _linear(power: np.ndarray, y: np.ndarray, floor: float | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Squares left, E and A of y = E + A power along the last axis, E >= 0 and A > 0: where losses do not fall,
    E is their mean."""
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


def fitted(
    compute: Sequence[float],
    losses: Sequence[float],
    sigma: float | None = None,
    floor: float | None = None,
    unit: float | None = None,
    seed: int = 0,
) -> Fitted:
    """Fit, and fit again to losses redrawn around the curve with standard deviation `sigma`.

    Args:
        sigma: of one loss over seeds; none takes what the curve leaves, over the degrees of freedom and widened for how
            few they are.
        floor, unit: as in `fit`.
    """
    first = fit(compute, losses, floor, unit)
    curve = np.array([first.loss(c) for c in compute])
    if sigma is None or not math.isfinite(sigma):
        free = len(losses) - (3 if floor is None else 2)
        left = float(((curve - np.asarray(losses)) ** 2).sum())
        sigma = Noise(math.sqrt(left / free), free).wide if free > 0 else math.nan
    if not math.isfinite(sigma):
        return Fitted(first, ())
    draw = np.random.default_rng(seed)
    redrawn = curve + sigma * draw.standard_normal((DRAWS, len(curve)))
    return Fitted(first, tuple(_fits(compute, redrawn, floor, unit)))


def multiplier(base: Fit, other: Fit, compute: float) -> float:
    """Compute that `base` needs for the loss that `other` has at `compute`, over it: 1.25 is a quarter more."""
    return base.compute(other.loss(compute)) / compute


def multiplier_interval(
    base: Fitted, other: Fitted, compute: float, percent: tuple[float, float] = PERCENT
) -> tuple[float, float]:
    """Its interval between two percentiles, over fits of both that were redrawn independently."""
    return _interval([multiplier(one, two, compute) for one, two in zip(base.draws, other.draws[::-1])], percent)


def _interval(values: Sequence[float], percent: tuple[float, float] = PERCENT) -> tuple[float, float]:
    if not values or np.isnan(values).any():
        return math.nan, math.nan
    low, high = np.percentile(np.minimum(np.asarray(values, dtype=float), 1e12), percent)
    return float(low), float(high)
