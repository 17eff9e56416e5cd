"""Models are found wherever users have them, and what is wrong is said before a weight is loaded."""

import json
import shutil
import sys

import pytest
import torch

from attnres import UserError
from attnres.device import pick_device
from attnres.evals import subject
from attnres.evals.subject import find_subject

IDS = torch.arange(20)[None]


def test_a_run_folder_a_model_folder_and_a_plain_one(folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders["standard"], run / "model")
    (run / "config.json").write_text(json.dumps({"model": {}, "optim": {}}))
    loaded = [find_subject(path).load() for path in (run, folders["standard"], folders["plain"])]
    first = loaded[0](input_ids=IDS).logits
    for model in loaded:
        assert not model.training
        torch.testing.assert_close(model(input_ids=IDS).logits, first, atol=1e-5, rtol=0)
    assert type(loaded[2]).__name__ == "Qwen3ForCausalLM"
    found = find_subject(run)
    assert (found.folder, found.context, found.rows, found.bos, found.prefix) == (run / "model", 64, 320, (), 0)


def test_weights_load_in_the_dtype_asked_for(folders):
    assert find_subject(folders["plain"]).load("bf16").dtype == torch.bfloat16
    model = find_subject(folders["block"]).load("bf16")
    assert (model.dtype, model.residual.query.dtype) == (torch.bfloat16, torch.float32)


def test_a_token_that_the_tokenizer_puts_in_front_is_known(folders, tmp_path, save_tokenizer):
    from tokenizers import processors

    folder = shutil.copytree(folders["plain"], tmp_path / "model")
    tokenizer = save_tokenizer(folder)
    end = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    assert find_subject(folder).bos == (tokenizer.eos_token_id,)


def broken(folders, tmp_path, name="block"):
    return shutil.copytree(folders[name], tmp_path / "broken")


def test_what_is_missing_is_named(folders, tmp_path):
    with pytest.raises(UserError, match=r"model '.*absent' does not exist: expected a run folder, a model folder or"):
        find_subject(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no model: expected a run folder, or one with config.json"):
        find_subject(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json is not that of a model$"):
        find_subject(tmp_path / "empty")
    (tmp_path / "empty" / "checkpoint" / "model").mkdir(parents=True)
    with pytest.raises(UserError, match=r"this run has not finished, continue it with attnres train --resume"):
        find_subject(tmp_path / "empty")
    folder = broken(folders, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer: copy tokenizer.json"):
        find_subject(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"holds no weights: expected model.safetensors"):
        find_subject(folder)


@pytest.mark.parametrize("name", ["block", "plain"])
def test_damaged_files_are_one_sentence(folders, tmp_path, name):
    folder = broken(folders, tmp_path, name)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"the model in .* cannot be loaded"):
        find_subject(folder).load()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be opened"):
        find_subject(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not valid JSON"):
        find_subject(folder)


def test_tensors_that_would_be_drawn_at_random_are_refused(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = broken(folders, tmp_path, "plain")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 'model.norm.weight' and 0 other tensors"):
        find_subject(folder).load()


def test_a_tokenizer_of_another_model_is_refused(folders, tmp_path, save_tokenizer):
    folder = broken(folders, tmp_path, "other")
    save_tokenizer(folder, 320)
    with pytest.raises(UserError, match=r"gives id 319 and the model's embedding has 300 rows"):
        find_subject(folder)


def test_code_that_comes_with_a_model_is_not_run_unasked(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = broken(folders, tmp_path, "plain")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(UserError, match=r"it brings code: read it, --trust-remote-code"):
        find_subject(folder)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError):  # it has no class Config; but it ran
        find_subject(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_a_name_on_the_hub_is_fetched_without_its_code(folders, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folders["plain"])

    monkeypatch.setattr(subject, "snapshot_download", snapshot_download)
    assert find_subject("some/model").folder == folders["plain"]
    assert not any("py" in pattern or "bin" in pattern for pattern in asked[0][1])

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(subject, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"'some/model' is no folder here and cannot be fetched .* \(no route\)"):
        find_subject("some/model")


def test_devices():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UserError, match=r"device nonsense does not exist"):
        pick_device("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"finds no CUDA device here: use --device cpu"):
            pick_device("cuda")
