"""What a backend of depth reads is: five functions, and what they give.

Shapes: T tokens, n sealed sources, k open sources, S reads, d width. `eager` is the specification of each function.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnres.ops.norms import Norm

MAX_ONE_PASS = 32
"""Open sources of one pass, over which the Triton kernels' loops are unrolled: more are read in two phases."""

MAX_SHARED = 256
"""The most sources, and the most reads, of the Triton kernels' phase 1: those of a token are one tile."""


class Sealed(NamedTuple):
    """Phase 1 of S reads over n sealed sources.

    Attributes:
        outputs: S tensors (T, d), each read's mixture of the sealed sources.
        top, total: (S, T), the largest logit and the sum of exp(logit - top). Not their log-sum-exp: rounding that
            would cost a digit where logits are of order ten.
        logits: (T, n, S).
        inv_rms: (T, n), 1 / sqrt(mean(v^2) + eps) of each source.
    """

    outputs: list[Tensor]
    top: Tensor
    total: Tensor
    logits: Tensor
    inv_rms: Tensor


class MergeSaved(NamedTuple):
    """What the backward of a merge needs.

    Attributes:
        h: (T, d), the read before its norm.
        rstd: (T,), 1 / its deviation, if a norm follows.
        weights, scores, inv_rms: (T, k), the open sources' weights, logits and 1/rms, if k > 0.
        sealed: (T,), the weight of the sealed sources together, if there are both kinds.
        scalars: all but h in one tensor, which a backend BY_ADDRESS keeps in their place; see `named`.
    """

    h: Tensor
    rstd: Tensor | None = None
    weights: Tensor | None = None
    sealed: Tensor | None = None
    scores: Tensor | None = None
    inv_rms: Tensor | None = None
    scalars: Tensor | None = None

    def named(self, k: int, *, normed: bool) -> "MergeSaved":
        """The parts of `scalars` by name, of a merge of k open sources with a norm after it or without. Its rows (T,)
        are one after another in memory: rstd, k each for weights, scores and inv_rms, and sealed if there is such."""
        scalars = self.scalars
        if scalars is None:
            return self
        rstd = scalars[0] if normed else None
        if not k:
            return MergeSaved(self.h, rstd)
        weights, scores, inv_rms = scalars[1 : 1 + 3 * k].view(3, -1, k)
        return MergeSaved(self.h, rstd, weights, scalars[-1] if len(scalars) > 1 + 3 * k else None, scores, inv_rms)


class MergeGrads(NamedTuple):
    """Gradients of a merge: of phase 1's output and top, of the open sources, of the query and the norm."""

    output: Tensor | None
    top: Tensor | None
    opens: list[Tensor]
    query: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Backend(Protocol):
    """A module that makes depth reads."""

    @property
    def BY_ADDRESS(self) -> bool:
        """Whether it takes vectors of any shape (..., d), one shape for all of a call, and gives such: a vector is an
        address and a width to it, and autocast does not concern it. Else vectors are (T, d)."""
        ...

    def read_sealed(self, queries: Tensor, sources: Sequence[Tensor], eps: float, dtype: torch.dtype) -> Sealed: ...

    def read_sealed_backward(
        self,
        queries: Tensor,
        sources: Sequence[Tensor],
        inv_rms: Tensor,
        logits: Tensor,
        grads: Sequence[Tensor],
        dtop: Sequence[Tensor],
        carried: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor]]: ...

    def merge(
        self,
        opens: Sequence[Tensor],
        added: Tensor | None,
        query: Tensor | None,
        eps: float,
        output: Tensor | None,
        top: Tensor | None,
        total: Tensor | None,
        norm: Norm | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, MergeSaved, Tensor | None]: ...

    def merge_backward(
        self,
        grad: Tensor,
        carried: Sequence[Tensor | None],
        opens: Sequence[Tensor],
        query: Tensor | None,
        norm: Norm | None,
        saved: MergeSaved,
    ) -> MergeGrads: ...

    def mix(self, sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor: ...
