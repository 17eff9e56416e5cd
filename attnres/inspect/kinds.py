"""What each token of a text is: the first of a statement, an identifier, a function word, ...

Kinds partition the tokens: each has exactly one. A token has the kind of its first character that is no white space; so
" return" after three more spaces starts the statement, and the three spaces are indentation. Of several tokens that
share a character (the bytes of "é") only the first starts anything.

Code (Python), in order of precedence:

    indentation      white space alone, between words too, and the backslash before a line end; outside strings and
                     comments
    comment          from # to the end of the line
    docstring        a logical line that is a string and nothing else
    statement start  the first token of a logical line, of what follows ';', or of what follows a one-line header's ':'
                     (`if x: return`), whatever else it is: keyword, identifier, ... `else`, `except` and the @ of a
                     decorator count, since logical lines begin with them
    keyword          Python's keywords, soft ones excepted
    literal          strings (f-strings as a whole) and numbers
    identifier       every other name, all its pieces
    operator         operators, brackets, punctuation, and what is no Python

The last four are what stands inside a statement (`INSIDE`).

Prose (English):

    white space      spaces and line ends alone
    sentence start   the piece that begins the first word or number of a sentence; quotes and brackets before it are
                     punctuation
    function word    the piece that begins an article, pronoun, preposition, conjunction, auxiliary, ... (`FUNCTION`)
    content word     the piece that begins any other word
    continuation     later pieces of a word
    number           digits, all pieces
    punctuation      everything else
"""

import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise, zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Number, String, Text

from attnres.errors import UserError, unknown

if TYPE_CHECKING:
    from attnres.models.encoding import Offsets


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
    """Yield the words, with the ends of logical lines in place of the ends of physical lines."""
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


Language = Literal["code", "prose"]

KINDS: dict[str, tuple[str, ...]] = {
    "code": (
        *("statement start", "identifier", "keyword", "literal", "operator"),
        *("indentation", "comment", "docstring"),
    ),
    "prose": (
        *("sentence start", "content word", "function word", "continuation"),
        *("number", "punctuation", "white space"),
    ),
}
"""Names of the kinds of a language; a kind is a place in its row, and place 0 is what starts something."""

INSIDE = ("identifier", "keyword", "literal", "operator")
"""Kinds of code inside a statement: what the start of a statement is held against."""

FUNCTION = frozenset(
    """a an the this that these those my your his her its our their some any no every each either neither both all
    i you he she it we they me him us them mine yours hers ours theirs myself yourself himself herself itself ourselves
    themselves who whom whose which what whatever whoever
    of in to for with on at by from about as into like through after over between out against during without before
    under around among above across behind below beneath beside besides beyond down inside near off onto outside past
    since than till toward towards until up upon via within
    and or but nor so yet if because although though while whereas unless when where why how whether
    am is are was were be been being have has had having do does did doing will would shall should can could may might
    must ought not n't there here then too also very just only
    i'm you're he's she's it's we're they're i've you've we've they've i'll you'll he'll she'll we'll they'll i'd you'd
    he'd she'd we'd they'd isn't aren't wasn't weren't don't doesn't didn't won't wouldn't can't cannot couldn't
    shouldn't haven't hasn't hadn't that's there's what's who's let's""".split()
)
"""English function words, in small letters and with straight apostrophes."""


def kinds_of(text: str, offsets: "Offsets", language: str) -> list[int]:
    """Return the kind of each token, an index of `KINDS[language]`; -1 for a token of no characters (a special token).

    Args:
        offsets: of each token the characters [start, end) of `text`, as fast tokenizers return them
            (`return_offsets_mapping`).

    Raises:
        UserError: an unknown language, or offsets outside the text.
    """
    if language not in KINDS:
        raise unknown("language", language, KINDS)
    marks = _code(text) if language == "code" else _prose(text)
    plain, starting = marks
    kinds, last = [], -1
    for start, end in offsets:
        if not 0 <= start <= end <= len(text):
            raise UserError(
                f"a token at characters {start} to {end} of a text of {len(text)}: are these the offsets of this text?"
            )
        first = next((i for i in range(start, end) if not text[i].isspace()), start)
        if start == end:
            kinds.append(-1)
        elif first != last and first in starting:
            kinds.append(starting[first])
        else:
            kinds.append(plain[first])
        if start < end:
            last = first
    return kinds


_CODE_LINE = re.compile(
    r"""\s*(?:
        (?:async\s+)?def\s+\w+\s*\( | class\s+\w+\s*[(:] | import\s+[\w.]+\s*(?:$|,|as\b) | from\s+[\w.]+\s+import\b
      | (?:if|elif|while|with)\b.*:\s*(?:\#.*)?$ | for\b.*\bin\b.*:\s*$ | (?:else|try|finally)\s*:\s*$
      | except\b.*:\s*$ | return\s*$ | return\s+[\w.(\['"{-]+\s*(?:$|[(,\[.+*=<-]) | raise\s+\w+\(
      | @\w[\w.]*\s*(?:\(|$)
      | [\w.\[\]'"]+(?:\s*,\s*[\w.\[\]'"]+)*\s*(?:[-+*/|&%]|//|\*\*)?=\s*[^=\s] | [\w.]+\(.*\)\s*$ | [)\]}]+[,:]?\s*$
    )""",
    re.VERBOSE,
)
CODE_SHARE = 0.12
"""Of a text's lines that must look like Python. Of the 672 files of Python 3.11's library that hold some text those
below it are tables of characters and of texts; of 1,148 English documents from the web one is not."""


def guess_language(text: str) -> Language:
    """Return "code" where the share of lines that look like Python is at least `CODE_SHARE`, else "prose".

    >>> guess_language("def f(x):\\n    return x + 1\\n"), guess_language("It was late. Nobody spoke.")
    ('code', 'prose')
    """
    lines = [line for line in text.splitlines() if line.strip()]
    looks = sum(_CODE_LINE.match(line) is not None for line in lines)
    return "code" if lines and looks / len(lines) >= CODE_SHARE else "prose"


# ------------------------------------------------------------------ code


Marks = tuple[Sequence[int], dict[int, int]]
"""The kind of every character, and of the characters that start something what they start."""

_HEADERS = frozenset("if elif else for while try except finally with def class async match case".split())


def _code(text: str) -> Marks:
    kind = {name: place for place, name in enumerate(KINDS["code"])}
    plain = [kind["indentation"]] * len(text)
    starting = {}
    for is_end, line in groupby(lexemes(text), key=lambda word: word.type == "end"):
        if is_end:
            continue
        logical = list(line)
        words = [word for word in logical if word.type != "comment"]
        is_docstring = bool(words) and all(word.type == "string" for word in words)
        for word in logical:
            name = {"string": "literal", "number": "literal", "name": "identifier"}.get(word.type, word.type)
            if is_docstring and word.type == "string":
                name = "docstring"
            plain[word.start : word.end] = [kind[name]] * (word.end - word.start)
        if not is_docstring:
            starting.update((word.start, kind["statement start"]) for word in _starts(words))
    return plain, starting


def _starts(words: Sequence[Lexeme]) -> list[Lexeme]:
    """Of a logical line without its comments the words that begin a statement."""
    starts, depth, header, lambdas, begins = [], 0, False, 0, True
    for word, after in zip_longest(words, words[1:]):
        if begins:
            starts.append(word)
            is_name = word.type == "name" and after is not None and after.text == ":"  # `match: int`
            header, begins, lambdas = word.text in _HEADERS and not is_name, False, 0
        if word.text in ("(", "[", "{"):
            depth += 1
        elif word.text in (")", "]", "}"):
            depth -= 1
        elif depth > 0:
            continue
        elif word.text == "lambda":
            lambdas += 1
        elif word.text == ";":
            begins = True
        elif word.text == ":" and lambdas:
            lambdas -= 1
        elif word.text == ":" and header:
            begins = True
    return starts


# ------------------------------------------------------------------ prose

_PROSE = re.compile(
    r"(?P<word>[^\W\d_]+(?:['’][^\W\d_]+)*)|(?P<number>\d+(?:[.,]\d+)*)|(?P<space>\s+)|(?P<other>.)", re.S
)
_ABBREVIATIONS = frozenset(
    """mr mrs ms dr prof st jr sr vs etc fig no vol pp ed eds gen col capt lt rev hon e.g i.e cf al inc ltd co dept
    approx jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k a.m p.m""".split()
)
_LAST_WORD = re.compile(r"[^\W\d_]+(?:\.[^\W\d_]+)*$")
_WRAPPED = range(40, 101)
"""Lengths of lines that are likely to go on in the next one: hard-wrapped text."""


def _prose(text: str) -> Marks:
    kind = {name: place for place, name in enumerate(KINDS["prose"])}
    plain = [kind["punctuation"]] * len(text)
    starting: dict[int, int] = {}
    ends_sentence = _sentence_ends(text)
    begins = True
    for match in _PROSE.finditer(text):
        start, end = match.span()
        if match["space"]:
            plain[start:end] = [kind["white space"]] * (end - start)
            begins |= ends_sentence(start, end)
        elif match["word"] or match["number"]:
            inner = "continuation" if match["word"] else "number"
            plain[start:end] = [kind[inner]] * (end - start)
            if begins:
                starting[start] = kind["sentence start"]
            elif match["word"]:
                is_function = match["word"].lower().replace("’", "'") in FUNCTION
                starting[start] = kind["function word" if is_function else "content word"]
            begins = False
        elif match["other"] in "。！？":
            begins = True
    return plain, starting


def _sentence_ends(text: str) -> Callable[[int, int], bool]:
    """Return whether a sentence ends before the white space [start, end).

    It does at a blank line; at a line end, unless the line is one of hard-wrapped text; and after . ! ? … (and closing
    quotes or brackets) where what follows begins with a capital or a digit and the word before is no abbreviation and
    no initial.
    """

    def ends(start: int, end: int) -> bool:
        space = text[start:end]
        before = text[max(0, start - 60) : start].rstrip("\"'”’)]»")
        if "\n" in space:
            line = start - (text.rfind("\n", 0, start) + 1)
            if space.count("\n") > 1 or line not in _WRAPPED or before.endswith((".", "!", "?", ":")):
                return True
        if not before.endswith((".", "!", "?", "…")):
            return False
        rest = text[end : end + 8].lstrip("\"'“‘([«¿¡—-")
        if not rest or not (rest[0].isupper() or rest[0].isdigit()):
            return False
        if not before.endswith("."):
            return True
        word = _LAST_WORD.search(before[:-1])
        if word is None:
            return True
        is_initial = len(word[0]) == 1 and word[0].isupper() and word[0] != "I"
        return not is_initial and word[0].lower() not in _ABBREVIATIONS

    return ends
