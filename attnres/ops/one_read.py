"""One read of a list of sources, for models outside this package."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.ops.dispatch import in_two_phases, is_wide
from attnres.ops.norms import Norm
from attnres.ops.precision import compute_dtype
from attnres.ops.reference import scaled_query
from attnres.ops.two_phase import apply_norm, merge, read_sealed

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that sources, query and gain may have."""


def depth_read(
    sources: Sequence[Tensor],
    query: Tensor,
    gain: Tensor | None = None,
    *,
    norm: Norm | None = None,
    eps: float = 1e-6,
    return_weights: bool = False,
    checkpoint_level: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute one Attention Residuals read, in a model of your own.

    >>> depth_read([torch.ones(2, 4), 3 * torch.ones(2, 4)], query=torch.zeros(4))[0]
    tensor([2., 2., 2., 2.])

        h = sum_i a_i v_i,    a = softmax_i( w . (g * v_i / sqrt(mean(v_i^2) + eps)) )

    Args:
        sources: n >= 1 tensors (..., d) of one shape: the embedding and earlier outputs or block sums. They are not
            copied or stacked for backward.
        query: the pseudo-query w, (d,). Start it at zero: the read is then the plain mean.
        gain: the key norm's gain g, (d,), or None for ones.
        norm: norm applied to h in the same pass (`attnres.Norm(weight, eps=...)`).
        eps: eps of the key norm.
        return_weights: also return the weights a, (n, ...), detached, in the compute dtype.
        checkpoint_level: 0 stores h for backward; 1 stores only the weights and recomputes h from the sources.

    Returns:
        h, or norm(h), of the sources' shape and the first source's dtype (`norm.out_dtype` if given); then the weights
        if asked for. Logits, softmax and statistics are in fp32 (fp64 for fp64 sources).

    Raises:
        ValueError: no source, shapes that do not fit, or another checkpoint level.

    Source: arXiv 2603.15031.
    """
    sources = list(sources)
    _check_read(sources, query, gain, norm, checkpoint_level)
    shape = sources[0].shape
    dtype, n = sources[0].dtype, len(sources)
    if n == 1:  # h is the source itself, exactly, and the query's gradient is exactly zero
        weights = torch.ones((1, *shape[:-1]), dtype=compute_dtype(dtype), device=sources[0].device)
        h = sources[0] + (scaled_query(query, gain) * 0.0).sum().to(dtype)
        x = h if norm is None else apply_norm(h, norm)
        return (x, weights) if return_weights else x
    scaled = scaled_query(query, gain)
    sources = [source.reshape(-1, shape[-1]) for source in sources] if len(shape) == 1 else sources
    if norm is not None and norm.out_dtype is None:
        norm = norm._replace(out_dtype=dtype)
    how: dict[str, Any] = {"eps": eps, "dtype": dtype, "recompute": bool(checkpoint_level), "watched": return_weights}
    if in_two_phases(n, 1, training=torch.is_grad_enabled(), opens=0) or is_wide(sources[0]):
        sealed = read_sealed(sources, scaled.unsqueeze(0), eps=eps)
        merged = merge(sealed.read(0), (), None, None, norm, **how)
        weights = sealed.logits[:, :, 0].softmax(1)
    else:
        merged = merge(None, sources, None, scaled, norm, **how)
        weights = merged.weights
    x = merged.x.view(shape)
    return x if weights is None or not return_weights else (x, weights.t().reshape(n, *shape[:-1]))


def _check_read(
    sources: list[Tensor], query: Tensor, gain: Tensor | None, norm: Norm | None, checkpoint_level: int
) -> None:
    """Raise ValueError for arguments that `depth_read` cannot take."""
    if not sources:
        raise ValueError("depth_read got no sources: expected a list of at least one tensor (..., d)")
    if checkpoint_level not in (0, 1):
        raise ValueError(
            f"depth_read got checkpoint_level={checkpoint_level!r}: expected 0 (keep h) or 1 (recompute it)"
        )
    if norm is not None and not isinstance(norm, Norm):
        raise ValueError(f"depth_read got a norm of type {type(norm).__name__}: expected an attnres.Norm or None")
    shape = sources[0].shape
    if not shape or not shape[-1]:
        raise ValueError(f"depth_read got source 0 of shape {tuple(shape)}: expected (..., d) with d of 1 or more")
    for i, source in enumerate(sources):
        _check_dtype(f"source {i}", source)
        if source.shape != shape:
            raise ValueError(f"depth_read got source 0 of shape {tuple(shape)} and source {i} of {tuple(source.shape)}")
    vectors = {"query": query, "gain": gain}
    if norm is not None:
        vectors |= {"a norm's weight": norm.weight, "a norm's bias": norm.bias}
    for name, vector in vectors.items():
        if vector is None:
            continue
        _check_dtype(name, vector)
        if vector.shape != shape[-1:]:
            raise ValueError(f"depth_read got {name} of shape {tuple(vector.shape)}: expected ({shape[-1]},)")


def _check_dtype(name: str, tensor: Tensor) -> None:
    """Raise ValueError for an argument that is no tensor or has an unsupported dtype: integer, complex, 8 bits."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"depth_read got {name} of type {type(tensor).__name__}: expected a tensor")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"depth_read got {name} of {tensor.dtype}: expected a floating dtype of 16, 32 or 64 bits")
