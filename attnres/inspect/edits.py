"""Edits of reads: of their weights (knock a source out, pin, swap, add to a logit), or of the vectors that they mix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.inspect.places import Reads, Tokens, check_sources, choose_reads, position_of, source_names_of, with_choice
from attnres.inspect.record import Trace
from attnres.residuals import Residual, Source

LARGEST_DELTA = 80.0
"""exp of more than this is no fp32 number."""


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of the weights of some reads at some tokens.

    Weights p are those of a read, or the coefficients that a residual implies (standard: ones; see `Residual.implied`).
    Those that do not sum to one (`Traits.sums_to_one`) are never renormalised. Where reads are scaled or held
    back by gates, that happens after the edit.
    """

    @property
    def of_reads(self) -> Reads:
        return getattr(self, "reads", None)

    @property
    def of_tokens(self) -> Tokens:
        return getattr(self, "tokens", None)

    @property
    def positional(self) -> bool:
        """Whether it matters which tokens a forward pass holds."""
        return self.of_tokens is not None

    def check(self, reads: Sequence[int], residual: Residual) -> None:
        """Raise a UserError if the edit cannot be made at the reads of these numbers."""

    @property
    def changes_values(self) -> bool:
        """Whether it is an edit of vectors, and not of weights."""
        return False

    def meant(self, reads: Sequence[int], residual: Residual) -> Sequence[int]:
        """The reads that are edited, of those that `of_reads` chooses."""
        return reads

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        """The edited weights (B, T, n) of the `place`-th of the edit's reads; of all tokens, whatever `tokens` says."""
        raise NotImplementedError

    def exchanges(self, name: str | None) -> bool:
        """Whether it changes the vector of that source, or (None) what the read made; an edit of vectors says."""
        return False

    def exchange(self, vector: Tensor) -> Tensor:
        """What stands in the place of a vector (B, T, d); an edit of vectors says."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class KnockOut(Edit):
    """Remove sources K from reads: p'_i = 0 for i in K, and p'_j = p_j / sum_{k not in K} p_k elsewhere.

    Without `renormalise`, and for coefficients that do not sum to one, the others stay as they are. A read of which
    nothing is left reads zeros; where all reads of a kind are meant (reads="mlp"), those without another source are
    left alone. Reads without these sources stay as they are.

    Args:
        source: "embedding", "mlp 3", "block 2", "partial", ..., or several.
    """

    source: str | Sequence[str]
    reads: Reads = None
    tokens: Tokens = None
    renormalise: bool = True

    def check(self, reads: Sequence[int], residual: Residual) -> None:
        check_sources(source_names_of(self.source), reads, residual)

    def meant(self, reads: Sequence[int], residual: Residual) -> Sequence[int]:
        names = [read.name for read in residual.layout()]
        of_kind = isinstance(self.reads, str) and self.reads not in names
        return with_choice(source_names_of(self.source), reads, residual) if of_kind else reads

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        gone = torch.tensor([source.name in source_names_of(self.source) for source in sources], device=weights.device)
        if not gone.any():
            return weights
        kept = weights.masked_fill(gone, 0.0)
        if not (self.renormalise and sums_to_one):
            return kept
        rest = kept.sum(-1, keepdim=True)
        return torch.where(rest > 0, kept / rest.clamp_min(torch.finfo(rest.dtype).tiny), 0.0)


@dataclass(frozen=True, eq=False)
class Uniform(Edit):
    """All sources the same: p'_i = (sum_j p_j) / n, which for a softmax is 1 / n."""

    reads: Reads = None
    tokens: Tokens = None

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        return weights.mean(-1, keepdim=True).expand_as(weights)


@dataclass(frozen=True, eq=False)
class Recency(Edit):
    """The last source alone: p'_i = 1 for the newest source (never the null source), 0 for the others."""

    reads: Reads = None
    tokens: Tokens = None

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        last = len(sources) - 1 - (sources[-1].kind == "null")
        edited = torch.zeros_like(weights)
        edited[..., last] = 1.0
        return edited


@dataclass(frozen=True, eq=False)
class Pin(Edit):
    """Weights from elsewhere: p' = weights, whatever the input.

    Args:
        weights: of each of `reads` in turn, or of the one read: a row of n numbers, or (T, n), or (B, T, n), used as
            they are. `pin_from` takes them from a recording.
    """

    weights: Any
    reads: Reads
    tokens: Tokens = None

    def _rows(self) -> list[Tensor]:
        rows = [self.weights] if isinstance(self.reads, str | int | Integral) else list(self.weights)
        try:
            return [torch.as_tensor(row) for row in rows]
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"weights to pin are not numbers ({error}): give a row of weights for each of the reads"
            ) from error

    @property
    def positional(self) -> bool:
        return self.tokens is not None or any(row.dim() > 1 for row in self._rows())

    def check(self, reads: Sequence[int], residual: Residual) -> None:
        rows, layout = self._rows(), residual.layout()
        if len(rows) != len(reads):
            raise UserError(f"{len(rows)} rows of weights to pin for {len(reads)} reads: give one for each read")
        for row, index in zip(rows, reads):
            names = [source.name for source in layout[index].sources]
            if row.dim() not in (1, 2, 3) or row.shape[-1] != len(names):
                raise UserError(
                    f"weights of shape {tuple(row.shape)} to pin at read '{layout[index].name}': expected "
                    f"{len(names)} a token, of {', '.join(names)}"
                )

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        row = self._rows()[place].to(weights)
        try:
            return row.expand_as(weights)
        except RuntimeError:
            raise UserError(
                f"weights to pin have shape {tuple(row.shape)}, this forward pass needs {tuple(weights.shape)}: pin "
                "weights of as many tokens, or mean weights, which fit any text"
            ) from None


@dataclass(frozen=True, eq=False)
class Swap(Edit):
    """Tokens at positions a and b exchange their weights, in every row of the batch."""

    a: int
    b: int
    reads: Reads = None

    @property
    def positional(self) -> bool:
        return True

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        length = weights.shape[1]
        order = torch.arange(length, device=weights.device)
        a, b = position_of(self.a, length), position_of(self.b, length)
        order[a], order[b] = b, a
        return weights[:, order]


@dataclass(frozen=True, eq=False)
class AddLogit(Edit):
    """Add `delta` to a source's logit: p'_i = p_i e^delta / Z for the source, p'_j = p_j / Z elsewhere, rows summing to
    one. Of coefficients that do not sum to one it is multiplied by e^delta, the others stay."""

    source: str
    delta: float
    reads: Reads = None
    tokens: Tokens = None

    def check(self, reads: Sequence[int], residual: Residual) -> None:
        check_sources((self.source,), reads, residual)
        number = isinstance(self.delta, int | float) and not isinstance(self.delta, bool)
        if not (number and abs(self.delta) <= LARGEST_DELTA):  # nor NaN
            raise UserError(f"delta is {self.delta!r}: expected a number from -{LARGEST_DELTA:g} to {LARGEST_DELTA:g}")

    def rewrite(self, weights: Tensor, sources: Sequence[Source], place: int, sums_to_one: bool) -> Tensor:
        raised = torch.tensor([source.name == self.source for source in sources], device=weights.device)
        if not raised.any():
            return weights
        if not sums_to_one:
            return torch.where(raised, weights * math.exp(self.delta), weights)
        # Only factors of at most one: none can overflow.
        factor = math.exp(-abs(self.delta))
        scaled = torch.where(raised if self.delta < 0 else ~raised, weights * factor, weights)
        total = scaled.sum(-1, keepdim=True)
        return torch.where(total > 0, scaled / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)


class _Vectors(Edit):
    """An edit of vectors: one source's, or what the reads made."""

    @property
    def of_source(self) -> str | None:
        return getattr(self, "source", None)

    @property
    def of_vector(self) -> Any:
        return getattr(self, "vector", None)

    @property
    def changes_values(self) -> bool:
        return True

    @property
    def positional(self) -> bool:
        return self.of_tokens is not None or torch.as_tensor(self.of_vector).dim() > 1

    def exchanges(self, name: str | None) -> bool:
        return name == self.of_source

    def check(self, reads: Sequence[int], residual: Residual) -> None:
        if self.of_source is not None:
            check_sources((self.of_source,), reads, residual)
        try:
            shape = tuple(torch.as_tensor(self.of_vector).shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the vector is {type(self.of_vector).__name__}: expected numbers ({error})") from error
        if not 1 <= len(shape) <= 3 or shape[-1] != residual.width:
            raise UserError(
                f"a vector of shape {shape} in a model of width {residual.width}: expected ({residual.width},), or one "
                f"a token, (T, {residual.width}) or (B, T, {residual.width})"
            )

    def _fitting(self, vector: Tensor) -> Tensor:
        """This edit's vector as `vector` (B, T, d) is."""
        vectors = torch.as_tensor(self.of_vector).to(vector)
        try:
            return vectors.expand_as(vector)
        except RuntimeError:
            raise UserError(
                f"vectors of shape {tuple(vectors.shape)} for a forward pass of {tuple(vector.shape)}: give vectors of "
                "as many tokens, or one for all"
            ) from None


@dataclass(frozen=True, eq=False)
class Patch(_Vectors):
    """Put another vector in the place of a source of reads, v'_i = vector: of another prompt (`read_vectors`), a mean,
    or zeros. The weights stay those that the true sources were given, and other reads of the same source see it as it
    is.

    Args:
        vector: (d,), or one a token, (T, d) or (B, T, d).
    """

    source: str
    vector: Any
    reads: Reads = None
    tokens: Tokens = None

    def exchange(self, vector: Tensor) -> Tensor:
        return self._fitting(vector)


@dataclass(frozen=True, eq=False)
class Steer(_Vectors):
    """Add a vector to a source of reads, v'_i = v_i + vector, or without a source to what the reads made, h' = h +
    vector.

    Args:
        vector: (d,), or one a token, (T, d) or (B, T, d).
    """

    vector: Any
    source: str | None = None
    reads: Reads = None
    tokens: Tokens = None

    def exchange(self, vector: Tensor) -> Tensor:
        return vector + self._fitting(vector)


def pin_from(trace: Trace, reads: Reads = None, *, each_token: bool = False) -> Pin:
    """Pin the weights that a recording saw: their means, which fit any text, or with `each_token` those of each token
    of its last forward pass (recorded with `tokens=True`), which fit texts of as many tokens.

    Raises:
        UserError: nothing was recorded, the residual weighs nothing, or `tokens=True` is missing.
    """
    numbers = choose_reads(reads, trace.reads)
    rows = trace.token_weights if each_token else trace.weights
    if each_token and not rows and trace.tokens:
        raise UserError("this recording kept no weights of single tokens: record(model, tokens=True), or pin the means")
    if not trace.tokens or any(not trace.sources[index] for index in numbers):
        raise UserError(f"this recording of residual '{trace.residual}' holds no weights to pin: run a text first")
    return Pin([rows[index] for index in numbers], numbers)
