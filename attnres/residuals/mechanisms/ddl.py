"""Deep Delta Learning with one value: an output's direction is erased from the stream and written anew."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.one_stream import TokenMix
from attnres.residuals.settings import positive
from attnres.residuals.state import State
from attnres.residuals.watch import NormLike


class Stepping(NamedTuple):
    """What a read hands to its write: the stream (..., d), and how far the coming step goes, (..., 1)."""

    stream: Tensor
    step: Tensor


class DeepDelta(TokenMix):
    """x_{l+1} = x_l + b k (v - k . x_l),    k = f / |f|,  f = f_l(N x_l).

        b = 2 sigmoid(w_b . N x_l + c_b)    v = 4 sigmoid(w_v . x_l + c_v)

    b = 0 leaves the stream as it is, b = 1 replaces its part along k by v, b = 2 mirrors it. c and w start at 0, so
    that b = 1 and v = 2; the publication's code draws w. `eps` is added to |f|, in squares.

    It is x_l plus a number of each token times f: reads are weighted sums of outputs.

    The publication also has streams of several values (d_v = 4), which are not here.

    Costs 2d + 2 parameters a sublayer.

    Source: Zhang et al., "Deep Delta Learning", arXiv 2601.00417 (d_v = 1).
    """

    name = "ddl"
    traits = Traits(True, sums_to_one=False, has_query=False, starts_standard=False)
    about = About("x + b k (v - k . x), k = f / |f|", "b = 1, v = 2", "3", "Zhang et al., arXiv 2601.00417")

    def __init__(self, num_sublayers: int, width: int, *, eps: float = 1e-5) -> None:
        super().__init__(num_sublayers, width)
        self.eps = positive("eps", eps)
        self.step_weight = nn.Parameter(torch.empty(num_sublayers, width))
        self.step_bias = nn.Parameter(torch.empty(num_sublayers))
        self.value_weight = nn.Parameter(torch.empty(num_sublayers, width))
        self.value_bias = nn.Parameter(torch.empty(num_sublayers))
        self.init_parameters()

    def init_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, State]:
        x, _ = super().read(state, index, norm)
        return x, Stepping(state, 2.0 * _gate(x, self.step_weight[index], self.step_bias[index], state.dtype))

    def write(self, state: Stepping, index: int, output: Tensor) -> Tensor:
        dtype = compute_dtype(state.stream.dtype)
        x, f = state.stream.to(dtype), output.to(dtype)
        value = 4.0 * _gate(x, self.value_weight[index], self.value_bias[index], dtype)
        inverse = (f.square().sum(-1, keepdim=True) + self.eps**2).rsqrt()
        factor = state.step * (value - (f * x).sum(-1, keepdim=True) * inverse) * inverse
        self.follow(index, 1.0, factor)
        return torch.addcmul(x, factor, f).to(state.stream.dtype)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        step, value = 2.0 * torch.sigmoid(self.step_bias), 4.0 * torch.sigmoid(self.value_bias)
        part = "without what the token adds"
        return {
            "beta": Learned(step.float().cpu(), ("sublayer",), f"b, {part}"),
            "v": Learned(value.float().cpu(), ("sublayer",), f"v, {part}"),
        }


def _gate(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sigmoid(w . x + c), (..., 1), in the compute dtype of `dtype`."""
    with full_precision(x):
        dtype = compute_dtype(dtype)
        return torch.sigmoid((x.to(dtype) * weight.to(dtype)).sum(-1, keepdim=True) + bias.to(dtype))
