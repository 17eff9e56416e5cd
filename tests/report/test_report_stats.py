"""Paired differences, their errors, and a headline that claims nothing inside them."""

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from synthetic import write_run, write_study

from attnres.errors import UserError
from attnres.report import load_study
from attnres.report.columns import COLUMNS, curves_csv, plain_cells, print_table, shown, to_csv
from attnres.report.headline import headline
from attnres.report.page import write_report
from attnres.report.stats import is_planned, kind, paired, paired_curve, strongest_baseline
from attnres.report.table import build_table
from attnres.residuals import settings_of
from attnres.savings import LossCurve, saving
from attnres.stats import Recipe, standard_error, t_quantile


def both(folder):
    study = load_study(folder)
    table = build_table(study)
    return study, table


def test_one_seed_has_its_error_over_windows(tmp_path):
    study, _ = both(write_study(tmp_path, ("standard", "block")))
    pair = paired(study, "block", "standard")
    assert pair is not None
    diff = study.of("block")[0].windows[1000] - study.of("standard")[0].windows[1000]
    assert pair.mean == pytest.approx(diff.mean())
    assert pair.se == pytest.approx(diff.std(ddof=1) / 8)
    assert pair.margin == pytest.approx(t_quantile(0.975, 63) * pair.se)
    assert pair.basis == "windows"


def test_pairing_removes_what_windows_have_in_common(tmp_path):
    """Windows differ far more in difficulty than variants do: the paired error must not contain that."""
    study, _ = both(write_study(tmp_path, ("standard", "block")))
    pair = paired(study, "block", "standard")
    assert pair is not None
    assert pair.se < 0.5 * standard_error(study.of("block")[0].windows[1000])


def test_three_seeds_have_their_error_over_seeds(tmp_path):
    study, _ = both(write_study(tmp_path, ("standard", "block"), seeds=3, noise=0.0001))
    pair = paired(study, "block", "standard")
    assert pair is not None
    per_seed = [
        (a.windows[1000] - b.windows[1000]).mean() for a, b in zip(study.of("block"), study.of("standard"), strict=True)
    ]
    assert pair.per_seed == pytest.approx(tuple(per_seed))
    assert (pair.basis, pair.mean) == ("seeds", pytest.approx(np.mean(per_seed)))
    assert pair.se == pytest.approx(np.std(per_seed, ddof=1) / math.sqrt(3))
    assert pair.margin == pytest.approx(4.3027 * pair.se, rel=1e-4)


def test_two_seeds_that_disagree_decide_nothing(tmp_path):
    study, _ = both(write_study(tmp_path, ("standard", "block"), seeds=2, noise=0.0001))
    for run, shift in zip(study.of("block"), (0.044, -0.028), strict=True):
        run.windows[1000] += shift - run.windows[1000].mean() + study.of("standard")[run.seed].windows[1000].mean()
    pair = paired(study, "block", "standard")
    assert pair is not None and pair.basis == "seeds" and not pair.decided
    assert pair.se == pytest.approx(0.036)


def test_what_was_asked_beforehand_is_at_5_percent_and_the_rest_together(tmp_path):
    study, table = both(write_study(tmp_path, ("standard", "block", "full", "rescaled"), seeds=3, noise=0.0001))
    assert headline(study, table).startswith("full is below standard by")
    recipe = Recipe((run.label, run.seed, run.windows[1000].mean()) for run in study.runs)
    assert recipe.degrees == 6, "four variants of three seeds"
    planned = {"block": True, "rescaled": True, "full": False}
    for label, beforehand in planned.items():
        pair = paired(study, label, "standard")
        assert pair is not None and is_planned(study, label, "standard") == beforehand
        assert pair.basis == "windows" or pair.margin == pytest.approx(recipe.effect(label, "standard").margin)
    for folder in tmp_path.glob("block-seed*"):
        shutil.copytree(folder, tmp_path / folder.name.replace("block", "other"))
    again = paired(load_study(*tmp_path.glob("*-seed*")), "block", "standard")
    assert again is not None and again.effect.level < 0.05, "two of Block are no longer one question"


def test_seeds_that_agree_by_luck_do_not_hide_the_error_over_windows(tmp_path):
    study, _ = both(write_study(tmp_path, ("standard", "rescaled"), seeds=3))
    for runs in zip(study.of("standard"), study.of("rescaled"), strict=True):
        base, other = (run.windows[1000] for run in runs)
        other += base.mean() - 0.001 - other.mean()  # the same difference in every seed
    pair = paired(study, "rescaled", "standard")
    assert pair is not None
    assert pair.se_seeds < 1e-12
    assert pair.basis == "windows"
    assert not pair.decided


def test_seeds_are_matched_and_the_rest_left_out(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "standard", seed)
    for seed in (1, 2):
        write_run(tmp_path, "block", seed)
    study, _ = both(tmp_path)
    pair = paired(study, "block", "standard")
    assert pair is not None
    assert len(pair.per_seed) == 1


def test_other_held_out_windows_are_never_paired(tmp_path):
    write_run(tmp_path, "standard", windows=64)
    write_run(tmp_path, "block", windows=32)
    study, table = both(tmp_path)
    assert paired(study, "block", "standard") is None
    assert any("No difference to standard for block: they differ in data.val_windows" in note for note in table.notes)
    text = headline(study, table)
    assert text.startswith("No finished variant can be compared with standard: nothing can be said.")
    assert "No interval for block against standard: they differ in data.val_windows." in text


def test_seeds_of_different_held_out_windows_are_not_averaged(tmp_path):
    for seed, windows in enumerate((64, 32)):
        for residual in ("standard", "block"):
            write_run(tmp_path, residual, seed, windows=windows)
    study, table = both(tmp_path)
    assert paired(study, "block", "standard") is None
    text = headline(study, table)
    assert "No interval for block against standard: they differ in data.val_windows." in text


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("optim.optimizer", "muon"),
        ("steps", 2000),
        ("model.size", "100m"),
        ("batch_size", 16),
        ("data.source", "other"),
    ],
)
def test_runs_under_other_conditions_are_never_paired(tmp_path, place, value):
    write_run(tmp_path, "standard")
    write_run(tmp_path, "full")
    change(write_run(tmp_path, "block") / "config.json", place, value)
    study, table = both(tmp_path)
    assert table.row("block").paired is None
    assert table.row("full").paired is not None
    text = headline(study, table)
    assert text.startswith("full ends below standard by")
    assert f"No interval for block against standard: they differ in {place}." in text
    assert "block ends below" not in text


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("optim.lr", 0.5),
        ("optim.muon_lr", 0.5),
        ("model.settings", {"num_blocks": 2}),
        ("out", "x"),
        ("val_every", 7),
        ("allow_different", True),
    ],
)
def test_what_a_variant_may_differ_in_does_not_part_runs(tmp_path, place, value):
    write_run(tmp_path, "standard")
    change(write_run(tmp_path, "block") / "config.json", place, value)
    assert both(tmp_path)[1].row("block").paired is not None


def test_runs_on_another_text_are_never_paired(tmp_path):
    one, two = write_run(tmp_path, "standard"), write_run(tmp_path, "block")
    record = {"tokenizer_sha256": "t", "splits": {"train": {"tokens": 7}}, "windows_sha256": "w"}
    (one / "data.json").write_text(json.dumps(record))
    assert both(tmp_path)[1].row("block").paired is not None  # the other is from an earlier version
    (two / "data.json").write_text(json.dumps(record))
    assert both(tmp_path)[1].row("block").paired is not None
    for changes in ({"windows_sha256": "v"}, {"splits": {"train": {"tokens": 8}}}):
        (two / "data.json").write_text(json.dumps(record | changes))
        study, table = both(tmp_path)
        assert table.row("block").paired is None
        assert "they differ in text" in headline(study, table)


def change(path, place, value):
    """Set a field of a JSON file by its dotted name."""
    values = json.loads(path.read_text())
    *groups, name = place.split(".")
    inner = values
    for group in groups:
        inner = inner[group]
    inner[name] = value
    path.write_text(json.dumps(values))


def test_an_unfinished_run_is_paired_at_the_last_common_step_and_claims_nothing(tmp_path):
    write_run(tmp_path, "standard")
    write_run(tmp_path, "block", stop=430)
    study, table = both(tmp_path)
    pair = table.row("block").paired
    assert pair is not None
    assert pair.step == 400
    assert len(paired_curve(study, paired(study, "block", "standard"), "block", "standard")) == 4
    assert "ends below" not in headline(study, table)
    assert any("block at step 430 of 1,000" in note for note in table.notes)


def test_a_seed_on_its_way_leaves_the_finished_ones_as_they_are(tmp_path):
    for residual in ("standard", "block"):
        for seed in (0, 1):
            write_run(tmp_path, residual, seed)
    _, before = both(tmp_path)
    write_run(tmp_path, "standard", 2)
    write_run(tmp_path, "block", 2, stop=100)
    study, table = both(tmp_path)
    row, was = table.row("block"), before.row("block")
    assert row.paired is not None and was.paired is not None
    assert (row.loss, row.paired.per_seed, row.paired.step) == (was.loss, was.paired.per_seed, 1000)
    assert len(paired_curve(study, paired(study, "block", "standard"), "block", "standard")) == 10
    assert not row.complete and "ends below" not in headline(study, table)
    assert "Unfinished, so preliminary: block (2 of 3 seeds finished, whose numbers these are)." in table.notes


def test_a_loss_that_is_no_number_is_refused(tmp_path):
    write_run(tmp_path, "standard")
    file = write_run(tmp_path, "block", stop=200) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    spoilt = [line | ({"loss": math.nan} if line["step"] > 100 and "loss" in line else {}) for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in spoilt))
    with pytest.raises(UserError, match="NaN is no number of JSON"):
        both(tmp_path)


# ------------------------------------------------------------------ headline


def test_the_headline_names_winners_the_control_and_ties(tmp_path):
    text = headline(*both(write_study(tmp_path)))
    assert text.startswith("full ends below standard by 0.1")
    assert ", block by 0.1" in text
    assert "rescaled, the placebo control, is mathematically the same as standard: its" in text
    assert "rescaled is" not in text and "than rescaled" not in text
    assert "Over rescaled" not in text, "no gain is stated against what chance does"


def test_a_control_that_is_another_function_is_judged_as_others_are(tmp_path):
    for residual, gain in (("standard", 0.0), ("rescaled", 0.001), ("completep", -0.1), ("full", -0.2)):
        write_run(tmp_path, residual, gain=gain)
    text = headline(*both(tmp_path))
    assert text.startswith("full ends below standard by 0.2") and ", completep by 0.0" in text
    assert "rescaled, the placebo control, is mathematically the same as standard" in text
    assert "completep, the control, computes" not in text
    assert "Over completep, the control, the gain is 0.1" in text


def test_what_chance_does_is_said_of_the_runs_that_have_a_partner(tmp_path):
    for residual, seed in (("standard", 0), ("rescaled", 0), ("rescaled", 1)):
        write_run(tmp_path, residual, seed)
    assert "is what chance alone does to a run" in headline(*both(tmp_path))
    write_run(tmp_path, "standard", 1)
    assert "is what chance alone does to the mean of 2 runs" in headline(*both(tmp_path))


def test_no_win_is_claimed_inside_the_error(tmp_path):
    for residual, gain in (("standard", 0.0), ("block", -0.005), ("full", 0.005), ("deepnorm", 0.3)):
        write_run(tmp_path, residual, gain=gain, noise=0.05)
    study, table = both(tmp_path)
    text = headline(study, table)
    assert "ends below" not in text
    assert "deepnorm ends above standard by" in text
    assert not any(row.paired.decided for row in table.rows if row.paired and row.label in ("block", "full"))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_claimed_is_decided(tmp_path, seed):
    """Outside of the interval of the windows' differences; that of full, a fifth of block's, is so at some seeds."""
    for residual, gain in (("standard", 0.0), ("block", -0.1), ("full", -0.02), ("deepnorm", 0.1)):
        write_run(tmp_path, residual, seed, gain=gain)
    study, table = both(tmp_path)
    losses = {row.label: study.of(row.label)[0].windows[1000] for row in table.rows}
    apart = {label: losses[label] - losses["standard"] for label in ("block", "full", "deepnorm")}
    scores = {label: gap.mean() / (gap.std(ddof=1) / math.sqrt(64)) for label, gap in apart.items()}
    pairs = {row.label: row.paired for row in table.rows if row.paired is not None}
    outside = {label: abs(score) > 1.9983 for label, score in scores.items()}  # of 63 degrees of freedom, 95 %
    assert {label: pair.decided for label, pair in pairs.items()} == outside
    assert pairs["block"].decided and pairs["deepnorm"].decided
    text = headline(study, table)
    assert text.startswith("block ends below standard by ") and "; deepnorm ends above standard by " in text
    assert (", full by " in text) == pairs["full"].decided == ("; full (" not in text)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([("block", None)], "Only block was trained"),
        ([("block", None), ("full", None)], "No run of the standard residual"),
        ([("standard", 300), ("full", None)], "standard, the baseline, has not finished"),
        ([("standard", 300), ("full", 300)], "No variant has finished yet"),
    ],
)
def test_what_cannot_be_judged_is_said(tmp_path, runs, expected):
    for residual, stop in runs:
        write_run(tmp_path, residual, stop=stop)
    assert headline(*both(tmp_path)).startswith(expected)


def test_in_a_sweep_the_opponent_is_the_best_tuned_one(tmp_path):
    for lr, handicap in ((0.001, 0.2), (0.003, 0.0), (0.01, 0.1)):
        for residual, gain in (("standard", 0.0), ("block", -0.1)):
            write_run(tmp_path, residual, label=f"{residual}-lr{lr:g}", lr=lr, gain=gain + handicap)
    study, table = both(tmp_path)
    assert strongest_baseline(study) == table.baseline == "standard-lr0.003"
    text = headline(study, table)
    assert text.startswith("block-lr0.003 ends below standard-lr0.003 by")
    assert "At equal learning rates block is below standard at 3 of 3." in text
    assert any("the best of the standard runs" in note for note in table.notes)
    last = [row for row in csv.DictReader(io.StringIO(curves_csv(study))) if row["step"] == "1000"]
    assert [row["label"] for row in last if not row["difference"]] == ["standard-lr0.003"]
    (block,) = [row for row in last if row["label"] == "block-lr0.003"]
    (row,) = [row for row in table.rows if row.label == "block-lr0.003"]
    assert float(block["difference"]) == pytest.approx(row.paired.mean, abs=1e-6)


def test_the_planned_baseline_stays_where_another_setting_is_better(tmp_path):
    for blocks, gain in ((2, 0.0), (6, -0.2)):
        folder = write_run(tmp_path, "block", label=f"block-num_blocks{blocks}", gain=gain)
        change(folder / "config.json", "model.settings", {"num_blocks": blocks})
    plan = {"labels": ["block-num_blocks2", "block-num_blocks6"], "seeds": [0], "baseline": "block-num_blocks2"}
    (tmp_path / "compare.json").write_text(json.dumps(plan))
    study, table = both(tmp_path)
    assert table.baseline == "block-num_blocks2"
    assert headline(study, table).startswith("block-num_blocks6 ends below block-num_blocks2 by 0.")


def test_a_run_that_wrote_the_settings_it_was_given_and_one_that_wrote_all_are_of_one_kind(tmp_path):
    written = ({}, settings_of("block"), {"num_blocks": 6})
    for seed, settings in enumerate(written):
        change(write_run(tmp_path, "block", seed=seed) / "config.json", "model.settings", settings)
    given, full, other = map(kind, both(tmp_path)[0].of("block"))
    assert given == full != other


def test_in_a_sweep_each_setting_is_a_variant_of_its_own(tmp_path):
    for lr in (0.001, 0.01):
        write_run(tmp_path, "standard", label=f"standard-lr{lr:g}", lr=lr, gain=20 * lr)
        for blocks in (2, 6):
            label = f"block-num_blocks{blocks}-lr{lr:g}"
            folder = write_run(tmp_path, "block", label=label, lr=lr, gain=-0.05 * blocks + 20 * lr)
            change(folder / "config.json", "model.settings", {"num_blocks": blocks})
    text = headline(*both(tmp_path))
    assert text.startswith("block-num_blocks6-lr0.001 ends below standard-lr0.001 by 0.")
    assert ", block-num_blocks2-lr0.001 by 0." in text
    assert "At equal learning rates block-num_blocks2 is below standard at 2 of 2, block-num_blocks6 at 2 of 2." in text


def test_at_equal_rates_the_control_wins_nothing_and_another_rate_of_the_queries_is_another_variant(tmp_path):
    for lr, gain in ((0.004, 0.0), (0.008, -0.1)):
        for residual, more in (("standard", 0.0), ("rescaled", -0.2), ("block", -0.3)):
            write_run(tmp_path, residual, label=f"{residual}-lr{lr:g}", lr=lr, gain=gain + more)
    folder = write_run(tmp_path, "block", label="block-residual_lr0.004-lr0.004", lr=0.004, gain=-0.1)
    change(folder / "config.json", "optim.residual_lr", 0.004)
    text = headline(*both(tmp_path))
    assert "At equal learning rates block is below standard at 2 of 2, block-residual_lr0.004 at 1 of 1." in text


def test_a_variant_worse_than_the_control_is_called_that(tmp_path):
    for residual, gain in (("standard", 0.0), ("rescaled", -0.4), ("completep", -0.4), ("full", -0.2)):
        write_run(tmp_path, residual, gain=gain)
    study, table = both(tmp_path)
    text = headline(study, table)
    assert "Worse than completep, the control: full by 0." in text and "Worse than rescaled" not in text
    assert table.row("completep").decided and not table.row("rescaled").decided, "chance is never decided"
    assert "Over completep" not in text


def test_a_seed_that_only_one_of_two_has_shows_the_noise_and_decides_nothing(tmp_path):
    for residual, gain in (("standard", 0.0), ("full", -0.2), ("block", -0.3)):
        write_run(tmp_path, residual, gain=gain)
    write_run(tmp_path, "full", 1, gain=-1.0)
    text = headline(*both(tmp_path))
    assert "full is below" not in text and "block is below" not in text


def test_an_interval_has_the_digits_of_its_error(tmp_path):
    for residual, gain in (("standard", 0.0), ("block", -0.00004)):
        write_run(tmp_path, residual, gain=gain, noise=0.001)
        path = tmp_path / f"{residual}-seed0" / "val" / "001000.npy"
        np.save(path, np.load(path) - np.load(path).mean() + 4 + gain)
    text = headline(*both(tmp_path))
    assert text.startswith("block (0.0000; 95 %: −0.00") and "the interval includes 0" in text


def test_a_single_window_decides_nothing(tmp_path):
    write_study(tmp_path, ("standard", "block"), windows=1)
    study, table = both(tmp_path)
    pair = table.row("block").paired
    assert pair is not None
    assert math.isnan(pair.margin)
    assert "ends below" not in headline(study, table)


# ------------------------------------------------------------------ table


def test_the_table_has_what_each_run_cost(tmp_path):
    _, table = both(write_study(tmp_path))
    row = table.row("block")
    assert row.perplexity == pytest.approx(math.exp(row.loss))
    assert row.step_ratio == pytest.approx(1.08)
    assert row.largest("extra_parameters") == 6400
    assert row.largest("peak_memory_bytes") == pytest.approx(1.29e9)
    assert table.interleaved
    assert row.tokens_per_s == pytest.approx(8 * 256 / (0.4 * 1.08))
    assert any("Tokens/s and step time: whole training steps" in note for note in table.notes)


@pytest.mark.long
def test_step_times_are_held_against_the_plain_model_where_it_was_timed(tmp_path):
    write_study(tmp_path)
    speed = json.loads((tmp_path / "speed.json").read_text())
    (tmp_path / "speed.json").write_text(json.dumps({**speed, "plain": {"median_s": 0.32, "ratio": 1.0}}))
    study, table = both(tmp_path)
    assert table.row("block").step_ratio == pytest.approx(0.4 * 1.08 / 0.32)
    block = list(csv.DictReader(io.StringIO(to_csv(table))))[2]
    ratio = float(block["tokens_saved"]) / float(block["time_saved"])
    assert ratio == pytest.approx(1.08), "time is saved against the baseline's own step, not the plain model's"
    assert plain_cells(table, COLUMNS)[0] == "plain model"
    out = io.StringIO()
    print_table(table, "", Console(file=out, width=80))
    (line,) = [line.split() for line in out.getvalue().splitlines() if line.strip().startswith("plain")]
    assert line == ["plain", "model", "6,400", "1.00×"]
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    write_report(study, tmp_path)
    assert '<th scope="row">plain model</th>' in (tmp_path / "report.html").read_text()
    (row,) = [row for row in csv.DictReader(io.StringIO(to_csv(table))) if row["label"] == "block"]
    assert float(row["plain_tokens_per_s"]) == 6400


@pytest.mark.parametrize(
    ("rounds", "quartiles", "said"),
    [
        (19, (1.04, 1.10), "1.08× (1.04–1.10)"),
        (3, (1.04, 1.10), "only 3 rounds were timed"),
        (19, (0.37, 5.06), "half of those of block lie between 0.37× and 5.06×"),
    ],
)
def test_a_timing_has_its_quartiles_and_is_withheld_where_it_says_nothing(tmp_path, rounds, quartiles, said):
    write_study(tmp_path)
    speed = json.loads((tmp_path / "speed.json").read_text())
    for name, entry in speed["variants"].items():
        entry |= {
            "times": [entry["median_s"]] * rounds,
            "ratio_quartiles": quartiles if name == "block" else [1.0, 1.0],
        }
    (tmp_path / "speed.json").write_text(json.dumps(speed))
    _, table = both(tmp_path)
    cells = {column.name: column.text(table.row("block"), table) for column in COLUMNS}
    if "×" in said[:6]:
        assert cells["step_time_ratio"] == said and any("quartiles" in note for note in table.notes)
    else:
        assert cells["step_time_ratio"] == cells["tokens_per_s"] == "–"
        assert any("withheld" in note and said in note for note in table.notes)
    (row,) = [row for row in csv.DictReader(io.StringIO(to_csv(table))) if row["label"] == "block"]
    assert (float(row["step_time_low"]), float(row["step_time_high"])) == quartiles


def test_a_step_is_held_against_the_baselines_of_its_round(tmp_path):
    """Rounds in which the machine was slow were slow for both."""
    write_study(tmp_path)
    speed = json.loads((tmp_path / "speed.json").read_text())
    times = {"standard": [0.4, 0.4, 0.8, 0.8, 0.8], "block": [0.44, 0.44, 0.44, 0.88, 0.88]}
    for name, values in times.items():
        speed["variants"][name] |= {"times": values, "median_s": sorted(values)[2]}
    (tmp_path / "speed.json").write_text(json.dumps(speed))
    assert both(tmp_path)[1].row("block").step_ratio == pytest.approx(1.1)


def test_without_an_interleaved_timing_the_ratio_says_so(tmp_path):
    write_study(tmp_path)
    (tmp_path / "speed.json").unlink()
    _, table = both(tmp_path)
    assert table.row("full").step_ratio == pytest.approx(0.5 / 0.4)
    assert table.row("full").tokens_per_s == pytest.approx(2048 / 0.5)
    assert any("steps were not interleaved" in note for note in table.notes)


def test_the_footer_says_which_error_it_is(tmp_path):
    one = both(write_study(tmp_path / "one"))[1].notes
    three = both(write_study(tmp_path / "three", seeds=3, noise=0.0001))[1].notes
    assert one[0].startswith("Held-out loss: ± is its standard error over windows, some of it common")
    assert "over windows; it does not include what other seeds would change" in one[1]
    assert three[0].startswith("Held-out loss: ± is its standard error over seeds, some of it common")
    assert "95 % intervals by Student's t" in three[1] and "all runs" in three[1]


def test_csv_has_a_line_a_variant_and_plain_numbers(tmp_path):
    study, table = both(write_study(tmp_path))
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [row["label"] for row in rows] == ["standard", "rescaled", "block", "full"]
    block = rows[2]
    assert float(block["difference_low95"]) < float(block["difference"]) < float(block["difference_high95"]) < 0
    base, own = (
        LossCurve((line["step"], line["loss"]) for line in study.of(name)[0].val) for name in ("standard", "block")
    )
    assert float(block["tokens_saved"]) == pytest.approx(saving(own, base).tokens)
    assert float(block["time_saved"]) == pytest.approx(saving(own, base).tokens / 1.08)
    assert (block["se_basis"], block["decided"], rows[0]["difference"]) == ("windows", "true", "")


def test_a_column_keeps_its_name_and_place_in_the_csv(tmp_path):
    """What was written earlier is read beside what is written now; a new column is the last."""
    earlier = Path(__file__).parents[2] / "docs" / "data" / "demo" / "table.csv"
    _, table = both(write_study(tmp_path))
    assert to_csv(table).splitlines()[0].startswith(earlier.read_text().splitlines()[0])


def test_scores_of_the_last_evaluation_are_means_over_finished_runs(tmp_path):
    out = write_study(tmp_path)
    assert [row["in_context"] for row in csv.DictReader(io.StringIO(to_csv(both(out)[1])))] == [""] * 4
    runs = sorted(path for path in out.glob("block-seed*/summary.json"))
    scores = [-0.25 * (1 + index) for index in range(len(runs))]
    for path, score in zip(runs, scores, strict=True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"in_context": score}))
    (row,) = [row for row in csv.DictReader(io.StringIO(to_csv(both(out)[1]))) if row["label"] == "block"]
    assert float(row["in_context"]) == pytest.approx(sum(scores) / len(scores))


def test_the_loss_before_the_first_step_is_told_where_runs_begin_from_a_model(tmp_path):
    out = write_study(tmp_path)
    assert not any("before the first step" in note for note in both(out)[1].notes)
    for seed, loss in (("standard", 3.5), ("block", 4.25)):
        path = out / f"{seed}-seed0" / "metrics.jsonl"
        path.write_text(json.dumps({"kind": "val", "step": 0, "loss": loss, "windows": 64}) + "\n" + path.read_text())
        np.save(path.parent / "val" / "000000.npy", np.full(64, loss))
    table = both(out)[1]
    assert "Held-out loss before the first step: standard 3.500 and block 4.250." in table.notes
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [row["start_loss"] for row in rows] == ["3.5", "", "4.25", ""]


def test_the_terminal_table_fits_eighty_columns(tmp_path):
    study, table = both(write_study(tmp_path))
    out = io.StringIO()
    print_table(table, headline(study, table), Console(file=out, width=80))
    assert "…" not in out.getvalue()
    assert "−0.1" in out.getvalue()


def test_a_loss_beyond_all_bounds_has_a_row(tmp_path):
    path = write_run(tmp_path, "standard") / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"val_loss": 1e4}))
    _, table = both(tmp_path)
    assert shown(table)[2].text(table.rows[0], table) == "1.01e+304"


def test_the_share_of_the_device_is_shown_where_it_is_known(tmp_path):
    for name in ("standard", "block"):
        path = write_run(tmp_path, name) / "summary.json"
        known = {"flops_per_token": 1e6, "peak_flops": 1e10 if name == "block" else None}
        path.write_text(json.dumps(json.loads(path.read_text()) | known))
    _, table = both(tmp_path)
    (column,) = [column for column in shown(table) if column.title == "MFU"]
    rows = {row.label: column.text(row, table) for row in table.rows}
    assert rows == {"standard": "–", "block": f"{2048 / 0.43 * 1e6 / 1e10:.1%}"}
    row = next(csv.DictReader(io.StringIO(to_csv(table))))
    assert (row["flops_per_s"], row["mfu"]) == (f"{2048 / 0.4 * 1e6:.10g}", "")
    assert "MFU" not in [column.title for column in shown(both(write_study(tmp_path / "other"))[1])]


def test_the_error_over_one_window_is_left_out(tmp_path):
    for residual in ("standard", "block"):
        write_run(tmp_path, residual, windows=1)
    rows = list(csv.DictReader(io.StringIO(curves_csv(both(tmp_path)[0]))))
    assert {row["difference_se_windows"] for row in rows} == {""}
    assert all(row["difference"] for row in rows if row["label"] == "block")
