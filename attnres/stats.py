"""Means with their standard errors, of values and of ratios, Student's t and Fisher's F. NaN is what is not known."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np


class Ratio(NamedTuple):
    """A ratio of sums over items, m = sum(a) / sum(b), with its standard error (Cochran, Sampling Techniques, 2.11):

        se^2 = n / (n - 1) * sum (a_i - m b_i)^2 / (sum b)^2,    which for b = 1 is s^2 / n

    Attributes:
        mean, error: m and se, floats or arrays; the error of fewer than two items is NaN, and so is the mean of none.
        items: n, those with b > 0. total: sum(b).
    """

    mean: Any
    error: Any
    items: int
    total: float


def ratio(above: np.ndarray, below: np.ndarray | float = 1.0) -> Ratio:
    """The ratio of sums over items (n,); items with NaN above or nothing below are left out.

    >>> ratio(np.array([1.0, 2.0, 3.0])).mean
    2.0
    """
    above, below = np.broadcast_arrays(np.asarray(above, dtype=float), np.asarray(below, dtype=float))
    known = np.isfinite(above) & (below > 0)
    a, b = above[known], below[known]
    return _ratio(len(a), a.sum(), b.sum(), lambda mean: ((a - mean * b) ** 2).sum())


class RatioSums:
    """Ratios for each of several labels, kept in a few sums so that items may stream by.

    In an inspection an item is a document, a_d the sum of a weight over its tokens of one label and b_d their number:
    tokens of one document resemble each other, so an error over tokens would be too small.

    Args:
        labels, width: how many labels, and how many numbers a_d has for each.
    """

    def __init__(self, labels: int, width: int) -> None:
        self._items = np.zeros(labels)
        self._b, self._bb = np.zeros(labels), np.zeros(labels)
        self._a, self._aa, self._ab = (np.zeros((labels, width)) for _ in range(3))

    def add(self, below: np.ndarray, above: np.ndarray) -> None:
        """Count one item: `below` (labels,) and `above` (labels, width)."""
        self._items += below > 0
        self._b += below
        self._bb += below**2
        self._a += above
        self._aa += above**2
        self._ab += above * below[:, None]

    def ratio(self, label: int) -> Ratio:
        """The ratio of one label, mean and error (width,)."""
        aa, ab, bb = self._aa[label], self._ab[label], self._bb[label]
        return _ratio(
            int(self._items[label]), self._a[label], self._b[label], lambda mean: aa - 2 * mean * ab + mean**2 * bb
        )


def _ratio(items: int, above: Any, below: Any, squares: Any) -> Ratio:
    n = items if items > 1 else math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = above / below
        error = np.sqrt(np.maximum(squares(mean), 0.0) * n / (n - 1)) / below
    if not np.ndim(mean):
        mean, error = float(mean), float(error)
    return Ratio(mean, error, items, float(below))


def standard_error(values: np.ndarray, axis: int | None = None) -> Any:
    """s / sqrt(n) along an axis, s over n - 1, of what is not NaN; NaN for fewer than two values."""
    values = np.asarray(values, dtype=float)
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis, keepdims=True) / count
        spread = np.nansum((values - mean) ** 2, axis, keepdims=True)
        error = np.where(count > 1, np.sqrt(spread / (count - 1) / count), math.nan)
    return float(error.item()) if axis is None else error.squeeze(axis)


def perplexity(loss: float) -> float:
    """e to the loss, as far as a number can hold it.

    >>> perplexity(0.0), perplexity(1e6) < math.inf
    (1.0, True)
    """
    return math.exp(min(loss, 700.0))


def or_none(value: float | None) -> float | None:
    """None for NaN and infinity, which JSON does not have, and for what is not known."""
    return value if value is not None and math.isfinite(value) else None


def plain(value: Any, digits: int = 6) -> Any:
    """Numbers that JSON has, in lists and dicts: NaN and infinity become None, others are rounded to so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(part, digits) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), digits)
    return [plain(part, digits) for part in value] if isinstance(value, list | tuple) else value


@functools.cache
def _arcs(first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
    """Angles, and the share of the integral of sin^(first - 1) cos^(second - 1) up to each."""
    grid = np.linspace(0, math.pi / 2, 20001)
    density = np.sin(grid) ** (first - 1) * np.cos(grid) ** (second - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return grid, area / area[-1]


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t: the point below which it lies with a probability of at least one half.

    From its distribution function, which with x = sqrt(degrees) tan(a) is an integral of cos^(degrees - 1) a.

    >>> round(t_quantile(0.975, 2), 3), round(t_quantile(0.5, 9), 3)
    (4.303, 0.0)
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}")
    grid, share = _arcs(1, degrees)
    return math.sqrt(degrees) * math.tan(float(np.interp((probability - 0.5) * 2, share, grid)))


def f_tail(ratio: float, first: int, second: int) -> float:
    """Fisher's F: the probability that two variances of so many degrees of freedom have at least this ratio.

    With ratio = second / first tan^2 a an integral of sin^(first - 1) a cos^(second - 1) a.

    >>> round(f_tail(4.46, 2, 8), 3)
    0.05
    """
    grid, share = _arcs(first, second)
    return 1 - float(np.interp(math.atan(math.sqrt(ratio * first / second)), grid, share))
