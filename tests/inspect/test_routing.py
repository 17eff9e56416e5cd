"""A table of weights by source: names never shift."""

import numpy as np
import pytest
from synthetic import routing

from attnres.inspect.inspection import Routing
from attnres.residuals import layout_of, make_residual


@pytest.mark.parametrize("residual", ["block", "full"])
def test_a_column_holds_one_source_in_every_row(residual):
    raw = routing(residual, layers=6)
    assert raw is not None
    table = Routing(layout_of(raw), raw["weights"])
    across = table.columns()
    matrix = table.matrix(range(len(table.layout)), across)
    for r, (names, weights) in enumerate(zip(raw["sources"], raw["weights"], strict=True)):
        placed = {across[c].name: matrix[r, c] for c in np.flatnonzero(~np.isnan(matrix[r]))}
        assert placed == dict(zip(names, weights, strict=True))


def test_columns_follow_the_order_within_rows():
    raw = routing("block", layers=4)
    assert raw is not None
    table = Routing(layout_of(raw), raw["weights"])
    assert [source.name for source in table.columns()] == ["embedding", "block 1", "partial"]
    assert [source.name for source in table.columns([0])] == ["embedding"]


def test_composite_sources_are_blocks_and_snapshots_and_no_single_outputs():
    def composites(name, **settings):
        layout = make_residual(name, 8, 8, **settings).layout()
        return [Routing(layout, []).composites(row) for row in range(len(layout))]

    assert composites("block", block_size=4) == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert composites("cumulative", block_size=4) == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    assert not any(composites("full"))


def test_a_source_is_weighed_where_there_is_another():
    layout = make_residual("block", 8, 8, block_size=4).layout()
    table = Routing(layout, [])
    assert not table.weighs(0, "embedding") and table.weighs(1, "embedding") and not table.weighs(1, "block 1")
    assert table.place(5, "block 1") == 1
