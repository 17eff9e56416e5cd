"""Rules of one stream with weights of stream and output for each token: Highway, Review Residuals, Deep Delta
Learning."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.standard import OneStream
from attnres.residuals.settings import number, one_of, positive
from attnres.residuals.state import State
from attnres.residuals.watch import NormLike, looking


class TokenMix(OneStream):
    """x_{l+1} = a x_l + b f_l, numbers a and b of each token. In terms of sources, h_l = sum_i (b_i prod a_j) v_i.

    While somebody watches, the weights of the next read are stored by index outside the state, so that watching changes
    no state, and a layer that runs again finds them.
    """

    watched_from_start = True

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width)
        self._weights: dict[int, Tensor] = {}

    def forget(self) -> None:
        self._weights = {}

    def start(self, embedding: Tensor) -> Tensor:
        self._weights = {0: embedding.new_ones(*embedding.shape[:-1], 1)} if self.watched else {}
        return embedding

    def follow(self, index: int, shortcut: Tensor | float, branch: Tensor) -> None:
        """Store the weights of the read after sublayer `index`, if somebody watches: a and b are (..., 1)."""
        if self.watched and self.traits.linear:
            with looking(self):
                self._weights[index + 1] = torch.cat([self._weights[index].to(branch) * shortcut, branch], -1)

    def weights(self, index: int) -> Tensor | None:
        """Return the weights (tokens, index + 1) of read `index`; None if nobody watches or there are none."""
        return self._weights[index].reshape(-1, index + 1) if self.watched and self.traits.linear else None

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, State]:
        return self.normed(state, index, norm, self.weights(index)), state

    def finish(self, state: Tensor, norm: NormLike) -> Tensor:
        return self.normed(state, self.num_sublayers, norm, self.weights(self.num_sublayers))


class Highway(TokenMix):
    """x_{l+1} = (1 - g) * x_l + g * f_l(N x_l),    g = sigmoid(W_l x_l + c_l).

    c starts at `gate_init`, below 0, so that at first the gate mostly passes the stream (the publication uses -1, -3,
    ...). W starts at 0, so that every token has the same gate at first; the publication draws it.

    Args:
        gate: "vector" has a gate for each channel, as published: W is (d, d), and reads are no sums of outputs with one
            number each. "scalar" has one for each token: W is (1, d), and the weights of a read sum to one.

    Costs d^2 + d parameters a sublayer and a matrix product with x; scalar d + 1.

    Source: Srivastava et al., "Highway Networks", arXiv 1505.00387.
    """

    name = "highway"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False, linear=False)
    about = About(
        "(1 - g) x + g f(N x), g = sigmoid(W x + c)",
        "W = 0, c = -2",
        "6 (scalar: 3)",
        "Srivastava et al., arXiv 1505.00387",
    )

    def __init__(
        self, num_sublayers: int, width: int, *, gate: Literal["vector", "scalar"] = "vector", gate_init: float = -2.0
    ) -> None:
        super().__init__(num_sublayers, width)
        scalar = one_of("gate", gate, ("vector", "scalar")) == "scalar"
        self.gate_init = number("gate_init", gate_init)
        if scalar:
            self.traits = self.traits._replace(by_token=True, sums_to_one=True, linear=True)
        gates = 1 if scalar else width
        self.weight = nn.Parameter(torch.empty(num_sublayers, gates, width))
        self.bias = nn.Parameter(torch.empty(num_sublayers, gates))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.gate_init)

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        dtype = compute_dtype(state.dtype)
        # A matrix product in the precision of the model's products; the bias is added in full precision.
        logit = F.linear(state, self.weight[index].to(state.dtype)).to(dtype) + self.bias[index].to(dtype)
        gate = torch.sigmoid(logit)
        self.follow(index, 1.0 - gate, gate)
        return torch.lerp(state.to(dtype), output.to(dtype), gate).to(state.dtype)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        share = torch.sigmoid(self.bias.float()).mean(-1).cpu()
        return {"gate": Learned(share, ("sublayer",), "share of an output, without what the token adds")}


class Review(TokenMix):
    """x_{l+1} = x_l + r * u,  u = f_l(N x_l),  r = sigmoid(W_l [n(x_l), n(u)] + b_l), n an RMSNorm without gain.

    W starts at 0 and b at `gate_start`, by default 0: r is 1/2, so that every branch is halved at the start, as
    published. With 4 the start is nearly the standard residual. The author's code has b, the paper does not.

    Args:
        gate: "vector" has a number for each channel, as published: W is (d, 2d). "scalar" has one for each token: W is
            (1, 2d). "fixed" is a control with constant r = sigmoid(gate_start), which shows the effect of halving the
            branches.

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
            # A matrix product in the precision of the model's products; the bias is added in full precision.
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


class Stepping(NamedTuple):
    """The state between a read and its write: the stream (..., d), and the size of the coming step, (..., 1)."""

    stream: Tensor
    step: Tensor


class DeepDelta(TokenMix):
    """x_{l+1} = x_l + b k (v - k . x_l),    k = f / |f|,  f = f_l(N x_l).

        b = 2 sigmoid(w_b . N x_l + c_b)    v = 4 sigmoid(w_v . x_l + c_v)

    b = 0 does not change the stream, b = 1 replaces its component along k by v, b = 2 reflects it. c and w start at 0,
    so that b = 1 and v = 2; the publication's code draws w. `eps` is added inside the root of |f|.

    x_{l+1} is x_l plus f times a number for each token, so reads are weighted sums of outputs.

    The publication's streams of several values (d_v = 4) are not implemented.

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
