"""How far two runs of one function fall apart, and which differences are more than that.

sigma is the standard deviation of the final loss over seeds. A difference of means over n1 and n2 seeds has the
standard error sigma sqrt(1/n1 + 1/n2), and is called one where it exceeds

    k sigma sqrt(1/n1 + 1/n2),   k = max(3, t_{1 - alpha / 2m}(degrees of freedom of sigma)),   alpha = 0.05

for m differences looked at together (Bonferroni). Three sigma is the rule of modded-nanogpt's and other small
laboratories' noise floors; Student's t takes over where sigma is of few seeds or many things are compared.

Runs of one seed share their data and most of their start, so that a difference over the same seeds may vary less than
that says: it does at nano; in GPT-2's family at micro and in the depth tasks it does not. sigma is one for all
mechanisms but those whose seeds vary more than the others' (`spread_of`), which are judged by their own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np

from attnres.stats import f_tail, t_quantile

ALPHA = 0.05
RULE = 3.0
"""Standard errors below which no difference is called one, however well sigma is known."""
POWER = 0.8
STEADY = 0.01
"""How unlikely, over all groups, the variance of the one that varies most has to be for it to be taken out."""

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
        return f"sigma {self.sigma:.4f} with {self.degrees} degree{'s' * (self.degrees != 1)} of freedom"

    @property
    def note(self) -> str:
        """Of which runs it is, as a sentence below a table."""
        if not self.degrees:
            return "No noise is known: one seed each, and python -m lab noise was not run for this recipe."
        return f"Noise: {self} ({self.source})."

    @property
    def wide(self) -> float:
        """The standard deviation of a normal distribution with the 95 % interval that Student's t has here."""
        return self.sigma * t_quantile(0.975, self.degrees) / NormalDist().inv_cdf(0.975)

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


UNMEASURED = Noise(math.nan, 0, "")


def pooled(groups: Iterable[Sequence[float]], source: str = "") -> Noise:
    """Noise of groups of runs that differ in nothing but their seed: the root of the pooled variance within them."""
    squares, degrees = 0.0, 0
    for values in groups:
        if len(values) > 1:
            squares += float(np.var(values, ddof=1)) * (len(values) - 1)
            degrees += len(values) - 1
    return Noise(math.sqrt(squares / degrees), degrees, source) if degrees else UNMEASURED


def combined(*noises: Noise) -> Noise:
    """Estimates of one noise, pooled; those that know nothing count for nothing."""
    known = [noise for noise in noises if noise.degrees]
    if len(known) < 2:
        return known[0] if known else UNMEASURED
    degrees = sum(noise.degrees for noise in known)
    squares = sum(noise.sigma**2 * noise.degrees for noise in known)
    return Noise(math.sqrt(squares / degrees), degrees, _sources(known))


def _sources(noises: Iterable[Noise]) -> str:
    return "; ".join(dict.fromkeys(noise.source for noise in noises if noise.source))


@dataclass(frozen=True)
class Spread:
    """The noise that mechanisms have in common, and that of each whose seeds vary more."""

    shared: Noise = UNMEASURED
    own: Mapping[str, Noise] = field(default_factory=dict)

    def between(self, label: str, n1: int, base: str, n2: int) -> Noise:
        """The noise by which n1 seeds of one are held against n2 of the other; of unequal ones Welch's."""
        first, second = self.own.get(label, self.shared), self.own.get(base, self.shared)
        if first is second or not first.degrees or not second.degrees:
            return first if not first.degrees else second
        parts = first.sigma**2 / n1, second.sigma**2 / n2
        degrees = sum(parts) ** 2 / (parts[0] ** 2 / first.degrees + parts[1] ** 2 / second.degrees)
        sigma = math.sqrt(sum(parts) / (1 / n1 + 1 / n2))
        return Noise(sigma, max(1, math.floor(degrees)), _sources((first, second)))


def widest(spreads: Sequence[Spread]) -> Noise:
    """One noise for groups of several arms: what they share, pooled, or that of a mechanism which varies more."""
    shared = combined(*(one.shared for one in spreads))
    own = [noise for one in spreads for noise in one.own.values()]
    return max([shared, *own], key=lambda noise: noise.sigma) if own else shared


def spread_of(groups: Mapping[str, Sequence[float]], known: Noise = UNMEASURED, floor: float = 0.0) -> Spread:
    """The noise of groups of runs that differ in nothing but their seed, pooled with what is `known` of it.

    A group whose variance is beyond the others' (F-test, at 1 % over all groups) is taken out, the worst first.

    Args:
        floor: sigma is no smaller, e.g. an accuracy's that so many problems can tell.
    """
    within, own = {label: values for label, values in groups.items() if len(values) > 1}, dict[str, Noise]()
    while True:
        several = f"variant{'s' * (len(within) != 1)}"
        source = f"{len(within)} {several} of {max(map(len, within.values()))} seeds" if within else ""
        together = combined(known, pooled(within.values(), source))
        worst = max(within, key=lambda label: pooled([within[label]]).sigma, default=None)
        if worst is None:
            break
        alone = pooled([within[worst]], f"{len(within[worst])} seeds of {worst}")
        others = combined(known, pooled(values for label, values in within.items() if label != worst))
        if not others.degrees:
            break
        ratio = alone.sigma**2 / max(others.sigma, floor, 1e-12) ** 2
        if f_tail(ratio, alone.degrees, others.degrees) > STEADY / len(within):
            break
        own[worst] = alone
        del within[worst]
    sigma = max(together.sigma, floor) if together.degrees else together.sigma
    return Spread(replace(together, sigma=sigma), own)


def as_ratio(threshold: float) -> str:
    """What a logarithm has to exceed, as a ratio; nothing where seeds lie so far apart that nothing could be told."""
    return f"{math.exp(threshold):.2g}" if abs(threshold) < 10 else ""


@dataclass(frozen=True)
class Judgement:
    """What a group of runs is beside the baseline's.

    Attributes:
        difference: of its mean to theirs. threshold: what that has to exceed.
    """

    difference: float
    threshold: float
    verdict: Verdict


def beside(groups: Mapping[str, Sequence[float]], baseline: str, comparisons: int) -> dict[str, Judgement]:
    """Judge each group's mean against the baseline's, by the noise of all groups; a group without values is left out.

    Seeds are not paired: `lab.contrast` does that, for what is trained.

    Returns:
        By label; nothing where the baseline has no values.
    """
    base, spread = groups.get(baseline, ()), spread_of(groups)
    judged = dict[str, Judgement]()
    for label, values in groups.items():
        if label == baseline or not values or not base:
            continue
        counts = len(values), len(base)
        noise = spread.between(label, counts[0], baseline, counts[1])
        difference = fmean(values) - fmean(base)
        threshold, verdict = noise.threshold(*counts, comparisons), noise.verdict(difference, *counts, comparisons)
        judged[label] = Judgement(difference, threshold, verdict)
    return judged
