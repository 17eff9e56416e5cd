"""What depth reads are made of, as a table whose columns are sources, whatever the number of a row's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from attnres.residuals import Read, Source, columns

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

By = Literal["contribution", "weight"]
"""By which number sources are shown: how much of the read they are (`attnres.inspect.contribution`), or the weights
that they are given, |weight| / sum |weights|, which a softmax's are already."""

FIELD: dict[By, Literal["contribution", "weights"]] = {"contribution": "contribution", "weight": "weights"}
"""The field of an `Inspection`'s parts that holds the numbers."""


def by_in(by: By, *parts: Any) -> By:
    """`by`, or "weight" where one of the parts of an inspection (None: it has none) lacks contributions."""
    return by if all(part is None or FIELD[by] in part for part in parts) else "weight"


def amounts(row: Sequence[float | None], by: By) -> np.ndarray:
    """One read's numbers: contributions as they are, weights as |weight| / sum |weights|."""
    values = np.array([value or 0.0 for value in row])
    return values if by == "contribution" else np.abs(values) / (np.abs(values).sum() or 1.0)


class _HasLayout(Protocol):
    @property
    def layout(self) -> Sequence[Read]: ...


class Named:
    """What has numbers for the sources of reads: the names of both, from its `layout`."""

    @property
    def reads(self: _HasLayout) -> list[str]:
        return [read.name for read in self.layout]

    @property
    def sources(self: _HasLayout) -> list[list[str]]:
        return [[source.name for source in read.sources] for read in self.layout]


@dataclass(frozen=True)
class Routing:
    """For every read of one model a number for each of its sources.

    `values[r][i]` belongs to `layout[r].sources[i]`; rows have different lengths. The last read is the output's. `by`
    is what the numbers are.
    """

    layout: Sequence[Read]
    values: Sequence[Sequence[float]]
    by: By = "weight"

    @classmethod
    def of(cls, inspection: "Inspection", by: By) -> "Routing | None":
        """Means over tokens of the reads that weigh something; None for a residual that weighs nothing. An inspection
        of an earlier version, which has no contributions, gives weights."""
        if inspection.routing is None:
            return None
        by = by_in(by, inspection.routing, inspection.kinds, inspection.prompts, inspection.example)
        kept = [r for r, row in enumerate(inspection.routing["weights"]) if row]
        rows = inspection.routing[FIELD[by]]
        return cls([inspection.layout[r] for r in kept], [amounts(rows[r], by).tolist() for r in kept], by)

    def columns(self, rows: Sequence[int] | None = None) -> list[Source]:
        """Return every source of these reads (all by default) once, what is open last."""
        return columns(self.layout[row].sources for row in (range(len(self.layout)) if rows is None else rows))

    def matrix(self, rows: Sequence[int], across: Sequence[Source]) -> np.ndarray:
        """Return values (rows, across), placed by source; NaN where a read does not have that source."""
        place = {source.name: i for i, source in enumerate(across)}
        table = np.full((len(rows), len(across)), np.nan)
        for r, row in enumerate(rows):
            for source, weight in zip(self.layout[row].sources, self.values[row], strict=True):
                table[r, place[source.name]] = weight
        return table

    def composites(self, row: int) -> int:
        """Return how many finished sources of a read are made of several outputs: blocks, snapshots of a stream."""
        plain = {"embedding", *(read.kind for read in self.layout)}
        return sum(not source.open and source.kind not in plain for source in self.layout[row].sources)

    def weighs(self, row: int, source: str) -> bool:
        """Whether a read weighs the source called `source` beside another."""
        names = [one.name for one in self.layout[row].sources]
        return source in names and len(names) > 1

    def place(self, row: int, source: str) -> int:
        """Return the number of the source called `source` in a read that has it."""
        return [one.name for one in self.layout[row].sources].index(source)
