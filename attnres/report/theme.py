"""The figures' look in the page: colours that follow the reader's light or dark.

Figures are drawn in the light theme's colours (`attnres.figures.style`). In the page each of those becomes a CSS
variable, so that the same SVG is readable on both backgrounds.
"""

import io
import re
from html import escape

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attnres.figures.style import GRID, INK, MUTED, PAPER, style

# The same on a dark page: where a colour is too dark for it, a lighter one of the same hue.
DARK = {
    INK: "#e8eaed",
    MUTED: "#a3adba",
    GRID: "#333a44",
    PAPER: "#1a1e24",
    "#4a5260": "#c3cad4",
    "#0072b2": "#4aa8e0",
    "#56b4e9": "#a9dcf7",
    "#d55e00": "#f0803c",
    "#009e73": "#2cc295",
    "#cc79a7": "#dd94bb",
    "#8c6bb1": "#b196d3",
    "#7f7f00": "#b3b33c",
    "#5b8c5a": "#8abb89",
    "#b07d62": "#d0a38c",
}
NAMES = {colour: f"c-{colour[1:]}" for colour in DARK} | {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
"""The page's names for these colours; the others are the same on both."""


def variable(colour: str) -> str:
    """The page's variable for a colour; the colour itself where it has none."""
    return f"var(--{NAMES[colour]})" if colour in NAMES else colour


def variables(dark: bool) -> str:
    """Declarations of all variables, for one of the two themes."""
    return "".join(f"--{name}:{DARK[colour] if dark else colour};" for colour, name in NAMES.items())


def _themed(attribute: re.Match[str]) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: variable(colour[0]), attribute[0])


def to_svg(figure: Figure, name: str, alt: str, zoom: float) -> str:
    """An `<svg>` to put in the page: scales with its box, the theme's colours, ids that no other figure has.

    `zoom`: how much larger it is shown than on paper where there is room; a broad one never much smaller than it is.
    """
    out = io.StringIO()
    with style():
        matplotlib.rcParams["svg.hashsalt"] = name  # ids that are referred to are made with it
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", svg)
    svg = re.sub(r'\b(?:style|fill|stroke)="[^"]*"', _themed, svg)  # and not in what a text says
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)  # hundredths of a point do
    width = figure.get_figwidth() * 72
    size = f"max-width:{width * 4 / 3 * zoom:.0f}px" + (f";min-width:{width * 1.1:.0f}px" if width > 300 else "")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" style="{size}" ', 1)
