"""Learned or fixed interpolation between a depth read and the plain stream, for fine-tuning pretrained models.

Each setting changes the read inside its softmax or after it, so reads with any of them are computed in plain torch, in
one pass each.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.residuals.layout import Learned
from attnres.residuals.settings import number, one_of, start_at, true_or_false

GateKind = Literal["none", "scalar", "vector"]
AlphaKind = Literal["none", "learnable"]


class Gates(nn.Module):
    """Interpolates between a depth read and the plain stream:

        h = (1 - s) stream + s read,    s = sigmoid(c) | sigmoid(W stream + c) | alpha

    `stream` is the plain residual stream: h tends to the standard residual as s goes to 0. Without gate or alpha, h is
    the read.

    Args:
        reads, width: number of reads, and d.
        recency_bias: start value of a learned scalar for each read that is added to the logit of its last source (3, 5
            and 10 were tried); None has none. `recency_bias_frozen` freezes it at the start value.
        gate: "scalar": c is a number for each read; "vector": W (d, d) starts at zero and c (d,), s is one number for
            each channel and token. c starts at `gate_init` (-2 and -10 were tried).
        alpha: "learnable": s is a number for each read, not squashed, which starts at 0: the standard residual.

    Source: the regimes of open-attention-residuals (github.com/wdlctc/open-attention-residuals), which has bias, gate
    and alpha in these forms.
    """

    def __init__(
        self,
        reads: int,
        width: int,
        *,
        recency_bias: float | None = None,
        recency_bias_frozen: bool = False,
        gate: GateKind = "none",
        gate_init: float = -2.0,
        alpha: AlphaKind = "none",
    ) -> None:
        super().__init__()
        _check(recency_bias, true_or_false("recency_bias_frozen", recency_bias_frozen), gate, gate_init, alpha)
        self.recency_bias, self.gate_kind, self.gate_init = recency_bias, gate, float(gate_init)
        self.bias = self.gate = self.gate_weight = self.alpha = None
        if recency_bias is not None:
            self.bias = nn.Parameter(torch.empty(reads), requires_grad=not recency_bias_frozen)
        if gate != "none":
            self.gate = nn.Parameter(torch.empty((reads,) if gate == "scalar" else (reads, width)))
        if gate == "vector":
            self.gate_weight = nn.Parameter(torch.empty(reads, width, width))
        if alpha == "learnable":
            self.alpha = nn.Parameter(torch.empty(reads))
        self.init_parameters()

    @property
    def idle(self) -> bool:
        """Return whether no gate is set."""
        return next(self.parameters(), None) is None

    def init_parameters(self) -> None:
        if self.bias is not None and self.recency_bias is not None:
            start_at(self.bias, torch.full_like(self.bias, self.recency_bias))
        if self.gate is not None:
            start_at(self.gate, torch.full_like(self.gate, self.gate_init))
        for parameter in (self.gate_weight, self.alpha):
            if parameter is not None:
                nn.init.zeros_(parameter)

    reset_parameters = init_parameters

    def hold(self, h: Tensor, stream: Callable[[], Tensor], index: int) -> Tensor:
        """Return read `index` after its gate; `h` (..., d) in the compute dtype, `stream` returns the plain stream."""
        if self.gate is None and self.alpha is None:
            return h
        plain = stream().to(compute_dtype(h.dtype))
        with full_precision(h):
            return torch.lerp(plain, h, self._share(plain, index))

    def held_back(self, read: Tensor, stream: Tensor, index: int) -> Tensor | None:
        """Return (1 - s) stream + s read for rows of coefficients on any device; None if s is a vector."""
        if self.gate_kind == "vector":
            return None
        if self.gate is None and self.alpha is None:
            return read
        return torch.lerp(stream.expand_as(read), read, self._share(read, index).detach().to(read.device))

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        """Return the scalars of each read: b; the share s computed from its bias alone, averaged over channels;
        alpha."""
        tables = {}
        if self.bias is not None:
            tables["recency_bias"] = Learned(self.bias.float().cpu(), ("read",), "bias of the last source")
        if self.gate is not None:
            share = self.gate.sigmoid()
            share = share.mean(1) if share.dim() == 2 else share
            tables["gate"] = Learned(share.float().cpu(), ("read",), "gate: share of the read")
        if self.alpha is not None:
            tables["alpha"] = Learned(self.alpha.float().cpu(), ("read",), "alpha")
        return tables

    def _share(self, stream: Tensor, index: int) -> Tensor:
        """Return s in the shape of the stream."""
        if self.alpha is not None:
            return self.alpha[index].to(stream.dtype).expand_as(stream)
        assert self.gate is not None
        gate = self.gate[index].to(stream.dtype)
        if self.gate_weight is not None:
            gate = nn.functional.linear(stream, self.gate_weight[index].to(stream.dtype), gate)
        return gate.sigmoid().expand_as(stream)


def _check(recency_bias: float | None, frozen: bool, gate: str, gate_init: float, alpha: str) -> None:
    one_of("gate", gate, ("none", "scalar", "vector"))
    one_of("alpha", alpha, ("none", "learnable"))
    if gate != "none" and alpha != "none":
        raise UserError(f"both gate='{gate}' and alpha='{alpha}' are given: each sets the share of the read, give one")
    if frozen and recency_bias is None:
        raise UserError("recency_bias_frozen is given without recency_bias: give the value to freeze it at")
    number("gate_init", gate_init)
    if recency_bias is not None:
        number("recency_bias", recency_bias)
