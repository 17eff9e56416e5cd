"""The table of mechanisms: rule, cost and source of each, from the classes themselves."""

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
        name, rule, start, moves, source, evidence: from the class (`About`); empty if a user's class has none.
        parameters: at L = 24 sublayers and width 256, with the default settings.
        linear: whether a read is a sum of outputs with one number each.
        starts_standard: whether it starts as the standard residual, up to the eps of the norms, so that conversion
            keeps logits.
        is_control: whether it is a control that learns nothing of the method.
        settings: names of its settings.
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
        """Return plain values for JSON."""
        return self._asdict()


def mechanisms(names: Collection[str] = ()) -> list[MechanismRow]:
    """Return a row for each known mechanism: those of the package, and registered ones.

    Args:
        names: the mechanisms to list; None lists all.

    >>> [row.starts_standard for row in mechanisms(["full", "deepnorm"])]
    [True, False]
    """
    rows = []
    for name in [name for name in RESIDUALS if name in names or not names]:
        with torch.device("meta"):  # on the meta device, because some have many parameters and no value is needed
            residual = make_residual(name, SUBLAYERS, WIDTH)
        words, traits = residual.about or About("", "", "", ""), residual.traits
        parameters = sum(parameter.numel() for parameter in residual.parameters())
        starts, settings = traits.starts_standard, tuple(settings_of(name))
        rows.append(MechanismRow(name, *words, parameters, traits.linear, starts, traits.is_control, settings))
    return rows


def as_markdown(rows: list[MechanismRow]) -> str:
    """Return the table as Markdown for docs/reference/mechanisms.md."""
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
