"""Overlap transfers with the device's work: batches are sent ahead, and numbers are read back late.

Pinned memory and events exist only for CUDA, where the host may continue before a copy or a step has ended.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from attnres.data import Batches


class Feed:
    """The batches of a run in order, each made while the previous step runs, in pinned memory on CUDA.

    Args:
        rank, world_size: this process's part of each batch.
        steps: number of steps; no batch is made beyond them.
    """

    def __init__(self, batches: Batches, device: torch.device, *, rank: int, world_size: int, steps: int) -> None:
        self.batches, self.device, self.steps = batches, device, steps
        self.share = {"rank": rank, "world_size": world_size}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step, on the device; raises the errors of `Batches.at`."""
        ready, self.next = self.next, None
        x, y = ready[1].result() if ready is not None and ready[0] == step else self._make(step)
        if step + 1 < self.steps:
            self.next = step + 1, self.thread.submit(self._make, step + 1)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown(cancel_futures=True)

    def _make(self, step: int) -> tuple[Tensor, Tensor]:
        x, y = self.batches.at(step, **self.share)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)


def to_device(numbers: list[float], like: Tensor) -> Tensor:
    """Return a tensor of numbers with the dtype and device of another, without waiting for the device."""
    values = torch.tensor(numbers, dtype=like.dtype)
    return values.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else values.to(like.device)


class Moment(NamedTuple):
    """The time at which a step reached a point, on the device's clock if it has one."""

    at: float | torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Moment":
        """Record the moment when the device reaches this point in its queue."""
        if device.type != "cuda":
            return cls(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event)

    def seconds_until(self, later: "Moment") -> float:
        """Return the seconds from this moment to a later one, waiting for the later one."""
        if isinstance(self.at, torch.cuda.Event) and isinstance(later.at, torch.cuda.Event):
            later.at.synchronize()
            return self.at.elapsed_time(later.at) / 1000
        assert isinstance(self.at, float) and isinstance(later.at, float)
        return later.at - self.at


class Numbers:
    """A few numbers on their way from the device; `read` waits for them."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.arrived = values, None
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(
                values, non_blocking=True
            )
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


class Arriving:
    """Results and times of the last steps: read at once on a CPU, and one step later on a GPU, so that the device need
    not wait.

    Attributes:
        numbers: steps and their results. moments: the start and end of each step, and whether it was an ordinary one.
    """

    def __init__(self, device: torch.device) -> None:
        self.behind = 1 if device.type == "cuda" else 0
        self.numbers: deque[tuple[int, Numbers]] = deque()
        self.moments: deque[tuple[Moment, Moment, bool]] = deque()

    def steps(self, *, to_come: int = 0) -> Iterator[tuple[int, list[float]]]:
        """Yield each step's numbers in order, except for the last `to_come` steps."""
        while len(self.numbers) > to_come:
            step, numbers = self.numbers.popleft()
            yield step, numbers.read()

    def times(self, *, to_come: int = 0) -> Iterator[tuple[float, bool]]:
        """Yield each step's seconds and whether it was an ordinary step, except for the last `to_come` steps."""
        while len(self.moments) > to_come:
            began, ended, usual = self.moments.popleft()
            yield began.seconds_until(ended), usual
