"""The experiments are scripts that import each other by name."""

import sys
from pathlib import Path

import pytest
from tiny import NARROW

from attnres.training import from_dict, train

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    """A run of Block of 8 steps that kept the fourth's checkpoint."""
    values = {
        "model": {"size": NARROW, "residual": "block", "num_blocks": 2},
        "data": {"source": str(corpus), "seq_len": 16, "val_windows": 6},
        "optim": {"lr": 0.01, "residual_lr": 0.01},
        "out": str(tmp_path / "run"),
        "steps": 8,
        "batch_size": 4,
        "dtype": "fp32",
        "device": "cpu",
        "val_every": 4,
        "save_every": 4,
        "keep_at": [4],
    }
    train(from_dict(values), progress=False)
    return tmp_path / "run"
