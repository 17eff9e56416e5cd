"""The committed rates of wrong and right intervals are those that a rerun of a few simulated studies finds."""

import json
import math

import power
import pytest

STORED = json.loads((power.DATA / "power_micro.json").read_text("utf-8"))


def test_the_stored_design_is_that_of_the_runs():
    again = power.measured(1)
    assert STORED["studies"] == power.STUDIES and STORED.keys() == again.keys()
    for name in ("level", "runs", "sigma", "degrees", "p_of_equal_variances", "seed_sd"):
        assert STORED[name] == pytest.approx(again[name], rel=1e-4), name
    assert [*_rates(STORED)] == [*_rates(again)]


@pytest.mark.long
def test_the_stored_rates_are_those_of_a_rerun():
    n, many = 20, STORED["studies"]
    again = _rates(power.measured(n))
    for name, rate in _rates(STORED).items():
        share = (n * again[name] + many * rate) / (n + many)
        assert abs(again[name] - rate) <= 3.5 * math.sqrt(share * (1 - share) * (1 / n + 1 / many)), name


def _rates(result):
    """Each rate by its case and question, in the file's order."""
    rates = {}
    for case, values in result["results"].items():
        wrong, *others = values.items()
        rates |= {(case, name): float(rate) for name, rate in [*wrong[1].items(), *others]}
    return rates
