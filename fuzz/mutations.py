"""Damage: of bytes, of the values in a JSON file, of lines of text. Every mutation is a function of (content, draw)."""

import json
import random
from typing import Any

ODD = (
    *(None, True, "", "x", [], {}, 0, -1, 1, -3, 10**9, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *([None], ["a"], [[]], {"content": 7}, {"a": 5}, "\ud800", "../../etc/passwd", "a" * 300, "someone/kernel"),
    *("<|endoftext|>", 2**63, -(2**63) - 1, [1e308] * 3, "{{ cycler.__init__ }}", "%s%n\x1b[2J", "²", "nosuch"),
)
"""Values that nobody meant."""


def mutate(content: bytes, draw: random.Random, kind: str) -> bytes:
    """Some damage to a file of a kind: "json", "jsonl", "text", "safetensors", "npy" or "binary"."""
    choices = [cut, flip, insert, empty, deep]
    if kind == "json":
        choices += [values] * 12 + [twice]
    elif kind == "jsonl":
        choices += [line] * 8
    elif kind == "text":
        choices += [word] * 8
    elif kind == "safetensors":
        choices += [header] * 12
    elif kind == "npy":
        choices += [described] * 6
    return draw.choice(choices)(content, draw)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(max(1, len(content)))]


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content or b" ")
    for _ in range(draw.choice((1, 1, 4))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def insert(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + draw.choice((b"\0", b"\xff\xfe", b"\r\n", b"NaN", b"}", b"\xed\xa0\x80")) + content[place:]


def empty(content: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"", b"null", b"[]", b"{}", b"7", b'"x"', b"\n"))


def deep(content: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"[", b'{"a":', b"{a: ", b"- ")) * draw.choice((100, 3000, 20_000))


def twice(content: bytes, draw: random.Random) -> bytes:
    """The first key of a JSON object once more, with another value."""
    try:
        fields = json.loads(content)
        name = draw.choice(sorted(fields))
    except (ValueError, TypeError, IndexError, RecursionError):
        return content * 2
    return b"{" + json.dumps(name).encode() + b": 7, " + content.lstrip()[1:]


def values(content: bytes, draw: random.Random) -> bytes:
    """One or two values of a JSON file replaced, or left out."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    for _ in range(draw.choice((1, 1, 2))):
        value = _replaced(value, draw)
    return json.dumps(value).encode()


def line(content: bytes, draw: random.Random) -> bytes:
    """One line of a file of JSON lines damaged as a file of JSON is."""
    lines = content.split(b"\n")
    place = draw.randrange(max(1, len(lines) - 1))
    lines[place] = mutate(lines[place], draw, "json")
    return b"\n".join(lines)


def word(content: bytes, draw: random.Random) -> bytes:
    """One word of a text replaced by an odd value."""
    words = content.split(b" ")
    words[draw.randrange(len(words))] = json.dumps(draw.choice(ODD)).encode()
    return b" ".join(words)


def header(content: bytes, draw: random.Random) -> bytes:
    """The JSON at the head of a file of safetensors damaged, its length told as it is or not."""
    size = int.from_bytes(content[:8], "little")
    damaged = draw.choice((values, values, values, twice, cut, flip))(content[8 : 8 + size], draw)
    told = draw.choice((len(damaged),) * 6 + (0, 2**63, len(content)))
    return told.to_bytes(8, "little") + damaged + content[8 + size :]


def described(content: bytes, draw: random.Random) -> bytes:
    """What an array of NumPy says of itself at the head of its file changed: type, order, shape."""
    types = (b"'<f4'", b"'|O'", b"'<U9'", b"'>i2'", b"'<c16'", b"'V0'")
    shapes = (b"(-1,)", b"(2, 2)", b"(9999999999999,)", b"()", b"'x'", b"(0,)")
    old, new = draw.choice(((b"'<f8'", draw.choice(types)), (b"(4,)", draw.choice(shapes)), (b"False", b"True")))
    return content.replace(old, new.ljust(len(old)), 1)


def _replaced(value: Any, draw: random.Random) -> Any:
    """A value in which one place is odd: near the top as often as far down."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.1:
            return {key: part for key, part in value.items() if key != name}
        return {**value, name: _replaced(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], _replaced(value[place], draw), *value[place + 1 :]]
    return draw.choice(ODD)
