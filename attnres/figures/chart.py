"""Charts of a study, given as data: curves, differences with the band that noise makes, and grids of numbers."""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from attnres.figures import style
from attnres.figures.cells import readable_on
from attnres.figures.plot import (
    COLUMN,
    PAGE,
    SMALL,
    Plot,
    canvas,
    fit,
    head,
    legend,
    log_numbers,
    numbers_on,
    plain,
)
from attnres.inspect.colours import LESS, MORE
from attnres.residuals import RESIDUALS, residual_class
from attnres.text import number, tick

COLOURS = ("#4a5260", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", *style.OTHERS)
"""Of a chart's lines that are of no mechanism, in order (Okabe & Ito, then the house's others)."""

HEIGHT = 2.4
"""Inches, of panels with curves."""

FEW = 8
"""Places on a logarithmic axis up to which each has its number."""
NEAR = 0.1
"""Of an axis, within which two names would run into each other."""


@dataclass(frozen=True)
class Line:
    """One curve. `low` and `high` make a band; `joined` is False for points that no line joins."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    joined: bool = True
    dashed: bool = False

    @classmethod
    def through(cls, label: str, points: Sequence[tuple[float, float]]) -> "Line":
        """The line through points (x, y)."""
        return cls(label, [x for x, _ in points], [y for _, y in points])


@dataclass(frozen=True)
class Curves:
    """Lines in one or several panels that share their y axis: title of the panel -> its lines."""

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    panels: dict[str, list[Line]]
    log_x: bool = False
    log_y: bool = False
    zero: bool = False
    """Draw the line y = 0."""

    def draw(self) -> Plot:
        """Draw it inside `style.style`. A line has one colour in all panels, a mechanism its own."""
        several = len(self.panels) > 1
        figure, axes = canvas(PAGE if several else COLUMN, HEIGHT, 1, len(self.panels), sharey=True)
        looks = _looks(list(dict.fromkeys(line.label for lines in self.panels.values() for line in lines)))
        for ax, (title, lines) in zip(axes[0], self.panels.items(), strict=True):
            if several:
                head(ax, title, inches=PAGE / len(self.panels) - 0.5)
            if self.zero:
                ax.axhline(0, color=style.MUTED, linewidth=0.9)
            for line in lines:
                look = {**looks[line.label], "linewidth": 1.2, "markersize": 3, "label": plain(line.label)}
                look["marker"] = "o" if len(line.x) < 40 and not line.dashed else ""
                if line.low:
                    ax.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.18, linewidth=0)
                if line.dashed or not line.joined:
                    look["linestyle"] = style.DASHES[1] if line.joined else ""
                ax.plot(line.x, line.y, **look)
            if self.log_x:
                ax.set_xscale("log")
                log_numbers(ax.xaxis, *ax.get_xlim())
                places = sorted({x for line in lines if not line.dashed for x in line.x})
                if len(places) <= FEW and places and places[-1] < 1e9:
                    ax.set_xticks(places, _names_apart(places))
            else:
                numbers_on(ax.xaxis)
            if self.log_y:
                ax.set_yscale("log")
                log_numbers(ax.yaxis, *ax.get_ylim())
            elif self.zero:
                numbers_on(ax.yaxis)
            ax.set_xlabel(self.x_label)
        axes[0, 0].set_ylabel(fit(self.y_label, HEIGHT - 0.3, SMALL))
        legend(figure, *axes[0])
        return Plot(self.name, self.title, self.caption, figure)


@dataclass(frozen=True)
class Differences:
    """Differences to a baseline, one a row: (label, difference, standard error), and the threshold of a verdict.

    The threshold is one a row; what is not known (NaN or infinity) draws nothing. A band that is far wider than all
    differences, as of two seeds that lie apart, ends at the edge of the chart.
    """

    name: str
    title: str
    caption: str
    x_label: str
    rows: list[tuple[str, float, float]]
    threshold: Sequence[float] = field(default_factory=tuple)

    def draw(self) -> Plot:
        """Draw it inside `style.style`, the best at the top; the caption says what its marks are."""
        order = sorted(range(len(self.rows)), key=lambda row: -self.rows[row][1])
        figure, axes = canvas(COLUMN * 1.35, 0.6 + 0.19 * len(order))
        ax = axes[0, 0]
        reach = self._reach()
        for place, row in enumerate(order):
            _, difference, error = self.rows[row]
            limit = self.threshold[row] if len(self.threshold) else math.nan
            if math.isfinite(limit):
                band = min(limit, reach)
                ax.fill_betweenx([place - 0.4, place + 0.4], -band, band, color=style.MUTED, alpha=0.18, linewidth=0)
            clear = math.isfinite(limit) and abs(difference) > limit
            colour = style.MUTED if not clear else MORE if difference < 0 else LESS
            ax.errorbar(
                difference,
                place,
                xerr=error if math.isfinite(error) else None,
                fmt="o",
                markersize=3.2,
                color=colour,
                linewidth=1.1,
            )
        ax.axvline(0, color=style.MUTED, linewidth=0.9)
        ax.set_yticks(range(len(order)), [plain(self.rows[row][0]) for row in order], fontsize=SMALL)
        ax.set_ylim(-0.7, len(order) - 0.3)
        ax.set_xlabel(self.x_label)
        numbers_on(ax.xaxis)
        if any(limit > reach for limit in self.threshold):
            ax.set_xlim(-reach, reach)
        caption = f"{self.caption} Bars: one standard error either way."
        if any(map(math.isfinite, self.threshold)):
            caption += " Blue: better, orange: worse, by more than the grey band."
        return Plot(self.name, self.title, caption, figure)

    def _reach(self) -> float:
        """How far from zero the chart shows: all differences with their errors, and twice the median threshold; without
        end where that is nothing."""
        known = [(difference, error) for _, difference, error in self.rows if math.isfinite(difference)]
        ends = [abs(difference) + (error if math.isfinite(error) else 0.0) for difference, error in known]
        limits = [limit for limit in self.threshold if math.isfinite(limit)]
        shown = max([2 * statistics.median(limits or [0.0]), *ends])
        return 1.1 * shown or math.inf


@dataclass(frozen=True)
class Grid:
    """Numbers over two settings: title of a panel -> (rows, columns), NaN where there is none; the lowest of each row
    is framed."""

    name: str
    title: str
    caption: str
    row_label: str
    rows: list[str]
    column_label: str
    columns: list[str]
    panels: dict[str, np.ndarray]

    def draw(self) -> Plot:
        """Draw it inside `style.style`; all panels have one colour scale."""
        figure, axes = canvas(PAGE, 0.9 + 0.3 * len(self.rows), 1, len(self.panels), sharey=True)
        values = np.concatenate([panel[np.isfinite(panel)] for panel in self.panels.values()])
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        for ax, (title, panel) in zip(axes[0], self.panels.items(), strict=True):
            image = ax.imshow(panel, cmap="viridis_r", vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
            ax.grid(False)
            for (row, column), value in np.ndenumerate(panel):
                if math.isfinite(value):
                    text, colour = number(value, 3), readable_on(image.to_rgba(value))
                    ax.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
            for row in np.flatnonzero(np.isfinite(panel).any(1)):
                column = np.nanargmin(panel[row])
                box = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)]) + (column, row)
                ax.plot(*box.T, color=COLOURS[2], linewidth=1.6, clip_on=False)
            head(ax, title)
            ax.set_xticks(range(len(self.columns)), self.columns)
            ax.set_xlabel(self.column_label)
        axes[0, 0].set_yticks(range(len(self.rows)), self.rows)
        axes[0, 0].set_ylabel(self.row_label)
        axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda place, _: self.rows[round(place)]))
        return Plot(self.name, self.title, self.caption, figure)


Chart = Curves | Differences | Grid


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dash of each line: its mechanism's where all labels begin with one's name, else one after another."""
    names = {label: re.split(r"[-, ]", label)[0] for label in labels}
    if all(name in RESIDUALS for name in names.values()):
        return style.looks({label: (name, residual_class(name).traits) for label, name in names.items()})
    rounds = [(label, *divmod(place, len(COLOURS))) for place, label in enumerate(labels)]
    dashes = style.DASHES
    return {label: {"color": COLOURS[place], "linestyle": dashes[turn % len(dashes)]} for label, turn, place in rounds}


def _names_apart(places: Sequence[float]) -> list[str]:
    """Names of places on a logarithmic axis, none for one that is too near to the last that has one.

    >>> _names_apart([0.1, 0.333, 0.5, 1, 10])
    ['0.1', '0.333', '', '1', '10']
    """
    names, last = [], 0.0
    for place in places:
        near = last > 0 and math.log(place / last) < NEAR * math.log(places[-1] / places[0])
        names.append("" if near else tick(place))
        last = last if near else place
    return names
