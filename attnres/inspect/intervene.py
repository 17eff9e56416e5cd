"""Editing a running model: where its reads come from, inside one block of code."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.inspect.edits import Edit, choose_reads, token_mask
from attnres.inspect.record import find_residual, read_names
from attnres.residuals import Residual


def source_names(model: nn.Module) -> list[list[str]]:
    """The names of what each of the L+1 reads mixes, found by a pass of one token through the residual alone.

    Raises:
        UserError: the residual mixes by no weights (DeepNorm).
    """
    residual = find_residual(model)
    watch, before = _Names(residual), (residual.observer, residual.editor)
    residual.observer, residual.editor = None, watch
    parameter = next(residual.parameters(), None)
    try:
        with torch.no_grad():
            vector = torch.zeros(1, 1, residual.width, device=None if parameter is None else parameter.device)
            watch.on_start(vector)
            state = residual.start(vector)
            for index in range(residual.num_sublayers):
                _, state = residual.read(state, index, _as_it_is)
                watch.on_write(index, vector)
                state = residual.write(state, index, vector)
            residual.finish(state, _as_it_is)
    finally:
        residual.observer, residual.editor = before
    return watch.rows


@contextmanager
def intervene(model: nn.Module, *edits: Edit) -> Generator[None]:
    """Make `edits`, one after the other, in every forward pass inside the block; the model itself stays as it is.

    Recording (`record`) shows the edited weights, gradients flow, and generation works; with a KV cache a pass holds
    the new tokens only, so that edits of some tokens are refused there.

    >>> with intervene(model, KnockOut("embedding", reads="output")):  # doctest: +SKIP
    ...     logits = model(input_ids=ids).logits

    Raises:
        UserError: an edit of reads, sources or tokens that are not there; a residual that mixes by no weights; a model
            that is being edited already.
    """
    residual = find_residual(model)
    if residual.editor is not None:
        raise UserError("this model is being edited already: give all edits to one `intervene`")
    editor = _Edits(residual, edits, source_names(model))
    hook = model.register_forward_pre_hook(editor.see_cache, with_kwargs=True)
    residual.editor = editor
    try:
        yield
    finally:
        residual.editor = None
        hook.remove()


class Watch:
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

    def edit(self, index: int, weights: Tensor, sources: Sequence[str]) -> Tensor:
        return weights


class _Names(Watch):
    def __init__(self, residual: Residual) -> None:
        super().__init__(residual)
        self.rows: list[list[str]] = []

    def edit(self, index: int, weights: Tensor, sources: Sequence[str]) -> Tensor:
        self.rows.append(list(sources))
        return weights


class _Edits(Watch):
    """The edits of one `intervene`."""

    def __init__(self, residual: Residual, edits: Iterable[Edit], rows: Sequence[Sequence[str]]) -> None:
        super().__init__(residual)
        self.by_read: dict[int, list[tuple[Edit, int]]] = {}
        self.positional, self.cached = False, False
        for edit in edits:
            if not isinstance(edit, Edit):
                raise UserError(f"{edit!r} is no edit: expected KnockOut, Uniform, Recency, Pin, Swap or AddLogit")
            chosen = choose_reads(edit.of_reads, read_names(residual.num_sublayers))
            edit.check(chosen, rows, residual)
            self.positional |= edit.positional
            for place, index in enumerate(chosen):
                self.by_read.setdefault(index, []).append((edit, place))

    def see_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        self.cached = cache is not None and int(cache.get_seq_length()) > 0

    def on_start(self, embedding: Tensor) -> None:
        super().on_start(embedding)
        if self.cached and self.positional:
            raise UserError(
                "an edit of some tokens in a pass that continues from a KV cache and so holds new tokens only: pass "
                "use_cache=False, or edit all tokens"
            )

    def edit(self, index: int, weights: Tensor, sources: Sequence[str]) -> Tensor:
        if index not in self.by_read:
            return weights
        edited = weights.view(*self.shape, -1)
        for edit, place in self.by_read[index]:
            new = edit.rewrite(edited, sources, place, self.residual.weighs)
            mask = token_mask(edit.of_tokens, self.shape, weights.device)
            edited = new if mask is None else torch.where(mask.unsqueeze(-1), new, edited)
        return edited.reshape(weights.shape)


def _as_it_is(h: Tensor) -> Tensor:
    return h
