"""The suite for a GPU: `pytest -m gpu tests/gpu`. Most of its tests also run on a CPU in small, to know them right.

Nothing here needs triton: without a CUDA device every `gpu` test is skipped, and says so.
"""

import pytest
import torch


def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test runs. Shapes may depend on it; what is asserted does not."""
    if request.param == "cuda":
        _needs_cuda()
    return request.param


@pytest.fixture
def cuda() -> str:
    """For what only a GPU has. Tests that use it are marked `gpu` themselves."""
    _needs_cuda()
    return "cuda"
