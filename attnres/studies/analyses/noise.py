"""How far two runs of one function fall apart, and which differences are more than that.

sigma is the standard deviation of the final loss over seeds. A difference of means over n1 and n2 seeds has the
standard error sigma sqrt(1/n1 + 1/n2), and is called one where it exceeds

    k sigma sqrt(1/n1 + 1/n2),   k = max(3, t_{1 - alpha / 2m}(degrees of freedom of sigma)),   alpha = 0.05

for m differences looked at together (Bonferroni). Three sigma is the rule of modded-nanogpt's and other small
laboratories' noise floors; Student's t takes over where sigma is of few seeds or many things are compared.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

ALPHA = 0.05
RULE = 3.0
"""Standard errors below which no difference is called one, however well sigma is known."""
POWER = 0.8

Verdict = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class Noise:
    """A standard deviation over seeds.

    Attributes:
        sigma: of one run's final loss, in its unit.
        degrees: of freedom that it was estimated with; 0: not known, and nothing can be decided.
        source: of which runs.
    """

    sigma: float
    degrees: int
    source: str = ""

    def __str__(self) -> str:
        return f"sigma {self.sigma:.4f} with {self.degrees} degrees of freedom"

    @property
    def note(self) -> str:
        """Of which runs it is, as a sentence below a table."""
        if not self.degrees:
            return "No noise is known: one seed each, and attnres study noise was not run for this recipe."
        return f"Noise: {self} ({self.source})."

    def error(self, n1: int, n2: int) -> float:
        """Standard error of the difference of means over n1 and n2 seeds."""
        return self.sigma * math.sqrt(1 / n1 + 1 / n2)

    def factor(self, comparisons: int = 1) -> float:
        """How many standard errors a difference has to exceed, k; infinity where sigma is not known."""
        if self.degrees < 1:
            return math.inf
        return max(RULE, t_quantile(1 - ALPHA / (2 * comparisons), self.degrees))

    def threshold(self, n1: int, n2: int, comparisons: int = 1) -> float:
        """The difference that has to be exceeded; infinity where nothing can be decided."""
        return math.inf if self.degrees < 1 else self.factor(comparisons) * self.error(n1, n2)

    def detectable(self, n1: int, n2: int, comparisons: int = 1) -> float:
        """The smallest true difference that is called one in four of five studies like this."""
        return self.threshold(n1, n2, comparisons) + NormalDist().inv_cdf(POWER) * self.error(n1, n2)

    def verdict(self, difference: float, n1: int, n2: int, comparisons: int = 1) -> Verdict:
        """What a difference of losses to the baseline's is; lower is better."""
        if not abs(difference) > self.threshold(n1, n2, comparisons):
            return "undecided"
        return "better" if difference < 0 else "worse"


UNKNOWN = Noise(math.nan, 0, "")


def pooled(groups: Iterable[Sequence[float]], source: str = "") -> Noise:
    """Noise of groups of runs that differ in nothing but their seed: the root of the pooled variance within them."""
    squares, degrees = 0.0, 0
    for values in groups:
        if len(values) > 1:
            squares += float(np.var(values, ddof=1)) * (len(values) - 1)
            degrees += len(values) - 1
    return Noise(math.sqrt(squares / degrees), degrees, source) if degrees else UNKNOWN


def combined(first: Noise, second: Noise) -> Noise:
    """Two estimates of one noise, pooled."""
    degrees = first.degrees + second.degrees
    if not first.degrees or not second.degrees:
        return first if first.degrees else second
    squares = first.sigma**2 * first.degrees + second.sigma**2 * second.degrees
    return Noise(math.sqrt(squares / degrees), degrees, f"{first.source}; {second.source}".strip("; "))


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Student's t: the point below which it lies with a probability of at least one half.

    From its distribution function, which with x = sqrt(degrees) tan(a) is an integral of cos^(degrees - 1) a.

    >>> round(t_quantile(0.975, 2), 3), round(t_quantile(0.5, 9), 3)
    (4.303, 0.0)
    """
    grid = np.linspace(0, math.pi / 2, 20001)
    density = np.cos(grid) ** (degrees - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp((probability - 0.5) * 2, area / area[-1], grid))
    return math.sqrt(degrees) * math.tan(angle)
