"""A training step of a small Kimi Linear whose KDA layers are Transformers' own PyTorch code, or on tiles.

    python benchmarks/kda.py                       # 128 and 512 tokens on a CPU; two minutes

Steps are interleaved in one process. The second ratio is relative to the standard residual on tiles.
"""

import argparse
from collections.abc import Callable
from typing import Any

import harness
import torch

from attnres.models import build
from attnres.streams.known_norms import own_class
from attnres.training.config import OptimConfig
from attnres.training.objective import Objective
from attnres.training.optim import build_optimizers

SIZE = {
    "family": "kimi_linear",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
VOCABULARY = 256
CASES = {"4 x 128 tokens": (4, 128), "1 x 512 tokens": (1, 512)}


def step_of(residual: str, batch: int, tokens: int, device: torch.device, *, tiles: bool) -> Callable[[], Any]:
    """A training step of a new model."""
    settings = {"num_blocks": 2} if residual == "block" else {}
    model = build(SIZE, residual, vocab_size=VOCABULARY, max_positions=tokens, settings=settings).to(device).train()
    for layer in model.depth_layers:
        if not tiles:
            layer.self_attn.__class__ = own_class(layer.self_attn)
    optimizers = build_optimizers(model, OptimConfig())
    objective = Objective(model, "whole", lambda: torch.autocast(device.type, enabled=False))
    ids = torch.randint(VOCABULARY, (batch, tokens + 1), device=device)

    def step() -> None:
        (objective(ids[:, :-1], ids[:, 1:]).objective / ids[:, 1:].numel()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser, ("fp32",))
    options = parser.parse_args()
    device = harness.settle(options, "kda")
    result: dict[str, Any] = harness.head("kda", device, options.dtype, options.seed)
    result |= {"size": SIZE, "rows": {}}
    torch.manual_seed(options.seed)
    for case, (batch, tokens) in CASES.items():
        steps = {
            "standard, Transformers' KDA": step_of("standard", batch, tokens, device, tiles=False),
            "standard, KDA on tiles": step_of("standard", batch, tokens, device, tiles=True),
            "block, KDA on tiles": step_of("block", batch, tokens, device, tiles=True),
        }
        rows = harness.measure(steps, device, seconds=options.seconds, second="standard, KDA on tiles")
        result["rows"][case] = rows
        print(f"{case}\n{harness.lines(rows)}\n", flush=True)
    groups = {
        case: {name: row["median_s"] * 1e3 for name, row in rows.items()} for case, rows in result["rows"].items()
    }
    harness.finish(options.out, result, groups, "ms", "A training step of a small Kimi Linear")


if __name__ == "__main__":
    main()
