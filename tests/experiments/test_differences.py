"""Curves that are left of a comparison: means over the seeds that both variants have."""

import json
from pathlib import Path

import differences
import pytest

from attnres.errors import UserError

ROWS = (
    *("standard-seed0,0,9.0", "standard-seed0,50,4.0", "standard-seed0,100,3.0", "standard-seed1,50,5.0"),
    *("block-lr0.1-seed0,0,8.0", "block-lr0.1-seed0,50,3.5", "block-lr0.1-seed1,50,4.0", "block-lr0.1-seed2,50,1.0"),
    "block-lr0.1-seed0,100,2.0",
)


def test_differences_are_of_the_seeds_that_both_have(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(json.dumps({"baseline": "standard", "labels": ["standard", "block-lr0.1"]}))
    (tmp_path / "curves.csv").write_text("\n".join(("run,step,val_loss", *ROWS)) + "\n")
    (line,) = differences.differences(tmp_path, 50)
    assert (line.label, line.x, line.y) == ("block-lr0.1", [50, 100], [-0.75, -1.0])
    differences.main(tmp_path, out=tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="no losses from step 200 on"):
        differences.differences(tmp_path, 200)
