"""Observers and editors of the reads of a forward pass: their protocols, and the calls that a read makes."""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import Norm, apply_norm, compute_dtype

if TYPE_CHECKING:
    from attnres.residuals.base import Residual


NormLike = Norm | Callable[[Tensor], Tensor]
"""The norm after a read: a value if its arithmetic is known (it can then be fused), else a function."""


def with_norm(h: Tensor, norm: NormLike) -> Tensor:
    """Return norm(h)."""
    return apply_norm(h, norm) if isinstance(norm, Norm) else norm(h)


class Observer(Protocol):
    """Observes a forward pass without changing it. A subclass overrides the methods that it needs."""

    def on_start(self, embedding: Tensor) -> None:
        """Called when a forward pass begins, with the token embedding (..., d)."""
        return

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        """Called when read number `read` has computed `h` (..., d), before its norm, from the sources in the layout.

        `weights` are (tokens, sources), or None if the read is no weighted sum. `values` are the sources, (..., d)
        each, or empty if they are the embedding and the separate outputs of sublayers.
        """
        return

    def on_write(self, index: int, output: Tensor) -> None:
        """Called when sublayer `index` has written `output` (..., d)."""
        return


class Editor(Protocol):
    """Changes the reads of a forward pass. Edited reads are computed in plain torch.

    Attributes:
        outputs: the embedding and sublayer outputs of the running pass so far, (..., d) each, collected by `on_start`
            and `on_write`.
    """

    outputs: Sequence[Tensor]

    def on_start(self, embedding: Tensor) -> None:
        """Called when a forward pass begins, with the token embedding (..., d)."""

    def on_write(self, index: int, output: Tensor) -> None:
        """Called when sublayer `index` has written `output` (..., d)."""

    def edits(self, read: int) -> bool:
        """Return whether the editor changes read number `read`; otherwise a kernel may compute it, without calling the
        editor."""
        return True

    def edit(self, read: int, weights: Tensor) -> Tensor:
        """Return weights for read number `read` to use in place of `weights`, both (tokens, sources). Rows need not sum
        to one."""

    def exchange(self, read: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sources (..., d) for read number `read` to mix in place of `values`, which determined its weights;
        return the same sequence to exchange none."""
        return values

    def steer(self, read: int, h: Tensor) -> Tensor:
        """Return the vector that replaces `h` (..., d), the result of read number `read`."""
        return h


@contextmanager
def watched_by(
    residual: "Residual", *, observer: Observer | None = None, editor: Editor | None = None
) -> Generator[None]:
    """Set an observer, an editor or both inside the block, in place of the previous ones. When nobody watches any more,
    the residual drops the data it stored for watchers, which may hold the graph of a pass."""
    watchers = {name: watcher for name, watcher in (("observer", observer), ("editor", editor)) if watcher is not None}
    before = {name: getattr(residual, name) for name in watchers}
    try:
        for name, watcher in watchers.items():
            setattr(residual, name, watcher)
        yield
    finally:
        for name, watcher in before.items():
            setattr(residual, name, watcher)
        if not residual.watched:
            residual.forget()


@contextmanager
def unwatched(residual: "Residual") -> Generator[None]:
    """Hide reads and writes from watchers inside the block, for code that is no pass of the network or was shown
    already."""
    watchers = residual.observer, residual.editor
    residual.observer = residual.editor = None
    try:
        yield
    finally:
        residual.observer, residual.editor = watchers


def showing(verb: str, method: Callable[..., Any]) -> Any:
    """Wrap a mechanism's `start` or `write` so that it tells watchers of the embedding, or the output, before it
    runs."""

    @functools.wraps(method)
    def shown(self: "Residual", *args: Any) -> Any:
        if self.observer is None and self.editor is None:
            return method(self, *args)
        if getattr(type(self), verb) is shown:  # not again in super().start
            for watcher in (self.observer, self.editor):
                if watcher is not None:
                    watcher.on_start(*args) if verb == "start" else watcher.on_write(*args[1:])  # without the state
        return method(self, *args)

    return shown


def looking(residual: "Residual") -> AbstractContextManager[Any]:
    """Disable gradients for values that are only shown, so that a layer that runs again in backward, when nobody
    watches, saves as many tensors. With an editor gradients stay on, because its result is used by the read."""
    return nullcontext() if residual.editor is not None else torch.no_grad()


def watched(
    residual: "Residual", h: Tensor, read: int, weights: Tensor | None, values: Sequence[Tensor] = ()
) -> Tensor:
    """Show a read to the residual's editor and observer; return `h` (..., d) as the editor changes it.

    Args:
        weights: (tokens, sources); None uses `implied`, or one for a single source.
        values: the sources; empty is the embedding and the outputs so far.
    """
    if weights is None:
        with unwatched(residual):  # some mechanisms run their own methods on rows of numbers
            row = residual.implied(read)
        if row is None and len(residual.sources(read)) == 1:
            row = h.new_ones(1)
        if row is not None:
            weights = row.to(h.device, compute_dtype(h.dtype)).expand(h[..., 0].numel(), -1)
    if residual.editor is not None:
        if weights is None:
            raise UserError(f"residual '{residual.name}' has no weights: there is nothing to edit")
        editor = residual.editor
        edited, shown = editor.edit(read, weights), values or editor.outputs
        exchanged = editor.exchange(read, shown)
        if edited is not weights or exchanged is not shown:
            h = _mixed_anew(h, weights, edited, shown, exchanged)
        if exchanged is not shown:
            values = exchanged
        h, weights = editor.steer(read, h), edited.detach()
    if residual.observer is not None:
        residual.observer.on_read(read, h, weights, values)
    return h


def _mixed_anew(
    h: Tensor, weights: Tensor, edited: Tensor, values: Sequence[Tensor], exchanged: Sequence[Tensor]
) -> Tensor:
    """Return `h` (..., d), computed with `weights` (tokens, n) of `values`, as it is with `edited` weights of
    `exchanged` values.

    If a token's weights or sources changed, its sum is computed from the beginning: subtracting values from h would
    leave rounding errors, which the norm after a read that lost (nearly) all sources would enlarge to the size of an
    input. For other tokens h is unchanged.
    """
    dtype = compute_dtype(h.dtype)
    changed = (edited != weights).any(-1, keepdim=True)
    for value, replacement in zip(values, exchanged, strict=True):
        if replacement is not value:
            changed = changed | (replacement != value).any(-1).reshape(-1, 1)
    factors = torch.where(changed, edited, edited - weights).to(dtype).view(*h.shape[:-1], -1)
    mixed = h.to(dtype).masked_fill(changed.view(*h.shape[:-1], 1), 0.0)
    for i, value in enumerate(exchanged):
        mixed = mixed + factors[..., i : i + 1] * value
    return mixed.to(h.dtype)


class Watched(nn.Module):
    """A residual whose reads can be observed and edited. `start` and `write` of its subclasses notify watchers."""

    observer: Observer | None
    editor: Editor | None
    watched_from_start: ClassVar[bool] = False
    """Whether it stores what it shows outside the state, from the start of a pass, so that a pass that begins at a cut
    cannot be watched."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the mechanism's `start` and `write` notify watchers, whoever calls them."""
        super().__init_subclass__(**kwargs)
        for verb in ("start", "write"):
            if verb in vars(cls):
                setattr(cls, verb, showing(verb, vars(cls)[verb]))

    @property
    def watched(self) -> bool:
        """Return whether there is an observer or an editor."""
        return self.observer is not None or self.editor is not None

    def forget(self) -> None:
        """Drop the data stored outside the state for watchers; by default there is none."""

    def normed(
        self, h: Tensor, read: int, norm: NormLike, weights: Tensor | None = None, values: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return norm(h), for mechanisms whose read is not fused with its norm, and show h to watchers first, as read
        number `read`. `weights` and `values` are as in `watched`."""
        if self.watched:
            h = watched(cast("Residual", self), h, read, weights, values)
        return with_norm(h, norm)
