"""The device of a name."""

import pytest
import torch

from attnres import UserError
from attnres.device import pick_device


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
