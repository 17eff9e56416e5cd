"""Standard errors and paired differences, against their textbook forms."""

import math

import numpy as np
import pytest

from attnres.evals.scoring import NO_ITEMS, OTHER_PLACES, OTHER_TOKENS, Measure, Request, difference, tokens_digest

rng = np.random.default_rng(0)


def ones(n):
    return np.ones(n)


def test_accuracy_has_the_binomial_error_with_its_correction():
    right = (rng.random(50) < 0.3).astype(float)
    value, error = Measure("acc", "", right, ones(50)).estimate()
    assert value == right.mean()
    assert error == pytest.approx(math.sqrt(value * (1 - value) / 49))


def test_perplexity_has_the_error_of_its_mean_times_itself():
    loss = rng.random(40) + 2
    value, error = Measure("ppl", "", loss * 7, 7 * ones(40), exp=True).estimate()
    assert value == pytest.approx(math.exp(loss.mean()))
    assert error == pytest.approx(value * loss.std(ddof=1) / math.sqrt(40))


def test_a_shorter_window_weighs_less():
    value, _ = Measure("ppl", "", np.array([20.0, 1.0]), np.array([10.0, 1.0])).estimate()
    assert value == pytest.approx(21 / 11)


def test_a_single_item_has_no_error_and_left_out_items_do_not_count():
    assert Measure("acc", "", np.array([1.0]), ones(1)).estimate() == (1.0, None)
    some = Measure("acc", "", np.array([1.0, math.nan, 0.0]), ones(3))
    assert some.count == 2
    assert some.estimate()[0] == 0.5


def test_a_difference_is_taken_item_by_item():
    hard = rng.normal(size=60) * 5
    first, second = 10 + hard, 10.2 + hard + 0.1 * rng.normal(size=60)
    gap = difference(Measure("m", "", first, ones(60)), Measure("m", "", second, ones(60)))
    assert gap.paired
    assert gap.value == pytest.approx((second - first).mean())
    assert gap.error == pytest.approx((second - first).std(ddof=1) / math.sqrt(60))
    assert gap.error < 0.1 * np.hypot(first.std(), second.std()) / math.sqrt(60)


def test_an_item_that_one_model_left_out_is_in_no_difference():
    first = Measure("acc", "", np.array([1.0, 0.0, 1.0]), ones(3))
    second = Measure("acc", "", np.array([0.0, math.nan, 1.0]), ones(3))
    gap = difference(first, second)
    assert (gap.value, gap.count) == (-0.5, 2)


def test_other_tokens_forbid_a_difference_but_of_bits_per_byte():
    def measure(tokens, n, universal=False):
        return Measure("m", "", rng.random(n), ones(n), exp=not universal, tokens=tokens, universal=universal)

    gap = difference(measure("a", 5), measure("b", 5))
    assert (gap.value, gap.reason) == (None, OTHER_TOKENS)
    one, two = measure("a", 50, True), measure("b", 40, True)
    gap = difference(one, two)
    assert not gap.paired
    assert gap.value == pytest.approx(two.estimate()[0] - one.estimate()[0])
    assert gap.error == pytest.approx(math.hypot(one.estimate()[1], two.estimate()[1]))


def test_texts_that_are_cut_at_other_places_are_not_compared():
    ends = [np.array([1.0, 2.0]), np.array([1.0, 1.0])]
    one, two = (
        Measure("b", "b", *ends, tokens=name, universal=True, cut=cut) for name, cut in (("a", False), ("c", True))
    )
    assert difference(one, two) == difference(two, one)
    assert difference(one, two).value is None and difference(one, two).reason == OTHER_PLACES


def test_a_figure_without_items_has_no_difference():
    one = Measure("bleu", "", np.empty(0), np.empty(0), fixed=(31.0, None))
    assert one.estimate() == (31.0, None)
    assert difference(one, one).reason == NO_ITEMS


def test_the_digest_sees_every_token_and_boundary():
    same = [Request([1, 2], [3])]
    assert tokens_digest(same) == tokens_digest([Request((1, 2), [3])])
    assert tokens_digest(same) != tokens_digest([Request([1], [2, 3])])
    assert tokens_digest(same) != tokens_digest([Request([1, 2], [4])])
