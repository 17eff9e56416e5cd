"""Depth heatmaps: which earlier outputs each sublayer reads, split into reads before attention and before the MLP.

A row is a read, a column a source. Rows have different numbers of sources, so cells are placed by the source's *name*;
what a read cannot see is hatched.
"""

import numpy as np
from matplotlib.figure import Figure

from attnres.figures.cells import cell_numbers, cells, named, scale
from attnres.report.plots import WIDTH, Plot, seeds_phrase, slug
from attnres.report.runs import Routing, Study


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
        name = f"routing-{slug(label)}-{kind}"
        caption = f"Weight of each source (columns) in each read (rows), {who}. Hatched: not a source of that read."
        if "partial" in columns:
            caption += " Partial: the sum so far of the block in progress."
        plots.append(Plot(name, f"{label}: reads {title}", caption, figure))
    return plots


def _row_name(read: str) -> str:
    kind, _, layer = read.partition(" ")
    return f"layer {layer}" if layer else kind


def _heatmap(weights: np.ndarray, rows: list[str], columns: list[str], split: object) -> Figure:
    """`split`: leave a gap before the last row, the output's."""
    count_r, count_c = weights.shape
    gap = 0.5 if split and count_r > 1 else 0.0
    tops = np.arange(count_r) + np.where(np.arange(count_r) == count_r - 1, gap, 0.0)
    row_inches = min(0.34, max(0.11, 4.6 / (count_r + gap)))
    longest = max(len(name) for name in columns)
    figure = Figure(figsize=(WIDTH, row_inches * (count_r + gap) + 0.75 + 0.075 * longest), layout="constrained")
    ax = figure.add_subplot()
    mesh = cells(ax, weights, tops=tops)
    if count_c <= 10:
        cell_numbers(ax, mesh, weights, tops, size=8)
    size = 8.5 if count_c <= 24 and row_inches > 0.15 else 7
    named(ax, columns, rows, tops, WIDTH - 1.2, row_inches * (count_r + gap), size)
    scale(figure, mesh, ax, "", fraction=0.035, pad=0.02, aspect=max(8, 1.6 * count_r))
    return figure
