"""What a device makes of attention."""

import pytest
import torch

from attnres import build
from attnres.training.device import tune


@pytest.mark.parametrize(("family", "long"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3", "sdpa")])
def test_attention_is_fused_where_sequences_are_long_and_the_family_can(family, long):
    size = {
        "family": family,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    }
    model = build(size, "block", vocab_size=64)
    for device, length, expected in (("cpu", 128, "eager"), ("cpu", 1024, long), ("cuda", 128, long)):
        tune(model, torch.device(device), length)
        assert model.config._attn_implementation == expected
