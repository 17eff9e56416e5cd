"""Arithmetic that several mechanisms share."""

from collections.abc import Sequence

import torch
from torch import Tensor


def normed_product(vectors: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return N(vectors) W for an RMSNorm N without gain, and keep no normed copy of the vectors.

    Args:
        vectors: (..., k). weight: (k, m), in the vectors' dtype as the result (..., m) is.
    """
    squares = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square()
    return (vectors @ weight) * (squares / vectors.shape[-1] + eps).rsqrt()


def weighted_sum(values: Sequence[Tensor], weights: Sequence[Tensor] | Tensor) -> Tensor:
    """Return sum_j weights[j] values[j] for n >= 1 values (..., d), and weights of shapes that fit them."""
    total = values[0] * weights[0]
    for j in range(1, len(values)):
        total = torch.addcmul(total, values[j], weights[j])
    return total
