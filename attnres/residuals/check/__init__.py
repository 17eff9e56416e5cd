"""Conformance checks of a mechanism: whether it satisfies the interface and its own description.

Networks here are small and in plain torch. Checks that need a model (decoding, saving, Transformers' start values) are
in `attnres.models.check`, whose `check` runs both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from attnres.residuals.check import forward, interface, reads
from attnres.residuals.check.subject import Subject, summary

CHECKS: dict[str, Callable[[Subject], str]] = {
    "interface": interface.interface,
    "settings": interface.settings,
    "start values": interface.start_values,
    "learned": interface.learned,
    "shapes": forward.shapes,
    "dtypes": forward.dtypes,
    "gradients": forward.gradients,
    "progress": forward.progress,
    "states": forward.states,
    "cuts": forward.cuts,
    "checkpointing": forward.checkpointing,
    "compile": forward.compiled,
    "layout": reads.layout,
    "sources": reads.sources,
    "weights": reads.weights,
    "mixing": reads.mixing,
    "queries": reads.queries,
    "start": reads.start,
    "watching": reads.watching,
}
"""Name -> check, a function that returns a detail and raises `Failed` (or any exception) if the mechanism fails."""


class Outcome(NamedTuple):
    """The result of one check.

    Attributes:
        name: name of the check. passed: whether the mechanism passed it.
        detail: for example the largest difference, or the fault.
    """

    name: str
    passed: bool
    detail: str


def outcomes(checks: Mapping[str, Callable[[Subject], str]], subject: Subject) -> Iterator[Outcome]:
    """Run checks one by one, each with the same random numbers. An exception of the mechanism is a failed check."""
    for name, check in checks.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                outcome = Outcome(name, True, check(subject))
            except Exception as error:
                outcome = Outcome(name, False, summary(error))
        yield outcome
