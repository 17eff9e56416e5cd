"""Training steps as CUDA graphs: kernels are recorded once and then launched by one call.

Without a graph, a step of a small model waits for the host, which takes longer to launch a kernel than the device to
run it. A graph fixes addresses: inputs are copied into its tensors, and gradients stay in the tensors that it writes.
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
"""Steps of a shape that run without a graph first: they compile kernels and create the optimizers' state."""
MOST_SHAPES = 4
"""Most batch shapes with graphs. Each holds a set of gradients and the activations of a pass."""

Micro = Callable[[Tensor, Tensor, int, bool], Tensor]
"""Forward and backward of a micro-batch: (x, y, tokens to divide the sums by, whether it is the last of the step) ->
[cross-entropy, divergence], divided by the tokens."""


def why_not(device: torch.device, residual: Residual | None, *, processes: int = 1) -> str | None:
    """Return the reason why steps cannot be captured; None if they can, as far as known before trying."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and this step runs on {device.type}"
    if processes > 1:
        return f"a step of {processes} processes has not been tested as a graph"
    mechanism = Residual if residual is None else type(residual)
    is_plugin = mechanism.__module__.split(".")[0] != "attnres"
    if is_plugin and mechanism.set_progress is not Residual.set_progress:
        return f"{mechanism.__name__}.set_progress may change what a graph has recorded"
    return None


class Graph:
    """The recorded launches of a function on the current CUDA device; `replay` runs them again on the same addresses.

    Args:
        function: must not wait for the device or read a number from it.
        pool: memory pool of a graph to share; both graphs must then be replayed in the order in which they were
            recorded.

    Attributes:
        output: the function's result; its tensors hold the values of the last replay.
    """

    def __init__(self, function: Callable[[], Any], pool: "Graph | None" = None) -> None:
        self.graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        numbers = torch.cuda.get_rng_state()
        try:
            # Thread-local: the thread that makes the next batch may allocate pinned memory meanwhile.
            with torch.cuda.graph(
                self.graph, pool=None if pool is None else pool.graph.pool(), capture_error_mode="thread_local"
            ):
                self.output = function()
        except BaseException:
            torch.cuda.set_stream(before)  # after a failed capture PyTorch stays on its stream
            fresh = torch.Generator(device=before.device).set_state(numbers)  # and its generator stays in capture mode
            torch.cuda.default_generators[before.device_index].graphsafe_set_state(fresh.graphsafe_get_state())
            raise

    def replay(self) -> None:
        """Launch the recorded kernels."""
        self.graph.replay()


@contextmanager
def side_stream(device: torch.device) -> Generator[None]:
    """Launch on another stream of a CUDA device inside the block; the current stream waits for it."""
    if device.type != "cuda":
        yield
        return
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


class Passes:
    """The passes of batches of one shape, with a graph for each position of a micro-batch in its batch.

    Args:
        micro: forward and backward of a micro-batch.
        clip: clips the gradients and returns their norm before.
        x, y: the micro-batches of a batch.

    Attributes:
        optimizers: for each optimizer a function that takes its step; empty until `capture_optimizers`.
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
        # Of the batches' strides: for others a compiled model would be compiled anew, which cannot be captured.
        self.x, self.y = (
            torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device).copy_(part)
            for part in (x[0], y[0])
        )
        self.count = len(x)
        self.tokens = self.y.numel() * self.count
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.x.device)
        self.optimizers: list[Callable[[], Any]] = []
        self.graphs: dict[tuple[bool, bool], Graph] = {}
        for parameter in parameters:
            parameter.grad = None  # so that a batch's first backward writes gradients, and later ones add to them
        for place in dict.fromkeys(self._places()):
            pool = next(iter(self.graphs.values()), None)
            self.graphs[place] = Graph(partial(self._pass, *place), pool)
        self.gradients = [parameter.grad for parameter in parameters]
        self.norm: Tensor = self.graphs[place].output

    def _places(self) -> Iterator[tuple[bool, bool]]:
        """Yield for each micro-batch whether it is the first and whether it is the last."""
        return ((index == 0, index == self.count - 1) for index in range(self.count))

    def _pass(self, first: bool, last: bool) -> Tensor | None:
        if first:
            self.sums.zero_()
        self.sums.add_(self.micro(self.x, self.y, self.tokens, last))
        return self.clip() if last else None

    def __call__(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the clipped gradients of a batch; return its sums and the norm, which the next call overwrites."""
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient  # an eager step had its own gradients
        for place, inputs, targets in zip(self._places(), x, y):
            self.x.copy_(inputs)
            self.y.copy_(targets)
            self.graphs[place].replay()
        return self.sums, self.norm

    def capture_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        """Capture the steps of those optimizers that allow it; return the reason why others do not, or None."""
        reason = None
        for optimizer in optimizers:
            step: Callable[[], Any] = optimizer.step
            if why := why_not_optimizer(optimizer):
                reason = why
            else:
                try:
                    with _rates_on_device(optimizer):
                        step = Graph(optimizer.step).replay
                except Exception as error:  # any exception of a kernel or the driver
                    reason = cause_of(error)
            self.optimizers.append(step)
        return reason


class Capture:
    """Captures the passes of a run's batches, for one shape after another.

    Args:
        micro, clip, parameters: arguments of `Passes`.
        count: number of micro-batches in a batch.
        reason: why no step can be captured, if known in advance.

    Attributes:
        reason: why steps are not, or no longer, captured; None while they are.
        optimizers: why an optimizer's step is not captured; None if all are, or if none was tried.
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
        """Return the graphs for a batch of this shape; None if its step runs eagerly."""
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
            except Exception as error:  # any exception of a kernel, the driver or a model's code
                self._end(cause_of(error))
        return self.passes.get(x.shape)

    @contextmanager
    def eager(self) -> Generator[None]:
        """Prepare for an eager step: gradients are new tensors, not those of graphs. While captures may follow, it runs
        on another stream, which the current one waits for: a gradient's stream is the one on which it was first used,
        and a capture may not wait for the current stream."""
        for parameter in self.parameters if self.passes else ():
            parameter.grad = None
        with contextlib.nullcontext() if self.reason is not None else side_stream(self.device):
            yield

    def step(self, passes: Passes, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the optimizers step with the gradients that `passes` has computed."""
        if not passes.optimizers:
            self.optimizers = passes.capture_optimizers(optimizers)
        for step in passes.optimizers:
            step()

    def _end(self, reason: str) -> None:
        """Stop capturing, and free the memory."""
        self.reason = reason
        self.passes.clear()
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def path(self) -> str:
        """Return how steps are executed, for environment.json: "captured" or "eager" and why."""
        if self.reason is not None:
            return f"eager: {self.reason}"
        return "captured" if self.optimizers is None else f"captured, optimizer eager: {self.optimizers}"


def cause_of(error: BaseException) -> str:
    """Return, in one line, why a capture failed: the first of a chain of errors, because the driver's last error names
    no cause."""
    while error.__context__ is not None:
        error = error.__context__
    if isinstance(error, torch.OutOfMemoryError):
        return "the memory does not hold a captured step beside what is there"
    return f"it cannot be captured ({type(error).__name__}: {first_line(error)[:200]})"


def why_not_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the reason why the steps of an optimizer cannot be captured; None if they can."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) is StackedMuon or (isinstance(optimizer, torch.optim.AdamW) and fused):
        return None
    return f"{type(optimizer).__name__} asks the host for its rate"


@contextmanager
def _rates_on_device(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Keep learning rates in tensors on the device, where a graph reads them and `set_learning_rate` writes them; and
    make AdamW capturable."""
    groups = optimizer.param_groups
    for group in groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)
    names = [group for group in groups if "capturable" in group]
    for group in names:
        group["capturable"] = True
    try:
        yield
    finally:  # in an eager step PyTorch would warn about it
        for group in names:
            group["capturable"] = False
