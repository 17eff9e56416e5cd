"""The planner's table: bytes that the runtime's table says, layouts that multiply to the GPUs, models of any size."""

import json
import shutil
from typing import Any

import pytest
import torch
from transformers import KimiLinearConfig

from attnres import UserError
from attnres.cli import main
from attnres.models import build
from attnres.models.build import build_shapes
from attnres.scale.cut import crossings, layer_times, vectors
from attnres.scale.pipeline import plan_cut
from attnres.scale.plan import DEVICES, Load, in_flight, plan

SHAPE: dict[str, Any] = {"family": "qwen3", "hidden_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 18}
SHAPE |= {"num_key_value_heads": 6, "head_dim": 128, "intermediate_size": 9216}


def shapes(residual="block", **fields):
    """A model without memory."""
    size = {**SHAPE, **fields}
    with torch.device("meta"):
        return build(size, residual, vocab_size=65536, settings={"block_size": 6} if residual == "block" else {})


def test_every_layout_uses_all_gpus_and_the_fastest_that_fits_is_first():
    rows = plan(shapes(), Load(16))
    assert all(row.dp * row.shard * row.pp * row.tp == 16 for row in rows) and len(rows) > 15
    fitting = [row.tokens_per_s for row in rows if row.fits]  # layouts with more copies take more tokens a step
    assert fitting == sorted(fitting, reverse=True) and [row.fits for row in rows] == sorted(
        (row.fits for row in rows), reverse=True
    )


@pytest.mark.long
def test_bytes_between_stages_are_those_of_the_runtime():
    model, load = shapes(), Load(8, context=1024, batch=2, microbatches=8)
    (row,) = plan(model, load, pp=4, shard=2, schedule="interleaved")
    table = crossings(model.residual, plan_cut(model, 4, "interleaved", 2))
    assert row.vectors == vectors(table) < row.vectors_naive
    # fp32, forward and back, all tokens of a copy's step, shared out among four ranks.
    assert row.stage_bytes == 2 * vectors(table) * 2 * 1024 * 8 * 2304 * 4 / 4
    assert sum(row.layers) == 12 and row.bubble == 3 / (2 * 8 + 3)


@pytest.mark.long
def test_states_are_sixteen_bytes_a_parameter_in_shares():
    model = shapes()
    total = sum(parameter.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.residual.parameters())
    (row,) = plan(model, Load(8), shard=8)
    assert row.states == (total - whole) * 16 / 8 + whole * 16 and row.vectors == row.stage_bytes == row.bubble == 0


@pytest.mark.long
def test_distributed_experts_are_not_gathered_and_their_tokens_are_sent():
    """Of 8 processes 4 have different experts: parameters of the others are not gathered, and 3/4 of the tokens leave
    a process four times, in bf16, to as many experts as a token has."""
    size = {"family": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 4, "num_experts": 12, "num_experts_per_tok": 2}
    size |= {"moe_intermediate_size": 512, "intermediate_size": 512}
    with torch.device("meta"):
        model = build(size, "block", vocab_size=512, settings={"num_blocks": 2})
    load = Load(8, context=1024, batch=2, microbatches=1)
    rows = plan(model, load, dp=1, pp=1, tp=1, shard=8)
    assert sorted(row.ep for row in rows) == [1, 2, 4]
    (whole,), (spread,) = (plan(model, load, dp=1, pp=1, tp=1, shard=8, ep=ep) for ep in (1, 4))
    experts = 12 * 3 * 256 * 512  # of a layer
    assert whole.states == spread.states and whole.activations == spread.activations
    assert whole.whole - spread.whole == 2 * 2 * experts * 3 / 4
    sent = 4 * experts * (8 * 7 / 8 - 8 / 4 * 1 / 2)  # gathered twice in bf16, reduced in fp32
    assert whole.share_bytes - spread.share_bytes == pytest.approx(sent)
    assert spread.expert_bytes == 4 * 3 / 4 * (4 * 2 * 1024 * 2 * 256 * 2 + 12 * 8) and spread.expert_messages == 4 * 5
    assert whole.expert_bytes == whole.expert_messages == 0


@pytest.mark.long
def test_what_copies_send_costs_what_their_link_does():
    """Of 64 copies on eight nodes the slow link's time, of eight shares on one the fast one's, whatever lies further
    out: 8 bytes a parameter and 63 / 64 of it, where nothing of it overlaps."""
    model = shapes()
    total = sum(parameter.numel() for parameter in model.parameters())
    device = DEVICES["h100"]
    load, alone = Load(64, context=1, batch=1, microbatches=1), {"pp": 1, "tp": 1}
    (one,), (two,) = (plan(model, load, dp=dp, shard=64 // dp, **alone) for dp in (64, 8))
    assert device.node == 8 and one.share_bytes == pytest.approx(8 * total * 63 / 64, rel=1e-3)
    seconds = 64 / one.tokens_per_s
    assert seconds == pytest.approx(one.share_bytes / device.outside, rel=0.02)
    inside = two.share_bytes - 8 * total / 8 * 7 / 8
    assert 64 / two.tokens_per_s == pytest.approx(inside / device.inside + total * 7 / 8 / device.outside, rel=0.05)


@pytest.mark.long
def test_a_plan_has_a_row_for_standard_and_says_what_it_assumes(capsys):
    size = json.dumps({**SHAPE, "num_hidden_layers": 2})
    main(["plan", size, "--gpus", "32", "--pp", "1", "--tp", "1", "--rows", "2"])
    shown = capsys.readouterr().out
    assert "standard" in shown and "longer" in shown and "h100 3,350" in shown and shown.count("read bytes") == 1
    main(["plan", size, "--gpus", "2", "--pp", "1", "--dp", "2", "--json"])
    planned = json.loads(capsys.readouterr().out)
    (row,), base = planned["layouts"], planned["standard"]
    assert base["tokens_per_s"] > row["tokens_per_s"] and base["dp"] == row["dp"] == 2


@pytest.mark.long
def test_micro_batches_that_were_not_given_are_as_many_as_the_stages_need(capsys):
    size = json.dumps({**SHAPE, "num_hidden_layers": 24})
    main(["plan", size, "--gpus", "24", "--pp", "24", "--schedule", "1f1b", "--json"])
    assert json.loads(capsys.readouterr().out)["layouts"][0]["bubble"] == 23 / 47
    with pytest.raises(SystemExit):
        main(["plan", size, "--gpus", "24", "--pp", "24", "--schedule", "1f1b", "--microbatches", "16"])
    assert "16 micro-batches" in capsys.readouterr().err


def test_micro_batches_in_flight():
    assert in_flight("1f1b", 4, 1, 16) == [{(4,)}, {(3,)}, {(2,)}, {(1,)}]
    assert in_flight("gpipe", 2, 1, 16) == [{(16,)}, {(16,)}]
    assert [max(map(sum, moments)) for moments in in_flight("interleaved", 2, 2, 8)] == [5, 3]
    assert in_flight("interleaved", 2, 2, 10**9) == in_flight("interleaved", 2, 2, 64), "what recurs is counted once"


@pytest.mark.long  # three minutes on a busy machine
def test_kimi_k3_is_planned(capsys):
    flags = ["--gpus", "4096", "--gpu", "b200", "--settings", "block_size=24", "--microbatches", "1", "--json"]
    main(["plan", "k3-2.8t", "--vocab-size", "163840", *flags, "--gradient-checkpointing", "layer"])
    planned = json.loads(capsys.readouterr().out)
    rows = planned["layouts"]
    assert planned["parameters"] == pytest.approx(2.8e12, rel=0.01)
    assert rows[0]["fits"] and rows[0]["states"] < 192e9
    main(["plan", "100m", "--gpus", "4", "--rows", "2"])
    assert "0.0713 billion parameters on 4 h100" in capsys.readouterr().out


def test_a_misspelt_size_is_not_looked_up_on_the_hub(monkeypatch, capsys):
    def looked_up(name, patterns):
        raise UserError(f"{name} was looked up")

    monkeypatch.setattr("attnres.models.model_files.fetch", looked_up)
    for name, said in {"kimi-nan": "did you mean 'kimi-nano'", "7B": "'7b'", "gpt2": "gpt2 was looked up"}.items():
        with pytest.raises(SystemExit):
            main(["plan", name])
        assert said in capsys.readouterr().err


@pytest.mark.long
def test_models_of_the_hub_are_planned_from_their_config_alone(tmp_path, monkeypatch, capsys):
    described: Any = KimiLinearConfig(num_hidden_layers=27)
    described.save_pretrained(tmp_path)
    monkeypatch.setattr("attnres.models.model_files.fetch", lambda name, patterns: tmp_path)
    flags = ["--gpus", "64", "--context", "8192", "--settings", "block_size=6", "--rows", "1"]
    main(["plan", "moonshotai/Kimi-Linear-48B-A3B-Instruct", *flags])
    assert "49.1 billion parameters on 64 h100, residual block" in capsys.readouterr().out


@pytest.mark.long
def test_models_of_folders_and_of_runs_are_planned_from_their_config_alone(folders, tmp_path, capsys):
    main(["plan", str(folders["full"]), "--gpus", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["layouts"]
    main(["plan", str(folders["plain"]), "--gpus", "2"])
    assert "residual block" in capsys.readouterr().out
    run = tmp_path / "run"  # finished: its own config.json is not the model's
    run.mkdir()
    (run / "config.json").write_text('{"model": {}, "optim": {}}')
    with pytest.raises(SystemExit):
        main(["plan", str(run), "--gpus", "2"])
    assert "is not finished and has no model yet" in capsys.readouterr().err
    shutil.copytree(folders["full"], run / "model")
    main(["plan", str(run), "--gpus", "2"])
    assert "residual full" in capsys.readouterr().out
    with pytest.raises(UserError, match="has the residual 'full': leave residual and settings out"):
        build_shapes(folders["full"], "block")
    with pytest.raises(SystemExit):
        main(["plan", str(folders["full"]), "--vocab-size", "9"])
    assert "is a model, which has a vocabulary" in capsys.readouterr().err


@pytest.mark.quick("numbers[01]*")
@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"pp": 3}, "no layout of 8 GPUs has .* pp 3"),
        ({"pp": 8, "schedule": "zbw"}, "did you mean 'zbv'"),
        ({"pp": 4, "schedule": "1f1b", "shard": 2}, "2 micro-batches"),
        ({"ep": 2}, "ep is 2 and .* no layers of stacked experts"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, said):
    with pytest.raises(UserError, match=said):
        plan(shapes(), Load(8, microbatches=2), **numbers)


@pytest.mark.long
def test_stages_are_balanced_by_measured_times(capsys, monkeypatch):
    """A layer that is slower than its multiplications say gets a stage of fewer layers."""
    size = {"family": "qwen3", "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48}
    model = build(size, "block", vocab_size=61)
    parts, seconds, passed = [*model.depth_layers, model.lm_head], [1, 1, 1, 1, 1, 1, 5, 1, 8], [0]
    for part, takes in zip(parts, seconds, strict=True):

        def take(*_, takes=takes):
            passed[0] += takes if passed[0] > 20 else 7  # a first pass takes longer and is not counted

        part.register_forward_hook(take)
    hooks = [len(part._forward_hooks) for part in parts]
    with monkeypatch.context() as patch:
        patch.setattr("attnres.scale.cut.now", lambda _: passed[0])
        times, head = layer_times(model, batch=1, tokens=8, rounds=1)
    assert [*times, head] == seconds
    assert [len(part._forward_hooks) for part in parts] == hooks
    assert all(p.grad is None for p in model.parameters())
    (row,) = plan(model, Load(2, context=8), pp=2, schedule="1f1b", costs=(times, head))
    (even,) = plan(model, Load(2, context=8), pp=2, schedule="1f1b")
    assert (row.layers, even.layers) == ((7, 1), (4, 4))  # 11 seconds, and 1 with a head of 8
    main(["plan", json.dumps(size), "--vocab-size", "61", "--gpus", "2", "--pp", "2", "--context", "8", "--measure"])
    out = capsys.readouterr().out
    assert "Measured here, forward: a layer" in out and "--pp 2 --pp-schedule 1f1b: --pp-layers" in out
