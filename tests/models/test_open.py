"""Models open wherever users have them, and what is wrong is said before a weight is loaded."""

import json
import re
import shutil
import sys

import pytest
import torch
from foreign_formats import fla, nanogpt
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from attnres import UserError
from attnres.models import load, model_files, open_checkpoint

IDS = torch.arange(20)[None]


@pytest.fixture(autouse=True)
def nothing_fetched():
    """The hub is asked once in a process."""
    model_files._fetched.cache_clear()


def as_run(folder, model, *, finished=True):
    """A run folder of `attnres train` around a saved model."""
    shutil.copytree(model, folder / "checkpoint" / "model")
    (folder / "config.json").write_text(json.dumps({"model": {}, "optim": {}}))
    (folder / "checkpoint" / "state.json").write_text("{}")
    (folder / "metrics.jsonl").touch()
    if finished:
        shutil.copytree(model, folder / "model")
    return folder


def test_a_run_folder_a_model_folder_and_a_plain_one(folders, tmp_path):
    run = as_run(tmp_path / "run", folders["standard"])
    places = (run, run / "checkpoint", run / "model", folders["standard"], folders["plain"])
    checkpoints = [open_checkpoint(path) for path in places]
    assert [checkpoint.kind for checkpoint in checkpoints] == ["attnres"] * 4 + ["plain"]
    assert [checkpoint.run for checkpoint in checkpoints] == [run, run, run, None, None]
    first = checkpoints[0].load()(input_ids=IDS).logits
    for checkpoint in checkpoints:
        assert (checkpoint.context, checkpoint.vocab_size, len(checkpoint.tokenizer)) == (64, 320, 320)
        model = checkpoint.load()
        assert not model.training
        torch.testing.assert_close(model(input_ids=IDS).logits, first, atol=1e-5, rtol=0)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    titles = [checkpoint.title() for checkpoint in checkpoints]
    assert titles == ["run", "run/checkpoint", "run", "standard", "plain"]
    assert checkpoints[1].title(parts=2) == f"{tmp_path.name}/run/checkpoint"
    assert [(checkpoint.residual, checkpoint.settings) for checkpoint in checkpoints[3:]] == [
        ("standard", {}),
        (None, {}),
    ]


def test_an_unfinished_run_has_a_checkpoint(folders, tmp_path):
    run = as_run(tmp_path / "run", folders["block"], finished=False)
    with pytest.raises(UserError, match=r"is not finished and has no model yet: continue it with --resume, or"):
        open_checkpoint(run)
    checkpoint = open_checkpoint(run / "checkpoint")
    expected = load(folders["block"])(input_ids=IDS).logits
    assert torch.equal(checkpoint.load()(input_ids=IDS).logits, expected)
    assert len(checkpoint.tokenizer) == 320
    (run / "checkpoint" / "adapter.safetensors").touch()
    with pytest.raises(UserError, match="has LoRA's tensors beside its model"):
        open_checkpoint(run / "checkpoint")


def test_load_takes_every_name_of_a_model_with_depth_reads(folders, tmp_path, monkeypatch):
    run = as_run(tmp_path / "run", folders["block"])
    monkeypatch.setattr(model_files, "fetch", lambda name, patterns: folders["block"])
    expected = load(folders["block"])(input_ids=IDS).logits
    for name in (run, str(run / "checkpoint"), "some/model"):
        model = load(name, attn_implementation="eager")
        assert model.config._attn_implementation == "eager"
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, atol=1e-4, rtol=0)
    theirs = load(fla(tmp_path / "fla"), dtype=torch.bfloat16)
    assert (theirs.config.residual, theirs.dtype, theirs.residual.query.dtype) == (
        "block",
        torch.bfloat16,
        torch.float32,
    )
    with pytest.raises(UserError, match="holds a plain 'qwen3' model: expected one with a residual"):
        load(folders["plain"])


def test_weights_load_in_the_dtype_asked_for(folders):
    assert open_checkpoint(folders["plain"]).load("bf16").dtype == torch.bfloat16
    model = open_checkpoint(folders["block"]).load("bf16")
    assert (model.dtype, model.residual.query.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(UserError, match="unknown dtype 'bf17': did you mean 'bf16'"):
        open_checkpoint(folders["block"]).load("bf17")


def test_only_the_files_that_the_index_names_are_weights(folders, tmp_path):
    model = load(folders["block"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert len(open_checkpoint(tmp_path).weights.paths) > 1
    shutil.copyfile(folders["block"] / "model.safetensors", tmp_path / "consolidated.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.weights.parameters, checkpoint.weights.nbytes(), checkpoint.weights.nbytes(2)) == (
        numbers,
        4 * numbers,
        2 * numbers,
    )
    assert torch.equal(checkpoint.load()(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_of_the_hub_only_what_is_needed_is_fetched(folders, tmp_path, monkeypatch):
    """Without code, and not the second copy of the weights that some repositories hold."""
    load(folders["block"]).save_pretrained(tmp_path, max_shard_size="20KB")
    calls = []

    def fetch(name, patterns):
        calls.append(list(patterns))
        return tmp_path

    monkeypatch.setattr(model_files, "fetch", fetch)
    fetched = open_checkpoint("some/model")
    assert (fetched.folder, fetched.title()) == (tmp_path, "some/model")
    first, second = calls
    assert second == sorted(file.name for file in tmp_path.glob("*.safetensors")) and len(second) > 1
    assert not any(pattern.endswith(("py", "bin", "safetensors")) for pattern in first)
    open_checkpoint("some/model", trust_remote_code=True)
    assert "*.py" in calls[2]


def broken(folders, tmp_path, name="block"):
    return shutil.copytree(folders[name], tmp_path / "broken")


def test_what_is_missing_is_named(folders, tmp_path):
    with pytest.raises(UserError, match=r"model '.*absent' does not exist: expected a run folder, a model folder or"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no model: expected a run folder, or a folder with config.json"):
        open_checkpoint(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"empty is not that of a model: it names no model_type"):
        open_checkpoint(tmp_path / "empty")
    folder = broken(folders, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer: copy tokenizer.json"):
        _ = open_checkpoint(folder).tokenizer
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no weights: expected model.safetensors"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks 1.safetensors, 1 of the 1 files that model.safetensors.index"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match=r"is damaged \(is \[\]: expected keys and values\): fetch or copy"):
        open_checkpoint(folder)


def make_other(kind, model, place):
    """Make a folder, or a file, that people take for a model, and return what of it is named."""
    place.mkdir()
    if kind in ("adapter", "adapter beside a model"):
        if kind != "adapter":
            shutil.copytree(model, place, dirs_exist_ok=True)
        get_peft_model(load(model), LoraConfig(target_modules=["q_proj"])).save_pretrained(place)
        return place, "adapter_config.json, a PEFT adapter"
    if kind == "GGUF":
        (place / "model-q4_k.gguf").write_bytes(b"GGUF" + bytes(64))
        return place, "model-q4_k.gguf, a GGUF file"
    if kind == "GGUF, a config":
        shutil.copyfile(model / "config.json", place / "config.json")
        (place / "model-q4_k.gguf").write_bytes(b"GGUF" + bytes(64))
        return place, "model-q4_k.gguf, a GGUF file"
    if kind == "file":
        shutil.copyfile(model / "model.safetensors", place / "model.safetensors")
        return place / "model.safetensors", "config.json and safetensors"
    inner = place / {"cache": "snapshots/0a1b2c", "trainer": "checkpoint-500"}[kind]
    shutil.copytree(model, inner)
    (place / "training_args.bin").write_bytes(b"")
    assert type(load(inner)).__name__ == type(load(model)).__name__
    return place, str(inner)


of_peft = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:.*config file:UserWarning",
    "ignore:.*freezes the queries",
)


@of_peft
@pytest.mark.parametrize(
    "kind", ["adapter", "adapter beside a model", "GGUF", "GGUF, a config", "file", "cache", "trainer"]
)
def test_a_folder_of_another_kind_is_said_to_be_that(folders, tmp_path, kind):
    given, named = make_other(kind, folders["block"], tmp_path / "models--some--model")
    for look in (open_checkpoint, load):
        with pytest.raises(UserError, match=re.escape(named)):
            look(given)


@of_peft
def test_an_adapter_of_the_hub_is_said_to_be_one(folders, tmp_path, monkeypatch):
    make_other("adapter", folders["block"], tmp_path / "fetched")
    monkeypatch.setattr(model_files, "fetch", lambda name, patterns: tmp_path / "fetched")
    with pytest.raises(UserError, match=r"some/adapter holds adapter_config\.json"):
        open_checkpoint("some/adapter")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_refused(folders, tmp_path, name):
    folder = broken(folders, tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UserError, match=f"has its weights in {name}, a pickle, which can run code and is not opened"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["block", "plain"])
def test_damaged_files_are_one_sentence(folders, tmp_path, name):
    folder = broken(folders, tmp_path, name)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"broken cannot be loaded \(.*\): is it a model of Transformers, and whole\?"):
        open_checkpoint(folder).load()
    with pytest.raises(UserError, match=r"model.safetensors of .*broken is damaged or cut short"):
        _ = open_checkpoint(folder).weights.parameters
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be opened"):
        _ = open_checkpoint(folder).tokenizer
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not valid JSON"):
        open_checkpoint(folder)


def test_tensors_that_would_be_drawn_at_random_are_refused(folders, tmp_path):
    folder = broken(folders, tmp_path, "plain")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 'model.norm.weight':"):
        open_checkpoint(folder).load()


def test_a_tokenizer_of_another_model_is_refused(folders, tmp_path, save_tokenizer):
    folder = broken(folders, tmp_path, "other")
    save_tokenizer(folder, 320)
    with pytest.raises(UserError, match=r"token id 319, .* has 300 rows"):
        _ = open_checkpoint(folder).tokenizer


def test_another_projects_checkpoint_is_opened_with_its_tokenizer(folders, tmp_path, save_tokenizer):
    folder = nanogpt(tmp_path / "theirs", vocab_size=320)
    save_tokenizer(folder)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.kind, checkpoint.residual, checkpoint.context, len(checkpoint.tokenizer)) == (
        "foreign",
        "boundary",
        64,
        320,
    )


def test_code_that_comes_with_a_model_is_not_run_unasked(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = broken(folders, tmp_path, "plain")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    for what in ("config", "tokenizer", "context", "residual"):
        with pytest.raises(
            UserError, match=r"brings its own code \(code.Config, code.Model\), which is not run unasked"
        ):
            getattr(open_checkpoint(folder), what)
    with pytest.raises(UserError, match="brings its own code"):
        open_checkpoint(folder).load()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="makes no config"):  # it has no class Config; but it ran
        open_checkpoint(folder, trust_remote_code=True).load()
    assert (tmp_path / "ran").exists()
