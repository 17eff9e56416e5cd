"""Folders of other projects become ours and go back, from the command line too, with what lies beside the weights."""

import json
import shutil

import pytest
import torch
from foreign_formats import IDS, fla, kimi, nanogpt, open_attnres, same_tensors
from safetensors.torch import load_file, save_file

from attnres import UserError, cli, convert
from attnres.evals.subject import find_subject
from attnres.models import build, load, load_foreign

FORMATS = {"open-attnres": open_attnres, "fla": fla, "kimi": kimi, "nanogpt": nanogpt}


def run(capsys, *arguments):
    code = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("kind", FORMATS)
def test_convert_recognises_a_foreign_checkpoint_and_writes_it_back(kind, capsys, tmp_path):
    theirs = FORMATS[kind](tmp_path / "theirs")
    (theirs / "tokenizer.json").write_text('{"a": 1}')
    (theirs / "generation_config.json").write_text('{"temperature": 0.6}')  # Transformers would not write it
    code, said, _ = run(capsys, "convert", theirs, tmp_path / "ours")
    assert code == 0 and f"({kind}) -> " in said and "of the residual" in said
    with torch.no_grad():
        expected = load_foreign(theirs)(input_ids=IDS, use_cache=False).logits
        assert torch.equal(load(tmp_path / "ours")(input_ids=IDS, use_cache=False).logits, expected)
    (tmp_path / "run").mkdir()  # as in a run folder
    shutil.move(tmp_path / "ours", tmp_path / "run" / "model")
    code, said, _ = run(capsys, "convert", tmp_path / "run", tmp_path / "back", "--to", kind)
    assert code == 0 and f"({kind})" in said
    same_tensors(theirs, tmp_path / "back")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()


def test_one_project_to_another_where_the_layout_is_the_same(capsys, tmp_path):
    fla(tmp_path / "fla")
    run(capsys, "convert", tmp_path / "fla", tmp_path / "ours")
    code, _, said = run(capsys, "convert", tmp_path / "ours", tmp_path / "kimi", "--to", "kimi")
    assert code == 0, said
    with torch.no_grad():
        one, two = (load_foreign(tmp_path / name)(input_ids=IDS).logits for name in ("fla", "kimi"))
    assert torch.equal(one, two)
    code, _, said = run(capsys, "convert", tmp_path / "ours", tmp_path / "open", "--to", "open-attnres")
    assert code == 2 and "'open-attnres' cannot hold this model" in said and not (tmp_path / "open").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theirs", "out", "--num-blocks", "2"], "has the depth reads of 'fla', is written with"),
        (["ours", "out", "--to", "fla", "--residual", "full", "--dtype", "bf16"], "leave out --residual, --dtype"),
        (["ours", "out", "--to", "flaa"], "unknown kind of foreign checkpoint 'flaa': did you mean 'fla'?"),
        (["theirs", "out", "--to", "fla"], "is no model of attnres, which --to writes: convert it first"),
        (["nowhere", "out", "--to", "fla"], "holds no model"),
        (["theirs", "full"], "exists and is not empty"),
        (["ours", "full", "--to", "fla"], "exists and is not empty"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fla(tmp_path / "theirs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    run(capsys, "convert", "theirs", "ours")
    code, _, said = run(capsys, "convert", *arguments)
    assert code == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists() and [f.name for f in (tmp_path / "full").iterdir()] == ["file"]


def test_no_tool_passes_over_foreign_depth_reads_without_a_word(tmp_path):
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
    assert load_foreign(theirs).config.residual == "block"
    for tool in (convert, find_subject):
        with pytest.raises(UserError, match="depth reads in the format of 'kimi': make it a model of attnres"):
            tool(theirs)
