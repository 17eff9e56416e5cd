"""Tables of coloured cells, a column for each source *name*; a source that a read cannot see is hatched."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection, PolyCollection
from matplotlib.colors import FuncNorm, LinearSegmentedColormap, LogNorm, Normalize, PowerNorm, to_hex
from matplotlib.figure import Figure

from attnres.figures import style
from attnres.figures.plot import log_numbers, numbers_on, plain, thin_ticks
from attnres.figures.style import sheet
from attnres.inspect.colours import DIVERGING, ink_on, signed_root
from attnres.inspect.inspection import By
from attnres.inspect.notebook import end_of_scale
from attnres.text import number

COLOURMAP = "viridis"  # lightness rises evenly for every kind of colour vision
SHARES = PowerNorm(0.5, vmin=0.0, vmax=1.0)  # square root: with twenty sources an even share is 0.05
SIGNED_MAP = LinearSegmentedColormap.from_list("less or more", DIVERGING)
SIGNED = Normalize(-1.0, 1.0)
LINES = 2
"""Hatch lines that begin in a cell."""
VECTOR_CELLS = 1600  # larger tables are one embedded image, whose cells grid lines would cover


def rooted(largest: float) -> FuncNorm:
    """Return a square-root scale for signed values, from -`largest` to `largest`."""
    return FuncNorm((signed_root, lambda x: np.sign(x) * np.square(x)), vmin=-largest, vmax=largest)


def look_of(by: By, *tables: np.ndarray) -> dict[str, Any]:
    """Return one scale for several tables of contributions or weights, as options of `cells`; that of contributions
    ends at 1 or at the largest contribution, which may exceed 1."""
    if by == "weight":
        return {"norm": SHARES, "colourmap": COLOURMAP}
    values = np.concatenate([table.ravel() for table in tables])
    return {"norm": rooted(end_of_scale(values, least=1.0)), "colourmap": SIGNED_MAP}


def cells(
    ax: Axes,
    values: np.ndarray,
    *,
    tops: np.ndarray | None = None,
    edges: np.ndarray | None = None,
    norm: Normalize = SHARES,
    colourmap: Any = COLOURMAP,
    hatched: bool = True,
) -> Collection:
    """Draw `values` (rows, columns), row r from `tops[r]` to `tops[r] + 1` downwards; NaN is hatched or left out.

    Args:
        edges: (columns + 1,) boundaries of the columns; None is one unit each, from 0.
    """
    count_r, count_c = values.shape
    tops = np.arange(count_r, dtype=float) if tops is None else tops
    is_even, edges = edges is None, np.arange(count_c + 1) if edges is None else edges
    if hatched:
        _hatch(ax, np.isnan(values), tops)
    look: dict[str, Any] = {"cmap": colourmap, "norm": norm}
    if values.size > VECTOR_CELLS or not is_even:  # draw an image of each run of rows without a gap
        for part in np.split(np.arange(count_r), np.flatnonzero(np.diff(tops) > 1) + 1):
            shown = np.ma.masked_invalid(values[part])
            mesh: Collection = ax.pcolormesh(edges, [*tops[part], tops[part[-1]] + 1], shown, rasterized=True, **look)
    else:
        r, c = np.nonzero(~np.isnan(values))
        corners = np.stack([c, tops[r]], 1)[:, None] + np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
        width = min(0.6, 12 / max(count_r, count_c))
        mesh = PolyCollection(corners, array=values[r, c], edgecolors=style.PAPER, linewidth=width, **look)
        ax.add_collection(mesh)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(tops[-1] + 1, 0)
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)
    return mesh


def readable_on(colour: Any) -> str:
    """Return nearly white or nearly black, whichever is readable on a colour."""
    return {"#000000": "#101010", "#ffffff": "#fefefe"}[ink_on(to_hex(colour))]


def cell_numbers(
    ax: Axes,
    mesh: Collection,
    values: np.ndarray,
    tops: np.ndarray,
    size: float,
) -> None:
    """Write the value into each cell with two digits and without the leading zero (.07, 1, -.3), in black or white,
    whichever is readable on it."""
    for r, c in zip(*np.nonzero(~np.isnan(values))):
        colour = readable_on(mesh.to_rgba(values[r, c]))
        text = number(values[r, c], 2).replace("0.", ".", 1)
        text = {"1.00": "1", ".00": "0"}.get(text, text)
        ax.text(c + 0.5, tops[r] + 0.52, text, ha="center", va="center", fontsize=size, color=colour)


def named(
    ax: Axes,
    columns: Sequence[str],
    rows: Sequence[str],
    tops: np.ndarray,
    width: float,
    height: float,
) -> None:
    """Name rows and columns, thinned to the axes' `width` and `height` in inches; columns upright if all fit so."""
    places = [i + 0.5 for i in range(len(columns))]
    upright = max(len(name) for name in columns) * sheet().font * 0.68 / 72 < width / len(columns)
    if upright:
        ax.set_xticks(places, [plain(name) for name in columns], fontsize=sheet().font)
    else:
        thin_ticks(ax.xaxis, places, columns, width)
        for tick in ax.get_xticklabels():
            tick.set(rotation=90, ha="center")
    thin_ticks(ax.yaxis, [top + 0.5 for top in tops], rows, height)


def scale(figure: Figure, mesh: Collection, axes: Any, label: str, **options: Any) -> None:
    """Draw the colour scale beside `axes`; a signed scale ends below the smallest value drawn with it."""
    settings: dict[str, Any] = {"fraction": 0.03, "pad": 0.015, "aspect": 22, **options}
    bar = figure.colorbar(mesh, ax=axes, **settings)
    if mesh.norm is SHARES:
        bar.set_ticks([0, 0.05, 0.2, 0.5, 1])
    if isinstance(mesh.norm, FuncNorm):
        meshes = [one for ax in np.ravel(axes) for one in ax.collections if one.norm is mesh.norm]
        least = min(float(np.nanmin(np.asarray(one.get_array(), dtype=float))) for one in meshes)
        largest = float(mesh.norm.vmax or 0.0)
        lowest = next((part for part in (-0.1, -0.5) if part * largest < least), -1.0)
        bar.set_ticks([part * largest for part in (-1, -0.5, -0.1, 0, 0.1, 0.5, 1) if part >= lowest])
        bar.ax.set_ylim(lowest * largest, largest)
    if isinstance(mesh.norm, LogNorm):
        log_numbers(bar.ax.yaxis, *bar.ax.get_ylim())
    else:
        numbers_on(bar.ax.yaxis)
    bar.set_label(label, fontsize=sheet().font)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, which="both", labelsize=sheet().font)
    bar.ax.grid(visible=False)


def _hatch(ax: Axes, absent: np.ndarray, tops: np.ndarray) -> None:
    """Hatch the cells where `absent` (rows, columns) is true with diagonal lines, as one path. A hatch pattern would be
    simpler, but a browser prints it as an image for each cell."""
    lines: list[tuple[float, float]] = []
    gap = (math.nan, math.nan)
    for row, top in zip(absent, tops, strict=True):
        columns = np.flatnonzero(row)
        for part in np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1):
            if not len(part):
                continue
            left, right = float(part[0]), float(part[-1] + 1)
            # from (start, top + 1) one unit right and up, to row `top`
            for start in np.arange(left - 1.0 + 1 / LINES, right, 1 / LINES):
                low, high = max(start, left), min(start + 1.0, right)
                lines += [(low, top + 1 - (low - start)), (high, top + 1 - (high - start)), gap]
    if lines:
        ax.plot(*np.array(lines).T, color=style.GRID, linewidth=0.7, solid_capstyle="butt", zorder=0)
