"""Means with their standard errors, of values and of ratios; and one rule for comparing mechanisms.

A comparison fits loss = mechanism + seed to all runs of a recipe (`Recipe`) and gives an interval (`Effect`), which may
exclude 0 or a published effect. Unknown values are NaN."""

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from attnres.text import number


class Ratio(NamedTuple):
    """A ratio of sums over items, m = sum(a) / sum(b), with its standard error (Cochran, Sampling Techniques, 2.11):

        se^2 = n / (n - 1) * sum (a_i - m b_i)^2 / (sum b)^2,    which for b = 1 is s^2 / n

    Attributes:
        mean, error: m and se, floats or arrays; NaN for the error of fewer than two items and for the mean of none.
        items: n, those with b > 0. total: sum(b).
    """

    mean: Any
    error: Any
    items: int
    total: float


def ratio(above: np.ndarray, below: np.ndarray | float = 1.0) -> Ratio:
    """Return the ratio of sums over items (n,); items with NaN above or nothing below are left out.

    >>> ratio(np.array([1.0, 2.0, 3.0])).mean
    2.0
    """
    above, below = np.broadcast_arrays(np.asarray(above, dtype=float), np.asarray(below, dtype=float))
    known = np.isfinite(above) & (below > 0)
    a, b = above[known], below[known]
    return _ratio(len(a), a.sum(), b.sum(), lambda mean: ((a - mean * b) ** 2).sum())


class RatioSums:
    """Ratios for each of several labels, accumulated as sums, so that items can be streamed.

    In an inspection an item is a document, a_d the sum of a weight over its tokens of one label, and b_d their number:
    tokens of one document are correlated, so an error over tokens would be too small.

    Args:
        labels, width: number of labels, and of values of a_d for each.
    """

    def __init__(self, labels: int, width: int) -> None:
        self._items = np.zeros(labels)
        self._b, self._bb = np.zeros(labels), np.zeros(labels)
        self._a, self._aa, self._ab = (np.zeros((labels, width)) for _ in range(3))

    def add(self, below: np.ndarray, above: np.ndarray) -> None:
        """Add one item: `below` (labels,) and `above` (labels, width)."""
        self._items += below > 0
        self._b += below
        self._bb += below**2
        self._a += above
        self._aa += above**2
        self._ab += above * below[:, None]

    def ratio(self, label: int) -> Ratio:
        """Return the ratio of one label, mean and error (width,)."""
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
    """Return s / sqrt(n) along an axis, s with n - 1, ignoring NaN; NaN for fewer than two values."""
    values = np.asarray(values, dtype=float)
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, axis, keepdims=True) / count
        spread = np.nansum((values - mean) ** 2, axis, keepdims=True)
        error = np.where(count > 1, np.sqrt(spread / (count - 1) / count), math.nan)
    return float(error.item()) if axis is None else error.squeeze(axis)


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity if that is too large for a float.

    >>> perplexity(0.0), perplexity(1e6) < math.inf
    (1.0, True)
    """
    return math.exp(min(loss, 700.0))


def or_none(value: float | None) -> float | None:
    """Return None for NaN, infinity and None, which JSON cannot hold, else the value."""
    return value if value is not None and math.isfinite(value) else None


def plain(value: Any, digits: int = 6) -> Any:
    """Return numbers for JSON, in lists and dicts: NaN and infinity become None, others are rounded to `digits`
    digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(part, digits) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), digits)
    return [plain(part, digits) for part in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------ distributions


def _beta_share(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), by its continued fraction (NIST DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta_share(1 - x, b, a)
    fraction = 1.0
    for k in range(40 + 4 * math.isqrt(int(max(a, b))), 0, -1):  # evaluated from its end
        m = k // 2
        above = -(a + m) * (a + b + m) if k % 2 else m * (b - m)
        fraction = 1 + above * x / ((a + k - 1) * (a + k)) / fraction
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log) / a / fraction


def t_tail(t: float, degrees: float) -> float:
    """Return, for Student's t, the two-sided probability of a value at least as far from 0.

    >>> round(t_tail(4.303, 2), 4)
    0.05
    """
    if degrees <= 0:
        raise ValueError(f"degrees of freedom must be positive, got {degrees}")
    return _beta_share(degrees / (degrees + t * t), degrees / 2, 0.5)


@functools.cache
def t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t for a probability from 0.5 to below 1; `degrees` may be fractional.

    >>> round(t_quantile(0.975, 2), 3), round(t_quantile(0.5, 9), 3)
    (4.303, 0.0)
    """
    low, high, tail = 0.0, 1.0, 2 * (1 - probability)
    while t_tail(high, degrees) > tail:
        low, high = high, 2 * high
    for _ in range(60):  # bisection, to the last digit
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > tail else (low, middle)
    return low


def chi2_tail(value: float, degrees: int) -> float:
    """Return, for chi-squared, the probability of a value of at least this size.

    >>> round(chi2_tail(5.991, 2), 3)
    0.05
    """
    a, x = torch.tensor([degrees / 2, max(0.0, value / 2)], dtype=torch.float64)
    return torch.special.gammaincc(a, x).item()


def bartlett(variances: Sequence[float], degrees: Sequence[float]) -> float:
    """Return the p-value of Bartlett's test for equal variances of normal distributions."""
    s2, d = np.maximum(np.asarray(variances, dtype=float), 1e-300), np.asarray(degrees, dtype=float)
    if len(s2) < 2:
        return 1.0
    statistic = d.sum() * math.log(float(d @ s2) / d.sum()) - float(d @ np.log(s2))
    correction = 1 + float((1 / d).sum() - 1 / d.sum()) / (3 * (len(s2) - 1))
    return chi2_tail(statistic / correction, len(s2) - 1)


# ------------------------------------------------------------------ comparisons

ALPHA = 0.05

LARGEST_SHARE = 1e4
"""Largest ratio of a seed's variance to the noise's: beyond it only rounding changes."""

QUESTIONS = (
    ("block", "standard"),
    ("full", "block"),
    ("full", "static_mix"),
    ("block", "mhc"),
    ("rescaled", "standard"),
)
"""Pre-registered comparisons (the last is the placebo control's): each is tested at 5 %, all others together by
Holm."""


class Effect(NamedTuple):
    """The difference of two mechanisms' mean losses, in their unit; negative is better.

    Attributes:
        difference, error: the difference and its standard error, NaN if the noise is unknown.
        degrees: degrees of freedom of the error; 0 if the noise is unknown. level: the interval has confidence 1 -
            `level`.
    """

    difference: float
    error: float
    degrees: float
    level: float = ALPHA

    @property
    def margin(self) -> float:
        """Return half the width of the interval; NaN if the noise is unknown."""
        return t_quantile(1 - self.level / 2, self.degrees) * self.error if self.degrees > 0 else math.nan

    @property
    def low(self) -> float:
        return self.difference - self.margin

    @property
    def high(self) -> float:
        return self.difference + self.margin

    @property
    def p(self) -> float:
        """Return the p-value of the difference."""
        if not self.degrees > 0 or math.isnan(self.error):
            return math.nan
        return t_tail(self.difference / self.error, self.degrees) if self.error else float(self.difference == 0)

    @property
    def text(self) -> str:
        """Return the difference with its interval, to three digits."""
        difference, *ends = (number(value, 3, signed=True) for value in (self.difference, self.low, self.high))
        return f"{difference} ({' to '.join(ends) if self.margin >= 0 else 'one seed'})"

    def excludes(self, value: float = 0.0) -> bool:
        """Return whether the interval excludes a value, such as 0 or a published effect; False if the noise is
        unknown."""
        return self._replace(difference=self.difference - value).p < self.level


def holm(p: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """Return the levels at which Holm's procedure tests comparisons: an interval at 1 - level excludes 0 if it rejects.

    The smallest p is compared with alpha / m, the next with alpha / (m - 1), and so on. From the first p that is not
    below its level on, nothing is rejected, and all have that level. Equal ones have the level of the first of them,
    whatever their order. NaN counts as 1.

    >>> holm([0.04, 0.001, 0.03])
    [0.025, 0.016666666666666666, 0.025]
    """
    known = [1.0 if math.isnan(value) else value for value in p]
    levels, stopped = [alpha] * len(known), 0.0
    order = sorted(range(len(known)), key=known.__getitem__)
    for rank, which in enumerate(order):
        before = order[rank - 1] if rank and math.isclose(known[which], known[order[rank - 1]]) else None
        levels[which] = stopped or (alpha / (len(known) - rank) if before is None else levels[before])
        if not stopped and not known[which] < levels[which]:
            stopped = levels[which]
    return levels


class Recipe:
    """Fit loss = mechanism + seed + noise to all runs of one recipe, by least squares.

    sigma is the residual standard deviation of that fit, with its degrees of freedom: an effect of the seed that runs
    share cancels in differences. If so many seeds belong to a single mechanism that less than half of the degrees of
    freedom within mechanisms remain, seed and noise cannot be separated: then sigma is the standard deviation within
    mechanisms. The variance of the seed effect is estimated from the same fits (Henderson's third method), so that runs
    whose seed no other mechanism has also contribute, fully if seeds have no effect. If variances differ by Bartlett's
    test at 5 %, a mechanism with several runs has a separate variance. A small one is raised towards the others'
    (`moderated`), because two or three runs may agree by chance; a large one stays. Degrees of freedom of a difference
    then follow Welch.

    Attributes:
        sigma, degrees: as above; NaN and 0 if unknown. seed_sd: standard deviation of the seed effect.
        names, counts, means: mechanisms, and the number and mean of the runs of each. p_equal: Bartlett's p-value.

    Args:
        runs: (mechanism, seed, loss) of each run, without NaN; a seed may occur more than once.
        floor: lower bound of sigma, e.g. the resolution of an accuracy over a number of problems.
    """

    def __init__(self, runs: Iterable[tuple[str, Hashable, float]], floor: float = 0.0) -> None:
        labels, seeds, losses = zip(*runs, strict=True)
        self.names, y = list(dict.fromkeys(labels)), np.array(losses, dtype=float)
        self.counts = {name: labels.count(name) for name in self.names}
        total, groups = len(y), len(self.names)
        m = np.array([[label == name for name in self.names] for label in labels], dtype=float)
        z = np.array([[seed == name for name in dict.fromkeys(seeds)] for seed in seeds], dtype=float)
        alone, both = y - m @ np.linalg.lstsq(m, y)[0], np.hstack([m, z])
        left, rank = y - both @ np.linalg.lstsq(both, y)[0], int(np.linalg.matrix_rank(both))
        self.degrees, squares = total - rank, float(left @ left)
        share = 0.0  # variance of the seed effect over sigma squared
        if self.degrees * 2 >= total - groups and self.degrees:
            within = z - m @ np.linalg.lstsq(m, z)[0]
            trace, excess = float((within**2).sum()), float(alone @ alone) - squares
            sigma2 = squares / self.degrees
            if trace and sigma2:
                share = min(max(0.0, (excess / sigma2 - (rank - groups)) / trace), LARGEST_SHARE)
        else:
            self.degrees, squares = total - groups, float(alone @ alone)
        self.sigma = max(math.sqrt(squares / self.degrees), floor) if self.degrees else math.nan
        whitened = np.linalg.inv(np.eye(total) + share * z @ z.T)
        self._covariance = np.linalg.inv(m.T @ whitened @ m)  # covariance of the means, over sigma squared
        self.seed_sd = math.sqrt(share) * self.sigma
        self.means = dict(zip(self.names, (self._covariance @ m.T @ whitened @ y).tolist(), strict=True))
        self._own: dict[str, tuple[float, float]] = {}  # mechanism -> variance of a run and its degrees of freedom
        projection = whitened - whitened @ m @ self._covariance @ m.T @ whitened
        freed = np.array([total - groups - share * float(np.trace(z.T @ projection @ z)), total - groups])
        if self.degrees and freed.all():
            adjusted = y - share * z @ z.T @ projection @ y  # minus the estimated seed effects
            for index, name in enumerate(self.names):
                of_it = adjusted[m[:, index] > 0]
                if len(of_it) > 1:
                    # minus the degrees that estimating seed effects took
                    degrees = (len(of_it) - 1) * freed[0] / freed[1]
                    self._own[name] = max(float(((of_it - of_it.mean()) ** 2).sum() / degrees), floor**2), degrees
        self.p_equal = bartlett(*zip(*self._own.values(), strict=True)) if len(self._own) > 1 else 1.0
        self._moderated = {}
        if self.p_equal < ALPHA:
            drawn = moderated(*zip(*self._own.values(), strict=True))
            pairs = zip(self._own.items(), drawn, strict=True)
            self._moderated = {name: max(own, towards) for (name, own), towards in pairs}

    def sd(self, name: str) -> float:
        """Return the standard deviation of a mechanism's runs without the seed effect; sigma for a single run."""
        return math.sqrt(self._own[name][0]) if name in self._own else self.sigma

    def effect(self, name: str, other: str, level: float = ALPHA) -> Effect:
        """Return the difference of two mechanisms' means, `name` minus `other`."""
        i, j = self.names.index(name), self.names.index(other)
        c = self._covariance
        scale, difference = c[i, i] + c[j, j] - 2 * c[i, j], self.means[name] - self.means[other]
        if self.p_equal >= ALPHA or not self.degrees:
            return Effect(difference, self.sigma * math.sqrt(scale), self.degrees, level)
        pooled = self.sigma**2, float(self.degrees)
        parts = [(*self._moderated.get(one, pooled), 1 / self.counts[one]) for one in (name, other)]
        # for seeds that only one of the two has
        parts.append((*pooled, max(0.0, scale - sum(part[2] for part in parts))))
        terms = [(variance * weight, degrees) for variance, degrees, weight in parts]
        squared = sum(term for term, _ in terms)
        below = sum(term**2 / degrees for term, degrees in terms)
        return Effect(difference, math.sqrt(squared), squared**2 / below if below else float(self.degrees), level)


def moderated(variances: Sequence[float], degrees: Sequence[float]) -> list[tuple[float, float]]:
    """Return the variances shrunk towards a prior estimated from all of them, and their degrees of freedom.

    The prior is an inverse chi-squared of d0 degrees about s0^2; both come from the mean and variance of log s^2. A
    variance becomes (d0 s0^2 + d s^2) / (d0 + d), of d0 + d degrees (Smyth 2004, Statistical Applications in Genetics
    and Molecular Biology 3, 3).
    """
    d = np.array(degrees, dtype=float)
    s2 = np.maximum(np.array(variances, dtype=float), np.finfo(float).tiny)
    halves = torch.from_numpy(d / 2)
    logs = np.log(s2) - torch.special.digamma(halves).numpy() + np.log(d / 2)
    spread = float(logs.var(ddof=1)) - torch.special.polygamma(1, halves).mean().item()
    if spread <= 0:  # they differ no more than by chance: one variance for all
        return [(float(np.average(s2, weights=d)), float(d.sum()))] * len(d)
    low, high = 1e-6, 1e9  # bisection: trigamma decreases
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        trigamma = torch.special.polygamma(1, torch.tensor(middle, dtype=torch.float64)).item()
        low, high = (middle, high) if trigamma > spread else (low, middle)
    d0 = 2 * low
    digamma = torch.special.digamma(torch.tensor(low, dtype=torch.float64)).item()
    prior = math.exp(float(logs.mean()) + digamma - math.log(low))
    most = float(d.sum())
    return [((d0 * prior + own * one) / (d0 + one), min(d0 + one, most)) for own, one in zip(s2.tolist(), d.tolist())]


def judged(effects: Sequence[Effect], planned: Sequence[bool], comparisons: int = 0) -> list[Effect]:
    """Return the effects at their levels: pre-registered ones at 5 % each, all others together by Holm.

    `comparisons`: planned number of others, finished or not; missing ones count as not rejected.
    """
    leveled = list(effects)
    unplanned = [index for index, beforehand in enumerate(planned) if not beforehand]
    missing = max(0, comparisons - len(unplanned))
    for index, level in zip(unplanned, holm([*(leveled[index].p for index in unplanned), *[math.nan] * missing])):
        leveled[index] = leveled[index]._replace(level=level)
    return leveled
