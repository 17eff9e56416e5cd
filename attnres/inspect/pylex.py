"""Python source as words, where it parses and where it does not: a piece cut out of a file, or broken code."""

import ast
import io
import keyword
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")


class Lexeme(NamedTuple):
    """A word of the source at characters [start, end).

    `type` is "keyword", "name", "string", "number", "operator", "comment", or "end" of a logical line (also of an empty
    one).
    """

    start: int
    end: int
    type: str
    text: str


def lexemes(source: str) -> list[Lexeme]:
    """The words of a Python source, in order, whatever it is.

    Source that parses is read by Python's own `tokenize`. Other source is scanned: brackets that its beginning closes
    were open before it, a keyword that only begins a statement closes all brackets, and it begins inside a string of
    three quotes if that reading has fewer names side by side, which Python never has.
    """
    if _parses(source):
        try:
            return list(_tokenized(source))
        except (tokenize.TokenError, SyntaxError):
            pass
    found = _scanned(source, 0)
    for quotes in ('"""', "'''"):
        closed = source.find(quotes)
        if closed < 0:
            continue
        inside = Lexeme(0, closed + 3, "string", source[: closed + 3])
        other = [inside, *_scanned(source, closed + 3)]
        if _oddities(other) < _oddities(found):
            found = other
    return found


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source's own escapes and comparisons
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# ------------------------------------------------------------------ source that parses


def _tokenized(source: str) -> Iterator[Lexeme]:
    lines = _line_starts(source)
    types = {tokenize.COMMENT: "comment", tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator"}
    f_start = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "TSTRING_START", None)
    f_end = getattr(tokenize, "FSTRING_END", None), getattr(tokenize, "TSTRING_END", None)
    depth, begun = 0, 0  # of f-strings, which are one literal
    for token in tokenize.generate_tokens(io.StringIO(source, newline="").readline):
        start, end = (min(len(source), lines[row - 1] + column) for row, column in (token.start, token.end))
        if token.type in f_start:
            begun = start if not depth else begun
            depth += 1
        elif token.type in f_end:
            depth -= 1
            if not depth:
                yield Lexeme(begun, end, "string", source[begun:end])
        elif depth:
            continue
        elif token.type == tokenize.NEWLINE:
            yield Lexeme(start, end, "end", "")
        elif token.type == tokenize.NAME:
            yield Lexeme(start, end, "keyword" if keyword.iskeyword(token.string) else "name", token.string)
        elif token.type in types:
            yield Lexeme(start, end, types[token.type], token.string)


def _line_starts(source: str) -> list[int]:
    """Where each line begins, lines as `readline` cuts them without translating their ends."""
    starts = [0]
    for line in io.StringIO(source, newline=""):
        starts.append(starts[-1] + len(line))
    return [*starts, len(source)]


# ------------------------------------------------------------------ source that does not

_WORD = re.compile(
    r"""(?P<skip>[^\S\r\n]+|\\\r?\n) | (?P<line>\r\n|\n|\r) | (?P<comment>\#[^\r\n]*)
      | (?P<string>(?:[rR][bBfFtT]?|[bBfFtT][rR]?|[uU])?
          (?: \"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\Z) | '''(?:[^\\]|\\.)*?(?:'''|\Z)
            | "(?:[^"\\\r\n]|\\\r\n|\\.)*(?:"|(?=[\r\n])|\Z) | '(?:[^'\\\r\n]|\\\r\n|\\.)*(?:'|(?=[\r\n])|\Z) ) )
      | (?P<number>0[xXoObB][\da-fA-F_]+ | (?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?[jJ]?)
      | (?P<name>[^\W\d]\w*) | (?P<operator>.)""",
    re.VERBOSE | re.DOTALL,
)
_BEGINS = frozenset(
    "def class return raise import while try pass break continue assert del global nonlocal elif except finally".split()
)
"""Keywords that no line in the middle of a statement begins with."""


def _scanned(source: str, start: int) -> list[Lexeme]:
    words = [(match.lastgroup or "", match) for match in _WORD.finditer(source, start)]
    found: list[Lexeme] = []
    depth, first = _open_before(words), True
    for group, match in words:
        text = match[0]
        if group == "skip":
            continue
        if group == "line":
            first = True
            if not depth:
                found.append(Lexeme(*match.span(), "end", ""))
            continue
        if group == "name" and keyword.iskeyword(text):
            group = "keyword"
            if first and depth and text in _BEGINS:
                depth = 0
                found.append(Lexeme(match.start(), match.start(), "end", ""))
        depth += (text in OPENING) - (text in CLOSING and depth > 0)
        first = False
        found.append(Lexeme(*match.span(), group, text))
    return found


def _open_before(words: Sequence[tuple[str, re.Match]]) -> int:
    """How many brackets the source closes and did not open, before its first line that surely begins a statement."""
    depth, lowest, first = 0, 0, False
    for group, match in words:
        if group == "line":
            first = True
        elif group == "name" and first and match[0] in _BEGINS:
            break
        elif group != "skip":
            first = False
        if group == "operator":
            depth += (match[0] in OPENING) - (match[0] in CLOSING)
            lowest = min(lowest, depth)
    return -lowest


_SOFT = ("match", "case", "type", "print", "exec", "_")


def _oddities(words: Sequence[Lexeme]) -> int:
    """How often two names stand side by side in one line: English, or code read as a string's outside."""
    return sum(a.type == b.type == "name" and a.text not in _SOFT for a, b in pairwise(words))
