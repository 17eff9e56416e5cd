"""Rules of two streams: SiameseNorm (post-norm and pre-norm), and parallel lanes for attention and MLP."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.ops import Norm, apply_norm, full_precision
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.settings import positive, start_at
from attnres.residuals.watch import NormLike


class Siamese(NamedTuple):
    """The streams, (..., d) each: `post`, which a read replaces by its norm; and `pre`, the plain running sum."""

    post: Tensor
    pre: Tensor


class SiameseNorm(Residual):
    """x = P_l(x);  z = f_l(N(x + Q_l(y)));  x = x + z / c_l;  y = y + z;  the head reads N(P(x) + Q(y)).

    x is the post-norm stream and y the pre-norm one; both start as the embedding. c = sqrt(2k) in layer k = 1 .. M. P
    and Q are RMSNorms with `eps` and gains that start at 1. They are parameters of the residual, two for each read, in
    addition to the decoder's norms N.

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


Lanes = tuple[Tensor, Tensor]


class ParallelLanes(Residual):
    """x = norm(H_r),  H' = c H + w (outer) f(x), over two lanes H (2, d): r = 1 for an MLP, 0 for any other sublayer.

    Each sublayer has one number c (`carry`) and two numbers w (`write`). c starts at sqrt(1.1), w at 1, except that an
    attention's w for lane 1 starts at 1.5: this is not the standard residual. Both lanes start as the embedding; the
    head reads their mean. Every layer has two lanes; the speedrun's model had them from layer 7 of 11 on, and other
    connections (skips, the embedding again) that are not implemented.

    Source: github.com/KellerJordan/modded-nanogpt, pull request 230 (a speedrun record, 45 steps fewer).
    """

    name = "parallel_lanes"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About(
        "H = c H + w f(N(H_r)), two lanes: attention reads lane 0, the MLP lane 1",
        "c = sqrt(1.1), w = 1, but attention's for lane 1 1.5",
        "5",
        "modded-nanogpt, pull request 230",
    )

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self.carry = nn.Parameter(torch.empty(num_sublayers))
        self.write_share = nn.Parameter(torch.empty(num_sublayers, 2))
        self.init_parameters()

    def lane(self, index: int) -> int:
        """Return the lane that sublayer `index` reads."""
        return int(self.sublayers[index % len(self.sublayers)] == "mlp")

    def init_parameters(self) -> None:
        nn.init.constant_(self.carry, 1.1**0.5)
        shares = [[1.0, 1.0 if self.lane(index) else 1.5] for index in range(self.num_sublayers)]
        start_at(self.write_share, torch.tensor(shares))

    def start(self, embedding: Tensor) -> Lanes:
        return embedding, embedding

    def read(self, state: Lanes, index: int, norm: NormLike) -> tuple[Tensor, Lanes]:
        return self.normed(state[self.lane(index)], index, norm), state

    def write(self, state: Lanes, index: int, output: Tensor) -> Lanes:
        with full_precision(output):
            carry, shares = self.carry[index], self.write_share[index]
            one, other = (
                torch.addcmul(lane * carry.to(lane), output, shares[place].to(lane)) for place, lane in enumerate(state)
            )
        return one, other

    def hidden_state(self, state: Lanes) -> Tensor:
        return torch.lerp(*state, 0.5)

    def finish(self, state: Lanes, norm: NormLike) -> Tensor:
        return self.normed(self.hidden_state(state), self.num_sublayers, norm)

    def implied(self, read: int) -> Tensor:
        return self.weights_by_verbs(read)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        carry, share = self.carry.float().cpu(), self.write_share.float().cpu()
        return {
            "carry": Learned(carry, ("sublayer",), "factor on both lanes"),
            "write": Learned(share, ("sublayer", "stream"), "share of an output for each lane"),
        }
