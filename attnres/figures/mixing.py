"""Depth mixing matrices (the paper's Fig. 9) and which layer depends on which (open-attention-residuals' map)."""

import math
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from attnres.figures import style
from attnres.figures.cells import cell_numbers, cells, named, scale
from attnres.figures.comparison import Comparison
from attnres.figures.plot import COLUMN, PAGE, SMALL, NotShown, Plot, canvas, head, label
from attnres.residuals import depths, outputs

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


def normalised(inspection: "Inspection") -> np.ndarray:
    """|M[l, i]| / sum_j |M[l, j]|, NaN where output i comes after read l. Raises `NotShown` without a matrix."""
    if inspection.mixing is None:
        raise NotShown(f"{inspection.model['residual']} is not linear in its outputs with one number a source")
    values = np.abs(np.array(inspection.mixing, dtype=float))
    values /= np.maximum(values.sum(1, keepdims=True), 1e-30)
    for row, written in zip(values, depths(inspection.layout), strict=True):
        row[written + 1 :] = np.nan
    return values


def mixing(comparison: Comparison) -> Plot:
    """Draw one matrix a model, rows normalised, on one colour scale. Raises NotShown where none has one."""
    models = [one for one in comparison.variants if one.mean.mixing is not None]
    tables = [(one, normalised(one.mean)) for one in models or comparison.variants[:1]]
    columns = min(3, len(tables)) if len(tables) != 4 else 2
    rows = math.ceil(len(tables) / columns)
    width = COLUMN if len(tables) == 1 else PAGE
    side = (width - 0.9) / columns - 0.45
    figure, axes = canvas(width, rows * (side + 0.7), rows, columns)
    for ax in list(axes.flat)[len(tables) :]:
        ax.remove()
    for i, (one, values) in enumerate(tables):
        ax, reads = axes.flat[i], one.mean.layout
        mesh = cells(ax, values)
        across = [label(part) for part in outputs(values.shape[1])]
        named(ax, across, [label(part) for part in reads], np.arange(len(values), dtype=float), side, side)
        ax.set_aspect("equal" if len(values) == len(across) else "auto")
        if len(tables) > 1:
            head(ax, one.label, inches=side + 0.1)
        if i % columns == 0:
            ax.set_ylabel("read")
        if i // columns == rows - 1:
            ax.set_xlabel("output")
    used = [ax for ax in axes.flat if ax.figure is not None]
    scale(figure, mesh, used, "share of the read", aspect=25, shrink=0.85)
    caption = (
        "Depth mixing matrices: how much of each output (columns) is in each read (rows), |M| with rows that sum to "
        "one, composite sources expanded. Hatched: what comes later."
    )
    return Plot(*comparison.named("mixing", "depth mixing matrices"), caption, figure)


def layer_shares(inspection: "Inspection") -> np.ndarray:
    """(layers + 1, layers + 1): how much of a layer's reads (last row: of the output's) comes from the embedding
    (column 0) and from each layer (both sublayers' outputs); NaN for later layers. Reads of one sublayer count as one,
    their mean."""
    matrix, own = np.nan_to_num(normalised(inspection)), np.array(depths(inspection.layout))
    layers = (matrix.shape[1] - 1) // 2
    if layers < 1 or matrix.shape[1] % 2 == 0:
        raise NotShown("not layers of two sublayers each")
    sublayers = np.stack([matrix[own == sublayer].mean(0) for sublayer in range(2 * layers + 1)])
    reads = np.vstack([sublayers[:-1].reshape(layers, 2, -1).mean(1), sublayers[-1:]])
    values = np.hstack([reads[:, :1], reads[:, 1:].reshape(layers + 1, layers, 2).sum(2)])
    values[:-1][np.triu_indices(layers, 2, layers + 1)] = np.nan
    return values


def layers(inspection: "Inspection") -> Plot:
    """Arcs over the strongest links, and the matrix that they are taken from."""
    values = layer_shares(inspection)
    count = len(values) - 1
    numbered = count <= 12
    side = PAGE * 0.45
    figure, axes = canvas(PAGE, side + 0.35, 1, 2, width_ratios=[1.0, 0.75])
    matrix, arcs = axes[0]
    names = ["emb", *(f"{i}" for i in range(count))]
    rows = [*(f"layer {i}" for i in range(count)), "output"]
    tops = np.arange(count + 1, dtype=float)
    mesh = cells(matrix, values)
    if numbered:
        cell_numbers(matrix, mesh, values, tops, size=5.5)
    named(matrix, names, rows, tops, side - 0.75, side - 0.4)
    matrix.set_xlabel("embedding, or layer that is read")
    scale(figure, mesh, matrix, "share of the layer's reads", fraction=0.045)
    _arcs(arcs, values, names)
    caption = (
        "How much of each layer's reads comes from the embedding and from each earlier layer (both sublayers' "
        "outputs). Right: each layer's three strongest links (a tenth or twice the even share at least), "
        "coloured by what is read, left for "
        "layers and right for the output; a layer's read of its own attention is left out."
    )
    return Plot("layers", f"{inspection.model['name']}: which layer depends on which", caption, figure)


def _arcs(ax: Axes, values: np.ndarray, names: list[str]) -> None:
    """Nodes down a line, the embedding first; who reads is below what is read."""
    count = len(values) - 1
    nodes = [*names, "out"]
    margin = 0.1 * (count + 1)  # the links of the output begin right of the names
    colours = ["#d55e00", *matplotlib.colormaps["viridis"](np.linspace(0, 0.85, count))]
    for reader in range(count + 1):
        node = reader + 1
        links = [(values[reader, source], source) for source in range(min(reader + 1, count + 1))]
        for weight, source in sorted(links, reverse=True)[:3]:
            if weight < min(0.1, 2 / len(links)) or source == node:
                continue
            side, bend = (margin, -0.5) if reader == count else (-0.06, 0.5)
            ax.add_patch(
                FancyArrowPatch(
                    (side, source),
                    (side, node),
                    connectionstyle=f"arc3,rad={bend}",
                    arrowstyle="-|>",
                    mutation_scale=5,
                    linewidth=0.3 + 3.2 * weight,
                    alpha=0.35 + 0.5 * float(weight),
                    color=colours[source],
                    shrinkA=2,
                    shrinkB=2,
                )
            )
    ax.plot([0] * len(nodes), range(len(nodes)), "o", color=style.INK, markersize=max(1.5, 5 - count / 20), zorder=3)
    every = max(1, math.ceil(count / 28))
    for i, name in enumerate(nodes):
        if (i % every == 0 and len(nodes) - 1 - i >= every) or i == len(nodes) - 1:
            ax.text(0.02 * (count + 1), i, name, fontsize=SMALL, va="center", ha="left")
    reach = 0.28 * (count + 1)
    ax.set_xlim(-reach, reach + margin)
    ax.set_ylim(len(nodes) - 0.5, -0.5)
    ax.set_axis_off()
