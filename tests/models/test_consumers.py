"""A saved folder in the hands of those who never heard of this package: one test a row of docs/models.md's table."""

import json
import os
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from tiny import narrow_llama
from transformers import ArceeConfig, ArceeForCausalLM, AutoModelForCausalLM, PreTrainedModel

from attnres import UserError, convert
from attnres.models.classes import CLASSES, DepthBase
from attnres.models.portable import export_graph

IDS = torch.arange(12).view(2, 6)
VOCAB = 300


def stirred(model):
    new = convert(model.eval(), block_size=3)
    with torch.no_grad():
        new.residual.query.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    return new


@pytest.fixture(scope="module")
def model():
    return stirred(narrow_llama(VOCAB, 0))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory, save_tokenizer):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = stirred(
        ArceeForCausalLM(ArceeConfig(**sizes, num_key_value_heads=1, vocab_size=61, max_position_embeddings=32))
    )
    folder = tmp_path_factory.mktemp("probed")
    model.save_pretrained(folder)
    return folder


FRESH = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline
transformers.logging.set_verbosity_error()
trust = {"trust_remote_code": True}
assert "attnres" not in sys.modules
out = {}
for name in sys.argv[1:]:
    config = AutoConfig.from_pretrained(name, **trust)
    model = AutoModelForCausalLM.from_pretrained(name, **trust)
    base = AutoModel.from_pretrained(name, **trust)
    reward = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **trust)
    ids = torch.arange(12).view(2, 6)
    same = torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    total = model(ids).logits.double().sum().item()
    out[name] = [type(config).__name__, same, reward.model.residual is not None, total]
    model.save_pretrained(name + "/again")  # and it saves again
    again = AutoModelForCausalLM.from_pretrained(name + "/again", **trust)
    assert torch.equal(again(ids).logits, model(ids).logits)
text = pipeline("text-generation", sys.argv[1], **trust)("a b", max_new_tokens=2, do_sample=False)
assert text[0]["generated_text"]
print(json.dumps(out))
"""


def fresh(code, *arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(Path(transformers.__file__).parents[1]), **variables}
    # Not the folders of scripts that other tests put there: benchmarks/kernels.py is not the package of that name.
    others = [place for place in sys.path[1:] if Path(place).parent != Path.cwd()]
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *others])
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_fresh_process_loads_a_folder_that_it_trusts(saved, probed, tmp_path):
    done = fresh(FRESH, saved, probed, HF_MODULES_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert [row[:3] for row in told.values()] == [
        ["AttnResLlamaConfig", True, True],
        ["AttnResArceeConfig", True, True],
    ]
    for folder, (*_, total) in told.items():
        expected = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits.double().sum().item()
        assert total == pytest.approx(expected, rel=1e-6)


def test_without_the_package_one_sentence_says_what_to_install(saved, tmp_path):
    code = (
        "import sys; sys.modules['attnres'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    done = fresh(code, saved, HF_MODULES_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: a model with Attention Residuals needs the package attnres: pip install attnres"


def test_a_plain_folder_in_our_class_is_told(tmp_path):
    narrow_llama(VOCAB, 0).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"a plain 'llama' checkpoint is loaded into .* attnres.convert keeps"):
        CLASSES["llama"][1].from_pretrained(tmp_path)


@pytest.mark.parametrize("how", [cpu_offload, disk_offload])
def test_offloaded_weights_come_when_they_are_needed(model, how, tmp_path):
    expected = model(IDS).logits
    arguments = (str(tmp_path),) if how is disk_offload else ()
    ours = how(stirred(narrow_llama(VOCAB, 0)), *arguments, execution_device="cpu")
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert all(p.is_meta for p in ours.residual.parameters())


def test_a_residual_that_is_not_there_is_refused_in_a_sentence():
    model = stirred(narrow_llama(VOCAB, 0))
    model.residual.to("meta")
    with pytest.raises((UserError, RuntimeError, NotImplementedError), match="meta"):
        model(IDS)


def test_a_wide_model_keeps_wide_reads(tmp_path):
    model = stirred(narrow_llama(VOCAB, 0).double()).double()
    with torch.no_grad():
        model.residual.query.add_(1e-12)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.residual.query.dtype == torch.float64 and torch.equal(again.residual.query, model.residual.query)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_in_16_bits_are_those_of_the_same_numbers_in_fp32(dtype, tmp_path):
    stirred(narrow_llama(VOCAB, 0)).to(dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert model.residual.query.dtype == torch.float32
    expected = model(IDS).logits
    model.residual.to(dtype)
    assert torch.equal(model(IDS).logits, expected)


def test_gradients_by_torch_func_are_autograds(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (IDS,), {"use_cache": False}).logits.square().mean()

    ours = torch.func.grad(loss)(parameters)
    model.zero_grad()
    model(IDS, use_cache=False).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)
    model.zero_grad()


def test_an_exported_graph_computes_the_models_logits(saved, tmp_path):
    assert "differ by at most" in export_graph(saved, tmp_path / "out")
    assert (tmp_path / "out" / "model.pt2").is_file() and (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_onnxruntime_computes_the_models_logits(saved, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the extra `export` is not installed")
    assert "differ by at most" in export_graph(saved, tmp_path / "out", onnx=True)
    assert (tmp_path / "out" / "model.onnx").is_file()


def test_captum_attributes_through_a_layer(model):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = captum.LayerIntegratedGradients(lambda ids: model(ids).logits[:, -1, 3], model.model.embed_tokens)
        assert gradients.attribute(IDS, n_steps=2).isfinite().all()
        activation = captum.LayerActivation(lambda ids: model(ids).logits[:, -1], model.model.layers[0]).attribute(IDS)
    assert torch.is_tensor(activation) or activation.hidden_state().isfinite().all()


# ------------------------------------------------------------------ servers: what their documentation asks for; not run


def test_vllm_finds_a_base_model_and_a_plug_in(saved):
    """docs/models/supported_models.md, "Custom models": auto_map has AutoModel, the base model has what is changed, and
    attention goes through the interface of attention functions."""
    auto_map = json.loads((saved / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "modeling_attnres.AttnResLlamaModel"
    base = CLASSES["llama"][1](CLASSES["llama"][0](**json.loads((saved / "config.json").read_text()))).model
    assert isinstance(base, DepthBase) and isinstance(base, PreTrainedModel)
    assert base._supports_attention_backend
    settings = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = settings["vllm.general_plugins"].items()
    EntryPoint(name, value, "vllm.general_plugins").load()()


def test_sglang_may_pass_arguments_through_to_attention(model):
    """docs, transformers_fallback: `trust_remote_code`, an attention back end, keyword arguments through the layers."""
    passed = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda m, a, k: passed.append(k.get("mark")), with_kwargs=True)
    model.model(IDS, mark="here")
    assert passed == ["here", "here"]
    for layer in model.model.layers:
        layer.self_attn._forward_pre_hooks.clear()
        layer.self_attn._forward_pre_hooks_with_kwargs.clear()
