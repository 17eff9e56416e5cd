"""Models in the hands of those who never heard of this package: rows of the table in docs/how-to/convert.md.

Each for a family that is listed, one that is probed, an encoder and a vision model. With zero queries a model computes
what the plain one computes, so what a consumer makes of both is compared; else what it makes of a model with other
queries is compared with the model itself.
"""

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from datasets import Dataset
from launch import PATIENCE_S
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import narrow_llama
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, Trainer

from attnres import UserError, convert, load
from attnres.models.classes import CLASSES
from attnres.models.exactness import fixed_inputs, logits
from attnres.models.export import export_graph

IDS = torch.arange(12).view(2, 6)
VOCAB = 320
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**SMALL, "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.2}
IDS_OF_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODER = {**SMALL, **IDS_OF_ENDS, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.2}
MODELS = {
    "listed": ("LlamaForCausalLM", TEXT),
    "probed": ("ArceeForCausalLM", TEXT),
    "encoder": ("ModernBertForMaskedLM", ENCODER),
    "vision": ("ViTForImageClassification", {**SMALL, "image_size": 16, "patch_size": 4}),
}
families = pytest.mark.parametrize("family", MODELS)
decoders = pytest.mark.parametrize("family", ["listed", "probed"])


def plain(family):
    name, fields = MODELS[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**fields)).eval()


def same(family):
    """The plain model, and ours that computes the same."""
    model = plain(family)
    return model, convert(model, block_size=3)


def stirred(model):
    new = convert(model.eval(), block_size=3)
    with torch.no_grad():
        new.residual.query.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    return new


@pytest.fixture(scope="module")
def folders(tmp_path_factory, save_tokenizer):
    """A saved model of each family, a pickle of it, and what it computes."""
    made = {}
    for family in MODELS:
        model, made[family] = stirred(plain(family)), tmp_path_factory.mktemp(family)
        inputs = fixed_inputs(model)
        model.save_pretrained(made[family])
        save_tokenizer(made[family], VOCAB, mask_token="<|endoftext|>", pad_token="<|endoftext|>")
        torch.save(model, made[family] / "model.pt")
        torch.save((inputs, logits(model, inputs)), made[family] / "expected.pt")
    return made


# ------------------------------------------------------------------ another process, which imports nothing of ours

FRESH = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, pipeline
transformers.logging.set_verbosity_error()
trust = {"trust_remote_code": True}
assert "attnres" not in sys.modules
heads = {"encoder": "MaskedLM", "vision": "ImageClassification"}
for family, folder in json.loads(sys.argv[1]).items():
    inputs, expected = torch.load(folder + "/expected.pt")
    if sys.argv[2] == "pickle":
        with torch.no_grad():
            torch.testing.assert_close(torch.load(folder + "/model.pt", weights_only=False)(**inputs).logits, expected)
        continue
    assert type(AutoConfig.from_pretrained(folder, **trust)).__name__.startswith("AttnRes")
    auto = getattr(transformers, "AutoModelFor" + heads.get(family, "CausalLM"))
    for place in (folder, folder + "/again"):
        model = auto.from_pretrained(place, **trust).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, expected)
            base = AutoModel.from_pretrained(place, **trust).eval()
            whole = getattr(model, model.base_model_prefix)
            torch.testing.assert_close(base(**inputs).last_hidden_state, whole(**inputs).last_hidden_state)
        model.save_pretrained(folder + "/again")
    if family != "vision":
        reward = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **trust)
        assert torch.equal(getattr(reward, reward.base_model_prefix).residual.query, model.residual.query)
        features = pipeline("feature-extraction", folder, **trust)("the quick")
        assert len(features[0][0]) == 16
    if family in ("listed", "probed"):
        text = pipeline("text-generation", folder, **trust)("the quick", max_new_tokens=2, do_sample=False)
        assert text[0]["generated_text"]
    print(family)
"""


def fresh(code, *arguments, **variables):
    # Not the folders of scripts that other tests put there.
    others = [place for place in sys.path[1:] if Path(place).parent != Path.cwd()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *others]),
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)


@pytest.mark.long
def test_a_fresh_process_loads_a_folder_that_it_trusts(folders, tmp_path):
    """Auto classes, base models, classification and reward heads, pipelines; and what was loaded saves again."""
    names = json.dumps({family: str(folder) for family, folder in folders.items()})
    done = fresh(FRESH, names, "folders", HF_MODULES_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == list(MODELS)


@pytest.mark.long
def test_a_fresh_process_unpickles_models(folders):
    """As `torch.load`, `multiprocessing.spawn`, Ray and joblib do."""
    done = fresh(FRESH, json.dumps({family: str(folder) for family, folder in folders.items()}), "pickle")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_without_the_package_one_sentence_says_what_to_install(folders, tmp_path):
    code = (
        "import sys; sys.modules['attnres'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    done = fresh(code, folders["listed"], HF_MODULES_CACHE=str(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: a model with Attention Residuals needs the package attnres: pip install attnres"


TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {0}}}}}
validation_split: validation
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{' ' + continuation}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity}}]
"""
LM_EVAL = """
import sys
from lm_eval.__main__ import cli_evaluate
tasks, *folders = sys.argv[1:]
for folder in folders:
    model = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True", "--device", "cpu"]
    sys.argv = ["lm_eval", *model, "--tasks", "words", "--include_path", tasks, "--output_path", folder + "/scores"]
    cli_evaluate()
"""


@pytest.mark.long  # 40 s of imports; tests/evals/test_harness.py holds the scores of its items equal
def test_lm_evals_command_scores_a_folder(folders, tmp_path):
    rows = [("the quick brown", "fox"), ("over a lazy dog while", "seven")]
    lines = [json.dumps({"context": context, "continuation": word}) + "\n" for context, word in rows]
    (tmp_path / "words.jsonl").write_text("".join(lines))
    (tmp_path / "words.yaml").write_text(TASK.format(tmp_path / "words.jsonl"))
    names = [folders["listed"], folders["probed"]]
    done = fresh(LM_EVAL, tmp_path, *names, HF_MODULES_CACHE=str(tmp_path), HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in names:
        model, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
        losses = []
        for context, word in rows:
            start, ids = (
                len(tokenizer(context).input_ids),
                tokenizer(f"{context} {word}", return_tensors="pt").input_ids,
            )
            logs = logits(model, ids)[0, start - 1 : -1].log_softmax(-1)
            losses.append(-logs.gather(1, ids[0, start:, None]).sum().item())
        (scores,) = (folder / "scores").rglob("results_*.json")
        perplexity = json.loads(scores.read_text())["results"]["words"]["perplexity,none"]
        assert perplexity == pytest.approx(torch.tensor(losses).mean().exp().item(), rel=1e-4)


# ------------------------------------------------------------------ adapters, trainers, offloading, quantisation


@families
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_adapters_train_and_save_depth_reads(family, tmp_path):
    model, again = same(family)[1], same(family)[1]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", modules_to_save=["residual"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        adapted(**fixed_inputs(model)).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(again, tmp_path)
    reads = [p for name, p in loaded.named_parameters() if "residual.modules_to_save.default.query" in name]
    assert len(reads) == 1 and reads[0].abs().sum() > 0
    inputs = fixed_inputs(model)
    assert torch.equal(logits(loaded, inputs), logits(adapted, inputs))
    assert not torch.allclose(logits(loaded, inputs), logits(same(family)[1], inputs))


@families
def test_trainers_decay_what_they_decay_in_the_plain_model(family):
    one, other = (Trainer.get_decay_parameter_names(None, model) for model in same(family))
    assert other == one != []


@pytest.mark.quick("listed")
@decoders
@pytest.mark.filterwarnings("ignore")  # of TRL's own
def test_trl_takes_a_folder_by_its_name(family, folders, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    rows = [{"prompt": "the quick", "chosen": " brown fox", "rejected": " lazy dog"}] * 2
    options = {"max_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False}
    options |= {"use_cpu": True, "model_init_kwargs": {"trust_remote_code": True}}
    for kind in ("DPO", "Reward"):
        settings = getattr(trl, f"{kind}Config")(str(tmp_path / kind), **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folders[family])
        trainer = getattr(trl, f"{kind}Trainer")(
            str(folders[family]), args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        before = trainer.model.model.residual.query.clone()
        trainer.train()
        assert not torch.equal(trainer.model.model.residual.query, before)


@families
@pytest.mark.parametrize("how", ["cpu", "disk", "device_map"])
def test_offloaded_weights_come_when_they_are_needed(family, how, folders, tmp_path):
    inputs, expected = torch.load(folders[family] / "expected.pt")
    model = load(folders[family])
    if how == "cpu":
        model = cpu_offload(model, execution_device="cpu")
    elif how == "disk":
        model = disk_offload(model, str(tmp_path), execution_device="cpu")
    else:
        sizes = {"max_memory": {"cpu": "20KB"}, "offload_folder": str(tmp_path)}
        model = type(model).from_pretrained(folders[family], device_map="auto", **sizes)
    assert all(p.is_meta for p in model.residual.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected)


@families
def test_torchao_quantises_as_it_does_the_plain_model(family):
    models = same(family)
    inputs = fixed_inputs(models[0])
    exact = logits(models[0], inputs)
    for model in models:
        quantize_(model, Int8WeightOnlyConfig())
    one, other = (logits(model, inputs) for model in models)
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, exact, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ functions, graphs, hooks


@families
def test_gradients_by_torch_func_are_autograds(family):
    model = stirred(plain(family))
    inputs, parameters = fixed_inputs(model), {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs).logits.square().mean()

    ours = torch.func.grad(loss)(parameters)
    model(**inputs).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.quick("vision")
@families
def test_an_exported_graph_computes_the_models_logits(family, folders, tmp_path):
    if family == "vision":
        with pytest.raises(UserError, match="a model with a language-model head is expected"):
            export_graph(folders[family], tmp_path / "out")
        return
    assert "differ by at most" in export_graph(folders[family], tmp_path / "out")
    assert (tmp_path / "out" / "model.pt2").is_file() and (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.long
@decoders
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_a_strict_export_computes_the_models_logits(family):
    model = stirred(plain(family))
    graph = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=True).module()
    torch.testing.assert_close(graph(input_ids=IDS, use_cache=False).logits, logits(model, IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("family", ["listed", "probed"])
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
def test_onnxruntime_computes_the_models_logits(family, folders, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the extra `export` is not installed")
    assert "differ by at most" in export_graph(folders[family], tmp_path / "out", onnx=True)
    assert (tmp_path / "out" / "model.onnx").is_file()


@families
def test_averaged_weights_are_what_an_averaged_model_computes_with(family):
    """torch's AveragedModel copies a model and follows its training: reads follow the copy's own parameters."""
    model = stirred(plain(family))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)  # the first takes the weights as they are
    inputs, by_hand = fixed_inputs(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter, half in zip(model.parameters(), by_hand.parameters(), strict=True):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
            half.lerp_(parameter, 0.5)
    averaged.update_parameters(model)
    wanted = logits(by_hand, inputs)
    torch.testing.assert_close(logits(averaged.module, inputs), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model, inputs), wanted, atol=1e-4)


def layers_of(model, like):
    """The layers of a model, plain or ours; `like` is of ours."""
    base = getattr(model, model.base_model_prefix)
    return base.get_submodule(like.family.layers)


@families
def test_a_hook_on_a_layer_sees_and_steers_what_it_does_in_the_plain_model(family):
    models, results = same(family), []
    vector = torch.randn(16, generator=torch.Generator().manual_seed(1))
    for model in models:
        hidden = []

        def hook(module, args, output):
            state, *others = output if isinstance(output, tuple) else (output,)
            hidden.append(state.detach().clone())  # noqa: B023
            return (state + vector, *others) if isinstance(output, tuple) else state + vector

        handle = layers_of(model, models[1])[0].register_forward_hook(hook)
        results.append((logits(model, fixed_inputs(model)), *hidden))
        handle.remove()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@families
def test_captum_attributes_as_in_the_plain_model(family):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    models, results = same(family), []
    ((name, values),) = fixed_inputs(models[0]).items()
    for model in models:
        layer = layers_of(model, models[1])[0]

        def score(values):
            return model(**{name: values}).logits.flatten(1)[:, 1]  # noqa: B023

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # captum's own
            state = captum.LayerActivation(score, layer).attribute(values)
            part = layer.get_submodule("output" if family == "vision" and hasattr(layer, "output") else "mlp")
            gradients = captum.LayerIntegratedGradients(score, part).attribute(values, n_steps=2)
        state, gradients = (value[0] if isinstance(value, tuple) else value for value in (state, gradients))
        results.append((state if torch.is_tensor(state) else state.hidden_state(), gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ of the residual's own numbers


def test_a_plain_folder_in_our_class_is_told(tmp_path):
    narrow_llama(VOCAB, 0).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"a plain 'llama' checkpoint is loaded into .* attnres.convert keeps"):
        CLASSES["llama"][1].from_pretrained(tmp_path)


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
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert reloaded.residual.query.dtype == torch.float64 and torch.equal(reloaded.residual.query, model.residual.query)
    assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_in_16_bits_are_those_of_the_same_numbers_in_fp32(dtype, tmp_path):
    stirred(narrow_llama(VOCAB, 0)).to(dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert model.residual.query.dtype == torch.float32
    expected = model(IDS).logits
    model.residual.to(dtype)
    assert torch.equal(model(IDS).logits, expected)
