"""Depth reads are taken away and switched off again, and plain checkpoints load."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from attnres import UserError, attach, convert, detach, disabled, load_plain

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(0))


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 3, nn.LayerNorm(32), enable_nested_tensor=False)


def test_plain_checkpoints_load_and_others_do_not():
    plain, module = encoder(), encoder()
    residual = attach(module, "block", example=X, num_blocks=3)
    with torch.no_grad():
        residual.query.fill_(0.5)
    load_plain(module, plain.state_dict())
    assert (residual.query == 0.5).all()
    torch.testing.assert_close(module.layers[2].linear1.weight, plain.layers[2].linear1.weight)
    state = plain.state_dict()
    state["lin3.weight"] = state.pop("norm.weight")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UserError, match=r"lacks norm\.weight and has lin3\.weight besides"):
        load_plain(module, state)
    torch.testing.assert_close(module.state_dict(), before)


def test_what_is_not_attached_cannot_be_detached_or_disabled():
    for undo in (detach, lambda module: disabled(module).__enter__()):
        with pytest.raises(UserError, match="TransformerEncoder"):
            undo(encoder())


def test_converted_models_are_disabled_too_and_not_detached():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes)).eval()
    model = convert(plain, "full")
    with torch.no_grad():
        model.residual.query.normal_(0, 0.5)
    with disabled(model):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert not torch.allclose(model(IDS).logits, plain(IDS).logits, atol=1e-4)
    with pytest.raises(UserError, match="nothing is attached"):
        detach(model)
