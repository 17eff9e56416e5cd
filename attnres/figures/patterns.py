"""Draw the contributions or weights of sources: before attention and before MLPs (the paper's Fig. 8), at block
boundaries (the heatmaps of the nanoGPT study), and by kind of token."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import MaxNLocator

from attnres.figures import style
from attnres.figures.cells import SIGNED_MAP, cell_numbers, cells, look_of, named, scale
from attnres.figures.comparison import Comparison
from attnres.figures.plot import (
    CONSTANT,
    NotShown,
    Plot,
    canvas,
    edge_head,
    head,
    numbers_on,
    plain,
    side_by_side,
    varies,
)
from attnres.figures.style import sheet
from attnres.inspect.colours import MORE, source_colours
from attnres.inspect.inspection import By, Routing, amounts, normalised
from attnres.inspect.notebook import end_of_scale
from attnres.residuals import Source, depths, outputs
from attnres.text import listed

if TYPE_CHECKING:
    from attnres.inspect.inspection import ByLabel, Inspection


TITLES: dict[By, str] = {"contribution": "contributions of sources", "weight": "weights of sources"}
"""Titles of figures, by the kind of number."""


def shares(inspection: "Inspection", by: By = "contribution") -> Routing:
    """Return contributions or weights of each source in the reads with several sources, means over tokens; see
    `Routing.of`.

    Raises:
        NotShown: the residual has no weights.
    """
    routing = Routing.of(inspection, by)
    if routing is None:
        raise NotShown(f"{inspection.model['residual']} has no weights")
    return routing


def what_numbers_are(inspection: "Inspection", routing: Routing) -> str:
    """Return the words for these numbers in a caption."""
    if routing.by == "contribution":
        return "Mean contribution (a weighted source's projection on the read; rows sum to one, negative against it)"
    assert inspection.routing is not None
    rows = [row for row in inspection.routing["weights"] if row]
    if all(min(row) >= 0 and abs(sum(row) - 1) < 1e-3 for row in rows):
        return "Mean weight (not how much of the read a source is: sources differ in length)"
    return "Share |weight| / sum |weights| (not how much of the read a source is: sources differ in length)"


def axis(routing: Routing) -> str:
    """Return the name of these numbers beside a scale."""
    return "contribution to the read" if routing.by == "contribution" else "weight"


def boundaries(routing: Routing, most: int = 7) -> list[int]:
    """Return the rows of the reads at which a block begins, in depth order, and the last row (the output's).

    If no source is a block or a state, as in Full, every read is a boundary. More than `most` are thinned evenly.
    """
    sealed = [routing.composites(row) for row in range(len(routing.layout))]
    last = len(routing.layout) - 1
    rows = [r for r in range(1, last) if sealed[r] > sealed[r - 1]]
    if not any(sealed):
        rows = [r for r in range(last) if len(routing.layout[r].sources) > 1]
    rows.append(last)
    if len(rows) > most:
        rows = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]
    return rows


def which_reads(routing: Routing) -> str:
    """Return the words in a caption for the reads that `boundaries` chooses."""
    sealed = any(map(routing.composites, range(len(routing.layout))))
    return f"in {'the reads with which blocks begin' if sealed else 'some of the reads, evenly chosen'} and in the last"


def last_mix(routing: Routing) -> int:
    """Return the row of the last read with more than one source: the output's in most layouts. Raises `NotShown`."""
    for row in range(len(routing.layout) - 1, -1, -1):
        if len(routing.layout[row].sources) > 1:
            return row
    raise NotShown("every read has one source")


def patterns(inspection: "Inspection", by: By = "contribution", narrow: bool = False) -> Plot:
    """Draw reads before attention, and reads before MLPs with the output's below: side by side, or one above the other
    in a column's width (`narrow`); one table each if a sublayer has several reads. Raises NotShown."""
    routing = shares(inspection, by)
    kinds: dict[tuple[str, str | None], list[int]] = {}
    for row, read in enumerate(routing.layout):
        kinds.setdefault((read.kind, read.into), []).append(row)
    output = kinds.pop(("output", None), [])
    order = [kind for kind, _ in kinds]
    tables = sorted(kinds.items(), key=lambda part: order.index(part[0][0])) or [(("output", None), [])]
    if len(tables) > 2:  # reads of a part of a sublayer: leave out tables whose reads all have a single source
        tables = [part for part in tables if any(len(routing.layout[row].sources) > 1 for row in part[1])] or tables
    tables[-1] = (tables[-1][0], tables[-1][1] + output)
    columns = routing.columns(sorted(row for _, rows in tables for row in rows))
    most = max(len(rows) for _, rows in tables)
    row_inches = min(0.24, max(0.035, 4.2 / most))
    across = 1 if narrow else min(len(tables), 2 if len(tables) in (2, 4) else 3, side_by_side(2.5))
    width = sheet().column if narrow else sheet().page
    down = -(-len(tables) // across)
    figure, axes = canvas(width, down * (row_inches * (most + 0.5) + 0.95), down, across, used=len(tables))
    panel = (width - 0.75) / across - 0.6
    matrices = [routing.matrix(rows, columns) for _, rows in tables]
    look = look_of(routing.by, *matrices)
    for ax, ((kind, into), rows), values in zip(axes.flat, tables, matrices):
        reads = [routing.layout[row] for row in rows]
        tops = np.arange(len(reads), dtype=float)
        if len(reads) > 1 and reads[-1].kind == "output":
            tops[-1] += 0.5
        mesh = cells(ax, values, tops=tops, **look)
        if panel / len(columns) > 0.17 * sheet().scale and row_inches > 0.12 * sheet().scale:
            cell_numbers(ax, mesh, values, tops, size=sheet().font - 0.5)
        names = ["output" if read.number is None else f"layer {read.number}" for read in reads]
        named(ax, [source.label for source in columns], names, tops, panel, row_inches * len(reads))
        titles = {"attention": "before attention", "mlp": "before the MLP", "output": "at the output"}
        head(ax, titles.get(kind, f"before {kind}") + (f", {into}" if into else ""))
    scale(figure, mesh, [ax for ax in axes.flat if ax.figure is not None], axis(routing), aspect=22 * down)
    caption = f"{what_numbers_are(inspection, routing)} of each source (columns) in each read (rows)"
    caption += f" over {inspection.data['tokens']:,} tokens." if "tokens" in inspection.data else "."
    caption += " Hatched: no source of that read."
    caption += "".join(f" {source.label.capitalize()}: {source.meaning}." for source in columns if source.open)
    return Plot("patterns", f"{inspection.model['name']}: {TITLES[routing.by]}", caption, figure)


def differ(inspection: "Inspection", by: By) -> bool:
    """Return whether a read's sources have different numbers, to two digits; the weights of a plain sum are all
    equal."""
    routing = Routing.of(inspection, by)
    return routing is not None and any(np.ptp(row) > 0.005 for row in routing.values)


def at_boundaries(inspection: "Inspection", by: By = "contribution") -> Plot:
    """Draw one table of the reads with which blocks begin, and the output's."""
    routing = shares(inspection, by)
    if not any(map(routing.composites, range(len(routing.layout)))):
        raise NotShown("no blocks, so no block boundaries")
    rows = boundaries(routing, most=24)
    reads, columns = [routing.layout[row] for row in rows], routing.columns(rows)
    values = routing.matrix(rows, columns)
    width = sheet().column if len(columns) <= 10 else sheet().page
    height = min(0.24, 4.2 / len(reads)) * len(reads)
    figure, axes = canvas(width, height + 0.85)
    ax, tops = axes[0, 0], np.arange(len(reads), dtype=float)
    mesh = cells(ax, values, **look_of(routing.by, values))
    if (width - 1.2) / len(columns) > 0.22 * sheet().scale:
        cell_numbers(ax, mesh, values, tops, size=sheet().font - 0.5)
    named(ax, [source.label for source in columns], [read.label for read in reads], tops, width - 1.2, height)
    scale(figure, mesh, ax, axis(routing), fraction=0.05)
    caption = f"{what_numbers_are(inspection, routing)} of each source in the reads with which blocks begin, "
    caption += "and at the output."
    title = f"{inspection.model['name']}: {TITLES[routing.by]} at block boundaries"
    return Plot("boundaries", title, caption, figure)


def by_kind(inspection: "Inspection", by: By = "contribution") -> Plot:
    """Draw one source by kind of token, a panel for each boundary, with standard errors and a line at the mean over all
    these tokens. The source is the embedding for weights; for contributions it is the one in which kinds differ
    most."""
    part, routing = _of_kinds(inspection, by)
    rows = [row for row in boundaries(routing, most=6) if routing.weighs(row, "embedding")]
    if not rows:
        raise NotShown("no read has the embedding and another source")
    names, panels, constant = part["names"], [], []
    for row in rows:
        read = inspection.layout.index(routing.layout[row])
        table, error = label_rows(part, read, routing.by)
        spread = np.sqrt(np.average((table - table.mean(0)) ** 2, axis=0, weights=part["tokens"]))
        column = int(spread.argmax()) if routing.by == "contribution" else routing.place(row, "embedding")
        panel = row, column, table[:, column], error[:, column]
        (panels if varies(panel[2]) else constant).append(panel)
    panels, constant = (panels, constant) if panels else (constant, [])
    across = min(len(panels), side_by_side(1.1 if sheet().page > 5 else 1.5))
    down = -(-len(panels) // across)
    figure, axes = canvas(sheet().page, down * (0.15 * len(names) * sheet().scale + 0.75), down, across, sharey=True)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    for ax, (row, column, values, errors) in zip(axes.flat, panels):
        places = np.arange(len(names))
        mean = float(np.average(values, weights=part["tokens"]))
        ax.axvline(mean, color="#4a5260", linewidth=0.9)
        ax.errorbar(values, places, xerr=errors, fmt="o", color=MORE, markersize=3, linewidth=1.2)
        edge_head(ax, routing.layout[row], routing.layout[row].sources[column], (sheet().page - 1.2) / across - 0.1)
        ends = np.concatenate([[mean, 0.0], values + np.nan_to_num(errors), values - np.nan_to_num(errors)])
        ax.set_xlim(1.12 * min(ends.min(), 0.0), 1.12 * ends.max() or 1)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=3 if across < 4 else 2, steps=[1, 2, 5, 10]))
        numbers_on(ax.xaxis)
        ax.set_yticks(places, [plain(name) for name in names], fontsize=sheet().font)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
    figure.supxlabel(axis(routing), fontsize=sheet().font + 0.5)
    of = "of the embedding" if routing.by == "weight" else "of the source in which they differ most"
    caption = (
        f"{what_numbers_are(inspection, routing)} {of}, by kind of token, {which_reads(routing)}. "
        f"Bars: standard error over documents; line: all of these tokens."
    )
    caption += left_out(routing.layout[row].label for row, *_ in constant)
    return Plot("kinds", f"{inspection.model['name']}: {TITLES[routing.by]}, by kind of token", caption, figure)


def left_out(names: Iterable[str]) -> str:
    """Return a caption's sentence about reads that were left out because their panel would show one number; empty
    without any."""
    reads = list(names)
    return f" Left out, since all numbers differ by {CONSTANT:g} at most: {listed(reads)}." if reads else ""


def label_rows(part: "ByLabel", read: int, by: By) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers (labels, sources) of one read and their standard errors, NaN if unknown."""
    means = part.get("contribution", []) if by == "contribution" else part["weights"]
    errors = part.get("contribution_error", []) if by == "contribution" else part["error"]
    sums = [sum(abs(value or 0.0) for value in row[read]) or 1.0 if by == "weight" else 1.0 for row in means]
    spreads = [np.array(row[read], dtype=float) / total for row, total in zip(errors, sums, strict=True)]
    return np.stack([amounts(row[read], by) for row in means]), np.stack(spreads)


def _of_kinds(inspection: "Inspection", by: By) -> tuple["ByLabel", Routing]:
    """Return the numbers by kind of token, and those of all. Raises `NotShown` without them, or if they are equal for
    all tokens."""
    part = inspection.kinds
    if part is None:
        raise NotShown("the inspection has no weights by kind of token")
    routing = shares(inspection, by)
    rows = part.get("contribution", []) if routing.by == "contribution" else part["weights"]
    first, *others = [[value for read in one for value in read] for one in rows]
    if not others:
        raise NotShown("there is only one label")
    if all(np.allclose(np.array(first, float), np.array(other, float), atol=1e-6, equal_nan=True) for other in others):
        raise NotShown(f"its {routing.by}s are the same for every token")
    return part, routing


def label_sources(inspection: "Inspection", by: By = "contribution") -> Plot:
    """Draw kinds of token against the sources of the last read with several: how much more or less than the average
    token each kind reads."""
    part, routing = _of_kinds(inspection, by)
    row = last_mix(routing)
    read = inspection.layout.index(routing.layout[row])
    table = label_rows(part, read, routing.by)[0]
    values = table - np.average(table, axis=0, weights=part["tokens"])
    columns, names = routing.layout[row].sources, part["names"]
    largest = end_of_scale(values)
    height = 0.17 * len(names)
    figure, axes = canvas(sheet().column if len(columns) <= 10 else sheet().page, height + 0.95)
    width = figure.get_figwidth() - 1.9
    ax, tops = axes[0, 0], np.arange(len(names), dtype=float)
    mesh = cells(ax, values, norm=Normalize(-largest, largest), colourmap=SIGNED_MAP)
    named(ax, [source.label for source in columns], names, tops, width, height)
    scale(figure, mesh, ax, "less or more than all tokens", fraction=0.05)
    caption = (
        f"{what_numbers_are(inspection, routing)} of each source at the read '{routing.layout[row].name}' by kind of "
        "token, less that of all tokens."
    )
    title = f"{inspection.model['name']}: {TITLES[routing.by]} by kind of token, less all tokens"
    return Plot("kinds-sources", title, caption, figure)


# ------------------------------------------------------------------ contributions of single outputs


def matrix_of(inspection: "Inspection", by: By) -> tuple[np.ndarray, By]:
    """Return the share of each output in each read, (reads, outputs), rows that sum to one, NaN where output i comes
    after read l: contributions, or |M[l, i]| / sum_j |M[l, j]| for an inspection without them. Raises `NotShown`
    without a matrix."""
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
    """Draw one matrix for each model, rows that sum to one, on one colour scale. Raises NotShown if no model has
    one."""
    models = [variant for variant in comparison.variants if variant.mean.mixing is not None]
    if any(variant.mean.mixing_contribution is None for variant in models):
        by = "weight"
    tables = [(variant, matrix_of(variant.mean, by)[0]) for variant in models or comparison.variants[:1]]
    columns = min(len(tables), 2 if len(tables) == 4 else 3, side_by_side())
    rows = math.ceil(len(tables) / columns)
    width = sheet().column if len(tables) == 1 else sheet().page
    side = (width - 0.9) / columns - 0.45
    figure, axes = canvas(width, rows * (side + 0.7), rows, columns, used=len(tables))
    look = look_of(by, *(values for _, values in tables))
    for i, (variant, values) in enumerate(tables):
        ax, reads = axes.flat[i], variant.mean.layout
        mesh = cells(ax, values, **look)
        across = [part.label for part in outputs(values.shape[1])]
        named(ax, across, [part.label for part in reads], np.arange(len(values), dtype=float), side, side)
        ax.set_aspect("equal" if len(values) == len(across) else "auto")
        if len(tables) > 1:
            head(ax, variant.label, inches=side + 0.1)
        if i % columns == 0:
            ax.set_ylabel("read")
        if i // columns == rows - 1:
            ax.set_xlabel("output")
    used = [ax for ax in axes.flat if ax.figure is not None]
    numbers = "contribution to the read" if by == "contribution" else "coefficient"
    scale(figure, mesh, used, numbers, aspect=25, shrink=0.85)
    what = "the projection of M[l, i] v_i on the read" if by == "contribution" else "|M|, whatever the outputs' lengths"
    caption = (
        f"Depth mixing matrices, h_l = sum_i M[l, i] v_i: what each output (columns) is of each read (rows), {what}; "
        "rows sum to one, composite sources taken apart. Hatched: what comes later."
    )
    title = "contributions of every sublayer" if by == "contribution" else "coefficients of each output in each read"
    return Plot(*comparison.named("mixing", title), caption, figure)


def layer_shares(inspection: "Inspection", by: By = "contribution") -> tuple[np.ndarray, By]:
    """Return (layers + 1, layers + 1): the share of a layer's reads (last row: the output's) that is the embedding
    (column 0) or each layer (both sublayers' outputs); NaN for later layers. Several reads of a sublayer are
    averaged."""
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
    """Draw the matrix of `layer_shares`, and arcs for its largest entries."""
    values, by = layer_shares(inspection, by)
    count = len(values) - 1
    is_wide = side_by_side() > 1
    side = sheet().page * (0.45 if is_wide else 0.95)
    if is_wide:
        figure, axes = canvas(sheet().page, side + 0.35, 1, 2, width_ratios=[1.0, 0.75])
    else:
        figure, axes = canvas(sheet().page, 1.8 * side + 0.35, 2, 1)
    matrix, arcs = axes.flat
    names = ["embedding", *(f"{i}" for i in range(count))]
    rows = [*(f"layer {i}" for i in range(count)), "output"]
    tops = np.arange(count + 1, dtype=float)
    mesh = cells(matrix, values, **look_of(by, values))
    if (side - 1.2) / (count + 1) > 0.15 * sheet().scale:
        cell_numbers(matrix, mesh, values, tops, size=sheet().font - 1.5)
    named(matrix, names, rows, tops, side - 0.75, side - 0.4)
    matrix.set_xlabel("embedding, or layer that is read")
    numbers = "contribution to the layer's reads" if by == "contribution" else "coefficients"
    scale(figure, mesh, matrix, numbers, fraction=0.045)
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
    """Draw nodes down a line, the embedding first, and arcs from each source to its readers below. Return the number of
    links that stand out, 0 if all sources are alike."""
    count = len(values) - 1
    nodes = [*names, "out"]
    margin = 0.1 * (count + 1)  # links of the output begin right of the names
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
            ax.text(0.02 * (count + 1), i, name, fontsize=sheet().font, va="center", ha="left")
    reach = 0.28 * (count + 1)
    ax.set_xlim(-reach, reach + margin)
    ax.set_ylim(len(nodes) - 0.5, -0.5)
    ax.set_axis_off()
    return drawn
