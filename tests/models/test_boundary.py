"""Whatever is in a model's folder, opening it ends in a model or one sentence, and runs no code unasked."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from attnres.cli import main
from attnres.errors import UserError
from attnres.models import build, open_checkpoint


@pytest.fixture
def plain(folders, tmp_path):
    """A copy of a plain model, to damage."""
    return shutil.copytree(folders["plain"], tmp_path / "plain")


def change(folder, name="config.json", **fields):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attn_implementation": "someone/kernel"},
            "names the attn_implementation 'someone/kernel', which may be fetched",
        ),
        ({"_attn_implementation": "flash_attention_2"}, "'flash_attention_2', which may be fetched and run"),
        ({"text_config": {"attn_implementation": {"": "kernels-community/x"}}}, "'kernels-community/x', which may be"),
        ({"model_type": ["a"]}, r"model_type\[?.* expected text or nothing"),
        ({"auto_map": 5}, "auto_map is 5: expected keys and values or nothing"),
        ({"quantization_config": [1]}, "quantization_config is .*: expected keys and values or nothing"),
        ({"vocab_size": "x"}, "makes no config"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1: expected a number of tokens, 1 or more"),
        ({"hidden_size": 48}, "has shape .*, and its config says"),
    ],
)
def test_a_config_that_makes_no_model_is_a_sentence(plain, fields, message):
    change(plain, **fields)
    with pytest.raises(UserError, match=message) as raised:
        checkpoint = open_checkpoint(plain)
        _ = checkpoint.context
        checkpoint.load()
    assert "\n" not in str(raised.value)


def test_trusted_code_may_bring_its_attention(plain):
    change(plain, attn_implementation="sdpa")
    assert open_checkpoint(plain).config.num_hidden_layers == 3
    change(plain, attn_implementation="someone/kernel")
    assert open_checkpoint(plain, trust_remote_code=True).config.num_hidden_layers == 3, "read, and not yet fetched"


@pytest.mark.parametrize("names", [[0.5], [], "x", None])
def test_a_config_whose_class_has_no_name_is_that_of_its_type(plain, names):
    change(plain, architectures=names)
    assert type(open_checkpoint(plain).load()).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "expected keys and values"),
        ({"weight_map": {}}, "names no files"),
        ({"weight_map": {"a": 5}}, "expected text"),
        ({"weight_map": {"a": "../b.safetensors"}}, "which is no file beside it"),
        ({"weight_map": {"a": "b" * 300}}, "which is no file beside it"),
        ({"weight_map": {"a": "w.bin"}}, r"'w\.bin': expected \.safetensors"),
        ({"weight_map": {"a": "a.safetensors", "b": "w.safetensors.pt"}}, r"'w\.safetensors\.pt': expected"),
    ],
)
def test_an_index_names_files_beside_it(plain, index, message):
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        open_checkpoint(plain)


@pytest.mark.parametrize("command", ["generate", "inspect", "convert"])
def test_a_pickle_that_an_index_names_is_not_opened(plain, command, tmp_path, capsys):
    """The single file is taken away, so that nothing but the index says where the weights are."""
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    torch.save(tensors, plain / "w.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "w.bin")}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    rest = {"generate": ["--prompt", "a"], "inspect": ["--text", "a"], "convert": [str(tmp_path / "out")]}[command]
    with pytest.raises(SystemExit) as ended:
        main([command, str(plain), *rest])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "w.bin" in said and "safetensors" in said and "weights_only" not in said


@pytest.mark.parametrize("name", ["adapter_model.bin", "other.safetensors.index.json", 5])
def test_a_config_names_no_other_files_of_weights(plain, name):
    change(plain, transformers_weights=name)
    with pytest.raises(UserError, match="transformers_weights"):
        open_checkpoint(plain)


def test_a_size_says_how_large_it_is():
    with pytest.raises(UserError, match=r"\{family: llama\} does not say hidden_size and num_hidden_layers"):
        build({"family": "llama"}, "full", vocab_size=32)
    with pytest.raises(UserError, match="does not say n_layer"):
        build({"family": "gpt2", "n_embd": 32}, "full", vocab_size=32)
    with pytest.raises(UserError, match=r"cannot be built \(.*nosuch.*\): change the fields of the size"):
        build(
            {"family": "llama", "hidden_size": 32, "num_hidden_layers": 2, "hidden_act": "nosuch"},
            "full",
            vocab_size=32,
        )
