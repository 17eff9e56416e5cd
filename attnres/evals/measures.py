"""Means with their standard errors, and paired differences of two models.

Every figure here is a ratio of sums over items, m = sum(a) / sum(b): accuracy with a = right or wrong and b = 1,
perplexity exp(m) with a = -log p and b = tokens of a window. The standard error of m is that of a ratio estimate
(`attnres.stats`), for b = 1 lm-eval's; that of exp(m) is exp(m) se. Windows of one text are not quite independent,
so perplexity's is a little too small. A difference is taken item by item, in m (nats for a
perplexity), with a = a2 - a1.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnres.evals.scoring import Request
from attnres.stats import or_none, perplexity, ratio

OTHER_TOKENS = "different tokens: bits per byte compare, this does not"
OTHER_PLACES = "different tokens, by which the limit cuts the text: leave out --limit to compare"
NO_ITEMS = "no values per item"
"""Why two models have no difference."""


@dataclass(frozen=True)
class Measure:
    """One figure of one model on one task.

    Attributes:
        key, label: for files and for people.
        above: a_i (n,); NaN for an item that was left out.
        below: b_i (n,).
        exp: whether the figure is exp(m).
        unit: of m and so of differences.
        chance: what guessing gives, where that is known.
        tokens: a digest of the tokens that the figure hangs on; empty where it is the same for any tokenizer.
        cut: whether the text was cut, by this model's tokens.
        universal: whether the figure may be compared across tokenizers, though its items may not.
    """

    key: str
    label: str
    above: np.ndarray
    below: np.ndarray
    exp: bool = False
    unit: str = ""
    chance: float | None = None
    tokens: str = ""
    universal: bool = False
    cut: bool = False
    fixed: tuple[float, float | None] | None = None
    """(figure, standard error) where another program gave no values per item."""

    @property
    def count(self) -> int:
        """Items that were scored."""
        return int(np.isfinite(self.above).sum())

    def estimate(self) -> tuple[float, float | None]:
        """(figure, standard error); no error for a single item."""
        if self.fixed is not None:
            return self.fixed
        mean, error, *_ = ratio(self.above, self.below)
        figure = perplexity(mean) if self.exp else mean
        return figure, or_none(figure * error if self.exp else error)


@dataclass(frozen=True)
class Difference:
    """Second model minus first: in the unit of m, or why there is none."""

    value: float | None
    error: float | None = None
    count: int = 0
    paired: bool = True
    reason: str = ""


def difference(first: Measure, second: Measure) -> Difference:
    """The paired difference; of bits per byte over different tokens, the plain one; of nothing else over those."""
    if first.fixed is not None or second.fixed is not None:
        return Difference(None, reason=NO_ITEMS)
    if first.tokens == second.tokens:
        change = ratio(second.above - first.above, first.below)
        return Difference(change.mean, or_none(change.error), change.items)
    if first.universal and (first.cut or second.cut):
        return Difference(None, reason=OTHER_PLACES)
    if not first.universal:
        return Difference(None, reason=OTHER_TOKENS)
    (before, first_error), (after, second_error) = first.estimate(), second.estimate()
    known = first_error is not None and second_error is not None
    error = math.hypot(first_error or 0.0, second_error or 0.0) if known else None
    return Difference(after - before, error, min(first.count, second.count), paired=False)


def tokens_digest(requests: Sequence[Request]) -> str:
    """Equal exactly if two models were asked the same, token by token."""
    digest = hashlib.sha256()
    for request in requests:
        for ids in request:
            digest.update(np.asarray(ids, dtype=np.int64).tobytes())
            digest.update(b"|")
    return digest.hexdigest()
