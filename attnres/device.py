"""A device's autocast, the processor's cores, and interleaved measurements of time on a device."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device ("cpu", "cuda"); None where it is off, and on "meta"."""
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def cores() -> int:
    """Return how many of the processor's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Spread(NamedTuple):
    """Median and first and third quartile of measurements, and of the rounds' ratios to others taken in turn."""

    median: float
    quartiles: list[float]
    ratio: float
    ratio_quartiles: list[float]


def in_turn(
    measures: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    seconds: float = math.inf,
    least: int = 3,
    warm_up: int = 2,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Call each of `measures` in every round, and return what each gave, round by round.

    The order turns by one each round, so that none always follows the same other.

    Args:
        rounds, seconds, least: at most so many rounds, none begun after so many seconds, but at least so many.
        warm_up: calls of each beforehand, which do not count.
        on_round: called with the number of each finished round.
    """
    labels = list(measures)
    for label in labels * warm_up:
        measures[label]()
    values: dict[str, list[float]] = {label: [] for label in labels}
    began = time.perf_counter()
    for done in range(rounds if labels else 0):
        if done >= least and time.perf_counter() - began > seconds:
            break
        turn = done % len(labels)
        for label in labels[turn:] + labels[:turn]:
            values[label].append(measures[label]())
        if on_round is not None:
            on_round(done + 1)
    return values


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return seconds of one call, until the device has done it."""
    began = now(device)
    call()
    return now(device) - began


def now(device: torch.device) -> float:
    """Return the clock's seconds when the device has done all that it was given."""
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def spread(values: Sequence[float], base: Sequence[float] | None = None) -> Spread:
    """Return the median and quartiles of one label's times, and of their ratios to another's (by default its own)."""
    ratios = [one / other for one, other in zip(values, base or values, strict=True)]
    return Spread(statistics.median(values), _quartiles(values), statistics.median(ratios), _quartiles(ratios))


def _quartiles(values: Sequence[float]) -> list[float]:
    first, _, third = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return [first, third]
