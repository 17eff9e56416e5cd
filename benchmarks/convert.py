"""Seconds and memory of a conversion on disk: a random model of Qwen3-0.6B's shape, converted in a process of its own.

    python benchmarks/convert.py

The limits: two minutes, and 2.2 times the model's size in memory, everything included: the interpreter, torch, the
source's files that the process maps, and what the comparison of logits takes.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from attnres.files import write_json
from attnres.training.environment import describe, peak_memory

VOCABULARY = 151_936
LIMIT_SECONDS, LIMIT_RATIO = 120.0, 2.2
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make(folder: Path, size: str, dtype: str) -> None:
    """A plain model with random weights."""
    import transformers

    from attnres.models import FAMILIES, SIZES

    fields: dict[str, Any] = {**SIZES[size], "vocab_size": VOCABULARY}
    family = FAMILIES[fields.pop("family")]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**fields)
    getattr(transformers, family.causal_lm)(config).to(DTYPES[dtype]).save_pretrained(folder)


def convert(source: Path, out: Path, residual: str) -> None:
    """Convert, and print the figures as JSON."""
    from attnres.models.convert import convert

    began = time.perf_counter()
    report = convert(source, residual, out=out)
    seconds = time.perf_counter() - began
    measured = {
        "seconds": seconds,
        "peak_bytes": peak_memory(torch.device("cpu")),
        "max_difference": report.max_difference,
        "relative_difference": report.relative_difference,
        "bound": report.bound,
        "arithmetic": report.arithmetic,
        "own_difference": report.own_difference,
        "logit_scale": report.logit_scale,
        "parameters": report.parameters,
    }
    print(json.dumps(measured))


def child(*words: str) -> str:
    """The last line that this script says as a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    return (done.stdout.strip().splitlines() or [""])[-1]


def measure(size: str, dtype: str, residual: str, scratch: Path) -> dict[str, Any]:
    source, out = scratch / f"plain-{dtype}", scratch / f"converted-{dtype}"
    child("--make", str(source), "--size", size, "--dtypes", dtype)
    began = time.perf_counter()
    measured = json.loads(child("--convert", str(source), str(out), "--residual", residual))
    measured["process_seconds"] = time.perf_counter() - began
    measured["model_bytes"] = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    measured["ratio"] = measured["peak_bytes"] / measured["model_bytes"]
    measured["within_limits"] = measured["process_seconds"] < LIMIT_SECONDS and measured["ratio"] < LIMIT_RATIO
    shutil.rmtree(source)
    shutil.rmtree(out)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b", help="a name in attnres.models.SIZES")
    parser.add_argument("--residual", default="block")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=sorted(DTYPES))
    parser.add_argument("--scratch", help="folder for the models; default: a temporary one")
    parser.add_argument("--out", default="benchmarks/results/convert_cpu.json")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--convert", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(Path(options.make), options.size, options.dtypes[0])
        return
    if options.convert:
        convert(*map(Path, options.convert), options.residual)
        return
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/convert.py", *sys.argv[1:]]),
        "environment": describe(torch.device("cpu"), ",".join(options.dtypes)),
        "size": options.size,
        "vocab_size": VOCABULARY,
        "residual": options.residual,
        "limits": {"seconds": LIMIT_SECONDS, "ratio": LIMIT_RATIO},
    }
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        for dtype in options.dtypes:
            measured = result[dtype] = measure(options.size, dtype, options.residual, Path(scratch))
            print(
                f"{dtype}: {measured['process_seconds']:.0f} s ({measured['seconds']:.0f} s without start), peak "
                f"{measured['peak_bytes'] / 1e9:.2f} GB, {measured['ratio']:.2f} times the model's "
                f"{measured['model_bytes'] / 1e9:.2f} GB; logits {measured['relative_difference']:.1e} of their scale"
            )
    write_json(Path(options.out), result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
