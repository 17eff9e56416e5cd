"""The state of a residual, the inputs of sublayers, and the tensors that cross a cut between pipeline stages."""

from collections import Counter
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
    """Return `h` unchanged: the norm of a read without one."""
    return h


class Ways(NamedTuple):
    """The inputs of an attention's projections, (..., d) each, which `Residual.read` may return in place of one
    input."""

    query: Tensor
    key: Tensor
    value: Tensor


class Slot(NamedTuple):
    """One tensor of a state at a cut, (tokens.., *axes, d).

    Attributes:
        name: the same at every cut that it crosses.
        kept: whether it never changes again, so that a pipeline rank may hold it for its later stages.
        axes: sizes between the tokens' axes and the width.
    """

    name: str
    kept: bool
    axes: tuple[int, ...] = ()


def slots_of(sources: Sequence[Source], index: int) -> tuple[Slot, ...]:
    """Return the slots of a state before sublayer `index` with these sources; finished ones are `kept`."""
    return tuple(Slot(f"{one.name} {index}" if one.open else one.name, not one.open) for one in sources)


class Crossing(NamedTuple):
    """The state before a sublayer as the tensors that cross a cut there.

    Attributes:
        form: tree of the state. places: index of each of its leaves among the tensors; a tensor that is in it twice is
            sent once.
        slots: the slot of each tensor.
    """

    form: _pytree.TreeSpec
    places: tuple[int, ...]
    slots: tuple[Slot, ...]


class Cut(nn.Module):
    """The state of a residual as a list of tensors that a pipeline stage passes to the next. A mechanism whose state
    has tensors of other shapes than (tokens.., *axes, d) overrides `slots`, `pack` and `unpack`."""

    name: ClassVar[str]
    num_sublayers: int
    width: int
    crossings: tuple[Crossing, ...] | None = None
    """The crossings before each sublayer, and before the output's read; computed at first use."""

    def slots(self, index: int) -> tuple[Slot, ...]:
        """Return the slots of the tensors that `pack` returns before sublayer `index` (L: before the output's read),
        which depend on depth alone."""
        return self._crossing_at(index).slots

    def pack(self, state: State, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of the state before sublayer `index`, without pending writes: those that cross a cut
        there."""
        return tuple(dict(zip(self._crossing_at(index).places, _pytree.tree_leaves(state), strict=True)).values())

    def unpack(self, tensors: Sequence[Tensor], index: int) -> State:
        """Return the state from the tensors of `pack`."""
        form, places, _ = self._crossing_at(index)
        return _pytree.tree_unflatten([tensors[place] for place in places], form)

    def _crossing_at(self, index: int) -> Crossing:
        if self.crossings is None:
            self.crossings = self._made_crossings()
        return self.crossings[index]

    @torch.no_grad()
    def _made_crossings(self) -> tuple[Crossing, ...]:
        """Compute the crossings with a pass of one token of zeros: a tensor that is in the state before several
        sublayers is `kept`."""
        residual = cast("Residual", self)
        parameter = next(self.parameters(), None)
        zeros = torch.zeros(1, self.width) if parameter is None else parameter.new_zeros(1, self.width)
        with unwatched(residual):
            states = [residual.start(zeros)]
            for sublayer in range(self.num_sublayers):
                _, state = residual.read(states[-1], sublayer, as_it_is)
                states.append(residual.write(state, sublayer, zeros.clone()))
        flat = [_pytree.tree_flatten(state) for state in states]
        if any(leaf.shape[0] != 1 or leaf.shape[-1] != self.width for leaves, _ in flat for leaf in leaves):
            raise TypeError(
                f"the state of residual '{self.name}' has tensors that are not (tokens, ..., {self.width}): it needs "
                "slots, pack and unpack of its own, which say what crosses a cut"
            )
        several = Counter(key for leaves, _ in flat for key in {id(leaf) for leaf in leaves})
        names: dict[int, str] = {}
        crossings = []
        for index, (leaves, form) in enumerate(flat):
            distinct = {id(leaf): leaf for leaf in leaves}
            for place, key in enumerate(distinct):
                names.setdefault(key, f"state {index}.{place}")
            slots = [Slot(names[key], several[key] > 1, tuple(leaf.shape[1:-1])) for key, leaf in distinct.items()]
            crossings.append(Crossing(form, tuple([*distinct].index(id(leaf)) for leaf in leaves), tuple(slots)))
        return tuple(crossings)
