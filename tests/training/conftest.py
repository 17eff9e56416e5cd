"""A corpus of a few kilobytes, prepared once, and a model of a few thousand parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import NARROW

from attnres.training import TrainConfig, from_dict


@pytest.fixture
def configure(corpus: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes the configuration of a small run in `tmp_path / out`; dotted values are given as nested dicts."""

    def make(out: str = "run", **values: Any) -> TrainConfig:
        base = from_dict(
            {
                "model": {"size": NARROW, "residual": "block", "num_blocks": 2},
                "data": {"source": str(corpus), "seq_len": 16, "val_windows": 6},
                "optim": {"lr": 0.01},
                "out": str(tmp_path / out),
                "steps": 8,
                "batch_size": 4,
                "dtype": "fp32",
                "device": "cpu",
                "val_every": 4,
                "log_every": 2,
                "depth_every": 4,
                "save_every": 4,
            }
        )
        return from_dict(values, base)

    return make
