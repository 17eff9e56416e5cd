"""`attnres check`: whether a mechanism does what the interface asks."""

import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from attnres.flags import Settings, parse


@dataclass
class Check:
    """Check a residual mechanism: one line a check, exit status 1 if one fails.

    Shapes, dtypes, gradients against finite differences, states, pipeline cuts, activation checkpointing, compilation,
    described against actual reads, and training, cached decoding, saving and loading in a small model.
    """

    residual: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|FILE.py:CLASS")]
    """A mechanism's name, or the file and class of one of your own."""
    settings: Settings = field(default_factory=dict)
    """Settings of the residual, e.g. num_streams=2; none are its defaults."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("check", Check, arguments)

    from attnres.models.check import checks

    failures = 0
    for outcome in checks(options.residual, options.settings):
        failures += not outcome.passed
        print(f"{outcome.name:<14} {'ok' if outcome.passed else 'FAILED':<7} {outcome.detail}", flush=True)
    if failures:
        print(f"{failures} {'check' if failures == 1 else 'checks'} failed")
        sys.exit(1)
