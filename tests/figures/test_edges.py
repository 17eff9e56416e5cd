"""Edges that were measured, as pictures: cells where their names say, and a graph that leads to the output."""

import numpy as np
import pytest

from attnres.figures import NotShown, style
from attnres.figures.edges import edge_map, graph, leading
from attnres.inspect.attribution import Attribution, agreement
from attnres.inspect.inspection import Routing
from attnres.residuals import make_residual


def attribution(residual="block", size=0.5, **settings):
    """Changes that grow with the number of the edge, below and above zero in turn."""
    layout = make_residual(residual, 8, 16, **settings).layout()
    count = iter(range(1000))
    rows = [[size * (-1) ** (i := next(count)) * (1 + i) / 50 for _ in read.sources] for read in layout]
    flat = np.array([value for row in rows for value in row])
    return Attribution(3, 1, -1.0, True, layout, rows, rows, agreement(flat, flat))


@pytest.mark.parametrize(("residual", "settings"), [("block", {"block_size": 3}), ("full", {}), ("muddformer", {})])
def test_an_edge_of_the_graph_leads_to_the_output(residual, settings):
    measured = attribution(residual, **settings)
    edges = leading(measured)
    last = len(measured.layout) - 1
    drawn = {index for index, _, _ in edges}
    assert last in drawn
    for index in drawn - {last}:
        place = [read.sublayer for read in measured.layout].index(measured.layout[index].sublayer)
        own = list(dict.fromkeys(read.sublayer for read in measured.layout)).index(measured.layout[place].sublayer) + 1
        assert any(own in (source.span or ()) for reader, source, _ in edges if reader > index)
    for index, source, value in edges:
        names = measured.sources[index]
        assert value == measured.knockout[index][names.index(source.name)]
    with style.style():
        plot = graph(measured, "title")
        plot.figure.draw_without_rendering()
    names = {text.get_text() for text in plot.figure.axes[0].texts}
    assert "output" in names and f"The {len(edges)} edges" in plot.caption


def test_cells_are_the_measured_changes():
    measured = attribution(block_size=3)
    with style.style():
        figure = edge_map(measured, "title").figure
    (cells,) = figure.axes[0].collections
    across = Routing(measured.layout, measured.knockout).columns()
    expected = [
        dict(zip(names, row))[source.name]
        for names, row in zip(measured.sources, measured.knockout)
        for source in across
        if source.name in names
    ]
    assert cells.get_array().tolist() == pytest.approx(expected)
    assert cells.norm.vmax == -cells.norm.vmin == max(map(abs, expected))


def test_what_changes_nothing_is_not_drawn_as_if_it_did():
    measured = attribution(size=1e-4, block_size=3)
    with style.style():
        assert edge_map(measured, "title").figure.axes[0].collections[0].norm.vmax == 0.02
        with pytest.raises(NotShown, match=r"by more than 0\.02 nats"):
            graph(measured, "title")
