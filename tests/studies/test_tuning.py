"""At which rates a mechanism is tried: its own default first, then the other end, then all rates changed."""

import pytest

from attnres.studies.design import Setting
from attnres.studies.presets import PRESETS
from attnres.studies.tuning import candidates


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("standard", ["standard", "standard@lr=0.002", "standard@lr=0.008"]),
        ("block", ["block", "block@residual_lr=0.004", "block@lr=0.008"]),
        ("full:heads=4", ["full:heads=4", "full:heads=4@residual_lr=0.004", "full:heads=4@lr=0.008"]),
        ("mhc", ["mhc", "mhc@residual_lr=0.0004", "mhc@lr=0.008"]),
        ("denseformer", ["denseformer", "denseformer@residual_lr=0.0004", "denseformer@lr=0.008"]),
    ],
)
def test_a_mechanism_is_tried_at_both_ends_of_its_own_rate(tmp_path, variant, expected):
    assert candidates(Setting("nano", PRESETS["nano"], 3, None, tmp_path), variant) == expected
