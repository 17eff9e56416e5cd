"""What is drawn side by side: models, or a study's runs under their labels, each with the numbers of its seeds."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from attnres.figures import style
from attnres.figures.plot import plain
from attnres.inspect.inspection import mean_inspection
from attnres.residuals import Traits

if TYPE_CHECKING:
    from attnres.inspect.inspection import Inspection

Points = Sequence[tuple[float, float]]
"""(place on the axis of training, value) pairs."""


class Difference(NamedTuple):
    """A held-out loss less the baseline's, in nats per token.

    Attributes:
        place: on the axis of training.
        mean, margin: of the seeds, and half of its 95 % interval; NaN is not known.
        basis: what the interval is over, "seeds" or "windows". per_seed: each seed's.
    """

    place: float
    mean: float
    margin: float
    basis: str = "windows"
    per_seed: Sequence[float] = ()

    @property
    def decided(self) -> bool:
        return abs(self.mean) > self.margin


@dataclass(frozen=True)
class Variant:
    """What is known under one label; what is not is empty.

    Attributes:
        seeds: those of which means are taken.
        inspections, dynamics: by seed, as `attnres.inspect.inspection.dynamics` gives the latter.
        held_out, train: losses by seed, also of one that does not count.
        differences: to the baseline, over training.
        group, rate, finals: its name without the learning rate, that rate, and the final held-out losses.
        complete: every seed has finished.
    """

    label: str
    residual: str
    traits: Traits
    seeds: Sequence[int] = (0,)
    inspections: Mapping[int, "Inspection"] = field(default_factory=dict)
    dynamics: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    held_out: Mapping[int, Points] = field(default_factory=dict)
    train: Mapping[int, Points] = field(default_factory=dict)
    differences: Sequence[Difference] = ()
    group: str = ""
    rate: float | None = None
    finals: Sequence[float] = ()
    complete: bool = True

    @cached_property
    def mean(self) -> "Inspection":
        """The inspection of the first seed, with means over seeds of what has one."""
        return mean_inspection(list(self.inspections.values()), self.label)

    def over_steps(self, key: str) -> tuple[Sequence[float], np.ndarray]:
        """Return steps and (depth, steps) values that training recorded; the first seed's where seeds differ in
        steps."""
        runs = [run for run in self.dynamics.values() if run.get(key) and all(run[key])]
        if not runs:
            return [], np.empty((0, 0))
        alike = [run for run in runs if run["steps"] == runs[0]["steps"]]
        return runs[0]["steps"], np.mean([np.array(run[key], dtype=float).T for run in alike], axis=0)


@dataclass(frozen=True)
class Comparison:
    """Variants in order, and what they are held against.

    Attributes:
        baseline: the label whose line is zero where differences are drawn.
        unit: of the axis of training.
        equal: all were trained under equal conditions.
    """

    variants: Sequence[Variant]
    baseline: str | None = None
    unit: str = "step"
    equal: bool = False

    @classmethod
    def of_models(cls, inspections: Sequence["Inspection"]) -> Self:
        """Models that are set side by side under their own names."""
        return cls(
            [
                Variant(
                    str(one.model["name"]),
                    one.model["residual"],
                    one.traits,
                    inspections={0: one},
                    dynamics={0: one.dynamics} if one.dynamics else {},
                )
                for one in inspections
            ]
        )

    def having(self, name: str) -> Self:
        """Return those variants alone that have something in a field."""
        return dataclasses.replace(self, variants=[one for one in self.variants if getattr(one, name)])

    def without(self, name: str) -> Self:
        """Return the same variants with nothing in a field."""
        return dataclasses.replace(self, variants=[dataclasses.replace(one, **{name: {}}) for one in self.variants])

    def noise(self) -> list[tuple[float, float]]:
        """Return (place, standard deviation of the difference of two runs of the baseline), of two seeds or more: what
        chance does to one pair of runs, which no error over windows sees."""
        runs = next((one.held_out for one in self.variants if one.label == self.baseline), {})
        curves = [dict(points) for points in runs.values()]
        if len(curves) < 2:
            return []
        common = sorted(set.intersection(*(set(curve) for curve in curves)))
        deviations = [np.std([curve[place] for curve in curves], ddof=1) for place in common]
        return [(place, float(2**0.5 * one)) for place, one in zip(common, deviations, strict=True)]

    def looks(self) -> list[dict[str, Any]]:
        """Return line keywords of each variant: the colour of its residual, its label."""
        looks = style.looks({one.label: (one.residual, one.traits) for one in self.variants})
        return [{**looks[one.label], "label": plain(one.label)} for one in self.variants]

    def named(self, name: str, title: str) -> tuple[str, str]:
        """Return a figure's name and title: those of the one model, or of all."""
        if len(self.variants) == 1:
            return name, f"{self.variants[0].label}: {title}"
        return f"compare-{name}", title[0].upper() + title[1:]
