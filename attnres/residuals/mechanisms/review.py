"""Review Residuals: a gate that sees the stream and what is about to be added to it."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.ops import compute_dtype
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.one_stream import TokenMix
from attnres.residuals.settings import number, one_of, positive


class Review(TokenMix):
    """x_{l+1} = x_l + r * u,  u = f_l(N x_l),  r = sigmoid(W_l [n(x_l), n(u)] + b_l), n an RMSNorm without gain.

    W starts at 0 and b at `gate_start`, 0 as published: r is 1/2, so that every branch is halved at the start. With 4
    it is nearly the standard residual. The paper has no b, the author's code has.

    Args:
        gate: "vector" has a number for each channel, as published: W is (d, 2d). "scalar" has one for each token: W is
            (1, 2d). "fixed" is the control, r = sigmoid(gate_start) for good: what halving the branches does.

    Costs 2d^2 + d parameters a sublayer and a product with 2d numbers; scalar 2d + 1; fixed none.

    Source: Kramer, "Review Residuals", arXiv 2606.31859; github.com/SixSigmaEngineer/review-residuals.
    """

    name = "review"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About(
        "x + r f(N x), r = sigmoid(W [n(x), n(f)] + b)",
        "W = 0, b = 0",
        "7 (scalar: 3)",
        "Kramer, arXiv 2606.31859",
        "claimed: better from 320 M on (2 or 3 seeds a size, to 1 B), worse at 60 M and 150 M; not measured by us",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        gate: Literal["vector", "scalar", "fixed"] = "vector",
        gate_start: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(num_sublayers, width)
        self.gate_start, self.eps = number("gate_start", gate_start), positive("eps", eps)
        gates = {"vector": width, "scalar": 1, "fixed": 0}[one_of("gate", gate, ("vector", "scalar", "fixed"))]
        if gate != "vector":
            self.traits = self.traits._replace(by_token=gates > 0, linear=True, is_control=not gates)
        self.weight = nn.Parameter(torch.empty(num_sublayers, gates, 2 * width)) if gates else None
        self.bias = nn.Parameter(torch.empty(num_sublayers, gates)) if gates else None
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.zeros_(self.weight)
            nn.init.constant_(self.bias, self.gate_start)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        dtype = compute_dtype(state.dtype)
        if self.weight is None or self.bias is None:
            gate = torch.full_like(state[..., :1], self.gate_start, dtype=dtype).sigmoid()
        else:
            both = [F.rms_norm(v.to(state.dtype), (self.width,), None, self.eps) for v in (state, output)]
            # A matrix product as the model's own are, in their precision; the number that it is added to in full.
            logit = F.linear(torch.cat(both, -1), self.weight[index].to(state.dtype)).to(dtype)
            gate = (logit + self.bias[index].to(dtype)).sigmoid()
        self.follow(index, 1.0, gate)
        return torch.addcmul(state.to(dtype), output.to(dtype), gate).to(state.dtype)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        if self.bias is None:
            return {}
        share = self.bias.float().sigmoid().mean(-1).cpu()
        return {"gate": Learned(share, ("sublayer",), "r, share of an output, without what the token adds")}
