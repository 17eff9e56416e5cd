"""The style of every figure: a colour for each residual, on a light ground, readable at a column's width.

Figures are drawn in the light theme's colours. For a page `to_svg` replaces text and grid colours by CSS variables and
a line's colour by a light/dark pair, so that the same SVG is readable in both themes. Colours of a scale do not change.
"""

import functools
import io
import math
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnres.errors import unknown
from attnres.files import write_bytes
from attnres.inspect.colours import GRID, INK, MORE, MUTED, PAPER, blend, contrast
from attnres.residuals import Traits

FORMATS = ("pdf", "png", "svg")

OTHERS = ("#8c6bb1", "#7f7f00", "#5b8c5a", "#b07d62", "#c2567a", "#4f7c8a", "#6b4c3b")
"""Colours for residuals without a colour of their own (`Traits.colour`, of Okabe & Ito's palette of 2008)."""

DASHES = (
    "-",
    (0, (5, 1.6)),
    (0, (1.4, 1.4)),
    (0, (5, 1.4, 1.4, 1.4)),
    (0, (8, 2, 2, 2, 2, 2)),
    (0, (8, 1.4, 3, 1.4)),
)
"""Dashes. Their number and that of the colours have no common divisor, so 42 residuals without a colour look
different."""
CLEAR = 3
"""Number of dashes that are easily told apart; further labels of one colour use these in its shades."""
SHADES = (("#000000", 0.0), ("#000000", 0.45), ("#ffffff", 0.45))
"""Shades: the colour that is mixed in, and its fraction."""

RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.4,
    "hatch.color": GRID,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "attnres",
    "path.simplify": True,
}


class Sheet(NamedTuple):
    """The page size and fonts that figures are drawn for.

    Attributes:
        column, page: width in inches of a column, and of a page of two columns.
        font: points of tick labels and legends; names of axes have half a point more, titles one.
        smallest: points that tick labels shrink to before some are left out.
    """

    column: float = 3.3
    page: float = 6.9
    font: float = 7.0
    smallest: float = 4.6

    @property
    def scale(self) -> float:
        """Return the font size relative to that which figures are laid out for."""
        return self.font / PAPER_OF_TWO_COLUMNS.font


PAPER_OF_TWO_COLUMNS = Sheet()
_SHEET: ContextVar[Sheet] = ContextVar("sheet", default=PAPER_OF_TWO_COLUMNS)
sheet = _SHEET.get


@contextmanager
def style(width: float | None = None, font: float | None = None) -> Generator[None]:
    """Apply the shared style inside the block, without the user's matplotlib settings.

    `width`: inches of every figure, in place of a column's or a page's. `font`: points of tick labels and legends,
    which then do not shrink. None keeps the setting from outside the block.
    """
    paper = sheet() if width is None else sheet()._replace(column=width, page=width)
    if font is not None:
        paper = paper._replace(font=font, smallest=font)
    before = _SHEET.set(paper)
    try:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(RC)  # ty: ignore[no-matching-overload]
            yield
    finally:
        _SHEET.reset(before)


def looks(residuals: Mapping[str, tuple[str, Traits]]) -> dict[str, dict[str, Any]]:
    """Return line keywords for each label, given its residual's name and traits: the mechanism's colour, or the next
    free one; a new dash for each further label of a colour, and then darker and lighter shades of it.

    Residuals without a colour of their own share a few colours that are hard to tell from the others, so each also has
    a dash.
    """
    result: dict[str, dict[str, Any]] = {}
    free: dict[str, str] = {}
    uses: Counter[str] = Counter()
    for label, (name, traits) in residuals.items():
        # a stored trait may hold any text
        hue = traits.colour if re.fullmatch("#[0-9a-f]{6}", str(traits.colour)) else None
        used = uses[hue or ""]
        uses[hue or ""] += 1
        if hue:
            shade, dash = divmod(used, CLEAR)
            colour = blend(hue, *SHADES[shade % len(SHADES)])
        else:
            dash = (used + 1) % len(DASHES)
            colour = free.setdefault(name, OTHERS[len(free) % len(OTHERS)])
        result[label] = {"color": colour, "linestyle": DASHES[dash]}
    return result


def save(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Save a figure as PDF, PNG or SVG, by the suffix. The same figure gives the same bytes.

    Raises:
        UserError: another suffix, or the file cannot be written.
    """
    kind = path.suffix[1:]
    if kind not in FORMATS:
        raise unknown("image format", kind, FORMATS)
    undated: dict[str, Any] = {
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
    }[kind]
    out = io.BytesIO()
    with style():
        FigureCanvasAgg(figure)
        figure.savefig(out, format=kind, dpi=dpi, facecolor=PAPER, metadata=undated)
    write_bytes(path, out.getvalue())


# ------------------------------------------------------------------ colours that follow a page's theme


DARK = {INK: "#e8eaed", MUTED: "#a3adba", GRID: "#333a44", PAPER: "#1a1e24"}
"""Text and grid colours on a dark page."""
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", MORE: "c-0072b2"}
"""Names of the CSS variables of pages; the explorer uses the last one too, as its accent."""
LEAST = 3.0
"""Smallest contrast of a line with the page, as WCAG 2.2 asks of graphics."""


@functools.cache
def on_dark(colour: str) -> str:
    """Return the dark page's version of a colour: its partner in `DARK`, or the colour mixed with white.

    Contrasts with the page, from 1 to that of white, are mapped to `LEAST` to that of white, linearly in their
    logarithm, so shades of one hue keep their order.
    """
    if colour in DARK:
        return DARK[colour]
    page, white = DARK[PAPER], "#ffffff"
    most = contrast(white, page)
    wanted = LEAST * (most / LEAST) ** (math.log(contrast(colour, page)) / math.log(most))
    mixtures = (blend(colour, white, step / 256) for step in range(256))
    return next((mixture for mixture in mixtures if contrast(mixture, page) >= wanted), white)


def variables(dark: bool) -> str:
    """Return the CSS declarations of all variables for the light or the dark theme."""
    return "".join(f"--{name}:{on_dark(colour) if dark else colour};" for colour, name in NAMES.items())


def declared(name: str, colour: str) -> str:
    """Return a CSS property with the light and the dark version of a colour; a browser without light-dark() uses the
    light one."""
    if colour in NAMES:
        return f"{name}: var(--{NAMES[colour]})"
    return f"{name}: {colour}; {name}: light-dark({colour}, {on_dark(colour)})"


def to_svg(figure: Figure, name: str, alt: str, zoom: float) -> str:
    """Return a figure as an `<svg>` element for a page: it scales with its box, follows the theme, and has ids unique
    to it.

    `zoom`: size relative to paper where there is room; a broad figure is never shown much smaller than on paper.
    """
    drawn = {*DARK, *(to_hex(line.get_color()) for line in figure.findobj(Line2D))}

    def themed(one: re.Match[str]) -> str:
        return declared(one[1], one[2]) if one[2] in drawn else one[0]

    out = io.StringIO()
    with style():
        matplotlib.rcParams["svg.hashsalt"] = name  # seed of the ids in the SVG
        FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", svg)
    paint = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})\b")
    # only inside style attributes, not in text
    svg = re.sub(r'\bstyle="[^"]*"', lambda part: paint.sub(themed, part[0]), svg)
    # two decimals of a point are enough
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    width = figure.get_figwidth() * 72
    size = f"max-width:{width * 4 / 3 * zoom:.0f}px" + (f";min-width:{width * 1.1:.0f}px" if width > 300 else "")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" style="{size}" ', 1)
