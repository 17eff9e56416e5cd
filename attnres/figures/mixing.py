"""Depth mixing matrices (the paper's Fig. 9) and which layer depends on which (open-attention-residuals' map)."""

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from attnres.figures import style
from attnres.figures.cells import cell_numbers, cells, look_of, named, scale
from attnres.figures.comparison import Comparison
from attnres.figures.plot import COLUMN, PAGE, SMALL, NotShown, Plot, canvas, head, label
from attnres.inspect.colours import source_colours
from attnres.inspect.inspection import By, normalised
from attnres.residuals import Source, depths, outputs

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


def matrix_of(inspection: "Inspection", by: By) -> tuple[np.ndarray, By]:
    """What each output is of each read, rows that sum to one, NaN where output i comes after read l: contributions, or
    |M[l, i]| / sum_j |M[l, j]|, also for an inspection that has no contributions. Raises `NotShown` without a
    matrix."""
    if inspection.mixing is None:
        raise NotShown(f"{inspection.model['residual']} is not linear in its outputs with one number a source")
    if by == "contribution" and inspection.mixing_contribution is not None:
        values = np.array(inspection.mixing_contribution, dtype=float)
    else:
        by, values = "weight", normalised(np.array(inspection.mixing, dtype=float))
    for row, written in zip(values, depths(inspection.layout), strict=True):
        row[written + 1 :] = np.nan
    return values, by


def mixing(comparison: Comparison, by: By = "contribution") -> Plot:
    """Draw one matrix a model, rows that sum to one, on one colour scale. Raises NotShown where none has one."""
    models = [one for one in comparison.variants if one.mean.mixing is not None]
    if any(one.mean.mixing_contribution is None for one in models):
        by = "weight"
    tables = [(one, matrix_of(one.mean, by)[0]) for one in models or comparison.variants[:1]]
    columns = min(3, len(tables)) if len(tables) != 4 else 2
    rows = math.ceil(len(tables) / columns)
    width = COLUMN if len(tables) == 1 else PAGE
    side = (width - 0.9) / columns - 0.45
    figure, axes = canvas(width, rows * (side + 0.7), rows, columns)
    for ax in list(axes.flat)[len(tables) :]:
        ax.remove()
    look = look_of(by, *(values for _, values in tables))
    for i, (one, values) in enumerate(tables):
        ax, reads = axes.flat[i], one.mean.layout
        mesh = cells(ax, values, **look)
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
    scale(
        figure,
        mesh,
        used,
        "contribution to the read" if by == "contribution" else "coefficient",
        aspect=25,
        shrink=0.85,
    )
    what = "the projection of M[l, i] v_i on the read" if by == "contribution" else "|M|, whatever the outputs' lengths"
    caption = (
        f"Depth mixing matrices, h_l = sum_i M[l, i] v_i: what each output (columns) is of each read (rows), {what}; "
        "rows sum to one, composite sources taken apart. Hatched: what comes later."
    )
    title = "what each output is of each read" if by == "contribution" else "coefficients of each output in each read"
    return Plot(*comparison.named("mixing", title), caption, figure)


def layer_shares(inspection: "Inspection", by: By = "contribution") -> tuple[np.ndarray, By]:
    """(layers + 1, layers + 1): how much of a layer's reads (last row: of the output's) is the embedding (column 0) and
    each layer (both sublayers' outputs); NaN for later layers. Reads of one sublayer count as one, their mean."""
    matrix, by = matrix_of(inspection, by)
    matrix, written = np.nan_to_num(matrix), np.array(depths(inspection.layout))
    layers = (matrix.shape[1] - 1) // 2
    if layers < 1 or matrix.shape[1] % 2 == 0:
        raise NotShown("not layers of two sublayers each")
    sublayers = np.stack([matrix[written == sublayer].mean(0) for sublayer in range(2 * layers + 1)])
    reads = np.vstack([sublayers[:-1].reshape(layers, 2, -1).mean(1), sublayers[-1:]])
    values = np.hstack([reads[:, :1], reads[:, 1:].reshape(layers + 1, layers, 2).sum(2)])
    values[:-1][np.triu_indices(layers, 2, layers + 1)] = np.nan
    return values, by


def layers(inspection: "Inspection", by: By = "contribution") -> Plot:
    """Arcs over the strongest links, and the matrix that they are taken from."""
    values, by = layer_shares(inspection, by)
    count = len(values) - 1
    numbered = count <= 12
    side = PAGE * 0.45
    figure, axes = canvas(PAGE, side + 0.35, 1, 2, width_ratios=[1.0, 0.75])
    matrix, arcs = axes[0]
    names = ["emb", *(f"{i}" for i in range(count))]
    rows = [*(f"layer {i}" for i in range(count)), "output"]
    tops = np.arange(count + 1, dtype=float)
    mesh = cells(matrix, values, **look_of(by, values))
    if numbered:
        cell_numbers(matrix, mesh, values, tops, size=5.5)
    named(matrix, names, rows, tops, side - 0.75, side - 0.4)
    matrix.set_xlabel("embedding, or layer that is read")
    scale(
        figure,
        mesh,
        matrix,
        "contribution to the layer's reads" if by == "contribution" else "coefficients",
        fraction=0.045,
    )
    links = _arcs(arcs, values, names)
    what = "How much of each layer's reads is" if by == "contribution" else "Which coefficients each layer's reads give"
    caption = f"{what} the embedding and each earlier layer (both sublayers' outputs). " + (
        "Right: each layer's strongest links, three at most and each at least twice the even share, or .6, coloured by "
        "what is read, left for layers and right for the output; a layer's read of its own attention is left out."
        if links
        else "Right: no link is twice the even share: nothing stands out."
    )
    title = "which layers a layer's reads are made of" if by == "contribution" else "which layers a layer's reads weigh"
    return Plot("layers", f"{inspection.model['name']}: {title}", caption, figure)


def _arcs(ax: Axes, values: np.ndarray, names: list[str]) -> int:
    """Nodes down a line, the embedding first; who reads is below what is read. Returns the number of links that stand
    out; of sources that are alike none does."""
    count = len(values) - 1
    nodes = [*names, "out"]
    margin = 0.1 * (count + 1)  # the links of the output begin right of the names
    sources = [Source("embedding"), *(Source("layer", number) for number in range(count))]
    colours, drawn = source_colours(sources), 0
    for reader in range(count + 1):
        node = reader + 1
        links = [(values[reader, source], source) for source in range(reader + 1)]
        for weight, source in sorted(links, reverse=True)[:3]:
            if len(links) < 2 or weight < min(0.6, 2 / len(links)):
                continue
            drawn += 1
            side, bend = (margin, -0.5) if reader == count else (-0.06, 0.5)
            ax.add_patch(
                FancyArrowPatch(
                    (side, source),
                    (side, node),
                    connectionstyle=f"arc3,rad={bend}",
                    arrowstyle="-|>",
                    mutation_scale=5,
                    linewidth=0.3 + 3.2 * min(1.0, weight),
                    alpha=0.35 + 0.5 * min(1.0, float(weight)),
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
    return drawn
