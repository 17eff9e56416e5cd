"""At which rates a mechanism is tried: its own default first, then the other end, then all rates changed."""

import pytest

from attnres.studies.design import Measured, Row, Setting
from attnres.studies.lab import STUDIES
from attnres.studies.presets import PRESETS
from attnres.studies.tuning import RECIPE, candidates


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
        Row(RECIPE, label, seed, 10, 0, 0.0, "loss", loss + noise[seed])
        for label, loss in losses.items()
        for seed in range(3)
    ]
    result = STUDIES["ablations"].analyse(Setting("nano", PRESETS["nano"], 3, None, tmp_path), Measured(rows=rows))
    beside_standard, beside_full = result.tables
    assert sorted(row[0] for row in beside_standard.rows) == sorted(losses)
    assert [row[0] for row in beside_full.rows] == ["full", "full-window8"]
    assert result.values[RECIPE]["full"]["variants"]["full-window8"]["difference"] == pytest.approx(0.19)
    assert result.values[RECIPE]["full"]["variants"]["full-window8"]["verdict"] == "worse"
    assert "Worse than full: full-window8 (by 0.1900)" in result.verdict
    assert "over 24 comparisons" in beside_full.notes[0]
