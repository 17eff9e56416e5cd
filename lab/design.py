"""What a study is: one file of `lab.studies` with a grid of runs, an analysis and figures, as data.

A study asks for arms. An arm is a comparison (`attnres.comparison.compare`: variants by seeds, a run folder each) or a
number of computations (a function of that file, a folder each). Which arms there are may depend on what earlier ones
gave: `Design.arms` is called again with whatever has finished, until it asks for nothing new.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnres.comparison.plan import CompareConfig
from attnres.errors import UserError
from attnres.stats import Recipe
from attnres.text import label_and_seed
from attnres.training.config import TrainConfig, from_dict

if TYPE_CHECKING:
    from attnres.figures.chart import Chart
    from lab.presets import Preset


@dataclass(frozen=True)
class ComputedCall:
    """A call of a function, and what it costs.

    Attributes:
        flops: about.
        calls: of operations of PyTorch, forward and backward, where those are small; about.
    """

    arguments: dict[str, Any]
    flops: float
    calls: float = 0.0


@dataclass(frozen=True)
class Computed:
    """Runs that are one call each of a function that returns measurements.

    Attributes:
        function: "lab.studies.FILE:NAME", called with a run's arguments; it returns rows such as
            {"quantity": "loss", "value": 2.5, "step": 100}, the step being optional.
        runs: by name, LABEL-seedK.
    """

    function: str
    runs: dict[str, ComputedCall]


@dataclass(frozen=True)
class Arm:
    """Runs of one study that share a folder, OUT/NAME.

    Attributes:
        compare: what is trained; its `out` is set when the study is carried out.
        computed: in place of that, what is computed.
        trunk: an arm of the same variants and seeds, off whose runs these branch before their decay.
        measure: "lab.studies.FILE:NAME", called with each finished run's folder; it returns rows as `Computed`
            does, which are kept in the folder.
        depth: quantities by sublayer at the last step to have in the table too, e.g. output_rms.
        started_from: whether other arms start from its runs, which are taken from elsewhere with their weights alone.
    """

    name: str
    compare: CompareConfig | None = None
    computed: Computed | None = None
    trunk: str = ""
    measure: str = ""
    depth: tuple[str, ...] = ()
    started_from: bool = False


@dataclass(frozen=True)
class MeasuredRow:
    """One measurement of one finished run.

    Attributes:
        label: the variant. step, tokens: when; 0 where there is no training.
        flops: spent until then, 6 for each weight and token, attention's and reads' share; 0 where it is not counted.
    """

    arm: str
    label: str
    seed: int
    step: int
    tokens: int
    flops: float
    quantity: str
    value: float


class KnownNoise(NamedTuple):
    """What the study of noise has of the recipe at a number of steps.

    Attributes:
        sigma, degrees: of one run. runs: (label, seed, loss) of the standard model and its control.
        remark: to be said wherever it is used, "" for nothing.
    """

    sigma: float
    degrees: float
    runs: tuple[tuple[str, int, float], ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Measured:
    """Everything that a study's finished runs gave.

    Attributes:
        planned: names of the runs of each arm asked for so far, and finished ones of them.
        begun: arms that have a folder: what was asked for once stays so, whatever else is asked for since.
        step_times: of a step by (arm, label), round by round, in which all take steps in turn; of timed arms.
        recipe: the arms that are trained by the preset's recipe, whatever their steps and variants.
        noises: of the recipe by its steps, as the study of noise has them; none where that was not run.
        curve: the recipe's standard model's final losses by its steps, as the study of the exchange rate has them.
        of_other_texts: names of these two studies where none of their runs had this study's tokenizer and held-out
            text, so that their results are not used.
    """

    rows: list[MeasuredRow] = field(default_factory=list)
    planned: dict[str, list[str]] = field(default_factory=dict)
    finished: dict[str, list[str]] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    step_times: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    recipe: frozenset[str] = frozenset()
    noises: Mapping[int, KnownNoise] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)
    of_other_texts: tuple[str, ...] = ()

    def complete(self, arm: str) -> bool:
        """Return whether every run of an arm is finished."""
        return arm in self.planned and set(self.planned[arm]) <= set(self.finished.get(arm, []))

    def of(self, arm: str, label: str | None = None, quantity: str = "loss") -> list[MeasuredRow]:
        """Return rows of an arm, of one label if one is given, in order of seed and step; of what diverged none."""
        rows = [row for row in self.rows if row.arm == arm and row.quantity == quantity and math.isfinite(row.value)]
        return sorted((row for row in rows if label in (None, row.label)), key=lambda row: (row.seed, row.step))

    def labels(self, arm: str) -> list[str]:
        """Return labels of an arm that have finished, in the order in which they were asked for."""
        return list(dict.fromkeys(row.label for row in self.rows if row.arm == arm))

    def finals(self, arm: str, label: str, quantity: str = "loss") -> dict[int, float]:
        """Return the last value of each seed that did not diverge."""
        return {row.seed: row.value for row in self.of(arm, label, quantity)}

    def mean(self, arm: str, label: str, quantity: str = "loss") -> float:
        """Return the mean over seeds of the last values; NaN without any."""
        values = list(self.finals(arm, label, quantity).values())
        return sum(values) / len(values) if values else math.nan

    def diverged(self, arm: str, label: str, quantity: str | None = None) -> list[int]:
        """Return the seeds of which that quantity, or any, did not stay finite."""
        rows = (row for row in self.rows if (row.arm, row.label) == (arm, label) and quantity in (None, row.quantity))
        return sorted({row.seed for row in rows if not math.isfinite(row.value)})

    def asked_for(self, arm: str) -> list[str]:
        """Return all labels of an arm, finished or not."""
        named = (label_and_seed(name) for name in self.planned.get(arm, []))
        return list(dict.fromkeys(taken[0] for taken in named if taken))

    def at_recipe(self, arm: str, quantity: str) -> bool:
        """Return whether the noises and the curve are of this arm's recipe and of this quantity."""
        return quantity == "loss" and arm in self.recipe

    def recipe_of(self, arm: str, quantity: str = "loss", floor: float = 0.0) -> Recipe | None:
        """Fit all runs of an arm and, where the preset's recipe trains it, those that the study of noise has at as many
        steps; None where nothing has finished. `floor`: sigma is no smaller."""
        labels = self.labels(arm)
        steps = max((self.steps(arm, label) for label in labels), default=0)
        known = self.noises[steps].runs if self.at_recipe(arm, quantity) and steps in self.noises else ()
        runs = [(label, seed, value) for label in labels for seed, value in self.finals(arm, label, quantity).items()]
        own = {(label, seed, round(value, 6)) for label, seed, value in runs}  # a run that both have is one
        runs += [one for one in known if (*one[:2], round(one[2], 6)) not in own]
        return Recipe(runs, floor) if own else None

    def flops(self, arm: str, label: str) -> float:
        """Return the FLOPs of one run of a label."""
        return max((row.flops for row in self.of(arm, label)), default=math.nan)

    def steps(self, arm: str, label: str) -> int:
        """Return the last step of a label's runs."""
        return max((row.step for row in self.of(arm, label)), default=0)


@dataclass(frozen=True)
class ResultTable:
    """A table of the page: text in cells."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StudyResult:
    """What came of a study.

    Attributes:
        answer: one or a few sentences, which claim nothing beyond the noise.
        values: numbers for other programs, plain JSON.
    """

    answer: str
    tables: Sequence[ResultTable] = ()
    charts: "Sequence[Chart]" = ()
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """At which size and with what a study is carried out.

    Attributes:
        seeds: how many each group has, where the study does not say how many it needs.
        source: the text; none is the preset's. column: of rows, what holds it. images: of the study resnet.
        name: the preset's. out: OUT/PRESET/STUDY is the study's folder.
        allow_different: runs that were begun with other arithmetic go on with this machine's.
    """

    name: str
    preset: "Preset"
    seeds: int
    source: str | None
    out: Path
    images: str | None = None
    column: str | None = None
    allow_different: bool = False

    def folder(self, study: str) -> Path:
        """Return where a study of this setting lies."""
        return self.out / self.name / study

    def config(self, **values: Any) -> TrainConfig:
        """Return the preset's run with nested values laid over it."""
        base = from_dict(self.preset.train)
        text = {"source": self.source, "column": self.column}
        changes = {name: value for name, value in text.items() if value is not None}
        data = dataclasses.replace(base.data, **changes)
        base = dataclasses.replace(base, data=data, allow_different=self.allow_different)
        return from_dict(values, base)

    def sized(self, size: dict[str, Any], **values: Any) -> TrainConfig:
        """Return the preset's run of another size; to another width its rates are carried over (muP)."""
        width = self.preset.width
        carried = {} if size["hidden_size"] == width else {"optim": {"base_width": width}}
        return self.config(model={"size": size}, **carried, **values)

    def is_recipe(self, run: TrainConfig) -> bool:
        """Return whether a run is the preset's but for its steps."""
        return run == self.config(steps=run.steps)

    def arm(
        self,
        name: str,
        variants: Sequence[str],
        seeds: Sequence[int] | None = None,
        *,
        of: TrainConfig,
        timed: bool = False,
        **more: Any,
    ) -> Arm:
        """Return an arm of variants, each with every seed; if `timed` their steps are timed in turn before any is
        trained."""
        which = range(self.seeds) if seeds is None else seeds
        seconds = self.preset.timing_s if timed else 0
        return Arm(name, CompareConfig(list(variants), list(which), base=of, timing_s=seconds), **more)

    def some(self, variants: Sequence[str]) -> list[str]:
        """Return the first variants of a long list, as many as the preset takes."""
        return list(variants)[: self.preset.most]


@dataclass(frozen=True)
class Design:
    """A study.

    Attributes:
        name: as `python -m lab` takes it. title: the question.
        about: what is done. published: what others found, with the source.
        arms: what is to be run, from what is known so far. It may run again, and says the same of the same.
        analyse: what came of it, also of a part of its runs.
    """

    name: str
    title: str
    about: str
    published: str
    arms: Callable[[Setting, Measured], list[Arm]]
    analyse: Callable[[Setting, Measured], StudyResult]


def branch_step(config: TrainConfig) -> int:
    """Return the last step before the decay of a run with the schedule wsd; raises UserError for another schedule."""
    optim = config.optim
    if optim.schedule != "wsd":
        raise UserError(f"optim.schedule is '{optim.schedule}': only runs with wsd branch off before their decay")
    return config.steps - min(round(optim.decay * config.steps), config.steps - round(optim.warmup * config.steps))
