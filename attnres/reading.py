"""Read JSON, YAML and TOML files from any source as plain values, within limits, from regular files only.

An unusable file raises a UserError, one sentence that names it: missing, a pipe or a device, too large, not UTF-8, not
of its format, nested too deep, a duplicate key, NaN or infinity.
"""

import codecs
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from attnres.errors import UserError, first_line
from attnres.files import refuse_special

MAX_DEPTH = 64
"""Largest accepted nesting depth of lists and mappings."""
MAX_BYTES = 1 << 30
"""Largest accepted JSON file, in bytes; the largest of this package, an inspection of a deep model, has some ten
million."""
CONFIG_BYTES = 1 << 20
"""Largest accepted configuration file, in bytes."""
_HEAD = 4096
"""Number of bytes by which text is told from binary files."""


def read_text(path: str | Path, limit: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file of at most `limit` bytes, without a byte order mark. Raises UserError."""
    path = Path(path)
    refuse_special(path)
    try:
        if (size := path.stat().st_size) > limit:
            raise UserError(f"{path} has {size:,} bytes: expected at most {limit:,}, is it another file?")
        with open(path, "rb") as raw:
            refuse_no_text(path, raw.peek())
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid UTF-8 ({error.reason}): it is damaged or no text") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def refuse_no_text(path: Path, head: bytes) -> None:
    """Refuse with a UserError a file whose first bytes are those of UTF-16 (with or without its mark) or of a binary
    file."""
    head = head[:_HEAD]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        raise UserError(
            f"{path} is UTF-16, or no text at all: convert it first, for example with iconv -f UTF-16 -t UTF-8"
        )


def read_json(path: str | Path, *, ours: bool = True) -> Any:
    """Return the value in a JSON file. Raises UserError; `ours` as in `parse_json`."""
    return parse_json(read_text(path), str(path), ours=ours)


def parse_json(text: str, where: str, *, ours: bool = True) -> Any:
    """Parse a JSON text.

    Args:
        where: the place of the text, for messages.
        ours: whether this package wrote the text: then duplicate keys and non-finite numbers are refused.

    Raises:
        UserError: the text is no JSON, or nested too deep.
    """
    strict: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _no_number, "parse_float": _finite}
    try:
        value = json.loads(text, **(strict if ours else {}))
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({first_line(error)}): it is damaged or not one of ours") from error
    _check_depth(value, where)
    return value


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML 1.2 text without aliases. Raises UserError as `parse_json`."""
    try:
        value = yaml.load(text, _Yaml)
    except RecursionError:
        raise _too_deep(where) from None
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark
        line = f" at line {place.line + 1}, column {place.column + 1}" if place is not None else ""
        raise UserError(f"{where} is not valid YAML: {error.problem or error.context}{line}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where} is not valid YAML: {first_line(error)}") from None
    _check_depth(value, where)
    return value


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration file: .yaml, .yml, .toml or .json. Raises UserError."""
    where = f"the configuration file {path}"
    if path.suffix not in (".yaml", ".yml", ".json", ".toml"):
        raise UserError(f"{where} must end in .yaml, .yml, .json or .toml")
    text = read_text(path, CONFIG_BYTES)
    if path.suffix == ".toml":
        try:
            values: Any = tomllib.loads(text, parse_float=_finite)
        except RecursionError:
            raise _too_deep(where) from None
        except ValueError as error:
            raise UserError(f"{where} is not valid TOML: {first_line(error)}") from None
        _check_depth(values, where)
    else:
        values = parse_json(text, where) if path.suffix == ".json" else parse_yaml(text, where)
    if values in (None, {}):
        raise UserError(f"{where} is empty: expected keys and values; without --config the defaults are used")
    if not isinstance(values, dict):
        raise UserError(f"{where} holds a {type(values).__name__}: expected keys and values")
    return values


# ------------------------------------------------------------------ limits


def _check_depth(value: Any, where: str) -> None:
    """Refuse a value nested deeper than `MAX_DEPTH`, since later code may be recursive."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for outer in level
            if isinstance(outer, dict | list)
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> UserError:
    return UserError(f"{where} is nested more than {MAX_DEPTH} deep: it is damaged or not one of ours")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key '{next(name for name in names if names.count(name) > 1)}' stands twice")
    return values


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


# ------------------------------------------------------------------ YAML


class _Yaml(yaml.SafeLoader):
    """Loads YAML with the numbers and truth values of YAML 1.2 (1e-3 is a number, 1:30:00 and no are text), without
    duplicate keys and aliases."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own form; 1.1's are left out)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ComposerError(None, None, "aliases (*name) are not read", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                continue
            if key.value in names:
                raise ConstructorError(None, None, f"the key '{key.value}' stands twice", key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


def _whole(loader: _Yaml, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _number(loader: _Yaml, node: Any) -> float:
    value = loader.construct_yaml_float(node)
    if not math.isfinite(value):
        raise ConstructorError(None, None, f"{node.value} is no finite number", node.start_mark)
    return value


for _tag, _pattern, _first in (
    ("bool", r"(true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("int", r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))", "-+."),
    ("null", r"(~|null|Null|NULL|)", ["~", "n", "N", ""]),
):
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"{_pattern}$"), list(_first))
_Yaml.add_constructor("tag:yaml.org,2002:int", _whole)
_Yaml.add_constructor("tag:yaml.org,2002:float", _number)
