"""Training dynamics (the paper's Fig. 5): loss, and magnitudes by depth, over the steps of the runs of a comparison."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from attnres.figures.comparison import Comparison, Variant
from attnres.figures.depth import MARKS, QUANTITIES, bands, panel, quantity, rows
from attnres.figures.losses import held_out_panel
from attnres.figures.plot import (
    LAYER,
    LOSS,
    PAGE,
    SMALL,
    STEP,
    NotShown,
    Plot,
    canvas,
    fit,
    head,
    legend,
    log_numbers,
    numbers_on,
    panels,
    per_layer,
)


def dynamics(comparison: Comparison) -> Plot:
    """Draw held-out loss over training, and output and gradient magnitude by depth at its end.

    Raises:
        NotShown: the runs recorded none of it.
    """
    depths = [
        key for key in ("output_rms", "grad_rms") if any(rows(one, key) is not None for one in comparison.variants)
    ]
    losses = any(len(points) > 1 for one in comparison.variants for points in one.held_out.values())
    if not losses and not depths:
        raise NotShown("the runs recorded neither held-out loss nor magnitudes")
    figure, axes = panels(losses + len(depths))
    notes = held_out_panel(axes[0], comparison) if losses else ""
    if losses:
        axes[0].set_ylabel(fit(LOSS, 1.5, SMALL))
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
    figure, axes = canvas(PAGE, 1.35 * len(curves) + 0.55, len(curves), len(variants), sharey="row")
    inches = (PAGE - 1.2) / len(variants)
    for row, (key, parts) in zip(axes, curves.items(), strict=True):
        values = np.concatenate([table[np.isfinite(table)] for _, table in parts if table.size])
        wide = values.min() > 0 and values.max() > quantity(key).log * values.min()
        norm = LogNorm(values.min(), values.max()) if wide else Normalize(min(0.0, values.min()), values.max())
        for ax, (steps, table) in zip(row, parts, strict=True):
            if not table.size:
                ax.set_axis_off()
                continue
            mesh = _draw_table(ax, np.array(steps, dtype=float), table, norm)
        row[0].set_ylim(max(len(table) for _, table in parts) - 0.5, -0.5)
        first, each = next(
            (ax, _each(one, len(table))) for ax, one, (_, table) in zip(row, variants, parts, strict=True) if table.size
        )
        step = each * max(1, round(max(len(table) for _, table in parts) / 5 / each))
        row[0].yaxis.set_major_locator(MultipleLocator(step))
        row[0].yaxis.set_major_formatter(FuncFormatter(lambda place, _, each=each: f"{place / each:g}"))
        first.set_ylabel(LAYER)
        first.tick_params(labelleft=True)
        _add_bar(figure, mesh, row, quantity(key).axis)
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


def _draw_table(ax: Axes, steps: np.ndarray, table: np.ndarray, norm: Normalize) -> QuadMesh:
    """Draw a (rows by depth, steps) table, each cell as wide as half the way to the steps beside it."""
    gap = np.diff(steps).mean() if len(steps) > 1 else 1.0
    ax.grid(visible=False)
    return ax.pcolormesh(
        np.concatenate([[steps[0] - gap / 2], (steps[1:] + steps[:-1]) / 2, [steps[-1] + gap / 2]]),
        np.arange(len(table) + 1) - 0.5,
        np.ma.masked_invalid(table),
        norm=norm,
        cmap="viridis",
        rasterized=True,
    )


def _add_bar(figure: Figure, mesh: QuadMesh, row: Sequence[Axes], words: str) -> None:
    """Add the colour scale of a row of panels."""
    bar = figure.colorbar(mesh, ax=list(row), fraction=0.03, pad=0.015)
    bar.set_label(words, fontsize=SMALL)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, which="both", labelsize=SMALL)
    if isinstance(mesh.norm, LogNorm):
        log_numbers(bar.ax.yaxis, *bar.ax.get_ylim())
    else:
        numbers_on(bar.ax.yaxis)


def _each(variant: Variant, rows: int) -> int:
    """How many rows a layer has: those of its sublayers, or of their reads, or one."""
    sublayers = len(variant.over_steps("output_rms")[1])
    layouts = [inspection.layout for inspection in variant.inspections.values()]
    each = per_layer(layouts[0]) if layouts else 2
    by_sublayer = {sublayers, sublayers + 1, *map(len, layouts)}
    return each if rows in by_sublayer else 1


def _steps(ax: Any, inches: float) -> None:
    ax.set_xlabel(STEP)
    ax.locator_params(axis="x", nbins=max(1, min(4, int(inches / 0.4))))
    numbers_on(ax.xaxis)
