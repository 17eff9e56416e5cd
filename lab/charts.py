"""Charts of a study, given as data: curves, and (`attnres.figures.comparison`) differences with their intervals."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnres.figures import style
from attnres.figures.comparison import Differences
from attnres.figures.plot import Plot, canvas, fit, head, legend, log_numbers, numbers_on, plain
from attnres.figures.style import sheet
from attnres.residuals import RESIDUALS, residual_class
from attnres.text import tick

COLOURS = ("#4a5260", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", *style.OTHERS)
"""Colours, in order, of lines that belong to no mechanism (Okabe & Ito, then the residuals' palette)."""

HEIGHT = 2.4
"""Height in inches of panels with curves."""

FEW = 8
"""Largest number of places on a logarithmic axis at which each gets its number."""
NEAR = 0.1
"""Distance, as a fraction of the axis, below which two names would overlap."""


@dataclass(frozen=True)
class Line:
    """One curve. `low` and `high` bound a band; `joined` False draws points without a line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    joined: bool = True
    dashed: bool = False

    @classmethod
    def through(cls, label: str, points: Sequence[tuple[float, float]]) -> "Line":
        """Return the line through points (x, y)."""
        return cls(label, [x for x, _ in points], [y for _, y in points])


@dataclass(frozen=True)
class Curves:
    """Lines in one or several panels that share their y axis; `panels` maps a title to its lines."""

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
        """Draw the chart inside `style.style`. A line has one colour in all panels; a mechanism has its own colour."""
        several = len(self.panels) > 1
        figure, axes = canvas(sheet().page if several else sheet().column, HEIGHT, 1, len(self.panels), sharey=True)
        looks = _looks(list(dict.fromkeys(line.label for lines in self.panels.values() for line in lines)))
        for ax, (title, lines) in zip(axes[0], self.panels.items(), strict=True):
            if several:
                head(ax, title, inches=sheet().page / len(self.panels) - 0.5)
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
        axes[0, 0].set_ylabel(fit(self.y_label, HEIGHT - 0.3, sheet().font))
        legend(figure, *axes[0])
        return Plot(self.name, self.title, self.caption, figure)


Chart = Curves | Differences


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and dash of each line: its mechanism's if all labels begin with a mechanism's name, else one
    after another."""
    names = {label: re.split(r"[-, ]", label)[0] for label in labels}
    if all(name in RESIDUALS for name in names.values()):
        return style.looks({label: (name, residual_class(name).traits) for label, name in names.items()})
    rounds = [(label, *divmod(place, len(COLOURS))) for place, label in enumerate(labels)]
    dashes = style.DASHES
    return {label: {"color": COLOURS[place], "linestyle": dashes[turn % len(dashes)]} for label, turn, place in rounds}


def _names_apart(places: Sequence[float]) -> list[str]:
    """Return the names of places on a logarithmic axis, empty for a place too near to the last named one.

    >>> _names_apart([0.1, 0.333, 0.5, 1, 10])
    ['0.1', '0.333', '', '1', '10']
    """
    names, last = [], 0.0
    for place in places:
        near = last > 0 and math.log(place / last) < NEAR * math.log(places[-1] / places[0])
        names.append("" if near else tick(place))
        last = last if near else place
    return names
