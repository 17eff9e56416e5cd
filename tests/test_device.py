"""The device of a name."""

import pytest
import torch

from attnres import UserError
from attnres.device import autocast_dtype, pick_device


def test_devices():
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(UserError, match=r"device nonsense does not exist"):
        pick_device("nonsense")
    with pytest.raises(UserError, match=r"device meta is none that depth reads run on: expected auto, cpu or cuda"):
        pick_device("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"finds no CUDA device here: use --device cpu"):
            pick_device("cuda")


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name).index for name in ("cuda", "cuda:1")] == [None, 1]
    with pytest.raises(UserError, match=r"device cuda:2 does not exist: the last one here is cuda:1"):
        pick_device("cuda:2")


def test_the_dtype_of_autocast():
    assert autocast_dtype("cpu") is autocast_dtype("meta") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") is torch.bfloat16 and autocast_dtype("meta") is None
