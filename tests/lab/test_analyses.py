"""Analyses on made-up numbers whose answer is known."""

import math

import numpy as np
import pytest

from attnres.stats import f_tail, t_quantile
from lab.analyses.budgets import trend
from lab.analyses.exchange import exchange, falling
from lab.analyses.halving import at_best, beyond, survivors
from lab.analyses.noise import RULE, UNMEASURED, Noise, beside, combined, pooled, spread_of
from lab.analyses.optimum import optimum
from lab.analyses.scaling import Fit, fit, fitted, multiplier, multiplier_interval

# ------------------------------------------------------------------ noise


def test_students_t_is_that_of_the_table():
    for degrees, point in ((1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (200, 1.972)):
        assert t_quantile(0.975, degrees) == pytest.approx(point, rel=2e-3)  # NIST, 1.3.6.7.2
    for degrees, probability, point in ((7, 0.995, 3.499), (10, 0.9995, 4.587), (1, 0.75, 1.0), (20, 0.9, 1.325)):
        assert t_quantile(probability, degrees) == pytest.approx(point, rel=2e-3)  # NIST, 1.3.6.7.2


def null_study(draw: np.random.Generator, mechanisms: int, seeds: int, floor: int) -> int:
    """How many verdicts a study of one function under many names comes to: none of them would be right."""
    baseline = draw.normal(3.0, 0.02, floor)
    groups = [draw.normal(3.0, 0.02, seeds) for _ in range(mechanisms)]
    noise = pooled([baseline])
    differences = [float(group.mean() - baseline.mean()) for group in groups]
    verdicts = [noise.verdict(difference, seeds, floor, mechanisms) for difference in differences]
    return sum(verdict != "undecided" for verdict in verdicts)


@pytest.mark.parametrize(("mechanisms", "seeds", "floor"), [(12, 3, 8), (40, 1, 8), (1, 3, 8), (40, 3, 30), (5, 2, 3)])
def test_a_study_of_one_function_under_many_names_finds_nothing(mechanisms, seeds, floor):
    draw = np.random.default_rng(0)
    quiet = [null_study(draw, mechanisms, seeds, floor) == 0 for _ in range(400)]
    assert np.mean(quiet) >= 0.93


def test_without_the_correction_it_would_find_something():
    draw = np.random.default_rng(0)
    loud = 0
    for _ in range(200):
        base = draw.normal(size=8)
        noise = pooled([base])
        means = draw.normal(size=(40, 3)).mean(1) - base.mean()
        loud += any(abs(mean) > RULE * noise.error(3, 8) for mean in means)
    assert loud > 40


def test_the_smallest_detectable_difference_is_found_four_times_in_five():
    draw, noise = np.random.default_rng(1), Noise(0.02, 60)
    size = noise.detectable(3, 8, 12)
    hits = 0
    for _ in range(2000):
        difference = draw.normal(-size, noise.error(3, 8))
        hits += noise.verdict(difference, 3, 8, 12) == "better"
    assert hits / 2000 == pytest.approx(0.8, abs=0.03)
    assert noise.verdict(0.2, 3, 8, 12) == "worse"


def test_noise_is_pooled_within_groups():
    assert pooled([[1.0, 3.0], [10.0, 12.0]]) == Noise(math.sqrt(2), 2)
    assert combined(Noise(1.0, 3, "a"), Noise(3.0, 1, "b")) == Noise(math.sqrt(3), 4, "a; b")
    assert combined(UNMEASURED, Noise(1.0, 3)).degrees == 3
    assert pooled([[1.0]]).degrees == 0
    assert pooled([[1.0]]).verdict(-100.0, 1, 1) == "undecided", "of one seed nothing is known"
    assert Noise(1.0, 1000).threshold(1, 1) == pytest.approx(RULE * math.sqrt(2))


def test_fishers_f_is_that_of_the_table():
    for first, second, point in ((2, 8, 4.459), (7, 7, 3.787), (1, 10, 4.965), (20, 5, 4.558), (3, 30, 2.922)):
        assert f_tail(point, first, second) == pytest.approx(0.05, abs=1e-4)  # NIST, 1.3.6.7.3
    assert f_tail(1e9, 2, 8) == pytest.approx(0, abs=1e-6) and f_tail(0.0, 2, 8) == 1


def test_one_mechanism_that_varies_more_spoils_no_other():
    draw = np.random.default_rng(0)
    groups = {str(i): draw.normal(3.0, 0.01, 3).tolist() for i in range(12)} | {"wild": [3.0, 3.5, 4.0]}
    spread = spread_of(groups)
    assert set(spread.own) == {"wild"} and 0.006 < spread.shared.sigma < 0.014 and spread.shared.degrees == 24
    assert spread.between("1", 3, "2", 3) == spread.shared
    apart = spread.between("wild", 3, "1", 3)
    assert (
        apart.error(3, 3) == pytest.approx(math.hypot(0.5, spread.shared.sigma) / math.sqrt(3)) and apart.degrees == 2
    )
    assert spread_of({"a": [3.0, 3.5, 4.0]}).own == {}, "with nothing beside it nothing is known to vary less"
    assert spread_of({"a": [1.0, 1.0]}, floor=0.01).shared.sigma == 0.01


def test_groups_are_judged_beside_the_baseline():
    groups = {"plain": [0.0, 0.1], "high": [1.0, 1.1], "low": [-0.2, -0.1], "none": []}
    judged = beside(groups, "plain", comparisons=1)
    assert list(judged) == ["high", "low"] and beside(groups, "none", 1) == {}
    # three variances of 0.005 pooled, Student's t of three degrees at 5 % is 3.182
    assert judged["high"].threshold == pytest.approx(3.182 * math.sqrt(0.005), rel=1e-3)
    assert (judged["high"].verdict, judged["low"].verdict) == ("worse", "undecided")
    assert judged["low"].difference == pytest.approx(-0.2)


def test_steady_mechanisms_are_seldom_taken_for_wild_ones():
    draw = np.random.default_rng(1)
    taken = [bool(spread_of({str(i): draw.normal(size=3) for i in range(13)}).own) for _ in range(300)]
    assert np.mean(taken) < 0.03


# ------------------------------------------------------------------ exchange rate


def test_the_exchange_rate_of_a_known_curve():
    """Losses fall ever more slowly: a line between two lengths would say 12 % where 10 % are saved."""

    def curve(n: float) -> float:
        return 3.4 + 100 * n**-0.66

    steps = [500, 1000, 2000, 4000]
    rate = exchange(steps[::-1], [curve(n) for n in steps[::-1]])
    for other in (600, 1000, 3000, 6000, 200):
        assert rate.equal(curve(other)) == pytest.approx(other, rel=1e-3)
    loss, base = curve(2500), curve(2000)
    assert rate.saved(loss, base) == pytest.approx(0.2, abs=1e-3)
    assert exchange([2000, 4000], [base, curve(4000)]).saved(curve(2000 / 0.9), base) == pytest.approx(0.12, abs=0.006)
    assert rate.saved(loss, base, 1.25) == pytest.approx(0, abs=1e-3)
    assert rate.saved(loss, loss) == 0, "nothing is saved against a baseline that is as good"
    assert rate.within(3.0) == rate.losses[-1] and rate.within(9.0) == rate.losses[0] and rate.within(loss) == loss


@pytest.mark.parametrize(
    ("steps", "losses", "loss", "base"),
    [((2000, 4000, 8000, 16000), (3.60, 3.40, 3.30, 3.28), 3.28, 3.30), ((100, 200, 400), (4, 3, 2.99), 2.99, 3.0)],
)
def test_measured_lengths_are_their_own_rate(steps, losses, loss, base):
    """Neither curve is a power law with an exponent of 2 at most: its fit misses the points."""
    rate = exchange(steps, losses)
    assert [rate.equal(one) for one in losses] == pytest.approx(steps)
    assert rate.saved(loss, base) == pytest.approx(0.5)
    places = [rate.equal(one) for one in np.linspace(losses[0] + 0.1, losses[-1] - 0.001, 300)]
    assert places == sorted(places), "a lower loss takes more steps, between the lengths and beyond them"
    assert not any(map(rate.extrapolates, losses)) and rate.extrapolates(losses[-1] - 0.001)


def test_noise_makes_no_longer_run_worse():
    assert falling([3.0, 1.0, 2.0, 0.5]) == [3.0, 1.5, 1.5, 0.5]
    rate = exchange([100, 200, 400, 800], [3.0, 1.0, 2.0, 0.5])
    assert rate.losses == (3.0, 1.5, 0.5) and rate.steps[1] == pytest.approx(math.sqrt(200 * 400))
    assert math.isnan(exchange([100, 200], [1.0, 2.0]).equal(1.2)), "a curve that never falls names no step"


# ------------------------------------------------------------------ scaling


def curve(compute, floor=1.7, scale=0.9, exponent=0.3):
    unit = float(np.exp(np.log(compute).mean()))
    return Fit(floor, scale, exponent, unit)


def test_a_fit_without_noise_is_the_curve():
    compute = np.geomspace(1e12, 1e16, 6)
    truth = curve(compute)
    ours = fit(compute, [truth.loss(c) for c in compute])
    assert (ours.floor, ours.scale, ours.exponent) == pytest.approx((1.7, 0.9, 0.3), rel=1e-3)
    pinned = fit(compute[:2], [truth.loss(c) for c in compute[:2]], floor=1.7)
    assert pinned.exponent == pytest.approx(0.3, rel=1e-3)
    assert ours.compute(truth.loss(3e14)) == pytest.approx(3e14, rel=1e-2)
    assert ours.compute(1.6) == math.inf


def test_losses_that_do_not_fall_are_fitted_by_their_mean():
    """The least squares of a curve that cannot rise."""
    assert fit([1.0, 2.0, 3.0, 4.0], [3.0, 3.1, 3.2, 3.3]).loss(2.0) == pytest.approx(3.15)


def test_the_papers_fit_gives_the_papers_multiplier():
    """1.25 times the compute at 5.6 PFLOP/s-days, from 1.891 C^-.057 and 1.870 C^-.058 (arXiv 2603.15031)."""
    base, block = Fit(0.0, 1.891, 0.057, 1.0), Fit(0.0, 1.870, 0.058, 1.0)
    assert multiplier(base, block, 5.6) == pytest.approx(1.25, abs=0.03)


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
    noise = Noise(0.002, 14)
    base = {n: [3.0, 3.001] for n in (0.5, 1, 2, 4)}
    shrinks = trend({n: [3.0 - 0.04 + 0.01 * math.log2(n)] * 2 for n in base}, base, noise)
    assert shrinks.slope == pytest.approx(0.01) and shrinks.answer == "shrinks"
    assert trend({n: [2.96 - 0.01 * math.log2(n)] * 2 for n in base}, base, noise).answer == "grows"
    assert trend({n: [2.96 + 1e-4 * math.log2(n)] * 2 for n in base}, base, noise).answer == "undecided"
    assert trend({n: [2.9 + 0.1 * n] for n in base}, base, UNMEASURED).answer == "undecided"
    assert trend({1: [2.9]}, base, noise).answer == "undecided"
    across = {n: [3.0005 + gap] * 2 for n, gap in zip(base, (0.02, 0.0, -0.03, -0.06))}
    assert trend(across, base, noise).answer == "changes its sign"
    hardly = {n: [3.0005 + gap] * 2 for n, gap in zip(base, (0.002, -0.02, -0.04, -0.06))}
    assert trend(hardly, base, noise).answer == "grows"


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
