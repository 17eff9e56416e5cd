"""Arithmetic that several mechanisms share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def weighted_sum(values: Sequence[Tensor], weights: Sequence[Tensor] | Tensor) -> Tensor:
    """Return sum_j weights[j] values[j] for n >= 1 values (..., d), and weights of shapes that fit them."""
    total = values[0] * weights[0]
    for j in range(1, len(values)):
        total = torch.addcmul(total, values[j], weights[j])
    return total


class Precise(nn.Module):
    """A module whose parameters stay in fp32 where a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Precise":
        """Move or cast as asked, but keep parameters in fp32 where 16 bits are asked for (`.to(torch.bfloat16)`,
        Lightning's bf16-true): steps of a small rate would round to nothing there."""

        def precise(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            narrows = tensor.is_floating_point() and new.element_size() < 4 <= tensor.element_size()
            return tensor.to(new.device) if narrows else new

        return super()._apply(precise, recurse)
