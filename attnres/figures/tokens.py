"""One text token by token: its sources stacked, and the text itself coloured by where each token reads from."""

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle

from attnres.figures import style
from attnres.figures.patterns import boundaries, last_mix, share, shares, which_reads
from attnres.figures.plot import COLUMN, PAGE, SMALL, NotShown, Plot, canvas, head, label, number, plain
from attnres.residuals import Read, Source

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

BARS = 44  # tokens in a row of bars: their names still fit below
ROWS = 4
LINES = 84  # of text below one another: nine inches, a page
LETTERS = 68  # in a line: at 3.1 inches each is 3.3 points wide
MAP = LinearSegmentedColormap.from_list("reads", [style.PAPER, "#9fd0f0", "#0072b2", "#06304d"])
_DARK = 0.55


def stacked(inspection: "Inspection", read: str | None = None) -> Plot:
    """Bars of a read's sources, one for each token of the example; by default of the last read that has several.

    Raises:
        NotShown: there is no example, or the read has one source.
    """
    tokens, weights, shown_read = _example(inspection, read)
    groups = _grouped(shown_read.sources)
    parts = np.stack([weights[:, members].sum(1) for members in groups])
    firsts, lasts = ([shown_read.sources[members[i]] for members in groups] for i in (0, -1))
    titles = [label(a) if a == b else f"{label(a)} – {label(b)}" for a, b in zip(firsts, lasts)]
    count = min(len(tokens), BARS * ROWS)
    rows = -(-count // BARS)
    figure, axes = canvas(PAGE, 1.4 * rows + 0.45, rows, 1)
    colours = _colours(firsts)
    for row, ax in enumerate(axes[:, 0]):
        span = slice(row * BARS, min((row + 1) * BARS, count))
        places, floor = np.arange(span.stop - span.start), np.zeros(span.stop - span.start)
        for title, part, colour in zip(titles, parts, colours, strict=True):
            ax.bar(places, part[span], 0.92, floor, color=colour, label=title, linewidth=0)
            floor = floor + part[span]
        ax.set_xlim(-0.6, max(BARS, 1) - 0.4 if rows > 1 else len(places) - 0.4)
        ax.set_ylim(0, 1)
        ax.set_yticks([0, 0.5, 1], ["0", ".5", "1"])
        ax.set_xticks(places, [_label(token) for token in tokens[span]], rotation=90, family="DejaVu Sans Mono")
        ax.tick_params(axis="x", labelsize=6, length=0)
        ax.grid(visible=False)
    figure.supylabel("share of the read", fontsize=SMALL + 0.5, color=style.MUTED)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = max(1, min(len(labels), int(PAGE * 72 / ((max(map(len, labels)) * 0.6 + 3.6) * SMALL))))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=SMALL, handlelength=1)
    cut = f" Shown: the first {count} tokens." if count < len(tokens) else ""
    caption = f"Sources of the read '{shown_read.name}' at each token of the example"
    caption += f"; \N{OPEN BOX}: space, ↵: line break.{cut}"
    return Plot("tokens", f"{inspection.model['name']}: where each token reads from", caption, figure)


def token_map(inspection: "Inspection", source: str = "embedding") -> Plot:
    """The example laid out as it was written, one panel for each read with which a block begins, each token on the
    colour of the source's weight.

    Raises:
        NotShown: there is no example, or no such read weighs the source beside another.
    """
    routing = shares(inspection)
    example = inspection.example
    if example is None:
        raise NotShown("the inspection has no example text")
    assert inspection.routing is not None
    rows = [row for row in boundaries(routing, most=6) if routing.weighs(row, source)]
    if not rows:
        raise NotShown(f"no read weighs {source} beside another source")
    columns = 1 if len(rows) == 1 else 2
    height = -(-len(rows) // columns)
    fragments, lines, letters, shown = _layout(example["tokens"], min(44, LINES // height))
    panels = {}
    for row in rows:
        read, column = inspection.layout.index(routing.layout[row]), routing.place(row, source)
        panels[routing.layout[row]] = np.array([share(token)[column] for token in example["weights"][read]])
    _refuse_constant(np.stack(list(panels.values()), axis=1))
    letter = min(4.2, 72 * (3.05 if columns == 2 else 2.75) / letters)  # points
    page = 72 * (9 / height - 0.3) / 1.28 / lines
    size = min(letter / 0.602, page)  # DejaVu Sans Mono's advance is 0.602 of its size
    panel = lines * size * 1.28 / 72
    figure, axes = canvas(PAGE if columns == 2 else COLUMN, height * (panel + 0.3) + 0.1, height, columns)
    for ax in list(axes.flat)[len(panels) :]:
        ax.remove()
    for ax, (read, weights) in zip(axes.flat, panels.items()):
        top = float(weights[:shown].max()) or 1.0
        for token, line, start, text in fragments:
            value = weights[token] / top
            ax.add_patch(Rectangle((start, line), len(text), 1, color=MAP(value), linewidth=0))
            if text.strip():
                ax.text(
                    start,
                    line + 0.78,
                    text,
                    fontsize=size,
                    family="DejaVu Sans Mono",
                    color="#fefefe" if value > _DARK else style.INK,
                    parse_math=False,
                    clip_on=True,
                )
        ax.set_xlim(0, letters)
        ax.set_ylim(lines, 0)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.grid(visible=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        head(ax, f"{label(read)}: mean {number(float(weights.mean()))}, largest {number(top)}", pad=3)
    colours = matplotlib.cm.ScalarMappable(Normalize(0, 1), MAP)
    bar = figure.colorbar(colours, ax=axes[0].tolist() if height > 1 else list(axes.flat), fraction=0.02, pad=0.01)
    bar.set_ticks([0, 1], labels=["0", "largest"])
    if height * panel > 1.2:
        bar.set_label(f"weight of {source}", fontsize=SMALL)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=SMALL)
    cut = f" Shown: the first {shown} tokens." if shown < len(example["tokens"]) else ""
    caption = (
        f"Each token of the example on the colour of its weight of the {source}, {which_reads(routing)}, each panel "
        f"from zero to its largest. After a line: its line break.{cut}"
    )
    return Plot("token-map", f"{inspection.model['name']}: the {source}'s weight in a text", caption, figure)


# ------------------------------------------------------------------ tokens as text


def _example(inspection: "Inspection", name: str | None) -> tuple[list[str], np.ndarray, Read]:
    """Tokens, (tokens, sources) shares, and the read (by default the last with several sources)."""
    if inspection.example is None:
        raise NotShown("the inspection has no example text")
    routing = shares(inspection)
    read = next((read for read in routing.layout if read.name == name), None)
    if name is None:
        read = routing.layout[last_mix(routing)]
    if read is None:
        raise NotShown(f"there is no read '{name}' that weighs its sources")
    index = inspection.layout.index(read)
    if len(read.sources) < 2:
        raise NotShown(f"the read '{read.name}' has one source")
    weights = np.stack([share(token) for token in inspection.example["weights"][index]])
    _refuse_constant(weights)
    return inspection.example["tokens"], weights, read


def _refuse_constant(weights: np.ndarray) -> None:
    if len(weights) > 1 and np.ptp(weights, axis=0).max() < 1e-6:
        raise NotShown("its weights are the same for every token")


def _layout(tokens: Sequence[str], most: int = 44) -> tuple[list[tuple[int, int, int, str]], int, int, int]:
    """Where each token's text goes: (token, line, first letter, text), how many lines, letters, and tokens that fit in
    `most` lines.

    Long lines go on in the next one; a line break takes one letter's place at the end of its line.
    """
    fragments: list[tuple[int, int, int, str]] = []
    line = letter = widest = shown = 0
    for i, token in enumerate(tokens):
        for j, part in enumerate(token.replace("\r\n", "\n").replace("\t", "    ").split("\n")):
            if j:
                fragments.append((i, line, letter, " "))
                widest, line, letter = max(widest, letter + 1), line + 1, 0
            text = drawable(part)
            while text:
                if letter >= LETTERS:
                    line, letter = line + 1, 0
                piece, text = text[: LETTERS - letter], text[LETTERS - letter :]
                fragments.append((i, line, letter, piece))
                letter += len(piece)
                widest = max(widest, letter)
        if line >= most:
            break
        shown = i + 1
    kept = [fragment for fragment in fragments if fragment[1] < most and fragment[0] < shown]
    last = max((fragment[1] for fragment in kept), default=0)
    return kept, last + 1, max(24, widest), shown


@functools.cache
def _glyphs() -> frozenset[int]:
    path = findfont(FontProperties(family="DejaVu Sans Mono"))
    return frozenset(FT2Font(path).get_charmap())


def drawable(text: str) -> str:
    """`text` with a dot for each letter that the font does not have."""
    return "".join(letter if ord(letter) in _glyphs() and letter.isprintable() else "·" for letter in text)


def _label(token: str) -> str:
    """A token in at most nine letters, with its spaces and line breaks visible."""
    text = token.replace("\r", "").replace("\n", "↵").replace("\t", "→")
    text = re.sub(" {3,}", lambda run: f" ×{len(run[0])}", text).replace(" ", "\N{OPEN BOX}")
    text = drawable(text)
    return plain(text if len(text) <= 9 else text[:8] + "…")


# ------------------------------------------------------------------ sources as a few colours


def _grouped(sources: Sequence[Source]) -> list[list[int]]:
    """Places of sources in groups of neighbours, at most nine, and those that stand for themselves: the embedding
    first, what is open last."""
    first = [[i] for i, source in enumerate(sources) if source.kind == "embedding"]
    last = [[i] for i, source in enumerate(sources) if source.open]
    inner = [i for i in range(len(sources)) if [i] not in first + last]
    parts = np.array_split(inner, min(len(inner), 9)) if inner else []
    return [*first, *(part.tolist() for part in parts), *last]


def _colours(groups: Sequence[Source]) -> list[Any]:
    """The embedding orange, what is open grey, the rest from dark to light by depth; one source of each group."""
    fixed = {"embedding": "#d55e00", "null": "#d9dde2"}
    inner = [source for source in groups if source.kind != "embedding" and not source.open]
    scale = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.95, max(1, len(inner))))
    return [
        tuple(scale[inner.index(source)]) if source in inner else fixed.get(source.kind, "#9aa3ad") for source in groups
    ]
