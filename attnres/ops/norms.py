"""The norm after a read, as a value, and its arithmetic in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnres.ops.precision import compute_dtype


class Norm(NamedTuple):
    """RMSNorm (`center` False) or LayerNorm (`center` True) over the last axis.

        y = weight * (h - center * mean(h)) / sqrt(var(h) + eps) + bias

    Attributes:
        weight: gain of shape (d,), or None for ones.
        bias: shape (d,), or None.
        eps: added to the mean square (RMSNorm) or the variance (LayerNorm).
        center: subtract the mean first.
        out_dtype: dtype of the normed vector; None keeps that of the read.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    center: bool = False
    out_dtype: torch.dtype | None = None


def norm_kind(norm: Norm | None) -> int:
    """Return the number of a norm's kind in operators and kernels: 0 none, 1 RMSNorm, 2 LayerNorm."""
    return 0 if norm is None else 2 if norm.center else 1


def normed_product(vectors: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return N(vectors) W for an RMSNorm N without gain, without storing a normed copy of the vectors.

    Args:
        vectors: (..., k). weight: (k, m), in the dtype of the vectors and of the result (..., m).
    """
    squares = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square()
    return (vectors @ weight) * (squares / vectors.shape[-1] + eps).rsqrt()


def one_over_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) of x (..., d), with shape (..., 1), in operations that autograd
    differentiates."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis, in the compute dtype, without a gradient."""
    with torch.no_grad():
        dtype = compute_dtype(x.dtype)
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square()
        return (squares / x.shape[-1] + eps).rsqrt()


def normalise(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Apply the norm to h (T, d) in the compute dtype; return (y, rstd), rstd of shape (T,)."""
    d = h.shape[-1]
    weight, bias = (v if v is None else v.to(h.dtype) for v in (norm.weight, norm.bias))
    if norm.center:
        y, _, rstd = torch.native_layer_norm(h, (d,), weight, bias, norm.eps)
        return y.to(norm.out_dtype or h.dtype), rstd.squeeze(-1)
    rstd = inverse_rms(h, norm.eps)
    y = h * rstd.unsqueeze(-1)
    if weight is not None:
        y.mul_(weight)
    if bias is not None:
        y.add_(bias)
    return y.to(norm.out_dtype or h.dtype), rstd


def normalise_backward(
    grad: Tensor, h: Tensor, rstd: Tensor, norm: Norm
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients (dh, dweight, dbias), and <dh, h>, which is almost zero because a norm removes scale.

    With hat = (h - mean) * rstd, t = weight * grad and c = mean(t * hat):
    dh = rstd * (t - hat * c - center * mean(t)), and <dh, h> = d * c * eps * rstd^2 exactly.
    """
    d = h.shape[-1]
    grad = grad.to(h.dtype)
    scale = rstd.unsqueeze(-1)
    hat = (h - h.mean(-1, keepdim=True)).mul_(scale) if norm.center else h * scale
    product = grad * hat
    dweight = None if norm.weight is None else product.sum(0)
    dbias = None if norm.bias is None else grad.sum(0)
    if norm.weight is None:
        total, t = product.sum(-1, keepdim=True), grad
    else:
        weight = norm.weight.to(h.dtype)
        total, t = (product @ weight).unsqueeze(-1), grad * weight
    dh = torch.addcmul(t, hat, total, value=-1.0 / d)
    if norm.center:
        dh -= t.mean(-1, keepdim=True)
    dh.mul_(scale)
    return dh, dweight, dbias, (total.squeeze(-1) * rstd.square()).mul_(norm.eps)
