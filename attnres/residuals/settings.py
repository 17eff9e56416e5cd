"""Validate a mechanism's settings, and set start values of its parameters."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnres.errors import UserError, unknown


def whole(name: str, value: Any, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`; else raise a UserError that names the setting."""
    if type(value) is not int or value < least:
        raise UserError(f"{name} is {value!r}: expected a whole number, at least {least}")
    return value


def positive(name: str, value: Any) -> float:
    """Return `value` if it is a positive number; else raise a UserError that names the setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"{name} is {value!r}: expected a positive number")
    return float(value)


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Return `value` if it is a number from `least` to `most`; else raise a UserError that names the setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or math.isinf(value):
        above = "" if math.isinf(least) else f", at least {least:g}"
        below = "" if math.isinf(most) else f", at most {most:g}"
        raise UserError(f"{name} is {value!r}: expected a number{above}{below}")
    return float(value)


def one_of(name: str, value: Any, valid: Sequence[str]) -> str:
    """Return `value` if it is in `valid`; else raise a UserError with the nearest valid one."""
    if value not in valid:
        raise unknown(name, str(value), valid)
    return value


def true_or_false(name: str, value: Any) -> bool:
    """Return `value` if it is a bool; else raise a UserError that names the setting."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: expected true or false")
    return value


def mean_or_sum(value: Any) -> Literal["mean", "sum"]:
    """Return setting `read_scale` if it is one of the two; else raise a UserError."""
    if value not in ("mean", "sum"):
        raise UserError(f"read_scale is '{value}': expected 'mean' (the paper's) or 'sum' (exact conversion)")
    return value


def not_both(**settings: Any) -> None:
    """Raise a UserError if two settings with the same meaning are both given (not None)."""
    (first, a), (second, b) = settings.items()
    if a is not None and b is not None:
        raise UserError(f"both {first}={a} and {second}={b} are given: give one of them")


def start_at(parameter: nn.Parameter, value: Tensor) -> None:
    """Set start values that `torch.nn.init` has no function for; leave a loaded parameter unchanged."""
    nn.init.zeros_(parameter)
    if not getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(value)
