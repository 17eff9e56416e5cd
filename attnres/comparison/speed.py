"""What a training step costs, variant against variant: timed in turn in one process."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnres.device import in_turn, seconds_of, spread
from attnres.models.bases import checkpoint_activations
from attnres.training.config import OptimConfig
from attnres.training.environment import name_of, tune
from attnres.training.layout import Layout, PlacedModel, parallelize
from attnres.training.objective import Objective, loss_kind, precision
from attnres.training.optim import build_optimizers
from attnres.training.parallel import Processes
from attnres.training.step import Update


def step_times(
    variants: Mapping[str, tuple[str | None, Mapping[str, Any]]],
    *,
    size: str | Mapping[str, Any] = "nano",
    vocab_size: int = 4096,
    seq_len: int = 256,
    batch_size: int = 8,
    accumulation: int = 1,
    optim: OptimConfig | None = None,
    dtype: str = "fp32",
    device: str = "cpu",
    compile: bool = False,
    cuda_graphs: bool = False,
    loss: str = "auto",
    gradient_checkpointing: str = "none",
    baseline: str | None = None,
    rounds: int = 50,
    seconds: float = 20.0,
    least: int = 3,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Time whole training steps (forward, backward, clipping, optimizer) of each variant in turn, in rounds.

    Args:
        variants: label -> (residual, its settings); without a residual it is the family's own model.
        vocab_size, seq_len, batch_size, accumulation: the training shape; tokens are random ids.
        dtype: "fp32", "bf16" for autocast over fp32 parameters, or "bf16-parameters" for a model all in bf16 but for
            the residual's own parameters.
        compile, cuda_graphs, loss, gradient_checkpointing: as in `TrainConfig`; the family's own model knows
            checkpointing by layer alone, and keeps everything for backward in the other two.
        baseline: the label that ratios are taken to; by default the first.
        rounds, seconds, least: at most so many rounds, none begun after so many seconds, but at least so many.
        on_round: called with the number of each finished round.

    Returns:
        {"device", "threads", "dtype", "torch", "shape", "baseline", "rounds",
        "variants": {label: {"median_s", "ratio", "ratio_quartiles" (of the rounds' ratios), "times", "step" (how it is
        taken, `Update.path`)}}}
    """
    baseline = baseline if baseline is not None else next(iter(variants))
    on = torch.device(device)
    steps = training_steps(
        variants,
        size=size,
        vocab_size=vocab_size,
        seq_len=seq_len,
        batch_size=batch_size,
        accumulation=accumulation,
        optim=optim,
        dtype=dtype,
        on=on,
        compile=compile,
        cuda_graphs=cuda_graphs,
        loss=loss,
        gradient_checkpointing=gradient_checkpointing,
    )
    measures = {label: partial(seconds_of, step, on) for label, step in steps.items()}
    times = in_turn(measures, rounds=rounds, seconds=seconds, least=least, on_round=on_round)
    return {
        "device": name_of(on),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "compile": compile,
        "torch": torch.__version__,
        "shape": {"batch_size": batch_size, "seq_len": seq_len, "accumulation": accumulation, "vocab_size": vocab_size},
        "size": size if isinstance(size, str) else dict(size),
        "baseline": baseline,
        "rounds": len(times[baseline]),
        "variants": {
            label: _summary(values, times[baseline]) | {"step": steps[label].path} for label, values in times.items()
        },
    }


def training_steps(
    variants: Mapping[str, tuple[str | None, Mapping[str, Any]]],
    *,
    size: str | Mapping[str, Any],
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    on: torch.device,
    dtype: str = "fp32",
    compile: bool = False,
    cuda_graphs: bool = False,
    accumulation: int = 1,
    optim: OptimConfig | None = None,
    loss: str = "auto",
    gradient_checkpointing: str = "none",
) -> dict[str, "TrainingStep"]:
    """Return a training step of each variant by label, of a model of its own and the same random tokens. Arguments are
    those of `step_times`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (batch_size, seq_len + 1), generator=generator).to(on)
    layout = Layout(Processes(0, 1, on), batch_size=batch_size, accumulation=accumulation, seq_len=seq_len)
    steps = {}
    for label, (residual, settings) in variants.items():
        model = _build(size, residual, settings, vocab_size, seq_len, on)
        if dtype == "bf16-parameters":
            residual_ids = set() if residual is None else {id(p) for p in model.residual.parameters()}
            for parameter in model.parameters():
                if id(parameter) not in residual_ids:
                    parameter.data = parameter.data.bfloat16()
        if residual is not None or gradient_checkpointing == "layer":
            checkpoint_activations(model, gradient_checkpointing)
        kind = loss_kind(loss, model, batch_size // accumulation * seq_len)
        objective = Objective(model, kind, partial(precision, dtype, on), compiled=compile)
        steps[label] = TrainingStep(parallelize(objective, layout), optim or OptimConfig(), tokens, capture=cuda_graphs)
    return steps


class TrainingStep:
    """One update of a model from the same tokens, (B, T + 1), as training does it; but no rate is carried to a width:
    that changes no time, and the plain model has no place for it."""

    def __init__(self, placed: PlacedModel, optim: OptimConfig, tokens: Tensor, *, capture: bool) -> None:
        optimizers = build_optimizers(placed.model, dataclasses.replace(optim, base_width=None))
        self.x, self.y = tokens[:, :-1], tokens[:, 1:]
        self.update = Update(placed, optimizers, optim.clip, lambda: None, capture=capture)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Take the step; return the sums and the norm of `Update.gradients`."""
        numbers = self.update.gradients(self.x, self.y)
        self.update.apply()
        return numbers

    @property
    def path(self) -> str:
        """How it is taken: `Update.path`."""
        return self.update.path


def _summary(times: list[float], base: list[float]) -> dict[str, Any]:
    times_and_ratios = spread(times, base)
    return {
        "median_s": times_and_ratios.median,
        "ratio": times_and_ratios.ratio,
        "ratio_quartiles": times_and_ratios.ratio_quartiles,
        "times": times,
    }


def _build(
    size: str | Mapping[str, Any],
    residual: str | None,
    settings: Mapping[str, Any],
    vocab_size: int,
    seq_len: int,
    on: torch.device,
) -> Any:
    from attnres.models import build, build_plain

    shape: dict[str, Any] = {"vocab_size": vocab_size, "max_positions": seq_len}
    model = build_plain(size, **shape) if residual is None else build(size, residual, settings=settings, **shape)
    tune(model, on, seq_len)
    return model.to(on).train()
