"""Floating-point operations of a training step, and how much of what a device can do they are (MFU).

Counted as in PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): for each token, two operations for each weight that
multiplies it, and 4 H Q T a layer for attention's scores and mixtures (H heads of size Q, T tokens, no half of them
left out for the causal mask); twice that again for the gradients. What is made a second time (activation checkpointing)
does not count, nor do reads of a residual, nor the recurrence of linear attention: MFU is of the plain model's work,
and falls by what these take.
"""

from typing import Any

import torch
from torch import nn

PEAKS = {
    "B200": (2250e12, 80e12),
    "H200": (989.4e12, 66.9e12),
    "H100 PCIe": (756e12, 51.2e12),
    "H100": (989.4e12, 66.9e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "RTX 4090": (165.2e12, 82.6e12),
}
"""Part of a device's name -> dense operations a second in bf16 (sums in fp32) and in fp32 (without TF32): NVIDIA's data
sheets. The first that fits counts."""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Operations a second that a device can do in "bf16" or "fp32"; None where nobody has written it down here."""
    if device.type != "cuda" or (dtype == "fp32" and torch.backends.cuda.matmul.allow_tf32):
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    for name, (bf16, fp32) in PEAKS.items():
        if set(name.split()) <= set(words):
            return bf16 if dtype == "bf16" else fp32
    return None


def forward_flops(model: Any, length: int) -> float:
    """Operations of a forward pass for each token of sequences of `length`."""
    return 2 * _multiplying(model) + _attention(model.config, length)


def step_flops(model: Any, length: int) -> float:
    """The same of a forward and a backward pass; a frozen weight has no gradient of its own."""
    gradients = 2 * (_multiplying(model) + _multiplying(model, trained=True)) + 2 * _attention(model.config, length)
    return forward_flops(model, length) + gradients


def _multiplying(model: Any, *, trained: bool = False) -> float:
    """Return the number of weights (of those that are trained) that multiply a token: of the experts' its share."""
    residual = getattr(model, "residual", None)
    apart = {id(p) for p in residual.parameters()} if isinstance(residual, nn.Module) else set()
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()} - head
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("bias") or id(parameter) in apart | tables:
            continue
        if trained and not parameter.requires_grad:
            continue
        of_experts = parameter.ndim == 3 and "experts" in name
        total += parameter.numel() * (_experts_of_a_token(model.config) / len(parameter) if of_experts else 1)
    return total


def _experts_of_a_token(config: Any) -> float:
    count = getattr(config, "num_experts_per_tok", 1)
    return sum(count) / len(count) if isinstance(count, list) else count


def _attention(config: Any, length: int) -> float:
    """Return the operations of scores and mixtures for each token in a forward pass; linear attention has none."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0) or size
    value = getattr(config, "v_head_dim", None) or size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or length
    reach = {"full_attention": length, "sliding_attention": min(length, window)}
    return sum(2 * heads * (key + value) * reach.get(kind, 0) for kind in kinds)
