"""A whole training step of every residual against the standard one: time, memory, bytes kept for backward.

    python benchmarks/step.py                      # d=256, 12 layers, 2,048 tokens, fp32 and bf16; about five minutes
    python benchmarks/step.py --device cuda --out benchmarks/results/step_h100.json

Times are medians of steps taken in turn in one process, ratios are to `standard` in the same run. Kept bytes are those
of distinct storages that one forward pass saves for backward, without parameters. Peak memory is that of a process
which takes three steps of one variant alone.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import naive

from attnres.files import write_json
from attnres.models import build
from attnres.ops import cpu
from attnres.studies.speed import step_times
from attnres.train.device import tune
from attnres.train.environment import describe, peak_memory, reset_peak_memory

WIDTH, LAYERS, VOCABULARY = 256, 12, 4096
SIZE = {
    "family": "qwen3",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 3 * WIDTH,
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("standard", {}),
    "rescaled": ("rescaled", {}),
    "block (8 blocks)": ("block", {"num_blocks": 8}),
    "block (6 blocks)": ("block", {"num_blocks": 6}),
    "full": ("full", {}),
    "naive block (8 blocks)": ("naive_block", {"num_blocks": 8}),
    "naive full": ("naive_full", {}),
}


def kept_for_backward(label: str, batch: int, length: int, device: torch.device) -> dict[str, float]:
    """What one fp32 forward pass saves, in MB and in (tokens, width) vectors a sublayer."""
    residual, settings = VARIANTS[label]
    model = build(SIZE, residual, vocab_size=VOCABULARY, max_positions=length, settings=settings).to(device)
    tune(model, device, length)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(VOCABULARY, (batch, length), device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    total = sum(seen.values())
    return {"MB": total / 1e6, "vectors_per_sublayer": total / (4 * batch * length * WIDTH) / (2 * LAYERS)}


def peak_of(label: str, batch: int, length: int, dtype: str, device: str) -> int:
    """Peak bytes of a process of its own that takes three steps."""
    command = [sys.executable, __file__, "--peak", label, "--batch", str(batch), "--length", str(length)]
    done = subprocess.run([*command, "--dtypes", dtype, "--device", device], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def take_three_steps(label: str, batch: int, length: int, dtype: str, device: torch.device) -> int:
    residual, settings = VARIANTS[label]
    reset_peak_memory(device)
    step_times(
        {label: (residual, settings)},
        size=SIZE,
        vocab_size=VOCABULARY,
        seq_len=length,
        batch_size=batch,
        dtype=dtype,
        device=str(device),
        rounds=1,
        least=1,
    )
    return peak_memory(device)


def import_ratio(rounds: int = 7) -> dict[str, float]:
    """Seconds of `import torch` and of `import attnres`, each in a new interpreter, in turn."""
    times: dict[str, list[float]] = {"torch": [], "attnres": []}
    for _ in range(rounds):
        for module, values in times.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
            values.append(time.perf_counter() - began)
    medians = {module: statistics.median(values) for module, values in times.items()}
    return {
        **{f"{module}_s": value for module, value in medians.items()},
        "ratio": medians["attnres"] / medians["torch"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=90.0, help="of timing for each dtype")
    parser.add_argument("--out", default="benchmarks/results/step_cpu.json")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    naive.register()
    device, batch, length = torch.device(options.device), options.batch, options.length
    if options.peak:
        print(take_three_steps(options.peak, batch, length, options.dtypes[0], device))
        return
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/step.py", *sys.argv[1:]]),
        "environment": describe(device, ",".join(options.dtypes)),
        "cpu_kernels": cpu.load() is not None,
        "model": {**SIZE, "vocab_size": VOCABULARY},
        "tokens": batch * length,
        "seed": 0,
        "import": import_ratio(),
        "kept_for_backward_fp32": {label: kept_for_backward(label, batch, length, device) for label in VARIANTS},
    }
    for dtype in options.dtypes:
        print(f"{dtype}: timing {len(VARIANTS)} variants in turn", flush=True)
        speed = step_times(
            VARIANTS,
            size=SIZE,
            vocab_size=VOCABULARY,
            seq_len=length,
            batch_size=batch,
            dtype=dtype,
            device=options.device,
            seconds=options.seconds,
            rounds=200,
        )
        for label, values in speed["variants"].items():
            values["peak_bytes"] = peak_of(label, batch, length, dtype, options.device)
        result[dtype] = speed
        print(f"{'variant':<24}{'ms':>8}{'ratio':>8}{'quartiles':>15}{'peak MB':>10}{'kept MB (fp32)':>16}")
        for label, values in speed["variants"].items():
            low, high = values["ratio_quartiles"]
            kept = result["kept_for_backward_fp32"][label]["MB"]
            print(
                f"{label:<24}{values['median_s'] * 1e3:8.0f}{values['ratio']:8.3f}{low:8.3f}-{high:.3f} "
                f"{values['peak_bytes'] / 1e6:9.0f}{kept:16.0f}"
            )
    print(f"import attnres: {result['import']['ratio']:.2f} times import torch")
    write_json(Path(options.out), result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
