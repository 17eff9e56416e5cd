"""Python source as words, whole or a piece cut out of a file: Pygments' tokens, cut into logical lines."""

import keyword
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Number, String, Text

OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")
_BEGINS = frozenset(
    "def class return raise import while try pass break continue assert del global nonlocal elif except finally".split()
)
"""Keywords that no line in the middle of a statement begins with."""
_SOFT = ("match", "case", "type", "print", "exec", "_")
_LEXER = PythonLexer()


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
    """Return the words of a Python source in order, whatever it is.

    Brackets that the source's beginning closes count as open before it, and a keyword that only begins a statement
    closes all brackets. The source begins inside a string of three quotes if that reading has fewer names side by side,
    which Python never has.
    """
    words = list(_in_lines(list(_words(source, 0))))
    for quotes in ('"""', "'''"):
        closed = source.find(quotes) + 3
        if closed >= 3 and (oddities := _oddities(words)):
            inside = [Lexeme(0, closed, "string", source[:closed]), *_in_lines(list(_words(source, closed)))]
            words = inside if _oddities(inside) < oddities else words
    return words


def _words(source: str, start: int) -> Iterator[Lexeme]:
    """Yield what stands after `start`: words, strings as a whole, and a "line" for every line's end outside strings."""
    for type_, tokens in groupby(_tokens(source[start:]), key=lambda token: token[0]):
        for text in ["".join(text for _, text in tokens)] if type_ == "string" else (text for _, text in tokens):
            if type_ == "space":
                for line in re.finditer(r"\\\r?\n|\r?\n", text):
                    if line[0][0] != "\\":
                        yield Lexeme(start + line.start(), start + line.end(), "line", "")
            else:
                yield Lexeme(start, start + len(text), type_, text)
            start += len(text)


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    """Yield (type, text) of every token of Pygments; what stands in an f-string's braces is of type "string" too."""
    braces = 0
    for _, token, text in _LEXER.get_tokens_unprocessed(source):
        if token in String.Interpol:
            braces += (text == "{") - (text[0] != "{" and text[-1] == "}")
        if token in String or braces > 0:
            yield "string", text
        elif token in Text:
            yield "space", text
        elif token in Comment:
            yield "comment", text
        elif token in Number:
            yield "number", text
        else:
            first = text.lstrip("@").split()[:1] or [""]  # a decorator is one token, and so is `yield from`
            is_name = first[0].isidentifier()
            yield ("keyword" if keyword.iskeyword(first[0]) else "name") if is_name else "operator", text


def _in_lines(words: Sequence[Lexeme]) -> Iterator[Lexeme]:
    """Yield the words with the ends of logical lines in place of those of lines."""
    depth, first = _open_before(words), True
    for word in words:
        if word.type == "line":
            first = True
            if not depth:
                yield word._replace(type="end")
            continue
        if first and depth and word.text in _BEGINS:
            depth = 0
            yield Lexeme(word.start, word.start, "end", "")
        depth += (word.text in OPENING) - (word.text in CLOSING and depth > 0)
        first = False
        yield word


def _open_before(words: Sequence[Lexeme]) -> int:
    """Count brackets that are closed and were not opened, before the first line that surely begins a statement."""
    depth, lowest, first = 0, 0, False
    for word in words:
        if first and word.text in _BEGINS:
            break
        first = word.type == "line"
        depth += (word.text in OPENING) - (word.text in CLOSING)
        lowest = min(lowest, depth)
    return -lowest


def _oddities(words: Sequence[Lexeme]) -> int:
    """Count names side by side in one line: English, or code read as a string's outside."""
    return sum(a.type == b.type == "name" and a.text not in _SOFT for a, b in pairwise(words))
