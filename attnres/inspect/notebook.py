"""Results as JSON, as data frames with names, and as a notebook shows them: tables in HTML."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from attnres.errors import UserError
from attnres.files import write_json
from attnres.inspect.colours import ink_on, place_of_size, signed_colour, source_colours
from attnres.residuals import Read, columns, labels
from attnres.text import number

if TYPE_CHECKING:
    from pandas import DataFrame

SAVED = '"{{saved}}"'
"""What stands in the place of the data in a page without any."""


def alone(data: Any) -> str:
    """Return the explorer's page in one file that needs no server: style, script and `data`, the numbers that it
    shows. Without data the placeholder `SAVED` stands in their place."""
    page, style, script = (
        files("attnres").joinpath("app", f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    text = SAVED if data is None else json.dumps(data).replace("<", "\\u003c")
    page = page.replace('<link rel="stylesheet" href="page.css">', f"<style>{style}</style>")
    page = page.replace('<script src="page.js"></script>', f"<script>{script}</script>").replace("{{begin}}", "{}")
    return page.replace("<!-- saved -->", f'<script type="application/json" id="saved">{text}</script>')


SHOWN = 512
"""Tokens of a pass that a page holds the numbers of."""


def framed(data: Any) -> str:
    """Return `alone(data)` in a frame of its own within a notebook's cell."""
    page = escape(alone(data))
    return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:1px solid #ccc" title="attnres"></iframe>'


def sheet(layout: Sequence[Read]) -> dict[str, Any]:
    """Return the columns and reads of the explorer's tables: names, labels and colours."""
    across, words = columns(read.sources for read in layout), labels(layout)
    place = {source.name: i for i, source in enumerate(across)}
    return {
        "columns": [
            {"label": words[source], "short": source.short, "colour": colour, "name": source.name}
            for source, colour in zip(across, source_colours(across), strict=True)
        ],
        "reads": [
            {
                "label": words[read],
                "name": read.name,
                "layer": read.number,
                "sources": [place[source.name] for source in read.sources],
            }
            for read in layout
        ],
    }


FLOOR = 0.02
"""The least that a scale of changes runs to, nats or a share: what is smaller stays pale."""


class Table(NamedTuple):
    """A caption, the names of the columns, and the rows."""

    title: str
    head: Sequence[str]
    rows: Iterable[Sequence[object]]


def cell(value: object) -> str:
    """Return the text of a table's cell: a number in three digits, None as a dash."""
    return number(value) if isinstance(value, float | None) else str(value)


class Named:
    """A result with numbers for the sources of reads: has the names of both, from its `layout`."""

    if TYPE_CHECKING:  # a field of the result

        @property
        def layout(self) -> Sequence[Read]: ...

    @property
    def reads(self) -> list[str]:
        return [read.name for read in self.layout]

    @property
    def sources(self) -> list[list[str]]:
        return [[source.name for source in read.sources] for read in self.layout]


class Result:
    """What a function of `attnres.inspect` measured: a short line, a data frame, a table in a notebook, JSON.

    A subclass is a dataclass, or has a `to_dict` of its own, and says `_about`, `_records` and mostly `_repr_html_`.
    """

    HIDDEN: ClassVar[tuple[str, ...]] = ("layout", "words")
    """Fields that JSON does not have; of a layout it has the names of reads and sources."""

    def _about(self) -> str:
        """Return the summary in the brackets of `repr`."""
        raise NotImplementedError

    def _records(self) -> Iterable[dict[str, Any]]:
        """Yield the rows of the data frame, as names and values."""
        raise NotImplementedError

    def as_table(self) -> "Table":
        """Return the table that a notebook and the terminal show: by default the rows of the data frame."""
        rows = list(self._records())
        return Table(repr(self), list(rows[0]) if rows else [], [list(row.values()) for row in rows])

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return table(*self.as_table())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._about()})"

    def frame(self) -> "DataFrame":
        """Return a data frame. Raises UserError without pandas."""
        return frame(self._records())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        names = {"reads": self.reads, "sources": self.sources} if isinstance(self, Named) else {}
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # ty: ignore[invalid-argument-type]
        return {name: _plain(value) for name, value in values.items() if name not in self.HIDDEN} | names

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON. Raises UserError."""
        write_json(path, {"format": 1, **self.to_dict()})


def _plain(value: Any) -> Any:
    """Return a field as JSON has it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def end_of_scale(values: Any, least: float = FLOOR) -> float:
    """Return where a scale of these numbers ends: at the largest size, `least` at least. What is NaN does not count."""
    return float(np.fmax.reduce(np.abs(values), axis=None, initial=least))


def frame(rows: Iterable[dict[str, Any]]) -> "DataFrame":
    """Return rows as a data frame.

    Raises:
        UserError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UserError("a data frame needs pandas: pip install pandas") from error
    return pandas.DataFrame(list(rows))


def edges(
    reads: Sequence[str], sources: Sequence[Sequence[str]], **values: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each (read, source) edge, with a column for each of the named values that has rows."""
    counts = [len(names) for names in sources]
    shown = {name: rows for name, rows in values.items() if [len(row) for row in rows] == counts}
    for r, (read, names) in enumerate(zip(reads, sources, strict=True)):
        for s, source in enumerate(names):
            yield {"read": read, "source": source, **{name: rows[r][s] for name, rows in shown.items()}}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table, all text escaped."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell(value))}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def heat(title: str, layout: Sequence[Read], values: Sequence[Sequence[float]], least: float = FLOOR) -> str:
    """Return an HTML table of reads and sources, blue above zero and orange below, over the root of the size, on a
    scale to the largest value, `least` at least."""
    top = end_of_scale([value for row in values for value in row], least)
    across = columns(read.sources for read in layout)
    lines = []
    for read, row in zip(layout, values, strict=True):
        by_name = {source.name: value for source, value in zip(read.sources, row)}
        cells = []
        for source in across:
            if source.name not in by_name:
                cells.append("<td></td>")
                continue
            value = by_name[source.name]
            colour = signed_colour(place_of_size(value, top))
            style = f"background:{colour};color:{ink_on(colour)};text-align:right"
            tip = escape(f"{read.label} ← {source.label}")
            cells.append(f'<td style="{style}" title="{tip}">{number(value, 2)}</td>')
        lines.append(f"<tr><th>{escape(read.label)}</th>{''.join(cells)}</tr>")
    head = "".join(f'<th title="{escape(source.label)}">{escape(source.short)}</th>' for source in across)
    return (
        f'<div style="overflow-x:auto"><table style="font-size:11px"><caption>{escape(title)}</caption>'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
