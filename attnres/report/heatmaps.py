"""Depth heatmaps: which earlier outputs each sublayer reads, split into reads before attention and before the MLP.

A row is a read, a column a source. Rows have different numbers of sources, so cells are placed by the source's *name*;
what a read cannot see is hatched.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnres.report import style
from attnres.report.plots import WIDTH, Plot, seeds_phrase
from attnres.report.runs import Routing, Study

COLOURMAP = "viridis"  # even in lightness for every kind of colour vision
NORM = PowerNorm(0.5, vmin=0.0, vmax=1.0)  # square root: with twenty sources a weight of 0.05 is the even share
VECTOR_CELLS = 3000  # beyond that the cells are one embedded image


def heatmaps(study: Study) -> list[tuple[str, list[Plot]]]:
    """(label, its figures) for each variant that has routing weights: pre-attention, then pre-MLP and the output."""
    result = []
    for label in study.labels:
        runs = [run for run in study.of(label) if run.routing is not None]
        routing = average([run.routing for run in runs if run.routing is not None])
        if routing is not None:
            who = seeds_phrase([run.seed for run in runs])
            result.append((label, _variant(label, routing, who)))
    return result


def average(routings: list[Routing]) -> Routing | None:
    """Mean weights over seeds; the first alone if they do not have the same reads and sources."""
    if not routings:
        return None
    first = routings[0]
    if any((other.reads, other.sources) != (first.reads, first.sources) for other in routings):
        return first
    weights = [
        [float(np.mean([other.weights[r][i] for other in routings])) for i in range(len(row))]
        for r, row in enumerate(first.weights)
    ]
    return Routing(first.reads, first.sources, weights)


def groups(routing: Routing) -> dict[str, list[str]]:
    """Reads by what they feed: 'attention 3' -> attention, 'mlp 3' -> mlp, 'output' -> output; depth order in each."""
    result: dict[str, list[str]] = {}
    for read in routing.reads:
        result.setdefault(read.split()[0], []).append(read)
    return result


def _variant(label: str, routing: Routing, who: str) -> list[Plot]:
    by_kind = groups(routing)
    output = by_kind.pop("output", [])
    columns = routing.columns()
    plots = []
    kinds = list(by_kind) or ["output"]
    for kind in kinds:
        last = kind == kinds[-1]
        rows = by_kind.get(kind, []) + (output if last else [])
        title = {"attention": "before attention", "mlp": "before the MLP"}.get(kind, f"before {kind}")
        if last and output:
            title = f"{title} and at the output" if by_kind else "at the output"
        figure = _heatmap(
            routing.matrix(rows, columns), [_row_name(row) for row in rows], columns, split=last and output
        )
        name = f"routing-{_slug(label)}-{kind}"
        caption = f"Weight of each source (columns) in each read (rows), {who}. Hatched: not a source of that read."
        if "partial" in columns:
            caption += " Partial: the sum so far of the block in progress."
        plots.append(Plot(name, f"{label}: reads {title}", caption, figure))
    return plots


def _row_name(read: str) -> str:
    kind, _, layer = read.partition(" ")
    return f"layer {layer}" if layer else kind


def _slug(label: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in label)


def _heatmap(weights: np.ndarray, rows: list[str], columns: list[str], split: object) -> Figure:
    """`split`: leave a gap before the last row, the output's."""
    count_r, count_c = weights.shape
    gap = 0.5 if split and count_r > 1 else 0.0
    heights = np.full(count_r, 1.0)
    tops = np.arange(count_r) + np.where(np.arange(count_r) == count_r - 1, gap, 0.0)
    row_inches = min(0.34, max(0.11, 4.6 / (count_r + gap)))
    longest = max(len(name) for name in columns)
    figure = Figure(figsize=(WIDTH, row_inches * (count_r + gap) + 0.75 + 0.075 * longest), layout="constrained")
    ax = figure.add_subplot()
    # What no read of these rows can see.
    for r in range(count_r):
        absent = np.flatnonzero(np.isnan(weights[r]))
        if len(absent):
            _hatch(ax, absent, tops[r])
    colours = _colours(weights)
    raster = weights.size > VECTOR_CELLS
    for r in range(count_r):
        mesh = ax.pcolormesh(
            np.arange(count_c + 1),
            [tops[r], tops[r] + heights[r]],
            np.ma.masked_invalid(weights[r : r + 1]),
            cmap=COLOURMAP,
            norm=NORM,
            edgecolors="none" if raster else style.PAPER,
            linewidth=0 if raster else 0.6,
            rasterized=raster,
        )
    if count_c <= 10:
        for r, c in zip(*np.nonzero(~np.isnan(weights))):
            text = f"{weights[r, c]:.2f}".replace("0.", ".", 1) if weights[r, c] < 0.995 else "1"
            ax.text(c + 0.5, tops[r] + 0.52, text, ha="center", va="center", fontsize=8, color=colours[r][c])
    ax.set_xlim(0, count_c)
    ax.set_ylim(count_r + gap, 0)
    _ticks(ax, columns, rows, tops, row_inches)
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)
    bar = figure.colorbar(mesh, ax=ax, fraction=0.035, pad=0.02, aspect=max(8, 1.6 * count_r))
    bar.set_ticks([0, 0.05, 0.2, 0.5, 1], labels=["0", ".05", ".2", ".5", "1"])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)
    bar.ax.grid(visible=False)
    return figure


def _hatch(ax: Axes, absent: np.ndarray, top: float) -> None:
    """Hatched rectangles over runs of neighbouring absent cells of one row."""
    for part in np.split(absent, np.flatnonzero(np.diff(absent) > 1) + 1):
        ax.add_patch(
            Rectangle(
                (part[0], top),
                len(part),
                1,
                facecolor="none",
                edgecolor=style.GRID,
                hatch="////",
                linewidth=0,
                zorder=0,
            )
        )


def _colours(weights: np.ndarray) -> list[list[str]]:
    """Black or white text, whichever is readable on the cell."""
    return [["#101010" if not math.isnan(w) and NORM(w) > 0.62 else "#fefefe" for w in row] for row in weights]


def _ticks(ax: Axes, columns: list[str], rows: list[str], tops: np.ndarray, row_inches: float) -> None:
    """Every name where it fits, every second, third, ... where it does not; a tick always stands at its own cell."""
    width = (WIDTH - 1.2) / len(columns)
    every = max(1, math.ceil(0.115 / width))
    shown = list(range(0, len(columns), every))
    upright = len(columns) <= 10 and max(len(name) for name in columns) * 0.075 < width
    ax.set_xticks([i + 0.5 for i in shown], [columns[i] for i in shown])
    ax.tick_params(axis="x", labelsize=8.5 if width > 0.16 else 7)
    if not upright:
        for tick in ax.get_xticklabels():
            tick.set(rotation=90, ha="center")
    every = max(1, math.ceil(0.12 / row_inches))
    shown = [i for i in range(len(rows)) if i % every == 0 or i == len(rows) - 1]
    ax.set_yticks([tops[i] + 0.5 for i in shown], [rows[i] for i in shown])
    ax.tick_params(axis="y", labelsize=8.5 if row_inches > 0.15 else 7)
