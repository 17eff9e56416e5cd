"""One held-out text in the page, each token on the colour of what one source is of its read."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.figures.plot import NotShown, number
from attnres.figures.tokens import example_columns
from attnres.inspect.inspection import FIELD, amounts
from attnres.inspect.notebook import end_of_scale
from attnres.residuals import Source

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

READS = 4
"""Reads of a model that are shown."""
DEEPEST = 65
"""Percent of the colour at the largest value: text stays readable on it."""
NAMED = 2
"""Sources that a token's title names."""


def example(inspection: "Inspection") -> str:
    """The text once for each of the reads with which blocks begin and the output's, as HTML, on the colour of one
    source (`attnres.figures.tokens.example_columns`); empty where the model has no such read, or one whose numbers
    are the same for every token."""
    try:
        columns = example_columns(inspection, "contribution", READS + 1)[-READS:]
    except NotShown:
        return ""
    words: Any = inspection.example
    blocks = []
    for routing, row, place, values in columns:
        if len(values) > 1 and np.ptp(values) < 1e-6:
            continue
        read = routing.layout[row]
        top = end_of_scale(values)
        rows = words[FIELD[routing.by]][inspection.layout.index(read)]
        parts = zip(words["tokens"], words["kinds"], rows, np.nan_to_num(values / top), strict=True)
        tokens = [
            _token(text, kind, amounts(row, routing.by), read.sources, float(part)) for text, kind, row, part in parts
        ]
        what = f"{routing.by} of {read.sources[place].name}"
        lead = (
            f"{read.name}, {what}: mean {number(float(values.mean()))}, largest {number(float(np.abs(values).max()))}"
        )
        blocks.append(f'<div><h3>{escape(lead)}</h3><pre class="tokens">{"".join(tokens)}</pre></div>')
    return f'<div class="figures texts">{"".join(blocks)}</div>' if blocks else ""


def _token(text: str, kind: str, values: np.ndarray, sources: Sequence[Source], part: float) -> str:
    most = np.argsort(-np.abs(values))[:NAMED]
    title = f"{kind}: " + ", ".join(f"{sources[i].name} {number(float(values[i]))}" for i in most)
    sign = ' class="less"' if part < 0 else ""
    size = f"--w:{DEEPEST * abs(part):.0f}%"
    return f'<span{sign} style="{size}" title="{escape(title, quote=True)}">{escape(text)}</span>'
