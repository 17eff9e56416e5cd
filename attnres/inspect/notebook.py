"""What is measured as a notebook shows it: tables in HTML, and as data frames with names."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres.errors import UserError
from attnres.inspect.colours import ink_on, place_of_size, signed_colour
from attnres.residuals import Read, columns
from attnres.text import short

if TYPE_CHECKING:
    from pandas import DataFrame

FLOOR = 0.02
"""The least that a scale of changes runs to, nats or a share: what is smaller stays pale."""


def end_of_scale(values: Any, least: float = FLOOR) -> float:
    """Where a scale of these numbers ends: at the largest size, `least` at least. What is NaN does not count."""
    return float(np.fmax.reduce(np.abs(values), axis=None, initial=least))


def frame(rows: Iterable[dict[str, Any]]) -> "DataFrame":
    """Rows as a data frame.

    Raises:
        UserError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError("a data frame needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def edges_frame(
    reads: Sequence[str], sources: Sequence[Sequence[str]], **values: Sequence[Sequence[float]]
) -> "DataFrame":
    """One row a (read, source) edge, with a column for each of the named values; those without rows are left out."""
    counts = [len(names) for names in sources]
    shown = {name: rows for name, rows in values.items() if [len(row) for row in rows] == counts}
    return frame(
        {"read": read, "source": source, **{name: rows[r][s] for name, rows in shown.items()}}
        for r, (read, names) in enumerate(zip(reads, sources, strict=True))
        for s, source in enumerate(names)
    )


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table, all text escaped."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def parts(title: str, layout: Sequence[Read], values: Sequence[Sequence[float]]) -> str:
    """`heat` of parts of reads, whose scale ends at 1 or, since contributions may exceed it, at the largest."""
    return heat(title, layout, values, least=1.0)


def heat(title: str, layout: Sequence[Read], values: Sequence[Sequence[float]], least: float = FLOOR) -> str:
    """An HTML table of reads and sources, blue above zero and orange below, over the root of the size, on a scale to
    the largest value, `least` at least."""
    top = end_of_scale([value for row in values for value in row], least)
    across = columns(read.sources for read in layout)
    lines = []
    for read, row in zip(layout, values, strict=True):
        by_name = {source.name: value for source, value in zip(read.sources, row)}
        cells = []
        for source in across:
            value = by_name.get(source.name)
            if value is None:
                cells.append("<td></td>")
                continue
            colour = signed_colour(place_of_size(value, top))
            style = f"background:{colour};color:{ink_on(colour)};text-align:right"
            cells.append(f'<td style="{style}" title="{escape(f"{read.name} ← {source.name}")}">{short(value)}</td>')
        lines.append(f"<tr><th>{escape(read.name)}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(source.short)}</th>" for source in across)
    return (
        f'<div style="overflow-x:auto"><table style="font-size:11px"><caption>{escape(title)}</caption>'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
