"""The norm that consumes a read, as a value: what a fused read needs to know of it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def row_norm2(x: Tensor) -> Tensor:
    """sum(x^2) over the last axis, without a temporary of x's size."""
    return torch.linalg.vector_norm(x, dim=-1).square()


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y, rstd = normalise(h.to(torch.promote_types(h.dtype, torch.float32)), norm._replace(weight=weight, bias=bias))
        ctx.save_for_backward(h, rstd, weight, bias)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, rstd, weight, bias = ctx.saved_tensors
        norm = ctx.norm._replace(weight=weight, bias=bias)
        dh, dweight, dbias, _ = normalise_backward(grads[0], h.to(rstd.dtype), rstd, norm)
        return dh, None, dweight, dbias


def apply_norm(h: Tensor, norm: Norm) -> Tensor:
    """norm(h) for h (..., d), with a backward of its own that saves h and one scalar a token.

    Several times cheaper on a CPU than the same expression through autograd; every residual of this package uses it,
    the standard one included, so that comparisons compare residuals.
    """
    if norm.out_dtype is None:
        norm = norm._replace(out_dtype=h.dtype)
    with torch.autocast(h.device.type, enabled=False):
        flat = _Normalise.apply(
            h.reshape(-1, h.shape[-1]), norm._replace(weight=None, bias=None), norm.weight, norm.bias
        )
    return flat.view(h.shape)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, in the compute dtype; carries no gradient."""
    with torch.no_grad():
        dtype = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square()
        return (squares / x.shape[-1] + eps).rsqrt()


def normalise(h: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The norm's forward on h (T, d) in the compute dtype: (y, rstd), with rstd of shape (T, 1)."""
    d = h.shape[-1]
    weight, bias = (v if v is None else v.to(h.dtype) for v in (norm.weight, norm.bias))
    if norm.center:
        y, _, rstd = torch.native_layer_norm(h, (d,), weight, bias, norm.eps)
    else:
        rstd = (row_norm2(h) / d + norm.eps).rsqrt().unsqueeze(-1)
        y = h * rstd
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
    return y.to(norm.out_dtype or h.dtype), rstd


def normalise_backward(
    grad: Tensor, h: Tensor, rstd: Tensor, norm: Norm
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients (dh, dweight, dbias) and <dh, h>, which is almost zero because a norm removes scale.

    With n = (h - mean) * rstd, t = weight * grad and c = mean(t * n):
    dh = rstd * (t - n * c - center * mean(t)), and <dh, h> = d * c * eps * rstd^2 exactly.
    """
    d = h.shape[-1]
    grad = grad.to(h.dtype)
    hat = (h - h.mean(-1, keepdim=True)).mul_(rstd) if norm.center else h * rstd
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
    dh.mul_(rstd)
    return dh, dweight, dbias, (total * rstd.square()).squeeze(-1) * norm.eps
