"""A corpus of a few kilobytes, prepared once, and a model of a few thousand parameters."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import NARROW

from attnres.data import prepare
from attnres.training import TrainConfig, from_dict


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared folder of 200 documents made of a few words."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["stream", "read", "write", "source", "block", "depth", "query", "norm", "head", "layer"]
    for index in range(200):
        (folder / f"{index}.txt").write_text(" ".join(draw.choices(words, k=60)), encoding="utf-8")
    return prepare(str(folder), "bpe:280", out=folder / "tokens", held_out=0.2, progress=False).path


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
