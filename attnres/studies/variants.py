"""What is compared: a residual with its settings, possibly at a learning rate of its own, as one short text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnres.errors import UserError, unknown
from attnres.residuals import RESIDUALS, settings_of

SYNTAX = "RESIDUAL[:SETTING=VALUE,...][@lr=RATE], e.g. standard, block:num_blocks=6 or block@lr=0.003"


@dataclass(frozen=True)
class Variant:
    """One column of a comparison. `lr` None: that of the base configuration."""

    residual: str
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None

    @property
    def label(self) -> str:
        """Its name in tables and folders: `block`, `block-num_blocks6`, `block-lr0.003`."""
        parts = [self.residual, *(f"{name}{value}" for name, value in self.settings.items())]
        return "-".join([*parts, f"lr{self.lr:g}"] if self.lr is not None else parts)


def parse_variant(text: str) -> Variant:
    """Read one variant.

    >>> parse_variant("block:num_blocks=6@lr=0.003").label
    'block-num_blocks6-lr0.003'

    Raises:
        UserError: another syntax; an unknown residual or setting, with the nearest valid name.
    """
    match = re.fullmatch(r"(?P<residual>[^:@]*)(:(?P<settings>[^@]*))?(@(?P<lr>.*))?", text.strip())
    if match is None or not match["residual"]:
        raise UserError(f"variant '{text}' is not understood: expected {SYNTAX}")
    residual = match["residual"]
    if residual not in RESIDUALS:
        raise unknown("residual", residual, RESIDUALS)
    valid, settings = settings_of(residual), {}
    for part in (match["settings"] or "").split(",") if match["settings"] is not None else []:
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise UserError(f"variant '{text}': '{part}' is not SETTING=VALUE; expected {SYNTAX}")
        if name not in valid:
            if not valid:
                raise UserError(f"variant '{text}': residual '{residual}' takes no settings, remove ':{part}'")
            raise unknown(f"setting of residual '{residual}'", name, valid)
        if not re.fullmatch(r"[\w.+-]+", value):  # it becomes part of a folder's name
            raise UserError(
                f"variant '{text}': the value '{value}' of {name} has other characters than letters, digits and _ . + -"
            )
        settings[name] = setting_value(value)
    lr = None
    if match["lr"] is not None:
        name, _, value = match["lr"].partition("=")
        if name != "lr":
            raise UserError(f"variant '{text}': only the learning rate can follow '@', as in {residual}@lr=0.003")
        lr = _rate(value, f"variant '{text}'")
    return Variant(residual, settings, lr)


def parse_variants(texts: Sequence[str], lrs: Sequence[float] = ()) -> list[Variant]:
    """Read several; those without a learning rate of their own are taken at each of `lrs`, if there are any.

    Raises:
        UserError: none, or the same one twice.
    """
    if not texts:
        raise UserError(f"no variant given: expected at least one of {', '.join(RESIDUALS)}")
    variants = []
    for variant in map(parse_variant, texts):
        if variant.lr is None and lrs:
            variants += [Variant(variant.residual, variant.settings, _rate(lr, "lrs")) for lr in lrs]
        else:
            variants.append(variant)
    labels = [variant.label for variant in variants]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"variant '{label}' is given {labels.count(label)} times: give each one once")
    return variants


def _rate(value: str | float, where: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise UserError(f"{where}: the learning rate is '{value}', expected a number above 0")
    return rate


def setting_value(text: str) -> int | float | bool | str:
    """A setting as the plainest type that its text has: 6, 0.5, true, mean."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
