"""Conversion in memory and on disk: what is kept, reported and refused, and that nothing is half-written."""

import importlib
import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from attnres import RESIDUALS, UserError
from attnres.models import load, model_files
from attnres.models.build import build, build_shapes
from attnres.models.classes import CLASSES
from attnres.models.config import stray_settings
from attnres.models.convert import DTYPES, convert
from attnres.models.exactness import Arithmetic, compare_logits, logits

convert_module = importlib.import_module("attnres.models.convert")  # the package has a function of this name

VOCAB = 61
NARROW = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
IDS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))


def llama(**fields):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**NARROW, **fields})).eval()


def tokenizer(size):
    return Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))


def save_plain(folder, model=None, dtype="bf16", vocabulary=VOCAB, **options):
    """A checkpoint as it lies on the hub: weights, tokenizer, generation settings."""
    (model or llama()).to(DTYPES[dtype]).save_pretrained(folder, **options)
    tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    # Transformers reads this, and would refuse to write it: a temperature without sampling.
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 2}))
    (folder / "README.md").write_text("not ours to copy")
    return folder


@pytest.fixture
def plain(tmp_path):
    return save_plain(tmp_path / "plain")


def left_behind(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "plain")


# ------------------------------------------------------------------ in memory


def test_weights_are_shared_and_the_plain_model_stays_as_it_is():
    model = llama().train()
    before = logits(model, IDS)
    new = convert(model, "full")
    shared, parameters = dict(model.named_parameters()), dict(new.named_parameters())
    assert all(parameters.pop(name) is parameter for name, parameter in shared.items())
    assert list(parameters) == ["model.residual.query", "model.residual.gain"]
    assert type(model) is LlamaForCausalLM and type(model.config) is LlamaConfig
    assert not hasattr(model, "residual") and not hasattr(model.config, "residual")
    assert model.training and new.training and new.residual.training
    assert torch.equal(logits(model, IDS), before)
    with torch.no_grad():
        new.residual.query.fill_(0.3)
        model.model.embed_tokens.weight.mul_(2)
    assert not torch.allclose(logits(new, IDS), logits(model, IDS))
    assert new.get_input_embeddings().weight is model.get_input_embeddings().weight


def test_tied_embeddings_stay_tied():
    new = convert(llama(tie_word_embeddings=True))
    assert new.lm_head.weight is new.model.embed_tokens.weight


def test_the_config_knows_the_residual():
    new = convert(llama(), num_blocks=2)
    assert (new.config.model_type, new.config.residual) == ("attnres_llama", "block")
    assert new.config.residual_settings == {"read_scale": "sum", "num_blocks": 2}
    assert new.model.layers[0].self_attn.config is new.config
    assert new.config.vocab_size == VOCAB and type(new.config).model_type == "attnres_llama"


def test_the_report_says_what_was_measured():
    report = convert(llama()).conversion
    assert (report.family, report.sublayers, report.width, report.dtype) == ("LlamaForCausalLM", 4, 32, "float32")
    assert report.added_parameters == 2 * 5 * 32
    assert 0 <= report.relative_difference == report.max_difference / report.logit_scale < 2e-6
    assert report.bound == 1e-4 and report.arithmetic == "float32" and report.tokens == 64
    text = str(report)
    assert "LlamaForCausalLM" in text and "bound 1e-04" in text and "64 tokens" in text


def test_sixteen_bit_models_are_compared_in_fp32_on_their_own_weights():
    model = llama().to(torch.bfloat16)
    report = convert(model, "full").conversion
    assert (report.dtype, report.arithmetic) == ("bfloat16", "float32")
    assert report.relative_difference < 2e-6 < report.own_difference < 0.1
    assert "bfloat16 itself" in str(report)
    expected = logits(llama().to(torch.bfloat16).float(), IDS)
    torch.testing.assert_close(logits(model, IDS, torch.float32), expected, rtol=1e-5, atol=1e-6)


def test_the_arithmetic_holds_for_experts_and_what_asks_for_less():
    torch.manual_seed(0)
    fields = {**NARROW, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**fields)).to(torch.bfloat16).eval()
    actual = logits(model, IDS, torch.float32)
    torch.testing.assert_close(actual, logits(model.float(), IDS), rtol=1e-5, atol=1e-6)
    with Arithmetic(torch.float32):
        x = torch.ones(3, dtype=torch.bfloat16) / 3
        assert x.dtype == x.to(torch.float16).dtype == torch.float32
        assert torch.zeros(3).add_(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.float32


def test_experts_are_grouped_as_in_the_plain_model():
    plain = MixtralForCausalLM(MixtralConfig(**NARROW, num_local_experts=4))
    ours = convert(plain, "block")
    assert ours.get_experts_implementation() == plain.get_experts_implementation() == {"": "grouped_mm"}
    ours.set_experts_implementation("eager")


EXACT = sorted(name for name in RESIDUALS if RESIDUALS[name].traits.starts_standard)


@pytest.mark.quick("block", "full", "denseformer", "hyper_connections", "laurel")
@pytest.mark.parametrize("residual", EXACT)
def test_every_residual_that_starts_as_the_standard_one_converts(residual):
    """In norms with next to no eps: some start as a multiple of the sum, which the norms take out up to it."""
    assert convert(llama(rms_norm_eps=1e-12), residual).conversion.relative_difference < 1e-5


@pytest.mark.parametrize(
    ("residual", "settings"),
    [
        ("muddformer", {"layers": "-2:"}),
        ("compose", {"rules": "block=0:2+muddformer=-2:"}),
        ("block", {"block_size": 4, "summaries": "split"}),
        ("block", {"block_size": 4, "count_power": 1.0, "count_prior": 1.0}),
        ("block", {"block_size": 4, "block_scale": True, "count_prior": "learned"}),
        ("full", {"embedding_key": "static", "layers": "1:3"}),
    ],
)
def test_settings_that_start_as_the_standard_residual_convert_and_are_saved(residual, settings, tmp_path):
    plain = llama(num_hidden_layers=4)
    ours = convert(plain, residual, **settings)
    assert ours.conversion.relative_difference < 1e-5
    ours.save_pretrained(tmp_path)
    again = load(tmp_path).eval()
    assert {key: again.config.residual_settings[key] for key in settings} == settings
    torch.testing.assert_close(logits(again, IDS), logits(plain, IDS), rtol=1e-4, atol=1e-5)
    rows = [source.name for source in ours.model.residual.layout()[4].sources]
    if settings.get("layers") == "-2:" or residual == "compose":
        assert rows == ["entry 2"] and ours.model.residual.layout()[6].into == "query"


@pytest.mark.parametrize(
    "settings",
    [{"block_sum": "rms"}, {"count_power": 1.0}, {"count_prior": 0.5}, {"block_scale": True, "count_power": 1.0}],
)
def test_settings_that_start_otherwise_are_refused(settings):
    with pytest.raises(UserError, match="not the standard residual at the start"):
        convert(llama(), "block", block_size=3, **settings)


@pytest.mark.quick("postnorm", "ddl", "adaptive")
@pytest.mark.parametrize("residual", sorted(set(RESIDUALS) - set(EXACT)))
def test_every_other_is_refused_with_the_reason(residual):
    reason = f"its rule, {RESIDUALS[residual].about.rule}, is not the standard residual at the start"
    with pytest.raises(UserError, match=re.escape(reason)):
        convert(llama(), residual)


@pytest.mark.parametrize(
    ("residual", "settings", "says"),
    [
        ("deepnorm", {}, "'deepnorm' would change the logits of LlamaForCausalLM by .* --inexact"),
        ("block", {"read_scale": "mean"}, "leave it at 'sum'"),
        ("blok", {}, "did you mean 'block'"),
        ("block", {"num_blockz": 2}, "did you mean 'num_blocks'"),
        ("block", {"block_size": 2, "num_blocks": 2}, "give one of them"),
        ("block", {"num_blocks": 7}, "expected 1 to 4"),
        ("block", {"value_residual": "first"}, "with value_residual=first it is not the standard residual at the star"),
    ],
)
def test_what_is_not_exact_or_not_there_is_refused(residual, settings, says):
    model = llama()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match=says):
        convert(model, residual, **settings)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: convert(llama()), r"has depth reads already \(residual 'block'\)"),
        (lambda: torch.nn.Linear(2, 2), "a Linear was given"),
        (lambda: llama().to(torch.float8_e4m3fn), "has dtype float8_e4m3fn: expected bf16"),
        (lambda: on_meta(), "is not in memory"),
        (lambda: reentrant(), "has reentrant gradient checkpointing"),
    ],
    ids=["converted", "no model", "dtype", "meta", "reentrant"],
)
def test_models_that_cannot_be_converted_are_refused(make, says):
    with pytest.raises(UserError, match=says):
        convert(make())


def reentrant():
    model = llama()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(
        {"use_reentrant": True}
    )
    return model


def on_meta():
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**NARROW))


def test_a_dtype_is_for_sources_on_disk():
    with pytest.raises(UserError, match="whose weights are shared: cast it first"):
        convert(llama(), dtype="bf16")


# ------------------------------------------------------------------ on disk


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_folder_converts_with_its_dtype_tokenizer_and_generation_settings(dtype, tmp_path):
    plain, out = save_plain(tmp_path / "plain", dtype=dtype), tmp_path / "a" / "out"
    report = convert(plain, out=out, num_blocks=2)
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(after) - set(before) == {"model.residual.query", "model.residual.gain"}
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == DTYPES[dtype] for name, tensor in before.items()
    )
    assert not after["model.residual.query"].any() and (after["model.residual.gain"] == 1).all()
    assert after["model.residual.query"].dtype == after["model.residual.gain"].dtype == torch.float32
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (plain / name).read_bytes()
    card = (out / "README.md").read_text()
    assert "not ours to copy" not in card and "trust_remote_code=True" in card
    assert f"differed from the source's by at most {report.max_difference:.2g}" in card
    assert "loading what was written gave the same outputs again" in card
    assert left_behind(tmp_path) == ["a"] and left_behind(tmp_path / "a") == ["out"]
    assert report.out == str(out) and report.source == str(plain)
    assert json.loads((out / "conversion.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    new = load(out)
    assert new.generation_config.temperature == 0.6
    assert new.dtype == DTYPES[dtype] and new.residual.query.dtype == torch.float32
    assert compare_logits(load_plain(plain), new).within
    assert AutoTokenizer.from_pretrained(out).encode("t5") == [5]


def load_plain(folder):
    return LlamaForCausalLM.from_pretrained(folder, dtype="auto")


def test_tokenizers_are_found_without_a_tokenizer_config(plain, tmp_path):
    (plain / "tokenizer_config.json").unlink()
    convert(plain, out=tmp_path / "out")
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", plain))
    assert type(ours) is type(theirs) and ours.encode("t5") == theirs.encode("t5")


def test_the_dtype_can_be_changed_on_the_way(plain, tmp_path):
    convert(plain, out=tmp_path / "out", dtype="fp32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    with pytest.raises(UserError, match=r"unknown dtype 'fp8'.*did you mean"):
        convert(plain, dtype="fp8")


def test_fields_that_no_model_reads_may_be_called_like_a_setting(plain, tmp_path):
    """As the `block_size` that nanoGPT's exports keep."""
    edit_config(plain, block_size=1024, rank=4)
    assert build_shapes(plain, "full").config.residual == "full"
    convert(plain, out=tmp_path / "out", num_blocks=2)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["residual_settings"].items() >= {"read_scale": "sum", "num_blocks": 2}.items()
    assert not written.keys() & {"rank"}
    assert compare_logits(load_plain_weights(plain), load(tmp_path / "out")).within
    key = json.loads((plain / "config.json").read_text())["model_type"]
    with pytest.warns(UserWarning, match=f"a plain '{key}' checkpoint is loaded"):
        config = CLASSES[key][0].from_pretrained(plain)
    assert config.residual == "block" and not {"block_size", "rank"} & vars(config).keys()


def test_what_a_configs_own_constructor_takes_is_its_own():
    class Own(LlamaConfig):
        def __init__(self, rank=4, **others):
            self.rank = rank
            super().__init__(**others)

    assert stray_settings(Own, vars(Own(**NARROW, block_size=1024))) == ["block_size"]


def test_without_out_a_folder_becomes_a_model(plain):
    assert convert(str(plain), "full").conversion.out is None


def test_shards_in_and_shards_out(tmp_path, monkeypatch):
    plain = save_plain(tmp_path / "plain", max_shard_size="10KB")
    assert len(list(plain.glob("*.safetensors"))) > 2
    monkeypatch.setattr("attnres.models.export.SHARD", "12KB")
    convert(plain, out=tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert compare_logits(load_plain(plain), load(tmp_path / "out")).within


def test_experts_keep_the_layout_of_the_hub(tmp_path):
    torch.manual_seed(0)
    plain = save_plain(tmp_path / "plain", MixtralForCausalLM(MixtralConfig(**NARROW, num_local_experts=4)))
    convert(plain, out=tmp_path / "out")
    names = set(load_file(plain / "model.safetensors"))
    assert any("experts.3.w2" in name for name in names)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) - names == {
        "model.residual.query",
        "model.residual.gain",
    }
    theirs = MixtralForCausalLM.from_pretrained(plain, dtype="auto")
    assert compare_logits(theirs, load(tmp_path / "out")).within


def test_a_model_in_memory_can_be_written_too(tmp_path):
    model = llama()
    report = convert(model, out=tmp_path / "out")
    assert report.source == "LlamaForCausalLM"
    assert compare_logits(model, load(tmp_path / "out")).within


def test_tensors_without_a_use_are_named_in_the_report(plain, tmp_path):
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.2.extra_head.weight"] = torch.ones(3)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    report = convert(plain, out=tmp_path / "out")
    assert report.ignored == ("model.layers.2.extra_head.weight",)
    assert "extra_head" in str(report)


def test_names_of_the_hub_are_fetched_without_pickles_and_code(plain, monkeypatch):
    asked = set()

    def fetch(name, patterns):
        assert name == "someone/llama"
        asked.update(patterns)
        return plain

    monkeypatch.setattr(model_files, "fetch", fetch)
    report = convert("someone/llama").conversion
    assert report.source == "someone/llama"
    assert {"model.safetensors", "tokenizer*"} <= asked and not {"*.py", "*.bin"} & asked


# ------------------------------------------------------------------ bad input


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def into_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def without_a_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_eight_bits(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def converted(folder):
    convert(folder, out=folder.with_name("converted"))
    shutil.rmtree(folder)
    folder.with_name("converted").rename(folder)


BAD = {
    "nothing there": (shutil.rmtree, "does not exist: expected a run folder, a model folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no model"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"is damaged \(is \[\]: expected keys and"),
    "no type": (lambda f: edit_config(f, model_type=None), "names no model_type"),
    "unknown type": (lambda f: edit_config(f, model_type="lama"), "of type 'lama', which this version of Transformers"),
    "no language model": (
        lambda f: edit_config(f, model_type="vit"),
        "cannot be loaded .*is it a model of Transformers, and whole",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has a config.json and holds no weights"),
    "pickle": (into_pickle, "in pytorch_model.bin, a pickle, which can run code and is not opened"),
    "cut short": (cut_short, "model.safetensors of .* is damaged or cut short"),
    "no safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "is damaged or cut short"),
    "tensor missing": (without_a_tensor, r"lacks 'model.layers.1.mlp.up_proj.weight':"),
    "dtype": (in_eight_bits, "'lm_head.weight' of .* has dtype F8_E4M3: expected F64, F32, F16, BF16"),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}),
        r"quantised weights \(gptq\)",
    ),
    "shapes": (
        lambda f: edit_config(f, hidden_size=64),
        r"has shape \(.*\), and its config says \(.*64\)",
    ),
    "tokenizer": (
        lambda f: tokenizer(VOCAB + 1).save(str(f / "tokenizer.json")),
        "token id 61, and the embedding of .* has 61 rows",
    ),
    "tokenizer damaged": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json of .* cannot be read"),
    "converted": (converted, r"has depth reads already \(residual 'block'\): convert the plain one"),
    "own code": (
        lambda f: edit_config(f, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
        r"brings its own code \(modeling_mine.Mine\), which is not run unasked",
    ),
}


@pytest.mark.quick("memory")
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_model_of_ours_with_the_standard_residual_converts(where, tmp_path):
    """So that a run of one's own can be tried without the hub."""
    standard = build("pico", "standard", vocab_size=VOCAB)
    standard.save_pretrained(tmp_path / "standard")
    new = convert(standard if where == "memory" else tmp_path / "standard", "block", num_blocks=2)
    assert new.config.residual == "block" and new.conversion.added_parameters > 0
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(new(input_ids=ids).logits, standard(input_ids=ids).logits)
    shares = new.lm_head.weight.data_ptr() == standard.lm_head.weight.data_ptr()
    assert shares == (where == "memory")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_nothing_is_written(case, plain, tmp_path):
    spoil, says = BAD[case]
    spoil(plain)
    with pytest.raises(UserError, match=says) as caught:
        convert(plain, out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert left_behind(tmp_path) == []


def test_a_missing_shard_is_named(tmp_path):
    plain = save_plain(tmp_path / "plain", max_shard_size="10KB")
    shards = sorted(plain.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(UserError, match=f"lacks {shards[1].name}, 1 of the {len(shards)} files"):
        convert(plain, out=tmp_path / "out")
    assert left_behind(tmp_path) == []


def test_a_folder_that_is_not_empty_is_left_alone(plain, tmp_path):
    (tmp_path / "out").mkdir()
    convert(plain, out=tmp_path / "out")
    files = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match=r"is not empty and holds .*: expected an empty folder"):
        convert(plain, "full", out=tmp_path / "out")
    assert files == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_a_disk_too_small_is_found_before_the_work(plain, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs 0 MB and .* has 0 MB left: make room"):
        convert(plain, out=tmp_path / "out")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left")])
def test_a_disk_that_fills_up_leaves_nothing_behind(error, plain, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(UserError, match=r"cannot write .*out: .*No space left"):
        convert(plain, out=tmp_path / "out")
    assert left_behind(tmp_path) == []


# ------------------------------------------------------------------ code that comes with a model

REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def remote(plain, tmp_path, monkeypatch):
    """A checkpoint with its own classes; what is imported goes to a folder of the test's."""
    import sys

    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    (plain / "modeling_mine.py").write_text(REMOTE)
    auto = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    edit_config(plain, model_type="mine", auto_map=auto, architectures=["MineForCausalLM"])
    return plain


def test_code_runs_only_where_it_is_trusted(remote, tmp_path, monkeypatch):
    from attnres.models import classes

    out = tmp_path / "out"
    with pytest.raises(
        UserError, match=r"brings its own code \(modeling_mine.MineConfig, modeling_mine.MineForCausalLM\)"
    ):
        convert(remote, out=out)
    assert not list((tmp_path / "modules").iterdir())
    report = convert(remote, out=out, trust_remote_code=True)
    assert (report.family, report.model_type, report.probed) == (
        "MineForCausalLM",
        "attnres_mine_mineforcausallm",
        True,
    )
    assert (out / "modeling_mine.py").read_text() == REMOTE
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert not (out / "classes.py").exists()  # ours is no code that comes with a model
    monkeypatch.delitem(classes.CLASSES, "mine_mineforcausallm")  # as in a new process
    with pytest.raises(UserError, match=r"brings its own code \(modeling_mine.MineConfig, modeling_mine.Mine"):
        load(out)
    new = load(out, trust_remote_code=True)
    assert compare_logits(load_plain_weights(remote), new).within
    with pytest.raises(UserError, match="has depth reads already"):
        convert(out, trust_remote_code=True)


def test_code_beside_a_known_type_is_not_needed(plain, tmp_path):
    (plain / "modeling_llama.py").write_text("raise RuntimeError('was run')")
    edit_config(plain, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    for trusted in (False, True):
        out = tmp_path / f"out{trusted}"
        assert not convert(plain, out=out, trust_remote_code=trusted).probed
        assert not (out / "modeling_llama.py").exists()
        assert type(load(out)).__name__ == "AttnResLlamaForCausalLM"


def load_plain_weights(folder):
    model = llama().to(torch.bfloat16)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def _speech(layerdrop):
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(
        **sizes,
        **convolutions,
        **positions,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        layerdrop=layerdrop,
        mask_time_prob=0.0,
    )
    return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(1, 1000)}


def _story(layerdrop):
    config = transformers.BioGptConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        layerdrop=layerdrop,
    )
    return transformers.BioGptForCausalLM(config), {"input_ids": torch.randint(3, 40, (2, 6)), "use_cache": False}


@pytest.mark.quick("True-_story-biogpt.layers", "False-_speech-encoder.layers")
@pytest.mark.parametrize(("make", "path"), [(_speech, "encoder.layers"), (_story, "biogpt.layers")])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_training_skips_write_nothing(make, path, checkpointed):
    """Against the plain model with the same random numbers: outputs and gradients; every choice of layers occurs."""
    torch.manual_seed(0)
    plain, inputs = make(0.5)
    model = convert(plain, "full")
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    ran = set()
    for seed in range(20):
        results = []
        for one in (plain.train(), model.train()):
            calls, hooks = [], []
            for index, layer in enumerate(one.get_submodule(path)):
                hooks.append(layer.register_forward_pre_hook(lambda *_, index=index, calls=calls: calls.append(index)))
            torch.manual_seed(seed)
            one.zero_grad()
            out = one(**inputs)[0]
            called = tuple(calls)
            out.square().mean().backward()
            for hook in hooks:
                hook.remove()
            grads = {
                name: p.grad for name, p in one.named_parameters() if p.grad is not None and "residual" not in name
            }
            results.append((called, out.detach(), {name: grad.clone() for name, grad in grads.items()}))
        (called, out, grads), (ours_called, ours, ours_grads) = results
        assert called == ours_called
        ran.add(called)
        assert (ours - out).abs().max() <= 1e-4 * out.abs().max()
        assert ours_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert (ours_grads[name] - grad).abs().max() <= 1e-3 * grad.abs().max() + 1e-7, name
    assert len(ran) >= 6 and any(0 not in one for one in ran) and any(2 not in one for one in ran)


def test_a_conversion_that_fails_in_training_mode_alone_is_refused():
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            if self.training and hasattr(self.model, "residual"):
                raise KeyError("only here")
            return super().forward(*args, **kwargs)

    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(UserError, match=r"training mode \(.*only here"):
        convert(Odd(config))
