"""Pieces of HTML that the parts of the page are made of, all text escaped."""

import hashlib
import re
import unicodedata
from collections.abc import Collection
from html import escape

BEFORE = "#8a94a3"
"""Of bars that an edit or a later step is compared with."""
RIGHT_TO_LEFT = ("R", "AL", "AN")
UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")
"""Kinds of characters in Unicode, as those above are directions."""


def visible(piece: str) -> str:
    """A token's text with what cannot be seen made visible: spaces at its ends, line ends, tabs, characters of control
    and form and other spaces by their codes. What is written from right to left is kept apart from the words around."""
    words = piece.strip(" ")
    front = len(piece) - len(piece.lstrip(" "))
    shown = "␣" * front + words + "␣" * (len(piece) - front - len(words))
    shown = shown.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(map(_seen, shown)) or "∅"
    return f"\u2068{shown}\u2069" if any(unicodedata.bidirectional(c) in RIGHT_TO_LEFT for c in shown) else shown


def _seen(letter: str) -> str:
    code = ord(letter)
    if code < 32:
        return chr(0x2400 + code)
    if code == 127:
        return "␡"
    return f"\\u{code:04x}" if letter != " " and unicodedata.category(letter) in UNSEEN else letter


def sentence(text: str, kind: str = "error") -> str:
    """A sentence for the reader, or nothing."""
    return f'<p class="{escape(kind)}" role="status">{escape(text[:1].upper() + text[1:])}</p>' if text else ""


def section(of: str, name: str, title: str, body: str, note: str = "", save: bool = False) -> str:
    """A part of the page, with a hash by which the browser knows it; `of` is the model's title."""
    if not body:
        return ""
    of = escape(f"of “{title}”, {visible(of)}", quote=True)
    buttons = "".join(
        f'<button type="button" class="save" data-save="{kind}" aria-label="{kind.upper()} {of}">{kind.upper()}'
        "</button>"
        for kind in ("svg", "png")
    )
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    saving = f'<span class="saving">{buttons}</span>' if save and "<svg" in body else ""
    whole = f"<h3>{escape(title)}{saving}</h3>{note}{body}"
    return f'<section class="{name}" data-hash="{hashlib.sha256(whole.encode()).hexdigest()[:16]}">{whole}</section>'


def without(html: str, known: Collection[str]) -> str:
    """The same with nothing in the sections of the hashes that are known."""
    parts = r'(<section class="\w+" data-hash="(\w+)">).*?(</section>)'
    return re.sub(parts, lambda part: part[1] + part[3] if part[2] in known else part[0], html, flags=re.DOTALL)


def bar(share: float, largest: float, colour: str) -> str:
    """A bar whose length is `share` out of `largest`."""
    return f'<i style="width:{max(0.5, 100 * share / largest):.1f}%;background:{colour}"></i>'


def swatch(colour: str) -> str:
    """A square of a colour, for a legend."""
    return f'<i class="swatch" style="background:{colour}"></i>'
