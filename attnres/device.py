"""The dtype of autocast, the number of CPU cores, and interleaved timing on a device."""

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
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Spread(NamedTuple):
    """Median, first and third quartile of measurements, and of their ratios, round by round, to those of a baseline."""

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
    """Call each of `measures` in every round; return the results of each, by round.

    The order rotates by one each round, so that no measure always follows the same one.

    Args:
        rounds, seconds, least: at most `rounds` rounds, none begun after `seconds`, but at least `least`.
        warm_up: calls of each measure beforehand, not counted.
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
    """Return the seconds of one call, until the device has finished it."""
    began = now(device)
    call()
    return now(device) - began


def now(device: torch.device) -> float:
    """Return the clock's seconds once the device has finished all its work."""
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def spread(values: Sequence[float], base: Sequence[float] | None = None) -> Spread:
    """Return the median and quartiles of `values`, and of their ratios to `base` (by default to themselves)."""
    ratios = [one / other for one, other in zip(values, base or values, strict=True)]
    return Spread(statistics.median(values), _quartiles(values), statistics.median(ratios), _quartiles(ratios))


def _quartiles(values: Sequence[float]) -> list[float]:
    first, _, third = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return [first, third]
