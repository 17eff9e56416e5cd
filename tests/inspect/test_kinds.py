"""Kinds of tokens, on snippets labelled by hand; "|" cuts tokens."""

import ast
import io
import keyword
import tokenize
from itertools import accumulate, pairwise

import pytest

from attnres.data.sources import stdlib_files
from attnres.errors import UserError
from attnres.inspect.kinds import KINDS, guess_language, kinds_of, lexemes

SHORT = {
    "code": {"S": "statement start", "n": "identifier", "k": "keyword", "l": "literal", "o": "operator"}
    | {"_": "indentation", "c": "comment", "d": "docstring"},
    "prose": {"S": "sentence start", "w": "content word", "f": "function word", "+": "continuation"}
    | {"0": "number", ".": "punctuation", "_": "white space"},
}


def labels(cut, language):
    pieces = cut.split("|")
    text = "".join(pieces)
    letter = {name: short for short, name in SHORT[language].items()}
    kinds = kinds_of(text, list(pairwise(accumulate(map(len, pieces), initial=0))), language)
    return "".join(letter[KINDS[language][kind]] for kind in kinds)


CODE = [
    ("def| f|(|x|):|\n|   | return| x| +| 1|\n", "Snono__Snol_"),
    ("x| =| [|\n|   | a|,|\n|]|\n|y| =| 2", "Soo__no_o_Sol"),
    ("if| x|:| return| y|;| z|(|)", "SnoSnoSoo"),
    ("d| =| {|a|:| 1|}|;| lambda| q|:| q", "SoonolooSnon"),
    ("a| =| lambda| q|:| q|\n|else|:|\n|  | pass", "Soknon_So__S"),
    ('class| A|:|\n|   | """|It| is|.|"""|\n|   | b| =| \'x\'|  # |why', "Sno__ddddd__Solcc"),
    ("match|:| int| =| 1|\n|match| x|:|\n|   | case| 1|:| y", "Sonol_Sno__SloS"),
    ("@|cache|\n|async| def| g|():| await| h", "Sn_SknoSn"),
    ("x| =| y| \\|\n|  | +| z|\n|w", "Son___on_S"),
    ('for| i| in| r|:|\n|\n|  |# no|te|\n|  |total|_sum| +=| f"{|i|}"', "Snkno___cc__Snolll"),
]


@pytest.mark.parametrize(("cut", "expected"), CODE)
def test_code(cut, expected):
    assert labels(cut, "code") == expected


def test_code_cut_out_of_a_file_in_the_middle_of_a_call():
    assert labels("alpha|,| b|=|3|)|\n|x| =| 1|\n|y| =| (|1|,", "code")[7:] == "Sol_Soolo"


def test_code_cut_out_of_a_file_in_the_middle_of_a_docstring():
    cut = "the words| of a doc|string. Returns one thing.|\n|'''|\n|  | return| x|\n|def|"
    assert labels(cut[:-1], "code") == "dddd" + "d__Sn_S"


def test_a_bracket_left_open_does_not_hide_what_follows():
    assert labels("x| =| (|1|\n|def| f|():|\n|  | return| 2", "code") == "Sool_Sno__Sl"


@pytest.mark.parametrize("broken", ["", "\0", "'", '"""', "(" * 300, "\\", "def\tf(:\n\x0c é = ¬", "\r\r\n\n", "f'{'"])
@pytest.mark.parametrize("language", sorted(KINDS))
def test_every_text_has_kinds(broken, language):
    kinds = kinds_of(broken, [(i, i + 1) for i in range(len(broken))], language)
    assert all(0 <= kind < len(KINDS[language]) for kind in kinds)


@pytest.fixture(params=["bisect.py", "heapq.py", "textwrap.py", "abc.py"])
def module(request):
    """A file of the standard library."""
    return next(path for path in stdlib_files() if path.name == request.param).read_text("utf-8")


def test_statements_begin_where_python_says(module):
    """Every statement of the syntax tree that is no lone string begins one; what else does begins a clause of one."""
    lines = list(accumulate(map(len, module.splitlines(keepends=True)), initial=0))
    kinds = kinds_of(module, [(i, i + 1) for i in range(len(module))], "code")
    starts = {i for i, kind in enumerate(kinds) if KINDS["code"][kind] == "statement start"}
    expected = set()
    for node in ast.walk(ast.parse(module)):
        match node:
            case ast.Expr(ast.Constant(str())):
                pass
            case ast.stmt():
                expected.add(lines[node.lineno - 1] + node.col_offset)
    assert expected <= starts and len(expected) > 20
    assert all(module.startswith(("else", "except", "finally", "@"), i) for i in starts - expected)


def test_words_are_those_of_pythons_own_tokenizer(module):
    lines = list(accumulate(map(len, module.splitlines(keepends=True)), initial=0))
    types = {tokenize.COMMENT: "comment", tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator"}
    words = {i: word.type for word in lexemes(module) for i in range(word.start, word.end)}
    for token in tokenize.generate_tokens(io.StringIO(module).readline):
        name = "keyword" if keyword.iskeyword(token.string) else "name"
        expected = types.get(token.type, name if token.type == tokenize.NAME else None)
        first, last = (lines[row - 1] + column for row, column in (token.start, token.end))
        if expected is not None and token.string != "@":  # Pygments takes a decorator for one word
            assert {words.get(i) for i in range(first, last)} == {expected}, token


PROSE = [
    ("The| cat|  |sat| on| Tues|day|.|\n\n|It| left|!", "Sw_wfw+._Sw."),
    ("“|Go|,”| said| Mr|.| Smith|.| “|Now|.”", ".S.ww.w..S."),
    ("In| 1999|,| J|.| Doe| didn|'t| pay| $|3|.5|.| 7| did|.", "S0.w.wf+w.00.Sf."),
    ("A| line| that| is| wrapped| by| an| editor| somewhere|\n|and| goes| on", "Swffwffww_fwf"),
    ("Head|ing|\n|Text| of| it", "S+_Sff"),
]


@pytest.mark.parametrize(("cut", "expected"), PROSE)
def test_prose(cut, expected):
    assert labels(cut, "prose") == expected


def test_bytes_of_one_character_start_once_and_special_tokens_have_no_kind():
    text = "é = 1\n"
    start, name = KINDS["code"].index("statement start"), KINDS["code"].index("identifier")
    assert kinds_of(text, [(0, 0), (0, 1), (0, 1), (1, 3)], "code")[:3] == [-1, start, name]


def test_mistakes_are_told():
    with pytest.raises(UserError, match="did you mean 'prose'"):
        kinds_of("a", [(0, 1)], "pros")
    with pytest.raises(UserError, match="characters 0 to 9 of a text of 1"):
        kinds_of("a", [(0, 9)], "code")


def test_the_language_is_guessed():
    assert guess_language("import os\n\n# A note.\nprint(os.name)\n") == "code"
    assert guess_language("He left for good.\nIf only she knew: nothing was lost.\n") == "prose"
    assert guess_language("") == "prose"
