"""A training step with a large vocabulary, its loss from all logits at once and from few rows at a time: time, memory.

    python benchmarks/loss.py                       # 151,936 words, 2,048 tokens, fp32 and bf16; needs 12 GB
    python benchmarks/loss.py --device cuda --tokens 16384

Steps of both take turns in one process. Peak memory is that of a process which takes three steps of one alone: on a CPU
of the whole process, of which `base_bytes` were taken before there was a model.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch

from attnres.device import in_turn, seconds_of, spread
from attnres.files import write_json
from attnres.models import build
from attnres.training.config import OptimConfig
from attnres.training.environment import peak_memory, reset_peak_memory
from attnres.training.objective import Objective, loss_kind
from attnres.training.optim import build_optimizers

SIZE = {
    "family": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "tie_word_embeddings": True,
}
LENGTH = 512


def step_of(kind: str, options: argparse.Namespace) -> Callable[[], None]:
    """A training step of a new model, whose loss is made so."""
    device = torch.device(options.device)
    model = build(SIZE, "block", vocab_size=options.vocabulary, max_positions=LENGTH, settings={"num_blocks": 4})
    model = model.to(device).train()
    optimizers = build_optimizers(model, OptimConfig())
    length = min(LENGTH, options.tokens)
    ids = torch.randint(options.vocabulary, (options.tokens // length, length + 1), device=device)
    precision = partial(torch.autocast, device.type, torch.bfloat16, enabled=options.dtype == "bf16")
    objective = Objective(model, loss_kind(kind, model, options.tokens), precision)

    def step() -> None:
        (objective(ids[:, :-1], ids[:, 1:]).objective / options.tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def peaks_of(kind: str, options: argparse.Namespace) -> list[int]:
    """Peak bytes of a process of its own with three steps, and what it took before there was a model."""
    command = [sys.executable, __file__, "--peak", kind, "--dtype", options.dtype, "--device", options.device]
    command += ["--vocabulary", str(options.vocabulary), "--tokens", str(options.tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [int(word) for word in done.stdout.split()[-2:]]


def measure(options: argparse.Namespace, kinds: list[str]) -> dict[str, Any]:
    """Rows by kind: times, peaks and their ratios to the first kind."""
    device = torch.device(options.device)
    peaks = {kind: peaks_of(kind, options) for kind in kinds}
    measures = {kind: partial(seconds_of, step_of(kind, options), device) for kind in kinds}
    times = in_turn(measures, rounds=50, seconds=options.seconds)
    rows = {}
    for kind in kinds:
        time = spread(times[kind], times[kinds[0]])
        row = {"median_s": time.median, "ratio": time.ratio, "ratio_quartiles": time.ratio_quartiles}
        peak, base = peaks[kind]
        whole, its_base = peaks[kinds[0]]
        row |= {"peak_bytes": peak, "base_bytes": base, "rounds": len(times[kind])}
        rows[kind] = row | {"peak_ratio": peak / whole, "taken_ratio": (peak - base) / (whole - its_base)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser, ("fp32", "bf16"))
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtypes = [options.dtype] if options.dtype else ["fp32", "bf16"]
    device = harness.settle(options, "loss")
    if options.peak:
        reset_peak_memory(device)
        base = peak_memory(device)
        step = step_of(options.peak, options)
        for _ in range(3):
            step()
        print(peak_memory(device), base)
        return
    kinds = ["whole", "chunked"]
    result = harness.head("loss", device, ",".join(dtypes), 0)
    result |= {"size": SIZE, "vocabulary": options.vocabulary, "tokens": options.tokens, "dtypes": {}}
    groups: dict[str, dict[str, float]] = {}
    for options.dtype in dtypes:
        rows = result["dtypes"][options.dtype] = measure(options, kinds)
        table = [["loss", "ms", "ratio", "quartiles", "peak MB", "peak ratio", "without base"]]
        for kind, row in rows.items():
            low, high = row["ratio_quartiles"]
            numbers = [f"{row['median_s'] * 1e3:.4g}", f"{row['ratio']:.3f}", f"{low:.3f}-{high:.3f}"]
            table.append(
                [kind, *numbers, f"{row['peak_bytes'] / 1e6:.0f}", f"{row['peak_ratio']:.3f}"]
                + [f"{row['taken_ratio']:.3f}"]
            )
        print(f"{options.dtype}, {options.vocabulary:,} words, {options.tokens:,} tokens\n{harness.table(table)}\n")
        write_json(options.out, result)
        groups[f"{options.dtype}: time"] = {kind: row["ratio"] for kind, row in rows.items()}
        groups[f"{options.dtype}: peak memory"] = {kind: row["peak_ratio"] for kind, row in rows.items()}
    harness.finish(options.out, result, groups, "ratio to whole", f"A step with {options.vocabulary:,} words")


if __name__ == "__main__":
    main()
