"""Sparse mHC, after xHC: many streams; a sublayer reads all of them and writes a few."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.ops.backend import Connection
from attnres.ops.norms import normed_product
from attnres.ops.streams import sinkhorn
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.streams import ParallelStreams, Streams
from attnres.residuals.settings import positive, start_at, whole
from attnres.residuals.watch import NormLike, looking


class XHC(ParallelStreams):
    """x = norm(p^T H),  H_I' = A H_I + g (b (outer) f(x)),  over n streams H (n, d), of which the k in I change.

        s = sigmoid(LN(vec H) W_r)                                  LN: a LayerNorm of all n d numbers, without gain
        I = streams 0 to m - 1, and the k - m others of the largest s, in their order
        g_j = 1 for the first m of I, s_j for the others
        p = sigmoid(static_read + a_p N(vec H) W_p)                 N: an RMSNorm without gain
        z = N(vec H_I),  b = 2 sigmoid(static_write + a_b z W_b)
        A = sinkhorn(static_carry + a_r z W_a)                      20 times rows, then columns; then rows above 1 are
                                                                    divided by their sum

    n = 16, k = 4, m = 2. All streams start as the embedding; the head reads their sum. s gets a gradient only through
    g, and no loss balances its choices. With k = m = n this is `mhc` with one write g = 1, its A transposed.

    Not implemented: the publication's causal convolutions of an MLP's output over earlier tokens, which a residual
    cannot see. In its ablation they are most of the gain over mHC with 16 streams (1.998 to 1.984, of 1.998 to 1.983).

    Start: W_r normal(0.02), which parts the streams, other W = 0, a = 0.01; static read -1, and 1 for stream l mod n;
    static write -1, and 1 for the l mod k-th of I; static carry 0 on the diagonal, -8 beside it. The publication has
    a = 0.01 and says no more; the others are those of `mhc`. Parameters of a sublayer:
    (2 n^2 + k^3 + k^2) d + n + k + k^2 + 3.

    Source: "xHC", arXiv 2607.14530, without code, by two readers' notes that agree.
    """

    name = "xhc"
    traits = Traits(True, sums_to_one=False, has_query=False, starts_standard=False)
    about = About(
        "as mhc, n = 16 streams, all read, k = 4 written: the first 2, and those of the largest sigmoid(LN(H) W)",
        "as mhc; W normal(0.02)",
        "3n + 2k",
        "arXiv 2607.14530, without its convolution over tokens",
        "claimed at 10 and 18 B MoE (one run each), most of it by the convolution; not measured by us",
    )

    heeds_recompute = False
    connection = Connection("identity")
    """The connection for the write; the class mixes the streams for its read itself."""

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        num_streams: int = 16,
        active: int = 4,
        fixed: int = 2,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(num_sublayers, width, num_streams)
        n, k = self.num_streams, whole("active", active)
        self.active, self.fixed, self.eps = k, whole("fixed", fixed, least=0), positive("eps", eps)
        if not fixed <= active <= n:
            raise UserError(f"fixed is {fixed}, active {active}, num_streams {n}: expected each at most the next")
        layers = num_sublayers
        self.router = nn.Parameter(torch.empty(layers, n * width, n)) if fixed < active else None
        self.static_read = nn.Parameter(torch.empty(layers, n))
        self.static_write = nn.Parameter(torch.empty(layers, k))
        self.static_carry = nn.Parameter(torch.empty(layers, k, k))
        self.read_weight = nn.Parameter(torch.empty(layers, n * width, n))
        self.active_weight = nn.Parameter(torch.empty(layers, k * width, k + k * k))
        self.scale = nn.Parameter(torch.empty(layers, 3))
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.router is not None:
            nn.init.normal_(self.router, std=0.02)
        for table in (self.static_read, self.static_write):
            layers, count = table.shape
            start_at(table, 2.0 * F.one_hot(torch.arange(layers) % count, count) - 1.0)
        start_at(self.static_carry, (8.0 * torch.eye(self.active) - 8.0).expand_as(self.static_carry))
        nn.init.zeros_(self.read_weight)
        nn.init.zeros_(self.active_weight)
        nn.init.constant_(self.scale, 0.01)

    def route(self, streams: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the streams that sublayer `index` changes (..., k), and g (..., k)."""
        shape = (*streams.shape[:-2], self.fixed)
        chosen = torch.arange(self.fixed, device=streams.device).expand(shape)
        if self.router is None:
            return chosen, streams.new_ones(shape)
        flat = F.layer_norm(streams.flatten(-2), (self.num_streams * self.width,), eps=self.eps)
        scores = (flat @ self.router[index].to(flat.dtype)).sigmoid()
        best = scores[..., self.fixed :].topk(self.active - self.fixed, -1).indices.sort(-1).values + self.fixed
        gate = torch.cat([streams.new_ones(shape), scores.gather(-1, best)], -1)
        return torch.cat([chosen, best], -1), gate

    def read(self, state: Streams, index: int, norm: NormLike) -> tuple[Tensor, Streams]:
        written, dtype, k = state.written, state.streams.dtype, self.active
        streams = written.to(compute_dtype(dtype))
        with full_precision(streams):
            places, gate = self.route(streams, index)
            scales = self.scale[index].to(streams.dtype).unbind()
            logits = normed_product(streams.flatten(-2), self.read_weight[index].to(streams.dtype), self.eps)
            alpha = (self.static_read[index].to(streams.dtype) + scales[0] * logits).sigmoid().unsqueeze(-2)
            h = (alpha @ streams).squeeze(-2).to(dtype)
            rows = places.unsqueeze(-1).expand(*places.shape, self.width)
            some = streams.gather(-2, rows)
            shares_of_active, carried = normed_product(
                some.flatten(-2), self.active_weight[index].to(streams.dtype), self.eps
            ).split((k, k * k), -1)
            beta = 2.0 * gate * (self.static_write[index].to(streams.dtype) + scales[1] * shares_of_active).sigmoid()
            carry = self.static_carry[index].to(streams.dtype) + scales[2] * carried.unflatten(-1, (k, k))
            carry = sinkhorn(carry.mT).mT  # columns last, which leaves row sums near one; rows above one are divided
            carry = carry / carry.sum(-1, keepdim=True).clamp_min(1.0)
            mixed = written.scatter(-2, rows, (carry @ some).to(dtype))
            shares = torch.zeros_like(alpha.squeeze(-2)).scatter(-1, places, beta)  # zero for the other streams
        weights = None
        if self.watched:
            with looking(self):
                n = self.num_streams
                rest = torch.eye(n, device=alpha.device, dtype=alpha.dtype).expand(*places.shape[:-1], n, n)
                inside = torch.zeros_like(rest[..., :k, :]).scatter(-1, places.unsqueeze(-2).expand_as(carry), carry)
                whole = rest.scatter(-2, places.unsqueeze(-1).expand_as(inside), inside)  # A over all streams
                coefficients = torch.cat([alpha.squeeze(-2), shares, whole.mT.flatten(-2)], -1)
                weights = self._follow(index, self.connection, None, coefficients)
        coefficients = torch.cat([alpha.squeeze(-2), shares], -1)
        return self.normed(h, index, norm, weights), Streams(mixed, (coefficients,))

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        share, without = self.static_read.sigmoid().float().cpu(), "without what the token adds"
        return {"read": Learned(share, ("sublayer", "stream"), f"share of each stream in a read, {without}")}
