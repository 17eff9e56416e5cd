"""Cross-entropy of rows of logits, with the gradient written over them, in one Triton kernel.

In plain torch the loss of a large vocabulary takes several passes over fp32 copies of the logits: log-softmax, exp,
subtracting one at the target, a cast. Here a program handles a row: it reads the logits in the matrix product's dtype
twice, the second time from the cache, and writes the gradient over them. Arithmetic is fp32, as in plain torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits of a row that a program processes at a time."""


def losses_and_gradients(z: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
    """Return -ln p of every target in nats, and overwrite z with the gradient of their sum.

    Args:
        z: (n, V), rows contiguous: of logits z / scale and then, with a cap c, c tanh(z / c) (`attnres.head.Head`).
        targets: (n,) int64.

    Returns:
        (n,) fp32.
    """
    count, width = z.shape
    losses = torch.empty(count, dtype=torch.float32, device=z.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    how: Any = {"CAPPED": cap is not None, "BLOCK": block, "num_warps": max(1, min(8, block // 256))}
    if count:
        with torch.cuda.device_of(z):
            _row[(count,)](z, targets, losses, z.stride(0), width, 1 / scale, 0.0 if cap is None else cap, **how)
    return losses


@triton.jit
def _logits(z, unit, cap, CAPPED: tl.constexpr):
    z = z.to(tl.float32) * unit
    if CAPPED:
        small = tl.exp(-2 * tl.abs(z) / cap)  # of -|z|, which cannot overflow
        bounded = cap * (1 - small) / (1 + small)  # cap tanh(|z| / cap)
        z = tl.where(z < 0, -bounded, bounded)
    return z


@triton.jit
def _row(z_ptr, target_ptr, loss_ptr, stride, width, unit, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    target = tl.load(target_ptr + row)
    lanes = tl.arange(0, BLOCK)
    largest, total = -float("inf"), 0.0
    for start in range(0, width, BLOCK):
        columns = start + lanes
        z = tl.load(z_ptr + columns, mask=columns < width, other=0.0)
        z = tl.where(columns < width, _logits(z, unit, cap, CAPPED), -float("inf"))
        now = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - now) + tl.sum(tl.exp(z - now), 0)
        largest = now
    norm = largest + tl.log(total)
    tl.store(loss_ptr + row, norm - _logits(tl.load(z_ptr + target), unit, cap, CAPPED))
    for start in range(0, width, BLOCK):
        columns = start + lanes
        raw = tl.load(z_ptr + columns, mask=columns < width, other=0.0)
        z = _logits(raw, unit, cap, CAPPED)
        gradient = tl.exp(z - norm) - tl.where(columns == target, 1.0, 0.0)
        if CAPPED:
            gradient *= 1 - (z / cap) * (z / cap)
        tl.store(z_ptr + columns, (gradient * unit).to(raw.dtype), mask=columns < width)
