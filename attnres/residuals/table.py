"""The table of mechanisms: what each is and costs, from the classes themselves."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from attnres.residuals.layout import About
from attnres.residuals.registry import RESIDUALS, make_residual, settings_of

SUBLAYERS, WIDTH = 24, 256
"""Depth L and width d at which parameters are counted."""


class MechanismRow(NamedTuple):
    """One mechanism.

    Attributes:
        name, rule, start, moves, source, evidence: as its class says (`About`); empty where a user's own says nothing.
        parameters: at L = 24 sublayers and width 256, with the default settings.
        linear: a read is a sum of outputs with one number each.
        starts_standard: it starts as the standard residual, up to the eps of the norms: conversion keeps the function.
        is_control: it learns nothing that the method is about.
        settings: their names.
    """

    name: str
    rule: str
    start: str
    moves: str
    source: str
    evidence: str
    parameters: int
    linear: bool
    starts_standard: bool
    is_control: bool
    settings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return self._asdict()


def mechanisms(names: Collection[str] = ()) -> list[MechanismRow]:
    """Return a row for each mechanism that is known: those that ship, and a user's own that were registered.

    Args:
        names: of those to leave the others out; none is all.

    >>> [row.starts_standard for row in mechanisms(["full", "deepnorm"])]
    [True, False]
    """
    rows = []
    for name in [name for name in RESIDUALS if name in names or not names]:
        with torch.device("meta"):  # some have many parameters, and none is looked at
            residual = make_residual(name, SUBLAYERS, WIDTH)
        words, traits = residual.about or About("", "", "", ""), residual.traits
        parameters = sum(parameter.numel() for parameter in residual.parameters())
        starts, settings = traits.starts_standard, tuple(settings_of(name))
        rows.append(MechanismRow(name, *words, parameters, traits.linear, starts, traits.is_control, settings))
    return rows


def as_markdown(rows: list[MechanismRow]) -> str:
    """Return the table as docs/reference/mechanisms.md has it."""
    lines = [
        "| mechanism | rule | start | parameters | moves | linear | starts as standard | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"`{row.name}`{' (control)' if row.is_control else ''}"
        words = [name, row.rule, row.start, f"{row.parameters:,}", row.moves]
        source = f"{row.source}; {row.evidence}" if row.evidence else row.source
        words += ["yes" if row.linear else "no", "yes" if row.starts_standard else "no", source]
        lines.append("| " + " | ".join(word.replace("|", "\\|") for word in words) + " |")
    return "\n".join(lines)
