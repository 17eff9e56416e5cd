"""The learned side: which reads ask alike, what sources look alike, and what gates hold reads back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attnres.figures import style
from attnres.figures.cells import SIGNED, SIGNED_MAP, cells, named, scale
from attnres.figures.comparison import Comparison
from attnres.figures.depth import quantity
from attnres.figures.plot import (
    COLUMN,
    PAGE,
    SMALL,
    NotShown,
    Plot,
    canvas,
    depth_axis,
    depth_line,
    head,
    label,
)
from attnres.residuals import Read, outputs

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


def queries(inspection: "Inspection") -> Plot:
    """Cosine of each two reads' queries, and the queries on their first two principal axes."""
    if inspection.query_cosine is None:
        raise NotShown("fewer than two reads have a query that is not zero")
    cosine = np.array(inspection.query_cosine, dtype=float)
    pca = inspection.query_pca
    side = 2.75
    figure, axes = canvas(PAGE if pca else COLUMN, side + 0.35, 1, 2 if pca else 1)
    ax, names = axes[0, 0], [label(read) for read in inspection.layout]
    mesh = cells(ax, cosine, norm=SIGNED, colourmap=SIGNED_MAP)
    named(ax, names, names, np.arange(len(cosine), dtype=float), side - 0.6, side - 0.4)
    ax.set_aspect("equal")
    head(ax, "cosine of queries")
    scale(figure, mesh, ax, "", fraction=0.045)
    if pca:
        _scatter(figure, axes[0, 1], pca, inspection.layout)
    caption = "Cosine of each two reads' pseudo-query times key gain, w g. Hatched: no query, or one of zero length."
    if pca:
        caption += (
            " Right: the same vectors on their two principal axes, from the first read (dark) to the last (light)."
        )
    return Plot("queries", f"{inspection.model['name']}: which reads ask alike", caption, figure)


def _scatter(figure: Any, ax: Any, pca: dict[str, Any], reads: Sequence[Read]) -> None:
    points = np.array(pca["points"], dtype=float)
    there = np.isfinite(points[:, 0])
    depth = np.arange(len(points))
    marks = {"attention": "o", "mlp": "s", "output": "D"}
    few = len(points) <= 60
    ax.plot(*points[there].T, color=style.GRID, linewidth=0.7, zorder=1)
    keys = []
    for kind, mark in marks.items():
        mine = there & np.array([read.kind == kind for read in reads])
        if not mine.any():
            continue
        name = {"attention": "attention", "mlp": "MLP", "output": "output"}[kind]
        drawn = ax.scatter(
            *points[mine].T,
            c=depth[mine],
            cmap="viridis",
            vmin=0,
            vmax=len(points) - 1,
            marker=mark,
            s=22 if few else 9,
            edgecolors=style.PAPER,
            linewidths=0.4,
            zorder=2,
        )
        keys.append(Line2D([], [], color=style.MUTED, marker=mark, linestyle="", markersize=4.5, label=name))
    first, last = np.flatnonzero(there)[[0, -1]]
    for i in (first, last):
        ax.annotate(
            label(reads[i]), points[i], xytext=(4, 4), textcoords="offset points", fontsize=SMALL, color=style.INK
        )
    ax.axhline(0, color=style.GRID, linewidth=0.8, zorder=0)
    ax.axvline(0, color=style.GRID, linewidth=0.8, zorder=0)
    one, two = pca["explained"][:2]
    ax.set_xlabel(f"first axis, {one:.0%} of the variance")
    ax.set_ylabel(f"second axis, {two:.0%}")
    head(ax, "queries on their principal axes")
    ax.margins(0.12)
    ax.legend(handles=keys, fontsize=SMALL, loc="best", handletextpad=0.1)
    bar = figure.colorbar(drawn, ax=ax, fraction=0.045, pad=0.02)
    bar.locator = MaxNLocator(nbins=6, integer=True)
    bar.set_label("read", fontsize=SMALL)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=SMALL)


def keys(inspection: "Inspection") -> Plot:
    """Cosine of the last read's sources with one another: the geometry that its query has to tell apart."""
    if not inspection.key_cosine or len(inspection.key_cosine) < 2:
        raise NotShown("the output's read is no softmax over more than one source")
    assert inspection.routing is not None
    cosine = np.array(inspection.key_cosine, dtype=float)
    names = [label(source) for source in inspection.layout[-1].sources]
    side = COLUMN - 0.9
    figure, axes = canvas(COLUMN, side + 0.4)
    mesh = cells(axes[0, 0], cosine, norm=SIGNED, colourmap=SIGNED_MAP)
    named(axes[0, 0], names, names, np.arange(len(cosine), dtype=float), side - 0.2, side - 0.2)
    axes[0, 0].set_aspect("equal")
    scale(figure, mesh, axes[0, 0], "mean cosine", fraction=0.045)
    caption = "Mean cosine over tokens of each two sources of the last read."
    return Plot("keys", f"{inspection.model['name']}: which sources look alike", caption, figure)


def gates(inspection: "Inspection") -> Plot:
    """Draw what is learned besides queries: a line for what is one number a read, a table for what is a row.

    Raises:
        NotShown: there is nothing.
    """
    found = {name: values for name, values in (inspection.gates or {}).items() if values}
    if not found:
        raise NotShown("no gates or biases")
    lines = {name: values for name, values in found.items() if not isinstance(values[0], list)}
    tables = {name: _table(values) for name, values in found.items() if name not in lines}
    side = 2.6 if tables else 1.9
    figure, axes = canvas(COLUMN if len(found) == 1 else PAGE, side + 0.5 * bool(tables), 1, len(found))
    look = Comparison.of_models([inspection]).looks()[0]
    for ax, (name, values) in zip(axes[0], lines.items()):
        depth_line(ax, values, **look)
        ax.set_ylabel(quantity(name).axis)
        depth_axis(ax, len(values), reads=len(values) == len(inspection.reads))
    largest = max([1e-6, *(float(np.nanmax(np.abs(table))) for table in tables.values())])
    for ax, (name, table) in zip(axes[0, len(lines) :], tables.items()):
        mesh = cells(ax, table, norm=Normalize(-largest, largest), colourmap=SIGNED_MAP)
        title, across, down = _TABLES.get(name, (name, "{}", "{}"))
        columns, rows = ([name.format(i) for i in range(count)] for name, count in zip((across, down), table.T.shape))
        if name == "mix":
            columns = ["emb", *columns[:-1]]
        elif name in _TABLES:
            rows = [label(row) for row in outputs(len(table) + 1)[1:]]
        named(ax, columns, rows, np.arange(len(table), dtype=float), side - 0.5, side)
        head(ax, title)
    if tables:
        scale(figure, mesh, list(axes[0, len(lines) :]), "coefficient")
    caption = (
        "Learned scalars of each read. Filled points: attention, hollow: MLP, diamond: the output." if lines else ""
    )
    caption += " " * bool(lines and tables) + "Learned coefficients, without what depends on the input." * bool(tables)
    what = "gates" if lines else "learned mixing"
    return Plot("gates", f"{inspection.model['name']}: {what}", caption, figure)


_TABLES = {
    "mix": ("coefficients", "layer {}", "layer {}"),
    "read": ("reads of each stream", "stream {}", ""),
    "write": ("writes to each stream", "stream {}", ""),
}
"""Title of a learned table, and the names of its columns and rows."""


def _table(rows: list[list[float]]) -> np.ndarray:
    """Rows of different lengths as one table, NaN where a row has ended."""
    out = np.full((len(rows), max(len(row) for row in rows)), np.nan)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
