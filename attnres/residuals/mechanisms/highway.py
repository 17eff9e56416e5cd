"""Highway: a gate that the token decides carries the stream or takes the output."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.ops import compute_dtype
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.one_stream import TokenMix
from attnres.residuals.settings import number, one_of


class Highway(TokenMix):
    """x_{l+1} = (1 - g) * x_l + g * f_l(N x_l),    g = sigmoid(W_l x_l + c_l).

    c starts at `gate_init`, below 0, so that at first the stream is carried (the publication takes -1, -3, ...). W
    starts at 0, where the publication draws it: every token has the same gate at first.

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
        # A matrix product as the model's own are, in their precision; the number that it is added to in full.
        logit = F.linear(state, self.weight[index].to(state.dtype)).to(dtype) + self.bias[index].to(dtype)
        gate = torch.sigmoid(logit)
        self.follow(index, 1.0 - gate, gate)
        return torch.lerp(state.to(dtype), output.to(dtype), gate).to(state.dtype)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        share = torch.sigmoid(self.bias.float()).mean(-1).cpu()
        return {"gate": Learned(share, ("sublayer",), "share of an output, without what the token adds")}
