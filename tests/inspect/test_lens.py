"""The head on every read, and what sources add to a logit: against the model's own logits and a head by hand."""

import pytest
import torch

from attnres import UserError
from attnres.inspect import direct, logit_lens, read_vectors
from attnres.models import build


def of_family(family, residual="block", **settings):
    fields = {"family": family, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "gpt_neox":
        fields["use_parallel_residual"] = False
    if family == "qwen3":
        fields |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32}
    model = build(fields, residual, vocab_size=40, settings=settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases too
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return model


IDS = torch.tensor([3, 1, 4, 1, 5])


@pytest.mark.parametrize(
    ("family", "residual", "settings"),
    [
        ("qwen3", "block", {"block_size": 2}),
        ("qwen3", "full", {"read_scale": "sum"}),
        ("qwen3", "standard", {}),
        ("gpt_neox", "block", {"block_size": 2}),
        ("gpt2", "full", {}),
        ("qwen3", "full", {"gate": "scalar"}),
    ],
)
def test_sources_and_outputs_add_up_to_the_models_own_logit(family, residual, settings):
    """RMSNorm and LayerNorm, with biases, a scaled read, a plain sum and gates."""
    model = of_family(family, residual, **settings)
    with torch.no_grad():
        for parameter in model.base_model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        logits = model(input_ids=IDS[None], use_cache=False).logits[0]
    one = direct(model, IDS, position=2, target=6)
    assert one.logit == pytest.approx(logits[2, 6].item(), abs=1e-4)
    assert sum(one.sources.values()) + one.rest == pytest.approx(one.logit, abs=1e-9)
    assert one.outputs is not None
    if "gate" not in settings:  # in which they are counted
        assert sum(one.outputs.values()) == pytest.approx(one.logit - one.rest, abs=1e-4)
    assert one.frame()["logit"].sum() == pytest.approx(one.logit, abs=1e-9)
    apart = direct(model, IDS, position=2, target=6, against=8)
    assert apart.logit == pytest.approx((logits[2, 6] - logits[2, 8]).item(), abs=1e-4)
    assert direct(model, IDS).target == int(logits[-1].argmax())


def test_the_lens_is_the_models_own_head_on_every_read():
    model = of_family("qwen3", block_size=2)
    lens, vectors = logit_lens(model, IDS, top=3), read_vectors(model, IDS)
    with torch.no_grad():
        own = model(input_ids=IDS[None], use_cache=False).logits[0].log_softmax(-1)
        h = vectors.reads[1]
        normed = h * (h.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt() * model.model.norm.weight
        by_hand = model.lm_head(normed).log_softmax(-1)
    assert lens.reads[1] == "mlp 0" and lens.top[1] == by_hand.topk(3).indices.tolist()
    assert lens.target[1][:-1] == pytest.approx(by_hand[:-1].gather(1, IDS[1:, None])[:, 0].tolist(), abs=1e-5)
    kl = (own.exp() * (own - by_hand)).sum(-1)
    assert lens.divergence[1] == pytest.approx(kl.tolist(), abs=1e-4)
    assert lens.divergence[-1] == pytest.approx([0.0] * 5, abs=1e-5)
    assert lens.top[-1] == own.topk(3).indices.tolist()
    with torch.no_grad():  # and the base is as it was
        assert torch.equal(model(input_ids=IDS[None], use_cache=False).logits[0].log_softmax(-1), own)


def test_the_last_read_of_the_lens_is_the_prediction_of_gpt2_too():
    model = of_family("gpt2", "full")
    with torch.no_grad():
        own = model(input_ids=IDS[None], use_cache=False).logits[0].log_softmax(-1)
    lens = logit_lens(model, IDS, top=3)
    assert lens.top[-1] == own.topk(3).indices.tolist()
    assert lens.target[-1][:-1] == pytest.approx(own[:-1].gather(1, IDS[1:, None])[:, 0].tolist(), abs=1e-5)


def test_what_the_lens_cannot_do_is_one_sentence():
    model = of_family("qwen3", block_size=2)
    with pytest.raises(UserError, match="position 9 in a text of 5 tokens"):
        direct(model, IDS, position=9)
    with pytest.raises(UserError, match="target is 40: expected a token id from 0 to 39"):
        direct(model, IDS, target=40)
    with pytest.raises(UserError, match="mixes its sources by no weights"):
        logit_lens(of_family("qwen3", "deepnorm"), IDS)
