"""The precision of a read, independent of the dtype of its sources and of autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, softmax and norm statistics: at least fp32, fp64 for fp64 sources."""
    return torch.float32 if dtype in _NARROW else torch.promote_types(dtype, torch.float32)


def rounded_sum(x: Tensor, y: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return x + y rounded once, to `dtype`; under autocast both may be narrower than the stream. With `out`, of that
    dtype, the sum is written into it, without a gradient."""
    x = x.to(torch.promote_types(x.dtype, dtype))
    return (x + y).to(dtype) if out is None else torch.add(x, y, out=out)


def full_precision(reference: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off: depth mixing is a softmax or a sum of many terms, too inexact in bf16."""
    if reference.device.type == "meta":  # PyTorch 2.11 cannot trace is_autocast_available
        return nullcontext()
    return torch.autocast(reference.device.type, enabled=False)
