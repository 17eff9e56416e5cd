"""Triton's kernels in its interpreter."""

import sys

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _no_plan_is_remembered():
    """Tests change what a plan depends on."""
    replay = sys.modules.get("attnres.ops.gpu.replay")
    if replay is not None:
        replay._REPLAYS.clear()


def _as_fp32(handle):
    """The values of a tensor; the interpreter holds bf16 as its bits."""
    if str(handle.dtype.scalar) != "bf16":
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(scope="module")
def bf16_of_a_gpu():
    """Triton 3.7's interpreter cuts fp32 to bf16 where a GPU rounds, and multiplies the bits of bf16 values."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    from attnres.ops.gpu import sealed

    cut = interpreter._convert_float

    def rounded(values, given_type, wanted, mode):
        if str(given_type) != "fp32" or str(wanted) != "bf16":
            return cut(values, given_type, wanted, mode)
        bits = np.frombuffer(values.tobytes(), dtype=np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(values.shape)

    def product(self, a, b, acc, input_precision, max_num_imprecise_acc):
        values = np.matmul(_as_fp32(a), _as_fp32(b), dtype=acc.data.dtype) + acc.data
        return interpreter.TensorHandle(values, acc.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
        patch.setattr(sealed, "INTERPRETED", False)
        yield
