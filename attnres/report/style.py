"""The figures' look in the page: colours that follow the reader's light or dark.

Figures are drawn in the light theme's colours (`attnres.figures.style`). In the page each of those becomes a CSS
variable, so that the same SVG is readable on both backgrounds.
"""

import io
import re
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attnres.figures import style as figures
from attnres.figures.style import COLOURS, DASHES, GRID, INK, MUTED, OTHERS, PAPER, colour_of, save, style
from attnres.report.runs import Study

__all__ = [
    "COLOURS",
    "DASHES",
    "GRID",
    "INK",
    "MUTED",
    "OTHERS",
    "PAPER",
    "colour_of",
    "css_variable",
    "css_variables",
    "looks",
    "save",
    "style",
    "to_svg",
]

# The same on a dark page: where a colour is too dark for it, a lighter one of the same hue.
DARK = {
    INK: "#e8eaed",
    MUTED: "#a3adba",
    GRID: "#333a44",
    PAPER: "#1a1e24",
    "#4a5260": "#c3cad4",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#f0803c",
    "#009e73": "#2cc295",
    "#cc79a7": "#dd94bb",
    "#8c6bb1": "#b196d3",
    "#7f7f00": "#b3b33c",
    "#5b8c5a": "#8abb89",
    "#b07d62": "#d0a38c",
}
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}


def looks(study: Study) -> dict[str, dict[str, Any]]:
    """Line keywords for each label of a study."""
    return figures.looks({label: study.residual(label) for label in study.labels})


def css_variable(colour: str) -> str:
    """The page's name for one of the colours above."""
    return f"var(--{NAMES.get(colour, 'c-' + colour[1:])})"


def css_variables(dark: bool) -> str:
    """Declarations of every such name, for one of the two themes."""
    everything = dict.fromkeys([*NAMES, *COLOURS.values(), *OTHERS])
    return "".join(
        f"{css_variable(colour)[4:-1]}:{DARK.get(colour, colour) if dark else colour};" for colour in everything
    )


def to_svg(figure: Figure, name: str, alt: str, zoom: float | None = None) -> str:
    """An `<svg>` to put in the page: scales with its box, theme's colours, ids of its own.

    `zoom`: of a figure drawn for paper, shown so much larger where there is room and never much smaller than it is.
    """
    out = io.StringIO()
    with style():
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", svg)  # named by content, so that equal images share a name
    # A cell without a value is an empty path; coordinates need no more than hundredths of a point.
    svg = re.sub(rf'\s*<path [^>]*style="fill: none; stroke: {PAPER};[^"]*"/>', "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace(" \n", " "), svg)
    svg = re.sub(r'\bid="', lambda _: f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = svg.replace('href="#', f'href="#{name}-')
    for colour in dict.fromkeys([*NAMES, *COLOURS.values(), *OTHERS]):
        svg = re.sub(rf'(?<=[\s"])(fill|stroke)="{colour}"', rf'style="\1: {css_variable(colour)}"', svg)
        svg = svg.replace(f": {colour}", f": {css_variable(colour)}")
    # Text stays text, in the page's own font; Matplotlib writes `font-family`, before 3.11 the shorthand `font`.
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    svg = re.sub(r"(font: (?:[\w.]+ )*?[\d.]+px )[^;\"]+", r"\1var(--font)", svg)
    width, height = (float(re.search(rf'{side}="([\d.]+)pt"', svg)[1]) for side in ("width", "height"))  # ty: ignore
    size = f"max-width:{width * 4 / 3 * (zoom or 1):.0f}px" + (f";min-width:{width * 1.1:.0f}px" if zoom else "")
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{alt}" viewBox="0 0 {width:g} {height:g}" style="{size}">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
