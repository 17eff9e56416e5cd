"""The common base of mechanisms that mix earlier outputs separately for each projection of an attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import Residual


class Kept(NamedTuple):
    """Finished sources (the embedding first, then each layer's), and unfinished ones; all (..., d)."""

    past: tuple[Tensor, ...]
    inside: tuple[Tensor, ...] = ()


class Mixtures(Residual):
    """x_c = sum_j w_cj y_j for each way c of a sublayer's input.

    A subclass computes the weights in `mix`. A sublayer's mixtures store a copy of their sources for the backward pass
    unless `recompute_reads` is set.
    """

    heeds_recompute = True
    whole_layers = True

    def mix(self, index: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixtures of the reads of sublayer `index` (L: of the head), (..., ways, d), and their weights.

        Args:
            values: the sources (..., n, d) in the compute dtype.
        """
        raise NotImplementedError

    def mixed(self, index: int, sources: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the mixtures, (..., d) each in the sources' dtype, and their weights in the compute dtype."""

        def make(first: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
            with full_precision(first):
                values = torch.stack((first, *others), -2).to(compute_dtype(first.dtype))  # one copy for all ways
                mixtures, weights = self.mix(index, values)
            return mixtures.to(first.dtype), weights

        if self.recompute_reads and torch.is_grad_enabled():
            mixtures, weights = checkpoint(make, *sources, use_reentrant=False, preserve_rng_state=False)
        else:
            mixtures, weights = make(*sources)
        return mixtures.unbind(-2), weights

    def start(self, embedding: Tensor) -> Kept:
        return Kept((embedding,))
