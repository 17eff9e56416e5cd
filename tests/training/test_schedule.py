"""Schedules are functions of the step: they rise, hold and fall where they say."""

import pytest

from attnres.errors import UserError
from attnres.training.optim import cosine, fraction_of_peak, warm_up, wsd


def test_warm_up_is_linear_and_never_zero() -> None:
    assert [warm_up(step, 4) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert warm_up(1, 0) == 1.0


def test_cosine_falls_from_the_peak_to_the_floor() -> None:
    values = [cosine(step, 100, warmup=10, floor=0.1) for step in range(1, 101)]
    assert values[9] == 1.0 and values[-1] == pytest.approx(0.1)
    assert values[:10] == sorted(values[:10]) and values[9:] == sorted(values[9:], reverse=True)
    assert values[54] == pytest.approx(0.55)  # half way down


def test_wsd_holds_the_peak_until_it_decays() -> None:
    values = [wsd(step, 100, warmup=10, decay=20, floor=0.1) for step in range(1, 101)]
    assert set(values[9:80]) == {1.0} and values[-1] == pytest.approx(0.1) and values[89] == pytest.approx(0.55)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_every_short_run_has_a_rate_above_zero_until_its_last_step(name: str, steps: int, warmup: float) -> None:
    rates = [
        fraction_of_peak(s, steps, schedule=name, warmup=warmup, decay=0.5, floor=0.1) for s in range(1, steps + 1)
    ]
    assert all(0 < rate <= 1 for rate in rates)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'cosine'"):
        fraction_of_peak(1, 2, schedule="cosin")
