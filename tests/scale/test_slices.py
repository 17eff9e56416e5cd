"""Models that cannot be distributed are refused before anything is sent."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny import SIZE

from attnres import UserError
from attnres.models import build
from attnres.scale.context import share_out_tokens
from attnres.scale.tensor import share_out_layers

THREE: Any = SimpleNamespace(size=lambda: 3)
WITHOUT = {name: value for name, value in SIZE.items() if name != "head_dim"}
GPT2 = {"family": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3}


@pytest.mark.parametrize(
    ("residual", "size", "said"),
    [
        ("block", SIZE, "num_attention_heads is 4, which does not divide by tp 3"),
        ("block", {**SIZE, "num_attention_heads": 6}, "num_key_value_heads is 2, which does not divide"),
        ("block", {**SIZE, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 49}, "49 features"),
        ("block", {**WITHOUT, "family": "olmo2"}, "splits self_attn.q_proj as 'colwise_gather_output'"),
        ("block", GPT2, "Transformers has no tp_plan for AttnResGPT2LMHeadModel"),
        ("muddformer", {**SIZE, "num_attention_heads": 3, "num_key_value_heads": 3}, "gives an attention several"),
    ],
)
def test_layers_that_do_not_divide_are_refused(residual, size, said):
    settings = {"num_blocks": 2} if residual == "block" else {}
    with pytest.raises(UserError, match=said):
        share_out_layers(build(size, residual, vocab_size=31, settings=settings), THREE)


def test_attention_that_is_not_gathered_is_refused():
    model = build({**SIZE, "family": "gemma2"}, "full", vocab_size=31)
    with pytest.raises(UserError, match="capped logits or shared values, which cp does not gather"):
        share_out_tokens(model, THREE)
    sinks = build(
        {**SIZE, "family": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}, "full", vocab_size=31
    )
    with pytest.raises(UserError, match=r"more than PyTorch's \(sinks, say\), which cp would leave out"):
        share_out_tokens(sinks, THREE)
