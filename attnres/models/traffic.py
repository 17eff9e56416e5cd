"""Bytes that depth reads move between a device's memory and its cores in training, counted vector by vector.

The unit is one vector of width d per token, in the stream's dtype. What is scalar per token (logits, maxima, 1/rms) is
left out, and so is the one read of the output. A Triton or C kernel moves what is counted here; plain torch moves more.
`benchmarks/traffic.py` counts other implementations with the same unit, docs/kernels.md holds both against clocks.
"""

from collections.abc import Sequence
from itertools import pairwise

from attnres.residuals import Residual, residual_class
from attnres.residuals.mechanisms.block import Block
from attnres.residuals.mechanisms.depth_attention import DepthAttention
from attnres.residuals.mechanisms.full import Full

ADD = 3
"""a + b out of place."""
STANDARD = 8
"""A sublayer of the standard residual, addition and norm fused: h, f -> h, x. Backward: dx, h and the stream's gradient
-> that gradient."""


def read_sealed(n: float, reads: int) -> float:
    """Phase 1: sources in, an output for each read out."""
    return n + reads


def read_sealed_backward(n: float, reads: int, carried: float) -> float:
    """Sources, outputs' gradients and what later reads left for the sources in; the sources' gradients out."""
    return n + reads + carried + n


def merge(opens: int, *, added: bool, sealed: bool = True, norm: bool = True, kept: bool = True) -> float:
    """Open sources, what is added to the last of them and the phase-1 output in; the sum, h and x out.

    h goes to memory only if a backward needs it (`kept`) and it is not the phase-1 output itself; in fp32 if no norm
    follows, when x is h rounded.
    """
    h = (1 if norm else 2) if kept and opens else 0
    return opens + added + sealed + added + 1 + h


def merge_backward(opens: int, *, carried: int, sealed: bool = True) -> float:
    """The gradient, h, the open sources and their carried gradients in; gradients of these and of the output out."""
    return 2 + opens + carried + opens + sealed


def group(n: float, opens: Sequence[int], *, sums: bool) -> float:
    """Return the vectors of a group of reads, forward and backward, with their pre-norms and the sublayers' additions.

    Args:
        n: sealed sources of the group.
        opens: open sources of each of its reads, the first of which has none.
        sums: whether a sublayer's output is added to the open source (Block) instead of being one itself (Full).
    """
    reads = len(opens)
    forward = read_sealed(n, reads) + sum(merge(open_, added=sums and i > 1) for i, open_ in enumerate(opens))
    backward = read_sealed_backward(n, reads, n) + sum(merge_backward(open_, carried=open_) for open_ in opens)
    return forward + backward + ADD * (sums and reads > 1)


def step_vectors(residual: Residual) -> float | None:
    """Return the vectors a token that all sublayers of a network move in a step; None for a mechanism that is not
    counted: another one than standard, Block or Full, or settings that no kernel has."""
    if type(residual) is residual_class("standard"):
        return float(STANDARD * residual.num_sublayers)
    if not isinstance(residual, DepthAttention) or type(residual) not in (Block, Full):
        return None
    if residual.special is not None or residual.window is not None:
        return None
    return sum(
        group(
            len(residual.sealed(start)),
            [len(residual.opens(index)) for index in range(start, stop)],
            sums=isinstance(residual, Block),
        )
        for start, stop in pairwise(residual.bounds)
    )
