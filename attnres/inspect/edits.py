"""Edits of reads: of their weights (`Ablate`, `Reweigh`) or of the vectors that they mix (`Patch`, `Steer`)."""

import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError, unknown
from attnres.inspect.recording import find_residual
from attnres.residuals import Editor, Read, Residual, depths, outputs, watched_by

Reads = str | int | Collection[str | int] | None
"""Which reads: names ("mlp 3", "attention 2 key", "output"), all of a kind ("mlp") or of a sublayer ("attention 2"),
numbers from 0 (negative ones count from the end), a range; None is all."""
Tokens = Tensor | int | Sequence[int] | None
"""Which tokens: a bool mask (B, T) or (T,), or positions in each row (negative ones from the end); None is all."""


def with_choice(sources: Sequence[str], reads: Sequence[int], layout: Sequence[Read]) -> list[int]:
    """Return the reads that have one of the sources and at least one other; all reads where none does."""
    rows = {index: [source.name for source in layout[index].sources] for index in reads}
    return [index for index, row in rows.items() if len(row) > 1 and set(sources) & set(row)] or list(reads)


def choose_reads(reads: Reads, names: Sequence[str]) -> list[int]:
    """Return the numbers of the reads that `reads` names, out of those called `names`.

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
    """Return the groups of a read: "mlp" of "mlp 3"; "attention" and "attention 2" of "attention 2 key"."""
    parts = name.split(" ")
    return [" ".join(parts[:count]) for count in range(1, len(parts))]


def token_mask(tokens: Tokens, shape: Sequence[int], device: torch.device) -> Tensor | None:
    """Return which tokens of a pass are edited, (B, T) or (T,) bool; None is all.

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
    """Return whether it is a whole number, numpy's included."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def position_of(position: Any, length: int) -> int:
    """Return the number of a token, from 0 on, in a pass of `length`. Raises UserError."""
    if not _is_number(position) or not -length <= position < length:
        raise UserError(
            f"position {position!r} in a text of {length} tokens: expected 0 to {length - 1}, or -1, the last"
        )
    return int(position) % length


def source_names_of(source: str | Sequence[str]) -> Sequence[str]:
    """Return one name or several as a sequence. Raises UserError."""
    names = (source,) if isinstance(source, str) else source
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the source is {source!r}: expected a name such as 'embedding', or several")
    return names


def check_sources(names: Sequence[str], reads: Sequence[int], layout: Sequence[Read]) -> None:
    """Raise a UserError unless each source is among those of at least one of the reads."""
    rows = [[source.name for source in read.sources] for read in layout]
    if not names:
        raise UserError("no source is given: name one, such as 'embedding'")
    for name in names:
        if any(name in rows[index] for index in reads):
            continue
        last = max(reads)
        has = f"'{layout[last].name}' reads {', '.join(rows[last])}"
        order, kinds = depths(layout), tuple(dict.fromkeys(read.kind for read in layout[:-1]))
        written = [output.name for output in outputs(order[-1] + 1, kinds)]
        if name in written:
            number = written.index(name)
            if number > order[last]:
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


class Edit:
    """A change of some reads at some tokens; `Ablate`, `Reweigh`, `Patch` and `Steer` are the kinds.

    Weights p are those of a read, or the coefficients that a residual implies (standard: ones; see `Residual.implied`).
    Those that do not sum to one (`Traits.sums_to_one`) are never renormalised. Where reads are scaled or held
    back by gates, that happens after the edit.
    """

    if TYPE_CHECKING:  # fields of the kinds

        @property
        def reads(self) -> Reads: ...

        @property
        def tokens(self) -> Tokens: ...

    @property
    def positional(self) -> bool:
        """Whether the edit names tokens, so that a forward pass has to hold the whole text."""
        return self.tokens is not None

    def check(self, reads: Sequence[int], layout: Sequence[Read], width: int) -> None:
        """Raise a UserError if the edit cannot be made at the reads of these numbers."""

    def choose(self, reads: Sequence[int], layout: Sequence[Read]) -> Sequence[int]:
        """Return the reads that are edited, of those that `reads` names."""
        return reads

    def reweigh(self, weights: Tensor, names: Sequence[str], sums_to_one: bool) -> Tensor:
        """Return the edited weights (B, T, n) of a read's sources `names`, at all tokens."""
        return weights

    def changes(self, source: str | None) -> bool:
        """Return whether it changes the vector of that source or, for None, the result of the read."""
        return False

    def change(self, vector: Tensor) -> Tensor:
        """Return the vector (B, T, d) that replaces `vector`, one that it changes."""
        return vector


@dataclass(frozen=True, eq=False)
class Ablate(Edit):
    """Remove sources K from reads: p'_i = 0 for i in K, and p'_j = p_j / sum_{k not in K} p_k for the others.

    Without `renormalise`, and for coefficients that do not sum to one, the others stay as they are. A read of which
    nothing is left reads zeros; where all reads of a kind are given (reads="mlp"), those without another source are
    left alone. Reads without these sources stay as they are.

    Args:
        source: "embedding", "mlp 3", "block 2", "partial", ..., or several.
    """

    source: str | Sequence[str]
    reads: Reads = None
    tokens: Tokens = None
    renormalise: bool = True

    def check(self, reads: Sequence[int], layout: Sequence[Read], width: int) -> None:
        check_sources(source_names_of(self.source), reads, layout)

    def choose(self, reads: Sequence[int], layout: Sequence[Read]) -> Sequence[int]:
        of_kind = isinstance(self.reads, str) and self.reads not in [read.name for read in layout]
        return with_choice(source_names_of(self.source), reads, layout) if of_kind else reads

    def reweigh(self, weights: Tensor, names: Sequence[str], sums_to_one: bool) -> Tensor:
        gone = torch.tensor([name in source_names_of(self.source) for name in names], device=weights.device)
        if not gone.any():
            return weights
        kept = weights.masked_fill(gone, 0.0)
        if not (self.renormalise and sums_to_one):
            return kept
        rest = kept.sum(-1, keepdim=True)
        return torch.where(rest > 0, kept / rest.clamp_min(torch.finfo(rest.dtype).tiny), 0.0)


@dataclass(frozen=True, eq=False)
class Reweigh(Edit):
    """Replace the weights of reads: p' = function(p, names), used as they are.

    >>> uniform = Reweigh(lambda p, names: p.mean(-1, keepdim=True))
    >>> pinned = Reweigh(lambda p, names: torch.tensor([0.25, 0.75]), reads="mlp 1")

    Args:
        function: takes weights (B, T, n) and the names of the n sources; returns weights that broadcast to (B, T, n).
    """

    function: Callable[[Tensor, Sequence[str]], Any]
    reads: Reads = None
    tokens: Tokens = None

    def check(self, reads: Sequence[int], layout: Sequence[Read], width: int) -> None:
        if not callable(self.function):
            raise UserError(f"the weights are {self.function!r}: expected a function of weights and names of sources")

    def reweigh(self, weights: Tensor, names: Sequence[str], sums_to_one: bool) -> Tensor:
        new = self.function(weights, names)
        try:
            return torch.as_tensor(new).to(weights).expand_as(weights)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = tuple(getattr(new, "shape", ())) or type(new).__name__
            raise UserError(
                f"new weights are {shape}: expected numbers for {tuple(weights.shape)}, of {', '.join(names)}"
            ) from error


class _Vectors(Edit):
    """An edit of vectors: those of one source or, with source None, the reads' own results."""

    if TYPE_CHECKING:

        @property
        def source(self) -> str | None: ...

        @property
        def vector(self) -> Any: ...

    @property
    def positional(self) -> bool:
        return self.tokens is not None or torch.as_tensor(self.vector).dim() > 1

    def check(self, reads: Sequence[int], layout: Sequence[Read], width: int) -> None:
        if self.source is not None:
            check_sources((self.source,), reads, layout)
        try:
            shape = tuple(torch.as_tensor(self.vector).shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the vector is {type(self.vector).__name__}: expected numbers ({error})") from error
        if not 1 <= len(shape) <= 3 or shape[-1] != width:
            raise UserError(
                f"a vector of shape {shape} in a model of width {width}: expected ({width},), or one a token, "
                f"(T, {width}) or (B, T, {width})"
            )

    def changes(self, source: str | None) -> bool:
        return source == self.source

    def _expanded(self, vector: Tensor) -> Tensor:
        """Return this edit's vector in the shape of `vector` (B, T, d)."""
        vectors = torch.as_tensor(self.vector).to(vector)
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

    def change(self, vector: Tensor) -> Tensor:
        return self._expanded(vector)


@dataclass(frozen=True, eq=False)
class Steer(_Vectors):
    """Add a vector to a source of reads, v'_i = v_i + vector, or without a source to the reads themselves, h' = h +
    vector.

    Args:
        vector: (d,), or one a token, (T, d) or (B, T, d).
    """

    vector: Any
    source: str | None = None
    reads: Reads = None
    tokens: Tokens = None

    def change(self, vector: Tensor) -> Tensor:
        return vector + self._expanded(vector)


def source_names(model: Any) -> list[list[str]]:
    """Return the names of each read's sources.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> source_names(model)[1]
    ['embedding', 'partial']

    Raises:
        UserError: the residual mixes by no weights (DeepNorm).
    """
    return [[source.name for source in read.sources] for read in _mixing(find_residual(model))]


def _mixing(residual: Residual) -> tuple[Read, ...]:
    """Return the layout of a residual that mixes by weights. Raises UserError."""
    layout = residual.layout()
    if not all(read.sources for read in layout):
        raise UserError(f"residual '{residual.name}' mixes its sources by no weights: there is nothing to edit")
    return layout


@contextmanager
def intervene(model: Any, *edits: Edit) -> Generator[None]:
    """Make `edits`, one after the other, in every forward pass inside the block; the model itself stays as it is.

    Recording (`record`) shows the edited weights, gradients flow, and generation works; with a KV cache a pass holds
    the new tokens only, so that edits of some tokens are refused there.

    >>> with intervene(model, Ablate("embedding", reads="output")):  # doctest: +SKIP
    ...     logits = model(input_ids=ids).logits

    With activation checkpointing the backward pass runs the layers again: it must be inside the block, too.

    Raises:
        UserError: an edit of reads, sources or tokens that are not there; a residual that mixes by no weights; a model
            that is being edited already.
    """
    residual = find_residual(model)
    if residual.editor is not None:
        raise UserError("this model is being edited already: give all edits to one `intervene`")
    editor = ActiveEdits(residual, edits)
    model = getattr(model, "__self__", model)  # a method's module
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

    def edit(self, read: int, weights: Tensor) -> Tensor:
        return weights


class ActiveEdits(Watch):
    """Applies the edits of one `intervene` to passes."""

    def __init__(self, residual: Residual, edits: Iterable[Edit]) -> None:
        super().__init__(residual)
        self.layout = _mixing(residual)
        self.sources = [[source.name for source in read.sources] for read in self.layout]
        names = [read.name for read in self.layout]
        self.by_read: dict[int, list[Edit]] = {}
        self.positional, self.cached = False, False
        for edit in edits:
            if not isinstance(edit, Edit):
                raise UserError(f"{edit!r} is no edit: expected Ablate, Reweigh, Patch or Steer")
            reads = choose_reads(edit.reads, names)
            edit.check(reads, self.layout, residual.width)
            self.positional |= edit.positional
            for index in edit.choose(reads, self.layout):
                self.by_read.setdefault(index, []).append(edit)

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

    def edits(self, read: int) -> bool:
        return read in self.by_read

    def edit(self, read: int, weights: Tensor) -> Tensor:
        if read not in self.by_read:
            return weights
        edited = weights.view(*self.shape, -1)
        for edit in self.by_read[read]:
            new = edit.reweigh(edited, self.sources[read], self.residual.traits.sums_to_one)
            edited = self._at_tokens(edit, new, edited)
        return edited.reshape(weights.shape)

    def exchange(self, read: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        names = self.sources[read]
        for edit in self.by_read.get(read, ()):
            if any(map(edit.changes, names)):
                values = [
                    self._at_tokens(edit, edit.change(value), value) if edit.changes(name) else value
                    for name, value in zip(names, values)
                ] + list(values[len(names) :])
        return values

    def steer(self, read: int, h: Tensor) -> Tensor:
        for edit in self.by_read.get(read, ()):
            if edit.changes(None):
                h = self._at_tokens(edit, edit.change(h), h)
        return h

    def _at_tokens(self, edit: Edit, new: Tensor, old: Tensor) -> Tensor:
        """Return `new` (B, T, ...) at the edit's tokens and `old` at the others."""
        mask = token_mask(edit.tokens, self.shape, old.device)
        return new.to(old.dtype) if mask is None else torch.where(mask.unsqueeze(-1), new.to(old.dtype), old)


def source_and_read(text: str) -> tuple[str, str | None]:
    """Split SOURCE or SOURCE@READ into the names of both, None for no read. Raises UserError."""
    source, at, where = text.partition("@")
    if not source.strip() or (at and not where.strip()):
        raise UserError(f"'{text}' names no edge: expected SOURCE or SOURCE@READ, such as embedding@mlp3")
    return _spaced(source), _spaced(where) if at else None


def find_ablation(source: str, where: str | None, model: Any) -> Ablate:
    """Return the ablation of a source at one read; without a read, or with a kind of them, at those with a choice.

    Raises:
        UserError: no such read, or none of them has the source.
    """
    layout = find_residual(model).layout()
    names = [read.name for read in layout]
    reads = choose_reads(where, names)
    if where not in names:  # a read without its only source has no input at all
        reads = with_choice((source,), reads, layout)
    edit = Ablate(source, reads=reads)
    with intervene(model, edit):  # says what is wrong with it
        return edit


def _spaced(name: str) -> str:
    """Return "mlp3", "mlp_3", "MLP 3" and the label "L3 MLP" as "mlp 3"; "attention2key" as "attention 2 key"."""
    name = re.sub(r"^l(\d+)[ _-]*([a-z]+)", r"\2 \1", name.strip().lower()).replace("partial sum", "partial")
    return re.sub(r"^([a-z]+)[ _-]*(\d+)[ _-]*([a-z]*)$", r"\1 \2 \3", name).strip()
