"""Manifold-constrained Hyper-Connections and two variants: mHC-lite, and streams without mixing."""

import math
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops.backend import Connection
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.streams import ParallelStreams, Streams
from attnres.residuals.settings import one_of, positive, start_at, true_or_false, whole


class Start(NamedTuple):
    """Start values of an implementation of mHC, and the order of its Sinkhorn steps.

    Attributes:
        weight: W is zero, normal with standard deviation 0.02, or Xavier-uniform.
        statics: "preferred": 1 in read and write for stream l mod n, else -1, and 0 on the diagonal of A, else -8;
            "zero": all 0; "one": 1 in a read for stream l mod n, else 0, 1 in a write, and 1 on the diagonal of A, else
            0.
        scale: factor of the dynamic part.
        read_eps: added to the shares of a read.
        over_in: Sinkhorn's last step makes the shares in a new stream sum to one, else those of an old stream.
        sinkhorn_eps: added to its first softmax and to every sum.
        gated_head: the head reads sum_i (sigmoid(static + s N(vec H) W)_i + read_eps) H_i, learned, not the plain sum.
    """

    weight: Literal["zero", "normal", "xavier"]
    statics: Literal["preferred", "zero", "one"]
    scale: float = 0.01
    read_eps: float = 0.0
    over_in: bool = False
    sinkhorn_eps: float = 0.0
    gated_head: bool = False


STARTS = {
    "mhc_lite": Start("zero", "preferred"),
    "lucidrains": Start("zero", "one"),
    "liger": Start("normal", "zero", scale=1.0, sinkhorn_eps=1e-6),
    "transformer_engine": Start("normal", "zero", over_in=True),
    "megatron": Start("xavier", "zero", read_eps=1e-6, over_in=True, sinkhorn_eps=1e-6),
    "hyper_connection_factory": Start("normal", "zero", 0.01, 1e-6, over_in=True, sinkhorn_eps=1e-6, gated_head=True),
    "deepseek_v4": Start("normal", "zero", 1.0, 1e-6, over_in=True, sinkhorn_eps=1e-6, gated_head=True),
}
"""Values of setting `init`; docs/reference/mechanism_settings.md has the sources. None has W = 0 and equal statics:
streams that start as copies of the embedding would then stay equal, since they have equal gradients."""


class MHC(ParallelStreams):
    """x = norm(p^T H),  H' = A^T H + b (outer) f(x), over n streams H (n, d).

        [P, B, R] = N(vec H) W                                      N: one RMSNorm of all n d numbers, with a gain
        p = sigmoid(static_read + s_p P),  b = 2 sigmoid(static_write + s_b B)
        A = sinkhorn(static_carry + s_r R): 20 times the columns of its exponential are normalised, then the rows

    Settings: `init`, the start and the order of Sinkhorn of an implementation (`STARTS`), which a converted checkpoint
    needs as it was trained; `single_pass`, Megatron's form, in which a read has the p that the sublayer before it made
    (the first one reads stream 0), so that a write and the next read are one pass also without a kernel of ours;
    `stream_scale`, a learned factor (n, d) on the copies of the embedding that starts at it plus U(-u, u) with
    u = sqrt(6 / (n + d)) (arXiv 2606.03483, against streams that collapse into one).

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
        "2n + 1",
        "Xie et al., arXiv 2512.24880",
    )
    carries: ClassVar[bool] = True
    """Whether A is learned; otherwise it is I."""
    kind: ClassVar[Any] = "sinkhorn"
    """Kind of the `Connection`."""

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        num_streams: int = 4,
        eps: float = 1e-6,
        init: str = "mhc_lite",
        single_pass: bool = False,
        stream_scale: float | None = None,
    ) -> None:
        super().__init__(num_sublayers, width, num_streams)
        start = self.first = STARTS[one_of("init", init, tuple(STARTS))]
        self.connection = Connection(
            self.kind,
            eps=positive("eps", eps),
            read_eps=start.read_eps,
            over_in=start.over_in,
            sinkhorn_eps=start.sinkhorn_eps,
            late=true_or_false("single_pass", single_pass),
        )
        n = num_streams
        if stream_scale is not None and start.statics == "zero":
            raise UserError(
                f"stream_scale is {stream_scale} and init is '{init}', whose A starts at 1/n: the first write would "
                "make all streams equal; give init=mhc_lite, init=lucidrains or no stream_scale"
            )
        self.first_scale = None if stream_scale is None else positive("stream_scale", stream_scale)
        scaled, gated = stream_scale is not None, start.gated_head and not single_pass
        if scaled:  # a number for each channel, so reads are no weighted sums
            self.traits = self.traits._replace(linear=False, by_token=False)
        self.stream_scale = nn.Parameter(torch.empty(n, width)) if scaled else None
        self.head_static = nn.Parameter(torch.empty(n)) if gated else None
        self.head_scale = nn.Parameter(torch.empty(1)) if gated else None
        self.head_weight = nn.Parameter(torch.empty(n * width, n)) if gated else None
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
        """Return the number of logits of a matrix A."""
        return self.num_streams**2

    def first_carry(self) -> Tensor:
        """Return the start values of the logits of a matrix A."""
        return (8.0 * torch.eye(self.num_streams) - 8.0).flatten()

    def init_parameters(self) -> None:
        start, count = self.first, self.num_sublayers
        one_hot = nn.functional.one_hot(torch.arange(count) % self.num_streams, self.num_streams).float()
        read, write, carry = {
            "preferred": (2.0 * one_hot - 1.0, 2.0 * one_hot - 1.0, self.first_carry()),
            "zero": (torch.zeros_like(one_hot), torch.zeros_like(one_hot), torch.zeros(self.carry_size())),
            "one": (one_hot, torch.ones_like(one_hot), torch.eye(self.num_streams).flatten()),
        }[start.statics]
        start_at(self.static_read, read)
        start_at(self.static_write, write)
        if self.carries:
            start_at(self.static_carry, carry.expand(count, -1))
        nn.init.ones_(self.gain)
        nn.init.constant_(self.scale, start.scale)
        # Whole parameters, not their rows: a loaded parameter is recognised as a whole, and not overwritten.
        reach = math.sqrt(6.0 / sum(self.weight.shape[1:]))  # Xavier's bound for each sublayer's matrix
        first = {
            "zero": nn.init.zeros_,
            "normal": partial(nn.init.normal_, std=0.02),
            "xavier": partial(nn.init.uniform_, a=-reach, b=reach),
        }[start.weight]
        first(self.weight)
        if self.head_static is not None and self.head_scale is not None and self.head_weight is not None:
            nn.init.zeros_(self.head_static)
            nn.init.constant_(self.head_scale, start.scale)
            first(self.head_weight)
        if self.stream_scale is not None and self.first_scale is not None:
            reach = math.sqrt(6.0 / (self.num_streams + self.width))
            nn.init.uniform_(self.stream_scale, self.first_scale - reach, self.first_scale + reach)

    def start(self, embedding: Tensor) -> Streams:
        state = super().start(embedding)
        if self.stream_scale is None:
            return state
        return state._replace(streams=(state.streams * self.stream_scale).to(embedding.dtype))

    def head(self) -> tuple[Connection, Tensor | None]:
        if self.head_static is None or self.head_scale is None or self.head_weight is None:
            return super().head()
        rows = self.head_static.unsqueeze(0), self.head_scale.expand(1, self.num_streams), self.head_weight
        return self.connection._replace(kind="gate"), torch.cat(rows)

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
"""Most streams: there are n! permutations of n streams, 120 of five, 720 of six."""


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
                f"num_streams is {num_streams}: mhc_lite has a weight for all n! permutations of n streams, which "
                "are too many; "
                f"expected at most {MOST_STREAMS}, or choose mhc"
            )
        super().__init__(num_sublayers, width, num_streams=num_streams, eps=eps)

    def carry_size(self) -> int:
        return math.factorial(self.num_streams)

    def first_carry(self) -> Tensor:
        return -8.0 * (torch.arange(self.carry_size()) > 0)


class IdentityHC(MHC):
    """As `mhc`, with A = I: streams differ by what they receive, and meet in reads alone.

    Parameters start as in `mhc`, which is not the standard residual. Parameters of a sublayer: 2n (n d + 1) + n d + 2.

    Source: the ablation of Xie et al., arXiv 2512.24880; learned matrices A stay near I.
    """

    name = "identity_hc"
    about = About("as mhc, A = I", "as mhc", "2n + 1", "ablation of Xie et al., arXiv 2512.24880")
    carries = False
    kind = "identity"
