"""In which precision a read is made, whatever that of its sources and of autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, softmax and norm statistics: at least fp32, fp64 for fp64 sources."""
    return torch.float32 if dtype in _NARROW else torch.promote_types(dtype, torch.float32)


def rounded_sum(x: Tensor, y: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return x + y rounded once, to `dtype`: under autocast both may be in less than the stream is. It is written into
    `out`, of that dtype, where there is one; no gradient passes then."""
    x = x.to(torch.promote_types(x.dtype, dtype))
    return (x + y).to(dtype) if out is None else torch.add(x, y, out=out)


def full_precision(reference: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off: depth mixing is a softmax or a sum of many terms, which bf16 loses."""
    if reference.device.type == "meta":  # PyTorch 2.11 cannot trace is_autocast_available
        return nullcontext()
    return torch.autocast(reference.device.type, enabled=False)
