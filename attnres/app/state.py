"""What the page shows, as a value, and as the query string of a link that brings it back.

A link names models by their place on the command line and text by itself: it carries no path, and what it says is
checked as anything else that comes from the browser.
"""

import base64
import binascii
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from attnres.errors import UserError

MAX_CHARACTERS = 4000
"""Of the text; about eight hundred tokens of English."""
MAX_EDGES = 512
"""Edges knocked out at once."""
MAX_LINK = 8000
"""Characters of a link: servers and browsers take at least so many."""

HEAVIEST = "heaviest"
LOSS = "loss"

_SOURCE = re.compile(r"[a-z][a-z0-9_]{0,31}( [0-9]{1,4})?")
_NUMBER = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True)
class Edge:
    """One source of one read of one model, each by its number."""

    model: int
    read: int
    source: int


@dataclass(frozen=True)
class View:
    """Everything that decides what the page shows.

    Attributes:
        text: what the models read.
        models: the numbers of the models shown, one or two.
        read: the read that colours the tokens; None is the output's.
        source: the source whose weight colours them, `HEAVIEST` for each token's heaviest source, or `LOSS` for the
            change in each token's loss.
        token: the chosen token; None is the last that is not white space.
        edges: what is knocked out.
    """

    text: str = ""
    models: tuple[int, ...] = (0,)
    read: int | None = None
    source: str = HEAVIEST
    token: int | None = None
    edges: frozenset[Edge] = frozenset()

    def edges_of(self, model: int) -> frozenset[tuple[int, int]]:
        """The (read, source) pairs knocked out in one model."""
        return frozenset((edge.read, edge.source) for edge in self.edges if edge.model == model)


def encode(view: View) -> str:
    """The query string of a view, without the question mark; empty where it would be longer than `MAX_LINK`, or its
    text is longer than the page takes.

    >>> encode(View("", (0, 1), edges=frozenset({Edge(1, 4, 0)})))
    'm=0.1&e=1.4.0'
    """
    fields: dict[str, str] = {}
    if view.text:
        fields["t"] = base64.urlsafe_b64encode(zlib.compress(view.text.encode(), 9)).decode().rstrip("=")
    fields["m"] = ".".join(map(str, view.models))
    if view.read is not None:
        fields["r"] = str(view.read)
    if view.source != HEAVIEST:
        fields["s"] = view.source
    if view.token is not None:
        fields["k"] = str(view.token)
    if view.edges:
        edges = sorted((edge.model, edge.read, edge.source) for edge in view.edges)
        fields["e"] = "_".join(".".join(map(str, edge)) for edge in edges)
    query = urlencode(fields)
    return query if len(query) <= MAX_LINK and len(view.text) <= MAX_CHARACTERS else ""


def decode(fields: Mapping[str, str], models: int) -> View:
    """The view of a link's query fields; unknown fields are somebody else's and are left alone.

    Args:
        models: how many models there are.

    Raises:
        UserError: fields that no link of this page has.
    """
    try:
        shown = tuple(_number(part) for part in fields["m"].split(".")) if "m" in fields else (0,)
        if len(shown) > 2 or list(shown) != sorted(set(shown)):
            raise ValueError("models")
        if any(number >= models for number in shown):
            raise UserError("this link shows other models than the ones that are open: start the app with those")
        source = fields.get("s", HEAVIEST)
        if not _SOURCE.fullmatch(source):
            raise ValueError(source)
        parts = fields["e"].split("_") if fields.get("e") else []
        if len(parts) > MAX_EDGES:
            raise ValueError("too many edges")
        edges = []
        for part in parts:
            model, read, index = (_number(number) for number in part.split("."))
            edges.append(Edge(model, read, index))
        return View(
            text=_text(fields.get("t", "")),
            models=shown,
            read=_number(fields["r"]) if "r" in fields else None,
            source=source,
            token=_number(fields["k"]) if "k" in fields else None,
            edges=frozenset(edges),
        )
    except UserError:
        raise
    except (ValueError, zlib.error, binascii.Error):
        raise UserError("this link is damaged: copy it again, or start from the text") from None


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _text(packed: str) -> str:
    if not packed:
        return ""
    unpack = zlib.decompressobj()
    # The bound is on what comes out: a few bytes can unpack to gigabytes.
    data = unpack.decompress(
        base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True), 4 * MAX_CHARACTERS
    )
    text = data.decode()
    if unpack.unconsumed_tail or not unpack.eof or len(text) > MAX_CHARACTERS:
        raise ValueError("too long")
    return text
