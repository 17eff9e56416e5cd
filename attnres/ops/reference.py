"""A depth read written out plainly: the oracle against which every faster implementation is tested."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.ops.precision import compute_dtype


def scaled_query(query: Tensor, gain: Tensor | None) -> Tensor:
    """Return w * g, with which a read computes its logits, in at least fp32: rounded to 16 bits it would move weights
    by a percent."""
    dtype = compute_dtype(query.dtype)
    return query.to(dtype) if gain is None else query.to(dtype) * gain.to(dtype)


def depth_read_reference(
    sources: Sequence[Tensor], query: Tensor, gain: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute one depth read: a softmax over sources, token by token.

    >>> h, weights = depth_read_reference([torch.ones(2, 4), 3 * torch.ones(2, 4)], torch.zeros(4))
    >>> h[0], weights[:, 0]
    (tensor([2., 2., 2., 2.]), tensor([0.5000, 0.5000]))

        h = sum_i a_i v_i,    a = softmax_i( w . (g * v_i / rms(v_i)) ),    rms(v) = sqrt(mean(v^2) + eps)

    Args:
        sources: n tensors `v_i` of shape (..., d).
        query: the pseudo-query `w`, shape (d,).
        gain: the key norm's gain `g`, shape (d,); None means ones.
        eps: eps of the key norm.

    Returns:
        `h` (..., d) and the weights `a` (n, ...), in fp32 or more. Keys are normed, values are raw, and there is no
        1/sqrt(d): the paper has none.

    Source: "Attention Residuals", arXiv 2603.15031, equations of Full AttnRes.
    """
    values = torch.stack(list(sources))
    values = values.to(compute_dtype(values.dtype))
    keys = values * (values.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    weights = (keys * scaled_query(query, gain).to(keys.dtype)).sum(-1).softmax(0)
    return (weights.unsqueeze(-1) * values).sum(0), weights
