"""What every figure is made with: sizes, names on axes, ticks that do not overlap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from attnres.figures import style

COLUMN, PAGE = 3.3, 6.9
"""Inches: a column and the full width of a two-column paper. Text in figures of this width is 6 to 8 points."""
SMALL = 7.0
"""Points: tick labels and legends of a figure in a paper."""
_SHORT = {"embedding": "emb", "attention": "attn", "output": "out"}


@dataclass(frozen=True)
class Plot:
    """A drawn figure with its file name, title and the sentence under it."""

    name: str
    title: str
    caption: str
    figure: Figure


class NotShown(Exception):
    """A figure does not apply; the message says why."""


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure and its (rows, columns) axes, with text for a paper."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.tick_params(labelsize=SMALL, length=2.5, pad=2)
        ax.xaxis.label.set_size(SMALL + 0.5)
        ax.yaxis.label.set_size(SMALL + 0.5)
    return figure, axes


def head(ax: Axes, text: str, pad: float = 5) -> None:
    """A panel's title."""
    ax.set_title(plain(text), fontsize=8, pad=pad)


def plain(text: str) -> str:
    """Text that Matplotlib shows as it is: a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def short(name: str) -> str:
    """A source's or read's name in a few letters: emb, attn 3, mlp 3, block 2, out."""
    kind, _, number = name.partition(" ")
    return f"{_SHORT.get(kind, kind)} {number}".strip()


def outputs(num_sublayers: int) -> list[str]:
    """Names of the L+1 outputs: embedding, attention 0, mlp 0, ..."""
    return ["embedding"] + [f"{'mlp' if i % 2 else 'attention'} {i // 2}" for i in range(num_sublayers)]


def thin_ticks(axis: Axis, places: Sequence[float], names: Sequence[str], inches: float, size: float = SMALL) -> None:
    """Ticks at `places`, named where there is room: every name, or every second, third, ...; the last one always.

    `inches`: room along the axis. A name beside an axis needs the height of its letters, whichever way it is turned.
    """
    room = inches / max(1, len(places))
    every = max(1, math.ceil(1.25 * size / 72 / room))
    shown = list(range(0, len(places), every))
    last = len(places) - 1
    if shown and shown[-1] != last:
        if last - shown[-1] < every:
            shown.pop()
        shown.append(last)
    axis.set_ticks([places[i] for i in shown], [plain(names[i]) for i in shown], fontsize=size)


def depth_axis(ax: Axes, count: int, *, reads: bool) -> None:
    """The sublayers, or the reads with the output's at the end, along x."""
    last = count - 1
    step = max(1, math.ceil(last / 6 / 2) * 2)
    ticks = [i for i in range(0, count, step) if not reads or last - i >= step * 0.6]
    names = [str(i) for i in ticks]
    if reads:
        ticks, names = [*ticks, last], [*names, "out"]
    ax.set_xticks(ticks, names)
    ax.set_xlabel("sublayer" + (" that reads" if reads else ""))


def depth_line(ax: Axes, values: Sequence[float | None], **look: Any) -> None:
    """A value for each sublayer or read: filled points for attention, hollow for MLPs, a diamond for the output."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
    ax.plot(numbers, linewidth=1.2, **look)
    colour, few = look["color"], len(numbers) < 60
    size = 3.0 if few else 1.6
    hollow: dict[str, Any] = {"markerfacecolor": style.PAPER, "markeredgewidth": 0.9}
    depth = np.arange(len(numbers))
    output = [len(numbers) - 1] if len(numbers) % 2 else []
    inner = len(numbers) - len(output)
    ax.plot(depth[0:inner:2], numbers[0:inner:2], "o", color=colour, markersize=size)
    ax.plot(depth[1:inner:2], numbers[1:inner:2], "o", color=colour, markersize=size, **hollow)
    ax.plot(output, numbers[output], "D", color=colour, markersize=size + 0.6)


def log_if_wide(ax: Axes, values: Sequence[float], factor: float = 6.0) -> None:
    """A logarithmic y where the values span more than `factor`, with plain numbers on it."""
    numbers = np.array([value for value in values if value is not None], dtype=float)
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not len(numbers) or numbers.max() <= factor * numbers.min():
        ax.set_ylim(bottom=0)
        return
    ax.set_yscale("log")
    decades = math.log10(numbers.max() / numbers.min())
    subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    if numbers.min() >= 1e-3 and numbers.max() < 1e5:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, ax: Axes) -> None:
    """One legend above the whole figure, if there is more than one line to tell apart."""
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        longest = max(len(label) for label in labels)
        columns = max(1, min(len(labels), int(figure.get_figwidth() * 16 / (longest + 6))))
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=SMALL + 0.5)


def number(value: float) -> str:
    """Two digits without the leading zero, for a cell: .07, 1, -.3."""
    text = f"{value:.2f}"
    return {"1.00": "1", "0.00": "0", "-0.00": "0"}.get(text) or text.replace("0.", ".", 1)
