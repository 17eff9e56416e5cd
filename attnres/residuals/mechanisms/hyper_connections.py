"""Hyper-Connections: n parallel streams with learned, input-dependent mixing in and out of each sublayer."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.ops import compute_dtype
from attnres.residuals.base import NormLike, Residual
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.settings import full_precision, positive, start_at, true_or_false, whole


class Streams(NamedTuple):
    """The n streams (..., n, d), and after a read how much of the coming output each receives: one tensor (..., n)."""

    streams: Tensor
    beta: tuple[Tensor, ...] = ()


class HyperConnections(Residual):
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
        "about 2n + 2",
        "Zhu et al., arXiv 2409.19606",
    )

    def __init__(
        self, num_sublayers: int, width: int, *, num_streams: int = 4, dynamic: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__(num_sublayers, width)
        self.num_streams, self.eps = whole("num_streams", num_streams), positive("eps", eps)
        self.dynamic = true_or_false("dynamic", dynamic)
        self.traits = self.traits._replace(by_token=dynamic)
        self._made_of: dict[int, Tensor] = {}
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
        self._made_of = {0: embedding.new_ones(*shape, 1)} if self.watched else {}
        return Streams(embedding.unsqueeze(-2).expand(*shape, self.width))

    def read(self, state: Streams, index: int, norm: NormLike) -> tuple[Tensor, Streams]:
        streams = state.streams.to(compute_dtype(state.streams.dtype))

        def row(parameter: Tensor) -> Tensor:
            return parameter[index].to(streams.dtype)

        with full_precision(streams):
            alpha, beta = row(self.static_alpha), row(self.static_beta)
            if self.dynamic:
                keys = F.rms_norm(streams, (self.width,), row(self.gain), self.eps)
                alpha = alpha + row(self.alpha_scale) * torch.tanh(keys @ row(self.alpha_weight))
                beta = beta + row(self.beta_scale) * torch.tanh(keys @ row(self.beta_weight)).squeeze(-1)
            mixed = (alpha.transpose(-1, -2) @ streams).to(state.streams.dtype)
            beta = beta.to(state.streams.dtype)
        weights = self._follow(index, alpha, beta) if self.watched else None
        return self.normed(mixed[..., 0, :], index, norm, weights), Streams(mixed[..., 1:, :], (beta,))

    def _follow(self, index: int, alpha: Tensor, beta: Tensor) -> Tensor:
        """Return what read `index` is made of, (tokens, index + 1), and keep what the streams (..., n, outputs) will be
        sums of after its write. Kept beside the state and by index: looking changes no state, and a layer that runs
        again finds what it found."""
        mixed = alpha.transpose(-1, -2) @ self._made_of[index].to(alpha)
        newest = beta.to(alpha).unsqueeze(-1).expand(*mixed.shape[:-2], self.num_streams, 1)
        self._made_of[index + 1] = torch.cat([mixed[..., 1:, :], newest], -1)
        return mixed[..., 0, :].reshape(-1, index + 1)

    def write(self, state: Streams, index: int, output: Tensor) -> Streams:
        (beta,) = state.beta  # a write follows its read
        return Streams(state.streams + beta.unsqueeze(-1) * output.unsqueeze(-2))

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        axes, static = ("sublayer", "stream"), ", without what the token adds" if self.dynamic else ""
        return {
            "read": Learned(self.static_alpha[..., 0].float().cpu(), axes, f"share of each stream in a read{static}"),
            "write": Learned(self.static_beta.float().cpu(), axes, f"share of an output for each stream{static}"),
        }

    def hidden_state(self, state: Streams) -> Tensor:
        return state.streams.sum(-2)

    def finish(self, state: Streams, norm: NormLike) -> Tensor:
        weights = (
            self._made_of[self.num_sublayers].sum(-2).reshape(-1, self.num_sublayers + 1) if self.watched else None
        )
        return self.normed(state.streams.sum(-2), self.num_sublayers, norm, weights)
