"""Draw quantities of sublayers and reads by depth, a panel each with a line for each variant; and over training."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import FuncFormatter, MultipleLocator

from attnres.figures import style
from attnres.figures.cells import cells, scale
from attnres.figures.comparison import Comparison, Variant, held_out_panel
from attnres.figures.plot import (
    LAYER,
    STEP,
    NotShown,
    Plot,
    canvas,
    depth_axis,
    depth_line,
    head,
    legend,
    log_if_wide,
    numbers_on,
    panels,
    per_layer,
    side_by_side,
    spread,
    thin_ticks,
)
from attnres.figures.style import sheet
from attnres.residuals import Source, depths
from attnres.text import listed

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection


MARKS = "Filled points: attention, hollow: MLP"


class Quantity(NamedTuple):
    """A number for each read, sublayer or layer.

    Attributes:
        axis: name beside an axis. meaning: a sentence for captions.
        reads: one value for each read, the output's last; else one for each sublayer, or with `layers` one for each
            layer.
        of: gets the values from an inspection; None for a quantity that only training records.
        log: the axis is logarithmic if values span more than this factor.
        plain: the values (depth,) of a standard residual, by the number of the read.
    """

    axis: str
    meaning: str
    reads: bool
    of: Callable[["Inspection"], Sequence[float | None] | None] = lambda _: None
    log: float = math.inf
    plain: Callable[[np.ndarray], np.ndarray] | None = None
    layers: bool = False


QUANTITIES = {
    "output_rms": Quantity(
        "RMS of outputs",
        "Root mean square of what each sublayer writes.",
        False,
        of=lambda one: one.output_rms,
        log=6.0,
    ),
    "input_rms": Quantity(
        "RMS of reads",
        "Root mean square of what each read makes, before its norm.",
        True,
        of=lambda one: one.input_rms,
        log=6.0,
    ),
    "grad_rms": Quantity("RMS of gradients", "Root mean square of the loss's gradient at each output.", False, log=6.0),
    "entropy": Quantity(
        "entropy of reads (nats)",
        "Mean entropy of a read's weights.",
        True,
        of=lambda one: one.entropy.get("nats"),
    ),
    "effective": Quantity(
        "effective number of sources",
        "Effective number of sources: exp of the mean entropy of a read's weights.",
        True,
        lambda one: one.entropy.get("effective"),
    ),
    "distance": Quantity(
        "effective depth distance",
        "Distance: mean number of sublayers between a read and what it reads.",
        True,
        lambda one: one.distance,
        plain=lambda depth: depth / 2,
    ),
    "embedding": Quantity(
        "embedding's contribution",
        "Embedding's contribution: the part of each read that is the token embedding, by projection.",
        True,
        lambda one: None if one.mixing_contribution is None else [row[0] for row in one.mixing_contribution],
    ),
    "persistence": Quantity(
        "embedding's coefficient",
        "Embedding's coefficient: its share of each read's coefficients, whatever the outputs' lengths.",
        True,
        lambda one: one.persistence,
        log=15.0,
        plain=lambda depth: 1 / (depth + 1),
    ),
    "sharpness": Quantity(
        "sharpness |w g| √d",
        "Sharpness: the largest logit that a read's query can give.",
        True,
        of=lambda one: one.sharpness,
    ),
    "recency_bias": Quantity("bias of the last source", "What is added to the last source's logit.", True),
    "gate": Quantity("gate: share of the read", "How much of the read is let through.", True),
    "alpha": Quantity("alpha", "The factor that the read is scaled by.", True),
    "value_residual": Quantity(
        "share of layer 0's values", "What values take from the first layer's.", False, layers=True
    ),
    "gates": Quantity("gate of a block's end", "How far a block ends after each layer.", False, layers=True),
}
"""Quantities by the names under which runs and inspections store them, in drawing order."""
CHOICE = ("effective", "distance", "embedding", "persistence", "sharpness")
"""Quantities that describe how reads choose."""
MAGNITUDES = ("output_rms", "input_rms", "grad_rms")


def quantity(key: str) -> Quantity:
    """Return the quantity named `key`; a generic one if it is not listed."""
    return QUANTITIES.get(key) or Quantity(key, "", True)


def rows(variant: Variant, key: str) -> np.ndarray | None:
    """Return (seeds, depth) values from the inspections, or else the last that training recorded; None if there are
    none or seeds differ in depth."""
    measured = [quantity(key).of(one) for one in variant.inspections.values()]
    if not any(row and any(value is not None for value in row) for row in measured):
        measured = [run[key][-1] for run in variant.dynamics.values() if run.get(key)]
    values = [np.array(row, dtype=float) for row in measured if row]
    if not values or len({len(row) for row in values}) > 1 or not np.isfinite(values).any():
        return None
    return np.stack(values)


def sublayers(variant: Variant, count: int) -> list[int]:
    """Return the sublayer of each of `count` values (of reads or of sublayers); L is the output."""
    for inspection in variant.inspections.values():
        places = depths(inspection.layout)
        if len(places) == count:
            return places
    return list(range(count))


def by_depth(comparison: Comparison, keys: Sequence[str], name: str, title: str) -> Plot:
    """Draw a panel for each quantity that some variant has.

    Raises:
        NotShown: no variant has any of them.
    """
    keys = [key for key in keys if any(rows(variant, key) is not None for variant in comparison.variants)]
    if not keys:
        raise NotShown("it was not measured for this residual")
    figure, axes = panels(len(keys))
    for ax, key in zip(axes, keys, strict=True):
        panel(ax, comparison, key)
    legend(figure, *axes)
    caption = " ".join(quantity(key).meaning for key in keys)
    dotted = ["a plain residual"] if any(quantity(key).plain for key in keys) else []
    if "effective" in keys and any(map(most_sources, comparison.variants)):
        dotted.append("as many sources as a read has, the most that there can be")
    caption += f" Dotted: {listed(dotted)}." if dotted else ""
    caption += f" {MARKS}{', diamond: the output' if any(quantity(key).reads for key in keys) else ''}."
    caption += "".join(coinciding(comparison, key) for key in keys)
    return Plot(*comparison.named(name, title), caption + bands(comparison, keys), figure)


def bands(comparison: Comparison, keys: Sequence[str]) -> str:
    """Return a sentence about the bands that `panel` draws of several seeds; empty if it draws none for these
    quantities."""
    tables = [rows(one, key) for one in comparison.variants for key in keys]
    several = any(table is not None and len(table) > 1 for table in tables)
    return " Lines: means over seeds; bands: least to most." if several else ""


def coinciding(comparison: Comparison, key: str) -> str:
    """Return a sentence that names lines which coincide within a hundredth of the panel's range; empty if none do."""
    tables = [
        (variant.label, table.mean(0)) for variant in comparison.variants if (table := rows(variant, key)) is not None
    ]
    values = np.concatenate([line for _, line in tables] or [np.zeros(1)])
    close = 0.01 * (np.nanmax(values) - np.nanmin(values))
    groups: list[list[str]] = []
    for place, (name, line) in enumerate(tables):
        if any(name in group for group in groups):
            continue
        same_line = [
            other
            for other, theirs in tables[place:]
            if theirs.shape == line.shape and np.nanmax(np.abs(theirs - line)) <= close
        ]
        groups.append(same_line)
    what = quantity(key).axis
    return "".join(f" {listed(group)} are the same line in '{what}'." for group in groups if len(group) > 1)


def most_sources(variant: Variant) -> list[float]:
    """Return the number of sources of each read, NaN for a read without weights; empty if it was not measured."""
    most = variant.mean.entropy.get("most", []) if variant.inspections else []
    return [float(count or np.nan) for count in most]


def panel(ax: Axes, comparison: Comparison, key: str) -> None:
    """Draw one quantity of every variant that has it."""
    what = quantity(key)
    tables = [rows(variant, key) for variant in comparison.variants]
    layouts = [one.layout for variant in comparison.variants for one in variant.inspections.values()]
    each = 1 if what.layers else per_layer(layouts[0]) if layouts else 2
    deepest = 0
    for variant, table, look in zip(comparison.variants, tables, comparison.looks(), strict=True):
        if table is not None:
            places = sublayers(variant, table.shape[1])
            depth_line(ax, table, places, each=each, **look)
            deepest = max(deepest, places[-1] + 1)
    dotted: dict[str, Any] = {"color": style.MUTED, "linewidth": 0.9, "linestyle": ":", "zorder": 1}
    if what.plain is not None:
        ax.plot(np.arange(deepest), what.plain(np.arange(deepest)), **dotted)
    if key == "effective":
        for variant, look in zip(comparison.variants, comparison.looks(), strict=True):
            if most := most_sources(variant):
                places = spread(sublayers(variant, len(most)))
                ax.step(places, most, where="mid", **(dotted | {"color": look["color"]}))
    log_if_wide(ax, np.concatenate([table.ravel() for table in tables if table is not None]), what.log)
    depth_axis(ax, deepest, reads=what.reads, each=each)
    ax.set_ylabel(what.axis)


def source_norms(comparison: Comparison) -> Plot:
    """Draw the RMS of each source of the last read that weighs several, a panel a model.

    Raises:
        NotShown: no model has such a read.
    """
    models = [
        (variant, look, last_sources(variant.mean)) for variant, look in zip(comparison.variants, comparison.looks())
    ]
    shown = [(variant, look, *last) for variant, look, last in models if last is not None]
    if not shown:
        raise NotShown("no residual with a softmax over several sources")
    columns = min(3, len(shown), side_by_side())
    lines = -(-len(shown) // columns)
    width = sheet().column if columns == 1 else sheet().page
    figure, axes = canvas(width, 2.3 * lines, lines, columns, used=len(shown), sharey=True)
    for ax, (variant, look, sources, rms) in zip(axes.flat, shown):
        places = np.arange(len(sources))
        ax.plot(places, rms, "o-", color=look["color"], linewidth=0.7, markersize=3 if len(sources) < 60 else 1.6)
        log_if_wide(ax, np.concatenate([values for *_, values in shown]))
        thin_ticks(ax.xaxis, places.tolist(), [source.label for source in sources], (width - 1) / columns)
        for tick in ax.get_xticklabels():
            tick.set(rotation=90, ha="center")
        ax.grid(visible=False, axis="x")
        if len(shown) > 1:
            head(ax, variant.label)
    for row in axes:
        row[0].set_ylabel("RMS of sources")
    caption = (
        "Root mean square over tokens and width of the sources of the last read, from the first to the newest. Keys "
        "are normed and values are not: a large source fills a read that hardly weighs it."
    )
    return Plot(*comparison.named("source-norms", "magnitudes of sources"), caption, figure)


def last_sources(inspection: "Inspection") -> tuple[Sequence[Source], list[float]] | None:
    """Return the sources and their RMS of the last read that has several sources and measured magnitudes."""
    for read, rms in reversed(list(zip(inspection.layout, inspection.source_rms))):
        if len(rms) == len(read.sources) > 1:
            return read.sources, rms
    return None


# ------------------------------------------------------------------ over training (the paper's Fig. 5)


def dynamics(comparison: Comparison) -> Plot:
    """Draw held-out loss over training, and output and gradient magnitude by depth at its end.

    Raises:
        NotShown: the runs recorded none of it.
    """
    depths = [
        key
        for key in ("output_rms", "grad_rms")
        if any(rows(variant, key) is not None for variant in comparison.variants)
    ]
    losses = any(len(points) > 1 for variant in comparison.variants for points in variant.held_out.values())
    if not losses and not depths:
        raise NotShown("the runs recorded neither held-out loss nor magnitudes")
    figure, axes = panels(losses + len(depths))
    notes = held_out_panel(axes[0], comparison) if losses else ""
    for ax, key in zip(axes[losses:], depths, strict=True):
        panel(ax, comparison, key)
    legend(figure, *axes)
    caption = (
        "Held-out loss over training, and the root mean square of each sublayer's output and of the loss's gradient at "
        f"it, at the end. {MARKS}.{notes}{bands(comparison, depths)}"
    )
    return Plot("dynamics", "Training dynamics", caption, figure)


def over_steps(comparison: Comparison) -> Plot:
    """Draw every quantity that was recorded by depth over all its steps: a panel a run and quantity, depth downwards.

    A run that did not record a quantity has no panel in that row.

    Raises:
        NotShown: no run recorded anything at two steps.
    """
    variants = comparison.having("dynamics").variants
    recorded = [key for one in variants for run in one.dynamics.values() for key in run if key != "steps"]
    known = list(QUANTITIES)
    keys = sorted(dict.fromkeys(recorded), key=lambda key: known.index(key) if key in known else len(known))
    curves = {key: [one.over_steps(key) for one in variants] for key in keys}
    curves = {
        key: parts
        for key, parts in curves.items()
        if any(table.size and table.shape[1] > 1 and np.isfinite(table).any() for _, table in parts)
    }
    if not curves:
        raise NotShown("the runs recorded nothing by depth at more than one step")
    figure, axes = canvas(sheet().page, 1.35 * len(curves) + 0.55, len(curves), len(variants), sharey="row")
    inches = (sheet().page - 1.2) / len(variants)
    for row, (key, parts) in zip(axes, curves.items(), strict=True):
        values = np.concatenate([table[np.isfinite(table)] for _, table in parts if table.size])
        wide = values.min() > 0 and values.max() > quantity(key).log * values.min()
        norm = LogNorm(values.min(), values.max()) if wide else Normalize(min(0.0, values.min()), values.max())
        for ax, (steps, table) in zip(row, parts, strict=True):
            if not table.size:
                ax.set_axis_off()
                continue
            places = np.array(steps, dtype=float)  # a cell reaches half the way to the neighbouring steps
            gap = np.diff(places).mean() if len(places) > 1 else 1.0
            between = [[places[0] - gap / 2], (places[1:] + places[:-1]) / 2, [places[-1] + gap / 2]]
            tops = np.arange(len(table)) - 0.5
            mesh = cells(ax, table, tops=tops, edges=np.concatenate(between), norm=norm, hatched=False)
        row[0].set_ylim(max(len(table) for _, table in parts) - 0.5, -0.5)
        first, each = next(
            (ax, _each(one, len(table))) for ax, one, (_, table) in zip(row, variants, parts, strict=True) if table.size
        )
        step = each * max(1, round(max(len(table) for _, table in parts) / 5 / each))
        row[0].yaxis.set_major_locator(MultipleLocator(step))
        row[0].yaxis.set_major_formatter(FuncFormatter(lambda place, _, each=each: f"{place / each:g}"))
        first.set_ylabel(LAYER)
        first.tick_params(labelleft=True)
        scale(figure, mesh, list(row), quantity(key).axis, aspect=20)
    for column, variant in zip(axes.T, variants, strict=True):
        shown = [ax for ax in column if ax.axison]
        for ax in shown:
            _steps(ax, inches)
            if ax is not shown[-1]:
                ax.set_xlabel("")
                ax.tick_params(labelbottom=False)
        if shown:
            head(shown[0], variant.label, inches=inches - 0.1)
    caption = "By depth (downwards) over the steps of training, on one colour scale a row."
    return Plot("dynamics-steps", "Training dynamics by depth", caption, figure)


def _each(variant: Variant, rows: int) -> int:
    """Return how many of `rows` rows belong to a layer: its sublayers, their reads, or one."""
    sublayers = len(variant.over_steps("output_rms")[1])
    layouts = [inspection.layout for inspection in variant.inspections.values()]
    each = per_layer(layouts[0]) if layouts else 2
    by_sublayer = {sublayers, sublayers + 1, *map(len, layouts)}
    return each if rows in by_sublayer else 1


def _steps(ax: Any, inches: float) -> None:
    ax.set_xlabel(STEP)
    ax.locator_params(axis="x", nbins=max(1, min(4, int(inches / 0.4))))
    numbers_on(ax.xaxis)
