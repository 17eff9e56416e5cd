"""What a pass keeps for its backward, counted on shapes: what PyTorch's allocator says of the same pass."""

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tiny import K3
from torch.profiler import ProfilerActivity, profile

from attnres import UserError
from attnres.head import called_losses
from attnres.models import build
from attnres.models.bases import checkpoint_activations
from attnres.scale import activation_bytes
from attnres.scale.activation_bytes import kept_bytes, kept_of

SIZE = {
    "family": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
BATCH, TOKENS = 2, 64
WHOLE = partial(called_losses, kind="whole")


def model_of(residual: str, size: Any = None) -> Any:
    settings = {"num_blocks": 2} if residual == "block" else {}
    return build(size or SIZE, residual, vocab_size=97, max_positions=TOKENS, settings=settings).train()


def allocated(model: Any, losses: Any, *, bf16: bool) -> int:
    """Bytes that a pass leaves behind, while its loss is there."""
    ids = torch.randint(97, (BATCH, TOKENS))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return losses(model, {"input_ids": ids}, ids)

    forward()  # what is cached from now on
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        loss = forward()
        gc.collect()
    events: Any = trace.profiler
    assert loss.requires_grad
    return sum(event.nbytes() for event in events.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.quick("block-whole-reads-False")
@pytest.mark.parametrize(
    ("residual", "kind", "checkpointing", "bf16"),
    [
        ("block", "whole", "none", False),
        ("block", "chunked", "none", True),
        ("full", "whole", "none", True),
        ("standard", "whole", "none", False),
        ("block", "whole", "layer", False),
        ("full", "whole", "sublayer", True),
        ("block", "whole", "reads", False),
    ],
)
def test_the_count_is_what_the_allocator_says(residual, kind, checkpointing, bf16):
    model, losses = model_of(residual), partial(called_losses, kind=kind)
    kept = kept_bytes(model, BATCH, TOKENS, 2 if bf16 else 4, losses, checkpointing)
    assert sum(kept.values()) == kept_of(kept, -1, 4)
    copies = sum(2 * p.numel() for p in model.depth_layers.parameters() if p.ndim > 1) if bf16 else 0
    checkpoint_activations(model, checkpointing)
    model.set_attn_implementation("sdpa")
    states = 5056 * 2 * 3 if checkpointing in ("layer", "sublayer") else 0  # of random numbers, that checkpoints keep
    counted = sum(kept.values()) + copies * (checkpointing == "none")
    assert counted == pytest.approx(allocated(model, losses, bf16=bf16), rel=0.01, abs=states)
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in model.parameters())


@pytest.mark.long
def test_what_is_run_once_and_repeated_keeps_as_much_as_what_is_run_each_time(monkeypatch):
    """Of Kimi K3's layers, which are of several kinds."""
    model = model_of("block", K3)
    once = kept_bytes(model, BATCH, TOKENS, 2, WHOLE)
    monkeypatch.setattr(activation_bytes, "_run_one_of_each_kind", lambda *_: None)
    monkeypatch.setattr(activation_bytes, "_remembering_reads", nullcontext)
    assert +kept_bytes(model, BATCH, TOKENS, 2, WHOLE) == +once


def test_stages_keep_what_they_made():
    kept = kept_bytes(model_of("block"), BATCH, TOKENS, 4, WHOLE)
    parts = [kept_of(kept, start, stop) for start, stop in ((-1, 1), (1, 2), (2, 4))]
    assert all(parts) and sum(parts) <= kept_of(kept, -1, 4)


def test_a_mixture_of_experts_is_counted_and_layers_that_ask_for_numbers_are_refused():
    size = {"family": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    size |= {"moe_intermediate_size": 32, "intermediate_size": 64}
    model = model_of("block", size)
    assert sum(kept_bytes(model, BATCH, TOKENS, 2, WHOLE).values()) > 0
    model.depth_layers[1].register_forward_hook(lambda layer, given, result: float(result.sum()) and None)
    with pytest.raises(UserError, match="do not run on shapes alone"):
        kept_bytes(model, BATCH, TOKENS, 2, WHOLE)
