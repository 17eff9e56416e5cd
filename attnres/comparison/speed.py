"""Time the training steps of several variants, interleaved, in one process."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class StepOptions:
    """Shape and options of a timed training step; its tokens are random ids.

    Attributes:
        dtype: "fp32", "bf16" for autocast over fp32 parameters, or "bf16-parameters" for a model in bf16 whose residual
            parameters stay fp32.
        compile, cuda_graphs, loss, gradient_checkpointing: as in `TrainConfig`. The unmodified Transformers model
            supports checkpointing by layer only; with the other modes it stores all activations.
    """

    size: str | Mapping[str, Any] = "nano"
    vocab_size: int = 4096
    seq_len: int = 256
    batch_size: int = 8
    accumulation: int = 1
    optim: OptimConfig = field(default_factory=OptimConfig)
    dtype: str = "fp32"
    device: str = "cpu"
    compile: bool = False
    cuda_graphs: bool = False
    loss: str = "auto"
    gradient_checkpointing: str = "none"


Variants = Mapping[str, tuple[str | None, Mapping[str, Any]]]
"""Label -> (residual, its settings); residual None is the unmodified Transformers model."""


def step_times(
    variants: Variants,
    options: StepOptions,
    *,
    baseline: str | None = None,
    rounds: int = 50,
    seconds: float = 20.0,
    least: int = 3,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Time whole training steps (forward, backward, clipping, optimizer) of the variants, interleaved, in rounds.

    Args:
        baseline: the label in the denominator of ratios; by default the first.
        rounds, seconds, least: at most `rounds` rounds, none begun after `seconds`, but at least `least`.
        on_round: called with the number of each finished round.

    Returns:
        {"device", "threads", "dtype", "torch", "shape", "baseline", "rounds",
        "variants": {label: {"median_s", "ratio", "ratio_quartiles" (of the rounds' ratios), "times", "step" (how it is
        taken, `Update.path`)}}}
    """
    baseline = baseline if baseline is not None else next(iter(variants))
    on = torch.device(options.device)
    steps = training_steps(variants, options)
    measures = {label: partial(seconds_of, step, on) for label, step in steps.items()}
    times = in_turn(measures, rounds=rounds, seconds=seconds, least=least, on_round=on_round)
    rows = {}
    for label, values in times.items():
        measured = spread(values, times[baseline])
        ratios = {"ratio": measured.ratio, "ratio_quartiles": measured.ratio_quartiles}
        rows[label] = {"median_s": measured.median, **ratios, "times": values, "step": steps[label].path}
    return {
        "device": name_of(on),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "compile": options.compile,
        "torch": torch.__version__,
        "shape": {name: getattr(options, name) for name in ("batch_size", "seq_len", "accumulation", "vocab_size")},
        "size": options.size if isinstance(options.size, str) else dict(options.size),
        "baseline": baseline,
        "rounds": len(times[baseline]),
        "variants": rows,
    }


def training_steps(variants: Variants, options: StepOptions) -> dict[str, "TrainingStep"]:
    """Return a training step of each variant by label. Each has a separate model; all have the same random tokens."""
    from attnres.models import build, build_plain

    on, seq_len = torch.device(options.device), options.seq_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab_size, (options.batch_size, seq_len + 1), generator=generator).to(on)
    layout = Layout(
        Processes(0, 1, on), batch_size=options.batch_size, accumulation=options.accumulation, seq_len=seq_len
    )
    shape: dict[str, Any] = {"vocab_size": options.vocab_size, "max_positions": seq_len}
    steps = {}
    for label, (residual, settings) in variants.items():
        with on:  # drawing 1.7 B weights takes a processor twenty seconds
            model: Any = (
                build_plain(options.size, **shape)
                if residual is None
                else build(options.size, residual, settings=settings, **shape)
            )
        tune(model, on, seq_len)
        model = model.to(on).train()
        if options.dtype == "bf16-parameters":
            residual_ids = set() if residual is None else {id(p) for p in model.residual.parameters()}
            for parameter in model.parameters():
                if id(parameter) not in residual_ids:
                    parameter.data = parameter.data.bfloat16()
        if residual is not None or options.gradient_checkpointing == "layer":
            checkpoint_activations(model, options.gradient_checkpointing)
        kind = loss_kind(options.loss, model, layout.rows * seq_len)
        objective = Objective(model, kind, partial(precision, options.dtype, on), compiled=options.compile)
        steps[label] = TrainingStep(parallelize(objective, layout), options.optim, tokens, capture=options.cuda_graphs)
    return steps


class TrainingStep:
    """An update of a model from fixed tokens, (B, T + 1), as training makes it. `base_width` is left out: it changes no
    time, and the unmodified Transformers model has no place for it."""

    def __init__(self, placed: PlacedModel, optim: OptimConfig, tokens: Tensor, *, capture: bool) -> None:
        optimizers = build_optimizers(placed.model, dataclasses.replace(optim, base_width=None))
        self.x, self.y = tokens[:, :-1], tokens[:, 1:]
        self.update = Update(placed, optimizers, optim.clip, lambda: None, capture=capture)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Take the step; return the loss sums and the gradient norm of `Update.gradients`."""
        numbers = self.update.gradients(self.x, self.y)
        self.update.apply()
        return numbers

    @property
    def path(self) -> str:
        """Return how the step is executed: `Update.path`."""
        return self.update.path
