"""Means and their errors are the formulas in their docstrings, on arrays small enough to do by hand."""

import math

import numpy as np
import pytest
from scipy import optimize, special

from attnres.stats import (
    Effect,
    RatioSums,
    Recipe,
    bartlett,
    holm,
    judged,
    moderated,
    ratio,
    standard_error,
    t_quantile,
)


def test_student_t():
    assert t_quantile(0.975, 1) == pytest.approx(12.706, rel=1e-3)
    assert t_quantile(0.975, 40) == pytest.approx(2.0211, abs=2e-4)
    assert t_quantile(0.975, 10_000) == pytest.approx(1.9602, abs=2e-4)
    with pytest.raises(ValueError, match="positive"):
        t_quantile(0.975, 0)


def test_the_error_of_a_ratio_with_ones_below_is_that_of_a_mean():
    values = np.array([1.0, 2.0, 4.0, math.nan])
    mean, error, items, total = ratio(values)
    assert (mean, items, total) == (pytest.approx(7 / 3), 3, 3.0)
    assert error == pytest.approx(np.std(values[:3], ddof=1) / math.sqrt(3))
    assert error == pytest.approx(standard_error(values))
    assert ratio(np.array([2.0]))[0] == 2.0 and math.isnan(ratio(np.array([2.0])).error)
    assert math.isnan(ratio(np.array([])).mean)
    assert ratio(np.array([20.0, 15.0, 9.0]), np.array([10.0, 5.0, 0.0]))[:3:2] == (pytest.approx(35 / 15), 2)


def test_standard_errors_along_an_axis_leave_out_nan():
    values = np.array([[1.0, 5.0], [3.0, math.nan], [8.0, math.nan]])
    np.testing.assert_allclose(standard_error(values, 0), [np.std([1, 3, 8], ddof=1) / math.sqrt(3), math.nan])
    assert standard_error(values, 1).shape == (3,)


def test_errors_of_labels_are_those_of_a_ratio_over_documents():
    rng = np.random.default_rng(0)
    sums = RatioSums(2, 3)
    tokens, totals = [], []
    for _ in range(7):
        count = rng.integers(1, 9)
        values = rng.random((count, 3))
        tokens.append(count)
        totals.append(values.sum(0))
        sums.add(np.array([count, 0.0]), np.stack([values.sum(0), np.zeros(3)]))
    b, a = np.array(tokens, dtype=float), np.stack(totals)
    mean = a.sum(0) / b.sum()
    error = np.sqrt(7 / 6 * ((a - mean * b[:, None]) ** 2).sum(0)) / b.sum()
    seen = sums.ratio(0)
    assert (seen.total, seen.items) == (b.sum(), 7)
    np.testing.assert_allclose(seen.mean, mean)
    np.testing.assert_allclose(seen.error, error)
    assert sums.ratio(1).total == 0 and np.isnan(sums.ratio(1).mean).all()


def test_one_document_has_a_mean_and_no_error():
    sums = RatioSums(1, 1)
    sums.add(np.array([2.0]), np.array([[3.0]]))
    assert sums.ratio(0).mean[0] == 1.5 and np.isnan(sums.ratio(0).error[0])


# ------------------------------------------------------------------ comparisons


def test_quantiles_are_exact_and_take_broken_degrees():
    """Student's t of one and of two degrees has a closed form; of 3.5 the integral of its density is taken."""
    assert t_quantile(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-10)
    assert t_quantile(0.99, 2) == pytest.approx(0.98 * math.sqrt(2 / (1 - 0.98**2)), rel=1e-10)
    x = np.linspace(0, t_quantile(0.95, 3.5), 200_001)
    density = (1 + x**2 / 3.5) ** -2.25 * math.exp(math.lgamma(2.25) - math.lgamma(1.75)) / math.sqrt(3.5 * math.pi)
    assert np.trapezoid(density, x) == pytest.approx(0.45, abs=1e-9)


def test_two_mechanisms_of_the_same_seeds_are_the_paired_t_test():
    """By the formula of the paired test, however much the seeds have in common."""
    base, other = np.array([0.3, -1.2, 0.8, 2.0]), np.array([0.1, -1.1, 0.4, 1.9])
    runs = [*(("a", seed, value) for seed, value in enumerate(base)), *(("b", s, v) for s, v in enumerate(other))]
    effect = Recipe(runs).effect("b", "a")
    assert effect.difference == pytest.approx((other - base).mean())
    assert (effect.error, effect.degrees) == (pytest.approx(standard_error(other - base)), 3)


def test_seeds_that_carry_nothing_leave_the_means_of_all_runs():
    """Then a difference is that of the plain means, by the residual's sigma; of least squares with numpy."""
    groups = {"a": [1.0, 2.0, 3.0, 2.5], "b": [3.0, 2.0, 1.0], "c": [2.0, 1.0, 3.0]}
    runs = [(name, seed, value) for name, values in groups.items() for seed, value in enumerate(values)]
    recipe = Recipe(runs)
    effect = recipe.effect("b", "a")
    assert effect.difference == pytest.approx(np.mean(groups["b"]) - np.mean(groups["a"]))
    design = np.array([[*(one == name for name in groups), *(seed == k for k in range(4))] for one, seed, _ in runs])
    _, _, rank, _ = np.linalg.lstsq(design.astype(float), y := np.array([value for *_, value in runs]), rcond=None)
    left = y - design @ np.linalg.lstsq(design.astype(float), y, rcond=None)[0]
    assert recipe.degrees == len(y) - rank == 4 and recipe.sigma == pytest.approx(math.sqrt(left @ left / 4))
    assert effect.error == pytest.approx(recipe.sigma * math.sqrt(1 / 4 + 1 / 3))


def test_where_most_seeds_are_of_one_mechanism_noise_is_that_within_mechanisms():
    """The two-sample t-test with pooled variance: of its eight degrees pairs would leave one."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=8), rng.normal(1.0, size=2)
    recipe = Recipe([*(("a", seed, value) for seed, value in enumerate(a)), *(("b", s, v) for s, v in enumerate(b))])
    effect = recipe.effect("b", "a")
    pooled_variance = (7 * a.var(ddof=1) + b.var(ddof=1)) / 8
    assert effect.difference == pytest.approx(b.mean() - a.mean()) and effect.degrees == 8
    assert effect.error == pytest.approx(math.sqrt(pooled_variance * (1 / 8 + 1 / 2)))


def test_unequal_variances_have_welchs_degrees():
    rng = np.random.default_rng(0)
    groups = {"a": rng.normal(0, 1, 12), "b": rng.normal(0, 30, 4), "c": rng.normal(0, 1, 12)}
    seeds = iter(range(100))  # nothing is shared: the classical test
    recipe = Recipe((name, next(seeds), value) for name, values in groups.items() for value in values)
    own = [(values.var(ddof=1), len(values) - 1) for values in groups.values()]
    drawn = moderated(*zip(*own))
    assert drawn[1] < own[1]  # a large variance stays as it is, a small one is drawn up
    (a, of_a), (b, of_b) = max(own[0], drawn[0]), own[1]
    a, b = a / 12, b / 4
    effect = recipe.effect("b", "a")
    assert recipe.p_equal < 0.05 and effect.error == pytest.approx(math.sqrt(a + b))
    assert effect.degrees == pytest.approx((a + b) ** 2 / (a**2 / of_a + b**2 / of_b))
    assert bartlett([1.0, 1.0], [3, 5]) == 1


def test_variances_are_drawn_towards_what_all_suggest():
    """Against the moments of log s^2 with SciPy's functions; where they scatter by chance alone, one for all."""
    rng = np.random.default_rng(5)
    d = rng.integers(1, 8, 60)
    s2 = 0.5 * rng.chisquare(d) / d * 6 / rng.chisquare(6, 60)  # a prior of 6 degrees about 0.5
    own = moderated(s2.tolist(), d.tolist())
    e = np.log(s2) - special.digamma(d / 2) + np.log(d / 2)
    target = e.var(ddof=1) - special.polygamma(1, d / 2).mean()
    half = optimize.brentq(lambda x: special.polygamma(1, x) - target, 1e-3, 1e6)
    s0 = np.exp(e.mean() + special.digamma(half) - np.log(half))
    assert [one for one, _ in own] == pytest.approx((2 * half * s0 + d * s2) / (2 * half + d))
    assert [one for _, one in own] == pytest.approx(2 * half + d) and 2 < 2 * half < 20
    assert moderated([1.0, 1.0, 1.1], [4, 4, 4]) == [(pytest.approx(1.0333333), 12.0)] * 3


def test_an_interval_excludes_0_where_holm_rejects():
    """Against the procedure as its definition has it, for p drawn at random; what was planned keeps 5 %."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        p = rng.choice([0.2, 0.02, 0.004], 5) * rng.random(5)
        rejected = set()
        for rank, which in enumerate(np.argsort(p)):
            if p[which] >= 0.05 / (5 - rank):
                break
            rejected.add(int(which))
        assert {i for i, (value, level) in enumerate(zip(p, holm(p.tolist()))) if value < level} == rejected
    effects = judged([Effect(1.0, 0.4, 9), Effect(1.0, 0.4, 9), Effect(0.1, 0.4, 9)], [True, False, False])
    assert [one.level for one in effects] == [0.05, 0.025, 0.025]
    assert [one.excludes() for one in effects] == [True, False, False]
    assert effects[0].excludes(3.0) and not effects[0].excludes(0.5)


def test_the_rule_is_wrong_in_one_of_twenty_null_studies():
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(300):
        luck = rng.normal(size=6)
        runs = [(name, s, luck[s] + rng.normal()) for name, n in (("a", 6), ("b", 3), ("c", 3)) for s in range(n)]
        wrong += Recipe(runs).effect("b", "a").excludes()
    assert 5 <= wrong <= 27  # of 300 at 5 %: 15, standard deviation 3.8
