"""The tiny models that many tests build."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZE = {
    "family": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}

NARROW: dict[str, Any] = {
    "family": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "tie_word_embeddings": True,
}
MOE: dict[str, Any] = {
    "family": "qwen3_moe",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
KIMI = {
    "family": "kimi_linear",
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
"""Kimi Linear of one layer of MLA, as a size."""
K3 = {**KIMI, "family": "kimi_k3", "q_lora_rank": 8, "routed_expert_hidden_size": 16}
"""The same with K3's layers."""


def stir(residual: nn.Module, scale: float, seed: int) -> None:
    """Let a residual's parameters leave their start values, as in training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))


def narrow_llama(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A plain model, as one finds them."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
