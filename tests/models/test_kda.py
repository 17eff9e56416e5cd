"""KDA layers of models with depth reads are computed on tiles; those of plain models as Transformers has it."""

import copy
import pickle

import pytest
import torch
from tiny import KIMI
from transformers import BailingHybridConfig, Glm5NextTextConfig, KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from attnres.models import build, convert
from attnres.models import kda as module
from attnres.models.kda import use_tiles
from attnres.models.kimi import KimiK3Config, KimiK3DeltaAttention

VOCAB = 61
IDS = torch.randint(0, VOCAB, (2, 37), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def calls(monkeypatch):
    """The numbers of tokens with which KDA on tiles was called."""
    seen = []
    on_tiles = module.kda
    monkeypatch.setattr(module, "kda", lambda q, *rest: seen.append(q.shape[1]) or on_tiles(q, *rest))
    return seen


@pytest.mark.parametrize(
    "layer_class, config",
    [
        (KimiLinearDeltaAttention, KimiLinearConfig),
        (BailingHybridDeltaAttention, BailingHybridConfig),
        (Glm5NextTextLinearAttention, Glm5NextTextConfig),
        (KimiK3DeltaAttention, KimiK3Config),
    ],
)
def test_every_layer_with_kda_has_tiles(layer_class, config, calls):
    torch.manual_seed(0)
    names = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = config(**names, head_dim=8)
    sizes.linear_head_dim, sizes.linear_num_heads = 8, 2
    layer = layer_class(sizes, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 37, 32)
    expected = layer(x)
    assert not calls
    plain = copy.deepcopy(layer)
    use_tiles(layer)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == [37]
    for one in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(one(x), layer(x))
    assert torch.equal(plain(x), expected) and calls == [37] * 5
    assert type(layer).__name__ == layer_class.__name__


def test_a_converted_model_is_computed_on_tiles_and_the_plain_one_is_not(calls):
    torch.manual_seed(0)
    fields = {name: value for name, value in KIMI.items() if name != "family"}
    plain = KimiLinearForCausalLM(KimiLinearConfig(**fields, vocab_size=VOCAB, pad_token_id=None)).eval()
    model = convert(plain, num_blocks=2)
    del calls[:]
    with torch.no_grad():
        a = plain(input_ids=IDS, use_cache=False).logits
        assert not calls
        b = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    assert calls == [37] * 4  # of five layers one is MLA


@torch.no_grad()
def test_caches_go_on_from_tiles_and_padding_on_the_left_changes_nothing(calls):
    model = build(KIMI, "block", vocab_size=VOCAB, seed=1, settings={"num_blocks": 2}).eval()
    whole = model(input_ids=IDS, use_cache=False).logits
    cache, parts = None, []
    for start, stop in ((0, 20), (20, 35), (35, 36), (36, 37)):
        out = model(input_ids=IDS[:, start:stop], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert set(calls) == {37, 20, 15}
    padded = torch.nn.functional.pad(IDS, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(IDS), (5, 0))
    out = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-5)
