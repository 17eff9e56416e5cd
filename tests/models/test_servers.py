"""What servers' documentation asks of a model of Transformers, one test a requirement. No server is run here.

vLLM: docs/models/supported_models.md, "Custom models" and "Writing custom models". SGLang: docs/supported_models/
transformers_fallback.md, which asks for the same two things of the attention and the model.
"""

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import transformers
from tiny import narrow_llama
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward

from attnres import convert
from attnres.models.classes import DepthBase

IDS = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module")
def model():
    return convert(narrow_llama(50, 0).eval(), "full")


@pytest.fixture(scope="module")
def encoder():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ModernBertConfig(**sizes, vocab_size=50, pad_token_id=0)
    return convert(transformers.ModernBertModel(config).eval(), "full")


def test_the_config_names_the_base_model(model, encoder, tmp_path):
    """`config.json` must contain `auto_map.AutoModel`."""
    for name, one in (("decoder", model), ("encoder", encoder)):
        one.save_pretrained(tmp_path / name)
        auto_map = json.loads((tmp_path / name / "config.json").read_text())["auto_map"]
        module, _, cls = auto_map["AutoModel"].partition(".")
        assert (tmp_path / name / f"{module}.py").is_file()
        assert cls == type(one.base_model).__name__


def test_the_base_model_is_what_is_customised(model):
    """Customisation should be done in the base model."""
    base = model.model
    assert isinstance(base, DepthBase) and isinstance(base, PreTrainedModel)
    assert [name for name, _ in model.named_parameters() if "residual" in name] == [
        "model.residual.query",
        "model.residual.gain",
    ]


def test_the_base_model_takes_a_servers_attention(model, encoder):
    """`MyModel` must contain `_supports_attention_backend = True`."""
    for one in (model.model, encoder):
        assert one._supports_attention_backend and one.is_backend_compatible()


def test_keyword_arguments_reach_the_attention_function(model):
    """`kwargs` passed down to `MyAttention`, which calls attention by `ALL_ATTENTION_FUNCTIONS`."""
    marks = []

    def attention(module, query, key, value, mask, mark=None, **kwargs):
        marks.append(mark)
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("of_a_server", attention)
    base, before = model.model, model.config._attn_implementation
    expected = base(IDS).last_hidden_state
    try:
        base.config._attn_implementation = "of_a_server"
        length = IDS.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        ours = base(IDS, attention_mask=mask, mark="here").last_hidden_state
    finally:
        base.config._attn_implementation = before
    assert marks == ["here", "here"]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_an_encoders_attention_says_that_it_is_not_causal(encoder):
    """If your model is encoder-only: add `is_causal = False` to `MyAttention`."""
    assert [layer.attn.is_causal for layer in encoder.layers] == [False, False]


def test_projections_are_in_the_plan_of_tensor_parallelism_and_the_residual_is_replicated(model):
    """`base_model_tp_plan` for layers that do not follow the usual names; what it does not name is replicated."""
    plain = narrow_llama(50, 0)
    assert model.config.base_model_tp_plan == plain.config.base_model_tp_plan
    assert not [name for name in model.config.base_model_tp_plan if "residual" in name]


def test_pipeline_parallelism_is_not_claimed(model):
    """A stage hands on `hidden_states`, one tensor, and a depth stream is several."""
    assert narrow_llama(50, 0).supports_pp_plan and not model.supports_pp_plan


def test_a_plug_in_registers_the_classes_in_every_process():
    """vllm.general_plugins is called in each process before a model is loaded."""
    settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    ((name, value),) = settings["vllm.general_plugins"].items()
    EntryPoint(name, value, "vllm.general_plugins").load()()
    assert "attnres_llama" in transformers.CONFIG_MAPPING
