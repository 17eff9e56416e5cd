"""Draw one text token by token: its sources stacked, and the text coloured by the sources that each token reads."""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from attnres.figures import style
from attnres.figures.cells import SIGNED_MAP, readable_on
from attnres.figures.patterns import TITLES, axis, boundaries, last_mix, left_out, shares, what_numbers_are, which_reads
from attnres.figures.plot import (
    NotShown,
    Plot,
    canvas,
    edge_head,
    legend,
    numbers_on,
    plain,
    side_by_side,
    varies,
)
from attnres.figures.style import sheet
from attnres.inspect.colours import source_colours
from attnres.inspect.inspection import FIELD, By, Routing, amounts
from attnres.inspect.notebook import FLOOR, end_of_scale
from attnres.residuals import Source
from attnres.text import number

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

BAR = 0.157  # inches of a bar; its token's name still fits below
ROWS = 4
LINES = 84  # lines of text below one another: nine inches, a page
HATCH = "////"  # on every second source of a kind, to tell it from its neighbours without relying on shade
ADVANCE = 0.602  # letter width of DejaVu Sans Mono, relative to its font size
LETTERS = 68  # letters in a line: at 3.1 inches each is 3.3 points wide


def stacked(inspection: "Inspection", by: By = "contribution") -> Plot:
    """Draw for each token of the example a bar of the sources of the last read that has several. Negative contributions
    hang below zero.

    Raises:
        NotShown: there is no example, or every read has one source.
    """
    tokens, routing, row, values = _example(inspection, by)
    shown_read = routing.layout[row]
    groups = _grouped(shown_read.sources)
    parts = np.stack([values[:, members].sum(1) for members in groups])
    firsts, lasts = ([shown_read.sources[members[i]] for members in groups] for i in (0, -1))
    titles = [a.label if a == b else f"{a.label} – {b.label}" for a, b in zip(firsts, lasts)]
    kinds = [{shown_read.sources[place].kind for place in members} for members in groups]
    looks = [Source("block", i) if len(of) > 1 else one for i, (of, one) in enumerate(zip(kinds, firsts))]
    bars = int(sheet().page / (BAR * max(1.0, (sheet().font - 1) / 6)) + 0.1)
    count = min(len(tokens), bars * ROWS)
    rows = -(-count // bars)
    figure, axes = canvas(sheet().page, 1.4 * rows + 0.45, rows, 1)
    hatches = [HATCH if source.number is not None and source.number % 2 else "" for source in looks]
    lowest = min(0.0, float(np.minimum(parts, 0)[:, :count].sum(0).min()))
    highest = float(np.maximum(parts, 0)[:, :count].sum(0).max())
    for line, ax in enumerate(axes[:, 0]):
        span = slice(line * bars, min((line + 1) * bars, count))
        places = np.arange(span.stop - span.start)
        floors = {True: np.zeros(len(places)), False: np.zeros(len(places))}
        for title, part, colour, hatch in zip(titles, parts, source_colours(looks), hatches, strict=True):
            for up in (True, False):
                height = np.where((part[span] >= 0) == up, part[span], 0.0)
                look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "#ffffff59", "linewidth": 0}
                ax.bar(places, height, 0.92, floors[up], label=title if up else None, **look)
                floors[up] = floors[up] + height
        ax.axhline(0, color=style.MUTED, linewidth=0.5)
        ax.set_xlim(-0.6, bars - 0.4 if rows > 1 else len(places) - 0.4)
        ax.set_ylim(1.02 * lowest, max(1.0, 1.02 * highest))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        numbers_on(ax.yaxis)
        ax.set_xticks(places, [_label(token) for token in tokens[span]], rotation=90, family="DejaVu Sans Mono")
        ax.tick_params(axis="x", labelsize=sheet().font - 1, length=0)
        ax.grid(visible=False)
    figure.supylabel(axis(routing), fontsize=sheet().font + 0.5, color=style.MUTED)
    legend(figure, axes[0, 0])
    cut = f" Shown: the first {count} tokens." if count < len(tokens) else ""
    caption = f"Sources of the read '{shown_read.name}' at each token of the example"
    caption += ", what points against it below zero" if lowest < 0 else ""
    caption += f"; \N{OPEN BOX}: space, ↵: line break.{cut}"
    return Plot("tokens", f"{inspection.model['name']}: {TITLES[routing.by]}, token by token", caption, figure)


def example_columns(inspection: "Inspection", by: By, most: int) -> list[tuple[Routing, int, int, np.ndarray]]:
    """Return, for at most `most` reads with which blocks begin, one source token by token: the routing, the row, the
    source's index and (tokens,) numbers. By weight the source is the embedding; by contribution it is the one that
    varies most from token to token.

    Raises:
        NotShown: there is no example, or no such read weighs the embedding beside another source.
    """
    routing = shares(inspection, by)
    example: Any = inspection.example
    if example is None:
        raise NotShown("the inspection has no example text")
    columns = []
    for row in boundaries(routing, most=most):
        if routing.weighs(row, "embedding"):
            read = inspection.layout.index(routing.layout[row])
            values = np.stack([amounts(token, routing.by) for token in example[FIELD[routing.by]][read]])
            varied = int(values.std(0).argmax())  # the source whose numbers vary most from token to token
            place = varied if routing.by == "contribution" else routing.place(row, "embedding")
            columns.append((routing, row, place, values[:, place]))
    if not columns:
        raise NotShown("no read has the embedding and another source")
    _refuse_constant(np.stack([values for *_, values in columns], axis=1))
    return columns


def token_map(inspection: "Inspection", by: By = "contribution") -> Plot:
    """Draw the example laid out as it was written, a panel for each read with which a block begins, each token coloured
    by one source (`example_columns`).

    Raises:
        NotShown: there is no example, or no such read has weights.
    """
    candidates = example_columns(inspection, by, most=6)
    tokens = inspection.example["tokens"] if inspection.example is not None else []
    routing = candidates[0][0]
    panels = [one for one in candidates if varies(one[-1])] or candidates
    columns = min(len(panels), side_by_side(3))
    height = -(-len(panels) // columns)
    inches = sheet().page / columns - 0.4 if columns > 1 else sheet().column - 0.55
    widest = min(LETTERS, int(72 * inches / (ADVANCE * sheet().smallest)))
    fragments, lines, letters, shown = _layout(tokens, min(44, LINES // height), widest)
    page = 72 * (9 / height - 0.3) / 1.28 / lines
    size = min(sheet().smallest, 72 * inches / letters / ADVANCE, page)
    panel = lines * size * 1.28 / 72
    width = sheet().page if columns > 1 else sheet().column
    inches_high = (height * (panel + 0.3) + 0.1) / max(1.0, sheet().scale)
    figure, axes = canvas(width, inches_high, height, columns, used=len(panels))
    largest = end_of_scale(np.concatenate([values[:shown] for *_, values in panels]))
    for ax, (_, row, place, values) in zip(axes.flat, panels):
        _draw_text(ax, fragments, np.nan_to_num(values / largest), size)
        ax.set_xlim(0, letters)
        ax.set_ylim(lines, 0)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.grid(visible=False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        mean = f": mean {number(float(values.mean()), 2)}"
        edge_head(ax, routing.layout[row], routing.layout[row].sources[place], inches, mean, pad=3)
    signed = any(values.min() < -FLOOR / 2 for *_, values in panels)
    colours = matplotlib.cm.ScalarMappable(Normalize(-largest, largest), SIGNED_MAP)
    bar = figure.colorbar(colours, ax=axes[0].tolist() if height > 1 else list(axes.flat), fraction=0.02, pad=0.01)
    bar.ax.set_ylim(-largest if signed else 0, largest)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    numbers_on(bar.ax.yaxis)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=sheet().font)
    cut = f" Shown: the first {shown} tokens." if shown < len(tokens) else ""
    what = what_numbers_are(inspection, routing)
    which = (
        "one source, that which differs most from token to token" if routing.by == "contribution" else "the embedding"
    )
    dropped = [routing.layout[row].label for _, row, *_ in candidates if row not in [one[1] for one in panels]]
    caption = (
        f"Each token of the example on the colour of {which}, {which_reads(routing)}: "
        f"{what[0].lower()}{what[1:]}. After a line: its line break.{cut}{left_out(dropped)}"
    )
    return Plot("token-map", f"{inspection.model['name']}: {TITLES[routing.by]}, in a text", caption, figure)


# ------------------------------------------------------------------ tokens as text


def _draw_text(ax: Axes, fragments: Iterable[tuple[int, int, int, str]], parts: np.ndarray, size: float) -> None:
    """Draw pieces of text, (token, line, column, text), in `size` points, each on the colour of its token's number."""
    for token, line, start, text in fragments:
        colour = matplotlib.colors.to_hex(SIGNED_MAP(0.5 + 0.5 * parts[token]))
        ax.add_patch(Rectangle((start, line), len(text), 1, color=colour, linewidth=0))
        if text.strip():
            ax.text(
                start,
                line + 0.78,
                text,
                fontsize=size,
                family="DejaVu Sans Mono",
                color=readable_on(colour),
                parse_math=False,
                clip_on=True,
            )


def _example(inspection: "Inspection", by: By) -> tuple[list[str], Routing, int, np.ndarray]:
    """Return the tokens, the routing, the row of the last read with several sources, and its numbers (tokens,
    sources)."""
    example: Any = inspection.example
    if example is None:
        raise NotShown("the inspection has no example text")
    routing = shares(inspection, by)
    row = last_mix(routing)
    rows = example[FIELD[routing.by]][inspection.layout.index(routing.layout[row])]
    values = np.stack([amounts(token, routing.by) for token in rows])
    _refuse_constant(values)
    return example["tokens"], routing, row, values


def _refuse_constant(weights: np.ndarray) -> None:
    if len(weights) > 1 and np.ptp(weights, axis=0).max() < 1e-6:
        raise NotShown("its weights are the same for every token")


def _layout(
    tokens: Sequence[str], most: int = 44, widest: int = LETTERS
) -> tuple[list[tuple[int, int, int, str]], int, int, int]:
    """Lay out the tokens' text in at most `most` lines of `widest` letters: (token, line, first letter, text) pieces,
    and the numbers of lines, letters and tokens that fit.

    Long lines wrap; a line break takes the place of one letter at the end of its line.
    """
    fragments: list[tuple[int, int, int, str]] = []
    line = letter = longest = shown = 0
    for i, token in enumerate(tokens):
        for j, part in enumerate(token.replace("\r\n", "\n").replace("\t", "    ").split("\n")):
            if j:
                fragments.append((i, line, letter, " "))
                longest, line, letter = max(longest, letter + 1), line + 1, 0
            text = drawable(part)
            while text:
                if letter >= widest:
                    line, letter = line + 1, 0
                piece, text = text[: widest - letter], text[widest - letter :]
                fragments.append((i, line, letter, piece))
                letter += len(piece)
                longest = max(longest, letter)
        if line >= most:
            break
        shown = i + 1
    kept = [fragment for fragment in fragments if fragment[1] < most and fragment[0] < shown]
    last = max((fragment[1] for fragment in kept), default=0)
    return kept, last + 1, max(24, longest), shown


@functools.cache
def _glyphs() -> frozenset[int]:
    path = findfont(FontProperties(family="DejaVu Sans Mono"))
    return frozenset(FT2Font(path).get_charmap())


def drawable(text: str) -> str:
    """Return `text` with a dot for each letter that the font lacks."""
    return "".join(letter if ord(letter) in _glyphs() and letter.isprintable() else "·" for letter in text)


def _label(token: str) -> str:
    """Return a token in at most nine letters, with visible spaces and line breaks."""
    text = token.replace("\r\n", "\n").replace("\r", "␍").replace("\n", "↵").replace("\t", "→")
    text = re.sub(" {3,}", lambda run: f" ×{len(run[0])}", text).replace(" ", "\N{OPEN BOX}")
    text = drawable(text)
    return plain(text if len(text) <= 9 else text[:8] + "…")


# ------------------------------------------------------------------ sources as a few colours


def _grouped(sources: Sequence[Source]) -> list[list[int]]:
    """Group the indices of neighbouring sources into at most nine groups; the embedding (first) and open sources (last)
    stay alone."""
    first = [[i] for i, source in enumerate(sources) if source.kind == "embedding"]
    last = [[i] for i, source in enumerate(sources) if source.open]
    inner = [i for i in range(len(sources)) if [i] not in first + last]
    parts = np.array_split(inner, min(len(inner), 9)) if inner else []
    return [*first, *(part.tolist() for part in parts), *last]
