"""Where a curve with one valley is lowest: a parabola in the logarithm of its variable."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.analyses.noise import Noise

DRAWS = 400


@dataclass(frozen=True)
class Optimum:
    """The variable at the lowest point and the loss there, with the 95 % interval of the former.

    Attributes:
        inside: the valley lies among the points; else the best is at their edge, or there is no valley.
    """

    at: float
    value: float
    low: float
    high: float
    inside: bool


def optimum(x: Sequence[float], y: Sequence[float], sigma: float | None = None, seed: int = 0) -> Optimum:
    """Fit y = a + b log x + c (log x)^2; the interval is of points redrawn with standard deviation sigma.

    Args:
        x, y: at least three different places. sigma: of chance; where the parabola leaves more, that, widened for the
            few points that it is known by.
    """
    where, values = np.log(np.asarray(x, dtype=float)), np.asarray(y, dtype=float)
    if len(set(x)) < 3:
        raise ValueError(f"{len(set(x))} places: a parabola needs three")
    at, value, inside = _valley(where, values)
    curve = np.polyval(np.polyfit(where, values, 2), where)
    free = len(values) - 3
    left = Noise(float(np.sqrt(((values - curve) ** 2).sum() / free)), free).wide if free > 0 else math.nan
    sigma = max((one for one in (sigma, left) if one is not None and math.isfinite(one)), default=math.nan)
    low = high = math.nan
    if math.isfinite(sigma):
        draws = np.random.default_rng(seed).standard_normal((DRAWS, len(values)))
        low, high = np.percentile([_valley(where, curve + sigma * row)[0] for row in draws], (2.5, 97.5))
    return Optimum(math.exp(at), value, math.exp(low), math.exp(high), inside)


def _valley(where: np.ndarray, values: np.ndarray) -> tuple[float, float, bool]:
    """The lowest place (a logarithm) within the points, the value there, and whether it is a valley between them."""
    square, line, level = np.polyfit(where, values, 2)
    first, last = float(where.min()), float(where.max())
    if square > 0 and first < (place := -line / (2 * square)) < last:
        return float(place), float(level - line**2 / (4 * square)), True
    ends = {end: float(np.polyval((square, line, level), end)) for end in (first, last)}
    best = min(ends, key=ends.__getitem__)
    return best, ends[best], False
