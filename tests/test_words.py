"""Words of the project's former private vocabulary stay out of what a user reads."""

import ast
import contextlib
import io
import re
import tokenize
from pathlib import Path

import pytest

import attnres
from attnres.cli import COMMANDS, main
from attnres.commands.short import CALLS
from attnres.flags import parse
from attnres.models.build import SIZES

PACKAGE = Path(attnres.__file__).parent
ANYWHERE = (
    *("foretold", "foretell", "made again in backward", "heaviest sources", "made anew", "what is made", "who watch"),
    *("by the clock", "cannot be had", "to be had", "the whole rate", "seeds luck", "share of every batch"),
    "checkpoint in shares",
)
"""Whole words that stand in no docstring, comment or string of the package. Add a word once it is gone."""
IN_HELP = (
    *ANYWHERE,
    "in shares",
    "in turn",
    "in slices",
    "copies of the model",
    "what reads were made of",
    "without it",
)
IN_HELP += ("docs/results/index.md", "knock-out and")
"""Of the options' descriptions, which give no findings either."""


def found(words: tuple[str, ...], text: str) -> list[str]:
    text = re.sub(r"[^\w./-]+", " ", text)
    return [word for word in words if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text, re.IGNORECASE)]


def help_of(command: str) -> str:
    printed = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
        main([command, "--help"])
    assert "usage" in printed.getvalue()
    return printed.getvalue().replace("│", " ")


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_speaks_the_fields_language(command):
    assert found(IN_HELP, help_of(command)) == []


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_names_every_size(command):
    named = re.split(r"[\s,]+", help_of(command))
    assert [size for size in SIZES if size not in named] == []


def test_docstrings_comments_and_strings_do_too():
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        with tokenize.open(path) as file:
            text = " ".join(part.string for part in tokenize.generate_tokens(file.readline) if part.type in kinds)
        wrong += [f"{path.relative_to(PACKAGE)}: {word}" for word in found(ANYWHERE, text)]
    assert not wrong


def test_a_long_command_says_at_once_what_it_does(monkeypatch, capsys):
    """Before it imports what takes seconds, and only to somebody who waits at a terminal."""
    assert set(CALLS) < set(COMMANDS) and all(doing for _, doing, _ in CALLS.values())
    for command in set(COMMANDS) - set(CALLS):
        tree = ast.parse((PACKAGE / "commands" / f"{command}.py").read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        (call,) = (call for call in calls if call.func.id == "parse")
        assert call.args[0].value == command and "doing" in [option.arg for option in call.keywords]
    from attnres.commands.short import Prepare

    parse("prepare", Prepare, [], doing="reading text")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    parse("prepare", Prepare, [], doing="reading text")
    assert capsys.readouterr().err == "attnres prepare: reading text ...\n"
