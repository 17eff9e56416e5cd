"""Post-norm, as in the first transformer, and DeepNorm, which scales its shortcut up."""

import torch
from torch import Tensor

from attnres.ops import Norm
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.one_stream import OneStream
from attnres.residuals.watch import NormLike


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


class DeepNorm(PostNorm):
    """x_{l+1} = norm(a x_l + f_l(x_l)), a = (2M)^(1/4) for M layers; value, output and MLP weights start / (8M)^(1/4).

    Norms and state are those of PostNorm.

    Source: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv 2203.00555, decoder-only column.
    """

    name = "deepnorm"
    traits = PostNorm.traits._replace(scales_branches=True, colour="#e69f00")
    even_start = True
    about = About(
        "N(a x + f(x)), a = (2M)^(1/4)",
        "value, output and MLP weights / (8M)^(1/4)",
        "3",
        "Wang et al., arXiv 2203.00555",
    )

    def branch_scale(self) -> float:
        return (4 * self.num_sublayers) ** -0.25

    def shortcut(self) -> float:
        return self.num_sublayers**0.25
