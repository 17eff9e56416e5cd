"""The weights of a depth read: the paper's softmax with static queries, and the variants of its ablation.

A read that differs from the paper's is computed in plain torch, in one pass; a temperature alone only scales the query,
so kernels can compute it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.ops.norms import one_over_rms
from attnres.residuals.settings import number, one_of, positive, true_or_false, whole

QueryKind = Literal["static", "input"]
WeightKind = Literal["softmax", "sigmoid"]
ValueKind = Literal["raw", "normed"]
EmbeddingKeyKind = Literal["own", "static"]


def weighted_sum(values: Sequence[Tensor], weights: Sequence[Tensor] | Tensor) -> Tensor:
    """Return sum_j weights[j] values[j] for n >= 1 values (..., d), and weights of shapes that fit them."""
    total = values[0] * weights[0]
    for j in range(1, len(values)):
        total = torch.addcmul(total, values[j], weights[j])
    return total


class Mixed(NamedTuple):
    """A read before its norm.

    Attributes:
        h: (..., d) in the compute dtype.
        weights: (tokens, sources), without gradient; with several heads their mean.
        values: the weighed sources, (..., d) each.
    """

    h: Tensor
    weights: Tensor
    values: list[Tensor]


class Weighting(nn.Module):
    """A depth read of n sources; `init_parameters` sets its parameters:

        k_i = g * v_i / rms(v_i),   s_i = (w + W N(x)) . k_i / t + b_i
        h = sum_i a_i v_i,   a = softmax(s_1 .. s_n (, 0)) or sigmoid(s)

    N is an RMSNorm without a gain, x the plain residual stream (the sum of all outputs so far), b optional biases.

    Args:
        reads, width: number of reads, and d.
        query: "static" is w alone; "input" adds W, (d, d) for each read, which starts at zero: the query then depends
            on the token's stream.
        weights: "sigmoid" weighs each source independently; rows then do not sum to one.
        key_norm: False uses keys g * v_i.
        keys: "sliced:R" uses the last R coordinates of v_i as its key, with rms and w (R,) over these, and has no gain.
        heads: number of slices of width d / heads of the query; each slice of the values has separate weights. rms(v_i)
            is that of the whole vector.
        values: "normed" mixes v_i / rms(v_i).
        read_temperature: t, a number or "sqrt_width" for sqrt(d).
        null_source: a further source of zeros with logit zero, so that the weights of the others may sum to less than
            one.
        embedding_key: "static" uses a learned vector t in place of v_0 in the key of the first source, one for all
            reads, initialised from N(0, 0.02^2).
        query_std: w is initialised from N(0, query_std^2); 0 starts with uniform weights.

    Source: arXiv 2603.15031, table of ablations (query, weights, key_norm, heads); arXiv 2607.27230 (heads);
    Inkling 2 and samitmohan.github.io's snippet (normed values with sqrt(d)); open-attention-residuals (null source,
    queries drawn at 0.02); github.com/jon123boss/LR-AttnRes (sliced keys, whose sweep has no factor 1/sqrt(R); static
    key of the embedding, there with projected keys alone).
    """

    def __init__(
        self,
        reads: int,
        width: int,
        *,
        query: QueryKind = "static",
        weights: WeightKind = "softmax",
        key_norm: bool = True,
        keys: str = "whole",
        heads: int = 1,
        values: ValueKind = "raw",
        read_temperature: float | Literal["sqrt_width"] = 1.0,
        null_source: bool = False,
        embedding_key: EmbeddingKeyKind = "own",
        query_std: float = 0.0,
    ) -> None:
        super().__init__()
        one_of("query", query, ("static", "input"))
        one_of("weights", weights, ("softmax", "sigmoid"))
        one_of("values", values, ("raw", "normed"))
        self.width = width
        self.heads, self.key_norm = whole("heads", heads), true_or_false("key_norm", key_norm)
        if width % heads:
            raise UserError(f"heads is {heads}: expected a number that divides the width, {width}")
        self.rank = _sliced(keys, width)
        if self.rank is not None and heads > 1:
            raise UserError(f"heads is {heads} with keys={keys}: the slices of a query need whole keys, give one")
        self.sigmoid, self.normed_values = weights == "sigmoid", values == "normed"
        self.null_source = true_or_false("null_source", null_source)
        if self.sigmoid and self.null_source:
            raise UserError("null_source is given with weights='sigmoid', whose rows sum to no number: leave it out")
        if isinstance(read_temperature, str) and read_temperature != "sqrt_width":
            raise UserError(f"read_temperature is '{read_temperature}': expected a positive number or sqrt_width")
        named = read_temperature == "sqrt_width"
        self.read_temperature = math.sqrt(width) if named else positive("read_temperature", read_temperature)
        self.query_std = number("query_std", query_std, least=0.0)
        self.query_weight = nn.Parameter(torch.empty(reads, self.rank or width, width)) if query == "input" else None
        static = one_of("embedding_key", embedding_key, ("own", "static")) == "static"
        self.embedding_key = nn.Parameter(torch.empty(self.rank or width)) if static else None

    def init_parameters(self) -> None:
        if self.query_weight is not None:
            nn.init.zeros_(self.query_weight)
        if self.embedding_key is not None:
            nn.init.normal_(self.embedding_key, std=0.02)

    reset_parameters = init_parameters

    @property
    def special(self) -> str | None:
        """Return the settings for which there is no kernel, in words; None if kernels can compute the read."""
        settings = {
            "query=input": self.query_weight is not None,
            "weights=sigmoid": self.sigmoid,
            "key_norm=false": not self.key_norm,
            f"keys=sliced:{self.rank}": self.rank is not None,
            f"heads={self.heads}": self.heads > 1,
            "values=normed": self.normed_values,
            "null_source=true": self.null_source,
            "embedding_key=static": self.embedding_key is not None,
        }
        return ", ".join(name for name, value in settings.items() if value) or None

    @property
    def bounded(self) -> bool:
        """Return whether a read has one direction w * g, whose length bounds its logits."""
        return self.query_weight is None and self.heads == 1 and self.key_norm

    def total(self, count: int) -> float:
        """Return the factor that turns the mean at the start (zero queries) into the sum of `count` sources."""
        return 2.0 if self.sigmoid else float(count + self.null_source)

    def read(
        self,
        sources: Sequence[Tensor],
        query: Tensor,
        gain: Tensor,
        index: int,
        *,
        biases: Sequence[Tensor | float],
        stream: Callable[[], Tensor],
        query_lr: float,
        scale: float,
        eps: float,
        edit: Callable[[Tensor], Tensor] | None,
        exchange: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None,
    ) -> Mixed:
        """Compute read `index`.

        Args:
            sources: (..., d) each. query, gain: (d,). biases: added to each source's logit; may be empty.
            stream: returns the plain residual stream (..., d); called if the read needs it.
            query_lr: factor of `query_weight`.
            scale: factor of the read. eps: eps of the norms.
            edit: maps weights (tokens, sources) to edited ones; with several heads each source's factor applies to all
                heads.
            exchange: maps the weighed sources to the ones that are mixed.
        """
        first = sources[0]
        dtype = compute_dtype(first.dtype)
        with full_precision(first):
            # no stack: each source is saved for backward without a copy
            values = [source.to(dtype) for source in sources]
            query, gain = query.to(dtype), gain.to(dtype)
            if self.query_weight is not None:
                state = F.rms_norm(stream().to(dtype), (self.width,), None, eps)
                query = query + F.linear(state, query_lr * self.query_weight[index].to(dtype))
            scaled_query = query * gain / self.read_temperature
            keys = values if self.rank is None else [v[..., -self.rank :] for v in values]
            if self.embedding_key is not None:
                keys = [self.embedding_key.to(dtype).expand_as(keys[0]), *keys[1:]]
            if not torch.is_grad_enabled():  # copies of one text are weighed once
                keys = [key[:1] if key.dim() > 1 and key.stride(0) == 0 else key for key in keys]
            factors = [one_over_rms(key, eps) for key in keys]
            logits = [self._logit(key, scaled_query, factor) for key, factor in zip(keys, factors, strict=True)]
            if biases:
                logits = [logit + bias for logit, bias in zip(logits, biases, strict=True)]
            if self.null_source:
                logits.append(logits[0].new_zeros(()))
            shape = (*first.shape[:-1], self.heads)
            stacked = torch.stack([logit.expand(shape) for logit in logits], -1)  # (..., heads, sources)
            weights = stacked.sigmoid() if self.sigmoid else stacked.softmax(-1)
            if self.normed_values:
                if self.rank is not None or self.embedding_key is not None:
                    factors = [one_over_rms(v, eps) for v in values]
                values = [v * factor for v, factor in zip(values, factors, strict=True)]
            rows = weights.mean(-2).reshape(-1, weights.shape[-1])
            if edit is not None:
                rows, before = edit(rows), rows
                weights = rows.view_as(weights) if self.heads == 1 else _in_proportion(weights, before, rows)
            if exchange is not None:
                values = [value.to(dtype) for value in exchange(values)]
            h = weighted_sum(values, [self._factor(weights[..., i] * scale) for i in range(len(values))])
            if self.null_source:
                values = [*values, torch.zeros_like(values[0])]
        return Mixed(h, rows.detach(), values)

    def _logit(self, key: Tensor, query: Tensor, factor: Tensor) -> Tensor:
        """Return the logits of one source, (..., heads)."""
        if self.heads == 1:
            logit = (key @ query if query.dim() == 1 else (key * query).sum(-1)).unsqueeze(-1)
        else:
            logit = (key * query).unflatten(-1, (self.heads, -1)).sum(-1)
        return logit * factor if self.key_norm else logit

    def _factor(self, weight: Tensor) -> Tensor:
        """Return weights (..., heads) in a shape that multiplies a value (..., d)."""
        if self.heads == 1:
            return weight
        slices = weight.unsqueeze(-1).expand(*weight.shape, self.width // self.heads)
        return slices.flatten(-2)


def _sliced(keys: Any, width: int) -> int | None:
    """Return R of "sliced:R", None for "whole"."""
    if keys == "whole":
        return None
    word, _, rank = str(keys).partition(":")
    if word != "sliced" or not rank.isdecimal() or not 1 <= int(rank) <= width:
        raise UserError(f"keys is {keys!r}: expected whole, or sliced:R with R from 1 to the width, {width}")
    return int(rank)


def _in_proportion(weights: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return weights (..., heads, sources) scaled so that their mean over heads becomes `after` (T, sources) instead of
    `before`; if all heads had zero weight, each gets `after`."""
    shape = (*weights.shape[:-2], 1, weights.shape[-1])
    before, after = before.view(shape), after.view(shape)
    some = before >= torch.finfo(before.dtype).tiny
    return torch.where(some, weights * (after / torch.where(some, before, 1.0)), after)


def settings_among(options: dict[str, Any], maker: type) -> dict[str, Any]:
    """Remove from `options` the arguments of the constructor of `maker`, and return them."""
    names = maker.__init__.__kwdefaults__ or {}
    return {name: options.pop(name) for name in list(options) if name in names}
