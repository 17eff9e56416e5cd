"""Kimi K3's layers: with every field off they are Transformers' kimi_linear, and each field changes what it says."""

from typing import Any

import pytest
import torch
from tiny import K3
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from attnres import UserError
from attnres.models.kimi import KimiK3Config, KimiK3ForCausalLM

VOCAB = 61
IDS = torch.randint(0, VOCAB, (2, 37), generator=torch.Generator().manual_seed(3))
FIELDS = {name: value for name, value in K3.items() if name != "family"} | {"vocab_size": VOCAB, "pad_token_id": None}
OFF: dict[str, Any] = {
    "hidden_act": "silu",
    "use_full_rank_gate": False,
    "gate_lower_bound": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
}


def k3(**fields: Any) -> KimiK3ForCausalLM:
    """A plain one with large weights, so that activations reach their bounds."""
    torch.manual_seed(0)
    return KimiK3ForCausalLM(KimiK3Config(**{**FIELDS, "initializer_range": 0.3, **fields})).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_every_field_off_it_is_kimi_linear(dtype):
    torch.manual_seed(0)
    fields = {name: value for name, value in FIELDS.items() if name not in OFF}
    plain = KimiLinearForCausalLM(KimiLinearConfig(**fields, routed_scaling_factor=1.0)).to(dtype).eval()
    model = k3(**OFF).to(dtype)
    assert {*model.state_dict()} == {*plain.state_dict()}
    model.load_state_dict(plain.state_dict())
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize(
    "field, value",
    [
        *OFF.items(),
        ("activation_situ_beta", 1.0),
        ("activation_situ_linear_beta", None),
        ("mla_use_nope", False),
        ("latent_moe_use_norm", False),
    ],
)
def test_each_field_changes_the_logits(field, value):
    model, other = k3(), k3(**{field: value})
    weights, there = model.state_dict(), other.state_dict()
    shared = {name: weight for name, weight in weights.items() if name in there and weight.shape == there[name].shape}
    other.load_state_dict(shared, strict=False)
    assert (logits(model) - logits(other)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("hidden_act", "gelu", "situ or silu"),
        ("num_expert_group", 8, "groups"),
        ("topk_method", "greedy", "noaux_tc"),
        ("moe_router_activation_func", "softmax", "sigmoid"),
        ("num_nextn_predict_layers", 1, "MTP"),
        ("vision_config", {"depth": 2}, "text_config"),
        ("gate_lower_bound", 5.0, "below 0"),
        ("activation_situ_beta", 0.0, "above 0"),
    ],
)
def test_what_has_no_layer_here_is_refused(field, value, says):
    with pytest.raises(UserError, match=rf"^(?=.*{says}).*{field.replace('num_expert_group', 'n_group')}"):
        KimiK3Config(**{**FIELDS, field: value})
