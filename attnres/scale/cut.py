"""Cut a network into pipeline stages, and count the vectors that cross from one stage to the next.

A stage receives the residual's state before its first sublayer. A rank stores every slot of this state that never
changes again, whether it received or computed it, and the stage before sends only what the rank does not have. The
runtime (`attnres.scale.stage`) and the planner (`attnres.scale.plan`) read the same table.

In vectors of width d a token, P ranks with V stages each, N_p blocks a stage, C = P V, the embedding apart:

    everything sent      C (C-1)/2 N_p
    a rank keeps         P (P-1)/2 N_p + (V-1) P (P-1) N_p
    what it received     P (P-1)/2 N_p + (V-1) P^2 N_p        (the paper's count, arXiv 2603.15031: a rank's own blocks
                                                               come back to it)

The embedding is one source more: C-1, P-1 and (with V > 1) P vectors.
"""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnres.device import now
from attnres.errors import UserError
from attnres.models import DepthMixin
from attnres.residuals import Residual
from attnres.residuals.state import Slot


class PipelineCut(NamedTuple):
    """Where a network is cut into stages, and which rank of the pipeline has which stage.

    Attributes:
        bounds: stage s has sublayers bounds[s] to bounds[s+1] - 1; the last bound is L.
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
    """What crosses from one stage to the next.

    Attributes:
        slots: the slots of the state there.
        sent: places of the slots that are sent; the receiving rank holds the others.
        local: whether both stages are on one rank, so that nothing goes over a link.
    """

    slots: tuple[Slot, ...]
    sent: tuple[int, ...]
    local: bool

    @property
    def held(self) -> tuple[int, ...]:
        """Return the places of the slots that the receiving rank holds."""
        return tuple(place for place in range(len(self.slots)) if place not in self.sent)

    @property
    def vectors(self) -> int:
        """Return the number of vectors a token that go over a link, forward; as many gradients come back."""
        return 0 if self.local else sum(math.prod(self.slots[place].axes) for place in self.sent)


def crossings(
    residual: Residual, cut: PipelineCut, *, cached: bool = True, keep_made: bool = True
) -> tuple[Crossing, ...]:
    """Return the crossings between the stages of a cut, in order.

    Args:
        cached: whether ranks keep slots.
        keep_made: whether a rank keeps the slots that it computed, in addition to those that it received.
    """
    has: dict[int, set[str]] = {rank: set() for rank in cut.ranks}
    table = []
    for stage in range(cut.stages - 1):
        sender, receiver = cut.ranks[stage], cut.ranks[stage + 1]
        slots = residual.slots(cut.bounds[stage + 1])
        kept = {slot.name for slot in slots if slot.kept} if cached else set()
        if keep_made:
            has[sender] |= kept
        # Between two stages of one rank everything is passed on, which costs nothing.
        held_there = set() if sender == receiver else has[receiver]
        sent = tuple(place for place, slot in enumerate(slots) if slot.name not in held_there)
        table.append(Crossing(slots, sent, sender == receiver))
        has[receiver] |= kept
    return tuple(table)


def vectors(table: Sequence[Crossing]) -> int:
    """Return the number of vectors a token that go over links in a forward pass."""
    return sum(crossing.vectors for crossing in table)


def most_kept(table: Sequence[Crossing], cut: PipelineCut) -> dict[int, int]:
    """Return the largest number of vectors a token that each rank keeps for a microbatch, for its later stages."""
    most = dict.fromkeys(cut.ranks, 0)
    for rank in most:
        names: dict[str, int] = {}
        for stage in range(cut.last_of(rank)):
            if cut.ranks[stage] == rank or cut.ranks[stage + 1] == rank:
                names |= {slot.name: math.prod(slot.axes) for slot in table[stage].slots if slot.kept}
        if sum(other == rank for other in cut.ranks) > 1:
            most[rank] = sum(names.values())
    return most


def placed(stages: int, ranks: int, *, v_shaped: bool = False) -> tuple[int, ...]:
    """Return the rank of each stage: in rounds, or as a V, there and back.

    >>> placed(4, 2), placed(4, 2, v_shaped=True)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    turns = (divmod(stage, ranks) for stage in range(stages))
    return tuple(ranks - 1 - place if v_shaped and turn % 2 else place for turn, place in turns)


def balanced(costs: Sequence[float], stages: int, *, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one, such that the dearest stage costs the least.

    Args:
        costs: of each layer. last: the cost of what only the last stage has (the head).

    >>> balanced([1.0] * 8, 4, last=2.0)
    (2, 2, 3, 1)

    Raises:
        UserError: more stages than layers.
    """
    layers = len(costs)
    if stages > layers:
        raise UserError(
            f"{stages} stages were given and the model has {layers} layers: use fewer ranks (pp) or fewer stages a "
            "rank (virtual), or name the layers of each stage (layers), which may be 0 for the first and the last"
        )
    upto = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return upto[stop] - upto[start] + last * (stage == stages - 1)

    # best[stop]: (dearest stage, sum of squares, bounds) of the stages so far over layers [0, stop)
    best = {0: (0.0, 0.0, (0,))}
    for stage in range(stages):
        after = {}
        for stop in range(stage + 1, layers - (stages - 1 - stage) + 1):
            options = []
            for start, (dearest, squares, bounds) in best.items():
                if start < stop:
                    share = cost(stage, start, stop)
                    options.append((max(dearest, share), squares + share**2, (*bounds, stop)))
            after[stop] = min(options)
        best = after
    bounds = best[layers][2]
    return tuple(stop - start for start, stop in pairwise(bounds))


def cut_of(layers: Sequence[int], ranks: Sequence[int], *, sublayers: int = 2) -> PipelineCut:
    """Return the cut with these numbers of layers in its stages. A layer has `sublayers` sublayers.

    Raises:
        UserError: an inner stage without a layer.
    """
    if len(layers) != len(ranks) or any(count < 0 for count in layers) or 0 in layers[1:-1]:
        raise UserError(
            f"the layers of the stages are {list(layers)}: give {len(ranks)} numbers, one a stage; only the first (the "
            "embedding alone) and the last (the head alone) may be 0"
        )
    return PipelineCut(tuple(sublayers * bound for bound in accumulate(layers, initial=0)), tuple(ranks))


def layers_of(cut: PipelineCut, sublayers: int) -> list[range]:
    """Return the layers of each stage, for layers of `sublayers` sublayers.

    >>> layers_of(cut_of([2, 1], [0, 1]), 2)
    [range(0, 2), range(2, 3)]
    """
    return [range(start // sublayers, stop // sublayers) for start, stop in pairwise(cut.bounds)]


# ------------------------------------------------------------------ measured times of layers


ROUNDS = 7
"""Number of timed forward passes, after a warm-up."""


def layer_times(model: DepthMixin, *, batch: int, tokens: int, rounds: int = ROUNDS) -> tuple[list[float], float]:
    """Measure the median seconds of each layer's forward pass with its reads, and of the head with the loss.

    A backward pass takes about twice as long as its forward in every part, so the proportions are those of a step.

    Args:
        model: on the device to measure; it is not changed.
        batch, tokens: sequences of a micro-batch, tokens of a sequence, which are drawn at random.
    """
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    device = next(model.parameters()).device
    words = table.weight.shape[0]
    ids = torch.randint(words, (batch, tokens + 1), device=device)
    parts = [*model.depth_layers, *([] if head is None else [head])]
    clock, hooks = [0.0] * len(parts), list[Any]()  # seconds of each part in the last pass

    def begin(index: int, *_: Any) -> None:
        clock[index] = -now(device)

    def end(index: int, *_: Any) -> None:
        clock[index] += now(device)

    for index, part in enumerate(parts):
        hooks.append(part.register_forward_pre_hook(partial(begin, index)))
        hooks.append(part.register_forward_hook(partial(end, index)))
    passes = []
    try:
        for _ in range(rounds + 1):
            logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False)[0]
            seconds = list(clock) if head is not None else [*clock, 0.0]
            if head is not None:
                began = now(device)
                cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                seconds[-1] += now(device) - began
            passes.append(seconds)
    finally:
        for hook in hooks:
            hook.remove()
    *layers, last = (statistics.median(each) for each in zip(*passes[1:], strict=True))
    return layers, last
