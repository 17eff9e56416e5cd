"""SiameseNorm: a post-norm stream and a pre-norm stream side by side, which share every sublayer."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.ops import Norm, apply_norm
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Traits
from attnres.residuals.settings import positive
from attnres.residuals.watch import NormLike


class Siamese(NamedTuple):
    """The streams, (..., d) each: `post` before its norm, or after a read behind it; `pre`, the plain running sum."""

    post: Tensor
    pre: Tensor


class SiameseNorm(Residual):
    """x = P_l(x);  z = f_l(N(x + Q_l(y)));  x = x + z / c_l;  y = y + z;  the head reads N(P(x) + Q(y)).

    x is the post-norm stream and y the pre-norm one; both start as the embedding. c = sqrt(2k) in layer k = 1 .. M. P
    and Q are RMSNorms with gains that start at 1 and `eps`: the residual's own, two for each read, besides the
    decoder's norms N.

    Costs 2d parameters a sublayer.

    Source: Li et al., "SiameseNorm", arXiv 2602.08064 (the variant post-pre).
    """

    name = "siamese_norm"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About(
        "x = P(x), z = f(N(x + Q(y))), x + z/c, y + z",
        "x and y the embedding, gains 1",
        "5",
        "Li et al., arXiv 2602.08064",
    )

    def __init__(self, num_sublayers: int, width: int, *, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        self.eps = positive("eps", eps)
        self.post_gain = nn.Parameter(torch.empty(num_sublayers + 1, width))
        self.pre_gain = nn.Parameter(torch.empty(num_sublayers + 1, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.ones_(self.post_gain)
        nn.init.ones_(self.pre_gain)

    def start(self, embedding: Tensor) -> Siamese:
        return Siamese(embedding, embedding)

    def read(self, state: Siamese, index: int, norm: NormLike) -> tuple[Tensor, Siamese]:
        post = apply_norm(state.post, Norm(self.post_gain[index], eps=self.eps))
        h = post + apply_norm(state.pre, Norm(self.pre_gain[index], eps=self.eps))
        return self.normed(h, index, norm), Siamese(post, state.pre)

    def write(self, state: Siamese, index: int, output: Tensor) -> Siamese:
        kinds = len(self.sublayers)
        scale = (kinds * (1 + index // kinds)) ** -0.5
        return Siamese(torch.add(state.post, output, alpha=scale), state.pre + output)

    def hidden_state(self, state: Siamese) -> Tensor:
        return state.pre

    def finish(self, state: Siamese, norm: NormLike) -> Tensor:
        return self.read(state, self.num_sublayers, norm)[0]
