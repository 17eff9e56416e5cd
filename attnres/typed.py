"""Plain values, as files have them, as the fields of dataclasses: of the types they are declared with, or refused."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from attnres.errors import UserError, unknown


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested values under their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def overlay(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A copy of a dataclass with nested `values` laid over it; `prefix` is where they stand, for messages.

    Raises:
        UserError: an unknown key, with the nearest valid one; a value of a wrong type, with what was expected.
    """
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown("configuration key", f"{prefix}{name}", [f"{prefix}{valid}" for valid in hints])
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{name} is {value!r}: expected keys and values under it")
            changes[name] = overlay(getattr(config, name), value, f"{prefix}{name}.")
        else:
            changes[name] = _convert(f"{prefix}{name}", value, hints[name])
    return dataclasses.replace(config, **changes)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, converted as files need it: whole numbers to floats, lists to tuples."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(options, key=lambda option: option is not type(value)):
            with suppress(UserError):
                return _convert(name, value, option)
    elif origin is Literal and isinstance(value, str):
        if value not in options:
            raise unknown(name.rpartition(".")[2], value, options)
        return value
    elif origin is tuple and isinstance(value, list | tuple) and (options[1] is ... or len(value) == len(options)):
        return tuple(_convert(name, part, options[0]) for part in value)
    elif origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _convert(f"{name}.{key}", part, options[1]) for key, part in value.items()}
    elif type(value) is hint or (hint is Any and isinstance(value, bool | int | float | str | list | dict | None)):
        return value
    elif hint is float and type(value) is int:
        return float(value)
    raise UserError(f"{name} is {value!r}: expected {_describe(hint)}")


def _describe(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in options)
    if origin is Literal:
        return f"one of {', '.join(options)}"
    if origin is tuple:
        return "a list" if options[1] is ... else f"a list of {len(options)} numbers"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
    return {**plain, Any: "a plain value", dict: "keys and values"}[origin or hint]
