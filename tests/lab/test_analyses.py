"""Analyses on made-up numbers whose answer is known."""

import math

import numpy as np
import pytest

from attnres.savings import PowerLaw, fit
from attnres.stats import t_quantile
from lab.analyses import (
    at_best,
    beyond,
    fitted,
    multiplier,
    multiplier_interval,
    optimum,
    survivors,
    trend,
)


def test_students_t_is_that_of_the_table():
    for degrees, point in ((1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (200, 1.972)):
        assert t_quantile(0.975, degrees) == pytest.approx(point, rel=2e-3)  # NIST, 1.3.6.7.2
    for degrees, probability, point in ((7, 0.995, 3.499), (10, 0.9995, 4.587), (1, 0.75, 1.0), (20, 0.9, 1.325)):
        assert t_quantile(probability, degrees) == pytest.approx(point, rel=2e-3)  # NIST, 1.3.6.7.2


# ------------------------------------------------------------------ scaling


def curve(compute, floor=1.7, scale=0.9, exponent=0.3):
    unit = float(np.exp(np.log(compute).mean()))
    return PowerLaw(floor, scale, exponent, unit)


def test_a_fit_without_noise_is_the_curve():
    compute = np.geomspace(1e12, 1e16, 6)
    truth = curve(compute)
    ours = fit(compute, [truth.loss(c) for c in compute])
    assert (ours.floor, ours.scale, ours.exponent) == pytest.approx((1.7, 0.9, 0.3), rel=1e-3)
    pinned = fit(compute[:2], [truth.loss(c) for c in compute[:2]], floor=1.7)
    assert pinned.exponent == pytest.approx(0.3, rel=1e-3)
    assert ours.reached(truth.loss(3e14)) == pytest.approx(3e14, rel=1e-2)
    assert ours.reached(1.6) == math.inf


def test_losses_that_do_not_fall_are_fitted_by_their_mean():
    """The least squares of a curve that cannot rise."""
    assert fit([1.0, 2.0, 3.0, 4.0], [3.0, 3.1, 3.2, 3.3]).loss(2.0) == pytest.approx(3.15)


def test_the_papers_fit_gives_the_papers_multiplier():
    """1.25 times the compute at 5.6 PFLOP/s-days, from 1.891 C^-.057 and 1.870 C^-.058 (arXiv 2603.15031)."""
    base, block = PowerLaw(0.0, 1.891, 0.057, 1.0), PowerLaw(0.0, 1.870, 0.058, 1.0)
    assert multiplier(base, block, 5.6) == pytest.approx(1.25, abs=0.03)


@pytest.mark.long
def test_intervals_hold_the_planted_numbers():
    compute = np.geomspace(1e12, 1e16, 6)
    truth, better = curve(compute), curve(compute, scale=0.85)
    draw = np.random.default_rng(3)
    held = []
    for trial in range(16):
        losses = [[f.loss(c) + 0.004 * draw.standard_normal() for c in compute] for f in (truth, better)]
        one, two = (fitted(compute, row, 0.004, seed=trial) for row in losses)
        bounds = [(one.interval("scale"), 0.9), (one.interval("exponent"), 0.3)]
        bounds.append((multiplier_interval(one, two, compute[3]), multiplier(truth, better, compute[3])))
        held += [low <= value <= high for (low, high), value in bounds]
    assert np.mean(held) >= 0.85


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match="a fit needs 3"):
        fit([1.0, 2.0], [3.0, 2.0])
    assert fitted([1.0, 2.0], [3.0, 2.0], floor=0.0).draws == (), (
        "two points through which the curve goes have no error"
    )


# ------------------------------------------------------------------ optimum, budgets, halving


def test_the_valley_of_a_parabola():
    x = [5, 10, 20, 40, 80]
    values = [2 + 0.1 * math.log(n / 25) ** 2 for n in x]
    low = optimum(x, [v + e for v, e in zip(values, (1e-3, -1e-3, 5e-4, -5e-4, 0))], sigma=1e-3)
    assert low.at == pytest.approx(25, rel=0.05) and low.inside and low.low < 25 < low.high
    bent = optimum(x, [v + e for v, e in zip(values, (0.02, -0.02, 0.01, -0.01, 0))], sigma=1e-3)
    assert math.log(bent.high / bent.low) > 3 * math.log(low.high / low.low), "what the parabola leaves is chance too"
    edge = optimum([5, 10, 20], [3.0, 2.0, 1.0])
    assert edge.at == pytest.approx(20) and not edge.inside
    assert optimum([5, 10, 20], [1.0, 2.0, 1.9]).at == pytest.approx(5), "a hill has no valley"


def test_whether_a_gap_shrinks():
    noise = 0.002, 14
    base = {n: [3.0, 3.001] for n in (0.5, 1, 2, 4)}
    shrinks = trend({n: [3.0 - 0.04 + 0.01 * math.log2(n)] * 2 for n in base}, base, *noise)
    assert shrinks.slope.difference == pytest.approx(0.01) and shrinks.answer == "shrinks"
    # Least squares over four budgets of two runs a side: sigma sqrt(1/2 + 1/2) over the root of the sum of squares, 5.
    assert shrinks.slope.error == pytest.approx(0.002 / math.sqrt(5))
    assert trend({n: [2.96 - 0.01 * math.log2(n)] * 2 for n in base}, base, *noise).answer == "grows"
    assert trend({n: [2.96 + 1e-4 * math.log2(n)] * 2 for n in base}, base, *noise).answer == "includes 0"
    assert trend({n: [2.9 + 0.1 * n] for n in base}, base, math.nan, 0).answer == "includes 0"
    assert trend({1: [2.9]}, base, *noise).answer == "includes 0"
    across = {n: [3.0005 + gap] * 2 for n, gap in zip(base, (0.02, 0.0, -0.03, -0.06))}
    assert trend(across, base, *noise).answer == "changes its sign"
    hardly = {n: [3.0005 + gap] * 2 for n, gap in zip(base, (0.002, -0.02, -0.04, -0.06))}
    assert trend(hardly, base, *noise).answer == "grows"


def test_halving_keeps_the_planted_best():
    """Four rates of each of three mechanisms at one seed, one of them better by three sigma."""
    draw = np.random.default_rng(0)
    of = {f"{mechanism}{rate}": mechanism for mechanism in "abc" for rate in range(4)}
    kept = 0
    for _ in range(200):
        losses = {name: 3 - 0.03 * name.endswith("2") + 0.01 * draw.standard_normal() for name in of}
        kept += sum(best.endswith("2") for best in at_best(losses, of).values())
    assert kept >= 0.9 * 600
    assert survivors({"a": math.nan, "b": 2.0}, 2) == ["b"]


def test_the_best_rate_of_each_and_one_beyond():
    losses = {"a-1": 3.0, "a-2": 2.0, "b-1": 1.0, "c-1": math.nan}
    assert at_best(losses, {name: name[0] for name in losses}) == {"a": "a-2", "b": "b-1"}
    assert beyond({1.0: 3.0, 2.0: 2.5}, 2.0, 16.0) == 4.0
    assert beyond({1.0: 2.0, 2.0: 2.5}, 2.0, 16.0) == 0.5
    assert beyond({0.5: 2.1, 1.0: 2.0, 2.0: 2.5}, 2.0, 16.0) is None
    assert beyond({1 / 16: 2.0, 2.0: 2.5}, 2.0, 16.0) is None
    assert beyond({8.0: 3.0, 16.0: 2.5}, 2.0, 16.0) is None
    assert beyond({1.0: 3.0, 2.0: math.nan}, 2.0, 16.0) == 0.5
    assert beyond({1.0: math.nan}, 2.0, 16.0) is None
