"""A table of weights by source: names never shift."""

import numpy as np
import pytest
from synthetic import routing

from attnres.inspect.routing import Routing


@pytest.mark.parametrize("residual", ["block", "full"])
def test_a_column_holds_one_source_in_every_row(residual):
    raw = routing(residual, layers=6)
    assert raw is not None
    table = Routing(**raw)
    columns, matrix = table.columns(), table.matrix()
    for r, (names, weights) in enumerate(zip(raw["sources"], raw["weights"], strict=True)):
        placed = {columns[c]: matrix[r, c] for c in np.flatnonzero(~np.isnan(matrix[r]))}
        assert placed == dict(zip(names, weights, strict=True))


def test_columns_follow_the_order_within_rows():
    raw = routing("block", layers=4)
    assert raw is not None
    assert Routing(**raw).columns() == ["embedding", "block 1", "partial"]
    contradictory = Routing(["a", "b"], [["x", "y"], ["y", "x"]], [[0.5, 0.5], [0.5, 0.5]])
    assert contradictory.columns() == ["x", "y"]
