"""Post-norm: the norm comes after the addition, and what it gives is the new stream."""

import torch
from torch import Tensor

from attnres.ops import Norm
from attnres.residuals.base import NormLike
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.one_stream import OneStream


class PostNorm(OneStream):
    """x_{l+1} = N(x_l + f_l(x_l)).

    A pre-norm decoder has one norm in front of each sublayer and one at the end: here they serve as the embedding's
    norm and as each sublayer's post-norm, so no parameter is added or left out.

    State: what the next norm will be given, then (after the read) its output, which is the new stream; (..., d).

    Source: Vaswani et al., "Attention Is All You Need", arXiv 1706.03762.
    """

    name = "postnorm"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About("N(x + f(x))", "nothing", "3", "Vaswani et al., arXiv 1706.03762")

    def shortcut(self) -> float:
        """Return the factor of the stream in each sum."""
        return 1.0

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        if isinstance(norm, Norm):
            x = self.normed(state, index, norm._replace(out_dtype=state.dtype))
            return x if norm.out_dtype is None else x.to(norm.out_dtype), x
        x = self.normed(state, index, norm)
        return x, x

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return torch.add(output, state, alpha=self.shortcut())
