import os

import hypothesis
import pytest
import torch

from attnres.ops import cpu

if not torch.cuda.is_available():  # Triton's kernels run in its interpreter; to be said before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("repeatable", derandomize=True)  # a run of the tests is that of the commit
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(params=["eager", "cpu"])
def backend(request, monkeypatch):
    """Every implementation of the read there is."""
    if request.param == "eager":
        monkeypatch.setattr(cpu, "load", lambda: None)
    elif cpu.load() is None:
        pytest.skip("no C compiler: the CPU kernels cannot be built")
    return request.param
