"""Mean weights of depth reads as a table whose columns are sources, whatever the number of a row's own."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

UNFINISHED = ("partial", "stream", "null")


@dataclass(frozen=True)
class Routing:
    """Depth attention weights of one model: for every read, the weight of each of its sources.

    `weights[r][i]` belongs to `sources[r][i]`; rows have different lengths. The last read is the output's.
    """

    reads: list[str]
    sources: list[list[str]]
    weights: list[list[float]]

    def columns(self) -> list[str]:
        """Every source once, in an order that agrees with every row's own; else in order of first appearance."""
        first_seen = list(dict.fromkeys(name for row in self.sources for name in row))
        before: dict[str, set[str]] = {name: set() for name in first_seen}
        for row in self.sources:
            for left, right in pairwise(row):
                before[right].add(left)
        order: list[str] = []
        while len(order) < len(first_seen):
            ready = [name for name in first_seen if name not in order and before[name] <= set(order)]
            if not ready:  # two rows contradict each other
                return first_seen
            # What a read sees of unfinished work stands at the end of its row, so after all that is finished here.
            order.append(next((name for name in ready if name not in UNFINISHED), ready[0]))
        return order

    def matrix(self, reads: list[str] | None = None, columns: list[str] | None = None) -> np.ndarray:
        """(reads, columns) weights, placed by source *name*; NaN where a read does not have that source."""
        reads = self.reads if reads is None else reads
        columns = self.columns() if columns is None else columns
        place = {name: i for i, name in enumerate(columns)}
        row_of = {name: i for i, name in enumerate(self.reads)}
        out = np.full((len(reads), len(columns)), np.nan)
        for r, read in enumerate(reads):
            row = row_of[read]
            for name, weight in zip(self.sources[row], self.weights[row], strict=True):
                if name in place:
                    out[r, place[name]] = weight
        return out
