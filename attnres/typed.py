"""Check plain values from files against declared types of dataclasses and records."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from attnres.errors import UserError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Least:
    """A lower bound, in `Annotated[int, Least(0)]`; with `beyond` the value must be greater."""

    number: int
    beyond: bool = False

    def admits(self, value: float) -> bool:
        return value > self.number if self.beyond else value >= self.number

    def __str__(self) -> str:
        return f"above {self.number}" if self.beyond else f"{self.number} or more"


Count = Annotated[int, Least(0)]
"""A number of things, at least 0."""
Positive = Annotated[float, Least(0, beyond=True)]
"""A number greater than 0, for use as a divisor."""


class Misfit(Exception):
    """Raised for a value without its declared type, with the path to it inside the whole value, and the expected
    type."""

    def __init__(self, value: Any, expected: str) -> None:
        super().__init__(expected)
        self.value, self.expected, self.names = value, expected, []

    def sentence(self, prefix: str) -> str:
        """Return the error as a sentence; `prefix` is the name of the whole."""
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.names)
        shown = repr(self.value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return f"{prefix}{name} is {shown}: expected {self.expected}".lstrip(". ")

    def below(self, name: str | int) -> "Misfit":
        """Return this error for the value that contains the wrong one under `name`."""
        self.names.insert(0, name)
        return self


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested values under their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def overlay(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a copy of a dataclass overridden by nested `values`; `prefix` is their place, for messages.

    Raises:
        UserError: an unknown key, with the nearest valid one; a value of a wrong type, with the expected one.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            groups = [group for group, kind in hints.items() if name in getattr(kind, "__dataclass_fields__", ())]
            if groups:
                near = f"{prefix}{groups[0]}.{name}"
                raise UserError(f"unknown configuration key '{prefix}{name}': did you mean '{near}'?")
            raise unknown("configuration key", f"{prefix}{name}", [f"{prefix}{valid}" for valid in hints])
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise UserError(f"{prefix}{name} is {value!r}: expected keys and values under it")
            changes[name] = overlay(getattr(config, name), value, f"{prefix}{name}.")
            continue
        try:
            changes[name] = fit(value, hints[name])
        except Misfit as error:
            if typing.get_origin(hints[name]) is Literal and isinstance(value, str):
                raise unknown(name, value, typing.get_args(hints[name])) from None
            raise UserError(error.sentence(f"{prefix}{name}")) from None
    return dataclasses.replace(config, **changes)


def checked(value: Any, kind: type[T], path: Any, advice: str) -> T:
    """Check that a value from a file has the type `kind`, and return it converted.

    Args:
        kind: a TypedDict or dataclass whose fields the value must have; with a TypedDict other fields are kept.
        path: path of the file; `advice`: what to do if it is damaged.

    Raises:
        UserError: a field that is missing or of another type.
    """
    try:
        return fit(value, kind)
    except Misfit as error:
        raise UserError(f"{path} is damaged ({error.sentence('')}): {advice}") from None


def fit(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`, converted as files need it (whole numbers to floats, lists to tuples); raises
    Misfit."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value, bound = fit(value, options[0]), options[1]
        if not bound.admits(value):
            raise Misfit(value, f"{_describe(options[0])}, {bound}")
        return value
    if origin in (typing.NotRequired, typing.Required):
        return fit(value, options[0])
    if typing.is_typeddict(hint):
        return value | _fields(value, hint, required=hint.__required_keys__)
    if dataclasses.is_dataclass(hint):
        names = {field.name for field in dataclasses.fields(hint)}
        defaults = {field.name: (field.default, field.default_factory) for field in dataclasses.fields(hint)}
        required = {name for name, both in defaults.items() if both == (dataclasses.MISSING, dataclasses.MISSING)}
        fields = _fields(value, hint, required=required)
        if strange := sorted(set(value) - names):
            raise Misfit(value[strange[0]], "no such field").below(strange[0])
        return hint(**fields)
    if origin in (typing.Union, types.UnionType):
        errors = []
        for option in sorted(options, key=lambda option: option is not type(value)):
            try:
                return fit(value, option)
            except Misfit as error:
                errors.append(error)
        deepest = max(errors, key=lambda error: len(error.names))
        raise deepest if deepest.names else Misfit(value, _describe(hint))
    if origin is Literal and value in options:
        return value
    if origin is tuple and isinstance(value, list | tuple) and (options[1] is ... or len(value) == len(options)):
        return tuple(_parts(value, options[0]))
    if origin is list and isinstance(value, list):
        return _parts(value, options[0])
    if hint in (Any, list) and isinstance(value, list):
        return _parts(value, Any)
    kind = options[1] if origin is dict else Any if hint in (Any, dict) else None
    if kind is not None and isinstance(value, Mapping) and all(isinstance(key, str) and is_text(key) for key in value):
        return {key: _part(key, part, kind) for key, part in value.items()}
    if hint in (int, Any) and type(value) is int and not -(2**63) <= value < 2**63:
        raise Misfit(value, "a whole number of at most 64 bits")
    if type(value) is hint or (hint is Any and isinstance(value, bool | int | float | str | None)):
        if isinstance(value, str) and not is_text(value):
            raise Misfit(value, "text of whole characters")
        return value
    if hint is float and type(value) is int and abs(value) < 2**63:
        return float(value)
    raise Misfit(value, _describe(hint))


def _fields(value: Any, hint: Any, *, required: typing.Collection[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Misfit(value, "keys and values")
    for name in sorted(required - value.keys()):
        raise Misfit(None, "it to be there").below(name)
    hints = typing.get_type_hints(hint, include_extras=True)
    return {name: _part(name, value[name], kind) for name, kind in hints.items() if name in value}


def _parts(values: typing.Sequence[Any], hint: Any) -> list[Any]:
    if hint is float and all(type(value) is float for value in values):  # the most frequent case, checked quickly
        return list(values)
    return [_part(index, value, hint) for index, value in enumerate(values)]


def _part(name: str | int, value: Any, hint: Any) -> Any:
    try:
        return fit(value, hint)
    except Misfit as error:
        raise error.below(name) from None


def is_text(value: str) -> bool:
    """Return whether a text can be written as UTF-8; JSON escapes can hold half a character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_describe(option) for option in options))
    if origin is Literal:
        return f"one of {', '.join(options)}"
    if origin is Annotated:
        return _describe(options[0])
    if origin is tuple:
        return "a list" if options[1] is ... else f"a list of {len(options)} numbers"
    if typing.is_typeddict(hint) or dataclasses.is_dataclass(hint):
        return "keys and values"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
    return {**plain, Any: "a plain value", dict: "keys and values", list: "a list"}[origin or hint]
