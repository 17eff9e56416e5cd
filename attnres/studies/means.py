"""With what the runs of a study are made, and which of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rich.console import Console

from attnres.errors import UserError
from attnres.studies.children import Runner
from attnres.studies.design import Arm, Design
from attnres.studies.outcome import names_of
from attnres.text import listed


@dataclass(frozen=True)
class Means:
    """How a study is carried out.

    Attributes:
        say: where progress goes.
        jobs: runs at once; none is one a core or GPU. until: none begins after this moment (`time.monotonic`).
        run: what runs them; none is processes on this machine. here: whether that is on this machine; on others nothing
            is timed, and their devices need not be here.
        only: patterns of ARM/RUN with * and ?; runs that fit none of them are left for another time.
    """

    say: Console
    jobs: int | None = None
    until: float = math.inf
    run: Runner | None = None
    here: bool = True
    only: Sequence[str] = ()

    def wants(self, arm: Arm, name: str) -> bool:
        """Whether a run of an arm is to be made now."""
        return not self.only or any(fnmatchcase(f"{arm.name}/{name}", pattern) for pattern in self.only)

    def check(self, design: Design, arms: Sequence[Arm]) -> None:
        """Refuse a pattern that none of the runs of a study's arms fits: UserError."""
        names = [f"{arm.name}/{name}" for arm in arms for name in names_of(arm)]
        for pattern in self.only:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"no run of the study {design.name} is called '{pattern}' by now: expected ARM/RUN, * for any "
                    f"letters, such as {names[0]}, of the arms {listed([arm.name for arm in arms])}"
                )

    def times(self, arm: Arm) -> bool:
        """Whether the steps of an arm's variants are to be timed."""
        timed = self.here and arm.compare is not None and arm.compare.timing_s > 0
        return timed and any(self.wants(arm, name) for name in names_of(arm))
