"""Hyper-Connections (several streams) and Frac-Connections (slices of one stream)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.ops.backend import Connection
from attnres.ops.norms import normed_product
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.streams import ParallelStreams
from attnres.residuals.settings import positive, start_at, true_or_false, whole
from attnres.residuals.watch import NormLike


class TanhConnections(Residual):
    """The coefficients that connect n streams, or n slices, H with a sublayer:

        [alpha_0, A] = static_alpha + s_a tanh(N(H) W_a)      (n, r + n)
        beta         = static_beta  + s_b tanh(N(H) w_b)      (n,)

    Dynamic part: W = 0, s = 0.01. N is an RMSNorm with a learned gain.
    """

    def make_parameters(self, count: int, reads: int, width: int, *, dynamic: bool, eps: float) -> None:
        """Make the parameters for `count` streams of width `width`, and `reads` columns of alpha_0."""
        self.eps, self.dynamic = positive("eps", eps), true_or_false("dynamic", dynamic)
        layers, columns = self.num_sublayers, reads + count
        self.static_alpha = nn.Parameter(torch.empty(layers, count, columns))
        self.static_beta = nn.Parameter(torch.empty(layers, count))
        if dynamic:
            self.gain = nn.Parameter(torch.empty(layers, width))
            self.alpha_weight = nn.Parameter(torch.empty(layers, width, columns))
            self.beta_weight = nn.Parameter(torch.empty(layers, width, 1))
            self.alpha_scale = nn.Parameter(torch.empty(layers))
            self.beta_scale = nn.Parameter(torch.empty(layers))
        self.init_parameters()

    def first_read(self, index: int, count: int) -> Tensor:
        """Return alpha_0 (count, r) of sublayer `index` at the start."""
        raise NotImplementedError

    def init_parameters(self) -> None:
        layers, count = self.static_beta.shape
        reads = torch.stack([self.first_read(index, count) for index in range(layers)])
        start_at(self.static_alpha, torch.cat([reads, torch.eye(count).expand(layers, count, count)], -1))
        nn.init.ones_(self.static_beta)
        if self.dynamic:
            nn.init.ones_(self.gain)
            nn.init.zeros_(self.alpha_weight)
            nn.init.zeros_(self.beta_weight)
            nn.init.constant_(self.alpha_scale, 0.01)
            nn.init.constant_(self.beta_scale, 0.01)

    def connections(self, streams: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return [alpha_0, A] and beta for H (..., n, width), which is in the compute dtype."""

        def row(parameter: Tensor) -> Tensor:
            return parameter[index].to(streams.dtype)

        alpha, beta = row(self.static_alpha), row(self.static_beta)
        if self.dynamic:
            weights = torch.cat([row(self.alpha_weight), row(self.beta_weight)], -1)
            dynamic = normed_product(streams, row(self.gain).unsqueeze(-1) * weights, self.eps).tanh()
            of_alpha, of_beta = dynamic.split((alpha.shape[-1], 1), -1)
            alpha = alpha + row(self.alpha_scale) * of_alpha
            beta = beta + row(self.beta_scale) * of_beta.squeeze(-1)
        return alpha, beta


class HyperConnections(TanhConnections, ParallelStreams):
    """x = norm(alpha_0^T H),  H' = A^T H + beta (outer) f(x), over n streams H (n, d).

        [alpha_0, A] = static_alpha + s_a tanh(N(H) W_a)      (n, n+1)
        beta         = static_beta  + s_b tanh(N(H) w_b)      (n,)

    Static part: alpha_0 = onehot(l mod n), A = I, beta = 1. Dynamic part: W = 0, s = 0.01. The embedding is repeated to
    all streams at the start; the head reads their sum. N is an RMSNorm with a learned gain.

    Source: Zhu et al., "Hyper-Connections", arXiv 2409.19606.
    """

    name = "hyper_connections"
    traits = Traits(True, sums_to_one=False, has_query=False, starts_standard=True, colour="#56b4e9")
    about = About(
        "H = A^T H + beta f(N(alpha^T H)), n streams",
        "alpha = onehot, A = I, beta = 1; dynamic part 0",
        "2n + 1",
        "Zhu et al., arXiv 2409.19606",
    )

    def __init__(
        self, num_sublayers: int, width: int, *, num_streams: int = 4, dynamic: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__(num_sublayers, width, num_streams)
        self.make_parameters(num_streams, 1, width, dynamic=dynamic, eps=eps)
        self.connection = Connection("tanh", eps=self.eps)
        self.traits = self.traits._replace(by_token=dynamic)

    def first_read(self, index: int, count: int) -> Tensor:
        return torch.eye(count)[:, index % count, None]

    def connection_tables(self) -> tuple[Tensor, ...]:
        statics = torch.cat([self.static_alpha, self.static_beta.unsqueeze(-1)], -1)
        layers, n, columns = statics.shape
        if not self.dynamic:
            return torch.cat([statics, statics.new_zeros(layers, 1 + self.width, columns)], 1).unbind()
        scales = torch.cat([self.alpha_scale.unsqueeze(-1).expand(-1, n + 1), self.beta_scale.unsqueeze(-1)], -1)
        weights = self.gain.unsqueeze(-1) * torch.cat([self.alpha_weight, self.beta_weight], -1)
        return torch.cat([statics, scales.unsqueeze(1), weights], 1).unbind()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        axes, static = ("sublayer", "stream"), ", without what the token adds" if self.dynamic else ""
        return {
            "read": Learned(self.static_alpha[..., 0].float().cpu(), axes, f"share of each stream in a read{static}"),
            "write": Learned(self.static_beta.float().cpu(), axes, f"share of an output for each stream{static}"),
        }


class Slices(NamedTuple):
    """The stream (..., d), and after a read the weights (..., n) by which the slices receive the coming output."""

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
        (beta,) = state.beta  # every write follows a read
        return Slices(state.stream + (beta.unsqueeze(-1) * self._sliced(output)).flatten(-2))

    def hidden_state(self, state: Slices) -> Tensor:
        return state.stream

    def finish(self, state: Slices, norm: NormLike) -> Tensor:
        return self.normed(state.stream, self.num_sublayers, norm)
