"""The standard model's best rate: half and twice the recipe's at one seed, then on until the loss turns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attnres.comparison.variants import label_of
from lab.analyses.halving import beyond
from lab.analyses.noise import Noise
from lab.design import Arm, Measured, Setting

MODEL = (0.5, 2.0)
"""Of the recipe's rates, for the standard model, beside the recipe's own."""
MOST = 16.0
"""The highest rate of the standard model that is tried, in multiples of the recipe's; the lowest is one over it."""


@dataclass(frozen=True)
class Kind:
    """What a search of the standard model's rates is of.

    Attributes:
        base: the arm that has it at the recipe's rates. judged: the arm by whose noise its losses are.
        subject: as a sentence begins. optim: what differs from the recipe.
    """

    base: str
    judged: str
    subject: str
    optim: Mapping[str, str]


SEARCHES = {
    "model": Kind("own", "own", "The standard model", {}),
    "adamw": Kind("adamw", "tuned-adamw", "With AdamW alone it", {"optimizer": "adamw"}),
}
"""By the name of their first arm."""


@dataclass(frozen=True)
class Search:
    """The standard model at one seed, up or down from the recipe's rates until its loss turns.

    Attributes:
        arms: those asked for so far.
        losses: by multiple of the recipe's rates; NaN for what diverged or has not finished.
        ended: whether nothing further is to be tried.
    """

    arms: list[Arm]
    losses: dict[float, float]
    ended: bool

    @property
    def finite(self) -> dict[float, float]:
        """The losses that are known, lowest rate first."""
        return {factor: loss for factor, loss in sorted(self.losses.items()) if math.isfinite(loss)}

    @property
    def best(self) -> float:
        """The multiple with the lowest loss; 1 where none is known."""
        return min(self.finite, key=self.losses.__getitem__, default=1.0)

    @property
    def turned(self) -> bool:
        """Whether rates on both sides of the best were tried."""
        return min(self.losses) < self.best < max(self.losses)

    def where(self, noise: Noise) -> str:
        """What is said of the best rate, by the rates next to it; those that diverged count as worse."""
        if not self.turned:
            return f"the {'highest' if self.best == max(self.losses) else 'lowest'} that was tried: it has not turned"
        rates = sorted(self.losses)
        place = rates.index(self.best)
        gaps = [self.losses[rate] - self.losses[self.best] for rate in (rates[place - 1], rates[place + 1])]
        if all(not gap < noise.threshold(1, 1) for gap in gaps):  # NaN of what diverged
            return "and lower and higher ones are worse beyond the noise"
        return "and lower and higher ones are worse, not both beyond the noise"


def at_rate(setting: Setting, factor: float, residual: str = "standard") -> str:
    """A residual with all rates at this multiple of the recipe's."""
    return residual if factor == 1 else f"{residual}@lr={setting.config().optim.lr * factor:g}"


def searched(setting: Setting, measured: Measured, name: str) -> Search:
    """A search as far as it has come, in the arms `name`, `name`-xFACTOR."""
    kind = SEARCHES[name]
    of, ways = setting.config(optim=kind.optim), [at_rate(setting, factor) for factor in MODEL]
    parts = [setting.arm(name, ["standard", *ways] if kind.base == name else ways, [0], of=of)]
    losses = {1.0: measured.mean(kind.base, "standard")}
    losses |= {factor: measured.mean(name, label_of(at_rate(setting, factor))) for factor in MODEL}
    if not (measured.complete(name) and measured.complete(kind.base)):
        return Search(parts, losses, ended=False)
    while (further := beyond(losses, 2.0, MOST)) is not None:
        one = setting.arm(f"{name}-x{further:g}", [at_rate(setting, further)], [0], of=of)
        parts.append(one)
        losses[further] = measured.mean(one.name, label_of(at_rate(setting, further)))
        if not measured.complete(one.name):
            return Search(parts, losses, ended=False)
    return Search(parts, losses, ended=True)
