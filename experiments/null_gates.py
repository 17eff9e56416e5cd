"""What annealing and the penalty do to learned block boundaries by themselves: gates that no loss depends on.

    python experiments/null_gates.py --out docs/data/null_gates

The gates are those of `adaptive` over 12 layers, trained as the nanoGPT study trained its own (10,000 steps of AdamW at
6e-4, betas 0.9 and 0.95, 2,000 steps of warm-up, a cosine down to 6e-5, gradients clipped at 1), without a network:
their gradient is the penalty's, in some variants with noise of mean zero where a loss's would be. Whatever the sum of
the gates does here, no model asked for it. Writes OUT/null_gates.json, null-gates.png and null-gates.pdf in minutes.

Source: github.com/aupadhyay/attnres-exp, whose reading of its run is that the model eliminates all boundaries.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from null_gates_figure import courses

from attnres.errors import UserError
from attnres.figures.write import Drawn, save_all
from attnres.files import write_json
from attnres.residuals.mechanisms.adaptive import Adaptive
from attnres.residuals.settings import whole
from attnres.training.environment import describe
from attnres.training.schedule import fraction_of_peak

LAYERS = 12
"""Of the network that is not there: a gate after each but the last."""
WARMUP, FLOOR, BETAS, CLIP = 0.2, 0.1, (0.9, 0.95), 1.0
"""Of the study's optimizer: fractions of the steps and of the peak rate, AdamW's rates, the largest gradient norm."""


@dataclass(frozen=True)
class Variant:
    """One way to train the gates.

    Attributes:
        settings: of `adaptive`; the defaults are the study's.
        rate: the gates' learning rate as a multiple of the study's.
        noise: standard deviation of the normal noise in each gate's gradient.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    noise: float = 0.0


VARIANTS = {
    "as published": Variant(),
    "without the penalty": Variant({"target_weight": 0.0}),
    "without annealing": Variant({"schedule": "none"}),
    "ten times the rate": Variant(rate=10.0),
    "biased open": Variant({"gate_init": 2.0}),
    "at least two": Variant({"least_count": 2.0}),
    "cosine": Variant({"schedule": "cosine"}),
    "exponential": Variant({"schedule": "exponential"}),
    "noise of 0.001": Variant(noise=1e-3),
    "noise of 0.01": Variant(noise=1e-2),
}


@dataclass
class Options:
    """How long, and where to."""

    out: Annotated[Path, tyro.conf.arg(name="out")]
    """Where the files go."""
    steps: int = 10_000
    """Steps of training."""
    lr: float = 6e-4
    """Peak learning rate."""
    every: int = 100
    """Steps from one record to the next."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the noise; without noise there is one course."""


def simulate(variant: Variant, options: Options, seed: int = 0) -> dict[str, list[float]]:
    """Train gates on their penalty and noise alone; return the course of `count` (the sum of the gates), `logit` (their
    mean), `temperature` and `penalty`, at step 0 and every so many steps."""
    residual = Adaptive(2 * LAYERS, 1, **variant.settings)
    gates, generator = residual.logit, torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([gates], lr=options.lr, betas=BETAS, weight_decay=0.0, fused=True)
    course: dict[str, list[float]] = {"count": [], "logit": [], "temperature": [], "penalty": []}

    def record() -> None:
        now = residual.learned()
        values = (now["boundaries"].values, gates.mean(), now["temperature"].values, residual.penalty())
        for name, value in zip(course, values, strict=True):
            course[name].append(float(f"{value.item():.5g}"))

    record()
    for step in range(1, options.steps + 1):
        residual.set_progress(step / options.steps)
        share = fraction_of_peak(step, options.steps, warmup=WARMUP, floor=FLOOR)
        optimizer.param_groups[0]["lr"] = variant.rate * options.lr * share
        (gradient,) = torch.autograd.grad(residual.penalty(), gates)
        if variant.noise:
            gradient = gradient + variant.noise * torch.randn(gradient.shape, generator=generator)
        gates.grad = gradient * min(1.0, CLIP / (gradient.norm().item() + 1e-6))
        optimizer.step()
        if step % options.every == 0 or step == options.steps:
            record()
    return course


def findings(options: Options) -> dict[str, Any]:
    """Return each variant's courses and what its count is at the start, when annealing begins, at its least and at the
    end, as means over seeds."""
    whole("steps", options.steps), whole("every", options.every), whole("the number of seeds", len(options.seeds))
    steps = [*range(0, options.steps, options.every), options.steps]
    variants = []
    for label, variant in VARIANTS.items():
        seeds = options.seeds if variant.noise else options.seeds[:1]
        runs = [simulate(variant, options, seed) for seed in seeds]
        means = [statistics.fmean(values) for values in zip(*(run["count"] for run in runs), strict=True)]
        least = min(range(len(means)), key=means.__getitem__)
        counts = {"start": means[0], "least": means[least], "least_at": steps[least], "end": means[-1]}
        variants.append({"label": label, **dataclasses.asdict(variant), "count": counts, "courses": runs})
        print(table([variants[-1]]), flush=True)
    values = {**dataclasses.asdict(options), "out": str(options.out)}
    residual = Adaptive(2 * LAYERS, 1)
    return {
        "options": values,
        "environment": describe(torch.device("cpu"), "fp32"),
        "target": residual.target_count,
        "gates": len(residual.logit),
        "annealing": [residual.begin * options.steps, residual.end * options.steps],
        "steps": steps,
        "variants": variants,
    }


def table(variants: Sequence[dict[str, Any]]) -> str:
    """One line a variant: the sum of the gates at the start, at its least and at the end."""
    lines = []
    for one in variants:
        count = one["count"]
        lines.append(
            f"{one['label']:<20}  start {count['start']:5.2f}   least {count['least']:7.3f} at step "
            f"{count['least_at']:>6,}   end {count['end']:7.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    results = findings(options)
    write_json(options.out / "null_gates.json", results)
    drawn = Drawn()
    drawn.add("null-gates", lambda: courses(results))
    save_all(drawn.plots, options.out)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
