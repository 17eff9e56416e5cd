"""Passes of a training step as CUDA graphs: their kernels are recorded once and then launched by one call.

Not captured, a step of a small model waits for the host, which takes longer to launch a kernel than the device to run
it. A graph fixes addresses: inputs are copied into tensors of its own, and gradients stay in those that it writes.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import first_line
from attnres.residuals import Residual
from attnres.training.muon import StackedMuon

WARM_UP = 3
"""Steps of a shape that are taken without a graph first: they compile kernels and make the optimizers' state."""
MOST_SHAPES = 4
"""Shapes of batches with graphs of their own. Each keeps a set of gradients and the activations of a pass."""

Micro = Callable[[Tensor, Tensor, int, bool], Tensor]
"""Forward and backward of a micro-batch: (x, y, tokens that its sums are divided by, whether it is the last of the
step) -> [cross-entropy, divergence], so divided."""


def why_not(device: torch.device, residual: Residual | None, *, processes: int = 1) -> str | None:
    """Return why steps cannot be captured; None if they can, as far as can be told before one is tried."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and this step runs on {device.type}"
    if processes > 1:
        return f"a step of {processes} processes has not been tested as a graph"
    mechanism = Residual if residual is None else type(residual)
    theirs = mechanism.__module__.split(".")[0] != "attnres"
    if theirs and mechanism.set_progress is not Residual.set_progress:
        return f"{mechanism.__name__}.set_progress may change what a graph has recorded"
    return None


class Graph:
    """What a function launches on the current CUDA device, recorded: `replay` runs it again on the same addresses.

    Args:
        function: waits for nothing and asks the device for no number.
        pool: a graph's whose memory this one may use; both are then replayed in the order in which they were recorded.

    Attributes:
        output: what the function returned; its tensors hold the values of the last replay.
    """

    def __init__(self, function: Callable[[], Any], pool: "Graph | None" = None) -> None:
        self.graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        numbers = torch.cuda.get_rng_state()
        try:
            # Thread-local: the thread that makes the next batch may take pinned memory meanwhile.
            with torch.cuda.graph(
                self.graph, pool=None if pool is None else pool.graph.pool(), capture_error_mode="thread_local"
            ):
                self.output = function()
        except BaseException:
            torch.cuda.set_stream(before)  # PyTorch stays on the stream of a capture that it cannot end
            fresh = torch.Generator(device=before.device).set_state(numbers)  # and its generator in the capture
            torch.cuda.default_generators[before.device_index].graphsafe_set_state(fresh.graphsafe_get_state())
            raise

    def replay(self) -> None:
        """Run it."""
        self.graph.replay()


@contextmanager
def side_stream(device: torch.device) -> Generator[None]:
    """Launch on another stream of a CUDA device, which the current one waits for."""
    if device.type != "cuda":
        yield
        return
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


class Passes:
    """The passes of batches of one shape, a graph for each place that a micro-batch has in its batch.

    Args:
        micro: forward and backward of a micro-batch.
        clip: scales the gradients and returns the norm that they had.
        x, y: micro-batches of the batch.

    Attributes:
        optimizers: for each optimizer a call that takes its step; empty until `capture_optimizers`.
    """

    def __init__(
        self,
        micro: Micro,
        clip: Callable[[], Tensor],
        parameters: Sequence[nn.Parameter],
        x: Sequence[Tensor],
        y: Sequence[Tensor],
    ) -> None:
        self.micro, self.clip, self.parameters = micro, clip, parameters
        self.x, self.y, self.count = x[0].clone(), y[0].clone(), len(x)
        self.tokens = self.y.numel() * self.count
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.x.device)
        self.optimizers: list[Callable[[], Any]] = []
        self.graphs: dict[tuple[bool, bool], Graph] = {}
        for parameter in parameters:
            parameter.grad = None  # so that a batch's first backward writes gradients, and the others add to them
        for place in dict.fromkeys(self._places()):
            pool = next(iter(self.graphs.values()), None)
            self.graphs[place] = Graph(partial(self._pass, *place), pool)
        self.gradients = [parameter.grad for parameter in parameters]
        self.norm: Tensor = self.graphs[place].output

    def _places(self) -> Iterator[tuple[bool, bool]]:
        """Yield of each micro-batch whether it is the first and whether it is the last."""
        return ((index == 0, index == self.count - 1) for index in range(self.count))

    def _pass(self, first: bool, last: bool) -> Tensor | None:
        if first:
            self.sums.zero_()
        self.sums.add_(self.micro(self.x, self.y, self.tokens, last))
        return self.clip() if last else None

    def __call__(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Make the clipped gradients of a batch; return its sums and the norm, which the next call overwrites."""
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient  # a step without a graph has its own
        for place, inputs, targets in zip(self._places(), x, y):
            self.x.copy_(inputs)
            self.y.copy_(targets)
            self.graphs[place].replay()
        return self.sums, self.norm

    def capture_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        """Record the steps of those that can be; return why not all are."""
        reason = None
        for optimizer in optimizers:
            step: Callable[[], Any] = optimizer.step
            if why := why_not_optimizer(optimizer):
                reason = why
            else:
                try:
                    with _rates_on_device(optimizer):
                        step = Graph(optimizer.step).replay
                except Exception as error:  # of whatever a kernel or the driver refuses
                    reason = cause_of(error)
            self.optimizers.append(step)
        return reason


class Capture:
    """Captures the passes of a run's batches, shape by shape.

    Args:
        micro, clip, parameters: of `Passes`.
        count: micro-batches of a batch.
        reason: why no step can be captured, if that is known already.

    Attributes:
        reason: why steps are not captured, or no more; None while they are.
        optimizers: why an optimizer's step is not captured; None if all are, or none was tried.
    """

    def __init__(
        self,
        micro: Micro,
        clip: Callable[[], Tensor],
        parameters: Sequence[nn.Parameter],
        *,
        count: int = 1,
        reason: str | None = None,
    ) -> None:
        self.micro, self.clip, self.parameters, self.count = micro, clip, parameters, count
        self.reason, self.device = reason, parameters[0].device
        self.optimizers: str | None = None
        self.seen: Counter[torch.Size] = Counter()
        self.passes: dict[torch.Size, Passes] = {}

    def ready(self, x: Tensor, y: Tensor) -> Passes | None:
        """Return the graphs for a batch of this shape; None where its step is taken without."""
        passes = self.passes.get(x.shape)
        if passes is not None or self.reason is not None:
            return passes
        self.seen[x.shape] += 1
        if len(self.seen) > MOST_SHAPES:
            self._end(f"its batches have more than {MOST_SHAPES} shapes, the last {tuple(x.shape)}")
        elif self.seen[x.shape] > WARM_UP:
            try:
                parts = x.chunk(self.count), y.chunk(self.count)
                self.passes[x.shape] = Passes(self.micro, self.clip, self.parameters, *parts)
            except Exception as error:  # of whatever a kernel, the driver or a model's own code refuses
                self._end(cause_of(error))
        return self.passes.get(x.shape)

    @contextmanager
    def eager(self) -> Generator[None]:
        """While a step is taken without a graph: gradients are its own, not those that replays have left. As long as
        captures may follow it launches on another stream, which the current one waits for: a gradient's stream is the
        one on which it was first asked for, and a capture may not wait for the current one."""
        for parameter in self.parameters if self.passes else ():
            parameter.grad = None
        with contextlib.nullcontext() if self.reason is not None else side_stream(self.device):
            yield

    def step(self, passes: Passes, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the optimizers take the step that `passes` has made the gradients of."""
        if not passes.optimizers:
            self.optimizers = passes.capture_optimizers(optimizers)
        for step in passes.optimizers:
            step()

    def _end(self, reason: str) -> None:
        """Capture nothing more, and give the memory back."""
        self.reason = reason
        self.passes.clear()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def path(self) -> str:
        """How steps are taken, for environment.json: "captured" or "eager" and why."""
        if self.reason is not None:
            return f"eager: {self.reason}"
        return "captured" if self.optimizers is None else f"captured, optimizer eager: {self.optimizers}"


def cause_of(error: BaseException) -> str:
    """Return in a line what ended a capture: the first of a chain of errors, for the driver's own names no cause."""
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, torch.OutOfMemoryError):
        return "the memory does not hold a captured step beside what is there"
    return f"it cannot be captured ({type(error).__name__}: {first_line(error)[:200]})"


def why_not_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the steps of an optimizer cannot be captured; None if they can."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) is StackedMuon or (isinstance(optimizer, torch.optim.AdamW) and fused):
        return None
    return f"{type(optimizer).__name__} asks the host for its rate"


@contextmanager
def _rates_on_device(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Keep the rates where a graph reads them, `set_learning_rate` writes them there; and let AdamW be captured."""
    groups = optimizer.param_groups
    for group in groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)
    names = [group for group in groups if "capturable" in group]
    for group in names:
        group["capturable"] = True
    try:
        yield
    finally:  # in a step without a graph PyTorch would warn of it
        for group in names:
            group["capturable"] = False
