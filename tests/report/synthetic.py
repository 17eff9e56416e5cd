"""Run folders made of invented numbers, in the layout that training writes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

GAIN = {"standard": 0.0, "rescaled": 0.0, "block": -0.11, "full": -0.13, "deepnorm": 0.15}


def routing(residual: str, layers: int, per_block: int = 4) -> dict[str, Any] | None:
    """What trace.routing looks like for the two residuals that have weights."""
    sublayers = [f"{kind} {layer}" for layer in range(layers) for kind in ("attention", "mlp")]
    sources = []
    for index in range(len(sublayers) + 1):
        if residual == "full":
            sources.append(["embedding", *sublayers[:index]])
        elif residual == "block":
            sealed, open_ = divmod(index, per_block)
            if index == len(sublayers) and open_ == 0:
                sealed, open_ = sealed - 1, per_block
            names = ["embedding", *(f"block {n}" for n in range(1, sealed + 1))]
            sources.append(names + (["partial"] if open_ else []))
        else:
            return None
    rng = np.random.default_rng(5)
    weights = []
    for row in sources:
        logits = rng.normal(size=len(row)) + np.linspace(0, 2, len(row))
        weights.append((np.exp(logits) / np.exp(logits).sum()).tolist())
    return {"weights": weights, "sources": sources, "reads": [*sublayers, "output"]}


def write_run(
    out: Path,
    residual: str = "standard",
    seed: int = 0,
    *,
    label: str | None = None,
    steps: int = 1000,
    stop: int | None = None,
    layers: int = 6,
    windows: int = 64,
    lr: float = 1e-3,
    gain: float | None = None,
    noise: float = 0.02,
) -> Path:
    """One run folder; `stop` leaves it unfinished at that step. `gain`: nats against the common curve at the end."""
    label = label or residual
    folder = out / f"{label}-seed{seed}"
    (folder / "val").mkdir(parents=True)
    last = stop if stop is not None else steps
    gain = GAIN[residual] if gain is None else gain
    config = {
        "model": {"size": "nano", "residual": residual, "settings": {"num_blocks": 6} if residual == "block" else {}},
        "data": {"source": "stdlib", "tokenizer": "bpe:4096", "seq_len": 256, "val_windows": windows},
        "optim": {"optimizer": "adamw", "lr": lr, "betas": [0.9, 0.95]},
        "name": f"{label}-seed{seed}",
        "seed": seed,
        "steps": steps,
        "batch_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    environment = {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "cpu": "A <fast> & wide CPU", "threads": 2}
    (folder / "environment.json").write_text(json.dumps(environment))
    hardness = np.random.default_rng(1000).normal(scale=0.4, size=windows)  # of the windows: the same for every run
    rng = np.random.default_rng([seed, *label.encode()])
    luck = np.random.default_rng([seed, 7]).normal(scale=0.02) + rng.normal(scale=0.004)

    def loss_at(step: int) -> float:
        return 4.2 + 4.1 * math.exp(-step / 40) + 1.4 / (1 + step / 120) + (gain + luck) * (1 - math.exp(-step / 300))

    step_s = {"standard": 0.4, "rescaled": 0.41, "block": 0.43, "full": 0.5}.get(residual, 0.45)
    lines: list[dict[str, Any]] = []
    for step in range(10, last + 1, 10):
        lines.append(
            {
                "kind": "train",
                "step": step,
                "tokens": step * 2048,
                "loss": loss_at(step) - 0.05 + rng.normal(scale=0.06),
            }
            | {"lr": lr, "grad_norm": 1.0, "tokens_per_s": 2048 / step_s, "step_s": step_s}
        )
        if step % 100 == 0:
            losses = loss_at(step) + hardness + rng.normal(scale=noise * 4, size=windows)
            np.save(folder / "val" / f"{step:06d}.npy", losses)
            lines.append({"kind": "val", "step": step, "loss": float(losses.mean()), "windows": windows, "se": 0.05})
            depth = np.arange(2 * layers + 1)
            growth = 1.18 if residual in ("standard", "rescaled") else 1.03
            lines.append(
                {"kind": "depth", "step": step}
                | {"output_rms": (0.3 * growth ** depth[:-1] * (1 + 0.4 * (depth[:-1] % 2))).tolist()}
                | {"input_rms": (0.2 * growth**depth).tolist()}
                | {"grad_rms": (3e-4 * growth ** (-0.9 * depth[:-1])).tolist()}
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if stop is not None:
        return folder
    weights = routing(residual, layers)
    if weights is not None:
        model = {"name": residual, "residual": residual}
        inspection = {"format": 1, "model": model, "data": {}, "reads": weights["reads"], "routing": weights}
        (folder / "inspection.json").write_text(json.dumps(inspection))
    final = next(line for line in reversed(lines) if line["kind"] == "val")
    val_loss = float(final["loss"])
    extra = {"block": 6400, "full": 6400}.get(residual, 0)
    summary = {
        "step": steps,
        "tokens": steps * 2048,
        "val_loss": val_loss,
        "val_se": 0.05,
        "perplexity": math.exp(val_loss),
        "train_loss": lines[-3]["loss"] if len(lines) > 3 else None,
        "tokens_per_s": 2048 / step_s,
        "step_s": step_s,
        "peak_memory_bytes": int(1.2e9 * step_s / 0.4),
        "parameters": 2_890_000 + extra,
        "extra_parameters": extra,
        "wall_s": steps * step_s,
        "windows": windows,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_study(
    out: Path, residuals: tuple[str, ...] = ("standard", "rescaled", "block", "full"), seeds: int = 1, **options: Any
) -> Path:
    """A whole comparison with its plan and an interleaved timing."""
    for seed in range(seeds):
        for residual in residuals:
            write_run(out, residual, seed, **options)
    plan = {"labels": list(residuals), "seeds": list(range(seeds)), "baseline": "standard"}
    (out / "compare.json").write_text(json.dumps(plan))
    ratios = {"standard": 1.0, "rescaled": 1.01, "block": 1.08, "full": 1.26}
    timed = {name: {"median_s": 0.4 * ratios.get(name, 1.1), "ratio": ratios.get(name, 1.1)} for name in residuals}
    (out / "speed.json").write_text(json.dumps({"device": "cpu, 2 threads", "variants": timed}))
    return out
