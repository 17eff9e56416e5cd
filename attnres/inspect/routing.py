"""Mean weights of depth reads as a table whose columns are sources, whatever the number of a row's own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnres.residuals import Read, Source, columns


@dataclass(frozen=True)
class Routing:
    """Depth weights of one model: for every read, the weight of each of its sources.

    `weights[r][i]` belongs to `layout[r].sources[i]`; rows have different lengths. The last read is the output's.
    """

    layout: Sequence[Read]
    weights: Sequence[Sequence[float]]

    def columns(self, rows: Sequence[int] | None = None) -> list[Source]:
        """Return every source of these reads (all by default) once, what is open last."""
        return columns(self.layout[row].sources for row in (range(len(self.layout)) if rows is None else rows))

    def matrix(self, rows: Sequence[int], across: Sequence[Source]) -> np.ndarray:
        """Return weights (rows, across), placed by source; NaN where a read does not have that source."""
        place = {source.name: i for i, source in enumerate(across)}
        table = np.full((len(rows), len(across)), np.nan)
        for r, row in enumerate(rows):
            for source, weight in zip(self.layout[row].sources, self.weights[row], strict=True):
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
