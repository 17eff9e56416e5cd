"""One look for every figure: the residuals' own colours, on a light ground, readable at a column's width."""

import io
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from attnres.errors import unknown
from attnres.files import write_bytes
from attnres.inspect.colours import GRID, INK, MUTED, PAPER
from attnres.residuals import Traits

FORMATS = ("pdf", "png", "svg")

OTHERS = ("#8c6bb1", "#7f7f00", "#5b8c5a", "#b07d62", "#c2567a", "#4f7c8a", "#6b4c3b")
"""For residuals without a colour of their own (`Traits.colour`, of Okabe & Ito's palette of 2008)."""

DASHES = (
    "-",
    (0, (5, 1.6)),
    (0, (1.4, 1.4)),
    (0, (5, 1.4, 1.4, 1.4)),
    (0, (8, 2, 2, 2, 2, 2)),
    (0, (8, 1.4, 3, 1.4)),
)
"""As many as have no divisor in common with the colours: 42 residuals without a colour of their own look different."""
CLEAR = 3
"""So many of the dashes are told from one another at a glance; labels of one colour have these in its shades."""
SHADES = (("#000000", 0.0), ("#000000", 0.45), ("#ffffff", 0.45))
"""What a colour is mixed with, and how much of that."""

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


@contextmanager
def style() -> Generator[None]:
    """Draw inside this: the shared settings, and nothing of the user's own."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)  # ty: ignore[no-matching-overload]
        yield


def looks(residuals: Mapping[str, tuple[str, Traits]]) -> dict[str, dict[str, Any]]:
    """Line keywords for each label, given its residual's name and traits: the mechanism's colour, or the next free one;
    a dash for each further label, and a darker, then a lighter shade of the colour where the clearest are used up.

    Residuals without a colour of their own share a few, which not every eye tells from the others: each has a dash.
    """
    result: dict[str, dict[str, Any]] = {}
    free: dict[str, str] = {}
    uses: Counter[str] = Counter()
    for label, (name, traits) in residuals.items():
        hue = traits.colour if re.fullmatch("#[0-9a-f]{6}", str(traits.colour)) else None  # a file may say anything
        used = uses[hue or ""]
        uses[hue or ""] += 1
        if hue:
            shade, dash = divmod(used, CLEAR)
            colour = _mixed(hue, *SHADES[shade % len(SHADES)])
        else:
            dash = (used + 1) % len(DASHES)
            colour = free.setdefault(name, OTHERS[len(free) % len(OTHERS)])
        result[label] = {"color": colour, "linestyle": DASHES[dash]}
    return result


def _mixed(colour: str, other: str, share: float) -> str:
    """A colour with so much of another in it, as `#rrggbb`."""
    pairs = zip(to_rgb(colour), to_rgb(other), strict=True)
    red, green, blue = (one * (1 - share) + two * share for one, two in pairs)
    return to_hex((red, green, blue))


def save(figure: Figure, path: Path, dpi: int = 200) -> None:
    """A figure in a file of its own: PDF, PNG or SVG by the suffix. The same figure gives the same bytes.

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
