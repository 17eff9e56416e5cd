"""Schedules are functions of the step: they rise, hold and fall where they say."""

from typing import Any

import pytest

from attnres.training.config import OptimConfig
from attnres.training.optim import scheduled_rate


def rates(steps: int, **values: Any) -> list[float]:
    optim = OptimConfig(min_lr_ratio=0.1, **values)
    return [scheduled_rate(step, steps, optim) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_never_zero() -> None:
    for schedule in ("cosine", "wsd"):
        assert rates(20, schedule=schedule, warmup=0.2)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates(20, schedule="wsd", warmup=0)[0] == 1.0


def test_cosine_falls_from_the_peak_to_the_floor() -> None:
    values = rates(100, warmup=0.1)
    assert values[9] == 1.0 and values[-1] == pytest.approx(0.1)
    assert values[:10] == sorted(values[:10]) and values[9:] == sorted(values[9:], reverse=True)
    assert values[54] == pytest.approx(0.55)  # half way down


def test_wsd_holds_the_peak_until_it_decays() -> None:
    values = rates(100, schedule="wsd", warmup=0.1, decay=0.2)
    assert set(values[9:80]) == {1.0} and values[-1] == pytest.approx(0.1) and values[89] == pytest.approx(0.55)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0])
def test_every_short_run_has_a_rate_above_zero_until_its_last_step(name: str, steps: int, warmup: float) -> None:
    assert all(0 < rate <= 1 for rate in rates(steps, schedule=name, warmup=warmup, decay=0.5))
