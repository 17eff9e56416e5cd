"""DeepNorm: a post-norm whose shortcut is scaled up and whose branches start small."""

from torch import Tensor

from attnres.ops.norms import Norm
from attnres.residuals.base import NormLike, Residual, State
from attnres.residuals.layout import About, Source, Traits


class DeepNorm(Residual):
    """x_{l+1} = norm(a x_l + f_l(x_l)), a = (2M)^(1/4) for M layers; value, output and MLP weights start / (8M)^(1/4).

    A pre-norm decoder has one norm in front of each sublayer and one at the end: here they serve as the embedding's
    norm and as each sublayer's post-norm, so no parameter is added or left out.

    State: what the next norm will be given, then (after the read) its output, which is the new stream; (..., d).

    Source: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv 2203.00555, decoder-only column.
    """

    name = "deepnorm"
    traits = Traits(
        False,
        sums_to_one=False,
        has_query=False,
        starts_standard=False,
        linear=False,
        scales_branches=True,
        colour="#e69f00",
    )
    about = About(
        "N(a x + f(x)), a = (2M)^(1/4)",
        "value, output and MLP weights / (8M)^(1/4)",
        "3",
        "Wang et al., arXiv 2203.00555",
    )

    def branch_scale(self) -> float:
        return (4 * self.num_sublayers) ** -0.25

    def start(self, embedding: Tensor) -> Tensor:
        return embedding

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, State]:
        if isinstance(norm, Norm):
            x = self.normed(state, index, norm._replace(out_dtype=state.dtype))
            return x if norm.out_dtype is None else x.to(norm.out_dtype), x
        x = self.normed(state, index, norm)
        return x, x

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        return state * self.num_sublayers**0.25 + output

    def sources(self, index: int) -> tuple[Source, ...]:
        return ()

    def hidden_state(self, state: Tensor) -> Tensor:
        return state

    def finish(self, state: Tensor, norm: NormLike) -> Tensor:
        return self.normed(state, self.num_sublayers, norm)
