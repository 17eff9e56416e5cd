"""At which rates a mechanism is tried: its own default first, then the other end, then all rates changed."""

import math

import pytest

from lab.design import Measured, MeasuredRow, Setting
from lab.presets import PRESETS
from lab.studies import STUDIES
from lab.tuning import BEST, COARSE, RECIPE, candidates, timed_at_best


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("standard", ["standard", "standard@lr=0.002", "standard@lr=0.008"]),
        ("block", ["block", "block@lr=0.002", "block@lr=0.008", "block@residual_lr=0.004"]),
        ("full:heads=4", [f"full:heads=4{way}" for way in ("", "@lr=0.002", "@lr=0.008", "@residual_lr=0.004")]),
        ("mhc", ["mhc", "mhc@lr=0.002", "mhc@lr=0.008", "mhc@residual_lr=0.0004"]),
        (
            "denseformer",
            ["denseformer", *(f"denseformer@{way}" for way in ("lr=0.002", "lr=0.008", "residual_lr=0.0004"))],
        ),
    ],
)
def test_a_mechanism_is_tried_at_both_ends_of_its_own_rate(tmp_path, variant, expected):
    assert candidates(Setting("nano", PRESETS["nano"], 3, None, tmp_path), variant) == expected


def test_a_variant_of_a_mechanism_is_held_beside_the_standard_model_and_beside_that(tmp_path):
    losses = {"standard": 3.0, "block": 2.9, "full": 2.8, "full-window8": 2.99, "mhc": 2.9, "rescaled": 3.0}
    noise = (0.001, -0.001, 0.0)
    rows = [
        MeasuredRow(RECIPE, label, seed, 10, 0, 0.0, "loss", loss + noise[seed])
        for label, loss in losses.items()
        for seed in range(3)
    ]
    result = STUDIES["ablations"].analyse(Setting("nano", PRESETS["nano"], 3, None, tmp_path), Measured(rows=rows))
    beside_standard, beside_full = result.tables
    assert sorted(row[0] for row in beside_standard.rows) == sorted(losses)
    assert [row[0] for row in beside_full.rows] == ["full", "full-window8"]
    assert result.values[RECIPE]["full"]["variants"]["full-window8"]["difference"] == pytest.approx(0.19)
    assert result.values[RECIPE]["full"]["variants"]["full-window8"]["excludes_0"]
    assert "Above full: full-window8 (by 0.1900)" in result.answer
    assert "of 26 comparisons" in beside_full.notes[0]
    block = result.values[RECIPE]["standard"]["variants"]["block"]
    assert block["published"] == pytest.approx(1.746 - 1.766) and block["excludes_published"]


def test_a_mechanism_whose_search_has_ended_is_held_at_its_best_rate_before_the_others(tmp_path):
    setting = Setting("nano", PRESETS["nano"], 3, None, tmp_path)
    noise = (0.001, -0.001, 0.0)
    recipe = {"standard": 3.0, "block": 2.9, "mhc": 2.95, "full": 2.8}
    coarse = {"standard": 3.0, "standard-lr0.002": 3.1, "standard-lr0.008": 2.96}
    coarse |= {"block": 2.9, "block-lr0.002": 2.88, "block-residual_lr0.004": 2.93, "mhc": 2.95, "mhc-lr0.002": 2.9}
    coarse |= {"full": 2.8, "full-lr0.002": 2.75, "full-lr0.008": 2.9, "full-residual_lr0.004": 2.85}
    best = {"standard-lr0.008": 2.96, "block-lr0.002": 2.88}

    def rows(arm, losses, seeds):
        return [
            MeasuredRow(arm, label, k, 10, 0, 0.0, "loss", loss + noise[k])
            for label, loss in losses.items()
            for k in seeds
        ]

    diverged = MeasuredRow(COARSE, "block-lr0.008", 0, 3, 0, 0.0, "loss", math.inf)
    measured = Measured(
        rows=[
            *(*rows(RECIPE, recipe, range(3)), *rows(COARSE, coarse, [0]), diverged),
            *(*rows(BEST, best, range(3)), *rows(BEST, {"full-lr0.002": 2.75}, [0])),
        ],
        begun=frozenset({RECIPE, COARSE, BEST}),
        step_times={(RECIPE, "standard"): [1.0, 1.0], (RECIPE, "block"): [1.1, 1.1]},
    )
    arms = {arm.name: arm.compare.variants for arm in STUDIES["ablations"].arms(setting, measured)}
    leading = [way.partition("@")[0] for way in arms[COARSE] if "@lr=0.002" in way]
    assert leading[:4] == ["standard", "full", "block", "mhc"], "by loss at the recipe's rates"
    assert arms[BEST] == ["standard@lr=0.008", "block@lr=0.002", "full@lr=0.002"]
    result = STUDIES["ablations"].analyse(setting, measured)
    tables = {table.title: table for table in result.tables}
    search = tables["Losses by rate, seed 0"]
    assert [row[0] for row in search.rows] == ["standard", "full", "block"], "of mhc two ways are to come"
    assert search.rows[2][1:] == ["2.9010", "2.8810", "diverged", "2.9310", "−0.0200"]
    own = result.values[BEST]["standard-lr0.008"]["variants"]["block-lr0.002"]
    assert own["difference"] == pytest.approx(-0.08) and own["excludes_0"]
    everything = next(table for table in result.tables if "26 comparisons" in table.notes[0])
    assert everything is result.tables[0], "all that are to be compared count from the start"
    assert [row[0] for row in everything.rows] == ["standard-lr0.008", "block-lr0.002"], "a seed chose full's rate"
    assert any(note.endswith("second seed has finished: full-lr0.002.") for note in everything.notes)


def test_a_rate_changes_no_time(tmp_path):
    times = {(RECIPE, "standard"): [1.0, 2.0], (RECIPE, "block"): [1.5, 3.0]}
    at_best = timed_at_best(
        Measured(step_times=times), {"standard": "standard@lr=0.008", "block": "block", "mhc": "mhc"}
    )
    assert at_best.step_times == times | {(BEST, "standard-lr0.008"): [1.0, 2.0], (BEST, "block"): [1.5, 3.0]}
