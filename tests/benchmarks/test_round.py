"""The command for a machine with a GPU, in small on this one: rows as they come, failures, and where it goes on."""

import argparse
import ast
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import round as gpu_round
import torch
import trained
from tapes import in_place_of_graphs
from torch.autograd import DeviceType

from attnres.ops import cpu
from attnres.residuals import make_residual
from attnres.training import loop

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Carries out the experiments whose names begin so, in this process; gives the rows that this added."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "text").symlink_to(corpus)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("ATTNRES_PEERS", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, os.environ.get(name, str(tmp_path)))
    rows = tmp_path / "rows" / "gpu.jsonl"

    def carry_out(*names: str, budget: float = 1e6, only: bool = True) -> list[dict[str, Any]]:
        before = len(gpu_round.read_rows(rows))
        words = ["--device", "cpu", "--in-process", "--rows", str(rows), "--pack", str(tmp_path / "pack")]
        assert gpu_round.main([*words, "--budget", str(budget), *(["--only", *names] if only else [])]) == 0
        return gpu_round.read_rows(rows)[before:]

    return carry_out


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured, as on CUDA."""
    in_place_of_graphs(monkeypatch)


@pytest.mark.long
def test_captured_steps_are_compared_and_timed(run: Run, captured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "step 100m graphs, bf16 parameters"
    experiment = dataclasses.replace(gpu_round.ROUNDS[name], variants=(gpu_round.BLOCK8,))
    monkeypatch.setitem(gpu_round.ROUNDS, name, experiment)
    with cpu.switched(on=False):
        equality, timed = run("equality"), run(name)
    assert [row.get("variant") for row in equality] == ["standard", "block", "full", None]
    assert all(row["equal"] and row["again"] == 0 and row["step"] == "captured" for row in equality[:3])
    assert all(len(row["losses"]["captured"]) == row["steps"] for row in equality[:3])
    assert [row["variant"] for row in timed[:-1]] == ["plain", gpu_round.BLOCK8]
    assert timed[0]["ratio"] == 1 and all(row["ms"] > 0 < row["host_ms"] for row in timed[:-1])
    assert {row["step"] for row in timed[:-1]} == {"captured"} and timed[-1]["ended"] == "done"


@pytest.mark.long
def test_what_cannot_be_captured_is_tried_in_the_next_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU none can; an error of one way leaves its traceback and its shapes."""
    import busy

    measure, tried = busy.measure, []

    def failing(labels: Any, size: Any, on: Any, *, mode: str, **how: Any) -> Any:
        tried.append(mode)
        if mode.startswith("graphs of"):
            raise RuntimeError(f"a kernel was refused in {mode}")
        return measure(labels, size, on, mode="eager" if mode == "reduce-overhead" else mode, **how)

    monkeypatch.setattr(busy, "measure", failing)
    experiment = dataclasses.replace(gpu_round.ROUNDS["step 100m graphs"], variants=("standard",))
    monkeypatch.setitem(gpu_round.ROUNDS, "step 100m graphs", experiment)
    rows = run("step 100m graphs")
    assert tried[:4] == ["graphs", "graphs of passes", "graphs of layers", "reduce-overhead"]
    failed = [row for row in rows if "error" in row and row["variant"] == "standard"]
    assert [row["error"].split()[-1] for row in failed] == ["passes", "layers"] and failed[0]["tokens"] == 32
    assert rows[0]["step"].startswith("eager: ") and "cpu" in rows[0]["step"]


def test_layers_are_captured_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attentions and MLPs are called with tensors alone, which is what CUDA captures; steps are as without."""
    import busy
    from step import Size, _qwen3

    from attnres.comparison.speed import StepOptions, training_steps

    calls: list[int] = []

    def capture(parts: Any, samples: Any) -> None:
        for part, sample in zip(parts, samples, strict=True):
            assert all(type(value) is torch.Tensor for value in sample)
            assert any(value.requires_grad for value in sample) and list(part.parameters())
            assert all(type(value) is torch.Tensor for value in part(*sample))
            part.register_forward_hook(lambda *_: calls.append(1))

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    size = Size(_qwen3(32, 4), 64, 2, 16)
    how: dict[str, Any] = {"vocab_size": 64, "seq_len": 16, "batch_size": 2, "size": size.model}
    for variant in ((None, {}), ("block", {"num_blocks": 2})):
        taken, expected = (training_steps({"a": variant}, StepOptions(**how))["a"] for _ in range(2))
        calls.clear()
        assert busy.graph_layers(taken).startswith("captured")
        expected()  # the step that graph_layers takes
        for _ in range(3):
            assert torch.equal(taken()[0], expected()[0])
        layers = size.model["num_hidden_layers"]
        assert len(calls) == 3 * 2 * layers


def test_a_run_is_trained_and_a_rule_that_is_not_there_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_round.ROUNDS, "no rule", gpu_round.Training(5, "no_such_rule"))
    made, over = run("train rates standard muon x1.0"), run("no rule")
    row, *_, ended = made
    assert row["val_loss"] == pytest.approx(row["val"][-1][1]) and len(row["windows"]) == 16
    assert row["final_loss"] == pytest.approx(sum(row["windows"]) / 16, abs=1e-4) and row["final_se"] > 0
    assert row["last_three"] == pytest.approx(sum(loss for _, loss in row["val"][-3:]) / 3) and row["in_context"] != 0
    # 6 steps of 2 x 16 tokens; 8,192 words of width 64, 4 layers of 18,624 and the last norm
    assert row["tokens_a_parameter"] == 6 * 2 * 16 / (8192 * 64 + 4 * 18_624 + 64)
    assert row["how"].startswith("eager: ") and ended["ended"] == "done"
    assert "no_such_rule" in over[0]["passed_over"] and over[-1]["ended"] == "done"


def test_a_run_of_the_largest_pair_is_scored_and_looked_at(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pack has evaluation sets and the run could be looked at; where not, a row says so."""
    name = "train ladder 42m block seed 0"
    *_, over, looked_at, ended = run(name)
    assert "EVALUATION" in over["passed_over"] and "by_depth" in looked_at and ended["ended"] == "done"
    sets = tmp_path / "pack" / "evaluation"
    sets.mkdir()
    (sets / "wikitext2_test.raw").write_text(" stream read write block\n" * 40)
    (sets / "lambada_openai.jsonl").write_text('{"context": "stream read", "continuation": "write"}\n' * 2)
    (sets / "hellaswag_val.jsonl").write_text('{"query": "read", "choices": ["block", "stream"], "gold": 1}\n' * 2)
    monkeypatch.setattr(loop, "_write_inspection", lambda run, model: None)
    made, scored, over, ended = run(name)
    assert made["variant"] == "block" and made["val_loss"] > 0 and ended["ended"] == "done"
    assert made["tokens_a_parameter_wanted"] == 5 > made["tokens_a_parameter"] > 0
    assert "inspection.json" in over["passed_over"]
    reads = looked_at["by_depth"]
    assert len(reads["routing"]["weights"]) == len(reads["reads"]) == 1 + len(reads["output_rms"])
    assert scored["scores"].keys() == trained.SCORES.keys()
    assert all(key in scored["scores"][task] for task, (key, _) in trained.SCORES.items())
    cells = shown(gpu_round.read_rows(tmp_path / "rows" / "gpu.jsonl"))
    assert cells["train ladder 42m block"] == ["5", "0.0", f"{made['final_loss']:.3f}", "1", "", "", ""]
    looked = cells[name]
    assert all("±" in score for score in looked[:3]) and re.fullmatch(r"\d of 4", looked[4]) and len(looked) == 7
    assert cells[name.replace("block", "standard")][0] == "not measured"


def shown(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The cells of the page of training runs, by what `--only` takes."""
    found = {}
    for line in filter(None, gpu_round.pages(rows)[gpu_round.TRAINED].splitlines()):
        name, *cells = line.removesuffix("|").split("|")[1:]
        found[name.strip(' `"')] = [cell.strip() for cell in cells]
    return found


def test_training_runs_are_compared_over_seeds() -> None:
    """Those of one optimizer, rate, size and length; the first seed of standard and Block is that of the rates. By
    hand: differences of -0.06 and -0.04 leave a deviation of 0.01 with one degree of freedom, whose t is 12.706."""
    values = {
        "train rates standard muon x1.0": 3.5,
        "train table standard seed 1": 3.52,
        "train rates block:num_blocks=8 muon x1.0": 3.44,
        "train table block:num_blocks=8 seed 1": 3.48,
        "train rates block:num_blocks=8 muon x2.0": 3.4,
        "train ladder 8.4m standard seed 0": 4.0,
        "train ladder 8.4m full seed 0": 4.01,
    }
    rows: list[dict[str, Any]] = [{"round": name, "final_loss": loss, "val": []} for name, loss in values.items()]
    rows += [{"round": "train table dca seed 0", "passed_over": "there is no rule"}]
    rows += [{"round": "train table full seed 0", "ended": "stopped after 90 s"}]
    found = shown(rows)
    assert found["train rates block:num_blocks=8 muon x1.0"] == ["3.460", "2", "−0.050 (−0.177 to +0.077)"]
    assert found["train rates block:num_blocks=8 muon x2.0"] == ["3.400", "1", ""]
    assert found["train table block:num_blocks=8"] == ["3.460", "2", "−0.050 (−0.177 to +0.077)", "", "–"]
    assert found["train table standard"] == ["3.510", "2", "", "", "3.444, 3.199, 2.841, 2.475"]
    assert found["train ladder 8.4m full"][2:5] == ["4.010", "1", "+0.010 (one seed)"]
    assert found["train table dca"][0] == "passed over" and found["train table full"][0] == "stopped after 90 s"
    assert found["train table mhc"] == ["not measured", "", "", "", "−0.062, −0.050, −0.040, −0.029"]
    # A change of a rule stands beside that rule as well; what was not asked beforehand has a wider interval.
    for rule, losses in {"full": (3.44, 3.48), "full:window=8": (3.54, 3.58)}.items():
        rows += [
            {"round": f"train table {rule} seed {seed}", "final_loss": loss, "val": []}
            for seed, loss in enumerate(losses)
        ]
    found = shown(rows)
    (asked, low, high), (changed, lower, higher) = (
        [float(part.replace("−", "-")) for part in re.findall(r"[+−]?\d\.\d{3}", cell)]
        for cell in (found["train table full"][3], found["train table full:window=8"][3])
    )
    assert found["train table full:window=8"][3].startswith("`full`: +0.100") and changed == 0.1
    assert found["train table full"][3].startswith("`block:num_blocks=8`: 0.000") and asked == 0
    assert higher - lower > 2 * (high - low) > 0


def test_a_rule_s_name_asks_for_that_rule_alone() -> None:
    """Of all its seeds; the beginning of a name for all that begin with these words."""
    asked = {"train table full": ["train table full seed 0", "train table full seed 1"]}
    asked["step 100m compile"] = ["step 100m compile+graphs"]
    asked["step 100m graphs"] = ["step 100m graphs"]
    for name, expected in asked.items():
        assert [each for each in gpu_round.ROUNDS if gpu_round._asked(each, [name])] == expected


def test_a_ladder_s_runs_say_what_they_were_trained_on_and_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens wanted and reached; the standard model's steps over the rule's at the lowest loss that both have measured,
    400 / 200 and 400 / 320, and that over the FLOPs of a token."""
    standard, full = "train ladder 8.4m standard", "train ladder 8.4m full"
    base = [[100, 5.0], [200, 4.5], [400, 4.0]]
    curves = {f"{standard} seed 0": base, f"{full} seed 0": [[100, 4.8], [200, 4.0], [400, 3.8]]}
    curves |= {f"{standard} seed 1": base, f"{full} seed 1": [[100, 4.8], [320, 4.0], [400, 3.9]]}
    rows = [
        {"round": name, "val": val, "final_loss": val[-1][1], "tokens_a_parameter": 6.41}
        for name, val in curves.items()
    ]
    monkeypatch.setattr(gpu_round.Training, "more_flops", lambda self: 1.25)
    found = shown(rows)
    assert found[standard] == ["20", "6.4", "4.000", "2", "", "", ""]
    assert found[full] == ["20", "6.4", "3.850", "2", "−0.150 (−0.785 to +0.485)", "2.00, 1.25", "1.60, 1.00"]
    assert "1.25, by its fit" in next(line for name, line in found.items() if "paper" in name)
    run = gpu_round.ROUNDS[f"{full} seed 0"]
    assert run.tokens(10**6, 10**5) == 2 * 10**6 and run.tokens(10**6, 10**6) == 3 * 10**6
    assert gpu_round.Training(0, "full").tokens(10**6, 10**5) == 10**6


def test_more_flops_are_those_of_the_reads() -> None:
    """Full at 42 M: reads of 1 to 25 sources of width 512 take 4.8 operations a value. Weights: 12 layers with queries
    and outputs of 512 x 512, keys and values of 512 x 256, three matrices of 512 x 1536, and the head."""
    weights = 12 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1536) + 8192 * 512
    standard = 3 * (2 * weights + 12 * 4 * 512 * 512)
    more = gpu_round.Training(0, "full").more_flops()
    assert more == pytest.approx(1 + 3 * 4.8 * 512 * sum(range(1, 26)) / standard, abs=2e-4)


def test_reads_and_outputs_by_depth_are_summed_up() -> None:
    """From the third layer on. Newest: 3 x 0.4 of attention, 3 x 0.7 of the MLP; embedding: 3 x 0.5 and 3 x 0.1."""
    reads = {"attention 0": [1.0], "mlp 0": [0.9, 0.1], "attention 1": [0.9, 0.1], "mlp 1": [0.8, 0.1, 0.1]}
    reads |= {"attention 2": [0.5, 0.1, 0.4], "mlp 2": [0.1, 0.2, 0.7], "output": [0.2, 0.8]}
    made = {"routing": {"reads": [*reads], "weights": [*reads.values()]}, "output_rms": [1, 1, 2, 4, 8, 8, 3, 5]}
    assert trained.by_depth("block", made) == ["1.20, 2.10", "1 of 2", "1.50, 0.30", "4.00"]
    assert trained.by_depth("standard", made) == ["–", "–", "–", "4.00"]


def test_the_page_of_training_runs_stays_short_when_all_are_measured(tmp_path: Path) -> None:
    names = [f"{kind} {layer}" for layer in range(12) for kind in ("attention", "mlp")]
    routing = {"reads": names, "weights": [[0.1] * 9] * len(names)}
    rows = []
    for name, run in gpu_round.ROUNDS.items():
        if isinstance(run, gpu_round.Training):
            loss = 3.5 + 0.01 * run.seed - 0.001 * (len(rows) % 7)
            row = {"round": name, "final_loss": loss, "tokens_a_parameter": 12.3}
            row["val"] = [[step, loss + 9 / step] for step in range(100, 1600, 150)]
            figure = {"value": 1.234, "standard_error": 0.012}
            row["scores"] = {task: {key: figure} for task, (key, _) in trained.SCORES.items()}
            rows.append(row | {"by_depth": {"routing": routing, "output_rms": [1.0] * 24}})
    page, tables = tmp_path / "one_gpu.md", gpu_round.pages(rows)[gpu_round.TRAINED]
    page.write_bytes(gpu_round.TRAINED.read_bytes())
    gpu_round.write_page(tables, page)
    assert "not measured" not in tables and len(page.read_bytes()) <= 12_288


def test_every_training_run_builds_a_rule_of_its_own() -> None:
    """At its width and depth. Of one recipe and seed no two have the same settings, defaults among them."""
    from attnres.comparison.plan import parse_variant
    from attnres.residuals.registry import settings_in_full

    built, runs = dict[str, str](), dict[tuple[Any, ...], str]()
    for name, run in gpu_round.ROUNDS.items():
        if isinstance(run, gpu_round.Training):
            variant, (width, layers, *_) = parse_variant(run.variant), run.size
            with torch.device("meta"):
                residual = make_residual(variant.residual, 2 * layers, width, **variant.settings)
            settings = settings_in_full(variant.residual, variant.settings)
            if variant.residual == "block":  # of so many blocks, or so large ones
                settings |= {"num_blocks": None, "block_size": residual.block_sizes}
            rule = json.dumps([variant.residual, settings], sort_keys=True)
            assert runs.setdefault((run.recipe, run.seed, rule), name) == name
            if " table " in name:
                assert built.setdefault(rule, run.variant) == run.variant
    assert {*built.values()} == {*trained.TABLE}
    assert {rule for rule, _ in trained.TABLE.values()} <= {"", *trained.TABLE}


def test_experiments_are_listed_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With what became of them on any device, where the sources are today's."""
    rows = tmp_path / "gpu.jsonl"
    for hashed, ended in (("others", "failed"), (gpu_round.kernels_hash(), "done")):
        gpu_round.add_row(rows, {"round": "held", "of": {"kernels": hashed, "device": "H200"}, "ended": ended})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ["--list", "--rows", str(rows), "--pack", str(tmp_path)]
    assert gpu_round.main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(gpu_round.ROUNDS)
    assert (
        sum("not measured" in line for line in said) == len(said) - 1
        and sum("done, H200" in line for line in said) == 1
    )
    with pytest.raises(SystemExit):
        gpu_round.main([*words, "--only", "nothing"])


@pytest.mark.long
def test_the_whole_command_ends_with_rows_of_each_experiment(
    run: Run, captured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the size for trying it, its steps captured; the compiler and the tests of a GPU are left out. What needs a GPU
    says so. Of training runs, which are all alike at this size, there is one of each optimizer and one of a ladder."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    runs = ("train rates standard adamw x2.0", "train ladder 3m block seed 1", "train table full seed 0")
    # In two experiments variants differ in how they are computed; the others have one each.
    several = ("step 100m graphs", "step 100m eager, parallel streams")
    rounds = {}
    for name, each in gpu_round.ROUNDS.items():
        if isinstance(each, gpu_round.Steps) and name not in several:
            rounds[name] = dataclasses.replace(each, variants=each.variants[-1:])
        elif not isinstance(each, gpu_round.Tests) and (name in runs or not isinstance(each, gpu_round.Training)):
            rounds[name] = each
    monkeypatch.setattr(gpu_round, "ROUNDS", rounds)
    with cpu.switched(on=False):
        rows = run(only=False)
    wrong = {row["round"]: row.get("error") or row.get("ended") for row in rows if row.get("ended", "done") != "done"}
    assert not wrong and not [row["error"] for row in rows if "error" in row]
    assert [row["round"] for row in rows if "ended" in row] == list(gpu_round.ROUNDS)
    over = {row["round"] for row in rows if "passed_over" in row}
    assert {name.split()[0] for name in over} == {"held", "wrapper"}
    for name, experiment in gpu_round.ROUNDS.items():
        found = [row for row in rows if row["round"] == name and "ended" not in row]
        if isinstance(experiment, gpu_round.Steps):
            assert [row["variant"] for row in found] == ["plain", *experiment.variants], name
            assert experiment.mode in ("eager", "compile") or {row["step"] for row in found} == {"captured"}, name
        else:
            assert found, name
    assert run(only=False) == []


WRAPPER = """
aten = torch.ops.aten
flat_merge_row_0 = async_compile.triton('flat_merge_row_0', '''
def flat_merge_row(x_0, tokens):
    merge_row(x=(x_0, ), tokens=tokens)
''', device_str='cuda')

class Runner:
    def call(self, args):
        with torch.cuda._DeviceGuard(0):
            # Topologically Sorted Source Nodes: [merge], Original ATen: [torch.ops.attnres.merge]
            flat_merge_row_0.run(buf0, 16384, 16384, 1, 1, stream=stream0)
            triton_poi_fused_add_0.run(buf0, arg1_1, buf2, 8388608, stream=stream0)
            flat_merge_row_0.run(buf2, 16384, 16384, 1, 1, stream=stream0)
            extern_kernels.mm(buf2, arg2_1, out=buf3)
            buf4 = torch.ops.attnres.read_sealed.default([buf3], arg3_1)
"""
"""As Inductor writes it, shortened: with a call of an operator of ours, which there should be none of."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # as Inductor is imported
def test_what_inductor_writes_for_a_step_is_counted(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import step
    from torch._inductor import utils

    monkeypatch.setitem(step.SIZES, "100m", step.Size(step._qwen3(32, 4), 64, 2, 16))
    monkeypatch.setattr(utils, "run_and_get_code", lambda taken: (None, [WRAPPER, WRAPPER] if callable(taken) else []))
    experiment = gpu_round.ROUNDS["wrapper of a compiled step"]
    place = gpu_round.Place("cpu", False, tmp_path, tmp_path)
    rows = list(experiment.rows(place, []))
    assert [row.pop("variant") for row in rows] == list(experiment.variants)
    assert all(row == {"wrappers": 2, "launches": 6, "our_launches": 4, "our_operators": 2} for row in rows)
    assert not list(experiment.rows(place, [{"variant": label} for label in experiment.variants]))
    monkeypatch.setattr(utils, "run_and_get_code", lambda taken: (None, []))
    with pytest.raises(RuntimeError, match="no wrapper"):
        next(experiment.rows(place, []))
    assert "CUDA" in run("wrapper of a compiled step")[0]["passed_over"]


class _Parsed(Exception):
    pass


def test_scripts_take_the_words_that_they_are_given_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And experiments name variants, modes and sizes that there are."""
    import busy
    from step import SIZES

    parse = argparse.ArgumentParser.parse_args
    read = list[argparse.Namespace]()

    def parse_alone(self: argparse.ArgumentParser, *words: Any) -> Any:
        read.append(parse(self, *words))
        raise _Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    scripts = [each for each in gpu_round.ROUNDS.values() if isinstance(each, gpu_round.Script)]
    for script in scripts:
        with pytest.raises(_Parsed):
            gpu_round.run_script(script.script, [*script.words.split(), "--out", "x.json"])
    assert len(read) == len(scripts) > 5 and {str(options.out) for options in read} == {"x.json"}
    for experiment in gpu_round.ROUNDS.values():
        if isinstance(experiment, gpu_round.Steps | gpu_round.Wrapper):
            assert {*experiment.variants} <= {*busy.VARIANTS} and experiment.size in SIZES
        if isinstance(experiment, gpu_round.Steps):
            assert {*experiment.NEXT.get(experiment.mode, ()), experiment.mode} <= {*busy.MODES}


def test_it_goes_on_where_it_stopped(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What has ended with the same sources and versions is repeated where it is asked for alone, all of it."""
    made: list[str] = []

    @dataclasses.dataclass(frozen=True)
    class Counted:
        seconds: float
        name: str
        fails: bool = False

        def rows(self, place: Any, done: Any) -> Any:
            assert not done
            made.append(self.name)
            yield {"variant": "a", "value": float("nan")}
            if self.fails:
                raise ValueError("its cause")

    rounds = {"one": Counted(5, "one"), "two": Counted(5, "two", fails=True)}
    monkeypatch.setattr(gpu_round, "ROUNDS", rounds)
    rows = run(only=False)
    assert made == ["one", "two"] and [row.get("ended") for row in rows] == [None, "done", None, None, "failed"]
    assert "its cause" in rows[3]["error"] and rows[0]["value"] is None
    assert run(only=False) == [] and made == ["one", "two"]
    monkeypatch.setattr(gpu_round, "kernels_hash", lambda: "others")
    assert run(only=False, budget=5) == []
    assert "the budget is spent" in capsys.readouterr().out
    run(only=False)
    assert made == ["one", "two"] * 2
    assert [row.get("ended") for row in run("one")] == [None, "done"] and made[4:] == ["one"]
    with pytest.raises(SystemExit):
        run("three")


def test_rows_are_keyed_by_all_sources_that_a_step_runs() -> None:
    import busy
    from step import Size, _qwen3

    from attnres.comparison.speed import StepOptions, training_steps

    size, ours, ran = Size(_qwen3(32, 4), 64, 2, 16), str(gpu_round.ROOT / "attnres"), set[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(ours):
            ran.add(frame.f_code.co_filename)

    shape: dict[str, Any] = {"vocab_size": 64, "seq_len": 16, "batch_size": 2, "loss": "chunked"}
    options = StepOptions(size.model, optim=busy.OptimConfig(optimizer="muon"), **shape)
    for step in training_steps(
        {name: busy.VARIANTS[name] for name in ("standard", gpu_round.BLOCK8)}, options
    ).values():
        step()  # which also imports what is imported late
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert len(ran) > 15 and ran <= {str(path) for path in gpu_round.hashed()}


def test_a_cut_line_is_no_row_and_loses_none(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    gpu_round.add_row(file, {"a": 1})
    file.write_text(file.read_text() + '{"a": 2')
    gpu_round.add_row(file, {"a": 3})
    assert gpu_round.read_rows(file) == [{"a": 1}, {"a": 3}]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is needed can be imported."""
    monkeypatch.setattr(gpu_round, "broken", lambda pack: None)


@pytest.mark.usefixtures("run")
def test_a_module_that_cannot_be_imported_is_named_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One that is missing, or there and broken; one that hangs; one that ends the process."""
    site = tmp_path / "pack" / "site"
    site.mkdir()
    broken = {"none": "", "half": "raise OSError('no library')", "hangs": "import time; time.sleep(60)"}
    for name, text in (broken | {"ends": "import os; os._exit(9)"}).items():
        (site / f"{name}_here.py").write_text(text)
    expected = {"absent": "No module named 'absent_here'", "half": "no library", "hangs": "5 s", "ends": "status 9"}
    for name, why in expected.items():
        monkeypatch.setattr(gpu_round, "NEEDED", ("none_here", f"{name}_here"))
        monkeypatch.setattr(gpu_round, "IMPORTS", 5.0 if name == "hangs" else 60.0)
        with pytest.raises(SystemExit):
            gpu_round.main(["--device", "cpu", "--pack", str(tmp_path / "pack")])
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"{name}_here" in said and why in said
    monkeypatch.setattr(gpu_round, "NEEDED", ("none_here",))
    assert gpu_round.broken(tmp_path / "pack") is None


@pytest.mark.usefixtures("whole")
def test_a_machine_without_a_gpu_is_told_so_before_anything(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        gpu_round.main([])
    assert ended.value.code == 2 and "device cuda" in capsys.readouterr().err


def test_rows_of_a_cpu_lie_where_no_page_is_made_of_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_round, "ROUNDS", {"one": gpu_round.Training(50, "no_such_rule")})
    for name in ("ROWS", "TRIED"):
        monkeypatch.setattr(gpu_round, name, tmp_path / name)
    assert gpu_round.main(["--device", "cpu", "--in-process"]) == 0
    assert len(gpu_round.read_rows(tmp_path / "TRIED")) == 2 and not (tmp_path / "ROWS").exists()


def test_compiled_kernels_go_from_a_machine_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The newest first, and no more than fits; what a machine has compiled itself stays."""
    ours, theirs, packed = tmp_path / "ours", tmp_path / "theirs", tmp_path / "theirs" / "caches.tar.gz"
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("ATTNRES_PEERS", "HF_HUB_OFFLINE", "TRITON_CACHE_AUTOTUNING", *gpu_round.CACHES):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    for age, name in enumerate(("triton/new", "inductor/old")):
        (ours / name).mkdir(parents=True)
        (ours / name / "kernel.cubin").write_bytes(random.Random(age).randbytes(200_000))
        os.utime(ours / name, (1000 - age, 1000 - age))
    # Triton names a kernel's files by their whole paths, and misses them all where the folder is another.
    files = {name: str(ours / "triton/new" / name) for name in ("kernel.cubin", "kernel.ttir")}
    (ours / "triton/new/kernel.ttir").write_text("an intermediate form")
    (ours / "triton/new/__grp__kernel.json").write_text(json.dumps({"child_paths": files}))
    os.utime(ours / "triton/new", (1000, 1000))
    assert gpu_round.main(["--pack", str(ours), "--caches", str(packed)]) == 0
    monkeypatch.setattr(gpu_round, "CACHED", 100_000)
    assert gpu_round.main(["--pack", str(ours), "--caches", str(tmp_path / "small.tar.gz")]) == 0
    assert [" 2 compiled" in line or " 1 of 2 " in line for line in capsys.readouterr().out.splitlines()] == [True] * 2
    with tarfile.open(tmp_path / "small.tar.gz") as archive:
        assert sorted(archive.getnames()) == [
            f"triton/new{name}" for name in ("", "/__grp__kernel.json", "/kernel.cubin")
        ]
    # The pack itself comes as an archive beside which its folder, with what was sent before, may be there.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "here.py").touch()
    with tarfile.open(tmp_path / "theirs.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "site", "theirs/site")
    for _ in range(2):
        gpu_round.use_pack(theirs)
        assert (theirs / "site" / "here.py").is_file() and str(theirs / "site") in sys.path
        assert (theirs / "triton/new/kernel.cubin").read_bytes() == (ours / "triton/new/kernel.cubin").read_bytes()
        group = json.loads((theirs / "triton/new/__grp__kernel.json").read_text())
        assert group == {"child_paths": {"kernel.cubin": str(theirs / "triton/new/kernel.cubin")}}
        packed.write_bytes(b"of another machine")
    assert os.environ["TRITON_CACHE_DIR"] == str(theirs / "triton")


def test_tests_that_do_not_begin_are_no_tests_that_passed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(words: list[str], plugins: Any) -> pytest.ExitCode:
        print("ImportError while loading conftest", file=sys.stderr)
        return pytest.ExitCode.USAGE_ERROR

    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.setattr(os, "chdir", lambda folder: None)
    rows = run("tests of compiled models")
    assert "loading conftest" in rows[0]["error"] and rows[-1]["ended"] == "failed"


def test_what_experiments_import_is_on_a_machine_with_pytorch_or_in_the_pack() -> None:
    """When modules are loaded: what is imported inside a function may be left out there."""
    root, come_with = gpu_round.ROOT, {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "yaml"}
    makefile = (root / "Makefile").read_text("utf-8")
    packed = {
        name.replace("-", "_") for line in re.findall(r"^PACKED := (.*)$", makefile, re.M) for name in line.split()
    }
    assert {*gpu_round.NEEDED} <= come_with | packed | {"attnres.training"}
    folders = [root / "benchmarks", root / "tests", root / "experiments", root]
    scripts = [each.script for each in gpu_round.ROUNDS.values() if isinstance(each, gpu_round.Script)]
    waiting = [root / "benchmarks" / name for name in ("round.py", *scripts)]
    waiting += [*(root / "tests" / "gpu").glob("*.py"), root / "tests" / "conftest.py"]
    inside = ["round.py", *gpu_round.FIGURES]
    waiting += [gpu_round.EXPERIMENTS / name for name in gpu_round.FIGURES]
    for package in ("data", "models", "training"):
        waiting += (root / "attnres" / package).glob("*.py")
    seen, theirs = set(waiting), dict[str, str]()
    while waiting:
        file = waiting.pop()
        for name in imported(file, inside=file.name in inside):
            paths = [folder.joinpath(*name.split(".")) for folder in folders]
            ours = {path for at in paths for path in (at.with_suffix(".py"), at / "__init__.py") if path.is_file()}
            waiting += ours - seen
            seen |= ours
            package = name.split(".")[0]
            if not any((folder / f"{package}.py").is_file() or (folder / package).is_dir() for folder in folders):
                theirs[package] = f"{file.relative_to(root)} imports {name}"
    missing = theirs.keys() - come_with - packed - {"huggingface_hub", *sys.stdlib_module_names}
    assert len(seen) > 100 and {"torch", "rich"} <= theirs.keys() and not missing, [theirs[name] for name in missing]


def imported(file: Path, *, inside: bool) -> Iterator[str]:
    """What a file imports when it is loaded, and with `inside` in its functions: modules, and parts of them."""

    def running(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (child.module or "", *(f"{child.module}.{alias.name}" for alias in child.names))
            elif isinstance(child, ast.If) and re.search("TYPE_CHECKING|find_spec", ast.unparse(child.test)):
                continue
            elif inside or not isinstance(child, ast.FunctionDef):
                yield from running(child)

    return running(ast.parse(file.read_text("utf-8")))


@pytest.mark.usefixtures("whole")
def test_an_experiment_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the row says so, unless the budget was what stopped it. What was compiled until then lets a second call get
    further; a third does not try. Each row is in the copy as well."""
    rows, copy = tmp_path / "gpu.jsonl", tmp_path / "out" / "gpu.jsonl"
    monkeypatch.setattr(gpu_round, "facts", lambda device: {})
    monkeypatch.setattr(gpu_round, "ROUNDS", {"long": dataclasses.replace(gpu_round.ROUNDS["tests"], seconds=0.01)})
    monkeypatch.setattr(sys, "path", [*sys.path])
    for _ in range(3):
        assert gpu_round.main(["--device", "cpu", "--rows", str(rows), "--copy", str(copy)]) == 0
    said = [{"stopped": "stopped after 0 s"}, {"ended": "stopped after 0 s"}]
    assert gpu_round.read_rows(rows) == [{"round": "long", "of": {}} | each for each in said]
    assert copy.read_text() == rows.read_text()


@pytest.mark.usefixtures("whole")
def test_no_experiment_begins_with_less_than_half_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shorter one does."""
    rows, started = tmp_path / "gpu.jsonl", list[str]()
    monkeypatch.setattr(gpu_round, "facts", lambda device: {})
    experiments = {name: gpu_round.Training(limit, "standard") for name, limit in (("long", 300), ("short", 60))}
    monkeypatch.setattr(gpu_round, "ROUNDS", experiments)

    def process(words: Any, timeout: float, check: bool) -> Any:
        started.append(words[words.index("--one") + 1])
        gpu_round.add_row(rows, {"round": started[-1], "of": {}, "ended": "done"})
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", process)
    assert gpu_round.main(["--device", "cpu", "--rows", str(rows), "--budget", "100"]) == 0
    assert started == ["short"] and "long: too little time is left" in capsys.readouterr().out


def test_kernels_of_the_first_timed_steps_are_compiled_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variant's in a process; what takes too long is ended, and waited for once."""
    begun: list[list[str]] = []
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: begun.append(words) or start(sleeping, **how))
    place = gpu_round.Place("cuda", False, tmp_path, tmp_path)
    processes = gpu_round.warmed(list(gpu_round.ROUNDS), gpu_round.Command(place, {}, tmp_path / "gpu.jsonl"))
    names = ["step 100m graphs"] * 4 + ["step 0.6b graphs"] * 3
    labels = [label for name in dict.fromkeys(names) for label in gpu_round.ROUNDS[name].variants]
    assert [words[-2:] for words in begun] == [list(pair) for pair in zip(names, labels, strict=True)]
    ended = list(processes)
    gpu_round.wait_for(processes, 0.1)
    assert not processes and all(process.returncode for process in ended)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert gpu_round.main(["--device", "cpu", "--warm", "step 0.6b graphs", gpu_round.BLOCK8]) == 0


@pytest.mark.usefixtures("whole")
def test_another_process_goes_on_where_one_died(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as each adds a row; what took too long is left to the next call, if it added one."""
    rows = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(gpu_round, "facts", lambda device: {})
    monkeypatch.setattr(gpu_round, "ROUNDS", {name: gpu_round.Training(50, "standard") for name in ("died", "long")})
    started: list[str] = []

    def process(words: Any, timeout: float, check: bool) -> Any:
        name = words[words.index("--one") + 1]
        started.append(name)
        if started.count(name) < 3:
            gpu_round.add_row(rows, {"round": name, "of": {}, "variant": str(len(started))})
        if name == "long":
            raise subprocess.TimeoutExpired(words, timeout)
        return subprocess.CompletedProcess(words, -9)

    monkeypatch.setattr(subprocess, "run", process)

    def ended() -> dict[str, str]:
        assert gpu_round.main(["--device", "cpu", "--rows", str(rows)]) == 0
        return {row["round"]: row["ended"] for row in gpu_round.read_rows(rows) if "ended" in row}

    died = {"died": "died with status -9"}
    assert ended() == died and started == ["died"] * 3 + ["long"]
    assert ended() == died and ended() == died and ended() == died | {"long": "stopped after 50 s"}
    assert started == ["died"] * 3 + ["long"] * 4 and ended() and len(started) == 7


@pytest.mark.usefixtures("whole")
def test_what_a_script_measured_before_it_was_stopped_is_a_row(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of an earlier call is not."""
    file, words = tmp_path / "loss_cpu.json", ["--device", "cpu", "--rows", str(tmp_path / "gpu.jsonl")]
    script = gpu_round.Script(60, "loss.py", "--device cuda", "--device cpu")
    monkeypatch.setattr(gpu_round, "ROUNDS", {"loss": script})
    written: list[str] = []

    def process(words: Any, timeout: float, check: bool) -> Any:
        for text in written:
            file.write_text(text)
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(subprocess, "run", process)
    file.write_text('{"read": [1]}')
    os.utime(file, (0, 0))
    for text in ([], ['{"read": [2]}']):
        written[:] = text
        assert gpu_round.main([*words, "--only", "loss"]) == 0
    rows = gpu_round.read_rows(tmp_path / "gpu.jsonl")
    assert [(row.get("result"), row.get("stopped") or row.get("ended")) for row in rows] == [
        (None, "stopped after 60 s"),
        ({"read": [2]}, None),
        (None, "stopped after 60 s"),
    ]


def test_a_variant_that_lost_the_device_is_left_to_another_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which does not try again what failed, and goes on with the next way."""
    import busy

    tried: list[str] = []

    def failing(labels: Any, size: Any, on: Any, *, mode: str, **how: Any) -> Any:
        tried.append(mode)
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(busy, "measure", failing)
    monkeypatch.setattr(gpu_round, "is_lost", lambda device: True)
    experiment = dataclasses.replace(gpu_round.ROUNDS["step 100m graphs"], variants=("standard",))
    monkeypatch.setitem(gpu_round.ROUNDS, "step 100m graphs", experiment)
    for count in (1, 2):
        rows = run("step 100m graphs")
        assert len(tried) == count and not any("ended" in row for row in rows)
        assert (
            "illegal memory" in rows[0]["error"]
            and rows[0]["mode"] == tried[-1] == experiment.NEXT["graphs"][count - 1]
        )


class Profiled:
    """A profile of two steps, as one on CUDA has it: a kernel, a range that the host named, what the host did."""

    def __init__(self, **how: Any) -> None:
        on = (DeviceType.CUDA, DeviceType.CUDA, DeviceType.CPU)
        self.all = [
            SimpleNamespace(
                name=name, device_type=device, is_user_annotation=name == "named", self_device_time_total=3e3
            )
            for name, device in zip(("merge_row", "named", "aten::mm"), on, strict=True)
            for _ in range(4)
        ]

    def __enter__(self) -> "Profiled":
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def events(self) -> list[Any]:
        return self.all


def test_what_a_gpu_is_asked_is_asked_of_one_that_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment at its own size and on its own device, but for the models, which are tiny and on this one."""
    import busy
    import step

    lost: list[int] = []

    def synchronize(device: Any = None) -> None:
        if lost:
            raise RuntimeError("an illegal memory access")

    answers: dict[str, Any] = {"get_device_name": "NVIDIA H200", "memory_allocated": 100, "max_memory_allocated": 350}
    answers |= {"empty_cache": None, "reset_peak_memory_stats": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(busy, "profile", Profiled)
    made, timed = busy.training_steps, busy.in_turn

    def here(variants: Any, options: Any) -> Any:
        assert options.device == "cuda" and options.dtype == "bf16"
        if "full" in variants:
            lost.append(1)
            synchronize()
        return made(variants, dataclasses.replace(options, device="cpu"))

    monkeypatch.setattr(busy, "training_steps", here)
    monkeypatch.setattr(
        busy, "in_turn", lambda calls, *, rounds, seconds: timed(calls, rounds=1, seconds=seconds / 100)
    )
    monkeypatch.setitem(step.SIZES, "100m", step.Size(step._qwen3(32, 4), 64, 2, 16))
    chosen = dataclasses.replace(gpu_round.ROUNDS["step 100m eager"], batch=3, length=8)
    monkeypatch.setitem(gpu_round.ROUNDS, "played", chosen)
    place = gpu_round.Place("cuda", False, tmp_path, tmp_path)
    command = gpu_round.Command(place, gpu_round.facts("cuda"), tmp_path / "gpu.jsonl")
    command.run("played")
    *timed, plain, block, failed, ended = command.done("played")
    assert [plain["variant"], block["variant"], failed["variant"]] == ["plain", gpu_round.BLOCK8, "full"]
    assert [row["variant"] for row in timed] == ["plain", gpu_round.BLOCK8] and "busy_ms" not in timed[0]  # first
    for row in (plain, block):
        assert row["of"]["device"] == "NVIDIA H200" and row["tokens"] == 24 and 0 < row["mfu"] < 1
        assert row["peak_bytes"] == 250 and row["kernels"] == [{"name": "merge_row", "ms": 6.0, "calls": 2.0}]
        assert row["busy_ms"] == 6.0 and row["launches"] == 2.0
    assert "illegal memory" in failed["error"] and "illegal memory" in ended["error"] and not command.ended("played")
    assert gpu_round.is_lost("cuda") and not gpu_round.is_lost("cpu")
    lost.clear()
    assert not gpu_round.is_lost("cuda")


def test_the_page_has_the_rows(tmp_path: Path) -> None:
    of = {"device": "H200"}
    base = {"round": "step 100m graphs", "of": of, "step": "captured"}
    plain = {**base, "variant": "plain", "ms": 30.0, "host_ms": 2.0, "busy_ms": 29.0, "peak_bytes": 100}
    block = {**base, "variant": gpu_round.BLOCK8, "ms": 33.0, "ratio": 1.1, "ratio_quartiles": [1.09, 1.12]}
    block |= {"host_ms": 3.0, "busy_ms": 31.9, "peak_bytes": 105}
    page = gpu_round.page([plain, block | {"ratio": 9.0}, block])
    assert "| 1.08 | 1.100 [1.090, 1.120] | 1.500 | 1.100 | 1.050 | captured, H200 |" in page
    assert page.count("not measured") == 3 + len(gpu_round.GOALS) - 1 + len(gpu_round.OTHERS)
    assert all(
        f'--only "{experiment}"' in page and experiment in gpu_round.ROUNDS for _, experiment, *_ in gpu_round.OTHERS
    )
    file = tmp_path / "page.md"
    file.write_text(f"before {gpu_round.MARKS[0]} old {gpu_round.MARKS[1]} after")
    gpu_round.write_page(page, file)
    assert page in file.read_text() and file.read_text().startswith("before") and file.read_text().endswith("after")


def test_the_page_has_what_scripts_have_found() -> None:
    rows: list[dict[str, Any]] = [{"round": "train rates standard adamw x1.0", "tokens_per_s": 5e5}]
    decode = {"decode": {"1": {"block": {"ratio": 0.9}}}, "prefill": {"8192": {"block": {"ratio": 1.01}}}}
    read = {"read": [{"stages": {"forward": {"ours": {"median_s": 4e-4}}}}]}
    stack = {
        "kinds": {"identity": {name: {"median_s": s} for name, s in (("ours", 3.0), ("fla", 2.0), ("standard", 1.0))}}
    }
    for experiment, result in (("prefill and decode", decode), ("kernels", read), ("peers", stack)):
        rows.append({"round": experiment, "result": result})
    table = gpu_round.others_table([row | {"of": {"device": "H200"}} for row in rows])
    found = [line.split(" | ")[2] for line in table.splitlines()[2:]]
    stacked = "fla, ours 1.500 of its time"
    assert found == [f"{f}, H200" for f in ("1.010", "0.900", "400 us", stacked, "500,000")] + ["not measured"]
    # A candidate that failed has a reason and no time.
    read["read"][0]["stages"]["forward"]["ours"] = {"reason": "OutOfMemoryError"}
    stack["kinds"]["identity"] = {"standard": {"median_s": 1.0}}
    table = gpu_round.others_table([row | {"of": {"device": "H200"}} for row in rows])
    assert table.count("failed or cut, its row says why, H200") == 2


def test_the_documentation_has_the_tables_of_the_rows_that_there_are() -> None:
    pages = gpu_round.pages(gpu_round.read_rows(gpu_round.ROWS))
    assert [path.name for path in pages] == ["kernels.md", "one_gpu.md"]
    assert all(tables in path.read_text("utf-8") for path, tables in pages.items())


def test_the_page_s_command_writes_readme_s_figures_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And where a module of theirs is not there it says so, and fails nothing."""
    for script in gpu_round.FIGURES:
        (tmp_path / script).write_text("print(__file__)")
    monkeypatch.setattr(gpu_round, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(gpu_round, "write_page", lambda tables, path: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("ATTNRES_PEERS", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert gpu_round.main(["--page"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / script) for script in gpu_round.FIGURES]
    (tmp_path / gpu_round.FIGURES[0]).write_text("import no_such_module")
    assert gpu_round.main(["--page"]) == 0
    assert "README's figures stay" in (said := capsys.readouterr().out) and "no_such_module" in said


def test_every_experiment_has_a_limit_and_the_first_nine_minutes_hold_what_decides() -> None:
    seconds, first = 0.0, []
    for name, experiment in gpu_round.ROUNDS.items():
        seconds += experiment.seconds
        if seconds <= 540:
            first.append(name)
    wanted = ["equality of captured steps", "step 100m graphs", "step 0.6b graphs", "step 100m compile+graphs"]
    assert first == ["tests", *wanted]
    json.dumps([dataclasses.asdict(experiment) for experiment in gpu_round.ROUNDS.values()])


def test_the_page_has_the_hosts_time_of_the_record() -> None:
    root = Path(gpu_round.__file__).resolve().parents[1]
    rows = json.loads((root / "benchmarks" / "results" / "host.json").read_text("utf-8"))["rows"]
    page = (root / "docs" / "explanation" / "kernels.md").read_text("utf-8")
    for name, variant in (("Block", "block"), ("Full", "full"), ("standard", "standard")):
        there, back = (round(rows[variant][way]["beyond_plain_us_a_sublayer"]) for way in ("forward", "backward"))
        time = re.escape(f"{there} {'+' if back > 0 else '-'} {abs(back)}")
        assert re.search(rf"\b{time}( microseconds a sublayer)? for {name}\b", page), name
