"""What the runs of a study cost: tokens, FLOPs, and hours at a speed that is measured or assumed."""

import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnres.errors import UserError
from attnres.residuals.operations import operations
from attnres.run_names import label_and_seed
from attnres.studies.design import Arm
from attnres.studies.variants import parse_variants
from attnres.training.branch import branch_step
from attnres.training.config import TrainConfig, size_of, tokenizer_of

CALL = 2e-5
"""Seconds of an operation of PyTorch on a CPU, forward or backward, where calling it takes longer than computing it."""


class Mechanism(NamedTuple):
    """A residual and its settings as JSON, sorted by name."""

    residual: str
    settings: str = "{}"


STANDARD = Mechanism("standard")


@dataclass(frozen=True)
class Cost:
    """What an arm's runs of one mechanism cost: the tokens that they train on, the FLOPs for that, and calls of small
    operations."""

    arm: str
    runs: int
    tokens: float
    flops: float
    calls: float = 0.0
    mechanism: Mechanism = STANDARD


def costs_of(arm: Arm, model: TrainConfig, names: Collection[str]) -> list[Cost]:
    """What these runs of an arm cost. `model`: the preset's run, whose size a pretrained model is taken to have.

    Runs that branch off others train from there alone.
    """
    if arm.computed is not None:
        calls = [arm.computed.runs[name] for name in names]
        return [Cost(arm.name, len(names), 0.0, sum(one.flops for one in calls), sum(one.calls for one in calls))]
    assert arm.compare is not None
    base = arm.compare.base
    steps = base.steps - (branch_step(base) if arm.trunk else 0)
    tokens = float(steps * base.batch_size * base.data.seq_len)
    start = base if base.finetune.init_from is None else model
    mechanisms = {
        variant.label: Mechanism(variant.residual, json.dumps(variant.settings, sort_keys=True))
        for variant in parse_variants(arm.compare.variants, arm.compare.lrs)
    }
    counts = Counter(mechanisms[taken[0]] for name in names if (taken := label_and_seed(name)))
    each = functools.partial(flops_a_token, size_of(start.model), base.data.seq_len, vocabulary_of(base))
    return [
        Cost(arm.name, count, count * tokens, count * tokens * each(one), mechanism=one)
        for one, count in counts.items()
    ]


def vocabulary_of(config: TrainConfig) -> int:
    """The size of the vocabulary that a tokenizer spec asks for; a usual one where it does not say."""
    kind, _, size = tokenizer_of(config.data).partition(":")
    return int(size) if kind == "bpe" and size.isdecimal() else 50_257


def flops_a_token(size: object, seq_len: int, vocabulary: int, mechanism: Mechanism = STANDARD) -> float:
    """FLOPs of training a model on one token: the standard model's, as `attnres.models.flops` counts them, and the
    mechanism's `operations`, thrice as many as in a forward pass, as everything else is."""
    standard, sublayers, width = _standard(json.dumps(size, sort_keys=True), seq_len, vocabulary)
    return standard + 3 * operations(mechanism.residual, json.loads(mechanism.settings), sublayers, width)


@functools.cache
def _standard(size: str, seq_len: int, vocabulary: int) -> tuple[float, int, int]:
    """FLOPs of the standard model for a token, its number of sublayers, and its width."""
    from attnres.models import build
    from attnres.models.flops import step_flops

    with torch.device("meta"):
        model = build(json.loads(size), "standard", vocab_size=vocabulary, max_positions=seq_len)
    residual = model.residual.itself()
    return step_flops(model, seq_len), residual.num_sublayers, residual.width


def measured_speeds(
    config: TrainConfig, mechanisms: Collection[Mechanism], on_each: Callable[[float], None] = lambda more: None
) -> dict[Mechanism, float]:
    """FLOPs a second, by its own count, of a training step of each mechanism on one thread here; none without the
    preset's device.

    A few steps of each are timed in this process; the quickest counts, since other work may have the machine: an
    estimate to a factor of two. `on_each` is called with 1 after each.
    """
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    speeds = {}
    try:
        for mechanism in mechanisms:
            speeds[mechanism] = _speed(config, mechanism)
            on_each(1)
    except RuntimeError as error:  # out of memory
        raise UserError(f"a step of this preset cannot be timed here ({error}): choose a smaller preset") from error
    finally:
        torch.set_num_threads(threads)
    return speeds


def _speed(config: TrainConfig, mechanism: Mechanism) -> float:
    from attnres.studies.speed import step_times

    vocabulary = vocabulary_of(config)
    times = step_times(
        {mechanism.residual: (mechanism.residual, json.loads(mechanism.settings))},
        size=size_of(config.model),
        vocab_size=vocabulary,
        seq_len=config.data.seq_len,
        batch_size=config.batch_size,
        accumulation=config.accumulation,
        optim=config.optim,
        dtype="fp32" if config.dtype == "auto" else config.dtype,
        device="cuda" if config.device.startswith("cuda") else "cpu",
        compile=config.compile,
        seconds=1.0,
        least=2,
    )
    tokens = config.batch_size * config.data.seq_len
    flops = flops_a_token(size_of(config.model), config.data.seq_len, vocabulary, mechanism)
    return tokens * flops / min(times["variants"][mechanism.residual]["times"])


def hours(costs: Sequence[Cost], flops_per_s: float, speeds: Mapping[Mechanism, float] | None = None) -> float:
    """Hours of one core or one GPU for all of them, at the speeds of their mechanisms where those are known."""
    known = speeds or {}
    times = (cost.flops / known.get(cost.mechanism, flops_per_s) + cost.calls * CALL for cost in costs)
    return math.fsum(times) / 3600
