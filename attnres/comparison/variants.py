"""What is compared: a residual with its settings, possibly trained in a way of its own, as one short text."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from attnres.errors import UserError, unknown
from attnres.residuals import RESIDUALS, residual_class, settings_of, source_file

SYNTAX = (
    "RESIDUAL[:SETTING=VALUE,...][@NAME=VALUE,...], e.g. standard, block:num_blocks=6, mine.py:Mine or block@lr=0.003"
)

TRAINING = {
    "residual_lr": "optim",
    "residual_hold": "optim",
    "residual_warmup": "optim",
    "residual_decay": "optim",
    "train_only": "finetune",
    "lora_rank": "finetune",
    "lora_alpha": "finetune",
    "distill_weight": "finetune",
    "distill_temperature": "finetune",
}
"""What may follow '@' besides lr, and the part of the configuration that it belongs to."""


@dataclass(frozen=True)
class Variant:
    """One column of a comparison. `lr` None: that of the base configuration; `training` holds names in `TRAINING`,
    `file` the FILE.py:CLASS of a mechanism of a user's own."""

    residual: str
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    training: dict[str, Any] = field(default_factory=dict)
    file: str | None = None

    @property
    def label(self) -> str:
        """Its name in tables and folders: `block`, `block-num_blocks6`, `block-train_onlylora`, `block-lr0.003`."""
        parts = [self.residual, *(f"{name}{value}" for name, value in {**self.settings, **self.training}.items())]
        return "-".join([*parts, f"lr{self.lr:g}"] if self.lr is not None else parts)


def label_of(variant: str) -> str:
    """How runs of a variant are called."""
    return parse_variant(variant).label


def parse_variant(text: str) -> Variant:
    """Read one variant.

    >>> parse_variant("block:num_blocks=6@lr=0.003").label
    'block-num_blocks6-lr0.003'

    Raises:
        UserError: another syntax; an unknown residual, setting or name after '@', with the nearest valid one.
    """
    match = re.fullmatch(
        r"(?P<residual>[^@]*\.py:[^:@]*|[^:@]*)(:(?P<settings>[^@]*))?(@(?P<training>.*))?", text.strip()
    )
    if match is None or not match["residual"]:
        raise UserError(f"variant '{text}' is not understood: expected {SYNTAX}")
    residual = residual_class(match["residual"]).name
    valid = settings_of(residual)
    settings = _pairs(text, match["settings"], "SETTING", f"setting of residual '{residual}'", valid)
    training = _pairs(text, match["training"], "NAME", "name after '@'", ("lr", *TRAINING))
    lr = training.pop("lr", None)
    rate = None if lr is None else _rate(lr, f"variant '{text}'")
    return Variant(residual, settings, rate, training, source_file(residual))


def _pairs(text: str, settings: str | None, what: str, kind: str, valid: Iterable[str]) -> dict[str, Any]:
    """The values in `NAME=VALUE,...` by name; none where nothing was given."""
    values: dict[str, Any] = {}
    for part in [] if settings is None else settings.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise UserError(f"variant '{text}': '{part}' is not {what}=VALUE; expected {SYNTAX}")
        if name not in valid:
            raise unknown(kind, name, valid)
        if not re.fullmatch(r"[\w.+-]+", value):  # it becomes part of a folder's name
            raise UserError(
                f"variant '{text}': the value '{value}' of {name} has other characters than letters, digits and _ . + -"
            )
        values[name] = setting_value(value)
    return values


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
            variants += [dataclasses.replace(variant, lr=_rate(lr, "lrs")) for lr in lrs]
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
        with suppress(ValueError):
            if math.isfinite(value := kind(text)):
                return value
    return text
