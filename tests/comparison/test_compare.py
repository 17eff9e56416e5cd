"""A whole comparison with tiny models: equal conditions, nothing done twice, nothing overwritten."""

import dataclasses
import io
import json
import re
import shutil

import pytest
import torch
from rich.console import Console
from tiny import NARROW

from attnres.comparison import speed
from attnres.comparison.compare import compare, opened
from attnres.comparison.plan import CompareConfig, make_plan
from attnres.comparison.speed import StepOptions, step_times
from attnres.comparison.watch import RunStatus
from attnres.errors import UserError
from attnres.files import locked
from attnres.ops import cpu
from attnres.report import load_study
from attnres.residuals import register
from attnres.residuals.mechanisms.standard import Standard
from attnres.training import environment
from attnres.training.config import DataConfig, FinetuneConfig, ModelConfig, OptimConfig, TrainConfig, to_dict
from attnres.training.prepare import PreparedRun, check


def config_in(folder, **changes):
    base = TrainConfig(
        model=ModelConfig(size=NARROW),
        data=DataConfig(source=str(folder / "text"), tokenizer="bpe:300", seq_len=16, held_out=0.2, val_windows=8),
        optim=OptimConfig(lr=0.01),
        steps=4,
        batch_size=2,
        val_every=2,
        log_every=1,
        depth_every=2,
        device="cpu",
        dtype="fp32",
    )
    config = CompareConfig(["standard", "block:num_blocks=2"], base=base, out=str(folder / "out"), timing_s=0.05)
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory, empty_cache):
    """A finished comparison and its configuration."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "text").mkdir()
    for i in range(20):
        text = f"Document {i} counts: " + ", ".join(str(n * (i + 1)) for n in range(120))
        (folder / "text" / f"{i}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNRES_CACHE", empty_cache(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        config = config_in(folder)
        yield config, compare(config), folder


@pytest.fixture
def own(done, tmp_path):
    """The same in a folder of the test's own, which it may change: its configuration and where it lies."""
    config, _, folder = done
    shutil.copytree(folder / "out", tmp_path / "out")
    return dataclasses.replace(config, out=str(tmp_path / "out")), tmp_path / "out"


def test_a_comparison_leaves_everything_on_disk(done):
    _, study, folder = done
    out = folder / "out"
    assert study.labels == ["standard", "block-num_blocks2"]
    assert all(run.finished for run in study.runs)
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert (out / "table.csv").read_text().count("\n") == 3
    assert '<a href="explorer.html">block-num_blocks2 and standard in the explorer</a>' in page
    shown = json.loads(re.findall('id="saved">(.*)</script>', (out / "explorer.html").read_text())[0])
    assert study.runs[0].inspection.example["tokens"] == shown["panes"][0]["tokens"] and len(shown["panes"]) == 2
    plan = json.loads((out / "compare.json").read_text())
    assert (plan["baseline"], plan["threads"]) == ("standard", max(1, torch.get_num_threads() // plan["jobs"]))
    assert {run.environments[0]["threads"] for run in study.runs} == {plan["threads"]}
    speed = json.loads((out / "speed.json").read_text())
    assert speed["baseline"] == "plain" and speed["plain"]["ratio"] == 1.0
    assert set(speed["variants"]) == {"standard", "block-num_blocks2"}
    assert len(speed["variants"]["block-num_blocks2"]["times"]) == speed["rounds"] >= 3


@pytest.mark.parametrize(("dtype", "native", "lines"), [("bf16", False, 1), ("bf16", True, 0), ("fp32", False, 0)])
def test_a_comparison_in_bf16_that_is_emulated_says_so_once(done, tmp_path, monkeypatch, dtype, native, lines):
    config, _, _ = done
    monkeypatch.setattr(environment, "has_bf16", lambda _: native)
    base = dataclasses.replace(config.base, dtype=dtype)
    text = io.StringIO()
    with opened(dataclasses.replace(config, base=base, out=str(tmp_path / "out")), Console(file=text, width=400)):
        pass
    assert text.getvalue().count("bf16 is emulated here") == lines


def test_how_it_stands_is_read_from_folders_that_grow(done, tmp_path):
    config, study, folder = done
    status = RunStatus(tmp_path, make_plan(config))
    assert status.table() is None and not status.comparable() and not status.measured()
    base, name = "standard-seed0", "block-num_blocks2-seed0"
    for run in (base, name):
        (tmp_path / run).mkdir()
        lines = (folder / "out" / run / "metrics.jsonl").read_text().splitlines()
        some = [line for line in lines if run == base or '"step": 4' not in line]
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(some) + '\n{"kind": "val", "st')
    losses = {run.label: {line["step"]: line["loss"] for line in run.val} for run in study.runs}
    gap = losses["block-num_blocks2"][2] - losses["standard"][2]
    table = status.table()
    assert table is not None and status.measured() and not status.comparable()
    cells = list(zip(*(column.cells for column in table.columns)))
    assert [row[:2] for row in cells] == [(base, "4"), (name, "2")]
    assert cells[0][3:] == ("", "") and cells[1][4] == "2"
    assert float(cells[1][3].replace("\N{MINUS SIGN}", "-")) == pytest.approx(gap, abs=6e-4)
    for run in (base, name):
        (tmp_path / run / "summary.json").write_text("{}")
        assert status.comparable() == (run == name)


def test_variants_meet_equal_conditions(done):
    """Block starts as the standard residual: its first loss is the same, on the same batch, from the same weights."""
    _, study, _ = done
    (standard,), (block,) = study.of("standard"), study.of("block-num_blocks2")
    assert block.train[0]["loss"] == pytest.approx(standard.train[0]["loss"], rel=1e-4)
    assert len(block.windows[4]) == len(standard.windows[4]) == 8
    assert block.config["data"] == standard.config["data"]


@pytest.mark.long
def test_finished_runs_are_not_trained_again(own, capfd):
    config, folder = own
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*-seed0/*.json")}
    (folder / "report.html").unlink()
    compare(config)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*-seed0/*.json")} == before != {}
    assert (folder / "report.html").exists()
    output = capfd.readouterr()
    assert "2 of 2 runs are finished already" in output.err
    assert "timing" not in output.err
    assert "block-num_blocks2" in output.out


def test_another_configuration_in_the_same_folder_is_refused(done):
    config, _, _ = done
    other = dataclasses.replace(config, base=dataclasses.replace(config.base, steps=6))
    with pytest.raises(UserError, match="another configuration: steps is 6 here, 4 there"):
        compare(other)


def test_a_folder_of_something_else_is_refused(done):
    config, _, folder = done
    with pytest.raises(UserError, match="is not empty and holds other files"):
        compare(dataclasses.replace(config, out=str(folder / "text")))
    with pytest.raises(UserError, match="is a file"):
        compare(dataclasses.replace(config, out=str(folder / "text" / "0.txt")))


@pytest.mark.long
def test_a_run_cut_short_is_continued(own):
    config, folder = own
    run = folder / "standard-seed0"
    before = (run / "val" / "000004.npy").read_bytes()
    (run / "summary.json").unlink()
    compare(dataclasses.replace(config, variants=["standard"], timing_s=0))
    assert load_study(folder).of("standard")[0].finished
    assert (run / "val" / "000004.npy").read_bytes() == before


@pytest.mark.long
def test_a_continued_comparison_keeps_its_threads_and_kernels(own, monkeypatch):
    config, folder = own
    path, summary = folder / "compare.json", folder / "standard-seed0" / "summary.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"jobs": 3, "threads": 5}))
    summary.unlink()
    calls = []
    monkeypatch.setattr(
        "attnres.comparison.compare.train_all",
        lambda children, done, **given: calls.append(
            (given["jobs"], *{(child.threads, child.kernels) for child in children})
        ),
    )
    (folder / "configs" / "full-seed0.error").write_text("of a run that was killed")
    with cpu.switched(False):
        compare(dataclasses.replace(config, timing_s=0))
    assert not list(folder.rglob("*.error"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kernels": None}))
    compare(dataclasses.replace(config, timing_s=0, jobs=1))
    kernels = json.loads(before)["kernels"] is not None
    # Other runs at once: five threads of one each would be more than there are cores.
    assert calls == [(3, (5, kernels)), (1, (torch.get_num_threads(), False))]
    path.write_text(json.dumps(json.loads(before) | {"kernels": "0123"}))
    with pytest.raises(UserError, match="was begun with build 0123 of the C kernels, and here is"):
        compare(config)
    path.write_text('{"threads": "many"}')
    with pytest.raises(UserError, match=r"compare\.json is damaged"):
        compare(config)


def test_runs_on_other_data_are_not_mixed(own):
    config, folder = own
    path = folder / "standard-seed0" / "data.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"windows_sha256": "0"}))
    with pytest.raises(UserError, match="was trained on other data"):
        compare(config)


@pytest.mark.long
def test_the_report_is_there_before_a_run_has_ended(own, monkeypatch, capfd):
    config, folder = own
    (folder / "report.html").unlink()
    for summary in folder.glob("*/summary.json"):
        summary.unlink()
    monkeypatch.setattr("attnres.comparison.compare.EARLY_S", -1.0)

    def polled(*args, on_poll, **kwargs):
        on_poll()
        assert "<svg" in (folder / "report.html").read_text()
        on_poll()

    monkeypatch.setattr("attnres.comparison.compare.train_all", polled)
    compare(dataclasses.replace(config, timing_s=0))
    assert capfd.readouterr().err.count("has the first held-out losses") == 1


def test_two_do_not_compare_in_one_folder(done):
    config, _, folder = done
    with locked(folder / "out"), pytest.raises(UserError, match="another process is working in"):
        compare(config)


def test_however_early_it_is_stopped_the_same_command_continues(done, empty_cache, tmp_path, monkeypatch):
    config, _, _ = done
    config = dataclasses.replace(config, out=str(tmp_path / "out"), timing_s=0)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "attnres.comparison.compare.to_dict",
        lambda run: stop() if (tmp_path / "out" / "compare.json").exists() else to_dict(run),
    )
    with pytest.raises(KeyboardInterrupt):
        compare(config)
    assert not (tmp_path / "out" / "configs").exists()
    monkeypatch.undo()
    monkeypatch.setattr("attnres.comparison.compare.train_all", stop)
    monkeypatch.setenv("ATTNRES_CACHE", empty_cache(tmp_path / "cache"))
    with pytest.raises(KeyboardInterrupt):  # comes to training: the folder is taken for a comparison
        compare(config)


def test_torchrun_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="compare was started by torchrun"):
        compare(config_in(tmp_path))


# ------------------------------------------------------------------ the plan


def test_a_sweep_moves_both_rates_of_muon_alike(tmp_path):
    config = config_in(tmp_path, variants=["block", "full@lr=0.04"], lrs=[0.005, 0.02])
    for optimizer, expected in (("muon", [0.001, 0.004, 0.008]), ("adamw", [0.002] * 3)):
        optim = OptimConfig(optimizer=optimizer, lr=0.01, muon_lr=0.002)
        plan = make_plan(dataclasses.replace(config, base=dataclasses.replace(config.base, optim=optim)))
        assert [run.optim.lr for run in plan.runs.values()] == [0.005, 0.02, 0.04]
        assert [run.optim.muon_lr for run in plan.runs.values()] == pytest.approx(expected)


def test_a_sweep_moves_a_rate_of_the_residuals_own_too(tmp_path):
    """At each rate it is the same part of it, so that one residual at several rates stays one."""
    config = config_in(tmp_path, variants=["standard", "block@residual_lr=0.03"], lrs=[0.005, 0.02])
    optim = OptimConfig(lr=0.01, residual_lr=0.001)
    plan = make_plan(dataclasses.replace(config, base=dataclasses.replace(config.base, optim=optim)))
    assert [run.optim.residual_lr for run in plan.runs.values()] == pytest.approx([0.0005, 0.002, 0.03, 0.03])


def test_settings_of_some_variants_fine_tuning_are_none_of_the_others(tmp_path, monkeypatch):
    def checked(run, start):
        check(run)
        return PreparedRun(run)

    monkeypatch.setattr("attnres.comparison.plan.open_start", lambda name: None)
    monkeypatch.setattr("attnres.comparison.plan.prepare_run", checked)
    config = config_in(tmp_path, variants=["standard", "block@train_only=lora"])
    model = dataclasses.replace(config.base.model, size=None)
    base = dataclasses.replace(config.base, model=model, finetune=FinetuneConfig(init_from="x", lora_rank=4))
    runs = make_plan(dataclasses.replace(config, base=base)).runs.values()
    assert [run.finetune.lora_rank for run in runs] == [FinetuneConfig().lora_rank, 4]
    both = dataclasses.replace(base, finetune=dataclasses.replace(base.finetune, distill_temperature=2.0))
    variants = ["standard@distill_weight=0.5", "block@train_only=lora"]  # each with a use for one of the two
    runs = make_plan(dataclasses.replace(config, base=both, variants=variants)).runs.values()
    assert [(run.finetune.lora_rank, run.finetune.distill_temperature) for run in runs] == [(8, 2.0), (4, 1.0)]
    for variants in (["standard", "block"], ["standard", "block@lora_rank=2"]):
        with pytest.raises(UserError, match=r"lora_rank is \d and would have no effect"):
            make_plan(dataclasses.replace(config, base=base, variants=variants))


def test_runs_on_a_gpu_that_is_named_are_one_at_a_time(done, tmp_path):
    """Of another machine, which has it."""
    config, _, _ = done
    base = dataclasses.replace(config.base, device="cuda:1", dtype="fp32")
    one = dataclasses.replace(config, base=base, out=str(tmp_path / "out"))
    with opened(one, Console(quiet=True), here=False) as work:
        assert work.jobs == 1 and all(child.names_gpu for child in work.children)


def test_what_trains_at_once_is_settled_over_all_that_is_trained(done, tmp_path, monkeypatch):
    """One run of four at once has the threads of one of four, whichever comparison it is of."""
    config, _, _ = done
    monkeypatch.setattr("attnres.comparison.compare.cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for runs, expected in ((None, (2, 4)), (9, (4, 2))):
        one = dataclasses.replace(config, out=str(tmp_path / str(runs)))
        with opened(one, Console(quiet=True), runs=runs) as work:
            assert (work.jobs, {child.threads for child in work.children}) == (expected[0], {expected[1]})
            assert not any(child.names_gpu for child in work.children)


def test_the_plan_differs_only_where_it_should(tmp_path):
    plan = make_plan(config_in(tmp_path, variants=["standard", "block"], seeds=[0, 1], lrs=[0.001, 0.01]))
    assert list(plan.runs)[:4] == [f"{name}-lr{lr}-seed0" for name in ("standard", "block") for lr in ("0.001", "0.01")]
    assert len(plan.runs) == 8
    run = plan.runs["block-lr0.01-seed1"]
    assert (run.model.residual, run.optim.lr, run.seed, run.name) == ("block", 0.01, 1, "block-lr0.01-seed1")
    assert plan.baseline == "standard-lr0.001"
    first = next(iter(plan.runs.values()))
    same = dataclasses.replace(
        run, model=first.model, optim=first.optim, seed=first.seed, name=first.name, out=first.out
    )
    assert same == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ["standard", "block:num_blocks=50"]}, "num_blocks is 50: expected 1 to 4"),
        ({"variants": ["standard", "blokc"]}, "did you mean 'block'"),
        ({"seeds": []}, "expected different whole numbers"),
        ({"seeds": [1, 1]}, "expected different whole numbers"),
        ({"jobs": 0}, "expected 1 or more"),
    ],
)
def test_mistakes_show_before_anything_is_trained(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        compare(config_in(tmp_path, **changes))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ timing


SHAPE = {"size": NARROW, "vocab_size": 64, "seq_len": 8, "batch_size": 2}


def test_steps_are_timed_in_turn():
    rounds = []
    result = step_times(
        {"a": ("standard", {}), "b": ("block", {"num_blocks": 2}), "c": ("full", {})},
        StepOptions(**SHAPE, accumulation=2),
        rounds=4,
        on_round=rounds.append,
    )
    assert rounds == [1, 2, 3, 4]
    assert result["baseline"] == "a"
    for entry in result["variants"].values():
        assert len(entry["times"]) == 4
        assert entry["ratio_quartiles"][0] <= entry["ratio_quartiles"][1]
    assert result["threads"] == torch.get_num_threads()


def test_rates_that_are_carried_to_a_width_are_timed_as_they_are():
    """The plain model, which is timed beside, has no place for what carries them."""
    options = StepOptions(**SHAPE, optim=OptimConfig(base_width=64))
    result = step_times({"plain": (None, {}), "a": ("block", {})}, options, rounds=1, least=1)
    assert set(result["variants"]) == {"plain", "a"}


def test_the_time_cap_leaves_the_least_number_of_rounds():
    result = step_times({"a": ("standard", {})}, StepOptions(**SHAPE), seconds=0, least=2)
    assert result["rounds"] == 2


def test_a_mechanism_of_this_process_alone_is_refused(registered, tmp_path):
    register(type("Mine", (Standard,), {"name": "mine"}))
    with pytest.raises(UserError, match=r"give it as FILE\.py:CLASS"):
        make_plan(CompareConfig(["standard", "mine"], out=str(tmp_path)))


@pytest.mark.parametrize("how", ["none", "layer"])
def test_a_timed_step_is_the_one_that_is_trained(monkeypatch, how):
    """Its loss in parts, its layers made again in backward: the plain model's too."""
    kinds, models = [], []
    objective = speed.Objective

    def seen(model, kind, *args, **options):
        models.append(model)
        kinds.append(kind)
        return objective(model, kind, *args, **options)

    monkeypatch.setattr(speed, "Objective", seen)
    variants = {"plain": (None, {}), "a": ("block", {"num_blocks": 2})}
    options = StepOptions(**SHAPE, loss="chunked", gradient_checkpointing=how)
    step_times(variants, options, rounds=1, least=1)
    assert kinds == ["chunked"] * 2
    for model in models:
        assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules()) == (how == "layer")


def test_a_base_of_a_users_own_mechanism_leaves_nothing_of_it(tmp_path):
    config = config_in(tmp_path, variants=["standard"])
    model = dataclasses.replace(config.base.model, residual_sha256="0" * 64)
    plan = make_plan(dataclasses.replace(config, base=dataclasses.replace(config.base, model=model)))
    assert plan.runs["standard-seed0"].model.residual_sha256 is None
