"""mHC: Hyper-Connections whose streams are mixed by doubly stochastic matrices."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from attnres.residuals.arithmetic import normed_product
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.streams import ParallelStreams
from attnres.residuals.settings import positive, start_at
from attnres.residuals.sinkhorn import sinkhorn


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

    def __init__(self, num_sublayers: int, width: int, *, num_streams: int = 4, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width, num_streams)
        self.eps = positive("eps", eps)
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

    def carry(self, logits: Tensor) -> Tensor:
        """Return A (..., n, n) for its logits (..., carry_size)."""
        return sinkhorn(logits.unflatten(-1, (self.num_streams, self.num_streams)))

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

    def connections(self, streams: Tensor, index: int) -> tuple[Tensor, Tensor]:
        dtype = streams.dtype
        weight = (self.gain[index].unsqueeze(-1) * self.weight[index]).to(dtype)
        parts = normed_product(streams.flatten(-2), weight, self.eps).split(self.sizes, -1)
        scales = self.scale[index].to(dtype).unbind()
        statics = (self.static_read, self.static_write, *((self.static_carry,) if self.carries else ()))
        logits = [s[index].to(dtype) + scale * part for s, scale, part in zip(statics, scales, parts, strict=True)]
        alpha = logits[0].sigmoid().unsqueeze(-1)
        if self.carries:
            alpha = torch.cat([alpha, self.carry(logits[2])], -1)
        return alpha, 2.0 * logits[1].sigmoid()

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        axes, read, write = ("sublayer", "stream"), self.static_read.sigmoid(), 2.0 * self.static_write.sigmoid()
        without = "without what the token adds"
        return {
            "read": Learned(read.float().cpu(), axes, f"share of each stream in a read, {without}"),
            "write": Learned(write.float().cpu(), axes, f"share of an output for each stream, {without}"),
        }
