"""Tokens saved, on made-up curves whose answer is known."""

import math

import numpy as np
import pytest

from attnres.savings import LossCurve, fit, saving


def law(n, stretch=1.0):
    return 2.0 + 30 * (n * stretch) ** -0.4


def test_a_curve_that_is_as_good_with_fewer_tokens_saves_that_factor_everywhere():
    n = np.geomspace(1e3, 1e6, 9)
    base, other = LossCurve(zip(n, law(n))), LossCurve(zip(n, law(n, 1.25)))
    for loss in np.linspace(law(2e3), law(9e5), 7):
        found = saving(other, base, loss)
        assert found.tokens == pytest.approx(1.25, rel=1e-3) and not found.extrapolated
        assert saving(base, other, loss).tokens == pytest.approx(0.8, rel=1e-3)
    assert saving(other, base).loss == base.losses[-1], "the lowest that both have reached"
    assert saving(other, base).of_compute(1.25) == pytest.approx(1, rel=1e-3)


def test_beyond_the_last_point_the_fit_is_followed_and_said():
    n = np.geomspace(1e3, 1e6, 9)
    base = LossCurve(zip(n, law(n)))
    tokens, extrapolated = base.tokens(law(2e6))
    assert tokens == pytest.approx(2e6, rel=1e-2) and extrapolated
    assert base.tokens(1.0) == (math.inf, True)
    assert math.isnan(LossCurve([(1, 3.0), (2, 2.0)]).tokens(1.0).tokens), "two points have no fit"
    assert math.isnan(base.tokens(99.0).tokens)


def test_measured_points_are_met_and_readings_between_them_lie_between():
    """Brute force: on any falling curve, of the piece whose ends enclose the loss."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        n, losses = np.sort(rng.uniform(1, 1e4, 8)), np.sort(rng.uniform(2, 5, 8))[::-1]
        curve = LossCurve(zip(n, losses))
        assert [curve.tokens(loss).tokens for loss in losses] == pytest.approx(n.tolist())
        for loss in rng.uniform(losses[-1], losses[0], 5):
            (piece,) = [i for i in range(7) if losses[i] >= loss > losses[i + 1]]
            assert n[piece] <= curve.tokens(loss).tokens <= n[piece + 1]


def test_a_loss_is_reached_where_it_is_first_measured():
    curve = LossCurve([(3, 2.5), (1, 3.0), (2, 2.0), (4, 1.0)])
    assert curve.tokens(2.0).tokens == 2 and len(curve.losses) == 3


def test_the_fit_is_the_best_of_a_fine_grid():
    n = np.geomspace(10, 1e4, 6)
    losses = law(n) + np.random.default_rng(2).normal(scale=0.05, size=6)
    found = fit(n, losses)
    squares = ((found.loss(n) - losses) ** 2).sum()
    for exponent in np.linspace(0.02, 2.5, 100):
        design = np.stack([np.ones(6), n**-exponent], 1)
        (floor, scale), *_ = np.linalg.lstsq(design, losses)
        if floor >= 0 and scale > 0:
            assert squares <= ((design @ (floor, scale) - losses) ** 2).sum() * (1 + 1e-3)


@pytest.mark.parametrize(
    ("steps", "losses", "loss", "base"),
    [((2000, 4000, 8000, 16000), (3.60, 3.40, 3.30, 3.28), 3.28, 3.30), ((100, 200, 400), (4, 3, 2.99), 2.99, 3.0)],
)
def test_measured_lengths_are_met_where_a_fit_would_miss_them(steps, losses, loss, base):
    """Neither curve is a power law with an exponent of 2 at most."""
    curve = LossCurve(zip(steps, losses))
    assert [curve.tokens(one).tokens for one in losses] == pytest.approx(steps)
    assert curve.tokens(base).tokens / curve.tokens(loss).tokens == pytest.approx(0.5)
    places = [curve.tokens(one).tokens for one in np.linspace(losses[0], losses[-1] - 0.001, 300)]
    assert places == sorted(places), "a lower loss takes more steps, between the lengths and beyond them"
    assert not any(curve.tokens(one).extrapolated for one in losses) and curve.tokens(losses[-1] - 0.001).extrapolated
