"""Those who see or change what a forward pass reads: the protocols, and what a read does for them."""

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
"""The norm a read ends with: as a value where its arithmetic is known (then it can be fused), else as a function."""


def with_norm(h: Tensor, norm: NormLike) -> Tensor:
    """Return norm(h)."""
    return apply_norm(h, norm) if isinstance(norm, Norm) else norm(h)


class Observer(Protocol):
    """Sees what a forward pass really does, without changing it. A subclass has what it looks at."""

    def on_start(self, embedding: Tensor) -> None:
        """A forward pass begins with the token embedding (..., d)."""
        return

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        """Read number `read` made `h` (..., d) before its norm, from the sources that the layout names for it.

        `weights` are (tokens, sources), None where a read is no weighted sum. `values` are the sources themselves,
        (..., d) each, or empty where they are the embedding and the sublayers' outputs, one by one.
        """
        return

    def on_write(self, index: int, output: Tensor) -> None:
        """Sublayer `index` wrote `output` (..., d)."""
        return


class Editor(Protocol):
    """Changes what a forward pass reads. The reads that it edits are made in plain torch.

    Attributes:
        outputs: the running pass's embedding and sublayer outputs so far, (..., d) each, kept from `on_start` and
            `on_write`.
    """

    outputs: Sequence[Tensor]

    def on_start(self, embedding: Tensor) -> None:
        """A forward pass begins with the token embedding (..., d)."""

    def on_write(self, index: int, output: Tensor) -> None:
        """Sublayer `index` wrote `output` (..., d)."""

    def edits(self, read: int) -> bool:
        """Return whether it changes read number `read`; a kernel may make any other one, and asks nothing more."""
        return True

    def edit(self, read: int, weights: Tensor) -> Tensor:
        """Return the weights that read number `read` uses in place of `weights`, both (tokens, sources). They are used
        as they are: rows need not sum to one."""

    def exchange(self, read: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sources (..., d) that read number `read` mixes in place of `values`, which it gave their weights:
        the same sequence where none is exchanged."""
        return values

    def steer(self, read: int, h: Tensor) -> Tensor:
        """Return what goes on in place of `h` (..., d), which read number `read` made."""
        return h


@contextmanager
def watched_by(
    residual: "Residual", *, observer: Observer | None = None, editor: Editor | None = None
) -> Generator[None]:
    """Let an observer, an editor or both watch inside the block, in place of who did. What the residual kept for those
    who watch, which may hold the graph of a pass, goes with the last of them."""
    given = {name: one for name, one in (("observer", observer), ("editor", editor)) if one is not None}
    before = {name: getattr(residual, name) for name in given}
    try:
        for name, one in given.items():
            setattr(residual, name, one)
        yield
    finally:
        for name, one in before.items():
            setattr(residual, name, one)
        if not residual.watched:
            residual.forget()


@contextmanager
def unwatched(residual: "Residual") -> Generator[None]:
    """Show nothing inside the block: what runs there is no pass of the network, or was shown already."""
    watchers = residual.observer, residual.editor
    residual.observer = residual.editor = None
    try:
        yield
    finally:
        residual.observer, residual.editor = watchers


def showing(verb: str, method: Callable[..., Any]) -> Any:
    """Return a mechanism's `start` or `write` that tells those who watch of the embedding, or the output, before it
    runs."""

    @functools.wraps(method)
    def shown(self: "Residual", *args: Any) -> Any:
        if self.watched and getattr(type(self), verb) is shown:  # not once more for super().start
            for watcher in (self.observer, self.editor):
                if watcher is not None:
                    watcher.on_start(*args) if verb == "start" else watcher.on_write(*args[1:])  # without the state
        return method(self, *args)

    return shown


def looking(residual: "Residual") -> AbstractContextManager[Any]:
    """Make what is only shown without gradients, so that a layer that runs again in backward, when nobody looks, keeps
    as many tensors. What an editor is given goes on into the read."""
    return nullcontext() if residual.editor is not None else torch.no_grad()


def watched(
    residual: "Residual", h: Tensor, read: int, weights: Tensor | None, values: Sequence[Tensor] = ()
) -> Tensor:
    """Show a read to the residual's editor and observer; return what it made, `h` (..., d), as the editor changes it.

    Args:
        weights: (tokens, sources); None are those that the residual implies, or one for a single source.
        values: the sources; none are the embedding and the outputs so far.
    """
    if weights is None:
        with unwatched(residual):  # some pass rows of numbers through their own verbs
            row = residual.implied(read)
        if row is None and len(residual.sources(read)) == 1:
            row = h.new_ones(1)
        if row is not None:
            weights = row.to(h.device, compute_dtype(h.dtype)).expand(h[..., 0].numel(), -1)
    if residual.editor is not None:
        if weights is None:
            raise UserError(f"residual '{residual.name}' mixes its sources by no weights: there is nothing to edit")
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
    """Return `h` (..., d), made with `weights` (tokens, n) of `values`, as `edited` weights make it of what was
    `exchanged` for them.

    Where a token's weights or sources changed the sum is made again: what taking values from h leaves is rounding, and
    the norm after a read that lost everything, or nearly, makes that as large as any input. Elsewhere h stays as it is.
    """
    dtype = compute_dtype(h.dtype)
    changed = (edited != weights).any(-1, keepdim=True)
    for value, other in zip(values, exchanged, strict=True):
        if other is not value:
            changed = changed | (other != value).any(-1).reshape(-1, 1)
    factors = torch.where(changed, edited, edited - weights).to(dtype).view(*h.shape[:-1], -1)
    mixed = h.to(dtype).masked_fill(changed.view(*h.shape[:-1], 1), 0.0)
    for i, value in enumerate(exchanged):
        mixed = mixed + factors[..., i : i + 1] * value
    return mixed.to(h.dtype)


class Watched(nn.Module):
    """A residual whose reads may be seen and edited. Its subclasses' `start` and `write` show what they are given."""

    observer: Observer | None
    editor: Editor | None
    watched_from_start: ClassVar[bool] = False
    """It keeps what it shows beside the state, from the start of a pass: none that begins at a cut can be watched."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the mechanism's `start` and `write` show what they are given, whoever calls them."""
        super().__init_subclass__(**kwargs)
        for verb in ("start", "write"):
            if verb in vars(cls):
                setattr(cls, verb, showing(verb, vars(cls)[verb]))

    @property
    def watched(self) -> bool:
        """Whether someone sees or edits the reads."""
        return self.observer is not None or self.editor is not None

    def forget(self) -> None:
        """Let go of what was kept beside the state for those who watched; unless a mechanism says otherwise, nothing
        was."""

    def normed(
        self, h: Tensor, read: int, norm: NormLike, weights: Tensor | None = None, values: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return norm(h), for mechanisms whose read is not fused with its norm; show it first, as read number `read`,
        to those who watch. `weights` and `values` as in `watched`."""
        if self.watched:
            h = watched(cast("Residual", self), h, read, weights, values)
        return with_norm(h, norm)
