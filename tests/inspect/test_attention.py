"""Attention over tokens: against queries and keys multiplied by hand, and nothing of the model changed."""

import weakref

import pytest
import torch

from attnres import UserError
from attnres.inspect import token_attention
from attnres.inspect.attention import attending_layers
from attnres.models import build

IDS = torch.tensor([3, 1, 4, 1, 5])


def test_heads_mean_and_maximum_are_those_of_queries_and_keys():
    fields = {"family": "gpt2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build(fields, "block", vocab_size=40, settings={"block_size": 2}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    kept = []
    hook = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda module, args, out: kept.append(out[0]))
    with torch.no_grad():
        before = model(input_ids=IDS[None]).logits
    hook.remove()
    q, k, _ = kept[0].view(5, 3, 4, 4).permute(1, 2, 0, 3)  # (heads, T, width of a head) each
    hidden = torch.ones(5, 5).tril() == 0
    weights = (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1)
    shown = token_attention(model, IDS)
    torch.testing.assert_close(shown.mean[1], weights.mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(shown.largest[1], weights.amax(0), atol=1e-5, rtol=1e-4)
    at = token_attention(model, IDS, position=3)
    torch.testing.assert_close(at.heads[1], weights[:, 3], atol=1e-5, rtol=1e-4)
    assert len(at.heads) == 2 and shown.heads == [] and torch.equal(at.mean, shown.mean)
    assert shown.layers == [0, 1] and shown.tokens == IDS.tolist()
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS[None]).logits, before), "fused kernels again"


def test_layers_are_numbered_in_the_whole_model():
    """Of a hybrid every second layer attends with weights; what its attention itself gives is held against them."""
    fields = {
        "family": "qwen3_next",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    fields |= {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8, "linear_key_head_dim": 8}
    fields |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 2}
    fields |= {"num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = build(fields, "block", vocab_size=40, settings={"block_size": 2}).eval()
    kept = {}
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, out, at=number: kept.update({at: out[1][0]}))
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer, "self_attn")
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(input_ids=IDS[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    shown = token_attention(model, IDS)
    assert shown.layers == sorted(kept) == [1, 3]
    for mean, weights in zip(shown.mean, kept.values(), strict=True):
        torch.testing.assert_close(mean, weights.mean(0))
    model.config.layer_types = ["linear_attention", "full_attention", *["linear_attention"] * 2]
    with pytest.raises(UserError, match="weights of 2 of its 4 layers, and its config names 1 "):
        attending_layers(model.config, 2)


def test_the_heads_of_one_layer_at_a_time_are_held(make_model, monkeypatch):
    softmax, made, alive = torch.nn.functional.softmax, [], []

    def watched(*args, **options):
        out = softmax(*args, **options)
        if out.ndim == 4:  # over tokens; over depth there is no such dimension of heads
            alive.append(sum(one() is not None for one in made))
            made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(torch.nn.functional, "softmax", watched)
    shown = token_attention(make_model("full"), [1, 2, 3, 4])
    assert len(made) == len(shown.layers) == 3 and max(alive) <= 1


def test_it_is_shown_in_a_notebook(make_model):
    shown = token_attention(make_model("full"), [1, 2, 3])
    assert shown.mean.sum(-1).allclose(torch.ones(3, 3)) and "what the last token attends to" in shown._repr_html_()
    pytest.importorskip("pandas")
    table = shown.frame(1)
    assert len(table) == 3 * 2 and table["mean"].iloc[1] == shown.mean[0, 1, 1].item()
    with pytest.raises(UserError, match="position 3 in a text of 3 tokens"):
        shown.frame(3)
