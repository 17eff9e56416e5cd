"""Value residuals (arXiv 2410.17897): values that take something from those of the first layer."""

import copy

import pytest
import torch
from explicit import HEAD, SHARED, VOCAB, Explicit, check_same, grouped_llama
from one_graph import check_one_graph
from peft import LoraConfig, PeftModel, get_peft_model
from test_families import fields_of
from test_inputs import IDS, OTHERS
from tiny import SIZE
from transformers import AutoModel, DynamicCache

from attnres import UserError
from attnres.models import build, load
from attnres.models.families import FAMILIES
from attnres.training.optim import kinds

KINDS = ["fixed", "layer", "head", "token", "first"]


def values_of(model, kind):
    """v_l = (1 - lambda) v_l + lambda v_1, written out; keeps the values of every layer of the last pass."""
    p = {name.removeprefix("value_mix."): tensor for name, tensor in model.residual.named_parameters()}
    kept = {}

    def values(layer, own, x):
        if layer == 0:
            kept.clear()
            kept[0] = own
            return own
        share = {"fixed": lambda: 0.5, "first": lambda: 1.0, "layer": lambda: p["share"][layer - 1]}
        share["head"] = lambda: p["share"][layer - 1][:, None]
        share["token"] = lambda: (x @ p["weight"][layer - 1].T + p["bias"][layer - 1]).sigmoid()[..., None]
        part = share[kind]()
        kept[layer] = (1 - part) * own + part * kept[0]
        return kept[layer]

    return values, kept


def run(network, residual, ids):
    """The logits of a network whose layers are written out, around a residual's own reads and writes."""
    state = residual.start(network.embedding(ids))
    for index in range(network.sublayers):
        x, state = residual.read(state, index, lambda h, index=index: network.norm(index, h))
        state = residual.write(state, index, network.f(index, *(x if isinstance(x, tuple) else [x])))
    return network.logits(residual.finish(state, lambda h: network.norm(network.sublayers, h)))


@pytest.mark.parametrize("name", ["standard", "block", "full", "denseformer", "hyper_connections", "dca", "muddformer"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_mixed_as_published_on_top_of_any_residual(name, kind):
    model = grouped_llama(name, residual_settings={"value_residual": kind})
    values, _ = values_of(model, kind)
    check_same(model, lambda: run(Explicit(model, values), model.residual, IDS), IDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["standard", "full", "dca"])
def test_the_mixed_values_are_what_is_cached(name, kind):
    model = grouped_llama(name, residual_settings={"value_residual": kind})
    values, kept = values_of(model, kind)
    with torch.no_grad():
        expected = run(Explicit(model, values), model.residual, IDS)
        cache = DynamicCache(config=model.config)
        parts = [
            model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in IDS.split([4, 1, 1, 3], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-6, atol=1e-8)
    for layer, own in kept.items():
        assert own.shape[2:] == (SHARED, HEAD)
        torch.testing.assert_close(cache.layers[layer].values, own.transpose(1, 2), rtol=1e-6, atol=1e-8)


def small(kind, name="block", **settings):
    model = build(SIZE, name, vocab_size=VOCAB, max_positions=32, settings={"value_residual": kind, **settings}).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model, ids=IDS, **options):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_changes_nothing(kind):
    model = small(kind)
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
    mask = (torch.arange(12) >= 3).long().expand(2, -1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = logits(model, ids, attention_mask=mask, position_ids=positions)[:, 3:]
    torch.testing.assert_close(padded, logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_keeps_the_shares_and_a_config_remembers_the_kind(kind, tmp_path):
    model = small(kind)
    model.save_pretrained(tmp_path)
    for reloaded in (load(tmp_path), copy.deepcopy(model)):
        assert reloaded.config.residual_settings == {"value_residual": kind}
        assert reloaded.residual.state_dict().keys() == model.residual.state_dict().keys()
        assert torch.equal(logits(reloaded), logits(model))
    half = load(tmp_path, dtype="bf16")
    assert {p.dtype for p in half.residual.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("kind", ["layer", "token"])
def test_an_adapter_with_the_residual_is_loaded_as_it_was_saved(kind, tmp_path):
    model = build(SIZE, "full", vocab_size=VOCAB, settings={"value_residual": kind})
    model.save_pretrained(tmp_path / "model")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["residual"]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    assert any("value_mix" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(load(tmp_path / "model"), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(adapted))


def test_shares_start_at_a_half_and_stand_in_the_residuals_group():
    for kind, shape in (("layer", (2,)), ("head", (2, 2)), ("token", (2, 2, 32))):
        model = build(SIZE, "standard", vocab_size=VOCAB, settings={"value_residual": kind})
        parameters = dict(model.residual.value_mix.named_parameters())
        first = parameters["weight" if kind == "token" else "share"]
        assert first.shape == shape and bool((first == (0.0 if kind == "token" else 0.5)).all())
        table = model.residual.tables()["value_residual"]
        assert table.values.shape == (3, *shape[1 : len(table.axes)]) and bool(table.values[0].isnan().all())
        assert bool((table.values[1:] == 0.5).all())
        names = kinds(model)["residual"]
        assert names == [f"model.residual.value_mix.{name}" for name in parameters]


def test_svformer_has_no_values_but_the_first_layers():
    model = small("first")
    for number, layer in enumerate(model.model.layers):
        projection = layer.self_attn.v_proj
        assert projection.weight.requires_grad == (number == 0)
        with torch.no_grad():
            projection.weight.mul_(1.0 if number == 0 else torch.nan)
    model.train()(input_ids=IDS).logits.square().mean().backward()
    assert logits(model.eval()).isfinite().all()


def test_projections_that_are_not_called_are_not_trained_after_loading_either(tmp_path):
    small("first").save_pretrained(tmp_path)
    for loaded in (load(tmp_path), AutoModel.from_pretrained(tmp_path)):
        projections = [layer.self_attn.v_proj.weight for layer in loaded.depth_layers]
        assert [weight.requires_grad for weight in projections] == [True, False, False]
        loaded.train()(input_ids=IDS)[0].square().mean().backward()
        unused = [name for name, p in loaded.named_parameters() if p.requires_grad and p.grad is None]
        assert not unused


@pytest.mark.parametrize("kind", ["layer", "token"])
def test_shares_are_fp32_whatever_the_weights_are(kind):
    model = AutoModel.from_config(small(kind).config, dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert {parameter.dtype for parameter in model.residual.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_passes_do_not_touch_one_another(kind):
    model = small(kind)
    expected, busy = logits(model), []

    def another(module, args, output):
        if not busy:
            busy.append(True)
            logits(model, IDS.flip(1))
            busy.clear()

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(another)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_gradients_are_the_gradients(kind):
    model = small(kind).train()

    def gradients():
        model.zero_grad()
        model(input_ids=IDS).logits.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    expected = gradients()
    assert all(grad is not None for grad in expected.values())
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(
        {"use_reentrant": False}
    )
    for name, grad in gradients().items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["token", "fixed", "first"])
def test_a_whole_model_compiles_without_a_graph_break(kind):
    check_one_graph(small(kind), logits)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:.*freezes the queries")
def test_low_rank_changes_of_values_are_part_of_what_is_mixed():
    model = small("head").double()
    merged = copy.deepcopy(model)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj"]))
    with torch.no_grad():
        for path, module in adapted.base_model.model.named_modules():
            if hasattr(module, "lora_B"):
                up, down = module.lora_B["default"].weight, module.lora_A["default"].weight
                up.fill_(0.1)
                merged.get_submodule(path).weight.add_(2 * up @ down)
    torch.testing.assert_close(logits(adapted.eval()), logits(merged), rtol=1e-5, atol=1e-6)


@pytest.mark.quick("llama", "gpt2", "olmo2", "qwen2_moe")
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(OTHERS)))
def test_every_family_caches_the_values_that_it_uses(family):
    fields = {k: v for k, v in fields_of(family).items() if k not in ("vocab_size", FAMILIES[family].positions)}
    models = [
        build({"family": family, **fields}, "full", vocab_size=VOCAB, settings={"value_residual": kind}).eval()
        for kind in ("first", "head")
    ]
    with torch.no_grad():
        share = models[1].residual.value_mix.share
        share.add_(torch.linspace(-0.3, 0.3, share.numel()).view_as(share))
        first, mixed = (model(input_ids=IDS, use_cache=True).past_key_values.layers for model in models)
    assert torch.equal(first[1].values, first[0].values)
    assert torch.equal(mixed[0].values, first[0].values) and not torch.equal(mixed[1].values, mixed[0].values)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached = models[1].generate(IDS, use_cache=True, **options)
    assert torch.equal(cached, models[1].generate(IDS, use_cache=False, **options))


@pytest.mark.parametrize("family", OTHERS)
def test_families_without_projections_of_their_own_are_refused(family):
    fields = {k: v for k, v in fields_of(family).items() if k not in ("vocab_size", FAMILIES[family].positions)}
    with pytest.raises(
        UserError, match="value_residual 'layer' needs the attention's projections of queries, keys and values"
    ):
        build({"family": family, **fields}, "standard", vocab_size=VOCAB, settings={"value_residual": "layer"})


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="unknown value_residual 'layers': did you mean 'layer'"):
        build(SIZE, "block", vocab_size=VOCAB, settings={"value_residual": "layers"})
