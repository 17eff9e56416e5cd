"""`attnres env`: print versions, devices, and which backend a read takes."""

import contextlib
import json
import platform
from dataclasses import dataclass
from typing import Any

from attnres.errors import UserError
from attnres.flags import parse

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
EXTRAS = {
    "triton": "kernels",
    "datasets": "data",
    "lm-eval": "eval",
    "accelerate": "eval",
    "peft": "finetune",
    "starlette": "app",
    "uvicorn": "app",
    "trackio": "track",
}
"""Package -> the extra of attnres that installs it."""


@dataclass
class Env:
    """Print versions, devices, and which backend depth reads use there and why. Add this to a bug report."""

    json: bool = False
    """Print JSON."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("env", Env, arguments, doing="looking at devices and kernels")
    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else as_text(facts))


def collect() -> dict[str, Any]:
    """Return versions, devices and backends of this machine as JSON values.

    `reads` has a row for each device and dtype: the backend of a read at a common width (cpu, gpu or eager, which is
    plain torch) and the reason. `cuda_graphs` gives for each device the reason why `attnres train --cuda-graphs` would
    take eager steps there, or None if it would not. Without a CUDA device `no_cuda` says what is missing.
    """
    import torch

    import attnres
    from attnres.files import cache_dir
    from attnres.ops import explain
    from attnres.ops.devices import KERNELS
    from attnres.training import graphs
    from attnres.training.environment import has_bf16, is_host, name_of, processor, version

    devices = [device for row in KERNELS.values() for device in row.devices()]
    titles = {row.name: row.title.removeprefix("the ") for row in KERNELS.values()}
    reads = []
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            plan = explain([torch.zeros(1, 256, dtype=dtype, device=device)])
            name = str(dtype).removeprefix("torch.")
            title = titles.get(plan.backend, "plain torch")
            row = {"device": str(device), "dtype": name, "backend": plan.backend, "title": title}
            reads.append({**row, "reason": plan.reasons[0]})
    captured = {str(device): graphs.why_not(device, None) for device in devices}
    cache = None
    with contextlib.suppress(UserError):
        cache = str(cache_dir())
    return {
        "attnres": attnres.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in (*PACKAGES, *EXTRAS)},
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "bf16": {str(device): has_bf16(device) for device in devices},
        "cuda": [name_of(device) for device in devices if not is_host(device)],
        "no_cuda": next(filter(None, (row.missing() for row in KERNELS.values())), None),
        "reads": reads,
        "cuda_graphs": captured,
        "cache": cache,
    }


def as_text(facts: dict[str, Any]) -> str:
    """Return the facts of `collect` as text for the terminal."""
    lines = [f"attnres {facts['attnres']}, Python {facts['python']}, {facts['platform']}", ""]
    for name, version in facts["packages"].items():
        lines.append(f"  {name:<13} {version or f'not installed (extra {EXTRAS.get(name)})'}")
    lines += ["", f"CPU   {facts['cpu']}, {facts['threads']} threads, {_bf16(facts, 'cpu')}"]
    for number, name in enumerate(facts["cuda"]):
        lines.append(f"CUDA  {name}, {_bf16(facts, f'cuda:{number}')}")
    if facts["no_cuda"]:
        lines.append(f"CUDA  none: {facts['no_cuda']}")
    lines += ["", "a depth read runs on"]
    for row in facts["reads"]:
        lines.append(f"  {row['device']:<7} {row['dtype']:<9} {row['title']:<15} {row['reason']}")
    lines += ["", "a training step with --cuda-graphs (off by default) is"]
    for device, reason in facts["cuda_graphs"].items():
        lines.append(f"  {device:<7} {'captured' if reason is None else f'eager: {reason}'}")
    return "\n".join([*lines, "", f"cache {facts['cache'] or 'none: no home folder and no ATTNRES_CACHE'}"])


def _bf16(facts: dict[str, Any], device: str) -> str:
    return "computes in bf16" if facts["bf16"][device] else "no native bf16"
