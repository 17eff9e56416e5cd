"""Flags and configuration files as dataclasses, parsed by tyro, with one-sentence errors."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Generator
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from attnres.errors import UserError
from attnres.files import user_path
from attnres.reading import parse_yaml, read_config
from attnres.text import listed
from attnres.training.config import Setting

T = TypeVar("T")
Hidden = tyro.conf.Suppress
"""Marks a field that is no flag of this command."""


def _size_from(words: list[str]) -> str | dict[str, Any]:
    """Return a name, or a mapping as YAML."""
    if not words[0].startswith("{"):
        return words[0]
    try:
        return parse_yaml(words[0], "it")
    except UserError:
        raise ValueError(f"'{words[0]}' is not a mapping such as {{family: qwen3, hidden_size: 64}}") from None


def _settings_from(words: list[str]) -> dict[str, Setting]:
    from attnres.comparison.plan import setting_value

    if wrong := [word for word in words if "=" not in word]:
        raise ValueError(f"'{wrong[0]}' is not NAME=VALUE")
    names = [word.partition("=")[0] for word in words]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"'{twice}' is given twice: give it once")
    return {name: setting_value(value) for name, _, value in (word.partition("=") for word in words)}


NAMED_SIZES = (
    "pico, micro, nano, 100m, 0.6b, gpt2-124m, 7b, 8b, 70b, kimi-nano, kimi-48b, k3-nano, k3-2.8t, or a mapping "
    "{family: qwen3, hidden_size: 64, ...}"
)
"""For the help of options that take a size; `attnres.models.build.SIZES` would import torch."""

# Both hold a mapping, for which tyro would otherwise make a flag for each key.
Size = Annotated[
    str | dict[str, Any] | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=_size_from,
        is_instance=lambda value: value is None or isinstance(value, str | dict),
        str_from_instance=lambda value: [value if isinstance(value, str) else json.dumps(value) if value else "none"],
    ),
]
Settings = Annotated[
    dict[str, Setting],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE ...",
        instance_from_str=_settings_from,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{name}={part}" for name, part in value.items()],
    ),
]


def parse(
    command: str,
    kind: type[T],
    arguments: list[str],
    default: T | None = None,
    *,
    doing: str = "",
    program: str = "attnres",
) -> T:
    """Parse the flags of `program command` into a `kind`; raises UserError where tyro would print a box and exit.

    Args:
        doing: what the command does first, printed in a terminal once the flags are parsed, because importing heavy
            libraries takes seconds.
    """
    name = f"{program} {command}"
    flags = _flags(kind)
    arguments = [_short(argument, flags) for argument in arguments]
    options: dict[str, Any] = {} if default is None else {"default": default}
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), _docstrings_flowing():
            values, rest = tyro.cli(
                kind,
                prog=name,
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
                **options,
            )
    except SystemExit as left:
        if left.code:
            raise UserError(f"{_sentence(output.getvalue())} ({name} --help lists the options)") from None
        raise
    if rest:
        if rest[0].startswith("-"):
            raise _unknown_option(rest[0].split("=")[0], name, flags)
        raise UserError(f"unexpected argument '{rest[0]}': options start with --, see {name} --help")
    _refuse_empty(values)
    first = os.environ.get("RANK", "0") == "0"  # under torchrun one process prints it
    if doing and sys.stderr.isatty() and first:
        print(f"{name}: {doing} ...", file=sys.stderr, flush=True)
    return values


@contextlib.contextmanager
def _docstrings_flowing() -> Generator[None]:
    """Let --help fill its lines: tyro breaks a line wherever a field's docstring does, because it takes the indentation
    of the docstring's second line for a list item."""
    joined = tyro._strings.remove_single_line_breaks
    tyro._strings.remove_single_line_breaks = lambda text: joined(inspect.cleandoc(text))
    try:
        yield
    finally:
        tyro._strings.remove_single_line_breaks = joined


def _refuse_empty(values: Any) -> None:
    """Refuse with a UserError an empty value, such as an unset shell variable leaves, except for texts; lists are
    checked by the code that reads them."""
    for item in dataclasses.fields(values):
        value = getattr(values, item.name)
        if dataclasses.is_dataclass(value):
            _refuse_empty(value)
        elif value == "" and item.name not in ("prompt", "text"):
            is_required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
            raise UserError(f"{item.name} is given and empty: {'' if is_required else 'leave it out, or '}give a value")


def fields_of(config: Any, only: Any = None, **changes: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, with `changes` in place of some. Values are not copied; with `only`, a
    dataclass, its fields alone."""
    names = [item.name for item in dataclasses.fields(only or config)]
    return {name: getattr(config, name) for name in names} | changes


def _unknown_option(option: str, command: str, flags: dict[str, str]) -> UserError:
    short = "--" + option.replace("_", "-").lstrip("-").rpartition(".")[2]
    near = difflib.get_close_matches(short, flags.values(), n=1, cutoff=0.5)
    if command == "attnres compare" and short in ("--residual", "--block-size", "--num-blocks", "--settings"):
        near = ["--variants"]  # e.g. block:num_blocks=6
    hint = f"did you mean '{near[0]}'? " if near else ""
    if short == "--resume":
        continues = command in ("attnres compare", "python -m lab")
        hint = "the same command continues by itself what was stopped; " if continues else ""
    return UserError(f"unknown option '{option}': {hint}{command} --help lists the options")


def _short(argument: str, flags: dict[str, str]) -> str:
    """Return `--lr` for `--optim.lr`; messages and files use the short form."""
    name, equals, value = argument.partition("=")
    return flags.get(name.replace("_", "-"), name) + equals + value


def _flags(kind: Any, group: str = "") -> dict[str, str]:
    """Return the flags of a dataclass and of those nested in it: `--optim.lr` -> `--lr`."""
    flags = {}
    for item in dataclasses.fields(kind):
        markers = getattr(item.type, "__metadata__", ())
        if dataclasses.is_dataclass(item.type):
            flags |= _flags(item.type, f"{item.name}.")
        elif Hidden not in markers and tyro.conf.Positional not in markers:
            name = item.name.replace("_", "-")
            flags[f"--{group}{name}"] = f"--{name}"
    return flags


def _sentence(box: str) -> str:
    """Return the message in tyro's error box as one line: its first part, or its second if the title is a part.

    tyro has the parts of an error only in a private module, so its printed text is parsed; pyproject.toml bounds its
    version for that.
    """
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if text.startswith(("╭", "╰", "──", "--" * 3)):  # the box's frame, drawn in ASCII on some terminals
            parts.append([])
        elif text:
            parts[-1].append(text)
    filled = [" ".join(part) for part in parts if part]
    message = filled[0 if "╭" in box else 1 :][:1]
    if not message:
        return "the options were not understood"
    number = re.match(r"Error parsing (--[\w-]+): invalid literal for int\(\) with base 10: (.*)", message[0])
    if number:
        return f"{number[1]}: {number[2].strip('.')} is no whole number"
    unfit = re.match(r"Error parsing (--[\w-]+): Could not find valid parse for arguments: \[(.*)\]", message[0])
    if unfit:
        return f"{unfit[1]}: {unfit[2]} is not a valid value"
    untyped = re.match(r"(.*): no type matching ({None}\|)?(.*?) could be instantiated from \[(.*?)\]", message[0])
    if untyped:
        return f"{untyped[1]}: {untyped[4]} is no {untyped[3]}"
    if bare := re.match(r"Missing value for argument '(.*?)'", message[0]):
        return f"{bare[1]} needs a value" if bare[1].startswith("-") else f"{bare[1].upper()} is missing"
    if message[0].startswith("Missing from"):
        names = [part.split()[0] for part in message[0].partition(": ")[2].split("(required)") if part.strip()]
        return f"{listed(names)} {'is' if len(names) == 1 else 'are'} missing"
    return message[0].removesuffix(".")


def config_file(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of `--config FILE`, and the other arguments."""
    others, path = [], None
    remaining = iter(arguments)
    for argument in remaining:
        if argument.split("=")[0] == "--config" and path is not None:
            raise UserError("--config is given twice: give one file, flags override its values")
        if argument == "--config":
            path = next(remaining, None)
            if path is None:
                raise UserError(
                    "--config needs a file: a .yaml, .toml or .json with the values that flags can override"
                )
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        else:
            others.append(argument)
    return ({} if path is None else read_config(user_path(path))), others
