"""Triton's kernels in its interpreter."""

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def rounding_of_a_gpu():
    """Triton 3.7's interpreter cuts fp32 to bf16 where a GPU rounds to nearest."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def rounded(values, given_type, wanted, mode):
        if str(given_type) != "fp32" or str(wanted) != "bf16":
            return cut(values, given_type, wanted, mode)
        bits = np.frombuffer(values.tobytes(), dtype=np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(values.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
