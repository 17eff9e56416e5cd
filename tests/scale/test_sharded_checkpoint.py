"""Sharded checkpoints are read as data: what they name is not run."""

import dataclasses
import os
import pickle
import warnings

import pytest
import torch

from attnres.errors import UserError
from attnres.scale.sharded_checkpoint import load_shards, save_shards, shapes_in


@pytest.fixture
def folder(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5, dtype=torch.float64).bfloat16(), "c": torch.tensor(7)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_shards(tmp_path / "shares", tensors)
    return tmp_path / "shares", tensors


def test_what_is_written_is_read(folder):
    path, tensors = folder
    assert shapes_in(path) == {name: tensor.shape for name, tensor in tensors.items()}
    there = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_shards(path, there)
    assert all(torch.equal(there[name], tensor) for name, tensor in tensors.items())


class Planted:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_code_in_a_description_is_refused_and_not_run(folder, tmp_path):
    path, tensors = folder
    description = pickle.loads((path / ".metadata").read_bytes())
    for place in ("planner_data", "storage_meta"):
        planted = dataclasses.replace(description, **{place: Planted(tmp_path / "marker")})
        (path / ".metadata").write_bytes(pickle.dumps(planted))
        for call in (lambda: shapes_in(path), lambda: load_shards(path, tensors)):
            with pytest.raises(UserError, match=r"no finished sharded checkpoint \(it names posix.mkdir"):
                call()
        assert not (tmp_path / "marker").exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert (tmp_path / "marker").exists(), "as it would have been"
