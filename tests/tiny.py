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
