"""Manifold-constrained Hyper-Connections and two variants: mHC-lite, and streams that are not mixed."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops.backend import Connection
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.streams import ParallelStreams
from attnres.residuals.settings import positive, start_at, whole


class MHC(ParallelStreams):
    """x = norm(p^T H),  H' = A^T H + b (outer) f(x), over n streams H (n, d).

        [P, B, R] = N(vec H) W                                      N: one RMSNorm of all n d numbers, with a gain
        p = sigmoid(static_read + s_p P),  b = 2 sigmoid(static_write + s_b B)
        A = sinkhorn(static_carry + s_r R): 20 times the columns of its exponential are normalised, then the rows

    Start: W = 0, s = 0.01; static read and write -1, and 1 for stream l mod n; static carry 0 on the diagonal and -8
    beside it. So A is nearly I (.999 on the diagonal of n = 4), p is .73 for one stream and .27 for the others, b twice
    that: not the standard residual, since an output's share in a read depends on which streams the two prefer. The
    embedding is repeated to all streams at the start; the head reads their sum. Parameters of a sublayer:
    (n^2 + 2n)(n d + 1) + n d + 3.

    Source: Xie et al., "mHC", arXiv 2512.24880, which has no start values: these are of github.com/FFTYYY/mhc-lite.
    """

    name = "mhc"
    traits = Traits(True, sums_to_one=False, has_query=False, starts_standard=False)
    about = About(
        "H = A^T H + b f(N(p^T H)), n streams; A doubly stochastic (20 Sinkhorn steps), p = sigmoid, b = 2 sigmoid",
        "logits of p, b 1 for stream l mod n, else -1; of A 0 on the diagonal, else -8; dynamic part 0",
        "8n + 2",
        "Xie et al., arXiv 2512.24880",
    )
    carries: ClassVar[bool] = True
    """Whether A is learned; else it is I."""
    kind: ClassVar[Any] = "sinkhorn"
    """Of the `Connection`."""

    def __init__(self, num_sublayers: int, width: int, *, num_streams: int = 4, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width, num_streams)
        self.connection = Connection(self.kind, eps=positive("eps", eps))
        n = num_streams
        self.sizes = (n, n, self.carry_size()) if self.carries else (n, n)
        self.static_read = nn.Parameter(torch.empty(num_sublayers, n))
        self.static_write = nn.Parameter(torch.empty(num_sublayers, n))
        if self.carries:
            self.static_carry = nn.Parameter(torch.empty(num_sublayers, self.carry_size()))
        self.gain = nn.Parameter(torch.empty(num_sublayers, n * width))
        self.weight = nn.Parameter(torch.empty(num_sublayers, n * width, sum(self.sizes)))
        self.scale = nn.Parameter(torch.empty(num_sublayers, len(self.sizes)))
        self.init_parameters()

    def carry_size(self) -> int:
        """Return how many logits a matrix A has."""
        return self.num_streams**2

    def first_carry(self) -> Tensor:
        """Return the logits of a matrix A at the start."""
        return (8.0 * torch.eye(self.num_streams) - 8.0).flatten()

    def init_parameters(self) -> None:
        preferred = torch.arange(self.num_sublayers) % self.num_streams
        one_of_n = 2.0 * nn.functional.one_hot(preferred, self.num_streams) - 1.0
        start_at(self.static_read, one_of_n)
        start_at(self.static_write, one_of_n)
        if self.carries:
            start_at(self.static_carry, self.first_carry().expand(self.num_sublayers, -1))
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.scale, 0.01)

    def connection_tables(self) -> tuple[Tensor, ...]:
        statics = torch.cat([self.static_read, self.static_write, *([self.static_carry] if self.carries else [])], -1)
        scales = torch.cat([self.scale[:, i : i + 1].expand(-1, size) for i, size in enumerate(self.sizes)], -1)
        weights = self.gain.unsqueeze(-1) * self.weight
        return torch.cat([statics.unsqueeze(1), scales.unsqueeze(1), weights], 1).unbind()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        axes, read, write = ("sublayer", "stream"), self.static_read.sigmoid(), 2.0 * self.static_write.sigmoid()
        without = "without what the token adds"
        return {
            "read": Learned(read.float().cpu(), axes, f"share of each stream in a read, {without}"),
            "write": Learned(write.float().cpu(), axes, f"share of an output for each stream, {without}"),
        }


MOST_STREAMS = 5
"""There are n! permutations of n streams: 120 of five, 720 of six."""


class MHCLite(MHC):
    """As `mhc`, with A = sum_k r_k P_k over the n! permutations P_k of n streams, r = softmax(static_carry + s_r R).

    Doubly stochastic exactly, with no iteration. The logits of r start at 0 for the identity, which comes first, and at
    -8 for the others: its weight is then .992 for n = 4. Parameters of a sublayer: (n! + 2n)(n d + 1) + n d + 3.

    Source: Yang and Gao, "mHC-lite", arXiv 2601.05732; start values of github.com/FFTYYY/mhc-lite.
    """

    name = "mhc_lite"
    about = About(
        "as mhc, A = sum_k softmax(r)_k P_k over all permutations of n streams",
        "as mhc; r = 0 for the identity, else -8",
        "8n + 2",
        "Yang and Gao, arXiv 2601.05732",
    )
    kind = "permutations"

    def __init__(self, num_sublayers: int, width: int, *, num_streams: int = 4, eps: float = 1e-6) -> None:
        if whole("num_streams", num_streams) > MOST_STREAMS:
            raise UserError(
                f"num_streams is {num_streams}: mhc_lite weighs all n! permutations of n streams, which are too many; "
                f"expected at most {MOST_STREAMS}, or choose mhc"
            )
        super().__init__(num_sublayers, width, num_streams=num_streams, eps=eps)

    def carry_size(self) -> int:
        return math.factorial(self.num_streams)

    def first_carry(self) -> Tensor:
        return -8.0 * (torch.arange(self.carry_size()) > 0)


class IdentityHC(MHC):
    """As `mhc`, with A = I: streams differ by what they receive, and meet in reads alone.

    Sublayers start as in `mhc`, which is not the standard residual. Parameters of a sublayer: 2n (n d + 1) + n d + 2.

    Source: the ablation of Xie et al., arXiv 2512.24880; learned matrices A stay near I.
    """

    name = "identity_hc"
    about = About("as mhc, A = I", "as mhc", "6n + 2", "ablation of Xie et al., arXiv 2512.24880")
    carries = False
    kind = "identity"
