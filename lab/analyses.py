"""Arithmetic of studies: selection of candidates, trends of a gap, the minimum of a curve, and saved compute."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from attnres.savings import PowerLaw, fit, fits
from attnres.stats import Effect, t_quantile

VALLEYS, REFITS = 400, 2000
"""Number of redrawn losses whose percentiles give intervals."""
PERCENT = (2.5, 97.5)

# ------------------------------------------------------------------ noise


def pooled(estimates: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Pool estimates (sigma, degrees of freedom) of one standard deviation; NaN and 0 if none is known.

    >>> pooled([(1.0, 3), (3.0, 1), (math.nan, 0)])
    (1.7320508075688772, 4)
    """
    known = [(sigma, degrees) for sigma, degrees in estimates if degrees]
    total = sum(degrees for _, degrees in known)
    squares = sum(sigma**2 * degrees for sigma, degrees in known)
    return (math.sqrt(squares / total), total) if total else (math.nan, 0)


def widened(sigma: float, degrees: float) -> float:
    """Return the standard deviation of a normal distribution whose 95 % interval equals that of Student's t."""
    return sigma * t_quantile(0.975, degrees) / NormalDist().inv_cdf(0.975) if degrees > 0 else math.nan


# ------------------------------------------------------------------ candidates


def survivors(losses: Mapping[str, float], keep: int) -> list[str]:
    """Return the `keep` candidates with the lowest losses, best first; one that diverged (NaN) never survives.

    >>> survivors({"a": 3.0, "b": 1.0, "c": 2.0}, 2)
    ['b', 'c']
    """
    finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    return sorted(finite, key=finite.__getitem__)[:keep]


def beyond(losses: Mapping[float, float], factor: float, most: float) -> float | None:
    """Return the next learning rate to try if the best so far is the highest or the lowest: `factor` times it or it
    divided by `factor`, within 1 / `most` to `most`; else None.

    >>> beyond({1.0: 3.0, 2.0: 2.5}, 2.0, 16.0), beyond({1.0: 3.0, 2.0: 3.5}, 2.0, 16.0)
    (4.0, 0.5)
    >>> beyond({0.5: 3.2, 1.0: 3.0, 2.0: 3.5}, 2.0, 16.0)
    """
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        return None
    best = min(finite, key=finite.__getitem__)
    if best not in (max(losses), min(losses)):
        return None
    further = best * factor if best == max(losses) else best / factor
    return further if 1 / most <= further <= most else None


def at_best(losses: Mapping[str, float], of: Mapping[str, str]) -> dict[str, str]:
    """Return the candidate with the lowest loss for each mechanism; `of` maps a candidate to its mechanism."""
    names: Sequence[str] = list(dict.fromkeys(of.values()))
    best = {name: survivors({c: loss for c, loss in losses.items() if of[c] == name}, 1) for name in names}
    return {name: kept[0] for name, kept in best.items() if kept}


# ------------------------------------------------------------------ whether a gap shrinks as training goes on


@dataclass(frozen=True)
class Trend:
    """gap = a + slope log2(budget); `slope` is the change when the budget doubles."""

    slope: Effect
    gaps: dict[float, float]

    @property
    def answer(self) -> str:
        """Return the answer in words, for a gap that is negative if the mechanism is better."""
        if not self.slope.excludes():
            return "includes 0"
        gaps = list(self.gaps.values())
        middle = math.fsum(gaps) / len(gaps)
        half = (math.log2(max(self.gaps)) - math.log2(min(self.gaps))) / 2
        if (abs(self.slope.difference) - self.slope.margin) * half > abs(middle):
            return "changes its sign"
        return "shrinks" if self.slope.difference * middle < 0 else "grows"


def trend(
    losses: Mapping[float, Sequence[float]], base: Mapping[float, Sequence[float]], sigma: float, degrees: float
) -> Trend:
    """Return the gap of two mechanisms at each budget, from their losses over seeds there, and its slope.

    Args:
        sigma, degrees: standard deviation of one run and its degrees of freedom, the same at all budgets. Runs are
            treated as independent: those that branch off one trunk share a part of their noise, which makes the
            interval too wide rather than too narrow.
    """
    budgets = sorted(budget for budget in losses if budget in base and len(losses[budget]) and len(base[budget]))
    gaps = {budget: float(np.mean(losses[budget]) - np.mean(base[budget])) for budget in budgets}
    if len(budgets) < 2:
        return Trend(Effect(math.nan, math.nan, 0), gaps)
    x = np.log2(budgets) - np.mean(np.log2(budgets))
    weights = x / (x @ x)
    squares = np.array([1 / len(losses[budget]) + 1 / len(base[budget]) for budget in budgets])
    error = sigma * math.sqrt(float((weights**2 * squares).sum()))
    return Trend(Effect(float(weights @ np.array(list(gaps.values()))), error, degrees), gaps)


# ------------------------------------------------------------------ the valley of a curve, by a parabola


@dataclass(frozen=True)
class Optimum:
    """The variable at the lowest point and the loss there, with the 95 % interval of the variable.

    Attributes:
        inside: whether the minimum lies between the points; otherwise it is at their edge, or there is none.
    """

    at: float
    value: float
    low: float
    high: float
    inside: bool


def optimum(x: Sequence[float], y: Sequence[float], sigma: float | None = None, seed: int = 0) -> Optimum:
    """Fit y = a + b log x + c (log x)^2; the interval is from points redrawn with standard deviation sigma.

    Args:
        x, y: at least three different points. sigma: the noise; if the residuals of the parabola are larger, they are
            used instead, widened for the small number of points.
    """
    where, values = np.log(np.asarray(x, dtype=float)), np.asarray(y, dtype=float)
    if len(set(x)) < 3:
        raise ValueError(f"{len(set(x))} places: a parabola needs three")
    at, value, inside = _valley(where, values)
    curve = np.polyval(np.polyfit(where, values, 2), where)
    free = len(values) - 3
    left = widened(float(np.sqrt(((values - curve) ** 2).sum() / free)), free) if free > 0 else math.nan
    sigma = max((one for one in (sigma, left) if one is not None and math.isfinite(one)), default=math.nan)
    low = high = math.nan
    if math.isfinite(sigma):
        draws = np.random.default_rng(seed).standard_normal((VALLEYS, len(values)))
        low, high = np.percentile([_valley(where, curve + sigma * row)[0] for row in draws], (2.5, 97.5))
    return Optimum(math.exp(at), value, math.exp(low), math.exp(high), inside)


def _valley(where: np.ndarray, values: np.ndarray) -> tuple[float, float, bool]:
    """Return the lowest place (a logarithm) between the points, the value there, and whether it is a minimum between
    them."""
    square, line, level = np.polyfit(where, values, 2)
    first, last = float(where.min()), float(where.max())
    if square > 0 and first < (place := -line / (2 * square)) < last:
        return float(place), float(level - line**2 / (4 * square)), True
    ends = {end: float(np.polyval((square, line, level), end)) for end in (first, last)}
    best = min(ends, key=ends.__getitem__)
    return best, ends[best], False


# ------------------------------------------------------------------ loss against compute, L = E + A C^-a


@dataclass(frozen=True)
class Fitted:
    """A fit, and fits of redrawn losses, which show its uncertainty."""

    fit: PowerLaw
    draws: tuple[PowerLaw, ...]

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of floor, scale or exponent (percentiles of the redrawn fits)."""
        return _interval([getattr(fit, name) for fit in self.draws])


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
        sigma: standard deviation of one loss over seeds; None uses the residuals of the curve, widened for their small
            number of degrees of freedom.
        floor, unit: as in `fit`.
    """
    first = fit(compute, losses, floor, unit)
    curve = np.array([first.loss(c) for c in compute])
    if sigma is None or not math.isfinite(sigma):
        free = len(losses) - (3 if floor is None else 2)
        left = float(((curve - np.asarray(losses)) ** 2).sum())
        sigma = widened(math.sqrt(left / free), free) if free > 0 else math.nan
    if not math.isfinite(sigma):
        return Fitted(first, ())
    redrawn = curve + sigma * np.random.default_rng(seed).standard_normal((REFITS, len(curve)))
    return Fitted(first, tuple(fits(compute, redrawn, floor, unit)))


def multiplier(base: PowerLaw, other: PowerLaw, compute: float) -> float:
    """Return the compute that `base` needs for the loss of `other` at `compute`, divided by `compute`: 1.25 is a
    quarter more."""
    return base.reached(other.loss(compute)) / compute


def multiplier_interval(base: Fitted, other: Fitted, compute: float) -> tuple[float, float]:
    """Return the 95 % interval of the multiplier, over independently redrawn fits of both."""
    return _interval([multiplier(one, two, compute) for one, two in zip(base.draws, other.draws[::-1])])


def _interval(values: Sequence[float]) -> tuple[float, float]:
    if not values or np.isnan(values).any():
        return math.nan, math.nan
    low, high = np.percentile(np.minimum(np.asarray(values, dtype=float), 1e12), PERCENT)
    return float(low), float(high)
