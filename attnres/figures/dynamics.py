"""Training dynamics (the paper's Fig. 5): loss, and magnitudes by depth, over the steps of the runs of a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import MaxNLocator

from attnres.figures import style
from attnres.figures.plot import (
    PAGE,
    SMALL,
    NotShown,
    Plot,
    canvas,
    depth_axis,
    depth_line,
    head,
    legend,
    log_if_wide,
    plain,
)

DEPTH = {
    "output_rms": "RMS of outputs",
    "grad_rms": "RMS of gradients",
    "entropy": "entropy of reads (nats)",
    "sharpness": "sharpness |w g| √d",
    "recency_bias": "bias of the last source",
    "gate": "gate: share of the read",
    "alpha": "alpha",
}
"""What runs record by depth, as `attnres.inspect.measures.dynamics` names it."""


@dataclass(frozen=True)
class Curves:
    """One run: its label and residual, held-out loss, and rows by depth.

    Attributes:
        loss: (step, nats per token) pairs.
        dynamics: `steps` and, for each quantity, a row for each step.
    """

    label: str
    residual: str
    loss: list[tuple[int, float]] = field(default_factory=list)
    dynamics: Mapping[str, Any] = field(default_factory=dict)


def dynamics(runs: Sequence[Curves]) -> Plot:
    """Held-out loss over steps, and output and gradient magnitude by depth at the last step; a line a run."""
    depths = [name for name in ("output_rms", "grad_rms") if any(_rows(run, name) for run in runs)]
    losses = any(len(run.loss) > 1 for run in runs)
    if not losses and not depths:
        raise NotShown("the runs recorded neither held-out loss nor magnitudes")
    figure, axes = canvas(PAGE, 2.15, 1, losses + len(depths))
    looks = style.looks({str(i): run.residual for i, run in enumerate(runs)})
    panels = list(axes[0])
    lines = [(run, {**looks[str(i)], "label": plain(run.label)}) for i, run in enumerate(runs)]
    if losses:
        ax = panels.pop(0)
        late: list[float] = []
        for run, look in lines:
            ax.plot(*zip(*run.loss), linewidth=1.2, marker="o", markersize=2.2, **look)
            late += [loss for step, loss in run.loss if step >= run.loss[-1][0] / 5]
        pad = 0.08 * (max(late) - min(late)) or 0.1
        ax.set_ylim(min(late) - pad, max(late) + pad)
        _steps(ax)
        ax.set_ylabel("held-out loss (nats)")
    for ax, name in zip(panels, depths, strict=True):
        everything: list[float] = []
        for run, look in lines:
            rows = _rows(run, name)
            if rows:
                depth_line(ax, rows[-1], **look)
                everything += rows[-1]
        log_if_wide(ax, everything)
        depth_axis(ax, max(len(line.get_xdata()) for line in ax.get_lines()), reads=False)
        ax.set_ylabel(DEPTH[name])
    legend(figure, *axes.flat)
    caption = (
        "Held-out loss over training, and the root mean square of each sublayer's output and of the loss's gradient at "
        "it, at the last measurement. Filled points: attention, hollow: MLP."
    )
    return Plot("dynamics", "Training dynamics", caption, figure)


def over_steps(runs: Sequence[Curves]) -> Plot:
    """Every quantity that was recorded by depth over all its steps: a panel a run and quantity, depth downwards.

    A run that did not record a quantity has no panel in that row.
    """
    found = {name: [np.array(_rows(run, name), dtype=float).T for run in runs] for name in DEPTH}
    found = {
        name: tables
        for name, tables in found.items()
        if any(table.size and table.shape[1] > 1 and np.isfinite(table).any() for table in tables)
    }
    if not found:
        raise NotShown("the runs recorded nothing by depth at more than one step")
    figure, axes = canvas(PAGE, 1.35 * len(found) + 0.55, len(found), len(runs), sharey="row")
    inches = (PAGE - 1.2) / len(runs)
    for row, (name, tables) in zip(axes, found.items(), strict=True):
        values = np.concatenate([table[np.isfinite(table)] for table in tables if table.size])
        wide = values.min() > 0 and values.max() > 6 * values.min()
        norm = LogNorm(values.min(), values.max()) if wide else Normalize(min(0.0, values.min()), values.max())
        for ax, run, table in zip(row, runs, tables, strict=True):
            if not table.size:
                ax.set_axis_off()
                continue
            steps = np.array(run.dynamics["steps"], dtype=float)
            gap = np.diff(steps).mean() if len(steps) > 1 else 1.0
            mesh = ax.pcolormesh(
                np.concatenate([[steps[0] - gap / 2], (steps[1:] + steps[:-1]) / 2, [steps[-1] + gap / 2]]),
                np.arange(len(table) + 1) - 0.5,
                np.ma.masked_invalid(table),
                norm=norm,
                cmap="viridis",
                rasterized=True,
            )
            ax.grid(visible=False)
        row[0].set_ylim(max(len(table) for table in tables) - 0.5, -0.5)
        row[0].yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        first = next(ax for ax, table in zip(row, tables, strict=True) if table.size)
        first.set_ylabel("sublayer" if name in ("output_rms", "grad_rms") else "read")
        first.tick_params(labelleft=True)
        bar = figure.colorbar(mesh, ax=list(row), fraction=0.03, pad=0.015)
        bar.set_label(DEPTH[name], fontsize=SMALL)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, which="both", labelsize=SMALL)
    for column, run in zip(axes.T, runs, strict=True):
        shown = [ax for ax in column if ax.axison]
        for ax in shown:
            _steps(ax, inches)
            if ax is not shown[-1]:
                ax.set_xlabel("")
                ax.tick_params(labelbottom=False)
        if shown:
            head(shown[0], run.label, inches=inches - 0.1)
    caption = "By depth (downwards) over the steps of training, on one colour scale a row."
    return Plot("dynamics-steps", "Training dynamics by depth", caption, figure)


def _rows(run: Curves, name: str) -> list[list[float]]:
    """A quantity's rows, without those of steps at which it was not measured."""
    rows = run.dynamics.get(name) or []
    return rows if all(rows) else []


def _steps(ax: Any, inches: float = 2.0) -> None:
    ax.set_xlabel("step")
    ax.locator_params(axis="x", nbins=max(1, min(4, int(inches / 0.4))))
