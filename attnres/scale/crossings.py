"""What crosses from stage to stage of a pipeline, and what a rank keeps: pure functions of a cut, without a process.

A stage takes in the state of the stream before its first sublayer. Of this state a rank keeps every slot that never
changes again, whether it was received or made there, and the stage before sends only what the rank does not have.
The runtime (`attnres.scale.stage`) and the planner (`attnres.scale.plan`) read the same table.

In vectors of width d a token, P ranks with V stages each, N_p blocks a stage, C = P V, the embedding apart:

    everything sent      C (C-1)/2 N_p
    a rank keeps         P (P-1)/2 N_p + (V-1) P (P-1) N_p
    what it received     P (P-1)/2 N_p + (V-1) P^2 N_p        (the paper's count, arXiv 2603.15031: a rank's own blocks
                                                               come back to it)

The embedding is one source more: C-1, P-1 and (with V > 1) P vectors.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from attnres.residuals import Residual
from attnres.residuals.base import Slot


class Cut(NamedTuple):
    """Where a network is cut into stages, and which rank of the pipeline has which stage.

    Attributes:
        bounds: stage s makes sublayers bounds[s] to bounds[s+1] - 1; the last bound is L.
        ranks: the rank of each stage.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.ranks)

    def last_of(self, rank: int) -> int:
        """Return the last stage of a rank."""
        return max(stage for stage, other in enumerate(self.ranks) if other == rank)


class Crossing(NamedTuple):
    """The way from one stage to the next.

    Attributes:
        slots: the state there, all of it.
        sent: places in it that travel; the others the receiving rank holds.
        local: both stages are of one rank, so that nothing goes over a link.
    """

    slots: tuple[Slot, ...]
    sent: tuple[int, ...]
    local: bool

    @property
    def held(self) -> tuple[int, ...]:
        """Places of the slots that the receiving rank has kept."""
        return tuple(place for place in range(len(self.slots)) if place not in self.sent)

    @property
    def vectors(self) -> int:
        """Vectors a token that go over a link, forward; as many gradients come back."""
        return 0 if self.local else sum(math.prod(self.slots[place].axes) for place in self.sent)


def crossings(residual: Residual, cut: Cut, *, cached: bool = True, keep_made: bool = True) -> tuple[Crossing, ...]:
    """Return the crossings between the stages of a cut, in order.

    Args:
        cached: whether ranks keep slots at all.
        keep_made: whether a rank keeps what it made, beside what it received.
    """
    has: dict[int, set[str]] = {rank: set() for rank in cut.ranks}
    table = []
    for stage in range(cut.stages - 1):
        sender, receiver = cut.ranks[stage], cut.ranks[stage + 1]
        slots = residual.slots(cut.bounds[stage + 1])
        kept = {slot.name for slot in slots if slot.kept} if cached else set()
        if keep_made:
            has[sender] |= kept
        # Neighbours on one rank hand everything over: it costs nothing.
        there = set() if sender == receiver else has[receiver]
        sent = tuple(place for place, slot in enumerate(slots) if slot.name not in there)
        table.append(Crossing(slots, sent, sender == receiver))
        has[receiver] |= kept
    return tuple(table)


def vectors(table: Sequence[Crossing]) -> int:
    """Return how many vectors a token go over links in one forward pass."""
    return sum(crossing.vectors for crossing in table)


def most_kept(table: Sequence[Crossing], cut: Cut) -> dict[int, int]:
    """Return how many vectors a token each rank keeps at most for one microbatch, for its later stages."""
    most = dict.fromkeys(cut.ranks, 0)
    for rank in most:
        names: dict[str, int] = {}
        for stage in range(cut.last_of(rank)):
            if cut.ranks[stage] == rank or cut.ranks[stage + 1] == rank:
                names |= {slot.name: math.prod(slot.axes) for slot in table[stage].slots if slot.kept}
        if sum(other == rank for other in cut.ranks) > 1:
            most[rank] = sum(names.values())
    return most
