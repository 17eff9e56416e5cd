"""What each read is like, by depth: how many sources it spreads over, how far back it reaches, how large they are."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.figures import style
from attnres.figures.plot import (
    PAGE,
    NotShown,
    Plot,
    canvas,
    depth_axis,
    depth_line,
    from_zero,
    legend,
    log_if_wide,
    plain,
    short,
    thin_ticks,
)

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

_MARKS = "Filled points: attention, hollow: MLP, diamond: the output."


def measures(inspections: Sequence["Inspection"]) -> Plot:
    """Effective number of sources, effective depth distance, embedding persistence, sharpness; a line a model.

    Formulas: `attnres.inspect.measures` and `attnres.inspect.geometry`.
    """
    panels: list[tuple[str, Callable[[Any], Any], Callable[[Any], np.ndarray] | None]] = [
        ("effective number of sources", lambda seen: seen.entropy["effective"], None),
        ("effective depth distance", lambda seen: seen.distance, lambda depth: depth / 2),
        ("share of the embedding", lambda seen: seen.persistence, lambda depth: 1 / (depth + 1)),
        ("sharpness |w g| √d", lambda seen: seen.sharpness, None),
    ]
    panels = [panel for panel in panels if any(_any(panel[1](seen)) for seen in inspections)]
    if not panels:
        raise NotShown("nothing of it is measured for this residual")
    rows = 2 if len(panels) == 4 else 1
    figure, axes = canvas(PAGE, 1.9 * rows + 0.25, rows, len(panels) // rows)
    looks = model_looks(inspections)
    for ax, (what, values, plain_residual) in zip(axes.flat, panels):
        deepest = max(len(seen.reads) for seen in inspections)
        everything: list[float] = []
        for seen, look in zip(inspections, looks, strict=True):
            row = values(seen)
            if not _any(row):
                continue
            depth_line(ax, row, **look)
            everything += [value for value in row if value]
            if what == "effective number of sources" and len(inspections) == 1:
                most = [float(count) if count else np.nan for count in seen.entropy["most"]]
                ax.step(range(len(most)), most, where="mid", color=style.MUTED, linewidth=0.9, linestyle=":")
        if plain_residual is not None:
            depth = np.arange(deepest)
            ax.plot(depth, plain_residual(depth), color=style.MUTED, linewidth=0.9, linestyle=":", zorder=1)
        ax.set_ylabel(what)
        depth_axis(ax, deepest, reads=True)
        if what == "share of the embedding":
            log_if_wide(ax, everything, 15)
        else:
            from_zero(ax)
    legend(figure, *axes.flat)
    meant = {
        "effective number of sources": "Effective number of sources: exp of the mean entropy of the weights. ",
        "effective depth distance": "Distance: mean number of sublayers between a read and what it reads. ",
        "sharpness |w g| √d": "Sharpness: the largest logit that a query can give. ",
    }
    caption = "".join(meant.get(panel[0], "") for panel in panels)
    dots = "a plain residual" + (", and as many sources as there are" if len(inspections) == 1 else "")
    caption += f"Dotted: {dots}. {_MARKS}"
    return Plot(*_name(inspections, "depth", "reads by depth"), caption, figure)


def magnitudes(inspections: Sequence["Inspection"]) -> Plot:
    """RMS of what sublayers write and of what reads make; of one model also that of the last read's sources."""
    seen = inspections[0]
    last = last_sources(seen) if len(inspections) == 1 else None
    figure, axes = canvas(PAGE, 2.15, 1, 3 if last else 2, width_ratios=[1, 1, 1.15] if last else [1, 1])
    looks = model_looks(inspections)
    for ax, name, what in ((axes[0, 0], "output_rms", "RMS of outputs"), (axes[0, 1], "input_rms", "RMS of reads")):
        rows = [getattr(one, name) for one in inspections]
        for row, look in zip(rows, looks, strict=True):
            depth_line(ax, row, **look)
        log_if_wide(ax, [value for row in rows for value in row])
        depth_axis(ax, max(len(row) for row in rows), reads=name == "input_rms")
        ax.set_ylabel(what)
    if last:
        names, rms = last
        ax, places = axes[0, 2], np.arange(len(names))
        ax.plot(places, rms, "o", color=looks[0]["color"], markersize=3 if len(names) < 60 else 1.6)
        log_if_wide(ax, rms)
        ax.set_ylabel("RMS of sources")
        thin_ticks(ax.xaxis, places.tolist(), [short(name) for name in names], 1.7)
        for tick in ax.get_xticklabels():
            tick.set(rotation=90, ha="center")
        ax.grid(visible=False, axis="x")
    legend(figure, *axes.flat)
    caption = f"Root mean square of what each sublayer writes and of what each read makes, before its norm. {_MARKS}"
    if last:
        caption += " Right: the sources of the last read; keys are normed and values are not, so a large one fills it."
    return Plot(*_name(inspections, "magnitudes", "magnitudes by depth"), caption, figure)


def model_looks(inspections: Sequence["Inspection"]) -> list[dict[str, Any]]:
    """Line keywords of each model: the colour of its residual, its name as the label."""
    looks = style.looks({str(i): seen.model["residual"] for i, seen in enumerate(inspections)})
    return [{**looks[str(i)], "label": plain(str(seen.model["name"]))} for i, seen in enumerate(inspections)]


def last_sources(seen: "Inspection") -> tuple[list[str], list[float]] | None:
    """Names and RMS of the sources of the last read with a softmax and more than one source."""
    if seen.routing is None:
        return None
    for read in range(len(seen.routing["reads"]) - 1, -1, -1):
        names = seen.routing["sources"][read]
        if read < len(seen.source_rms) and len(seen.source_rms[read]) == len(names) > 1:
            return names, seen.source_rms[read]
    return None


def _any(row: Sequence[float | None] | None) -> bool:
    return row is not None and any(value is not None for value in row)


def _name(inspections: Sequence["Inspection"], name: str, title: str) -> tuple[str, str]:
    if len(inspections) == 1:
        return name, f"{inspections[0].model['name']}: {title}"
    return f"compare-{name}", f"models: {title}"
