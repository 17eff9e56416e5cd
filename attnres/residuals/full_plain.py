"""Attention Residuals written as in the paper, without optimisation: read this file first.

A transformer has L sublayers f_1 .. f_L, alternating attentions and MLPs. A standard residual gives each the sum of the
embedding and all earlier outputs. Here each reads a weighted mean, with learned weights:

    v_0 = the embedding,   v_l = f_l(norm_l(h_l)),   h_l = sum_i a_i v_i,   a = softmax_i(w_l . (g_l * v_i / rms(v_i)))

The pseudo-query w_l (d,) and the key gain g_l (d,) are the parameters of read l. The last read, L+1 here and L where
the code counts from 0, is the input of the head. At w = 0 all weights are equal: h_l is the sum of the sources divided
by their number, and after the norm (up to its eps) this equals the standard residual. Only the product of w_l and g_l
matters; they are two parameters because the paper norms keys by an RMSNorm, which has a gain.

The mechanisms `full` and `block` compute the same in less time and memory. Tests compare them with this file.

Source: Kimi Team, "Attention Residuals", arXiv 2603.15031.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from attnres.ops.reference import depth_read_reference

Sublayer = Callable[[Tensor], Tensor]
"""A sublayer, or a norm: (..., d) -> (..., d)."""


def full(
    embedding: Tensor, sublayers: Sequence[Sublayer], norms: Sequence[Sublayer], query: Tensor, gain: Tensor
) -> Tensor:
    """Run a network with Full Attention Residuals: every read mixes the embedding and each earlier output.

    Args:
        embedding: v_0, (..., d).
        sublayers: f_1 .. f_L.
        norms: the norms before each of them, and the head's: L+1.
        query, gain: w and g of each read, (L+1, d).

    Returns:
        The input of the head, (..., d).
    """
    sources = [embedding]
    for index, sublayer in enumerate(sublayers):
        h, _ = depth_read_reference(sources, query[index], gain[index])
        sources.append(sublayer(norms[index](h)))
    h, _ = depth_read_reference(sources, query[-1], gain[-1])
    return norms[-1](h)


def block(
    embedding: Tensor,
    sublayers: Sequence[Sublayer],
    norms: Sequence[Sublayer],
    query: Tensor,
    gain: Tensor,
    block_size: int,
) -> Tensor:
    """Run a network with Block Attention Residuals: outputs are summed in blocks of `block_size` sublayers.

    A read mixes the embedding b_0, the sums b_1, b_2, .. of finished blocks and, inside a block, the sum of its outputs
    so far. So the number of sources grows with blocks instead of sublayers. Arguments and result as in `full`.
    """
    finished, partial = [embedding], None
    for index, sublayer in enumerate(sublayers):
        sources = finished if partial is None else [*finished, partial]
        h, _ = depth_read_reference(sources, query[index], gain[index])
        output = sublayer(norms[index](h))
        partial = output if partial is None else partial + output
        if (index + 1) % block_size == 0:
            finished, partial = [*finished, partial], None
    sources = finished if partial is None else [*finished, partial]
    h, _ = depth_read_reference(sources, query[-1], gain[-1])
    return norms[-1](h)
