"""Where reads come from: mean weights before attention and before MLPs (the paper's Fig. 8), where blocks begin (the
heatmaps of the nanoGPT study), and by kind of token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attnres.figures.cells import cell_numbers, cells, named, scale
from attnres.figures.plot import COLUMN, PAGE, SMALL, NotShown, Plot, canvas, head, label, plain
from attnres.inspect.routing import Routing

if TYPE_CHECKING:
    from attnres.inspect.inspection import ByLabel, Inspection


def shares(inspection: "Inspection") -> Routing:
    """Mean weights of the reads that weigh something, each row as shares |weight| / sum |weights|.

    A softmax's rows are shares already. Raises `NotShown` for a residual that weighs nothing.
    """
    if inspection.routing is None:
        raise NotShown(f"{inspection.model['residual']} weighs nothing")
    weights = inspection.routing["weights"]
    kept = [r for r, row in enumerate(weights) if row]
    return Routing([inspection.layout[r] for r in kept], [share(weights[r]).tolist() for r in kept])


def share(row: Sequence[float]) -> np.ndarray:
    """|weight| / sum |weights| of one row."""
    sizes = np.abs(np.asarray(row, dtype=float))
    return sizes / (sizes.sum() or 1.0)


def what_shares_are(inspection: "Inspection") -> str:
    """How a caption names the weights of this residual."""
    assert inspection.routing is not None
    rows = [row for row in inspection.routing["weights"] if row]
    if all(min(row) >= 0 and abs(sum(row) - 1) < 1e-3 for row in rows):
        return "Mean weight"
    return "Share |weight| / sum |weights|"


def boundaries(routing: Routing, most: int = 7) -> list[int]:
    """Rows of the reads at which a block begins, in depth order, and the last one (the output's).

    Where no source is a block or a state, as in Full, every read is a boundary. More than `most` are thinned evenly.
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
    """How a caption names the reads that `boundaries` chooses."""
    sealed = any(map(routing.composites, range(len(routing.layout))))
    return f"in {'the reads with which blocks begin' if sealed else 'some of the reads, evenly chosen'} and in the last"


def last_mix(routing: Routing) -> int:
    """Row of the last read with more than one source: the output's in most layouts. Raises `NotShown`."""
    for row in range(len(routing.layout) - 1, -1, -1):
        if len(routing.layout[row].sources) > 1:
            return row
    raise NotShown("every read has one source")


def patterns(inspection: "Inspection", width: float = PAGE) -> Plot:
    """Draw reads before attention, and reads before MLPs with the output's below: side by side, or one above the other
    in a column's width; of several reads a sublayer a table for each. Raises NotShown."""
    routing = shares(inspection)
    kinds: dict[tuple[str, str | None], list[int]] = {}
    for row, read in enumerate(routing.layout):
        kinds.setdefault((read.kind, read.into), []).append(row)
    output = kinds.pop(("output", None), [])
    order = [kind for kind, _ in kinds]
    tables = sorted(kinds.items(), key=lambda part: order.index(part[0][0])) or [(("output", None), [])]
    if len(tables) > 2:  # some for a part of a sublayer: those of a single source say nothing beside them
        tables = [part for part in tables if any(len(routing.layout[row].sources) > 1 for row in part[1])] or tables
    tables[-1] = (tables[-1][0], tables[-1][1] + output)
    columns = routing.columns(sorted(row for _, rows in tables for row in rows))
    most = max(len(rows) for _, rows in tables)
    row_inches = min(0.24, max(0.035, 4.2 / most))
    across = min(len(tables), 2 if len(tables) in (2, 4) else 3) if width > COLUMN else 1
    down = -(-len(tables) // across)
    figure, axes = canvas(width, down * (row_inches * (most + 0.5) + 0.95), down, across)
    for ax in list(axes.flat)[len(tables) :]:
        ax.remove()
    panel = (width - 0.75) / across - 0.6
    for ax, ((kind, into), rows) in zip(axes.flat, tables):
        values, reads = routing.matrix(rows, columns), [routing.layout[row] for row in rows]
        tops = np.arange(len(reads), dtype=float)
        if len(reads) > 1 and reads[-1].kind == "output":
            tops[-1] += 0.5
        mesh = cells(ax, values, tops=tops)
        if panel / len(columns) > 0.17 and row_inches > 0.12:
            cell_numbers(ax, mesh, values, tops, size=SMALL - 0.5)
        names = ["output" if read.number is None else f"layer {read.number}" for read in reads]
        named(ax, [label(source) for source in columns], names, tops, panel, row_inches * len(reads))
        titles = {"attention": "before attention", "mlp": "before the MLP", "output": "at the output"}
        head(ax, titles.get(kind, f"before {kind}") + (f", {into}" if into else ""))
    scale(figure, mesh, [ax for ax in axes.flat if ax.figure is not None], "share of the read", aspect=22 * down)
    caption = f"{what_shares_are(inspection)} of each source (columns) in each read (rows)"
    caption += f" over {inspection.data['tokens']:,} tokens." if "tokens" in inspection.data else "."
    caption += " Hatched: no source of that read."
    caption += "".join(f" {label(source).capitalize()}: {source.meaning}." for source in columns if source.open)
    return Plot("patterns", f"{inspection.model['name']}: where reads come from", caption, figure)


def differ(inspection: "Inspection") -> bool:
    """Whether some read weighs one source more than another, to two digits, as no plain sum does."""
    rows = inspection.routing["weights"] if inspection.routing is not None else []
    return any(np.ptp(share(row)) > 0.005 for row in rows if row)


def at_boundaries(inspection: "Inspection") -> Plot:
    """One table: the reads with which blocks begin, and the output's."""
    routing = shares(inspection)
    if not any(map(routing.composites, range(len(routing.layout)))):
        raise NotShown("no blocks, so no block boundaries")
    rows = boundaries(routing, most=24)
    reads, columns = [routing.layout[row] for row in rows], routing.columns(rows)
    values = routing.matrix(rows, columns)
    width = COLUMN if len(columns) <= 10 else PAGE
    height = min(0.24, 4.2 / len(reads)) * len(reads)
    figure, axes = canvas(width, height + 0.85)
    ax, tops = axes[0, 0], np.arange(len(reads), dtype=float)
    mesh = cells(ax, values)
    if (width - 1.2) / len(columns) > 0.22:
        cell_numbers(ax, mesh, values, tops, size=SMALL - 0.5)
    named(ax, [label(source) for source in columns], [label(read) for read in reads], tops, width - 1.2, height)
    scale(figure, mesh, ax, "share of the read", fraction=0.05)
    caption = f"{what_shares_are(inspection)} of each source in the reads with which blocks begin, and at the output."
    return Plot("boundaries", f"{inspection.model['name']}: reads at block boundaries", caption, figure)


def by_label(inspection: "Inspection", part: "ByLabel | None", name: str, what: str) -> Plot:
    """The weight of one source by label, a panel for each boundary, with standard errors; a line at their mean
    over all these tokens."""
    if part is None:
        raise NotShown(f"the inspection has no weights by {what}")
    routing = shares(inspection)
    assert inspection.routing is not None
    _refuse_constant(part)
    source = "embedding"
    rows = [row for row in boundaries(routing, most=6) if routing.weighs(row, source)]
    if not rows:
        raise NotShown("no read weighs the embedding beside another source")
    names = part["names"]
    height = 0.15 * len(names) + 0.75
    figure, axes = canvas(PAGE, height, 1, len(rows), sharey=True)
    for ax, row in zip(axes[0], rows, strict=True):
        read, column = inspection.layout.index(routing.layout[row]), routing.place(row, source)
        values, errors = [], []
        for weights, error in zip(part["weights"], part.get("error") or [None] * len(names), strict=True):
            size = sum(abs(value or 0.0) for value in weights[read]) or 1.0
            values.append(abs(weights[read][column] or 0.0) / size)
            spread = None if error is None or not error[read] else error[read][column]
            errors.append(np.nan if spread is None else spread / size)
        places = np.arange(len(names))
        mean = float(np.average(values, weights=part["tokens"]))
        ax.axvline(mean, color="#4a5260", linewidth=0.9)
        ax.errorbar(values, places, xerr=errors, fmt="o", color="#0072b2", markersize=3, linewidth=1.2)
        head(ax, label(routing.layout[row]))
        ax.set_xlim(0, 1.12 * max([mean, *np.add(values, np.nan_to_num(errors)).tolist()]) or 1)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=3 if len(rows) < 4 else 2, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}".replace("0.", ".", 1)))
        ax.set_yticks(places, [plain(name) for name in names], fontsize=SMALL)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
    figure.supxlabel("weight of the embedding", fontsize=SMALL + 0.5)
    over = "prompts" if what == "prompt category" else "documents"
    caption = (
        f"{what_shares_are(inspection)} of the embedding by {what}, {which_reads(routing)}. "
        f"Bars: standard error over {over}; line: all of these tokens."
    )
    return Plot(name, f"{inspection.model['name']}: the embedding's weight by {what}", caption, figure)


def _refuse_constant(part: "ByLabel") -> None:
    """Raise `NotShown` where weights by label are no news: a residual whose weights are the same for every token."""
    first, *others = [[value for read in weights for value in read] for weights in part["weights"]]
    if all(np.allclose(np.array(first, float), np.array(other, float), atol=1e-6, equal_nan=True) for other in others):
        raise NotShown("its weights are the same for every token")


def by_kind(inspection: "Inspection") -> Plot:
    """Embedding weight by kind of token."""
    return by_label(inspection, inspection.kinds, "kinds", "kind of token")


def by_prompt(inspection: "Inspection") -> Plot:
    """Embedding weight by category of prompt."""
    return by_label(inspection, inspection.prompts, "prompts", "prompt category")


def label_sources(inspection: "Inspection") -> Plot:
    """Kinds of token against the sources of the last read that has several: how much more or less than all tokens
    read each."""
    part = inspection.kinds
    if part is None:
        raise NotShown("the inspection has no weights by kind of token")
    routing = shares(inspection)
    assert inspection.routing is not None
    _refuse_constant(part)
    row = last_mix(routing)
    read = inspection.layout.index(routing.layout[row])
    all_tokens = np.array(routing.weights[row])
    values = np.stack([share([value or 0.0 for value in weights[read]]) for weights in part["weights"]]) - all_tokens
    columns, names = routing.layout[row].sources, part["names"]
    largest = max(0.01, float(np.abs(values).max()))
    height = 0.17 * len(names)
    figure, axes = canvas(COLUMN if len(columns) <= 10 else PAGE, height + 0.95)
    width = figure.get_figwidth() - 1.9
    ax, tops = axes[0, 0], np.arange(len(names), dtype=float)
    mesh = cells(ax, values, norm=Normalize(-largest, largest), colourmap="RdBu_r")
    named(ax, [label(source) for source in columns], names, tops, width, height)
    scale(figure, mesh, ax, "less or more than all tokens", fraction=0.05)
    caption = (
        f"{what_shares_are(inspection)} of each source at the read '{routing.layout[row].name}' by kind of token, less "
        "that of all tokens."
    )
    return Plot("kinds-sources", f"{inspection.model['name']}: sources by kind of token", caption, figure)
