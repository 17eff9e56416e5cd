"""What crosses from stage to stage is what the formulas say, and layers are shared out evenly."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres import UserError
from attnres.residuals import make_residual
from attnres.scale.cut import PipelineCut, balanced, crossings, cut_of, most_kept, placed, vectors
from attnres.scale.pipeline import check_schedule


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 3])
def test_vectors_are_those_of_the_closed_forms(ranks: int, virtual: int, blocks: int):
    stages = ranks * virtual
    residual = make_residual("block", 2 * blocks * stages, 8, block_size=2)
    bounds = tuple(2 * blocks * stage for stage in range(stages + 1))
    cut = PipelineCut(bounds, placed(stages, ranks))

    def count(cut: PipelineCut = cut, **how: bool) -> int:
        return vectors(crossings(residual, cut, **how))

    # The embedding is one source more: sent on at every crossing, to every rank once, and back to the first rank.
    pairs = ranks * (ranks - 1)
    assert count(cached=False) == stages * (stages - 1) // 2 * blocks + stages - 1
    assert count() == pairs // 2 * blocks + (virtual - 1) * pairs * blocks + ranks - 1
    paper = pairs // 2 * blocks + (virtual - 1) * ranks**2 * blocks
    assert count(keep_made=False) == paper + ranks - 1 + (virtual > 1)
    if virtual == 2:
        assert count(PipelineCut(bounds, placed(stages, ranks, v_shaped=True))) == count()


def test_what_a_rank_keeps_is_counted_at_most():
    residual = make_residual("block", 16, 8, block_size=2)
    cut = cut_of([2, 2, 2, 2], placed(4, 2))
    assert most_kept(crossings(residual, cut), cut) == {0: 5, 1: 7}  # up to the input of its last stage but one's heir
    single = cut_of([4, 4], placed(2, 2))
    assert most_kept(crossings(residual, single), single) == {0: 0, 1: 0}


@given(st.lists(st.floats(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.floats(0, 9))
def test_the_dearest_stage_is_as_cheap_as_any_cut_can_make_it(costs, stages, last):
    if stages > len(costs):
        with pytest.raises(UserError, match="stages were given"):
            balanced(costs, stages, last=last)
        return

    def dearest(counts: tuple[int, ...]) -> float:
        ends = [sum(counts[: stage + 1]) for stage in range(stages)]
        shares = [sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        shares[-1] += last
        return max(shares)

    def every(layers: int, stages: int):
        if stages == 1:
            yield (layers,)
            return
        for count in range(1, layers - stages + 2):
            yield from ((count, *rest) for rest in every(layers - count, stages - 1))

    best = min(map(dearest, every(len(costs), stages)))
    assert math.isclose(dearest(balanced(costs, stages, last=last)), best)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: cut_of([2, 0, 2], (0, 1, 0)), "only the first .* and the last .* may be 0"),
        (lambda: check_schedule("1f1b", 4, 1, 2), "2 microbatches .* too few .* give at least 4"),
        (lambda: check_schedule("interleaved", 2, 2, 7), "do not divide into 3 rounds .* a multiple of 2"),
        (lambda: check_schedule("gpipe", 2, 2, 4), "one stage a rank: choose interleaved"),
        (lambda: check_schedule("zbv", 2, 3, 4), "two stages a rank"),
        (lambda: check_schedule("zbw", 2, 2, 4), "did you mean 'zbv'"),
    ],
)
def test_cuts_and_schedules_that_cannot_be_are_refused(act, said):
    with pytest.raises(UserError, match=said):
        act()
