"""Draw measured effects of single edges (source -> read): all as a heatmap, and the largest as a graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from attnres.figures import style
from attnres.figures.cells import SIGNED_MAP, cells, named, rooted, scale
from attnres.figures.plot import NotShown, Plot, canvas, plain
from attnres.figures.style import sheet
from attnres.inspect.colours import LESS, MORE, source_colours
from attnres.inspect.inspection import Routing
from attnres.inspect.notebook import FLOOR, end_of_scale
from attnres.residuals import Read, Source, depths, outputs

if TYPE_CHECKING:
    from attnres.inspect.attribution import Attribution
    from attnres.inspect.patching import Patching

DRAWN = 24
"""Largest number of edges in a graph."""


def edge_map(measured: "Attribution | Patching", title: str) -> Plot:
    """Draw every edge as a cell, reads in rows: the change of ln p when it is ablated, or the part that patching it
    restores."""
    patched = hasattr(measured, "restored")
    rows: Any = measured.restored if patched else measured.knockout
    table = Routing(measured.layout, rows)
    across = table.columns()
    values = table.matrix(range(len(measured.layout)), across)
    width = sheet().column if len(across) <= 12 else sheet().page
    height = min(0.16 * len(values), 7.0)
    figure, axes = canvas(width, height + 0.9)
    mesh = cells(axes[0, 0], values, norm=rooted(end_of_scale(values)), colourmap=SIGNED_MAP)
    names = [read.label for read in measured.layout]
    named(axes[0, 0], [one.label for one in across], names, np.arange(len(values), dtype=float), width - 1.3, height)
    scale(figure, mesh, axes[0, 0], "restored" if patched else "change of ln p without it, nats", fraction=0.05)
    what = (
        "What of the clean prompt's prediction each edge's vector restores in the corrupted one: 0 nothing, 1 all."
        if patched
        else "Change of ln p of the prediction when the edge is removed, measured: orange is what it relied on."
    )
    return Plot("edges", title, f"{what} Rows are reads, columns sources. Hatched: no source of that read.", figure)


def graph(attribution: "Attribution", title: str) -> Plot:
    """Draw the connections to the output among the `DRAWN` edges that change the prediction most.

    Starting at the output, an edge is drawn if its read is the output's or belongs to a source already drawn. Each edge
    was measured alone; the effect of two may differ from the sum.

    Raises:
        NotShown: no edge changes the prediction by more than `FLOOR`.
    """
    edges = leading(attribution)
    if not edges:
        raise NotShown(f"no edge changes the prediction by more than {FLOOR:g} nats")
    layout = attribution.layout
    order = depths(layout)
    places = {read.sublayer: (order[i] + 0.6 * (read.kind == "output"), _column(read)) for i, read in enumerate(layout)}
    written = outputs(max(order) + 1, tuple(dict.fromkeys(read.kind for read in layout[:-1])))
    whole = [
        *(source for _, source, _ in edges if source not in written),
        *written,
    ]  # edges of a single node have the sublayer's colour
    colours = {_node(source, written): colour for source, colour in zip(whole, source_colours(whole), strict=True)}
    shown: dict[str, tuple[float, float]] = {}
    for index, source, _ in edges:
        shown[layout[index].sublayer] = places[layout[index].sublayer]
        shown.setdefault(_node(source, written), _place_of(source, places, written))
    deepest = max(order)
    figure, axes = canvas(sheet().page * 0.62, min(9.0, 0.28 * (deepest + 2) + 0.8))
    ax = axes[0, 0]
    most = max(abs(value) for *_, value in edges)
    for index, source, value in edges:
        start, end = shown[_node(source, written)], shown[layout[index].sublayer]
        bend = 0.12 + 0.3 * (end[0] - start[0]) / (deepest + 1)
        _draw_edge(ax, start, end, bend, 0.4 + 3.4 * abs(value) / most, LESS if value < 0 else MORE)
    for source in {source for _, source, _ in edges if _node(source, written) not in places}:
        members = [
            name
            for name, (depth, _) in places.items()
            if name in shown and int(depth) + 1 in (source.span or ()) and name != "output"
        ]
        for member in members:  # the outputs that a block sums
            (y0, x0), (y1, x1) = shown[_node(source, written)], shown[member]
            ax.plot([x0, x1], [y0, y1], color=style.MUTED, linewidth=0.7, linestyle=":", zorder=0)
    labels = {read.sublayer: read._replace(into=None).label for read in layout}
    for name, place in shown.items():
        _draw_node(ax, labels.get(name, name), place, colours.get(name, style.INK))
    ax.set_ylim(deepest + 0.8, -1.2)
    ax.set_xlim(-1.9, 3.4)
    ax.set_axis_off()
    handles = [
        Line2D([], [], color=LESS, linewidth=2, label=f"ln p falls without it (widest: {most:.2f} nats)"),
        Line2D([], [], color=MORE, linewidth=2, label="ln p rises without it"),
        Line2D([], [], color=style.MUTED, linewidth=0.8, linestyle=":", label="is part of"),
    ]
    figure.legend(handles=handles, loc="outside lower left", fontsize=sheet().font)
    caption = (
        f"The {len(edges)} edges that change ln p of the prediction most when each is removed alone, of those that "
        "lead to it along others drawn; depth runs downwards. Measured, not estimated: two removed together may do "
        "more or less."
    )
    return Plot("graph", title, caption, figure)


def _draw_edge(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], bend: float, width: float, colour: str
) -> None:
    """Draw an arrow between two points (depth, column)."""
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 9, "shrinkB": 9}
    ax.add_patch(
        FancyArrowPatch(
            start[::-1],
            end[::-1],
            connectionstyle=f"arc3,rad={bend if start[1] <= end[1] else -bend}",
            linewidth=width,
            color=colour,
            alpha=0.75,
            **arrow,
        )
    )


def _draw_node(ax: Axes, name: str, place: tuple[float, float], colour: str) -> None:
    """Draw a dot at (depth, column) with its name beside it."""
    ax.plot(place[1], place[0], "o", color=colour, markersize=9, zorder=3, markeredgecolor=style.PAPER)
    ax.annotate(
        plain(name.partition(" (")[0]),
        place[::-1],
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=sheet().font,
        zorder=4,
    )


def leading(attribution: "Attribution") -> list[tuple[int, Source, float]]:
    """Return (number of the read, source, change of ln p) of the edges of a graph, the output's edges first."""
    layout, order = attribution.layout, depths(attribution.layout)
    sizes = sorted((abs(value) for row in attribution.knockout for value in row), reverse=True)
    least = max(FLOOR, sizes[min(DRAWN, len(sizes)) - 1])
    feeds = {len(layout) - 1}
    edges: list[tuple[int, Source, float]] = []
    for index in range(len(layout) - 1, -1, -1):
        if index not in feeds:
            continue
        for source, value in zip(layout[index].sources, attribution.knockout[index], strict=True):
            if abs(value) >= least:
                edges.append((index, source, value))
                written = set(source.span or ())
                feeds |= {i for i in range(index) if order[i] + 1 in written}
    return edges


def _column(part: Read | Source) -> float:
    """Return the column of a node: sublayers by their kind, sums in between."""
    return {"attention": 0.0, "mlp": 2.0, "output": 1.0, "embedding": 1.0}.get(part.kind, 1.0)


def _node(source: Source, written: Sequence[Source]) -> str:
    """Return the node of a source: its sublayer if it is one output, else the source itself; an open source is a
    different node for each read."""
    if source.span is not None and len(source.span) == 1:
        return written[source.span.start].name
    return f"{source.name} ({source.span})" if source.open else source.name


def _place_of(source: Source, places: dict[str, tuple[float, float]], written: Sequence[Source]) -> tuple[float, float]:
    """Return depth and column of a source: its sublayer's, or for a sum the end of its span."""
    name = _node(source, written)
    if name in places:
        return places[name]
    return (-0.8, 1.0) if source.kind == "embedding" or source.span is None else (source.span.stop - 1.5, 1.0)
