"""Parts of every figure: sizes, axis names, ticks that do not overlap."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from attnres.figures import style
from attnres.figures.style import sheet
from attnres.residuals import Read, Source
from attnres.text import tick

LINE = 1.12
"""Room along an axis that a tick's name needs, as a multiple of its font size."""
OUT = 0.2
"""Smallest distance in inches between the middle of the label "out" under an axis and a number beside it."""
CONSTANT = 0.05
"""A panel of contributions or weights that vary by less is left out."""
NOTEBOOK_DPI = 130
LOWER = "\n(lower is better)"
LOSS, TRAIN_LOSS = f"held-out loss, nats per token{LOWER}", f"training loss, nats per token{LOWER}"
DIFFERENCE = f"difference, nats per token{LOWER}"
STEP, TOKENS, RATE, LAYER = "step", "training tokens", "peak learning rate", "layer"
"""Names beside axes."""


@dataclass(frozen=True)
class Plot:
    """A drawn figure with its file name, title and caption."""

    name: str
    title: str
    caption: str
    figure: Figure

    def _repr_png_(self) -> bytes:
        """Return the PNG that a notebook displays."""
        out = io.BytesIO()
        FigureCanvasAgg(self.figure)
        self.figure.savefig(out, format="png", dpi=NOTEBOOK_DPI, facecolor=style.PAPER)
        return out.getvalue()


class NotShown(Exception):
    """Raised if a figure does not apply; the message gives the reason."""


def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, *, used: int | None = None, **options: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure and its (rows, columns) axes with text sizes for a paper; larger text makes the figure higher.
    Axes after the first `used` are removed."""
    figure = Figure(figsize=(width, height * max(1.0, sheet().scale)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.tick_params(labelsize=sheet().font, length=2.5, pad=2)
        ax.xaxis.label.set_size(sheet().font + 0.5)
        ax.yaxis.label.set_size(sheet().font + 0.5)
    for ax in axes.flat[used:] if used is not None else ():
        ax.remove()
    return figure, axes


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels: one in a column's width, up to three side by side, more in two rows, or in
    more rows on a narrow sheet."""
    rows = max(2 if count > 3 else 1, math.ceil(count / side_by_side()))
    width, height = (sheet().column, 2.15) if count == 1 else (sheet().page, 1.9)
    figure, axes = canvas(width, height * rows + 0.25, rows, math.ceil(count / rows), used=count)
    return figure, list(axes.flat[:count])


def varies(values: np.ndarray) -> bool:
    """Return whether contributions or weights vary enough for a panel of their own; NaN is ignored."""
    return bool(np.nanmax(values) - np.nanmin(values) > CONSTANT)


def side_by_side(inches: float = 2.1) -> int:
    """Return how many panels of a width in inches fit side by side on the sheet, at least one."""
    return max(1, int((sheet().page + 0.01) / inches))


def head(ax: Axes, text: str, pad: float = 5, inches: float | None = None) -> None:
    """Set a panel's title, broken into lines and shortened where it would be wider than `inches`."""
    size = sheet().font + 1
    ax.set_title(plain(text if inches is None else fit(text, inches, size)), fontsize=size, pad=pad)


def edge_head(ax: Axes, read: Read, source: Source, inches: float, after: str = "", pad: float = 5) -> None:
    """Set the title of a panel about one source of one read; the source goes on a second line if both are wider than
    `inches`."""
    text = plain(f"{read.label} ← {source.label}{after}")
    wide = len(text) * 0.62 * (sheet().font + 1) / 72 > inches
    ax.set_title(text.replace(" ← ", "\n← ") if wide else text, fontsize=sheet().font + 1, pad=pad)


def fit(text: str, inches: float, size: float = 8.0) -> str:
    """Return `text` in at most three lines of bold letters no wider than `inches`; the middle of longer text is left
    out. Existing line breaks stay.

    >>> fit("block-num_blocks4-seed0", 1.0)
    'block-num_\\nblocks4-seed0'
    """
    if "\n" in text:
        return "\n".join(fit(line, inches, size) for line in text.split("\n"))
    room = max(4, int(inches * 72 / (0.68 * size)))
    lines = []
    while len(text) > room and len(lines) < 2:
        ends = [i for i in range(room // 2, room + 1) if text[i - 1] in "-_. :/,"]
        cut = ends[-1] if ends else room
        lines.append(text[:cut])
        text = text[cut:]
    return "\n".join([*lines, text if len(text) <= room else "…" + text[1 - room :]])


def plain(text: str) -> str:
    """Return text that Matplotlib shows unchanged: a dollar sign starts no formula."""
    return text.replace("$", r"\$")


def thin_ticks(axis: Axis, places: Sequence[float], names: Sequence[str], inches: float) -> None:
    """Set ticks at `places` with their names. If not all names fit, even in the sheet's `smallest` font, only every
    third, fifth, ... place has a tick, so that attention and MLPs are both named; the last place always has one.

    `inches`: room along the axis. A name needs the height of its letters there, whichever way it is turned.
    """
    room = inches / max(1, len(places))
    size = min(sheet().font, max(sheet().smallest, 72 * room / LINE))
    every = max(1, math.ceil(LINE * size / 72 / room - 1e-9))
    every += every % 2 == 0
    shown = list(range(0, len(places), every))
    last = len(places) - 1
    if shown and shown[-1] != last:
        if last - shown[-1] < every:
            shown.pop()
        shown.append(last)
    axis.set_ticks([places[i] for i in shown], [plain(names[i]) for i in shown], fontsize=size)


def depth_axis(ax: Axes, count: int, *, reads: bool, each: int = 2) -> None:
    """Label depth along x: sublayers, or reads with the output's at the end, by the numbers of their layers.

    Args:
        count: number of values, from the first sublayer. each: sublayers in a layer; the tick is at the first one.
    """
    last = count - 1
    step = each * max(1, math.ceil(last / 6 / each))
    near = OUT / (ax.get_window_extent().width / ax.figure.dpi) * 1.08 * count
    ticks = [i for i in range(0, count, step) if not reads or last - i >= near]
    ax.set_xlim(-0.04 * count, last + 0.04 * count)
    names = [str(i // each) for i in ticks]
    if reads:
        ticks, names = [*ticks, last], [*names, "out"]
    ax.set_xticks(ticks, names)
    ax.set_xlabel(LAYER + (" that reads" if reads else ""))


def per_layer(layout: Sequence[Read]) -> int:
    """Return the number of sublayers in a layer."""
    return max(1, len({read.kind for read in layout if read.number == 0}))


def spread(sublayers: Sequence[int]) -> np.ndarray:
    """Return the place of each read on an axis of sublayers; several reads of a sublayer are spread around it.

    >>> spread([0, 1, 1, 2]).tolist()
    [0.0, 0.75, 1.25, 2.0]
    """
    counts = np.bincount(sublayers)[np.asarray(sublayers)]
    order = np.array([list(sublayers[:place]).count(sublayer) for place, sublayer in enumerate(sublayers)])
    return np.asarray(sublayers) + (order - (counts - 1) / 2) / counts


def depth_line(
    ax: Axes,
    values: Sequence[float | None] | np.ndarray,
    sublayers: Sequence[int] | None = None,
    *,
    each: int,
    **look: Any,
) -> None:
    """Draw a value for each sublayer or read: filled points for the first sublayer of a layer (attention), hollow
    points for the others, a diamond for the output.

    For several seeds (seeds, depth), draw the mean and a band from the smallest to the largest value.

    Args:
        sublayers: the sublayer of each value (L: the output); None is one value each. Several values of a sublayer each
            have a point, and the line passes through their mean.
        each: number of sublayers in a layer.
    """
    table = np.atleast_2d(np.array(values, dtype=float))
    numbers = table.mean(0)
    sublayer_of = np.arange(len(numbers)) if sublayers is None else np.asarray(sublayers)
    depth, places = np.unique(sublayer_of), spread(sublayer_of.tolist())
    colour, few = look["color"], len(numbers) < 60

    def means(row: np.ndarray) -> list[float]:
        return [row[sublayer_of == sublayer].mean() for sublayer in depth]

    if len(table) > 1:
        ax.fill_between(depth, means(table.min(0)), means(table.max(0)), color=colour, alpha=0.15, linewidth=0)
    ax.plot(depth, means(numbers), linewidth=1.2, **look)
    size = 3.0 if few else 1.6
    hollow: dict[str, Any] = {"markerfacecolor": style.PAPER, "markeredgewidth": 0.9}
    output = sublayer_of == len(depth) - 1 if len(depth) % each else np.zeros(len(sublayer_of), dtype=bool)
    dots: dict[str, Any] = {"color": colour, "clip_on": False, "in_layout": False, "zorder": 3}
    for where, mark, more in (
        (~output & (sublayer_of % each == 0), "o", {"markersize": size}),
        (~output & (sublayer_of % each > 0), "o", {"markersize": size, **hollow}),
        (output, "D", {"markersize": size + 0.6}),
    ):
        ax.plot(places[where], numbers[where], mark, **dots, **more)


def log_if_wide(ax: Axes, values: Sequence[float] | np.ndarray, factor: float = 6.0) -> None:
    """Make the y axis logarithmic if the values span more than `factor`; else let it begin at zero."""
    numbers = np.array(values, dtype=float)
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not len(numbers) or numbers.max() <= factor * numbers.min():
        from_zero(ax)
        return
    ax.set_yscale("log")
    log_numbers(ax.yaxis, numbers.min(), numbers.max())


def numbers_on(axis: Axis) -> None:
    """Format the numbers as `tick` does, on an axis that contains zero or has round ticks."""
    axis.set_major_formatter(lambda value, _: tick(value))


def log_numbers(axis: Axis, low: float, high: float) -> None:
    """Put ticks on a logarithmic axis from `low` to `high`: at powers of ten, below three decades also at 2 and 5 times
    these, and evenly spaced if the range is too short for those."""
    if high > 5 * low:
        subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
        axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
        numbers_on(axis)
    else:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(ScalarFormatter(useOffset=False))
    axis.set_minor_formatter(NullFormatter())


def limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Return axis limits that contain the values with a margin; None without values."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    room = 0.06 * (max(values) - min(values)) or 0.01
    return min(values) - room, max(values) + room


def beside(values: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Clip the ends of intervals to half the values' range beyond the values: with two seeds an interval may be tens of
    times wider, and would hide everything else."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    reach = (high - low) / 2 or math.inf
    return [edge if math.isnan(edge) else min(max(edge, low - reach), high + reach) for edge in edges]


def from_zero(ax: Axes) -> None:
    """Let the y axis begin at zero, or a little below the smallest drawn value if all are far from zero."""
    low, top = ax.dataLim.y0, ax.dataLim.y1
    ax.set_ylim(min(0.0, 1.06 * low) if math.isfinite(low) else 0, 1.06 * top if top > 0 else 1)
    numbers_on(ax.yaxis)


def legend(figure: Figure, *axes: Axes) -> None:
    """Draw one legend above the whole figure, if there are several lines, of the lines of all axes; the figure grows by
    the legend's rows."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if len(entries) < 2:
        return
    names = [name if len(name) <= 60 else f"{name[:29]}…{name[-30:]}" for name in entries]
    columns = max(1, min(len(names), int(figure.get_figwidth() * 17.5 / (max(map(len, names)) + 6))))
    rows = math.ceil(len(names) / columns)
    columns = math.ceil(len(names) / rows)
    figure.set_figheight(figure.get_figheight() + 0.16 * (rows - 1))
    look: dict[str, Any] = {"fontsize": sheet().font + 0.5, "handlelength": 1.4, "columnspacing": 1.0}
    figure.legend(list(entries.values()), names, loc="outside upper left", ncols=columns, **look)
