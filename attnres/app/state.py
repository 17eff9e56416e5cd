"""What the page shows, as a value, and as the query string of a link that brings it back.

A link names models by their keys (`key_of`) and text by itself: it carries no path, shows the same models in an app of
other ones beside them, and what it says is checked as anything else that comes from the browser.
"""

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlencode

from attnres.errors import UserError
from attnres.inspect.inspection import By
from attnres.typed import Count, Misfit, fit

MAX_CHARACTERS = 4000
"""Of the text; about eight hundred tokens of English."""
MAX_CUTS = 512
"""Edges knocked out at once."""
MAX_LINK = 8000
"""Characters of a link: servers and browsers take at least so many."""

LARGEST_NUMBER = 99_999
"""Of a token or a read."""

LARGEST = "heaviest"
LOSS = "loss"
ATTENDED = "attended"

_SOURCE = re.compile(r"[a-z][a-z0-9_]{0,31}( [0-9]{1,4})?")
_NUMBER = re.compile(r"[0-9]{1,5}")
_KEY = re.compile(r"[A-Za-z0-9_-]{0,60}~[0-9a-f]{12}")
Span = Literal["all", "one"]


@dataclass(frozen=True)
class Cut:
    """One source of one read of one model, each by its number, knocked out at all tokens or at one."""

    model: Count
    read: Count
    source: Count
    token: Count | None = None


@dataclass(frozen=True)
class View:
    """Everything that decides what the page shows.

    Attributes:
        text: what the models read. other: a second text, which one model reads beside the first; None is none.
        models: the numbers of the models shown, one or two.
        by: what sources are shown by.
        read: the read that colours the tokens, of the first half; None is the output's.
        source: the source that colours them, `LARGEST` for each token's largest source, `LOSS` for the change in each
            token's loss, `ATTENDED` for what the chosen token attends to.
        token: the chosen token; None is the last that is not white space. half: the half whose tokens it is one of.
        cuts: what is knocked out, in the order in which it was.
        span: whether the next cut holds at all tokens or at the chosen one.
    """

    text: str = ""
    other: str | None = None
    models: tuple[Count, ...] = (0,)
    by: By = "contribution"
    read: Count | None = None
    source: str = LARGEST
    token: Count | None = None
    half: Count = 0
    cuts: tuple[Cut, ...] = ()
    span: Span = "all"

    def cuts_of(self, model: int) -> tuple[Cut, ...]:
        """What is knocked out in one model."""
        return tuple(cut for cut in self.cuts if cut.model == model)

    def to_json(self) -> dict[str, Any]:
        """For the browser."""
        return asdict(self)


def from_json(value: Any, models: int) -> View:
    """The view that a browser sends back.

    Raises:
        UserError: it is none, or one of other models.
    """
    try:
        view = fit(value, View)
    except Misfit as error:
        raise UserError(f"{error.sentence('the view')}: load the page again") from None
    return _checked(view, models)


def key_of(name: str, step: int | None, content: bytes) -> str:
    """The key of a model in links: the end of its name and its step, for readers, and a hash of its content.

    >>> key_of("runs/my block", 1200, b"weights")
    'my-block-1200~9a129038d9a0'
    """
    words = re.sub(r"[^A-Za-z0-9_]+", "-", name.rsplit("/", 1)[-1])[-40:]
    step_words = "" if step is None else f"-{step}"
    return f"{words}{step_words}~{hashlib.sha256(content).hexdigest()[:12]}"


def encode(view: View, keys: Sequence[str]) -> str:
    """The query string of a view, without the question mark; empty where it would be longer than `MAX_LINK`, or its
    text is longer than the page takes. `keys` are those of the models.

    The models shown are "m", others of which something is knocked out "c"; a knocked-out edge "e" begins with the place
    of its model among both.

    >>> encode(View("", None, (1,), cuts=(Cut(1, 4, 0), Cut(0, 2, 1, 7))), ("a~1234567890ab", "b~1234567890ac"))
    'm=b~1234567890ac&c=a~1234567890ab&e=0.4.0_1.2.1.7'
    """
    named = list(dict.fromkeys([*view.models, *(cut.model for cut in view.cuts)]))
    fields: dict[str, str] = {}
    if view.text:
        fields["t"] = _packed(view.text)
    if view.other is not None:
        fields["u"] = _packed(view.other)
    for field, numbers in (("m", named[: len(view.models)]), ("c", named[len(view.models) :])):
        if numbers:
            fields[field] = ".".join(keys[number] for number in numbers)
    if view.by != "contribution":
        fields["b"] = view.by
    if view.read is not None:
        fields["r"] = str(view.read)
    if view.source != LARGEST:
        fields["s"] = view.source
    if view.token is not None:
        fields["k"] = str(view.token)
    if view.half:
        fields["h"] = str(view.half)
    if view.span != "all":
        fields["o"] = view.span
    if view.cuts:
        cuts = [(named.index(cut.model), cut.read, cut.source, cut.token) for cut in view.cuts]
        fields["e"] = "_".join(".".join(str(number) for number in cut if number is not None) for cut in cuts)
    query = urlencode(fields)
    too_long = max(len(view.text), len(view.other or "")) > MAX_CHARACTERS
    return "" if too_long or len(query) > MAX_LINK else query


def decode(fields: Mapping[str, str], keys: Sequence[str]) -> View:
    """The view of a link's query fields; unknown fields are somebody else's and are left alone. What is
    knocked out of a model that is not there is that of a number after the last.

    Args:
        keys: of the models that are there.

    Raises:
        UserError: fields that no link of this page has, or a model that is not there.
    """
    try:
        parts = fields["e"].split("_") if fields.get("e") else []
        by, span = fields.get("b", "contribution"), fields.get("o", "all")
        if by not in ("contribution", "weight") or span not in ("all", "one"):
            raise ValueError(by)
        shown = _keys(fields["m"]) if "m" in fields else []
        named = _places([*shown, *(_keys(fields["c"]) if "c" in fields else [])], keys)
        view = View(
            text=_text(fields.get("t", "")),
            other=_text(fields["u"]) if "u" in fields else None,
            models=tuple(named[: len(shown)]) or (0,),
            by=by,
            read=_number(fields["r"]) if "r" in fields else None,
            source=fields.get("s", LARGEST),
            token=_number(fields["k"]) if "k" in fields else None,
            half=_number(fields.get("h", "0")),
            cuts=tuple(_cut(part, named or [0]) for part in parts),
            span=span,
        )
    except (ValueError, TypeError, IndexError, zlib.error, binascii.Error):
        raise UserError("this link is damaged: copy it again, or start from the text") from None
    _checked(view, len(keys) + len(named))
    for key, number in zip(shown, named):
        if number >= len(keys):
            name, content = key.split("~")
            raise UserError(
                f"this link shows the model {name} ({content}), which is not open here: what is below is another; "
                "start the app with that one"
            )
    return view


def _checked(view: View, models: int) -> View:
    if (
        not 1 <= len(view.models) <= 2
        or len(set(view.models)) < len(view.models)
        or (view.other is not None and len(view.models) > 1)
        or not _SOURCE.fullmatch(view.source)
        or len(view.cuts) > MAX_CUTS
        or max(view.token or 0, view.read or 0) > LARGEST_NUMBER
        or view.half > 1
    ):
        raise UserError("this link is damaged: copy it again, or start from the text")
    if max(view.models) >= models:
        raise UserError("this link shows other models than the ones that are open: start the app with those")
    return view


def _cut(part: str, named: Sequence[int]) -> Cut:
    place, *numbers = [_number(number) for number in part.split(".")]
    return Cut(named[place], *numbers)


def _keys(text: str) -> list[str]:
    keys = text.split(".")
    if not all(map(_KEY.fullmatch, keys)):
        raise ValueError(text)
    return keys


def _places(wanted: Sequence[str], keys: Sequence[str]) -> list[int]:
    """The numbers of the models of some keys, by their hashes: each once, also where a model is there twice; a number
    after the last for one that is not there."""
    places: list[int] = []
    for key in wanted:
        same = (i for i, other in enumerate(keys) if other.split("~")[1] == key.split("~")[1] and i not in places)
        places.append(next(same, len(keys) + len(places)))
    return places


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _packed(text: str) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode().rstrip("=")


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
