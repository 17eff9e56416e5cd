"""Each benchmark runs, small, and finds what it is there to find."""

import argparse
import importlib.metadata
import json
import re
from pathlib import Path

import decode
import generate
import harness
import loss
import muon
import pytest
import reads
import stack
import step
import torch
from naive import register_naive
from tapes import Tape, in_place_of_graphs
from transformers.utils import import_utils

from attnres.ops import cpu
from attnres.training import graphs

CPU = torch.device("cpu")


def _quiet(_: str) -> None:
    pass


def test_no_script_has_the_name_of_a_package():
    """Python looks in a script's folder first: Transformers took our `kernels.py` for the package `kernels`."""
    asked = Path(import_utils.__file__).read_text()
    packages = {*re.findall(r'_is_package_available\("(\w+)"', asked), *importlib.metadata.packages_distributions()}
    assert "kernels" in packages
    assert not packages & {script.stem for script in Path(harness.__file__).parent.glob("*.py")}


def test_candidates_take_turns_and_ratios_are_to_the_first():
    calls = []
    rows = harness.measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, seconds=0.0)
    assert rows["a"]["ratio"] == 1.0
    assert rows["a"]["rounds"] == rows["b"]["rounds"] == 3
    assert "".join(calls)[6:12] == "abbaab"  # one call each, two rounds of warm-up, then the order turns


def test_a_candidate_that_fails_is_a_row_with_its_reason():
    def broken():
        raise ValueError("not this width")

    rows = harness.measure({"a": broken, "b": lambda: None}, CPU, seconds=0.0, nbytes=8.0, copy=1e9)
    assert rows["a"] == {"reason": "ValueError: not this width"}
    assert rows["b"]["ratio"] == 1.0
    assert "not this width" in harness.lines(rows)


def test_progress_says_how_much_is_left(capsys):
    harness.progress("x", 1).advance(1, "part")
    assert capsys.readouterr().err == "x  1/1  part  left 0 s\n"


@pytest.mark.long
def test_kernels_times_reads_and_each_stage_of_a_block(tmp_path):
    shape, block = reads.Shape(16, 24, 3), reads.Shape(16, 24, 2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "copy_bandwidth", lambda device: 1e9)
        result = reads.run(CPU, torch.float32, (shape,), (block,), seconds=0.0, seed=0, compiled=False, say=_quiet)
    ours = result["read"][0]["stages"]["forward"]["ours"]
    assert ours["bytes"] == 4 * 16 * 24 * 4
    assert ours["max_error"] < 1e-5
    assert list(result["block"][0]["stages"]) == list(reads.STAGES)
    assert "ours (eager)" in result["block"][0]["stages"]["merges"]
    json.dumps(result, allow_nan=False)
    harness.bar_chart(tmp_path / "k.svg", reads.shares(result), "%", "title")
    assert (tmp_path / "k.svg").read_text().startswith("<?xml")


def test_a_block_of_reads_is_the_same_in_two_phases_and_read_by_read():
    inputs = reads.Inputs(3, 8, 16, CPU, torch.float64)
    queries = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = inputs.sources, queries, torch.ones(4, 16, dtype=torch.float64), 1e-6
    torch.testing.assert_close(reads.our_block(*arguments), reads.naive_block(*arguments), rtol=1e-9, atol=1e-9)


def test_muon_times_stacks_beside_one_matrix_after_the_other():
    rows = muon.run(muon.AllStacked, [torch.Size((24, 8))] * 3, CPU, seconds=0.0, seed=0)
    assert rows["torch"]["ratio"] == 1.0 and rows["stacks"]["rounds"] == rows["torch"]["rounds"]
    shapes = muon.shapes_of("nano")
    assert len(shapes) == 7 * 12 and set(shapes) == {(128, 128), (64, 128), (384, 128), (128, 384)}


@pytest.mark.long
def test_stack_times_only_networks_that_compute_the_same():
    sizes = {"sublayers": 5, "block_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "copy_bandwidth", lambda device: 1e9)
        result = stack.run(
            CPU, torch.float32, **sizes, tokens=80, width=16, seconds=0.0, seed=0, compiled=False, say=_quiet
        )
    for rows in result["kinds"].values():
        for label in ("ours", "standard", "full (ours)", "naive"):
            assert rows[label]["max_error"] < 1e-5, label
            assert rows[label]["median_s"] > 0
        assert set(rows) >= {peer.name for peer in stack.PEERS}


def test_stack_gives_no_time_to_a_network_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(stack, "relative_rms", lambda mine, exact: {"output": float("nan"), "gradient": 0.0})
    register_naive()
    x = torch.randn(8, 16)
    network = stack.Stack("norm", x, x, sublayers=2, block_size=1, seed=0, compiled=False, peers=[])
    assert not network.steps
    assert all(row["reason"].startswith("wrong") for row in network.rows.values())


def test_stack_begins_no_implementation_of_others_after_the_time_for_their_tuning():
    class Theirs(stack.Peer):
        name = "theirs"

    register_naive([Theirs()])
    x = torch.randn(8, 16)
    how = {"sublayers": 2, "block_size": 1, "seed": 0, "compiled": False, "peers": [Theirs()]}
    rows = [stack.Stack("norm", x, x, **how, until=until).rows["theirs"] for until in (0.0, float("inf"))]
    assert rows[0]["reason"].startswith("not begun") and not rows[1]["reason"].startswith("not begun")


@pytest.mark.long
def test_decode_leaves_the_cache_as_long_as_it_was():
    how = {"size": "nano", "context": 6, "prefill": 8, "graphs": False, "compiled": False, "seconds": 0.0, "seed": 0}
    result = decode.run(CPU, torch.float32, **how, batches=[2], say=_quiet)
    assert set(result["decode"]["2"]) == set(decode.VARIANTS) == set(result["prefill"]["8"])
    assert all("median_s" in row for row in result["decode"]["2"].values())


@pytest.mark.long
def test_decode_and_prefill_are_replayed_and_a_prefill_that_is_not_captured_says_why(monkeypatch):
    """A tape of operators stands for a CUDA graph; the last one is refused."""
    monkeypatch.setattr(Tape, "made", [])

    def graph(call):
        if len(Tape.made) == 5:
            raise RuntimeError("refused")
        return Tape(call)

    monkeypatch.setattr(graphs, "Graph", graph)
    how = {"size": "nano", "context": 6, "prefill": 8, "graphs": True, "compiled": False, "seconds": 0.0, "seed": 0}
    with cpu.switched(on=False):
        result = decode.run(CPU, torch.float32, **how, batches=[2], only=["block"], say=_quiet)
    rows = result["prefill"]["8"]
    assert set(rows) == set(result["decode"]["2"]) == {"plain", "standard", "block"}
    assert {label: row.get("not_captured") for label, row in rows.items()} == {
        "plain": None,
        "standard": None,
        "block": "RuntimeError: refused",
    }
    assert len(Tape.made) == 5 and all(tape.replays for tape in Tape.made)
    assert all("median_s" in row for row in (*rows.values(), *result["decode"]["2"].values()))


def test_generation_is_timed_beside_the_base_model_around_the_same_weights(monkeypatch):
    seen = {}

    def rate(model, ids, tokens):
        seen[type(model).__name__, getattr(model.config, "residual", None)] = model.get_input_embeddings().weight
        assert ids.shape == (1, 3) and tokens == 4
        return 10.0 if len(seen) == 1 else 5.0

    monkeypatch.setattr(generate, "decode_rate", rate)
    result = generate.run("nano", CPU, torch.float32, prompt=3, tokens=4, rounds=2, seed=0, say=_quiet)
    assert list(result["rows"]) == ["plain", *generate.VARIANTS] and result["family"] == "Qwen3ForCausalLM"
    assert {residual for _, residual in seen} == {None, "standard", "block", "full"}
    assert len({weight.data_ptr() for weight in seen.values()}) == 1
    assert all(row["rounds"] == 2 and row["ratio"] > 0 for row in result["rows"].values())


def test_a_decode_step_from_a_static_cache_is_the_model_without_a_cache():
    model = decode._models("nano", CPU, torch.float32, 16, 0)["block"]
    with torch.no_grad():
        run = decode.Step(model, 2, 6, 0)
        first = run()
        run.back()
        again = run()
        ids = torch.randint(decode.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
        plain = model(input_ids=ids, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-4)


def test_step_has_the_published_sizes_and_every_peer_has_a_row():
    assert set(step.SIZES) == {"nano-bench", "nano", "100m", "0.6b", "1.7b", "deep-narrow"}
    assert step.SIZES["deep-narrow"].sublayers == 96
    variants, reasons = step.variants_of("0.6b", "fp32", CPU)
    assert list(variants)[:5] == list(step.ON_LARGE)
    assert len(variants) + len(reasons) == 5 + len(step.PEERS)


def test_step_times_variants_of_a_small_model(monkeypatch):
    small = step.Size(step._qwen3(32, 2), 64, 2, 8)
    labels = ("plain", "standard", "full")
    monkeypatch.setattr(step, "variants_of", lambda *_: ({k: step.VARIANTS[k] for k in labels}, {"x": "y"}))
    monkeypatch.setattr(step.Run, "peak_of", lambda self, label: 100 if label == "plain" else 110)
    step.register_naive()
    run = step.Run("nano-bench", small, "fp32", CPU, False)
    result = run.measure(0.0, harness.progress("step", 2))
    assert list(result["variants"]) == list(labels)
    assert result["variants"]["plain"]["ratio"] == result["variants"]["standard"]["second_ratio"] == 1.0
    assert result["variants"]["full"]["peak_ratio"] == 1.1
    assert result["not_timed"] == {"x": "y"}
    rows: list[dict] = []
    without = run.measure(0.0, harness.progress("step", 0), peaked=False, keep=rows.append)
    assert rows == [without] and "peak_bytes" not in without["variants"]["full"] and "  -  " in step.show(without, {})
    shown = step.show(result, {"full": {"MB": 2.0}})
    assert "full" in shown
    assert "y" in shown


def test_a_step_is_timed_as_graphs_and_has_a_file_of_its_own(monkeypatch):
    """Tapes of operators stand for CUDA graphs."""
    tapes = in_place_of_graphs(monkeypatch)
    monkeypatch.setattr(
        step, "variants_of", lambda *_: ({k: step.VARIANTS[k] for k in ("plain", "standard", "full")}, {})
    )
    run = step.Run("nano-bench", step.Size(step._qwen3(32, 2), 64, 2, 8), "fp32", CPU, False, graphs=True)
    with cpu.switched(on=False):
        result = run.measure(0.0, harness.progress("step", 0), peaked=False)
    assert len(tapes) >= 2 and all(tape.replays for tape in tapes)
    assert all(row["median_s"] > 0 for row in result["variants"].values())
    commands = []
    monkeypatch.setattr(
        step.subprocess,
        "run",
        lambda command, **_: commands.append(command) or argparse.Namespace(returncode=0, stdout="7"),
    )
    assert run.peak_of("plain") == 7 and "--graphs" in commands[0]
    shape = {"device": "cuda", "sizes": ["100m"], "compile": False, "torch_reads": None}
    assert step.out_path(argparse.Namespace(graphs=True, **shape)).name == "step_cuda_100m_graphs.json"


def test_losses_of_a_large_vocabulary_are_timed_beside_those_of_all_logits(monkeypatch):
    monkeypatch.setattr(loss, "peaks_of", lambda kind, options: [300 if kind == "whole" else 200, 100])
    monkeypatch.setattr(loss, "SIZE", {**loss.SIZE, "hidden_size": 32, "num_hidden_layers": 2})
    options = argparse.Namespace(device="cpu", dtype="fp32", vocabulary=64, tokens=16, seconds=0.0)
    rows = loss.measure(options, ["whole", "chunked"])
    assert (rows["whole"]["ratio"], rows["whole"]["rounds"]) == (1, 3) and rows["chunked"]["median_s"] > 0
    assert rows["chunked"]["peak_ratio"] == pytest.approx(2 / 3) and rows["chunked"]["taken_ratio"] == 0.5
