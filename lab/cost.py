"""Estimate the cost of a study's runs: tokens, FLOPs, and hours at a measured or assumed speed.

The operations of a mechanism's reads and writes are counted during a pass of a few tokens: matrix products as torch's
counter counts them, and one operation for each value of other arithmetic (the results of an elementwise operation, the
inputs of a sum or softmax). Moving values counts nothing.
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from attnres.comparison.plan import parse_variants
from attnres.errors import UserError
from attnres.ops import cpu, plain_torch
from attnres.ops.devices import accelerator, is_host, pick_device
from attnres.ops.norms import Norm
from attnres.residuals.registry import make_residual
from attnres.text import label_and_seed
from attnres.training.config import TrainConfig, size_or_default, tokenizer_or_default
from lab.design import Arm, branch_step

CALL = 2e-5
"""Seconds of a small PyTorch operation on a CPU, forward or backward, whose call takes longer than its computation."""


class Mechanism(NamedTuple):
    """A residual and its settings as JSON, sorted by name."""

    residual: str
    settings: str

    @classmethod
    def of(cls, residual: str, settings: Mapping[str, Any] | None = None) -> "Mechanism":
        return cls(residual, json.dumps(dict(settings or {}), sort_keys=True))


STANDARD = Mechanism.of("standard")


class StepKind(NamedTuple):
    """Everything that a training step's time depends on: the mechanism, the model's size as JSON, and the batch."""

    mechanism: Mechanism
    size: str
    vocabulary: int
    seq_len: int
    batch_size: int
    accumulation: int

    @classmethod
    def of(cls, run: TrainConfig, model: TrainConfig, mechanism: Mechanism = STANDARD) -> "StepKind":
        """Return the kind of step of a run; a pretrained model is assumed to have the size of `model`."""
        size = size_or_default((run if run.finetune.init_from is None else model).model)
        shape = vocabulary_of(run), run.data.seq_len, run.batch_size, run.accumulation
        return cls(mechanism, json.dumps(size, sort_keys=True), *shape)

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def flops(self) -> float:
        return self.tokens * flops_a_token(json.loads(self.size), self.seq_len, self.vocabulary, self.mechanism)


@dataclass(frozen=True)
class Cost:
    """The cost of runs of an arm: the trained tokens, their FLOPs, and calls of small operations.

    Attributes:
        step: the kind of their training steps; None for computed runs.
    """

    arm: str
    runs: int
    tokens: float
    flops: float
    calls: float = 0.0
    step: StepKind | None = None


def costs_of(arm: Arm, model: TrainConfig, names: Collection[str]) -> list[Cost]:
    """Return the cost of these runs of an arm, by mechanism. `model`: the preset's run, whose size a pretrained model
    is assumed to have.

    Runs that branch off others cost only the steps after that.
    """
    if arm.computed is not None:
        calls = [arm.computed.runs[name] for name in names]
        return [Cost(arm.name, len(names), 0.0, sum(one.flops for one in calls), sum(one.calls for one in calls))]
    assert arm.compare is not None
    base = arm.compare.base
    count = base.steps - (branch_step(base) if arm.trunk else 0)
    steps = {
        variant.label: StepKind.of(base, model, Mechanism.of(variant.residual, variant.settings))
        for variant in parse_variants(arm.compare.variants, arm.compare.lrs)
    }
    runs = Counter(steps[taken[0]] for name in names if (taken := label_and_seed(name)))
    return [
        Cost(arm.name, many, float(many * count * step.tokens), many * count * step.flops, step=step)
        for step, many in runs.items()
    ]


def vocabulary_of(config: TrainConfig) -> int:
    """Return the vocabulary size that a tokenizer spec asks for; a usual one if it does not say."""
    kind, _, size = tokenizer_or_default(config.data).partition(":")
    return int(size) if kind == "bpe" and size.isdecimal() else 50_257


def flops_a_token(size: object, seq_len: int, vocabulary: int, mechanism: Mechanism = STANDARD) -> float:
    """Return the FLOPs of training a model on one token: the standard model's, as counted by
    `attnres.models.step_cost`, plus the mechanism's `operations`, times three for forward and backward."""
    standard, sublayers, width = _standard(json.dumps(size, sort_keys=True), seq_len, vocabulary)
    return standard + 3 * operations(mechanism.residual, json.loads(mechanism.settings), sublayers, width)


@functools.cache
def _standard(size: str, seq_len: int, vocabulary: int) -> tuple[float, int, int]:
    """Return the FLOPs a token of the standard model, its number of sublayers, and its width."""
    from attnres.models import build
    from attnres.models.step_cost import step_flops

    with torch.device("meta"):
        model = build(json.loads(size), "standard", vocab_size=vocabulary, max_positions=seq_len)
    residual = model.residual.itself()
    return step_flops(model, seq_len), residual.num_sublayers, residual.width


def on_gpu(config: TrainConfig) -> bool:
    """Return whether a run trains on a GPU: it asks for one, or for any device and there is one."""
    return not is_host(pick_device("auto") if config.device == "auto" else torch.device(config.device))


def measured_speeds(
    config: TrainConfig, steps: Collection[StepKind], on_each: Callable[[float], None] = lambda more: None
) -> dict[StepKind, float]:
    """Return the FLOPs a second of each kind of training step, measured on one thread; empty without the device of
    `config`, the preset's run.

    A few steps of each kind are timed in this process, and the fastest counts, since other programs may use the
    machine: an estimate to a factor of two. `on_each` is called with 1 after each kind.
    """
    if on_gpu(config) and accelerator() is None:
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    speeds = {}
    try:
        for step in steps:
            speeds[step] = step.flops / _seconds(step, config)
            on_each(1)
    except RuntimeError as error:  # out of memory
        raise UserError(f"a step of this preset cannot be timed here ({error}): choose a smaller preset") from error
    finally:
        torch.set_num_threads(threads)
    return speeds


def _seconds(step: StepKind, config: TrainConfig) -> float:
    from attnres.comparison.speed import StepOptions, step_times

    label = step.mechanism.residual
    options = StepOptions(
        size=json.loads(step.size),
        vocab_size=step.vocabulary,
        seq_len=step.seq_len,
        batch_size=step.batch_size,
        accumulation=step.accumulation,
        optim=config.optim,
        dtype="fp32" if config.dtype == "auto" else config.dtype,
        device="cuda" if on_gpu(config) else "cpu",
        compile=config.compile,
        cuda_graphs=config.cuda_graphs,
    )
    times = step_times({label: (label, json.loads(step.mechanism.settings))}, options, seconds=1.0, least=2)
    return min(times["variants"][label]["times"])


def hours(costs: Sequence[Cost], flops_per_s: float, speeds: Mapping[StepKind, float] | None = None) -> float:
    """Return the total hours of one core or one GPU, at the measured speeds of the steps if known, else at
    `flops_per_s`."""
    known = speeds or {}
    by_step = (flops_per_s if cost.step is None else known.get(cost.step, flops_per_s) for cost in costs)
    return math.fsum(cost.flops / speed + cost.calls * CALL for cost, speed in zip(costs, by_step, strict=True)) / 3600


# ------------------------------------------------------------------ operations of reads and writes


TOKENS = 16
_aten = torch.ops.aten
_MOVING = {_aten._to_copy, _aten.clone, _aten.copy_, _aten.copy, _aten.fill_, _aten.zero_}
_REDUCING = {
    *(_aten.sum, _aten.mean, _aten.amax, _aten.max, _aten.logsumexp, _aten._softmax, _aten._log_softmax),
    *(_aten.linalg_vector_norm, _aten.native_layer_norm, _aten.cumsum, _aten.prod, _aten.var),
}
_TWO = {_aten.addcmul, _aten.addcmul_, _aten.lerp, _aten.lerp_}


def operations(residual: str, settings: dict[str, Any], num_sublayers: int, width: int) -> float:
    """Return the operations a token in a forward pass that a mechanism needs in addition to the running sum.

    Args:
        residual: name of a mechanism; `settings` are its settings.

    Example: Full's read of n sources is n products with a query and a sum of n, 4 n d, and norms of the sources.
        >>> round(operations("full", {}, 24, 64) / 64 / sum(range(1, 26)), 1)
        4.8
    """
    key = json.dumps(settings, sort_keys=True)
    return max(0.0, _whole(residual, key, num_sublayers, width) - _whole("standard", "{}", num_sublayers, width))


@functools.cache
def _whole(residual: str, settings: str, num_sublayers: int, width: int) -> float:
    # With real numbers: an operation on the meta device takes eight times as long. Drawing leaves the generator
    # unchanged.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), plain_torch(), cpu.switched(on=False):
        mechanism = make_residual(residual, num_sublayers, width, **json.loads(settings)).requires_grad_(False)
        norm, vector = Norm(torch.ones(width)), torch.ones(TOKENS, width)
        with _Counter() as counter:
            state = mechanism("start", vector)
            for index in range(num_sublayers):
                _, state = mechanism("read", state, index, norm)
                state = mechanism("write", state, index, vector.clone())
            mechanism("finish", state, norm)
    return counter.total / TOKENS


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = func._overloadpacket
        if kind in flop_registry:
            self.total += flop_registry[kind](*args, **kwargs, out_val=result)
        elif kind in (_aten.mv, _aten.dot):
            self.total += 2 * args[0].numel()
        elif kind in _REDUCING:
            self.total += _largest(args)
        elif torch.Tag.pointwise in func.tags and kind not in _MOVING:
            self.total += _largest(result) * (2 if kind in _TWO else 1)
        return result


def _largest(values: Any) -> int:
    return max((leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)), default=0)
