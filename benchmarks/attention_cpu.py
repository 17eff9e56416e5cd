"""Why training on a CPU takes plain attention for short sequences: the standard step with either implementation.

python benchmarks/attention_cpu.py        # about two minutes; writes benchmarks/results/attention_cpu.json
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres.device import in_turn, seconds_of, spread
from attnres.files import write_json
from attnres.models import build
from attnres.training.environment import describe, keep_freed_memory
from attnres.training.objective import Objective

ROUNDS = 8


def precision(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


def step(model: Any, ids: Tensor, dtype: torch.dtype, attention: str) -> None:
    """Forward and backward with one of Transformers' attentions."""
    model.set_attn_implementation(attention)
    sums = Objective(model, "whole", partial(precision, dtype))(ids[:, :-1], ids[:, 1:])
    (sums.objective / ids[:, 1:].numel()).backward()
    model.zero_grad()


def main() -> None:
    keep_freed_memory()
    result: dict[str, Any] = {
        "environment": describe(torch.device("cpu"), "fp32, bf16"),
        "size": "nano",
        "steps_ms": {},
    }
    for batch, length in ((8, 256), (4, 512), (2, 1024)):
        model = build("nano", "standard", vocab_size=4096, max_positions=length)
        ids = torch.randint(4096, (batch, length + 1), generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.bfloat16):
            steps = {name: partial(step, model, ids, dtype, name) for name in ("eager", "sdpa")}
            measures = {name: partial(seconds_of, call, torch.device("cpu")) for name, call in steps.items()}
            times = in_turn(measures, rounds=ROUNDS, warm_up=1)
            medians = {name: spread(values).median * 1e3 for name, values in times.items()}
            result["steps_ms"][f"{batch}x{length} {str(dtype).removeprefix('torch.')}"] = medians
            print(
                f"{batch} x {length} {dtype}: " + ", ".join(f"{k} {v:.0f} ms" for k, v in medians.items()), flush=True
            )
    write_json(Path("benchmarks/results/attention_cpu.json"), result)


if __name__ == "__main__":
    main()
