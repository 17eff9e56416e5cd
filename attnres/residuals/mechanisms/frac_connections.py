"""Frac-Connections: Hyper-Connections between n slices of one stream, which widen nothing."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.residuals.base import NormLike
from attnres.residuals.layout import About, Traits
from attnres.residuals.mechanisms.hyper_connections import TanhConnections
from attnres.residuals.settings import whole


class Slices(NamedTuple):
    """The stream (..., d), and after a read how much of its slice of the coming output each slice receives: one tensor
    (..., n)."""

    stream: Tensor
    beta: tuple[Tensor, ...] = ()


class FracConnections(TanhConnections):
    """x = norm(Y^T H),  H' = A^T H + beta * f(x), over the n slices H (n, d/n) of one stream; f(x) is sliced alike.

        [Y, A] = static_alpha + s_a tanh(N(H) W_a)      (n, 2n)
        beta   = static_beta  + s_b tanh(N(H) w_b)      (n,)

    Static part: Y = A = I, beta = 1: the standard residual. Dynamic part: W = 0, s = 0.01; N is an RMSNorm of each
    slice with a learned gain. A read mixes channels of different slices, so no number says how much of an output is in
    it. Parameters of a sublayer: 2n^2 + n, and dynamically (2n + 2) d/n + 2.

    Source: Zhu et al., "Frac-Connections", arXiv 2503.14125, without code: the form of the dynamic part is that of
    Hyper-Connections (arXiv 2409.19606), with an RMSNorm as there.
    """

    name = "frac_connections"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, linear=False)
    about = About(
        "H = A^T H + beta f(N(Y^T H)), H the n slices of x",
        "Y = A = I, beta = 1; dynamic part 0",
        "10",
        "Zhu et al., arXiv 2503.14125",
    )

    def __init__(
        self, num_sublayers: int, width: int, *, num_slices: int = 4, dynamic: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__(num_sublayers, width)
        if width % whole("num_slices", num_slices):
            raise UserError(f"num_slices is {num_slices}: expected a number that divides the width {width}")
        self.num_slices = num_slices
        self.make_parameters(num_slices, num_slices, width // num_slices, dynamic=dynamic, eps=eps)

    def first_read(self, index: int, count: int) -> Tensor:
        return torch.eye(count)

    def _sliced(self, vector: Tensor) -> Tensor:
        return vector.unflatten(-1, (self.num_slices, -1))

    def start(self, embedding: Tensor) -> Slices:
        return Slices(embedding)

    def read(self, state: Slices, index: int, norm: NormLike) -> tuple[Tensor, Slices]:
        dtype = state.stream.dtype
        with full_precision(state.stream):
            slices = self._sliced(state.stream).to(compute_dtype(dtype))
            alpha, beta = self.connections(slices, index)
            mixed = (alpha.transpose(-1, -2) @ slices).to(dtype)
        h, stream = (part.flatten(-2) for part in mixed.split(self.num_slices, -2))
        return self.normed(h, index, norm), Slices(stream, (beta.to(dtype),))

    def write(self, state: Slices, index: int, output: Tensor) -> Slices:
        (beta,) = state.beta  # a write follows its read
        return Slices(state.stream + (beta.unsqueeze(-1) * self._sliced(output)).flatten(-2))

    def hidden_state(self, state: Slices) -> Tensor:
        return state.stream

    def finish(self, state: Slices, norm: NormLike) -> Tensor:
        return self.normed(state.stream, self.num_sublayers, norm)
