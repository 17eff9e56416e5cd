"""Contributions of sources to a read: more than their weights, since sources differ in length and direction.

Of a token's read h, mixed with weights p_i from sources v_i:

    contribution  c_i = <p_i v_i, h> / sum_j <p_j v_j, h>   signed, sums to one; where h = sum p_i v_i it is
                                                            <p_i v_i, h> / |h|^2
    size          s_i = |p_i| rms(v_i)                      a length: it sees neither direction nor cancellation

A source with c_i below zero points against the read, others then have more than one together. The same of single
outputs, blocks taken apart, goes by the depth mixing matrix: M[l, i] v_i in place of p_i v_i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnres.ops import compute_dtype


class Contributions:
    """Accumulates, for each of `reads` reads, the contributions of its sources and of single outputs over tokens. The
    outputs of the running pass are held until its last read.

    Attributes:
        tokens: of the last pass, by read: (tokens, sources) on the CPU; kept with `keep`.
    """

    def __init__(self, reads: int, keep: bool) -> None:
        self.shares: list[Tensor | None] = [None] * reads
        self.sizes: list[Tensor | None] = [None] * reads
        self.output_shares: list[Tensor | None] = [None] * reads
        self.tokens: dict[int, Tensor] = {}
        self._keep, self._outputs = keep, list[Tensor]()

    def start(self, embedding: Tensor) -> None:
        self._outputs = [embedding.detach().flatten(0, -2)]

    def write(self, output: Tensor) -> None:
        self._outputs.append(output.detach().flatten(0, -2))

    def read(self, read: int, h: Tensor, weights: Tensor, values: Sequence[Tensor], row: Tensor | None) -> None:
        """Add read number `read`, the sum `h` (..., d) of `values` with `weights` (tokens, sources), by default the
        outputs so far; `row` is its part of the mixing matrix, (tokens, L+1) or (1, L+1)."""
        h = h.flatten(0, -2)
        h = h.to(compute_dtype(h.dtype))
        sources = [value.detach().flatten(0, -2) for value in values] or self._outputs
        dots: dict[int, Tensor] = {}  # a source that is an output is multiplied once

        def along(vector: Tensor) -> Tensor:
            place = vector.data_ptr()
            if place not in dots:
                dots[place] = torch.linalg.vecdot(vector.to(h.dtype), h)
            return dots[place]

        shares = to_one(weights * torch.stack([along(value) for value in sources], -1))
        lengths = torch.stack([torch.linalg.vector_norm(v, dim=-1, dtype=h.dtype) for v in sources], -1)
        self.shares[read] = _added(self.shares[read], shares)
        self.sizes[read] = _added(self.sizes[read], weights.abs() * lengths / h.shape[-1] ** 0.5)
        if row is not None:
            products = torch.stack([along(output) for output in self._outputs], -1)
            terms = row[:, : products.shape[1]].to(products) * products
            self.output_shares[read] = _added(self.output_shares[read], to_one(terms))
        if self._keep:
            self.tokens[read] = shares.float().cpu()
        if read == len(self.shares) - 1:
            self._outputs = []


def to_one(terms: Tensor) -> Tensor:
    """Return terms (..., n) over their sum; zeros where the sum is zero."""
    total = terms.sum(-1, keepdim=True)
    return torch.where(total.abs() > 1e-30, terms / total.where(total.abs() > 1e-30, 1.0), 0.0)


def _added(total: Tensor | None, rows: Tensor) -> Tensor:
    added = rows.sum(0, dtype=torch.float64).cpu()
    return added if total is None else total + added
