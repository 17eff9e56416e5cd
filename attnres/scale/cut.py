"""Where a network is cut: layers shared out among stages by their cost, stages among ranks."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from attnres.errors import UserError
from attnres.scale.crossings import Cut


def placed(stages: int, ranks: int, *, v_shaped: bool = False) -> tuple[int, ...]:
    """Return the rank of each stage: round and round, or there and back again.

    >>> placed(4, 2), placed(4, 2, v_shaped=True)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    turns = (divmod(stage, ranks) for stage in range(stages))
    return tuple(ranks - 1 - place if v_shaped and turn % 2 else place for turn, place in turns)


def balanced(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return how many layers each stage gets so that the dearest stage costs the least, every stage one at least.

    Args:
        costs: of each layer.
        first, last: what the first stage has besides (the embedding) and the last (the head).

    >>> balanced([1.0] * 8, 4, last=2.0)
    (2, 2, 3, 1)

    Raises:
        UserError: more stages than layers.
    """
    layers = len(costs)
    if stages > layers:
        raise UserError(
            f"{stages} stages were asked for and the model has {layers} layers: use fewer ranks (pp) or fewer stages a "
            "rank (virtual), or name the layers of each stage (layers), which may be 0 for the first and the last"
        )
    upto = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return upto[stop] - upto[start] + first * (stage == 0) + last * (stage == stages - 1)

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


def cut_of(layers: Sequence[int], ranks: Sequence[int], *, sublayers: int = 2) -> Cut:
    """Return the cut with these numbers of layers a stage; `sublayers` are those of a layer.

    Raises:
        UserError: an inner stage without a layer.
    """
    if len(layers) != len(ranks) or any(count < 0 for count in layers) or 0 in layers[1:-1]:
        raise UserError(
            f"the layers of the stages are {list(layers)}: give {len(ranks)} numbers, one a stage; only the first (the "
            "embedding alone) and the last (the head alone) may be 0"
        )
    return Cut(tuple(sublayers * bound for bound in accumulate(layers, initial=0)), tuple(ranks))


def layers_of(cut: Cut, sublayers: int) -> list[range]:
    """Return the layers of each stage, where a layer has so many sublayers.

    >>> layers_of(cut_of([2, 1], [0, 1]), 2)
    [range(0, 2), range(2, 3)]
    """
    return [range(start // sublayers, stop // sublayers) for start, stop in pairwise(cut.bounds)]
