"""Turns are taken as told; medians and quartiles are of the rounds' ratios. No time is asserted."""

import pytest

from attnres.device import in_turn, spread


def test_the_order_turns_by_one_each_round_after_the_warm_up():
    calls, rounds = [], []
    measures = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "abc"}
    values = in_turn(measures, rounds=3, warm_up=1, on_round=rounds.append)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert values == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}
    assert rounds == [1, 2, 3]


def test_time_ends_the_rounds_but_for_the_least():
    assert in_turn({"a": lambda: 1.0}, rounds=9, seconds=0.0, least=2) == {"a": [1.0, 1.0]}
    assert in_turn({}, rounds=9) == {}


def test_ratios_are_of_the_rounds():
    median, quartiles, ratio, ratio_quartiles = spread([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert (median, quartiles) == (4.0, [2.0, 9.0])
    assert (ratio, ratio_quartiles) == (2.0, [2.0, 3.0])
    assert spread([3.0]) == (3.0, [3.0, 3.0], 1.0, [1.0, 1.0])
    with pytest.raises(ValueError, match="zip"):
        spread([1.0], [1.0, 2.0])
