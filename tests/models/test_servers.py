"""What servers' documentation asks of a model of Transformers, one test a requirement. No server is run here.

vLLM 0.32: docs/models/supported_models.md, "Custom models" and "Writing custom models". SGLang: docs/supported_models/
transformers_fallback.md, which asks for the same two things of the attention and the model. What both do to a model
besides, and do not say there (build it empty, put linear layers and norms of their own into it, fill it by name),
is read off their Transformers back ends and rehearsed in the last tests.
"""

import inspect
import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file
from tiny import narrow_llama
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import eager_attention_forward

from attnres import convert
from attnres.models.bases import DepthBase

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


def test_a_mixtures_experts_stay_what_they_are():
    """A sparse block has `experts`, whose parameters are all 3-D, called with `hidden_states, top_k_index,
    top_k_weights`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(**sizes, intermediate_size=32, num_local_experts=2, vocab_size=50)
    base = convert(transformers.MixtralForCausalLM(config).eval()).model
    for layer in base.layers:
        experts = layer.mlp.experts
        assert [parameter.ndim for parameter in experts.parameters()] == [3, 3]
        assert list(inspect.signature(experts.forward).parameters) == ["hidden_states", "top_k_index", "top_k_weights"]


# ------------------------------------------------------------------ what back ends do with a folder


@pytest.fixture(scope="module")
def stirred():
    """With norms of heads, which are ordinary ones, beside those that read."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, head_dim=8, intermediate_size=32, vocab_size=50)
    new = convert(transformers.Qwen3ForCausalLM(config).eval(), "full")
    with torch.no_grad():
        new.residual.query.normal_(0, 0.5)
    return new


def would_be_replaced(module: torch.nn.Module) -> bool:
    """Whether a back end puts a norm of its own here: by the end of the class's name (SGLang 0.5, vLLM until 0.21), or
    because a graph of the module by itself is that of an RMSNorm (both since)."""
    if type(module).__name__.endswith("RMSNorm"):
        return True
    if next(module.children(), None) is not None:
        return False
    try:
        graph = torch.fx.symbolic_trace(module).graph
    except (RuntimeError, TypeError, ValueError, torch.fx.proxy.TraceError):
        return False
    return any("rsqrt" in str(node.target) for node in graph.nodes)


def test_norms_that_read_are_not_replaced(stirred):
    replaced = {path.rpartition(".")[2] for path, part in stirred.named_modules() if would_be_replaced(part)}
    assert replaced == {"q_norm", "k_norm"}
    with pytest.raises(TypeError, match="a Qwen3RMSNorm that reads a depth stream is more than its arithmetic"):
        torch.fx.symbolic_trace(stirred.model.norm)


def test_a_model_that_a_back_end_builds_and_fills_computes_the_same(stirred, tmp_path, monkeypatch):
    stirred.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    config._attn_implementation = "of_a_server_too"
    instances: dict[int, list] = {0: [], 1: []}

    def attention(module, query, key, value, mask, attention_instances=None, **kwargs):
        attention_instances[module.layer_idx].append(query.shape)  # which says whose cache it is
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2), None

    AttentionInterface.register("of_a_server_too", attention)
    with init_empty_weights(include_buffers=False):
        base = transformers.AutoModel.from_config(config, trust_remote_code=True)
    for path, part in list(base.named_modules()):
        if isinstance(part, torch.nn.Linear):
            base.set_submodule(path, torch.nn.Linear(part.in_features, part.out_features, bias=False))
        elif would_be_replaced(part):
            base.set_submodule(path, torch.nn.RMSNorm(part.weight.shape[0], eps=part.variance_epsilon))
    stored = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    for path, part in base.named_modules():
        for name in [name for name, parameter in part._parameters.items() if parameter is not None]:
            part._parameters[name] = torch.nn.Parameter(stored.pop(f"{path}.{name}" if path else name))
    assert set(stored) <= {"lm_head.weight"}
    with torch.inference_mode():
        places = torch.arange(6).expand(2, 6)
        ours, *_ = base(
            input_ids=IDS, use_cache=False, position_ids=places, attention_instances=instances, return_dict=False
        )
        torch.testing.assert_close(ours, stirred.model(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)
    assert [len(calls) for calls in instances.values()] == [1, 1]
