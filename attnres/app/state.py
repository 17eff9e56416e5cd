"""The view, all that decides what the page shows: as a value, and as the query string of a link.

A link names models by their keys (`key_of`) and holds the text itself, but no path: it opens the same models whatever
others are open. Its content is checked like any other input of the browser.
"""

import base64
import binascii
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from attnres.errors import UserError
from attnres.inspect.inspection import By
from attnres.reading import parse_json
from attnres.typed import Count, Misfit, fit

MAX_CHARACTERS = 4000
"""Of the text; about eight hundred tokens of English."""
MAX_CUTS = 512
"""Cuts at once."""
MAX_UNPACKED = 200_000
"""Bytes of JSON in a link: two texts in escapes of twelve letters a character, and the cuts."""
MAX_LINK = 8000
"""Characters of a link: servers and browsers take at least so many."""

LARGEST_NUMBER = 9_999_999
"""Of a token, its id or a read."""

DAMAGED = "this link is damaged: copy it again, or start from the text"
_KEY = re.compile(r"[A-Za-z0-9_-]{0,60}~[0-9a-f]{12}")
Span = Literal["all", "one"]
Tab = Literal["explain", "patch", "search", "training"]


@dataclass(frozen=True)
class Cut:
    """One source of one read of one model, each by its number, ablated at all tokens or at one."""

    model: Count
    read: Count
    source: Count
    token: Count | None = None


@dataclass(frozen=True)
class View:
    """Everything that decides what the page shows.

    Attributes:
        text: what the models read.
        models: the numbers of the models shown, one or two, the earlier step first.
        token: the chosen token of the first model's; None is the last that is not white space.
        target: the id of the token whose probability is explained; None is the text's next token, after the last the
            likeliest. against: the id of the one that it is compared with; None is no one.
        by: whether sources are shown by contribution or by weight.
        cuts: in the order in which they were made. span: whether the next cut is made at all tokens or at the chosen
            one. edited: whether the figures are those with the cuts.
        tab: the part of the page. other: the text that patches come from.
        read, source: the numbers of the edge in the search tab.
        layer: the number of the read that is opened over all tokens; None is none.
    """

    text: str = ""
    models: tuple[Count, ...] = (0,)
    token: Count | None = None
    target: Count | None = None
    against: Count | None = None
    by: By = "contribution"
    cuts: tuple[Cut, ...] = ()
    span: Span = "all"
    edited: bool = True
    tab: Tab = "explain"
    other: str = ""
    read: Count = 0
    source: Count = 0
    layer: Count | None = None

    def cuts_of(self, model: int) -> tuple[Cut, ...]:
        """Return the cuts in one model."""
        return tuple(cut for cut in self.cuts if cut.model == model)

    def to_json(self) -> dict[str, Any]:
        """For the browser."""
        return asdict(self)


def from_json(value: Any, models: int) -> View:
    """Return the view that a browser sends back.

    Raises:
        UserError: it is none, or one of other models.
    """
    try:
        view = fit(value, View)
    except Misfit as error:
        raise UserError(f"{error.sentence('the view')}: load the page again") from None
    return _checked(view, models)


def key_of(name: str, step: int | None, content: bytes) -> str:
    """Return the key of a model in links: the end of its name and its step, for readers, and a hash of its content.

    >>> key_of("runs/my block", 1200, b"weights")
    'my-block-1200~9a129038d9a0'
    """
    words = re.sub(r"[^A-Za-z0-9_]+", "-", name.rsplit("/", 1)[-1])[-40:]
    step_words = "" if step is None else f"-{step}"
    return f"{words}{step_words}~{hashlib.sha256(content).hexdigest()[:12]}"


def encode(view: View, keys: Sequence[str]) -> str:
    """Return the query string of a view, without the question mark: its fields that are not the default ones as JSON,
    packed. It is empty where it would be longer than `MAX_LINK`, or the text is longer than the page takes.

    Numbers of models are places in `keys`, those of the models shown first.

    Args:
        keys: of all models.
    """
    named = list(dict.fromkeys([*view.models, *(cut.model for cut in view.cuts)]))
    cuts = tuple(replace(cut, model=named.index(cut.model)) for cut in view.cuts)
    fields = asdict(replace(view, models=tuple(range(len(view.models))), cuts=cuts))
    changed = {name: value for name, value in fields.items() if value != getattr(View, name)}
    text = json.dumps({"keys": [keys[number] for number in named], **changed}, separators=(",", ":"))
    query = "v=" + base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")
    too_long = max(len(view.text), len(view.other)) > MAX_CHARACTERS
    return "" if too_long or len(query) > MAX_LINK else query


def decode(fields: Mapping[str, str], keys: Sequence[str]) -> View:
    """Return the view of a link's query fields; unknown fields are somebody else's and are left alone. A cut in a model
    that is not there is one in a number after the last.

    Args:
        keys: of the models that are there.

    Raises:
        UserError: a damaged link, or a model that is not there.
    """
    if "v" not in fields:
        return View()
    try:
        value = parse_json(_unpacked(fields["v"]), "the link")
        model_keys = value.pop("keys")
        if not all(map(_KEY.fullmatch, model_keys)):
            raise ValueError(model_keys)
        view = fit(value, View)
        named = _places(model_keys, keys)
        cuts = tuple(replace(cut, model=named[cut.model]) for cut in view.cuts)
        view = replace(view, models=tuple(named[number] for number in view.models), cuts=cuts)
        if max(len(view.text), len(view.other)) > MAX_CHARACTERS:
            raise ValueError("too long")
    except (ValueError, TypeError, LookupError, AttributeError, UserError, Misfit, zlib.error, binascii.Error):
        raise UserError(DAMAGED) from None
    view = _checked(view, len(keys) + len(named))
    for key, number in zip(model_keys, named[: len(view.models)]):
        if number >= len(keys):
            name, content = key.split("~")
            raise UserError(
                f"this link shows the model {name} ({content}), which is not open here: what is below is another; "
                "start the app with that one"
            )
    return view


def _checked(view: View, models: int) -> View:
    numbers = (view.token or 0, view.target or 0, view.against or 0, view.read, view.source, view.layer or 0)
    if (
        not 1 <= len(view.models) <= 2
        or len(set(view.models)) < len(view.models)
        or len(view.cuts) > MAX_CUTS
        or max(numbers) > LARGEST_NUMBER
    ):
        raise UserError(DAMAGED)
    if max(view.models) >= models:
        raise UserError("this link shows other models than the ones that are open: start the app with those")
    return view


def _places(wanted: Sequence[str], keys: Sequence[str]) -> list[int]:
    """Return the numbers of the models of some keys, by their hashes: each once, also where a model is there twice; a
    number after the last for one that is not there."""
    places: list[int] = []
    for key in wanted:
        same = (i for i, other in enumerate(keys) if other.split("~")[1] == key.split("~")[1] and i not in places)
        places.append(next(same, len(keys) + len(places)))
    return places


def _unpacked(packed: str) -> str:
    unpack = zlib.decompressobj()
    # The bound is on what comes out: a few bytes can unpack to gigabytes.
    data = unpack.decompress(
        base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True), MAX_UNPACKED
    )
    if unpack.unconsumed_tail or not unpack.eof:
        raise ValueError("too long")
    return data.decode()
