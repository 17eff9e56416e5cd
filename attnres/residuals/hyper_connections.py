"""Hyper-Connections: n parallel streams with learned, input-dependent mixing in and out of each sublayer."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype
from attnres.residuals.base import NormLike, Residual, full_precision, positive, start_at, whole


class Streams(NamedTuple):
    """The n streams (..., n, d), and after a read how much of the coming output each receives: one tensor (..., n).

    While someone watches, `made_of` (..., n, outputs so far) says what the streams are sums of.
    """

    streams: Tensor
    beta: tuple[Tensor, ...] = ()
    made_of: tuple[Tensor, ...] = ()


class HyperConnections(Residual):
    """x = norm(alpha_0^T H),  H' = A^T H + beta (outer) f(x), over n streams H (n, d).

        [alpha_0, A] = static_alpha + s_a tanh(N(H) W_a)      (n, n+1)
        beta         = static_beta  + s_b tanh(N(H) w_b)      (n,)

    Static part: alpha_0 = onehot(l mod n), A = I, beta = 1. Dynamic part: W = 0, s = 0.01. The embedding is repeated to
    all streams at the start; the head reads their sum. N is an RMSNorm with a learned gain.

    Source: Zhu et al., "Hyper-Connections", arXiv 2409.19606.
    """

    name = "hyper_connections"

    def __init__(
        self, num_sublayers: int, width: int, *, num_streams: int = 4, dynamic: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__(num_sublayers, width)
        if not isinstance(dynamic, bool):
            raise UserError(f"dynamic is {dynamic!r}: expected true or false")
        self.num_streams, self.dynamic, self.eps = whole("num_streams", num_streams), dynamic, positive("eps", eps)
        layers, n = num_sublayers, num_streams
        self.static_alpha = nn.Parameter(torch.empty(layers, n, n + 1))
        self.static_beta = nn.Parameter(torch.empty(layers, n))
        if dynamic:
            self.gain = nn.Parameter(torch.empty(layers, width))
            self.alpha_weight = nn.Parameter(torch.empty(layers, width, n + 1))
            self.beta_weight = nn.Parameter(torch.empty(layers, width, 1))
            self.alpha_scale = nn.Parameter(torch.empty(layers))
            self.beta_scale = nn.Parameter(torch.empty(layers))
        self.init_parameters()

    def init_parameters(self) -> None:
        n = self.num_streams
        start = torch.zeros(self.num_sublayers, n, n + 1)
        for index in range(self.num_sublayers):
            start[index, index % n, 0] = 1.0
            start[index, :, 1:] = torch.eye(n)
        start_at(self.static_alpha, start)
        nn.init.ones_(self.static_beta)
        if self.dynamic:
            nn.init.ones_(self.gain)
            nn.init.zeros_(self.alpha_weight)
            nn.init.zeros_(self.beta_weight)
            nn.init.constant_(self.alpha_scale, 0.01)
            nn.init.constant_(self.beta_scale, 0.01)

    def start(self, embedding: Tensor) -> Streams:
        shape = (*embedding.shape[:-1], self.num_streams)
        made_of = (embedding.new_ones(*shape, 1),) if self.watched else ()
        return Streams(embedding.unsqueeze(-2).expand(*shape, self.width), made_of=made_of)

    def read(self, state: Streams, index: int, norm: NormLike) -> tuple[Tensor, Streams]:
        streams = state.streams.to(compute_dtype(state.streams.dtype))

        def own(parameter: Tensor) -> Tensor:
            return parameter[index].to(streams.dtype)

        with full_precision(streams):
            alpha, beta = own(self.static_alpha), own(self.static_beta)
            if self.dynamic:
                keys = F.rms_norm(streams, (self.width,), own(self.gain), self.eps)
                alpha = alpha + own(self.alpha_scale) * torch.tanh(keys @ own(self.alpha_weight))
                beta = beta + own(self.beta_scale) * torch.tanh(keys @ own(self.beta_weight)).squeeze(-1)
            mixed = (alpha.transpose(-1, -2) @ streams).to(state.streams.dtype)
            beta = beta.to(state.streams.dtype)
            made_of = tuple(alpha.transpose(-1, -2) @ old.to(alpha) for old in state.made_of)
        weights = made_of[0][..., 0, :].flatten(0, -2) if made_of else None
        x = self.normed(mixed[..., 0, :], index, norm, weights)
        return x, Streams(mixed[..., 1:, :], (beta,), tuple(new[..., 1:, :] for new in made_of))

    def write(self, state: Streams, index: int, output: Tensor) -> Streams:
        (beta,) = state.beta  # a write follows its read
        made_of = tuple(
            torch.cat([old, beta.unsqueeze(-1).to(old).expand(*old.shape[:-1], 1)], -1) for old in state.made_of
        )
        return Streams(state.streams + beta.unsqueeze(-1) * output.unsqueeze(-2), made_of=made_of)

    def hidden_state(self, state: Streams) -> Tensor:
        return state.streams.sum(-2)

    def finish(self, state: Streams, norm: NormLike) -> Tensor:
        weights = state.made_of[0].sum(-2).flatten(0, -2) if state.made_of else None
        return self.normed(state.streams.sum(-2), self.num_sublayers, norm, weights)
