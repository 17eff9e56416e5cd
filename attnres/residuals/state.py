"""What the verbs of a residual take and give, and what of a state crosses a cut between two stages of a pipeline."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from attnres.residuals.layout import Source
from attnres.residuals.watch import unwatched

if TYPE_CHECKING:
    from attnres.residuals.base import Residual

State = Any
"""A residual's state: an immutable (nested) tuple of tensors, their number a function of depth alone."""


def as_it_is(h: Tensor) -> Tensor:
    """The norm of a read that has none."""
    return h


class Ways(NamedTuple):
    """The inputs of an attention's projections, (..., d) each: what `Residual.read` gives in place of one input."""

    query: Tensor
    key: Tensor
    value: Tensor


class Slot(NamedTuple):
    """One tensor of a state at a cut, (tokens.., *axes, d).

    Attributes:
        name: the same at every cut that it crosses.
        kept: it never changes again, so that a pipeline rank may hold it for its later stages.
        axes: sizes between the tokens' axes and the width.
    """

    name: str
    kept: bool
    axes: tuple[int, ...] = ()


def slots_of(sources: Sequence[Source], index: int) -> tuple[Slot, ...]:
    """Return the slots of a state before sublayer `index` that holds these sources; finished ones are kept."""
    return tuple(Slot(f"{one.name} {index}" if one.open else one.name, not one.open) for one in sources)


class Cut(nn.Module):
    """The state of a residual as a list of tensors, which a pipeline's stage hands to the next. A mechanism whose state
    has other tensors than (tokens.., *axes, d) overrides `slots`, `pack` and `unpack`."""

    name: ClassVar[str]
    width: int

    def slots(self, index: int) -> tuple[Slot, ...]:
        """Return what the state before sublayer `index` (L: before the output's read) consists of, a function of depth
        alone: the tensors of `pack`, in order."""
        leaves, _ = self._tree(index)
        return tuple(Slot(f"state {index}.{place}", False, axes) for place, axes in enumerate(leaves))

    def pack(self, state: State, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of the state before sublayer `index`, with nothing pending: what a cut there carries."""
        return tuple(_pytree.tree_leaves(state))

    def unpack(self, tensors: Sequence[Tensor], index: int) -> State:
        """Return the state again that `pack` took apart."""
        return _pytree.tree_unflatten(list(tensors), self._tree(index)[1])

    @torch.no_grad()
    def _tree(self, index: int) -> tuple[list[tuple[int, ...]], _pytree.TreeSpec]:
        """Return the axes of each tensor of the state before sublayer `index`, and the state's form, from a pass of one
        token of zeros."""
        residual = cast("Residual", self)
        parameter = next(self.parameters(), None)
        zeros = torch.zeros(1, self.width) if parameter is None else parameter.new_zeros(1, self.width)
        with unwatched(residual):
            state = residual.start(zeros)
            for sublayer in range(index):
                _, state = residual.read(state, sublayer, as_it_is)
                state = residual.write(state, sublayer, zeros)
        leaves, form = _pytree.tree_flatten(state)
        if any(leaf.shape[0] != 1 or leaf.shape[-1] != self.width for leaf in leaves):
            raise TypeError(
                f"the state of residual '{self.name}' has tensors that are not (tokens, ..., {self.width}): it needs "
                "slots, pack and unpack of its own, which say what crosses a cut"
            )
        return [tuple(leaf.shape[1:-1]) for leaf in leaves], form
