"""Ways a depth read is held back towards the plain stream, learned or fixed: for fine-tuning pretrained models.

Each changes the read's formula inside its softmax or after it, so that reads with any of them on are made in plain
torch, one pass each.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from attnres.errors import UserError, unknown
from attnres.ops import compute_dtype
from attnres.residuals.layout import Learned
from attnres.residuals.settings import full_precision, positive, start_at, true_or_false

GateKind = Literal["none", "scalar", "vector"]
AlphaKind = Literal["none", "learnable"]


class Gates(nn.Module):
    """A depth read of n sources with its gates:

        a = softmax_i( w . (g * v_i / rms(v_i)) / read_temperature + [i = n] b  (, 0 for a null source) )
        read = scale * sum_i a_i v_i
        h = (1 - s) stream + s read,    s = sigmoid(c) | sigmoid(W stream + c) | alpha

    `stream` is the plain residual stream: h tends to the standard residual as s goes to 0. Without gate or alpha, h is
    the read.

    Args:
        reads, width: how many reads there are, and d.
        recency_bias: start of b, a learned scalar for each read on the logit of its last source (3, 5 and 10 were
            tried); None has no b. `recency_bias_frozen` keeps b where it starts.
        gate: "scalar": c is a number for each read; "vector": W (d, d) starts at zero and c (d,), s is one number for
            each channel and token. c starts at `gate_init` (-2 and -10 were tried).
        alpha: "learnable": s is a number for each read, not squashed, which starts at 0: the standard residual.
        read_temperature: divides the logits, b apart.
        null_source: one more source that is zero, with logit zero: a read can then be of less than its sources.

    Source: the regimes of open-attention-residuals (github.com/wdlctc/open-attention-residuals), which has b, gate and
    alpha in these forms.
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
        read_temperature: float = 1.0,
        null_source: bool = False,
    ) -> None:
        super().__init__()
        _check(recency_bias, true_or_false("recency_bias_frozen", recency_bias_frozen), gate, gate_init, alpha)
        self.recency_bias, self.gate_kind, self.gate_init = recency_bias, gate, float(gate_init)
        self.read_temperature = positive("read_temperature", read_temperature)
        self.null_source = true_or_false("null_source", null_source)
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
        """Whether a read is what it is without gates."""
        return not self.null_source and self.read_temperature == 1.0 and next(self.parameters(), None) is None

    def init_parameters(self) -> None:
        if self.bias is not None and self.recency_bias is not None:
            start_at(self.bias, torch.full_like(self.bias, self.recency_bias))
        if self.gate is not None:
            start_at(self.gate, torch.full_like(self.gate, self.gate_init))
        for parameter in (self.gate_weight, self.alpha):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def read(
        self,
        sources: Sequence[Tensor],
        query: Tensor,
        index: int,
        *,
        stream: Tensor | None = None,
        scale: float = 1.0,
        eps: float = 1e-6,
        edit: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read `index`.

        Args:
            sources: (..., d) each. query: (d,), pseudo-query times key gain.
            stream: (..., d); None is the sum of the sources.
            edit: makes the weights (tokens, sources) that are used out of the softmax's.

        Returns:
            h (..., d) in the first source's dtype, and the softmax's weights (tokens, sources), with no gradient; the
            null source is the last of them.
        """
        first = sources[0]
        dtype = compute_dtype(first.dtype)
        with full_precision(first):
            values = [source.to(dtype) for source in sources]  # no stack: each source is kept for backward as it is
            query = query.to(dtype) / self.read_temperature
            logits = [(v @ query) * (v.square().mean(-1) + eps).rsqrt() for v in values]
            if self.bias is not None:
                logits[-1] = logits[-1] + self.bias[index].to(dtype)
            if self.null_source:
                logits.append(torch.zeros_like(logits[0]))
            weights = torch.stack(logits, -1).softmax(-1)
            if edit is not None:
                weights = edit(weights.reshape(-1, weights.shape[-1])).view_as(weights)
            h = values[0] * (weights[..., 0:1] * scale)
            for i in range(1, len(values)):
                h = torch.addcmul(h, values[i], weights[..., i : i + 1] * scale)
            share = self._share(values, stream, index)
            if share is not None:
                plain = _sum(values) if stream is None else stream.to(dtype)
                h = torch.lerp(plain, h, share)
        return h.to(first.dtype), weights.detach().reshape(-1, weights.shape[-1])

    def held_back(self, read: Tensor, stream: Tensor, index: int) -> Tensor | None:
        """(1 - s) stream + s read for rows of coefficients; None where s is a vector."""
        if self.gate_kind == "vector":
            return None
        share = self._share([read.new_zeros(())], None, index)
        return read if share is None else torch.lerp(stream.expand_as(read), read, share.detach())

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        """Return the scalars of each read: b; the share s by its bias alone, averaged over channels; alpha."""
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

    def _share(self, values: Sequence[Tensor], stream: Tensor | None, index: int) -> Tensor | None:
        """s, of a shape that fits (..., d)."""
        like = values[0]
        if self.alpha is not None:
            return self.alpha[index].to(like.dtype).expand_as(like)
        if self.gate is None:
            return None
        gate = self.gate[index].to(like.dtype)
        if self.gate_weight is not None:
            plain = _sum(values) if stream is None else stream.to(like.dtype)
            gate = nn.functional.linear(plain, self.gate_weight[index].to(like.dtype), gate)
        return gate.sigmoid().expand_as(like)


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _check(recency_bias: float | None, frozen: bool, gate: str, gate_init: float, alpha: str) -> None:
    for name, value, valid in (("gate", gate, ("none", "scalar", "vector")), ("alpha", alpha, ("none", "learnable"))):
        if value not in valid:
            raise unknown(name, str(value), valid)
    if gate != "none" and alpha != "none":
        raise UserError(f"both gate='{gate}' and alpha='{alpha}' are given: each sets the share of the read, give one")
    if frozen and recency_bias is None:
        raise UserError("recency_bias_frozen is given without recency_bias: give the value that it is frozen at")
    for name, value in (("recency_bias", recency_bias), ("gate_init", gate_init)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            raise UserError(f"{name} is {value!r}: expected a number")
