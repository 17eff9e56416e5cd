"""The residual belongs to the base model and is looked up and called when the model runs."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import SIZE
from transformers import AutoModel, AutoModelForCausalLM

from attnres import UserError
from attnres.inspect import find_residual, record
from attnres.models import build, load

IDS = torch.arange(12).view(2, 6)


def make(residual="block", **settings):
    model = build(SIZE, residual, vocab_size=50, max_positions=32, settings=settings).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=draw))
    return model


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def test_a_residual_that_is_swapped_is_the_one_that_runs_and_learns():
    model = make()
    before, old = logits(model), model.residual
    model.residual = copy.deepcopy(old)
    assert model.model.residual is model.residual is not old
    logits(model).sum().backward()
    assert model.residual.query.grad.abs().sum() > 0 and old.query.grad is None
    with torch.no_grad():
        model.residual.query.zero_()
    assert not torch.equal(logits(model), before)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_trains_the_copy_that_the_forward_pass_reads():
    model = get_peft_model(make(), LoraConfig(target_modules=["q_proj"], modules_to_save=["residual"]))
    logits(model).square().mean().backward()
    trained = {name: p for name, p in model.named_parameters() if "residual" in name and p.requires_grad}
    assert len(trained) == 2 and all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())
    with torch.no_grad():
        before = logits(model)
        for parameter in trained.values():
            parameter.zero_()
        assert not torch.equal(logits(model), before)
    assert any(p is find_residual(model).query for p in trained.values())
    with record(model) as trace:
        logits(model)
    assert trace.tokens == 12


def test_a_copy_has_a_residual_of_its_own():
    model = make()
    before, twin = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        twin.residual.query.zero_()
    assert torch.equal(logits(model), before) and not torch.equal(logits(twin), before)


def test_a_fresh_model_can_be_pickled():
    model = make()
    reloaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(reloaded), logits(model)) and reloaded.residual is reloaded.model.residual
    assert type(reloaded.model.norm) is type(model.model.norm)


def test_the_base_model_loads_by_itself(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(model.model) and torch.equal(base.residual.query, model.residual.query)
    expected = model.model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(base(input_ids=IDS).last_hidden_state, expected, rtol=0, atol=0)
    base.save_pretrained(tmp_path / "base")
    card = (tmp_path / "base" / "README.md").read_text()
    assert "model = AutoModel.from_pretrained(" in card and "residual `block`" in card
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "base").residual.query, model.residual.query)


@pytest.mark.parametrize(
    ("residual", "settings"),
    [
        ("full", {"value_residual": "token", "recency_bias": 1.0}),
        *((name, {}) for name in ("block", "mhc", "muddformer", "denseformer", "rezero", "dca", "adaptive")),
    ],
)
def test_what_a_residual_learned_survives_another_initialisation(residual, settings):
    """Which every subclass of a Transformers model asks for, with `post_init`."""
    model = make(residual, **settings)
    twin = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for one, initialise in ((model, model.post_init), (model, model.model.init_weights), (twin, twin.init_weights)):
        initialise()
        assert [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, before[name])] == []


def test_what_was_made_on_the_meta_device_is_initialised():
    config = make("full", value_residual="token", recency_bias=1.0).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        again = AutoModelForCausalLM.from_config(config)
    drawn = build(SIZE, "full", vocab_size=50, max_positions=32, settings=config.residual_settings).residual
    model.to_empty(device="cpu").init_weights()
    of_parts = again.residual.to_empty(device="cpu")
    for part in of_parts.modules():  # as FSDP 1 and Lightning do
        if next(part.parameters(recurse=False), None) is not None:
            part.reset_parameters()
    for name, tensor in drawn.named_parameters():
        assert torch.equal(model.residual.get_parameter(name), tensor), name
        assert torch.equal(of_parts.get_parameter(name), tensor), name


@pytest.mark.parametrize("residual", ["standard", "block", "full", "muddformer"])
def test_a_pass_on_the_meta_device_has_shapes(residual):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make(residual).config)
    out = model(input_ids=IDS.to("meta"), labels=IDS.to("meta"))
    out.loss.backward()
    assert out.logits.shape == (2, 6, 50)
    assert all(parameter.grad.shape == parameter.shape for parameter in model.residual.parameters())
    with torch.no_grad():
        assert model(input_ids=IDS.to("meta")).logits.device.type == "meta"


def test_a_frozen_bias_is_not_trained_after_loading_either(tmp_path):
    make("full", recency_bias=3.0, recency_bias_frozen=True).save_pretrained(tmp_path)
    for opened in (load(tmp_path), AutoModel.from_pretrained(tmp_path)):
        bias = opened.residual.gates.bias
        before = bias.clone()
        optimizer = torch.optim.AdamW([p for p in opened.parameters() if p.requires_grad], lr=0.1)
        opened(input_ids=IDS)[0].square().mean().backward()
        optimizer.step()
        assert torch.equal(bias, before) and not torch.equal(opened.residual.query, load(tmp_path).residual.query)


@pytest.mark.long
def test_a_compiled_base_keeps_its_residual():
    model = make()
    residual = model.residual
    with torch.no_grad():
        expected = logits(model)
        model.model = torch.compile(model.model, backend="eager")
        assert model.residual is residual and len(model.depth_layers) == 3
        torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_base_model_by_itself_starts_as_that_of_a_head(family):
    """DeepNorm's branches are scaled once, whether a base model or a head is built."""
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4} if family == "gpt2" else {**SIZE, "hidden_size": 64}
    fields = {name: value for name, value in sizes.items() if name != "family"}
    head = build({"family": family, **fields}, "deepnorm", vocab_size=50, max_positions=32)
    torch.manual_seed(0)
    base = AutoModel.from_config(head.config)
    for layer, other in zip(base.depth_layers, head.depth_layers, strict=True):
        for path in head.family.branch_weights:
            name = path.partition("[")[0]
            drawn, expected = (one.get_parameter(f"{name}.weight").std().item() for one in (layer, other))
            assert drawn == pytest.approx(expected, rel=0.1), name


def test_a_base_model_is_refused_where_its_head_is():
    fields = {**{name: value for name, value in SIZE.items() if name != "head_dim"}, "family": "olmo2"}
    config = build(fields, "standard", vocab_size=50).config
    config.residual = "deepnorm"
    with pytest.raises(UserError, match="not implemented for Olmo2ForCausalLM"):
        AutoModel.from_config(config)


def test_hidden_states_are_tensors_whatever_is_returned():
    model = make()
    by_name = model.model(input_ids=IDS, output_hidden_states=True).hidden_states
    by_place = model.model(input_ids=IDS, output_hidden_states=True, use_cache=False, return_dict=False)[-1]
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_place, strict=True))
    full = model(input_ids=IDS, use_cache=False, output_routing_weights=True, return_dict=False)
    assert isinstance(full, tuple) and [w.shape[:2] for w in full[-1]] == [(2, 6)] * 7


def test_a_familys_own_field_may_be_called_like_a_setting():
    """MiniMax's config has a `block_size`; it is none of the residual's."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    from attnres.models.classes import register
    from attnres.models.families import FAMILIES

    config, _ = register("minimax_test", FAMILIES["mixtral"], MiniMaxConfig, MiniMaxForCausalLM)
    written = config(num_hidden_layers=2, hidden_size=32, residual="block", residual_settings={"block_size": 2})
    assert written.residual_settings == {"block_size": 2} and written.block_size == MiniMaxConfig().block_size
