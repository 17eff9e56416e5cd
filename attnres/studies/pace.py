"""How long runs take, and what is left of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attnres.run_names import label_and_seed


class Ended(NamedTuple):
    """A run that took its time: its name, how much it computed, as a child has it, and the seconds it took."""

    name: str
    size: float
    seconds: float


@dataclass
class Pace:
    """What runs have taken, and how much is left, by their sizes; of runs that differ in their seed alone by those of
    them that have ended."""

    left: dict[str, float]
    """What is to be computed, by the name of a run that has not ended."""
    done: list[Ended] = field(default_factory=list)

    def ended(self, name: str, seconds: float) -> None:
        """Count a run that has ended."""
        self.done.append(Ended(name, self.left.pop(name), seconds))

    @property
    def seconds_left(self) -> float:
        """Of one run after the other; something has to be done."""
        groups = dict[str, list[Ended]]()
        for run in self.done:
            groups.setdefault(_without_seed(run.name), []).append(run)
        return math.fsum(size * _rate(groups.get(_without_seed(name), self.done)) for name, size in self.left.items())


def _without_seed(name: str) -> str:
    taken = label_and_seed(name)
    return taken[0] if taken else name


def _rate(runs: Sequence[Ended]) -> float:
    """Seconds for a unit of size; 0 where all steps had been made before."""
    size = math.fsum(run.size for run in runs)
    return math.fsum(run.seconds for run in runs) / size if size else 0.0
