"""Draw what a model learned: similar queries, similar sources, and gates that hold reads back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from attnres.figures import style
from attnres.figures.cells import SIGNED, SIGNED_MAP, cells, named, scale
from attnres.figures.comparison import Comparison
from attnres.figures.plot import (
    NotShown,
    Plot,
    canvas,
    depth_axis,
    depth_line,
    head,
    numbers_on,
    per_layer,
    side_by_side,
)
from attnres.figures.style import sheet
from attnres.residuals import Read, depths, outputs

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


def queries(inspection: "Inspection") -> Plot:
    """Draw the cosine of each pair of reads' queries, and the queries on their first two principal axes."""
    if inspection.query_cosine is None:
        raise NotShown("fewer than two reads have a query that is not zero")
    cosine = np.array(inspection.query_cosine, dtype=float)
    pca = inspection.query_pca
    side = min(2.75, sheet().column - 0.3)
    count = 2 if pca else 1
    across = min(count, side_by_side(3))
    down = count // across
    figure, axes = canvas(sheet().page if pca else sheet().column, down * (side + 0.35), down, across)
    ax, names = axes[0, 0], [read.label for read in inspection.layout]
    mesh = cells(ax, cosine, norm=SIGNED, colourmap=SIGNED_MAP)
    named(ax, names, names, np.arange(len(cosine), dtype=float), side - 0.6, side - 0.4)
    ax.set_aspect("equal")
    head(ax, "cosine of queries")
    scale(figure, mesh, ax, "", fraction=0.045)
    if pca:
        _scatter(figure, axes.flat[1], pca, inspection.layout)
    caption = "Cosine of each two reads' pseudo-query times key gain, w g. Hatched: no query, or one of zero length."
    if pca:
        caption += (
            " Right: the same vectors on their two principal axes, from the first read (dark) to the last (light)."
        )
    return Plot("queries", f"{inspection.model['name']}: which reads ask alike", caption, figure)


def _scatter(figure: Any, ax: Any, pca: dict[str, Any], reads: Sequence[Read]) -> None:
    points = np.array(pca["points"], dtype=float)
    known = np.isfinite(points[:, 0])
    depth = np.arange(len(points))
    marks = {"attention": "o", "mlp": "s", "output": "D"}
    few = len(points) <= 60
    ax.plot(*points[known].T, color=style.GRID, linewidth=0.7, zorder=1)
    keys = []
    for kind, mark in marks.items():
        of_kind = known & np.array([read.kind == kind for read in reads])
        if not of_kind.any():
            continue
        name = {"attention": "attention", "mlp": "MLP", "output": "output"}[kind]
        drawn = ax.scatter(
            *points[of_kind].T,
            c=depth[of_kind],
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
    first, last = np.flatnonzero(known)[[0, -1]]
    for i in (first, last):
        ax.annotate(
            reads[i].label,
            points[i],
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=sheet().font,
            color=style.INK,
        )
    ax.axhline(0, color=style.GRID, linewidth=0.8, zorder=0)
    ax.axvline(0, color=style.GRID, linewidth=0.8, zorder=0)
    first_share, second_share = pca["explained"][:2]
    ax.set_xlabel(f"first axis, {first_share:.0%} of the variance")
    ax.set_ylabel(f"second axis, {second_share:.0%}")
    numbers_on(ax.xaxis)
    numbers_on(ax.yaxis)
    head(ax, "queries on their principal axes")
    ax.margins(0.12)
    ax.legend(handles=keys, fontsize=sheet().font, loc="best", handletextpad=0.1)
    bar = figure.colorbar(drawn, ax=ax, fraction=0.045, pad=0.02)
    bar.locator = MaxNLocator(nbins=6, integer=True)
    bar.set_label("read", fontsize=sheet().font)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=sheet().font)


def keys(inspection: "Inspection") -> Plot:
    """Draw the cosines between the last read's sources, which its query has to tell apart."""
    if not inspection.key_cosine or len(inspection.key_cosine) < 2:
        raise NotShown("the output's read is no softmax over more than one source")
    assert inspection.routing is not None
    cosine = np.array(inspection.key_cosine, dtype=float)
    names = [source.label for source in inspection.layout[-1].sources]
    side = sheet().column - 1.45
    figure, axes = canvas(sheet().column, side + 0.75)
    mesh = cells(axes[0, 0], cosine, norm=SIGNED, colourmap=SIGNED_MAP)
    named(axes[0, 0], names, names, np.arange(len(cosine), dtype=float), side - 0.2, side - 0.2)
    axes[0, 0].set_aspect("equal")
    scale(figure, mesh, axes[0, 0], "mean cosine", fraction=0.045)
    caption = "Mean cosine over tokens of each two sources of the last read."
    return Plot("keys", f"{inspection.model['name']}: which sources look alike", caption, figure)


def learned(inspection: "Inspection") -> Plot:
    """Draw learned parameters other than queries: a line for one number a read, a table for a row a read. A single
    number is in the terminal's notes.

    Raises:
        NotShown: the residual learns nothing else.
    """
    tables = [(table, _array(table["values"])) for table in (inspection.learned or {}).values()]
    tables = sorted((part for part in tables if part[1].size), key=lambda part: part[1].ndim)
    if not tables:
        raise NotShown("no gates or biases")
    flat = [part for part in tables if part[1].ndim == 1]
    height = 1.9 if len(flat) == len(tables) else 3.1
    width = sheet().column if len(tables) == 1 else sheet().page
    figure, axes = canvas(width, height, 1, len(tables))
    look = Comparison.of_models([inspection]).looks()[0]
    of_reads, each = depths(inspection.layout), per_layer(inspection.layout)
    for ax, (table, values) in zip(axes[0], flat):
        ax.set_ylabel(table["title"])
        if table["axes"][0] in ("read", "sublayer"):
            sublayers = of_reads[: len(values)] if table["axes"] == ["read"] else None
            depth_line(ax, values, sublayers, each=each, **look)
            count = len(values) if sublayers is None else sublayers[-1] + 1
            depth_axis(ax, count, reads=len(values) == len(inspection.reads), each=each)
        else:
            ax.plot(values, marker="o", linewidth=1.2, markersize=3.0, **look)
            ax.set_xlabel(table["axes"][0])
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    largest = max([1e-6, *(float(np.nanmax(np.abs(values))) for _, values in tables[len(flat) :])])
    side = width / len(tables) - 1.1
    for ax, (table, values) in zip(axes[0, len(flat) :], tables[len(flat) :]):
        mesh = cells(ax, values, norm=Normalize(-largest, largest), colourmap=SIGNED_MAP)
        down, across = (_counted(inspection, table["axes"], axis, values.shape[axis]) for axis in (0, 1))
        named(ax, across, down, np.arange(len(values), dtype=float), side, height - 0.7)
        head(ax, table["title"], inches=side + 0.4)
    if len(tables) > len(flat):
        scale(figure, mesh, list(axes[0, len(flat) :]), "coefficient")
    by_sublayer = any(table["axes"][0] in ("read", "sublayer") for table, _ in flat)
    marks = " Filled points: attention, hollow: MLP, diamond: the output." if by_sublayer else ""
    return Plot("learned", f"{inspection.model['name']}: learned besides queries", f"Learned tables.{marks}", figure)


def _array(values: Any) -> np.ndarray:
    """Return numbers of one or two axes as an array, NaN beyond the end of a shorter row; empty for other numbers of
    axes."""
    if not isinstance(values, list):
        return np.empty(0)
    if not any(isinstance(row, list) for row in values):
        return np.array(values, dtype=float)
    out = np.full((len(values), max(len(row) for row in values)), np.nan)
    for i, row in enumerate(values):
        if any(isinstance(value, list) for value in row):
            return np.empty(0)
        out[i, : len(row)] = row
    return out


def _counted(inspection: "Inspection", axes: Sequence[str], axis: int, count: int) -> list[str]:
    """Return the names along an axis of a learned table."""
    kind = axes[axis] if axis < len(axes) else ""
    if kind in ("read", "sublayer") and count <= len(inspection.layout):
        return [read.label for read in inspection.layout[:count]]
    if kind == "source" and count == len(inspection.layout[-1].sources):
        return [source.label for source in inspection.layout[-1].sources]
    if kind == "source":  # sources are outputs, or the embedding and whole layers
        if axes[0] == "layer":
            return ["embedding", *(f"layer {i}" for i in range(count - 1))]
        return [one.label for one in outputs(count)]
    return [f"{kind} {i}".strip() for i in range(count)]
