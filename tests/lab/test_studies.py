"""Every study from end to end in seconds: runs, rows, analysis, figures and page; resumed, adopted, on a cluster."""

import csv
import dataclasses
import json
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from attnres.commands import short
from attnres.comparison.children import Child
from attnres.comparison.plan import CompareConfig, make_plan
from attnres.errors import Interrupted, UserError
from attnres.files import write_json
from attnres.flags import config_file
from attnres.ops.dispatch import KERNELS
from attnres.reading import read_json
from attnres.stats import Recipe, plain
from attnres.training import from_dict, train
from attnres.training.checkpoint import kept
from attnres.training.config import differences, to_dict
from attnres.training.records import TIMES
from lab import __main__ as laboratory
from lab.conduct import ExecutionOptions, conduct, left_of
from lab.contrast import contrast
from lab.cost import CALL, Cost, Mechanism, StepKind, costs_of, flops_a_token, hours, on_gpu
from lab.design import Design, KnownNoise, Measured, MeasuredRow, Setting, StudyResult
from lab.measures import Computation, compute, function, to_csv
from lab.outcome import StudyOutcome, at_sizes, command, names_of, outcome_in, report_page, survey
from lab.presets import PRESETS, shape
from lab.slurm import Slurm
from lab.store import (
    ARCHIVE,
    CHANGED_AT,
    call_key,
    find_runs,
    refuse_other_material,
    run_key,
    same_runs,
    unpacked,
)
from lab.studies import STUDIES
from lab.studies.ablations import PUBLISHED
from lab.tuning import label_of

QUIET = Console(quiet=True)


class Here:
    """Runs children in this process, one after the other, as many as are allowed before `end` is raised."""

    def __init__(self, most=10**6, end=None):
        self.most, self.end, self.names = most, end or Interrupted("stopped", 130), []

    def __call__(self, children, watch, **_):
        for child in children:
            if len(self.names) == self.most:
                raise self.end
            watch.start(child)
            self.names.append(child.name)
            if isinstance(child, Computation):
                compute(child.config)
            else:
                train(dataclasses.replace(from_dict(read_json(child.config)), resume=True), progress=False)
            watch.end(child)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        numbers = ", ".join(str(n * (i + 1)) for n in range(60))
        (folder / f"{i}.txt").write_text(f"Document {i} counts: {numbers}")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, label, index in [(s, c, i) for s in ("train", "test") for c in ("cat", "dog") for i in range(4)]:
        path = folder / split / label / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory, empty_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnres.training.loop.write_inspection", lambda *_: None)  # which studies do not look at
        patch.setenv("ATTNRES_CACHE", empty_cache(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def setting(tmp_path_factory, corpus, images, cache):
    return Setting("seconds", PRESETS["seconds"], 1, str(corpus), tmp_path_factory.mktemp("out"), str(images))


@pytest.fixture(scope="module")
def noise(setting):
    return conduct(STUDIES["noise"], setting, ExecutionOptions(QUIET, jobs=1, run=Here()))


@pytest.mark.long
def test_of_rows_the_text_is_in_the_column_that_was_asked_for(noise, setting):
    asked = dataclasses.replace(setting, column="body")
    assert asked.config().data.column == "body" and setting.config().data.column == "text"
    assert f"--source {setting.source} --column body" in command(dataclasses.replace(noise, setting=asked))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in STUDIES if name != "noise"])
def test_a_study_runs_from_end_to_end(setting, noise, name, tmp_path):
    outcome = conduct(STUDIES[name], setting, ExecutionOptions(QUIET, jobs=1, run=Here()))
    done, planned = outcome.counts
    assert done == planned > 0
    result = json.loads((outcome.folder / "result.json").read_text())
    assert result["answer"] and result["tables"] and result["values"]
    page = (outcome.folder / "study.html").read_text()
    assert page.count("<svg") == len(outcome.result.charts) > 0
    assert "http" not in page.replace("http://www.w3.org", "")
    rows = list(csv.DictReader((outcome.folder / "runs.csv").read_text().splitlines()))
    assert {row["arm"] for row in rows} == set(outcome.measured.planned)
    assert not (set(rows[0]) & {"step_s", "wall_s"}), "what a clock says is no part of it"
    # And again from its runs in one file, of which those that others start from lack their weights.
    again = Here()
    with unpacked([outcome.folder / ARCHIVE]) as folders:
        other = dataclasses.replace(setting, out=tmp_path)
        taken = conduct(STUDIES[name], other, ExecutionOptions(QUIET, jobs=1, run=again), adopted=folders)
    assert again.names == [] or name == "retrofit"
    for file in ("runs.csv", ARCHIVE):
        ours, theirs = (_lines_of_runs(one.folder / file) for one in (outcome, taken))
        assert ours == theirs or name == "retrofit", file


def _lines_of_runs(path):
    """Without those of step times, which are taken anew."""
    return [line for line in path.read_text().splitlines() if f'"{TIMES}"' not in line]


@pytest.mark.long
def test_noise_is_known_to_the_studies_after_it_on_the_same_text_alone(setting, noise, corpus, tmp_path):
    """Whatever the folder of the text is called: another of the same name, and the same one moved and renamed."""
    texts = [tmp_path / place for place in (f"another/{corpus.name}", "renamed")]
    for text in texts:
        shutil.copytree(corpus, text)
    for file in texts[0].glob("*.txt"):
        file.write_text(file.read_text().replace("counts", "is a list of numbers that"))
    for text, known in zip(texts, (set(), {2, 4}), strict=True):
        other = dataclasses.replace(setting, source=str(text), out=tmp_path / f"out of {text.parent.name}")
        shutil.copytree(noise.folder, other.folder("noise"))
        assert not survey(STUDIES["exchange"], other)[1].noises, "of no run yet whose text could be looked at"
        with pytest.raises(Interrupted):
            conduct(STUDIES["exchange"], other, ExecutionOptions(QUIET, jobs=1, run=Here(most=1)))
        outcome = outcome_in(other.folder("exchange"))
        assert set(outcome.measured.noises) == known
        assert all(one.degrees == 1 for one in outcome.measured.noises.values())
        page = (other.folder("exchange") / "study.html").read_text()
        for said in (outcome.not_used, page):
            assert ("none of whose runs had the tokenizer and held-out text" in said) == (not known)
    arms, _ = survey(STUDIES["budgets"], setting)
    assert survey(STUDIES["block-size"], setting)[1].recipe == {"sizes"}
    assert not survey(STUDIES["nanogpt"], setting)[1].recipe, "another model has another noise"
    assert arms[0].name == "x4"


@pytest.mark.long
@pytest.mark.parametrize("end", [Interrupted("stopped", 130), UserError("the disk is full")])
def test_a_stopped_study_goes_on_and_ends_with_the_same_table(setting, noise, tmp_path, end):
    other = dataclasses.replace(setting, out=tmp_path)
    first, again = Here(most=2, end=end), Here()
    with pytest.raises(type(end)):
        conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=Here(most=0, end=end)))
    assert not (other.folder("noise") / "result.json").exists(), "nothing has come of it yet"
    with pytest.raises(type(end)):
        conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=first))
    assert read_json(other.folder("noise") / "result.json")["finished"] == len(first.names) == 2
    outcome = conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=again))
    assert not set(first.names) & set(again.names) and outcome.counts[0] == len(first.names + again.names)
    assert (outcome.folder / "runs.csv").read_bytes() == (noise.folder / "runs.csv").read_bytes()
    assert outcome.result == noise.result
    assert conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=Here(most=0))).counts == outcome.counts


@pytest.mark.long
def test_what_finished_before_a_stop_has_been_measured(setting, tmp_path):
    other = dataclasses.replace(setting, out=tmp_path)
    with pytest.raises(Interrupted):
        conduct(STUDIES["depth-tasks"], other, ExecutionOptions(QUIET, jobs=1, run=Here(most=1)))
    folder = other.folder("depth-tasks")
    assert read_json(folder / "result.json")["finished"] == 1
    assert "standard,0,2,0,0,accuracy/6," in (folder / "runs.csv").read_text()


@pytest.mark.long
def test_a_study_goes_on_from_its_own_file_of_runs_and_loses_none_of_it(setting, noise, corpus, tmp_path):
    """As in a repository: study.json, result.json and runs.jsonl, and no folder of a run."""
    other = dataclasses.replace(setting, out=tmp_path)
    folder, runner = other.folder("noise"), Here()
    folder.mkdir(parents=True)
    for name in ("study.json", "result.json", ARCHIVE):
        shutil.copy2(noise.folder / name, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refused(setting, message):
        with pytest.raises(UserError, match=message):
            conduct(STUDIES["noise"], setting, ExecutionOptions(QUIET, jobs=1, run=runner))
        assert runner.names == []
        assert {name: (folder / name).read_bytes() for name in before} == before

    elsewhere = tmp_path / "another"
    shutil.copytree(corpus, elsewhere)
    refused(dataclasses.replace(other, source=str(elsewhere)), "was run with --source .*: give the same, or")
    changed = tmp_path / corpus.name
    shutil.copytree(corpus, changed)
    (changed / "0.txt").write_text("Other numbers: " + ", ".join(map(str, range(900, 999))))
    refused(dataclasses.replace(other, source=str(changed)), "would lose runs that this command does not reuse")
    assert not [path for path in folder.iterdir() if path.is_dir()], "nothing half-written"
    last = before[ARCHIVE].splitlines()[-1]
    further = json.dumps(json.loads(last) | {"run": "standard-seed99"}, sort_keys=True)
    before[ARCHIVE] += further.encode() + b"\n"  # a seed that is not asked for stays
    (folder / ARCHIVE).write_bytes(before[ARCHIVE])
    outcome = conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=runner))
    assert runner.names == [] and outcome.counts[0] == outcome.counts[1]
    assert (folder / ARCHIVE).read_bytes() == before[ARCHIVE]
    shutil.rmtree(folder / "recipe" / "standard-seed0")
    conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=runner))
    assert runner.names == [] and (folder / "recipe" / "standard-seed0").is_dir(), "of its own file again"
    third, idle = dataclasses.replace(setting, out=tmp_path / "third"), Here()
    for arm in [path for path in folder.iterdir() if path.is_dir()]:
        shutil.rmtree(arm)
    with unpacked([tmp_path / "seconds"]) as folders:
        conduct(STUDIES["noise"], third, ExecutionOptions(QUIET, jobs=1, run=idle), adopted=folders)
    assert idle.names == [], "a folder of such files will do for the files"


@pytest.mark.long
def test_a_study_that_stops_early_keeps_what_it_had_in_its_file_of_runs(setting, tmp_path):
    """Arms that were not asked for yet, or not filled yet, when its time was over."""
    other, design = dataclasses.replace(setting, out=tmp_path), STUDIES["ablations"]
    folder, runner = other.folder("ablations"), Here()
    whole = conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=runner))
    before = (folder / ARCHIVE).read_text()
    assert {row.arm for row in whole.measured.rows} == {"recipe", "coarse", "best"}
    for arm in [path for path in folder.iterdir() if path.is_dir()]:
        shutil.rmtree(arm)
    trained = list(runner.names)
    conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=runner, until=time.monotonic()))
    assert (folder / ARCHIVE).read_text() == before
    again = conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=runner))
    assert runner.names == trained and again.measured.rows == whole.measured.rows


@pytest.mark.long
def test_runs_of_elsewhere_are_adopted_where_they_are_the_same(setting, noise, tmp_path):
    other = dataclasses.replace(setting, out=tmp_path)
    runner = Here()
    outcome = conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=runner), adopted=[noise.folder])
    assert runner.names == [] and outcome.counts[0] == outcome.counts[1]
    assert (outcome.folder / "runs.csv").read_bytes() == (noise.folder / "runs.csv").read_bytes()
    assert not list(outcome.folder.rglob("checkpoint"))
    inside, every = ({run.folder for run in find_runs([folder])} for folder in (noise.folder, setting.out))
    assert every >= inside and inside, "a folder of studies"
    with pytest.raises(UserError, match="is not a folder: give one with the run folders to adopt"):
        conduct(STUDIES["noise"], other, ExecutionOptions(QUIET), adopted=[tmp_path / "nothing"])
    copy = shutil.copytree(noise.folder / "recipe", tmp_path / "recipe")
    changed = copy / "standard-seed0" / "data.json"
    changed.write_text(json.dumps(json.loads(changed.read_text()) | {"windows_sha256": "0"}))
    third = dataclasses.replace(setting, out=tmp_path / "third")
    conduct(STUDIES["noise"], third, ExecutionOptions(QUIET, jobs=1, run=runner), adopted=[copy])
    assert "recipe/standard-seed0" in runner.names, "the text was another one"
    assert "recipe/standard-seed1" not in runner.names


def test_a_finished_run_counts_wherever_its_text_lies_and_without_its_model(setting, noise, tmp_path):
    moved = shutil.copytree(str(setting.source), tmp_path / "text")
    keep = shutil.ignore_patterns("model", "checkpoint", "inspection.json", "residual")
    kept = shutil.copytree(noise.folder, tmp_path / "kept", ignore=keep)
    other = dataclasses.replace(setting, source=str(moved), out=tmp_path / "out")
    runner = Here()
    outcome = conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=runner), adopted=[kept])
    assert runner.names == [] and outcome.result == noise.result
    assert (outcome.folder / "runs.csv").read_bytes() == (noise.folder / "runs.csv").read_bytes()
    config = json.loads((outcome.folder / "recipe" / "standard-seed0" / "config.json").read_text())
    assert config["data"]["source"] == str(moved)


@pytest.mark.long
def test_what_another_study_has_trained_is_not_trained_again(setting, noise, tmp_path):
    other = dataclasses.replace(setting, out=tmp_path)
    runner = Here()
    conduct(STUDIES["noise"], other, ExecutionOptions(QUIET, jobs=1, run=runner))
    lefts = {arm.name: len(left) for arm, left in left_of(STUDIES["exchange"], other)}
    assert lefts == {"x0.25": 1, "x0.5": 0, "x1": 0, "x2": 1}, "runs of 2 and of 4 steps are the noise's"
    runner.names.clear()
    outcome = conduct(STUDIES["exchange"], other, ExecutionOptions(QUIET, jobs=1, run=runner))
    assert sorted(runner.names) == ["x0.25/standard-seed0", "x2/standard-seed0"]
    assert outcome.counts == (4, 4)
    elsewhere = dataclasses.replace(setting, out=tmp_path / "elsewhere")
    adopted, alone = (left_of(STUDIES["exchange"], elsewhere, adopted=folders)[2] for folders in ([outcome.folder], []))
    assert adopted[0].name == alone[0].name == "x1"
    assert (adopted[1], alone[1]) == (set(), {"standard-seed0"})


@pytest.mark.long
def test_a_run_that_two_arms_ask_for_is_trained_once(setting, noise, tmp_path):
    other, runner = dataclasses.replace(setting, out=tmp_path), Here()
    run = other.config(steps=3)

    def arms(setting, measured):
        return [setting.arm("a", ["standard"], [0], of=run), setting.arm("b", ["standard", "block"], [0], of=run)]

    design = dataclasses.replace(STUDIES["exchange"], arms=arms, analyse=lambda s, m: StudyResult("done"))
    assert [len(left) for _, left in left_of(design, other)] == [1, 1]
    outcome = conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=runner))
    assert sorted(runner.names) == ["a/standard-seed0", "b/block-seed0"] and outcome.counts == (3, 3)


def test_a_finished_run_is_taken_before_one_that_is_not_and_nothing_half_copied(setting, tmp_path):
    arm = setting.arm("a", ["standard"], [0], of=setting.config())
    assert arm.compare is not None
    run = next(iter(make_plan(dataclasses.replace(arm.compare, out=str(tmp_path / "ours"))).runs.values()))
    begun, finished = tmp_path / "a" / run.name, tmp_path / "b" / run.name
    for folder in (begun, finished, tmp_path / "b" / f".{run.name}.host-1.new"):
        folder.mkdir(parents=True)
        write_json(folder / "config.json", to_dict(run))
    (begun / "checkpoint").mkdir()
    for folder in (finished, tmp_path / "b" / f".{run.name}.host-1.new"):
        write_json(folder / "summary.json", {})
    runs = find_runs([begun.parent, finished.parent], unfinished=True)
    assert [one.folder for one in same_runs(runs, run, arm)] == [finished, begun]
    assert not same_runs(runs, dataclasses.replace(run, seed=1), arm)


def test_a_key_is_of_what_decides_what_a_run_computes(setting, monkeypatch):
    """Not of where it lies, how often it is saved, what its text is called, or of settings that others switch off."""
    run = setting.config()
    key = run_key(to_dict(run))
    moved = dataclasses.replace(run, out="elsewhere", name="other", save_every=1, keep_at=(2,), track=None)
    text = dataclasses.replace(run, data=dataclasses.replace(run.data, source="another place"))
    stored = json.loads(json.dumps(to_dict(run)))
    del stored["optim"]["base_width"]  # an earlier version had no such field
    assert {run_key(to_dict(one)) for one in (moved, text)} | {run_key(stored)} == {key}
    stored["optim"]["decay"] = 0.5  # of the schedule wsd, which it has not
    assert run_key(stored) == key
    for other in (
        dataclasses.replace(run, seed=1),
        dataclasses.replace(run, steps=run.steps + 1),
        setting.config(dtype="bf16"),
    ):
        assert run_key(to_dict(other)) != key
    assert run_key(to_dict(run), "0.1.7") == key
    monkeypatch.setattr("lab.store.CHANGED_AT", (*CHANGED_AT, (0, 2)))
    assert run_key(to_dict(run), "0.2.0") != key == run_key(to_dict(run), "0.1.0")


def test_images_of_another_name_are_another_computation():
    key = call_key("f", {"images": "/data/cifar100", "seed": 0})
    assert call_key("f", {"seed": 0, "images": "/elsewhere/cifar100"}) == key
    assert call_key("f", {"images": "/data/cifar10", "seed": 0}) != key
    assert call_key("f", {"images": "/data/cifar100", "seed": 1}) != key
    assert call_key("g", {"images": "/data/cifar100", "seed": 0}) != key


def test_a_run_that_others_branch_off_is_taken_with_its_checkpoints_first(setting, noise, tmp_path):
    trunk = survey(STUDIES["budgets"], dataclasses.replace(setting, out=tmp_path))[0][0]
    assert trunk.compare is not None
    plan = make_plan(dataclasses.replace(trunk.compare, out=str(tmp_path / "ours")))
    run = next(iter(plan.runs.values()))
    bare, there = tmp_path / "bare" / run.name, tmp_path / "theirs" / run.name
    for folder in (bare, there):
        folder.mkdir(parents=True)
        write_json(folder / "config.json", to_dict(run))
        write_json(folder / "summary.json", {})
    for step in run.keep_at:
        kept(there, step).mkdir(parents=True)
    found = same_runs(find_runs([bare.parent, there.parent]), run, trunk)
    assert [one.folder for one in found] == [there, bare], (
        "without checkpoints its branches are trained from their start"
    )


def test_when_the_time_is_over_the_rest_is_left_for_later(setting, tmp_path):
    other = dataclasses.replace(setting, out=tmp_path)
    outcome = conduct(STUDIES["exchange"], other, ExecutionOptions(QUIET, jobs=1, until=time.monotonic() - 1))
    assert outcome.counts == (0, 4) and outcome.result.answer == "Too few lengths have finished."


@pytest.mark.long
def test_a_search_of_rates_that_is_stopped_has_every_mechanism_at_the_recipes(setting, noise, tmp_path):
    other = dataclasses.replace(setting, out=tmp_path)
    count = len(other.some(list(PUBLISHED)))
    with pytest.raises(Interrupted):
        conduct(STUDIES["ablations"], other, ExecutionOptions(QUIET, jobs=1, run=Here(most=count + 1)))
    result = outcome_in(other.folder("ablations")).result
    assert result.answer.startswith("At the recipe's rates: ")
    assert result.tables[0].notes[-1] == "No mechanism has been given a rate of its own with all seeds yet."
    (table,) = result.tables
    assert {label_of(variant) for variant in other.some(list(PUBLISHED))} == {row[0] for row in table.rows}


def test_one_page_of_all_studies(setting, noise):
    page = report_page([outcome_in(noise.folder), outcome_in(noise.folder)])
    assert page.count("How far do runs of one function fall apart?") >= 2
    assert noise.result.answer.replace("'", "&#x27;") in page
    broken = json.loads((noise.folder / "study.json").read_text())
    folder = setting.out / "copy" / "noise"
    folder.mkdir(parents=True)
    for change, message in (
        ({"preset": "nan0"}, "did you mean 'nano'"),
        ({"version": 0}, "is of version 0, expected 1"),
    ):
        (folder / "study.json").write_text(json.dumps(broken | change))
        with pytest.raises(UserError, match=message):
            outcome_in(folder)
    shutil.rmtree(folder.parent)


@pytest.mark.long
def test_the_page_of_a_repository_is_that_of_the_runs_that_made_it(setting, noise, tmp_path, capsys):
    """Where the run folders are gone, runs.jsonl gives the same tables, figures and sentences."""
    kept, other = tmp_path / "seconds" / "noise", tmp_path / "seconds" / "growth"
    kept.mkdir(parents=True)
    for name in ("study.json", "result.json", ARCHIVE):
        shutil.copy2(noise.folder / name, kept)
    conduct(STUDIES["growth"], dataclasses.replace(setting, out=tmp_path), ExecutionOptions(QUIET, jobs=1, run=Here()))
    assert outcome_in(kept).result == noise.result
    whole = report_page([outcome_in(folder) for folder in (other, kept)])
    laboratory.run(["--report", "--out", str(tmp_path)])
    assert (tmp_path / "report.html").read_text() == whole
    drawing = ["--preset", "seconds", "--out", str(tmp_path), "--formats", "svg", "--figures"]
    laboratory.run(["noise", *drawing, str(tmp_path / "figures")])
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["captions.md", "noise.svg"]
    laboratory.run(["all", *drawing, str(tmp_path / "both")])
    assert {path.name for path in (tmp_path / "both").glob("*/*.svg")} >= {"noise.svg", "growth.svg"}
    assert sorted(path.name for path in kept.iterdir()) == ["result.json", ARCHIVE, "study.json"]
    (kept / ARCHIVE).write_text("")
    laboratory.run(["growth", *drawing, str(tmp_path / "alone")])  # and its neighbours are left alone
    with pytest.raises(UserError, match="growth is a study: draw it in a clone of the repository with python -m lab"):
        short.run("figures", [str(other), str(tmp_path / "none")])
    with pytest.raises(UserError, match="is empty: expected a run a line"):
        laboratory.run(["--report", "--out", str(tmp_path)])


DATA = Path(__file__).parents[2] / "docs" / "data" / "studies"


@pytest.mark.long
def test_what_the_repository_says_of_its_studies_is_what_their_runs_give():
    paths = sorted(DATA.glob("*/*/study.json"))
    assert paths
    for path in paths:
        again, record = outcome_in(path.parent), read_json(path.parent / "result.json")
        assert again.result.answer == record["answer"]
        assert plain(again.result.values, digits=9) == record["values"]
        assert to_csv(again.measured.rows) == (path.parent / "runs.csv").read_text()


def test_a_claim_needs_the_same_sign_at_two_sizes(setting):
    def outcome(preset, **differences):
        variants = {
            label: {"difference": gap, "low": gap - 0.02, "high": gap + 0.02, "runs": 3, "excludes_0": abs(gap) > 0.02}
            for label, gap in differences.items()
        }
        values = {"recipe": {"standard": {"baseline": "standard", "base": 3.0, "variants": variants}}}
        at = dataclasses.replace(setting, name=preset)
        return StudyOutcome(STUDIES["ablations"], at, Measured(), StudyResult("", values=values))

    (table,) = at_sizes(
        [
            outcome("nano", block=-0.06, full=0.01, mhc=-0.04),
            outcome("pico", block=-0.03, full=-0.03, mhc=0.03, dca=0.1),
        ]
    )
    assert table.head == ["variant", "difference", "pico", "nano", "together"]
    assert table.rows[0][2:4] == ["−0.0300 (−0.0500 to −0.0100), 3 runs", "−0.0600 (−0.0800 to −0.0400), 3 runs"]
    assert [[*row[:2], row[-1]] for row in table.rows] == [
        ["block", "recipe minus standard", "below 0 at 2 sizes"],
        ["full", "recipe minus standard", "below 0 at one, not of one sign"],
        ["mhc", "recipe minus standard", "of both signs"],
    ]
    assert at_sizes([outcome("nano", block=-0.06)]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"by_steps": {"40": {"sigma": 0.1}}}, r"values.by_steps.40.degrees is None: expected it to be there"),
        ({"by_steps": {"40": {"sigma": "x", "degrees": 3}}}, "values.by_steps.40.sigma is 'x': expected a number"),
        ({"by_steps": [1]}, "values.by_steps is "),
        ({"by_steps": {"x": {"sigma": 0.1, "degrees": 3}, "9": {"sigma": None, "degrees": 0}}}, None),
    ],
)
def test_a_damaged_result_of_another_study_is_named(setting, tmp_path, values, message):
    other = dataclasses.replace(setting, out=tmp_path)
    write_json(other.folder("noise") / "result.json", {"source": setting.source, "values": values})
    if message is None:
        assert survey(STUDIES["growth"], other)[1].noises == {}
        return
    with pytest.raises(UserError, match=message):
        survey(STUDIES["growth"], other)


def test_a_folder_of_something_else_is_refused(setting, tmp_path):
    (tmp_path / "seconds" / "noise").mkdir(parents=True)
    (tmp_path / "seconds" / "noise" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="holds other files: expected an empty folder or a study"):
        conduct(STUDIES["noise"], dataclasses.replace(setting, out=tmp_path), ExecutionOptions(QUIET))


def test_studies_are_not_written_into_one_of_them(noise):
    for arguments in (["noise"], ["--report"]):
        with pytest.raises(UserError, match=r"holds something else \(study\)"):
            laboratory.run([*arguments, "--out", str(noise.folder)])


def test_images_that_were_wrong_are_no_images_of_the_study(setting, tmp_path):
    (tmp_path / "empty").mkdir()
    wrong = dataclasses.replace(setting, out=tmp_path, images=str(tmp_path / "empty"))
    with pytest.raises(UserError, match="holds no images"):
        conduct(STUDIES["resnet"], wrong, ExecutionOptions(QUIET, jobs=1, run=Here(most=1)))
    refuse_other_material(wrong.folder("resnet"), STUDIES["resnet"], dataclasses.replace(wrong, images=setting.images))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--list", "noise"], "--list applies to all studies: leave out 'noise'"),
        (
            ["noise", "--slurm", "timeout_min=9"],
            "--slurm has settings of jobs, but runs are local processes: add --executor slurm",
        ),
        ([], "no study given: expected python -m lab NAME..."),
        (["noize"], "unknown study 'noize': did you mean 'noise'?"),
        (["noise", "--seeds", "x"], "Error parsing --seeds: 'x' is no INT"),
        (["noise", "--preset", "seconds", "--source", "absent.txt"], "source 'absent.txt' does not exist"),
        (["noise", "--source", "absent.txt", "--dry-run"], "source 'absent.txt' does not exist"),
        (["noise", "--preset", "seconds", "--source", "text.txt", "--jobs", "0"], "jobs is 0: expected 1 or"),
        (["resnet", "--preset", "seconds", "--images", "absent"], "images 'absent' does not exist"),
        (
            ["noise", "--preset", "seconds", "--adopt", "absent"],
            "absent is not a folder: give one with the run",
        ),
        (["--report", "--out", "absent"], "absent holds no studies"),
        (["noise", "--seeds", "1001"], "seeds is 1001: expected from 1 to 1000, how many runs"),
        (["noise", "--budget", "inf"], "budget is inf: expected hours, a number above 0"),
        (["noise", "--jobs", "-1", "--dry-run"], "jobs is -1: expected 1 or more runs at a time"),
        (
            ["--resume"],
            "unknown option '--resume': the same command continues by itself what was stopped; python -m lab",
        ),
        (["noise", "--formats", "svg"], "formats is svg, which needs --figures"),
        (["noise", "--out", "absent", "--figures", "drawn"], "cannot read absent/nano/noise/study.json: No such file"),
        (["--list", "--figures", "drawn"], "--figures is given with --dry-run, --list or --report"),
        (["all", "--out", "absent", "--figures", "drawn"], "absent/nano holds no study"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_two(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a few words, again and again\n" * 2000)
    with pytest.raises(SystemExit) as left:
        laboratory.main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["text.txt"]


def test_what_was_stored_under_the_former_name_of_a_function_is_the_same_run(tmp_path):
    """Measurements name the function that made them as it was called then (docs/data/studies)."""
    path = DATA / "nano" / "growth" / ARCHIVE
    assert "attnres.studies.lab.growth:grow" in path.read_text()
    with unpacked([path]) as (folder,):
        keys = {run.key for run in find_runs([folder])}
    (arm,) = STUDIES["growth"].arms(Setting("nano", PRESETS["nano"], 8, None, tmp_path), Measured())
    assert arm.computed is not None
    for call in arm.computed.runs.values():
        assert call_key(arm.computed.function, call.arguments) in keys


def test_only_functions_of_studies_are_called():
    with pytest.raises(UserError, match="is no function of a study"):
        function("os:system")


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["local"])
def test_runs_are_jobs_of_a_cluster(setting, tmp_path, cluster):
    pytest.importorskip("submitit")
    other = dataclasses.replace(setting, out=tmp_path)
    study = dataclasses.replace(STUDIES["growth"], arms=lambda s, m: _first_run(STUDIES["growth"].arms(s, m)))
    outcome = conduct(study, other, ExecutionOptions(QUIET, run=Slurm(tmp_path, {"timeout_min": 5}, cluster=cluster)))
    assert outcome.counts == (1, 1)
    jobs = Slurm(tmp_path, {"cpus_per_task": 3}, cluster=cluster)._job(Child("a", tmp_path, tmp_path / "a.json", 1))
    assert "OMP_NUM_THREADS=3" in jobs.command, "a job has its own cores"
    with pytest.raises(UserError, match="Slurm cannot be used"):
        Slurm(tmp_path, {"partition_of_slurm": 1}, cluster=cluster)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine that submits has none")
def test_runs_of_a_cluster_keep_the_device_that_was_asked_for(setting, tmp_path):
    base = setting.config(device="cuda", dtype="bf16")
    config = CompareConfig(["standard"], base=base, out=str(tmp_path / "out"))
    first = make_plan(config, here=False).first
    assert (first.device, first.dtype) == ("cuda", "bf16")
    with pytest.raises(UserError, match=r"device cuda was asked for, but .* use --device cpu"):
        make_plan(config)


def _first_run(arms):
    (arm,) = arms
    runs = dict(list(arm.computed.runs.items())[:1])
    return [dataclasses.replace(arm, computed=dataclasses.replace(arm.computed, runs=runs))]


# ------------------------------------------------------------------ what is planned, at every size


@pytest.mark.quick("micro")
@pytest.mark.parametrize("preset", ["micro", "nano", "100m"])
def test_a_larger_size_is_data_alone(preset, tmp_path):
    """The same studies ask for runs that a model can be built for, at FLOPs that grow with the preset."""
    one = Setting(preset, PRESETS[preset], 3, None, tmp_path, "images")
    small = Setting("seconds", PRESETS["seconds"], 1, None, tmp_path, "images")
    for name in ("noise", "rates", "block-size", "scaling", "depth-width", "budgets", "resnet"):
        assert _flops(name, one) > 100 * _flops(name, small)


@pytest.mark.parametrize("preset", ["pico", "micro", "demo", "nano"])
def test_a_preset_in_fp32_is_the_same_recipe_but_for_its_precision(preset, tmp_path):
    one, other = (Setting(name, PRESETS[name], 3, None, tmp_path) for name in (preset, f"{preset}-fp32"))
    assert one.config().dtype == "bf16" and other.config() == one.config(dtype="fp32")
    assert one.folder("noise") != other.folder("noise") and not other.is_recipe(one.config())


def _flops(name, setting):
    arms = survey(STUDIES[name], setting)[0]
    return sum(cost.flops for arm in arms for cost in costs_of(arm, setting.config(), names_of(arm)))


def test_shapes_of_one_size_cost_the_same(tmp_path):
    one = Setting("nano", PRESETS["nano"], 3, None, tmp_path)
    arms = survey(STUDIES["depth-width"], one)[0]
    costs = [costs_of(arm, one.config(), ["standard-seed0"])[0].flops for arm in arms]
    assert max(costs) / min(costs) < 1.01
    deepest = costs_of(arms[-1], one.config(), ["block-seed0"])[0].flops
    assert 1.01 < deepest / costs[-1] < 1.1, "Block's reads"
    assert [shape(layers, 12 * 12 * 128**2)["hidden_size"] for layers in (12, 48, 3)] == [128, 64, 256]


def test_flops_are_six_for_each_weight_and_attention():
    size = PRESETS["nano"].train["model"]["size"]
    assert flops_a_token(size, 256, 4096) == pytest.approx(6 * 2_886_528 + 12 * 12 * 256 * 128, rel=0.01)
    assert hours([], 1.0) == 0
    assert hours([Cost("arm", 1, 0.0, 3600.0, calls=3600 / CALL)], 1.0) == pytest.approx(2)
    run = from_dict(PRESETS["nano"].train)
    block = StepKind.of(run, run, Mechanism.of("block", {"num_blocks": 4}))
    assert hours([Cost("arm", 1, 0.0, 3600.0), Cost("arm", 1, 0.0, 3600.0, 0, block)], 1.0, {block: 0.5}) == 3


@pytest.mark.parametrize("there", [True, False])
def test_an_estimate_is_of_the_device_that_the_runs_will_have(there, monkeypatch):
    row = KERNELS["cuda"]._replace(devices=lambda: [torch.device("cuda", 0)] if there else [])
    monkeypatch.setitem(KERNELS, "cuda", row)
    asked = {name: from_dict({**PRESETS["micro"].train, "device": name}) for name in ("auto", "cpu", "cuda:1")}
    assert {name: on_gpu(config) for name, config in asked.items()} == {"auto": there, "cpu": False, "cuda:1": True}


def test_runs_of_an_arm_are_counted_by_mechanism(tmp_path):
    one = Setting("seconds", PRESETS["seconds"], 2, None, tmp_path)
    run = one.config()
    arm = one.arm("some", ["standard", "full", "full@residual_lr=0.1"], of=run)
    costs = costs_of(arm, run, names_of(arm))
    assert [(cost.step.mechanism.residual, cost.runs) for cost in costs] == [("standard", 2), ("full", 4)]
    assert costs[1].tokens == 2 * costs[0].tokens and costs[1].flops > 2 * costs[0].flops


def test_the_recipe_of_issue_ten_is_expressed(tmp_path):
    """The study of rates asks for the runs of recipes/lasting_rates.yaml, so that they can be adopted."""
    values, _ = config_file(["--config", "recipes/lasting_rates.yaml"])
    base = {name: values[name] for name in ("steps", "batch_size", "dtype", "val_every", "depth_every", "save_every")}
    base = from_dict({**base, "model": values["model"], "data": values["data"], "optim": values["optim"]})
    theirs = make_plan(CompareConfig(values["variants"], values["seeds"], base=base))
    arm = survey(STUDIES["rates"], Setting("nano", PRESETS["nano"], 3, None, tmp_path))[0][0]
    ours = make_plan(arm.compare)
    assert set(theirs.runs) == set(ours.runs) == set(names_of(arm))
    for name, run in ours.runs.items():
        assert not differences(to_dict(run), to_dict(theirs.runs[name])), name


# ------------------------------------------------------------------ contrasts


def rows_of(losses):
    return [
        MeasuredRow("arm", label, seed, 10, 0, 0.0, "loss", value)
        for label, many in losses.items()
        for seed, value in many
    ]


def measured_of(losses, noises=None, curve=None):
    rows = rows_of({label: list(enumerate(values)) for label, values in losses.items()})
    return Measured(rows=rows, recipe=frozenset({"arm"}), noises=noises or {}, curve=curve or {})


def known_noise(sigma, level=3.0, seeds=8):
    """What the study of noise has of step 10: standard's runs evenly apart, with this standard deviation."""
    values = np.linspace(-1, 1, seeds)
    values *= sigma / values.std(ddof=1)
    runs = tuple(("standard", 100 + seed, level + float(value)) for seed, value in enumerate(values))
    return {10: KnownNoise(sigma, seeds - 1, runs)}


def clear(one):
    return {other.label: other.excludes_0 for other in one.others}


def test_a_contrast_says_no_more_than_the_noise_allows():
    losses = {
        "standard": [3.0, 3.01, 2.99],
        "good": [2.9, 2.91, 2.89],
        "same": [3.0, 3.0, 3.01],
        "bad": [3.2, 3.2, 3.2],
    }
    one = contrast(measured_of(losses), "arm", "standard")
    assert clear(one) == {"good": True, "same": False, "bad": True}
    assert one.sentence().startswith("Below standard: good (by 0.1000); above standard: bad (by 0.2000); the interval")
    assert [row[5] for row in one.table("t").rows] == ["baseline", "excludes 0", "includes 0", "excludes 0"]
    alone = contrast(measured_of({label: many[:1] for label, many in losses.items()}), "arm", "standard")
    assert not any(clear(alone).values())
    assert alone.sentence().startswith("No interval is known: with one seed each")
    assert alone.values()["variants"]["good"]["low"] is None
    known = contrast(measured_of({"standard": [3.0], "good": [2.9]}, known_noise(0.005)), "arm", "standard")
    assert clear(known) == {"good": True}


def test_a_contrast_is_the_rule_of_stats_over_all_runs_of_the_recipe():
    losses = {"standard": [3.0, 3.02], "block": [2.95, 2.97], "full": [2.94, 2.98]}
    measured = measured_of(losses, known_noise(0.01))
    own = [(label, seed, value) for label, many in losses.items() for seed, value in enumerate(many)]
    recipe = Recipe([*own, *measured.noises[10].runs])
    one = contrast(measured, "arm", "standard", published={"block": -0.02, "full": -0.029})
    block, full = one.others
    assert block.effect == recipe.effect("block", "standard"), "asked beforehand: at 5 %"
    assert full.effect[:3] == recipe.effect("full", "standard")[:3] and full.effect.level == 0.05
    three = contrast(measured, "arm", "standard", comparisons=4)
    assert three.others[1].effect.level == pytest.approx(0.05 / 3), "of three others two have not finished"
    assert full.words.endswith("the published −0.029") and one.values()["variants"]["block"]["published"] == -0.02
    again = measured_of(losses, {10: KnownNoise(0.01, 3, tuple(own))})
    assert again.recipe_of("arm").counts == dict.fromkeys(losses, 2), "a run that both have is one"


def test_when_a_seeds_luck_falls(setting):
    """What is drawn by step 20 and kept is seen there; before it nothing is."""
    draw = np.random.default_rng(0)
    luck, early = draw.normal(0, 0.01, 200), draw.normal(0, 0.03, 200)
    rows = [
        MeasuredRow("recipe", "standard", seed, step, 0, 0.0, "loss", 3.0 + gap)
        for step, gaps in ((10, early), (20, luck), (40, 2 * luck))
        for seed, gap in enumerate(gaps)
    ]
    table = STUDIES["noise"].analyse(setting, Measured(rows=rows)).tables[1]
    assert [row[:2] for row in table.rows] == [["40", "10"], ["40", "20"], ["40", "40"]]
    assert [float(row[2]) for row in table.rows] == pytest.approx([0.03, 0.01, 0.02], rel=0.15)
    assert [abs(float(row[3].replace("−", "-"))) < 0.2 for row in table.rows] == [True, False, False]
    assert table.rows[1][3] == table.rows[2][3] == "1.00"
    few = [row for row in rows if row.seed < 4]
    assert len(STUDIES["noise"].analyse(setting, Measured(rows=few)).tables) == 1


def test_the_recipes_noise_and_curve_judge_its_own_arms_alone():
    curve = {5: 3.1, 10: 3.0, 20: 2.9}
    known = measured_of({"standard": [3.0, 3.02], "good": [2.9, 2.92]}, known_noise(0.005), curve)
    assert known.recipe_of("arm").counts == {"standard": 10, "good": 2}
    other = dataclasses.replace(known, recipe=frozenset())
    assert other.recipe_of("arm").counts == {"standard": 2, "good": 2}
    heads = [contrast(one, "arm", "standard").table("t").head for one in (known, other)]
    assert "tokens saved" in heads[0] and "tokens saved" not in heads[1]


def test_a_mechanism_that_makes_the_model_larger_is_said_to():
    def measured(**own):
        rows = measured_of({"standard": [3.0], **{label: [2.9] for label in own}}).rows
        counts = {"own_parameters": own, "parameters": {label: 1000 + many for label, many in own.items()}}
        return Measured(
            rows=rows
            + [
                dataclasses.replace(row, quantity=quantity, value=each[row.label])
                for quantity, each in counts.items()
                for row in rows
                if row.label in each
            ]
        )

    table = contrast(measured(small=4, large=180, none=0), "arm", "standard").table("t")
    assert [row[table.head.index("parameters")] for row in table.rows] == ["–", "+0.4 %", "+18.0 %", ""]
    assert any(note.startswith("Parameters: how many more") for note in table.notes)
    assert "parameters" not in contrast(measured(small=4, none=0), "arm", "standard").table("t").head


def test_an_accuracy_above_the_baselines_is_said_to_be_above():
    losses = {"standard": [0.5, 0.51, 0.49], "good": [0.9, 0.91, 0.89]}
    rows = [dataclasses.replace(row, quantity="accuracy") for row in measured_of(losses).rows]
    one = contrast(Measured(rows=rows), "arm", "standard", quantity="accuracy")
    assert one.sentence().startswith("Above standard: good (by 0.4000)")


def test_tokens_saved_are_read_off_the_lengths_of_the_recipe():
    curve = {5: 3.2, 10: 3.0, 20: 2.9}
    losses = {"standard": [3.0], "good": [2.9], "best": [2.5], "bad": [3.2], "worst": [4.0]}
    measured = measured_of(losses, known_noise(0.001), curve)
    table = contrast(measured, "arm", "standard").table("t")
    cells = {row[0]: row[table.head.index("tokens saved")] for row in table.rows}
    assert cells == {"standard": "", "good": "2.00×", "best": "–", "bad": "0.50×", "worst": "–"}
    # In the second of three rounds the machine was half as fast.
    times = {("arm", "standard"): [1.0, 2.0, 1.1], ("arm", "good"): [1.5, 3.0, 1.6]}
    timed = contrast(dataclasses.replace(measured, step_times=times), "arm", "standard").table("t")
    assert timed.head[-1] == "time saved" and timed.rows[1][-1] == "1.33×"


def test_tokens_and_compute_saved_are_read_off_the_runs_curves_where_no_lengths_are_known():
    """A model that learns twice as fast, of which a token costs a quarter more."""

    def rows(label, speed, flops):
        return [
            MeasuredRow("arm", label, 0, n, n, flops * n, "loss", 2 + 30 * (speed * n) ** -0.4)
            for n in (100, 200, 400, 800)
        ]

    measured = Measured(rows=[*rows("standard", 1, 1.0), *rows("fast", 2, 1.25)])
    table = contrast(measured, "arm", "standard").table("t")
    assert table.rows[1][table.head.index("tokens saved")] == "2.00×"
    assert table.rows[1][table.head.index("compute saved")] == "1.60×"


def test_runs_of_all_seeds_count_and_what_has_not_finished_is_compared_too():
    rows = rows_of({"standard": [(0, 3.01), (1, 3.0), (2, 2.99)], "good": [(0, 2.96)]})
    one = contrast(
        Measured(rows=rows, planned={"arm": ["standard-seed0", "good-seed0", "other-seed0"]}), "arm", "standard"
    )
    assert one.others[0].runs == 1 and one.recipe.counts["standard"] == 3
    assert one.comparisons == 2, "one that has not finished counts too"


def test_what_diverged_is_said_and_judged_by_nothing():
    rows = rows_of({"standard": [(0, 3.0), (1, 3.01)], "good": [(0, 2.0), (1, math.inf)], "lost": [(0, math.inf)]})
    measured = Measured(rows=rows)
    one = contrast(measured, "arm", "standard")
    assert [other.label for other in one.others] == ["good"] and one.others[0].runs == 1
    assert "diverged: good (1 seed) and lost (1 seed)" in one.sentence()
    assert [row[:3] for row in one.table("t").rows[2:]] == [["good", "diverged", "1"], ["lost", "diverged", "1"]]
    assert math.isnan(measured.mean("arm", "lost")) and measured.diverged("arm", "good") == [1]


@pytest.mark.long
def test_a_run_that_diverges_ends_no_study(setting, noise, tmp_path):
    def arms(setting, measured):
        return [setting.arm("rates", ["standard", "block", "standard@lr=1e30"], of=wild, timed=True)]

    wild = setting.config(optim={"optimizer": "adamw", "clip": 0.0, "warmup": 0.0})
    design = Design("noise", "", "", "", arms, lambda s, m: StudyResult(contrast(m, "rates", "standard").sentence()))
    other = dataclasses.replace(setting, out=tmp_path)
    with pytest.raises(Interrupted):
        conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=Here(most=2)))
    outcome = conduct(
        design, other, ExecutionOptions(QUIET, jobs=1)
    )  # in a process of its own, whose end a study has to read
    assert outcome.counts == (3, 3) and not outcome.measured.finals("rates", "standard-lr1e+30")
    assert outcome.measured.diverged("rates", "standard-lr1e+30") == [0]
    assert set(outcome.measured.step_times) == {("rates", label) for label in ("standard", "standard-lr1e+30", "block")}
    assert "rates,standard-lr1e+30,0,4,0,0,loss,inf" in (outcome.folder / "runs.csv").read_text()
    runner = Here()
    (outcome.folder / "rates" / TIMES).unlink()
    late = conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=runner, until=time.monotonic()))
    assert not late.measured.step_times, "nothing begins when the time is over"
    late = conduct(design, other, ExecutionOptions(QUIET, jobs=1, run=runner))
    assert late.measured.step_times.keys() == outcome.measured.step_times.keys(), "stopped before it was timed"
    with unpacked([outcome.folder / ARCHIVE]) as folders:
        elsewhere = dataclasses.replace(setting, out=tmp_path / "elsewhere")
        again = conduct(design, elsewhere, ExecutionOptions(QUIET, jobs=1, run=runner), adopted=folders)
    assert runner.names == [], "it would diverge again"
    assert again.measured.rows == outcome.measured.rows


@pytest.mark.long
def test_one_study_is_of_one_text_whatever_its_name_says(setting, tmp_path):
    """Two folders of one name: the arm that is trained is refused beside those that are finished."""
    texts = [tmp_path / place / "text" for place in ("one", "two")]
    for place, text in enumerate(texts):
        text.mkdir(parents=True)
        for i in range(20):
            (text / f"{i}.txt").write_text(f"Document {i} has {place}: " + " ".join(str(n * i) for n in range(80)))
    first = dataclasses.replace(setting, source=str(texts[0]), out=tmp_path / "out")
    with pytest.raises(Interrupted):
        conduct(STUDIES["exchange"], first, ExecutionOptions(QUIET, jobs=1, run=Here(most=1)))
    (arm,) = {row.arm for row in survey(STUDIES["exchange"], first)[1].rows}
    for name in first.folder("exchange").glob("x*"):
        if name.name != arm:
            shutil.rmtree(name)
    with pytest.raises(UserError, match=r"was trained on another text than .*two/text now has: give the same --source"):
        conduct(
            STUDIES["exchange"],
            dataclasses.replace(first, source=str(texts[1])),
            ExecutionOptions(QUIET, jobs=1, run=Here()),
        )
    moved = tmp_path / "three" / "text"
    shutil.copytree(texts[0], moved)
    conduct(
        STUDIES["exchange"],
        dataclasses.replace(first, source=str(moved)),
        ExecutionOptions(QUIET, jobs=1, run=Here(most=9)),
    )


def test_runs_begun_with_other_arithmetic_go_on_where_that_is_allowed(setting):
    assert not setting.config().allow_different
    allowed = dataclasses.replace(setting, allow_different=True)
    assert allowed.config().allow_different and allowed.is_recipe(allowed.config(steps=7))
    assert not differences(to_dict(setting.config()), to_dict(allowed.config()))


def test_step_times_are_taken_first_and_kept_with_the_runs(setting, tmp_path):
    """A study that is stopped has them, and so has what a repository keeps of it."""
    other = dataclasses.replace(setting, out=tmp_path)
    folder = other.folder("ablations")
    with pytest.raises(Interrupted):
        conduct(STUDIES["ablations"], other, ExecutionOptions(QUIET, jobs=1, run=Here(most=1)))
    stopped = outcome_in(folder).measured
    assert len(stopped.finished["recipe"]) == 1
    assert set(stopped.step_times) == {("recipe", label) for label in stopped.asked_for("recipe")}
    shutil.rmtree(folder / "recipe")
    assert outcome_in(folder).measured.step_times == stopped.step_times


def test_several_studies_are_counted_in_the_order_given(setting, tmp_path, capsys):
    options = ["--preset", "seconds", "--seeds", "1", "--source", str(setting.source), "--out", str(tmp_path)]
    laboratory.run(["noise", "growth", "noise", *options, "--dry-run"])
    rows = capsys.readouterr().out.splitlines()
    first = [row.split()[0] for row in rows if row.split()[:1] in (["growth"], ["noise"])]
    assert first == sorted(first, reverse=True) and set(first) == {"growth", "noise"}
    with pytest.raises(UserError, match="the study resnet needs --images"):
        laboratory.run(["resnet", *options, "--dry-run"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no run to adopt: expected run folders"):
        laboratory.run(["noise", *options, "--dry-run", "--adopt", str(tmp_path / "empty")])
    (tmp_path / "empty").rmdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file: expected a folder to write into"):
        laboratory.run(["noise", *options[:-1], str(tmp_path / "file"), "--dry-run"])
    (tmp_path / "file").unlink()
    assert not list(tmp_path.iterdir())


def test_an_estimate_says_what_it_does_before_it_imports_what_takes_long(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lab.studies", None)  # the first import that has torch in it
    with pytest.raises(ImportError, match=r"lab\.studies"):
        laboratory.run(["noise", "rates", "--dry-run"])
    assert capsys.readouterr().err.startswith("estimating noise rates: ")


@pytest.mark.parametrize(
    ("names", "preset", "warned"),
    [
        (["noise", "rates", "depth-tasks"], "pico", "rates depth-tasks: at pico "),
        (["scaling"], "pico-fp32", "scaling: at pico-fp32 "),
        (["noise", "growth", "structured-vs-memorised"], "pico", ""),
        (["rates"], "micro", ""),
    ],
)
def test_a_preset_too_small_for_a_question_says_so_before_it_begins(monkeypatch, capsys, names, preset, warned):
    monkeypatch.setattr(laboratory, "_conduct", lambda *_: print("begins", file=sys.stderr))
    laboratory.run([*names, "--preset", preset])
    words = capsys.readouterr().err
    assert words.startswith(warned) and ("about one standard deviation" in words) == bool(warned)
    assert words.endswith("begins\n") and words.count("\n") == 1 + bool(warned)


def test_what_a_study_costs_is_counted_before_it_runs(setting, tmp_path, capsys):
    """Tokens are its runs' steps, batches and windows; nothing is left of what has run."""
    other = dataclasses.replace(setting, out=tmp_path)
    recipe, floor = other.config(), max(other.preset.floor, other.seeds)
    options = ["--preset", "seconds", "--seeds", "1", "--source", str(setting.source), "--out", str(tmp_path)]
    laboratory.run(["noise", *options, "--dry-run"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row[:2] == ["noise", "recipe"]]
    tokens = floor * recipe.steps * recipe.batch_size * recipe.data.seq_len
    assert row[2:5] == [f"{floor}", f"{floor}", f"{tokens:,}"] and float(row[5]) > 6 * tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"runs.jsonl is empty: expected a run a line"),
        ("{", r"line 1 of .*runs.jsonl is not valid JSON"),
        ('{"arm": "x"}', r"line 1 of .*runs.jsonl is damaged \(files is None: expected it to be there\)"),
        ('{"arm": "..", "run": "a-seed0", "files": {}}', "names '..', which is no name of a file or folder"),
        ('{"arm": "x", "run": "a-seed0", "files": {"../a.json": {}}}', "names '../a.json', which is no name"),
        ('{"arm": "x", "run": "a", "files": {}}', "has the run 'a': expected LABEL-seedK"),
        ('{"arm": "x", "files": {}}', "has no run: expected LABEL-seedK, or none and speed.json alone"),
        ('{"arm": "x", "files": {"speed.json": {"variants": 1}}}', "speed.json in line 1 of .* is damaged"),
        (
            '{"arm": "x", "run": "a-seed0", "files": {"config.json": {"model": {"residual": 3}}}}',
            r"config.json in line 1 of .*runs.jsonl is damaged \(model.residual is 3: expected text\)",
        ),
        (
            '{"arm": "x", "run": "a-seed0", "files": {}, "metrics": [{"kind": "val", "step": 1}]}',
            r"a measurement in line 1 of .*runs.jsonl is damaged \(loss is None: expected it to be there\)",
        ),
    ],
)
def test_a_file_of_runs_that_is_none_is_refused(tmp_path, line, message):
    (tmp_path / ARCHIVE).write_text(f"{line}\n" if line else "")
    with pytest.raises(UserError, match=message), unpacked([tmp_path / ARCHIVE]):
        pass
