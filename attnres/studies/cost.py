"""What the runs of a study cost: tokens, FLOPs, and hours at a speed that is measured or assumed."""

import functools
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from attnres.errors import UserError
from attnres.studies.design import Arm
from attnres.training.branch import branch_step
from attnres.training.config import TrainConfig, size_of, tokenizer_of

CALL = 2e-5
"""Seconds of an operation of PyTorch on a CPU, forward or backward, where calling it takes longer than computing it."""


@dataclass(frozen=True)
class Cost:
    """What an arm costs: its runs, the tokens that they train on, the FLOPs for that, and calls of small operations."""

    arm: str
    runs: int
    tokens: float
    flops: float
    calls: float = 0.0


def cost_of(arm: Arm, model: TrainConfig, names: Collection[str]) -> Cost:
    """What these runs of an arm cost. `model`: the preset's run, whose size a pretrained model is taken to have.

    Runs that branch off others train from there alone.
    """
    runs = len(names)
    if arm.computed is not None:
        calls = [arm.computed.runs[name] for name in names]
        return Cost(arm.name, runs, 0.0, sum(one.flops for one in calls), sum(one.calls for one in calls))
    assert arm.compare is not None
    base = arm.compare.base
    steps = base.steps - (branch_step(base) if arm.trunk else 0)
    tokens = float(runs * steps * base.batch_size * base.data.seq_len)
    size = base if base.finetune.init_from is None else model
    vocabulary = vocabulary_of(base)
    return Cost(arm.name, runs, tokens, tokens * flops_a_token(size_of(size.model), base.data.seq_len, vocabulary))


def vocabulary_of(config: TrainConfig) -> int:
    """The size of the vocabulary that a tokenizer spec asks for; a usual one where it does not say."""
    kind, _, size = tokenizer_of(config.data).partition(":")
    return int(size) if kind == "bpe" and size.isdecimal() else 50_257


def flops_a_token(size: object, seq_len: int, vocabulary: int) -> float:
    """FLOPs of training the standard model on one token, as `attnres.models.flops` counts them."""
    return _flops_a_token(json.dumps(size, sort_keys=True), seq_len, vocabulary)


@functools.cache
def _flops_a_token(size: str, seq_len: int, vocabulary: int) -> float:
    from attnres.models import build
    from attnres.models.flops import step_flops

    with torch.device("meta"):
        model = build(json.loads(size), "standard", vocab_size=vocabulary, max_positions=seq_len)
    return step_flops(model, seq_len)


def measured_speed(config: TrainConfig) -> float | None:
    """FLOPs a second of a training step of the standard model on one thread here; None without the preset's device.

    Steps are timed in this process for a few seconds; the quickest counts, since other work may have the machine:
    an estimate to a factor of two.
    """
    from attnres.studies.speed import step_times

    if config.device.startswith("cuda") and not torch.cuda.is_available():
        return None
    vocabulary, threads = vocabulary_of(config), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = step_times(
            {"standard": ("standard", {})},
            size=size_of(config.model),
            vocab_size=vocabulary,
            seq_len=config.data.seq_len,
            batch_size=config.batch_size,
            accumulation=config.accumulation,
            optim=config.optim,
            dtype="fp32" if config.dtype == "auto" else config.dtype,
            device="cuda" if config.device.startswith("cuda") else "cpu",
            seconds=4.0,
        )
    except RuntimeError as error:  # out of memory
        raise UserError(f"a step of this preset cannot be timed here ({error}): choose a smaller preset") from error
    finally:
        torch.set_num_threads(threads)
    tokens = config.batch_size * config.data.seq_len
    quickest = min(times["variants"]["standard"]["times"])
    return tokens * flops_a_token(size_of(config.model), config.data.seq_len, vocabulary) / quickest


def hours(costs: Sequence[Cost], flops_per_s: float) -> float:
    """Hours of one core or one GPU for all of them."""
    return math.fsum(cost.flops / flops_per_s + cost.calls * CALL for cost in costs) / 3600
