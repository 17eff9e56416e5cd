"""Attentions whose projections have inputs of their own."""

import copy
import pickle

import pytest
import torch
from explicit import VOCAB, Explicit, check_same, grouped_llama
from one_graph import check_one_graph
from peft import LoraConfig, get_peft_model
from test_families import FAMILIES, plain
from tiny import SIZE, stir

from attnres import UserError
from attnres.models import build, load
from attnres.models.convert import convert
from attnres.residuals import Ways
from attnres.streams.inputs import Inputs

IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
SEVERAL = ["muddformer", "dca"]
OTHERS = ("deepseek_v3", "kimi_k3", "kimi_linear", "qwen3_next")
"""Families whose attentions have other projections."""


def stirred(name):
    model = build(SIZE, name, vocab_size=VOCAB, max_positions=32).eval()
    stir(model.residual, 0.3, seed=3)
    return model


def logits(model, **options):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False, **options).logits


def test_projections_read_for_themselves_in_a_model_of_grouped_queries():
    """DeepCrossAttention's formula around layers that are written out."""
    model = grouped_llama("dca")
    network, p = Explicit(model), dict(model.residual.named_parameters())

    def mixture(place, way, outputs):
        total = 0.0
        for y, output in enumerate(outputs):
            normed = p["gain"][place] * output / (output.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            logit = (normed * p[f"weight.{place}"][way]).sum(-1, keepdim=True)
            total = total + (torch.where(logit >= 0, logit, 0.0) + p[f"bias.{place}"][way, y]) * output
        return total

    def expected():
        written = [network.embedding(IDS)]
        for layer in range(3):
            query, key, value = (mixture(layer, way, written) for way in range(3))
            attention = network.f(2 * layer, *(network.norm(2 * layer, h) for h in (query, key, value)))
            mlp = network.f(2 * layer + 1, network.norm(2 * layer + 1, query + attention))
            written.append(attention + mlp)
        return network.logits(network.norm(6, mixture(3, 0, written)))

    check_same(model, expected, IDS)


@pytest.mark.quick("llama-*", "gpt2-*", "deepseek_v3-*", "olmo2-*")
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_converted_exactly_or_refused_with_a_sentence(family, name):
    if family in OTHERS:
        with pytest.raises(
            UserError, match=f"residual '{name}' needs the attention's projections of queries, keys and values"
        ):
            convert(plain(family), name)
        return
    new = convert(plain(family), name)
    assert new.conversion.relative_difference < 2e-6
    stir(new.residual, 0.1, seed=7)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached = new.generate(IDS, use_cache=True, **options)
    assert torch.equal(cached, new.generate(IDS, use_cache=False, **options))


@pytest.mark.filterwarnings("ignore:.*freezes the queries")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("name", SEVERAL)
def test_adapters_around_the_projections_take_their_part(name):
    """LoRA is what adding its product to each matrix makes, before and after it is merged."""
    model = stirred(name)
    merged = copy.deepcopy(model)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(1)
    changes = 0
    with torch.no_grad():
        for path, module in adapted.base_model.model.named_modules():
            if hasattr(module, "lora_B"):
                up, down = module.lora_B["default"].weight, module.lora_A["default"].weight
                up.copy_(torch.randn(up.shape, generator=generator) / 4)
                merged.get_submodule(path).weight.add_(2 * up @ down)
                changes += 1
    assert changes == 9
    torch.testing.assert_close(logits(adapted.eval()), logits(merged), rtol=1e-5, atol=1e-6)
    adapted.train()(input_ids=IDS).logits.square().mean().backward()
    grads = [p.grad for n, p in adapted.named_parameters() if "lora_A" in n]
    assert len(grads) == 9 and all(bool(grad.any()) for grad in grads)
    plain_again = adapted.eval().merge_and_unload()
    torch.testing.assert_close(logits(plain_again), logits(merged), rtol=1e-5, atol=1e-6)


class Sliced(torch.nn.Module):
    """A projection to queries, keys and values from the rows of a fused one's weights that make each."""

    def __init__(self, fused, places):
        super().__init__()
        weight = fused.weight if isinstance(fused, torch.nn.Linear) else fused.weight.T
        self.weight, self.bias, self.places = weight, fused.bias, places

    def forward(self, x):
        inputs = x if isinstance(x, Inputs) else Inputs.of(x)  # of a layer with one read
        rows = [inputs.query @ self.weight.T, inputs.key @ self.weight.T, inputs.value @ self.weight.T]
        whole = torch.stack(rows).gather(0, self.places.expand(1, *rows[0].shape))[0]
        return whole if self.bias is None else whole + self.bias


def part_of_each_channel(family, heads, shared, size):
    """0, 1 or 2 for each channel of a fused projection: a query's, a key's or a value's."""
    channels = torch.arange((heads + 2 * shared) * size)
    if family == "gpt_neox":
        return channels % (3 * size) // size
    return (channels >= heads * size).long() + (channels >= (heads + shared) * size).long()


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_a_fused_projection_gives_each_input_its_part(family, name):
    model = convert(plain(family), name)
    stir(model.residual, 0.3, seed=7)
    expected, (path,) = logits(model), FAMILIES[family].projections
    assert not torch.allclose(expected, logits(convert(plain(family), name)), atol=1e-3)
    for layer in model.depth_layers:
        parent, _, child = path.rpartition(".")
        attention = layer.get_submodule(parent)
        places = part_of_each_channel(family, 4, 2 if family == "phi3" else 4, 8)
        attention._modules[child] = Sliced(layer.get_submodule(path), places)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SEVERAL)
def test_copies_pickles_and_files_compute_the_same(name, tmp_path):
    model = stirred(name)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    for reloaded in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), load(tmp_path)):
        assert torch.equal(logits(reloaded), expected)
        # What is put in a projection's place later takes its part as well.
        attention = reloaded.model.layers[1].self_attn
        attention.k_proj = torch.nn.Linear(32, 16, bias=False)
        assert logits(reloaded).isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["muddformer", "dca"])
def test_a_whole_model_compiles_without_a_graph_break(name):
    check_one_graph(stirred(name), logits)


@pytest.mark.parametrize("name", SEVERAL)
def test_recomputed_mixtures_have_the_same_gradients(name):
    model = stirred(name).train()

    def gradients():
        model.zero_grad()
        model(input_ids=IDS).logits.square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.residual.recompute_reads = True
    for again, grad in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(again, grad, rtol=0, atol=0)


def test_inputs_are_refused_by_everything_but_projections():
    inputs = Inputs.of(Ways(*torch.randn(3, 2, 5, 8)))
    assert inputs.shape == (2, 5, 8) and inputs.size(1) == 5 and not hasattr(inputs, "view")
    assert (inputs.dtype, inputs.device.type) == (torch.float32, "cpu")
    with pytest.raises(TypeError, match="'view' of an attention's inputs was asked"):
        inputs.view(-1)
    with pytest.raises(TypeError, match="given to torch's 'linear'"):
        torch.nn.functional.linear(inputs, torch.ones(4, 8))
