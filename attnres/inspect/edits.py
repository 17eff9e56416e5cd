"""Edits of reads: of their weights (knock a source out, pin, swap, add to a logit), or of the vectors that they mix."""

import math
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError, unknown
from attnres.inspect.recording import Trace, find_residual
from attnres.residuals import Editor, Residual, Source, depths, outputs, watched_by

Reads = str | int | Collection[str | int] | None
"""Which reads: names ("mlp 3", "attention 2 key", "output"), all of a kind ("mlp") or of a sublayer ("attention 2"),
numbers from 0 (negative ones count from the end), a range; None is all."""
Tokens = Tensor | int | Sequence[int] | None
"""Which tokens: a bool mask (B, T) or (T,), or positions in each row (negative ones from the end); None is all."""


def with_choice(sources: Sequence[str], reads: Sequence[int], residual: Residual) -> list[int]:
    """Those of the reads that have one of the sources and another one too; all of them where none does."""
    layout = residual.layout()
    rows = {index: [source.name for source in layout[index].sources] for index in reads}
    return [index for index, row in rows.items() if len(row) > 1 and set(sources) & set(row)] or list(reads)


def choose_reads(reads: Reads, names: Sequence[str]) -> list[int]:
    """The numbers of the reads meant by `reads`, out of those called `names`.

    Raises:
        UserError: there is no such read, one is given twice, or none at all.
    """
    if reads is None:
        return list(range(len(names)))
    numbers = []
    members: Any = [reads] if isinstance(reads, str | int | Integral) else reads
    for read in members:
        if isinstance(read, str):
            of_kind = [index for index, name in enumerate(names) if read in (name, *_groups(name))]
            if not of_kind:
                raise unknown("read", read, {*names, *(group for name in names for group in _groups(name))})
            numbers += of_kind
        elif _is_number(read) and -len(names) <= read < len(names):
            numbers.append(int(read) % len(names))
        else:
            raise UserError(f"read {read!r}: expected a name such as 'mlp 0', or a number from 0 to {len(names) - 1}")
    if not numbers:
        raise UserError("no reads are given: name one, or pass None for all")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"a read is given twice in {', '.join(names[index] for index in numbers)}: name each once")
    return numbers


def _groups(name: str) -> list[str]:
    """What a read of that name is one of: "mlp" of "mlp 3"; "attention" and "attention 2" of "attention 2 key"."""
    parts = name.split(" ")
    return [" ".join(parts[:count]) for count in range(1, len(parts))]


def token_mask(tokens: Tokens, shape: Sequence[int], device: torch.device) -> Tensor | None:
    """(B, T) or (T,) bool: which of a pass's tokens are meant; None is all.

    Raises:
        UserError: a mask of another shape, or a position that is not in the pass.
    """
    if tokens is None:
        return None
    length = shape[1]
    if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        if tuple(tokens.shape) not in ((length,), tuple(shape)):
            raise UserError(
                f"the edit's mask of tokens has shape {tuple(tokens.shape)}, the forward pass {tuple(shape)}: give one "
                "of the pass's shape"
            )
        return tokens.to(device)
    positions = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    mask = torch.zeros(length, dtype=torch.bool)
    for position in [positions] if isinstance(positions, int | Integral) else positions:
        mask[position_of(position, length)] = True
    return mask.to(device)


def _is_number(value: Any) -> bool:
    """Whether it is a whole number, numpy's included."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def position_of(position: Any, length: int) -> int:
    """The number of a token, from 0 on, in a pass of `length`. Raises UserError."""
    if not _is_number(position) or not -length <= position < length:
        raise UserError(
            f"position {position!r} in a text of {length} tokens: expected 0 to {length - 1}, or -1, the last"
        )
    return int(position) % length


def source_names_of(source: str | Sequence[str]) -> Sequence[str]:
    """One name or several as a sequence. Raises UserError."""
    names = (source,) if isinstance(source, str) else source
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the source is {source!r}: expected a name such as 'embedding', or several")
    return names


def check_sources(names: Sequence[str], reads: Sequence[int], residual: Residual) -> None:
    """Raise a UserError unless each source is among those of at least one of the reads."""
    layout = residual.layout()
    rows = [[source.name for source in read.sources] for read in layout]
    if not names:
        raise UserError("no source is given: name one, such as 'embedding'")
    for name in names:
        if any(name in rows[index] for index in reads):
            continue
        last = max(reads)
        has = f"'{layout[last].name}' reads {', '.join(rows[last])}"
        written = [output.name for output in outputs(residual.num_sublayers + 1, residual.sublayers)]
        if name in written:
            number = written.index(name)
            if number > depths(layout)[last]:
                raise UserError(f"source '{name}' is written after read '{layout[last].name}': choose a later read")
            holders = [f"'{s.name}'" for s in layout[last].sources if s.span is not None and number in s.span]
            where = f"inside {' and '.join(holders)}" if holders else "inside other sources"
            raise UserError(f"'{name}' is no source of its own but {where}: {has}; give one of these")
        first = next((index for index, row in enumerate(rows) if name in row), None)
        if first is not None:
            raise UserError(
                f"no selected read has the source '{name}': '{layout[first].name}' is the first that has it; {has}"
            )
        raise unknown("source", name, {name for index in reads for name in rows[index]})


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


def source_names(model: nn.Module) -> list[list[str]]:
    """Return the names of what each read mixes.

    Raises:
        UserError: the residual mixes by no weights (DeepNorm).
    """
    return [[source.name for source in row] for row in _rows(find_residual(model))]


def _rows(residual: Residual) -> list[tuple[Source, ...]]:
    rows = [read.sources for read in residual.layout()]
    if not all(rows):
        raise UserError(f"residual '{residual.name}' mixes its sources by no weights: there is nothing to edit")
    return rows


@contextmanager
def intervene(model: nn.Module, *edits: Edit) -> Generator[None]:
    """Make `edits`, one after the other, in every forward pass inside the block; the model itself stays as it is.

    Recording (`record`) shows the edited weights, gradients flow, and generation works; with a KV cache a pass holds
    the new tokens only, so that edits of some tokens are refused there.

    >>> with intervene(model, KnockOut("embedding", reads="output")):  # doctest: +SKIP
    ...     logits = model(input_ids=ids).logits

    With activation checkpointing the backward pass runs the layers again: it must be inside the block, too.

    Raises:
        UserError: an edit of reads, sources or tokens that are not there; a residual that mixes by no weights; a model
            that is being edited already.
    """
    residual = find_residual(model)
    if residual.editor is not None:
        raise UserError("this model is being edited already: give all edits to one `intervene`")
    editor = _Edits(residual, edits)
    base: Any = getattr(model, "depth_base", model)  # which a head calls, and users may
    hook = base.register_forward_pre_hook(editor.see_cache, with_kwargs=True)
    try:
        with watched_by(residual, editor=editor):
            yield
    finally:
        hook.remove()


class Watch(Editor):
    """An editor that changes nothing: it keeps a running pass's outputs, as every editor must."""

    def __init__(self, residual: Residual) -> None:
        self.residual = residual
        self.outputs: Sequence[Tensor] = []
        self.shape = torch.Size()

    def on_start(self, embedding: Tensor) -> None:
        self.outputs = [embedding]
        self.shape = embedding.shape[:-1]

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs = [*self.outputs[: index + 1], output]  # a checkpointed layer writes again

    def edit(self, index: int, weights: Tensor) -> Tensor:
        return weights


class _Edits(Watch):
    """The edits of one `intervene`."""

    def __init__(self, residual: Residual, edits: Iterable[Edit]) -> None:
        super().__init__(residual)
        self.rows, names = _rows(residual), [read.name for read in residual.layout()]
        self.by_read: dict[int, list[tuple[Edit, int]]] = {}
        self.positional, self.cached = False, False
        for edit in edits:
            if not isinstance(edit, Edit):
                raise UserError(
                    f"{edit!r} is no edit: expected KnockOut, Uniform, Recency, Pin, Swap, AddLogit, Patch or Steer"
                )
            reads = choose_reads(edit.of_reads, names)
            edit.check(reads, residual)
            reads = edit.meant(reads, residual)
            self.positional |= edit.positional
            for place, index in enumerate(reads):
                self.by_read.setdefault(index, []).append((edit, place))

    def see_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches = [one for one in (*args, *kwargs.values()) if hasattr(one, "get_seq_length")]
        self.cached = any(int(cache.get_seq_length()) > 0 for cache in caches)

    def on_start(self, embedding: Tensor) -> None:
        super().on_start(embedding)
        if self.cached and self.positional:
            raise UserError(
                "an edit of some tokens in a pass that continues from a KV cache and so holds new tokens only: pass "
                "use_cache=False, or edit all tokens"
            )

    def edit(self, index: int, weights: Tensor) -> Tensor:
        if index not in self.by_read:
            return weights
        edited = weights.view(*self.shape, -1)
        for edit, place in self.by_read[index]:
            if edit.changes_values:
                continue
            new = edit.rewrite(edited, self.rows[index], place, self.residual.traits.sums_to_one)
            mask = token_mask(edit.of_tokens, self.shape, weights.device)
            edited = new if mask is None else torch.where(mask.unsqueeze(-1), new, edited)
        return edited.reshape(weights.shape)

    def exchange(self, index: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        for edit, _ in self.by_read.get(index, ()):
            if edit.changes_values:
                names = [source.name for source in self.rows[index]]
                values = [
                    self._where(edit, edit.exchange(value), value) if edit.exchanges(name) else value
                    for name, value in zip(names, values)
                ] + list(values[len(names) :])
        return values

    def steer(self, index: int, h: Tensor) -> Tensor:
        for edit, _ in self.by_read.get(index, ()):
            if edit.changes_values and edit.exchanges(None):
                h = self._where(edit, edit.exchange(h), h)
        return h

    def _where(self, edit: Edit, new: Tensor, old: Tensor) -> Tensor:
        """The changed vectors (B, T, d) at the edit's tokens, the others as they were."""
        mask = token_mask(edit.of_tokens, self.shape, old.device)
        return new.to(old.dtype) if mask is None else torch.where(mask.unsqueeze(-1), new.to(old.dtype), old)


def source_and_read(text: str) -> tuple[str, str | None]:
    """What SOURCE or SOURCE@READ names. Raises UserError."""
    source, at, where = text.partition("@")
    if not source.strip() or (at and not where.strip()):
        raise UserError(f"'{text}' names no edge: expected SOURCE or SOURCE@READ, such as embedding@mlp3")
    return _spaced(source), _spaced(where) if at else None


def find_knock_out(source: str, where: str | None, model: Any) -> KnockOut:
    """At one read; or, of all reads, of those of a sublayer or of a kind of sublayer, at those with a choice.

    Raises:
        UserError: no such read, or none of them has the source.
    """
    residual = find_residual(model)
    names = [read.name for read in residual.layout()]
    reads = choose_reads(where, names)
    if where not in names:  # a read without its only source has no input at all
        reads = with_choice((source,), reads, residual)
    edit = KnockOut(source, reads=reads)
    with intervene(model, edit):  # says what is wrong with it
        return edit


def _spaced(name: str) -> str:
    """ "mlp3", "mlp_3", "mlp-3" and "MLP 3" as "mlp 3"; "attention2key" as "attention 2 key"."""
    return re.sub(r"^([a-z]+)[ _-]*(\d+)[ _-]*([a-z]*)$", r"\1 \2 \3", name.strip().lower()).strip()
