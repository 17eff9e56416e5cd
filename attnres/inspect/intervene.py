"""Editing a running model: what its reads are made of, inside one block of code."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.inspect.edits import Edit
from attnres.inspect.places import choose_reads, token_mask
from attnres.inspect.record import find_residual
from attnres.residuals import Editor, Residual, Source, watched_by


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
