"""A text in a model, and what knock-outs change of it, as numbers."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from attnres.inspect.inspection import By, Named
from attnres.residuals import Read


def dominant(rows: np.ndarray) -> np.ndarray:
    """The source of each token that is most of its read, along it or against it: (tokens, sources) to places."""
    return np.abs(rows).argmax(1)


@dataclass(frozen=True)
class Reading(Named):
    """A text in a model.

    Attributes:
        ids: of the T tokens; `pieces` what each says, in whole characters, and `names` what to call it
            (`attnres.models.encoding.characters`).
        layout: the reads and what they mix; `reads` and `sources` are their names.
        weights, contributions: for each read (T, sources); what each source is of the read, by projection on it.
        log_probs: (T, V): of the token after each.
        losses: (T-1,) nats: of each token but the first.
        notes: what a reader should know of this text, one sentence each.
    """

    ids: tuple[int, ...]
    pieces: list[str]
    names: list[str]
    layout: tuple[Read, ...]
    weights: list[np.ndarray]
    contributions: list[np.ndarray]
    log_probs: Tensor
    losses: np.ndarray
    notes: list[str]

    @property
    def loss(self) -> float | None:
        """Mean loss in nats per token; None for a single token."""
        return float(self.losses.mean()) if len(self.losses) else None

    def rows(self, by: By) -> list[np.ndarray]:
        """For each read (T, sources): contributions, or weights as |weight| / sum |weights|."""
        if by == "contribution":
            return self.contributions
        sizes = [np.abs(row) for row in self.weights]
        return [row / np.maximum(row.sum(1, keepdims=True), 1e-30) for row in sizes]

    def means(self, by: By) -> list[np.ndarray]:
        """For each read (sources,): the same, averaged over the tokens."""
        return [row.mean(0) for row in self.rows(by)]

    def most_varied(self) -> int:
        """The read in which the tokens' largest sources differ most: the entropy of how often each is the largest."""

        def entropy(parts: np.ndarray) -> float:
            share = np.bincount(dominant(parts)) / max(1, len(parts))
            return float(-(share[share > 0] * np.log(share[share > 0])).sum())

        return max(range(len(self.contributions)), key=lambda read: entropy(self.contributions[read]))


@dataclass(frozen=True)
class Effect:
    """What a knock-out does to the text's losses and next-token distributions; fields as in `Reading`."""

    log_probs: Tensor
    losses: np.ndarray


@dataclass(frozen=True)
class Candidate:
    """A next token, before and after a knock-out."""

    piece: str
    before: float
    after: float | None
