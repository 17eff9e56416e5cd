"""Conformance of a mechanism: whether it does what the interface asks, and what it says of itself.

Networks here are small and in plain torch. What needs a model (decoding, saving, Transformers' start values) is in
`attnres.models.check`, whose `check` does both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

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
"""Name -> check: returns a detail, raises `Failed` (or anything else) where the mechanism does not pass."""


class Outcome(NamedTuple):
    """What one check says.

    Attributes:
        name: of the check. passed: whether the mechanism does what is asked.
        detail: the largest difference, say, or what is wrong.
    """

    name: str
    passed: bool
    detail: str


def outcomes(checks: Mapping[str, Callable[[Subject], str]], subject: Subject) -> Iterator[Outcome]:
    """Carry checks out, one by one. An exception of the mechanism's is a check that failed."""
    for name, check in checks.items():
        try:
            yield Outcome(name, True, check(subject))
        except Exception as error:
            yield Outcome(name, False, summary(error))
