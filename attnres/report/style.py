"""One look for every figure: Okabe-Ito colours fixed to residuals, and colours that follow the page's light or dark.

Figures are drawn in the light theme's colours. In the page each of those becomes a CSS variable, so that the same SVG
is readable on both backgrounds.
"""

import io
import re
import zlib
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from attnres.files import write_bytes
from attnres.report.runs import Study

INK, MUTED, GRID, PAPER = "#1b1f24", "#5f6b7a", "#e2e6eb", "#fdfdfc"

# Okabe & Ito's palette (2008), the residual that all are held against in the text's own colour.
COLOURS = {
    "standard": "#4a5260",
    "rescaled": "#cc79a7",
    "block": "#0072b2",
    "full": "#d55e00",
    "denseformer": "#009e73",
    "hyper_connections": "#56b4e9",
    "deepnorm": "#e69f00",
}
OTHERS = ("#8c6bb1", "#7f7f00", "#5b8c5a", "#b07d62")

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
DASHES = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (5, 1.4, 1.4, 1.4)), (0, (8, 2, 2, 2, 2, 2)))

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
    "svg.hashsalt": "attnres",
    "path.simplify": True,
}


@contextmanager
def style() -> Generator[None]:
    """Draw inside this: the shared settings, and nothing of the user's own."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)  # ty: ignore[no-matching-overload]
        yield


def colour_of(residual: str) -> str:
    """The colour of a residual, always the same one."""
    return COLOURS.get(residual) or OTHERS[zlib.crc32(residual.encode()) % len(OTHERS)]


def looks(study: Study) -> dict[str, dict[str, Any]]:
    """Line keywords for each label: a colour for each residual, a dash for each further label of the same residual."""
    result: dict[str, dict[str, Any]] = {}
    seen: Counter[str] = Counter()
    for label in study.labels:
        name = study.residual(label)
        result[label] = {"color": colour_of(name), "linestyle": DASHES[seen[name] % len(DASHES)]}
        seen[name] += 1
    return result


def css_variable(colour: str) -> str:
    """The page's name for one of the colours above."""
    return f"var(--{NAMES.get(colour, 'c-' + colour[1:])})"


def css_variables(dark: bool) -> str:
    """Declarations of every such name, for one of the two themes."""
    everything = dict.fromkeys([*NAMES, *COLOURS.values(), *OTHERS])
    return "".join(
        f"{css_variable(colour)[4:-1]}:{DARK.get(colour, colour) if dark else colour};" for colour in everything
    )


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """An `<svg>` to put in the page: scales with its box, theme's colours, ids of its own."""
    out = io.StringIO()
    with style():
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
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
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{alt}" viewBox="0 0 {width:g} {height:g}" style="max-width:{width * 4 / 3:.0f}px">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)


def save(figure: Figure, path: Path, dpi: int = 200) -> None:
    """A figure in a file of its own, in the light theme: PNG or SVG by the suffix."""
    out = io.BytesIO()
    with style():
        FigureCanvasAgg(figure)
        figure.savefig(out, format=path.suffix[1:], dpi=dpi, facecolor=PAPER)
    write_bytes(path, out.getvalue())
