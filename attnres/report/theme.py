"""The figures' look in the page: colours that follow the reader's light or dark.

Figures are drawn in the light theme's colours (`attnres.figures.style`). In the page an ink becomes a CSS variable and
a line's colour a pair, so that the same SVG is readable on both backgrounds. Places on a scale keep theirs.
"""

import functools
import io
import math
import re
from html import escape
from typing import TYPE_CHECKING

from attnres.figures.style import GRID, INK, MUTED, PAPER, style
from attnres.inspect.colours import MORE, blend, contrast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK = {INK: "#e8eaed", MUTED: "#a3adba", GRID: "#333a44", PAPER: "#1a1e24"}
"""The inks on a dark page."""
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", MORE: "c-0072b2"}
"""The variables of pages; the last is the accent of the explorer too."""
LEAST = 3.0
"""Contrast of a line with the page: what WCAG 2.2 asks of graphics."""


@functools.cache
def on_dark(colour: str) -> str:
    """A colour's partner on a dark page, mixed with white where it is no ink.

    Contrasts with the page from 1 to white's go to `LEAST` to white's, evenly by their logarithm: shades of one hue
    keep their order.
    """
    if colour in DARK:
        return DARK[colour]
    page, white = DARK[PAPER], "#ffffff"
    most = contrast(white, page)
    wanted = LEAST * (most / LEAST) ** (math.log(contrast(colour, page)) / math.log(most))
    mixtures = (blend(colour, white, step / 256) for step in range(256))
    return next((mixture for mixture in mixtures if contrast(mixture, page) >= wanted), white)


def variables(dark: bool) -> str:
    """Declarations of all variables, for one of the two themes."""
    return "".join(f"--{name}:{on_dark(colour) if dark else colour};" for colour, name in NAMES.items())


def declared(name: str, colour: str) -> str:
    """The CSS property of that name with the colour of an ink or a line in both themes; a browser that does not know
    light-dark() has the light one."""
    if colour in NAMES:
        return f"{name}: var(--{NAMES[colour]})"
    return f"{name}: {colour}; {name}: light-dark({colour}, {on_dark(colour)})"


def to_svg(figure: "Figure", name: str, alt: str, zoom: float) -> str:
    """An `<svg>` to put in the page: scales with its box, the theme's colours, ids that no other figure has.

    `zoom`: how much larger it is shown than on paper where there is room; a broad one never much smaller than it is.
    """
    # Not at the top: attnres.figures has to be the first to import matplotlib, for a notebook's MPLBACKEND.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D

    drawn = {*DARK, *(to_hex(line.get_color()) for line in figure.findobj(Line2D))}

    def themed(one: re.Match[str]) -> str:
        return declared(one[1], one[2]) if one[2] in drawn else one[0]

    out = io.StringIO()
    with style():
        matplotlib.rcParams["svg.hashsalt"] = name  # ids that are referred to are made with it
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", svg)
    paint = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})\b")
    svg = re.sub(r'\bstyle="[^"]*"', lambda part: paint.sub(themed, part[0]), svg)  # and not in what a text says
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)  # hundredths of a point do
    width = figure.get_figwidth() * 72
    size = f"max-width:{width * 4 / 3 * zoom:.0f}px" + (f";min-width:{width * 1.1:.0f}px" if width > 300 else "")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" style="{size}" ', 1)
