"""Folders of other projects become ours and go back, from the command line too, with what lies beside the weights."""

import json
import shutil

import pytest
import torch
from foreign_formats import IDS, fla, kimi, nanogpt, open_attnres, same_tensors
from safetensors.torch import load_file, save_file
from tiny import SIZE

from attnres import UserError, cli, convert
from attnres.models import build, export_model, load, open_checkpoint
from attnres.models.foreign import WRITTEN

FORMATS = {"open-attnres": open_attnres, "fla": fla, "kimi": kimi, "nanogpt": nanogpt}


def run(capsys, *arguments):
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as left:
        code = left.code
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.quick("nanogpt", "fla")
@pytest.mark.parametrize("kind", FORMATS)
def test_convert_recognises_a_foreign_checkpoint_and_writes_it_back(kind, capsys, tmp_path):
    theirs = FORMATS[kind](tmp_path / "theirs")
    (theirs / "tokenizer.json").write_text('{"a": 1}')
    (theirs / "generation_config.json").write_text('{"temperature": 0.6}')  # Transformers would not write it
    code, output, _ = run(capsys, "convert", theirs, tmp_path / "ours")
    assert code == 0 and f"({kind}) -> " in output and "of the residual" in output
    with torch.no_grad():
        expected = load(theirs)(input_ids=IDS, use_cache=False).logits
        assert torch.equal(load(tmp_path / "ours")(input_ids=IDS, use_cache=False).logits, expected)
    (tmp_path / "run").mkdir()  # as in a run folder
    shutil.move(tmp_path / "ours", tmp_path / "run" / "model")
    if kind not in WRITTEN:
        return
    code, output, _ = run(capsys, "convert", tmp_path / "run", tmp_path / "back", "--to", kind)
    assert code == 0 and f"({kind})" in output
    same_tensors(theirs, tmp_path / "back")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()


def test_what_a_format_cannot_say_is_not_written(capsys, tmp_path):
    run(capsys, "convert", fla(tmp_path / "fla"), tmp_path / "ours")
    code, _, output = run(capsys, "convert", tmp_path / "ours", tmp_path / "open", "--to", "open-attnres")
    assert code == 2 and "'open-attnres' cannot hold this model" in output and not (tmp_path / "open").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theirs", "out", "--num-blocks", "2"], "leave out --num-blocks"),
        (["ours", "out", "--to", "fla", "--residual", "full", "--dtype", "bf16"], "leave out --residual, --dtype"),
        (["ours", "out", "--to", "flaa"], "unknown format to write 'flaa': did you mean 'fla'?"),
        (["plain", "out", "--to", "fla"], "is a plain model, which has no depth reads to write"),
        (["no/where/at/all", "out", "--to", "fla"], "does not exist: expected a run folder"),
        (["theirs", "full"], "is not empty and holds"),
        (["ours", "full", "--to", "fla"], "is not empty and holds"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(arguments, message, folders, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders["plain"], "plain")
    fla(tmp_path / "theirs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    run(capsys, "convert", "theirs", "ours")
    code, _, output = run(capsys, "convert", *arguments)
    assert code == 2 and message in output and output.count("\n") == 1
    assert not (tmp_path / "out").exists() and [f.name for f in (tmp_path / "full").iterdir()] == ["file"]


def test_no_tool_passes_over_depth_reads_of_another_project(tmp_path):
    """With Kimi's names the config is that of a plain family, whose class would leave the reads out."""
    theirs = tmp_path / "theirs"
    size = {"family": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    plain = build(size, "standard", vocab_size=61)
    plain.save_pretrained(theirs)
    config = json.loads((theirs / "config.json").read_text())
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attn_res_block_size": 1}
    for name in ("residual", "residual_settings"):
        config.pop(name, None)
    (theirs / "config.json").write_text(json.dumps(config))
    state = load_file(theirs / "model.safetensors")
    starts = [f"layers.{i}.{part}_res" for i in range(2) for part in ("self_attention", "mlp")] + ["output_attn_res"]
    for start in starts:
        state |= {f"model.{start}_proj.weight": torch.ones(1, 16), f"model.{start}_norm.weight": torch.ones(16)}
    save_file(state, theirs / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(theirs)
    assert (checkpoint.kind, checkpoint.residual) == ("foreign", "block")
    assert torch.equal(checkpoint.load().residual.query, torch.ones(5, 16))
    with pytest.raises(UserError, match="has depth reads in the format of 'kimi': attnres convert"):
        convert(theirs)


def test_a_model_whose_config_gives_no_settings_is_exported(tmp_path):
    model = build(SIZE, "full", vocab_size=50)
    model.config.residual_settings = type(model.config)(residual="full").residual_settings
    assert model.config.residual_settings is None
    assert "  residual    full\n" in export_model(model, tmp_path / "out")
