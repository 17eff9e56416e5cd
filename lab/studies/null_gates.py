"""The effect of annealing and penalty alone on learned block boundaries: gates that no loss depends on.

The gates are those of `adaptive` over 12 layers, trained as in the nanoGPT study (10,000 steps of AdamW at 6e-4, betas
0.9 and 0.95, 2,000 steps of warm-up, a cosine down to 6e-5, gradients clipped at 1), but without a network: their
gradient is the penalty's, in some variants plus zero-mean noise in place of a loss's gradient. So no change of their
sum here is due to a model.

Source: github.com/aupadhyay/attnres-exp, which interprets its run as the model eliminating all boundaries.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from attnres.residuals.mechanisms.adaptive import Adaptive
from attnres.text import run_name
from attnres.training.config import OptimConfig
from attnres.training.optim import scheduled_rate
from lab.design import ComputedCall

LAYERS = 12
"""Layers of the simulated network: a gate after each except the last."""
STEPS, RATE = 10_000, 6e-4
WARMUP, FLOOR, BETAS, CLIP = 0.2, 0.1, (0.9, 0.95), 1.0
"""Of the study's optimizer: warm-up as a fraction of the steps, floor as a fraction of the peak rate, AdamW's betas,
largest gradient norm."""
OPERATIONS = 80
"""Approximate number of PyTorch operations in a step."""
QUANTITIES = ("count", "logit", "temperature", "penalty")


@dataclass(frozen=True)
class GateVariant:
    """One way to train the gates.

    Attributes:
        settings: settings of `adaptive`; the defaults are the study's.
        rate: the gates' learning rate as a multiple of the study's.
        noise: standard deviation of the normal noise in each gate's gradient.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    noise: float = 0.0


VARIANTS = {
    "as published": GateVariant(),
    "without the penalty": GateVariant({"target_weight": 0.0}),
    "without annealing": GateVariant({"schedule": "none"}),
    "ten times the rate": GateVariant(rate=10.0),
    "biased open": GateVariant({"gate_init": 2.0}),
    "at least two": GateVariant({"least_count": 2.0}),
    "cosine": GateVariant({"schedule": "cosine"}),
    "exponential": GateVariant({"schedule": "exponential"}),
    "noise of 0.001": GateVariant(noise=1e-3),
    "noise of 0.01": GateVariant(noise=1e-2),
}


def runs(steps: int, seeds: int) -> dict[str, ComputedCall]:
    """Return calls of `simulate` by the run's name: variants with noise for each seed, others once."""
    every = max(1, steps // 100)
    return {
        run_name(label, seed): ComputedCall(
            {"label": label, "steps": steps, "every": every, "seed": seed}, 0.0, float(OPERATIONS * steps)
        )
        for label, variant in VARIANTS.items()
        for seed in range(seeds if variant.noise else 1)
    }


def simulate(label: str, steps: int, every: int, seed: int = 0, lr: float = RATE) -> list[dict[str, Any]]:
    """Train gates on penalty and noise alone; return rows `count` (the sum of the gates), `logit` (their mean),
    `temperature` and `penalty`, at step 0 and every `every` steps."""
    variant = VARIANTS[label]
    residual = Adaptive(2 * LAYERS, 1, **variant.settings)
    gates, generator = residual.logit, torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([gates], lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
    schedule = OptimConfig(warmup=WARMUP, min_lr_ratio=FLOOR)
    rows: list[dict[str, Any]] = []

    def record(step: int) -> None:
        now = residual.learned()
        values = (now["boundaries"].values, gates.mean(), now["temperature"].values, residual.penalty())
        for name, value in zip(QUANTITIES, values, strict=True):
            rows.append({"quantity": name, "step": step, "value": float(f"{value.item():.5g}")})

    record(0)
    for step in range(1, steps + 1):
        residual.set_progress(step / steps)
        share = scheduled_rate(step, steps, schedule)
        optimizer.param_groups[0]["lr"] = variant.rate * lr * share
        (gradient,) = torch.autograd.grad(residual.penalty(), gates)
        if variant.noise:
            gradient = gradient + variant.noise * torch.randn(gradient.shape, generator=generator)
        gates.grad = gradient * min(1.0, CLIP / (gradient.norm().item() + 1e-6))
        optimizer.step()
        if step % every == 0 or step == steps:
            record(step)
    return rows
