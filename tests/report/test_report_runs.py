"""Run folders are read as far as they came; what is none, or is damaged, is refused."""

import json
import shutil

import numpy as np
import pytest
from synthetic import routing, write_run, write_study

from attnres.errors import UserError
from attnres.report import load_run, load_study


def test_a_finished_run_is_read_whole(tmp_path):
    run = load_run(write_run(tmp_path, "block", seed=3))
    assert (run.label, run.seed, run.residual, run.finished) == ("block", 3, "block", True)
    assert sorted(run.windows) == list(range(100, 1001, 100))
    assert run.windows[1000].mean() == pytest.approx(run.val[-1]["loss"])
    assert run.tokens_at(500) == 500 * 2048


def test_an_unfinished_run_is_read_as_far_as_it_came(tmp_path):
    folder = write_run(tmp_path, "full", stop=430)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 44')  # killed while writing
    run = load_run(folder)
    assert not run.finished
    assert run.last_step == 430
    assert run.inspection is None


def test_a_run_that_has_only_its_configuration_is_read(tmp_path):
    folder = write_run(tmp_path, stop=0)
    (folder / "metrics.jsonl").unlink()
    (folder / "environment.json").unlink()
    assert load_run(folder).last_step == 0


def test_environments_of_resumptions_follow_the_first(tmp_path):
    folder = write_run(tmp_path)
    (folder / "environment.json").write_text('{"threads": 2, "resumed": [{"threads": 4}]}')
    assert load_run(folder).environments == [{"threads": 2}, {"threads": 4}]
    (folder / "environment.json").write_text('{"threads": 2, "resumed": 4}')
    with pytest.raises(UserError, match=r"environment\.json is damaged"):
        load_run(folder)


def test_steps_that_a_resumed_run_repeated_count_once(tmp_path):
    folder = write_run(tmp_path, stop=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 50, "loss": 1.25}\n{"kind": "later", "step": 50}\n')
    run = load_run(folder)
    assert [record["step"] for record in run.train] == list(range(10, 101, 10))
    assert run.train[4]["loss"] == 1.25


def test_a_run_trained_alone_takes_its_label_from_its_name(tmp_path):
    folder = write_run(tmp_path, "block", seed=1).rename(tmp_path / "renamed")
    assert load_run(folder).label == "block"


def test_a_run_that_is_given_twice_is_no_second_seed(tmp_path):
    folder = write_run(tmp_path / "all", "block", seed=1)
    for others in ([folder], [folder.parent], [folder.parent / ".." / "all" / folder.name]):
        with pytest.raises(UserError, match="block-seed1 is given twice"):
            load_study(folder, *others)


def test_a_run_that_was_moved_aside_is_no_second_seed(tmp_path):
    folder = write_run(tmp_path / "all", "block", seed=0)
    shutil.copytree(folder, folder.with_name("block-seed0.saved"))
    study = load_study(folder.parent)
    assert study.labels == ["block", "block-seed0.saved"] and len(study.of("block")) == 1


def test_a_model_is_not_a_damaged_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="holds a model and no run: expected what attnres train"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "damaged"),
        ("config.json", "[]", r"damaged \(is \[\]: expected keys and values"),
        ("summary.json", "not json", "damaged"),
        ("metrics.jsonl", '{"step": 1}\n{"kind": "val", "step": 2}\n', "line 1 of .* is damaged"),
        ("metrics.jsonl", '{"step": 1, "kind": "val", "loss": null}\n', r"damaged \(loss is None: expected a number\)"),
        ("summary.json", '{"parameters": "x"}', r"damaged \(parameters is 'x': expected a whole number\)"),
        ("summary.json", '{"val_loss": NaN}', "NaN is no number of JSON"),
        ("summary.json", "[" * 3000, "nested more than 64 deep"),
        ("summary.json", '{"peak_flops": "x"}', r"damaged \(peak_flops is 'x': expected a number, or nothing|a number"),
        ("summary.json", '{"peak_flops": 0}', "damaged .peak_flops is 0"),
        ("summary.json", '{"step_s": 0.0}', r"damaged \(step_s is 0.0: expected a number, above 0\)"),
        ("val/000100.npy", "not an array", "damaged"),
        ("val/000100.npy", "\x93NUMPY\x01\x00v\x00{'descr': '<f8', (" + " " * 102, "damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, file, content, message):
    folder = write_run(tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_run(folder)
    assert file in str(error.value)


def test_window_losses_of_a_wrong_shape_are_refused(tmp_path):
    folder = write_run(tmp_path)
    np.save(folder / "val" / "000100.npy", np.zeros((2, 3)))
    with pytest.raises(UserError, match=r"one loss for each held-out window"):
        load_run(folder)


def test_a_pickled_array_is_refused(tmp_path):
    folder = write_run(tmp_path)
    np.save(folder / "val" / "000100.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="damaged"):
        load_run(folder)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        load_study(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no runs"):
        load_study(tmp_path)
    with pytest.raises(UserError, match=r"no config\.json"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="no folder given"):
        load_study()


def test_a_comparison_keeps_its_order_and_names_what_is_missing(tmp_path):
    write_study(tmp_path, ("full", "standard"))
    plan = {"labels": ["full", "standard", "block"], "seeds": [0], "baseline": "standard"}
    (tmp_path / "compare.json").write_text(json.dumps(plan))
    study = load_study(tmp_path)
    assert (study.labels, study.baseline, study.missing) == (["full", "standard"], "standard", ["block-seed0"])


def test_without_a_plan_standard_comes_first(tmp_path):
    for residual in ("full", "block", "rescaled", "standard"):
        write_run(tmp_path, residual)
    study = load_study(tmp_path)
    assert study.labels == ["standard", "rescaled", "block", "full"]
    assert study.baseline == "standard"


def test_several_folders_are_one_study(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, "standard")
    write_run(two, "block")
    assert load_study(one, two).labels == ["standard", "block"]
    write_run(two, "standard")
    study = load_study(one, two)
    assert study.labels == ["one/standard", "two/standard", "two/block"]
    assert study.baseline == "one/standard"


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "reads": []}'])
def test_a_damaged_inspection_is_left_out(tmp_path, content):
    folder = write_run(tmp_path, "full", layers=2)
    run = load_run(folder)
    assert run.inspection.routing["sources"] == routing("full", 2)["sources"]
    assert run.inspection.routing["weights"][-1] == pytest.approx(routing("full", 2)["weights"][-1], abs=1e-5)
    (folder / "inspection.json").write_text(content)
    run = load_run(folder)
    assert run.inspection is None and "inspection.json" in run.unread
