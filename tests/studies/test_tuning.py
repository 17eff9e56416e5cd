"""At which rates a mechanism is tried: its own default first, then the other end, then all rates changed."""

import pytest

from attnres.studies.design import Setting
from attnres.studies.presets import PRESETS
from attnres.studies.tuning import candidates


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
