"""What mechanisms share that mix earlier outputs for each projection of an attention: their state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import Residual


class Kept(NamedTuple):
    """Finished sources (the embedding first, then what each layer gave), and what is unfinished; all (..., d)."""

    past: tuple[Tensor, ...]
    inside: tuple[Tensor, ...] = ()


class Mixtures(Residual):
    """x_c = sum_j w_cj y_j for each way c of a sublayer's input.

    A subclass says the weights by `mix`. A sublayer's mixtures keep a copy of their sources for the backward pass
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
        """Return the mixtures, (..., d) each in the sources' dtype, and their weights in that of computing."""

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
