"""The description of a study as data: a file of `lab.studies` with a grid of runs, an analysis and figures.

A study requests arms. An arm is a comparison (`attnres.comparison.compare`: variants by seeds, a run folder each) or a
number of computations (calls of a function in that file, a folder each). Arms may depend on the results of earlier
ones: `Design.arms` is called again with the finished runs, until it requests nothing new.
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
    from lab.charts import Chart
    from lab.presets import Preset


@dataclass(frozen=True)
class ComputedCall:
    """A function call and its cost.

    Attributes:
        flops: approximate FLOPs.
        calls: approximate number of small PyTorch operations, forward and backward.
    """

    arguments: dict[str, Any]
    flops: float
    calls: float = 0.0


@dataclass(frozen=True)
class Computed:
    """Runs that each consist of one call of a function that returns measurements.

    Attributes:
        function: "lab.studies.FILE:NAME", called with a run's arguments; it returns rows such as
            {"quantity": "loss", "value": 2.5, "step": 100}, the step being optional.
        runs: run name (LABEL-seedK) -> call.
    """

    function: str
    runs: dict[str, ComputedCall]


@dataclass(frozen=True)
class Arm:
    """Runs of one study that share a folder, OUT/NAME.

    Attributes:
        compare: the comparison to train; its `out` is set when the study runs.
        computed: the computed runs, in place of `compare`.
        trunk: an arm with the same variants and seeds, from whose runs these branch off before the decay.
        measure: "lab.studies.FILE:NAME", called with each finished run's folder; it returns rows as `Computed`
            does, which are kept in the folder.
        depth: quantities by sublayer at the last step that are also in the table, e.g. output_rms.
        started_from: whether other arms start from its runs; such runs are only reused with their weights.
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
        label: the variant. step, tokens: of the measurement; 0 without training.
        flops: FLOPs so far: 6 for each weight and token, and those of attention and reads; 0 if not counted.
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
    """Results of the noise study for the recipe at a number of steps.

    Attributes:
        sigma, degrees: standard deviation of one run and its degrees of freedom. runs: (label, seed, loss) of the
            standard model and its placebo control.
        remark: a sentence to print wherever it is used, or "".
    """

    sigma: float
    degrees: float
    runs: tuple[tuple[str, int, float], ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Measured:
    """All measurements of a study's finished runs.

    Attributes:
        planned, finished: arm -> names of the runs requested so far, and of the finished ones.
        begun: arms that have a folder; an arm requested once stays requested.
        step_times: (arm, label) -> times of a step in each round of the interleaved timing; for timed arms.
        recipe: arms trained by the preset's recipe, with any steps and variants.
        noises: steps -> noise of the recipe, from the noise study; empty if that was not run.
        curve: steps -> final loss of the recipe's standard model, from the study `exchange`.
        of_other_texts: names of those of these two studies that have no run with this study's tokenizer and held-out
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
        """Return the finite rows of an arm, of one label if one is given, in order of seed and step."""
        rows = [row for row in self.rows if row.arm == arm and row.quantity == quantity and math.isfinite(row.value)]
        return sorted((row for row in rows if label in (None, row.label)), key=lambda row: (row.seed, row.step))

    def labels(self, arm: str) -> list[str]:
        """Return the labels of an arm with finished runs, in the order in which they were requested."""
        return list(dict.fromkeys(row.label for row in self.rows if row.arm == arm))

    def finals(self, arm: str, label: str, quantity: str = "loss") -> dict[int, float]:
        """Return the last value of each seed that did not diverge."""
        return {row.seed: row.value for row in self.of(arm, label, quantity)}

    def mean(self, arm: str, label: str, quantity: str = "loss") -> float:
        """Return the mean over seeds of the last values; NaN without any."""
        values = list(self.finals(arm, label, quantity).values())
        return sum(values) / len(values) if values else math.nan

    def diverged(self, arm: str, label: str, quantity: str | None = None) -> list[int]:
        """Return the seeds for which that quantity, or any, was not finite."""
        rows = (row for row in self.rows if (row.arm, row.label) == (arm, label) and quantity in (None, row.quantity))
        return sorted({row.seed for row in rows if not math.isfinite(row.value)})

    def asked_for(self, arm: str) -> list[str]:
        """Return all requested labels of an arm, finished or not."""
        named = (label_and_seed(name) for name in self.planned.get(arm, []))
        return list(dict.fromkeys(taken[0] for taken in named if taken))

    def at_recipe(self, arm: str, quantity: str) -> bool:
        """Return whether `noises` and `curve` apply to this arm and this quantity."""
        return quantity == "loss" and arm in self.recipe

    def recipe_of(self, arm: str, quantity: str = "loss", floor: float = 0.0) -> Recipe | None:
        """Fit all runs of an arm, together with those of the noise study at the same number of steps if the preset's
        recipe trains the arm; None if nothing has finished. `floor`: lower bound of sigma."""
        labels = self.labels(arm)
        steps = max((self.steps(arm, label) for label in labels), default=0)
        known = self.noises[steps].runs if self.at_recipe(arm, quantity) and steps in self.noises else ()
        runs = [(label, seed, value) for label in labels for seed, value in self.finals(arm, label, quantity).items()]
        own = {(label, seed, round(value, 6)) for label, seed, value in runs}  # a run that is in both counts once
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
    """A table of the page, whose cells are text."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StudyResult:
    """The result of a study.

    Attributes:
        answer: one or a few sentences that claim nothing within the noise.
        values: numbers for other programs, as JSON values.
    """

    answer: str
    tables: Sequence[ResultTable] = ()
    charts: "Sequence[Chart]" = ()
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """The size, text and folder with which a study runs.

    Attributes:
        seeds: runs in a group, unless the study sets a number.
        source: the text; None is the preset's. column: the column that holds it in rows. images: images for the study
            resnet.
        name: the preset's name. out: OUT/PRESET/STUDY is the study's folder.
        allow_different: continue runs that were begun with other arithmetic with this machine's.
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
        """Return the folder of a study with this setting."""
        return self.out / self.name / study

    def config(self, **values: Any) -> TrainConfig:
        """Return the preset's run overridden by nested values."""
        base = from_dict(self.preset.train)
        text = {"source": self.source, "column": self.column}
        changes = {name: value for name, value in text.items() if value is not None}
        data = dataclasses.replace(base.data, **changes)
        base = dataclasses.replace(base, data=data, allow_different=self.allow_different)
        return from_dict(values, base)

    def sized(self, size: dict[str, Any], **values: Any) -> TrainConfig:
        """Return the preset's run with another model size; for another width its learning rates are transferred
        (muP)."""
        width = self.preset.width
        carried = {} if size["hidden_size"] == width else {"optim": {"base_width": width}}
        return self.config(model={"size": size}, **carried, **values)

    def is_recipe(self, run: TrainConfig) -> bool:
        """Return whether a run is the preset's except for its steps."""
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
        """Return an arm of variants, each with every seed; if `timed`, their steps are timed, interleaved, before any
        is trained."""
        which = range(self.seeds) if seeds is None else seeds
        seconds = self.preset.timing_s if timed else 0
        return Arm(name, CompareConfig(list(variants), list(which), base=of, timing_s=seconds), **more)

    def some(self, variants: Sequence[str]) -> list[str]:
        """Return the first variants of a long list, as many as the preset allows."""
        return list(variants)[: self.preset.most]


@dataclass(frozen=True)
class Design:
    """A study.

    Attributes:
        name: name for `python -m lab`. title: the question.
        about: the method. published: published results, with the source.
        arms: returns the arms to run, given the measurements so far; called several times, so it must be deterministic.
        analyse: returns the result, also for a part of the runs.
    """

    name: str
    title: str
    about: str
    published: str
    arms: Callable[[Setting, Measured], list[Arm]]
    analyse: Callable[[Setting, Measured], StudyResult]


def branch_step(config: TrainConfig) -> int:
    """Return the last step before the decay of a run with schedule wsd; raises UserError for another schedule."""
    optim = config.optim
    if optim.schedule != "wsd":
        raise UserError(f"optim.schedule is '{optim.schedule}': only runs with wsd branch off before their decay")
    return config.steps - min(round(optim.decay * config.steps), config.steps - round(optim.warmup * config.steps))
