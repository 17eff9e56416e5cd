"""Final losses of a recipe's runs as docs/data has them, what is asked of them, and the one rule's answers
(`attnres.stats.Recipe`)."""

import csv
import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from attnres.savings import LossCurve
from attnres.stats import QUESTIONS, Effect, Recipe, judged
from attnres.text import label_and_seed

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"

Run = tuple[str, int, float]


def rows(name: str) -> list[dict[str, str]]:
    """The lines of a CSV file of docs/data."""
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def micro() -> list[Run]:
    """The 0.9 M recipe's runs, (mechanism, seed, loss): three studies and reruns on other processors.

    A run that several studies share counts once; one that diverged (muddformer's) has no loss and is left out.
    """
    found = set[Run]()
    for study in ("rivals", "ablations", "noise"):
        for row in rows(f"studies/micro/{study}/runs.csv"):
            if row["arm"] in ("recipe", "control") and row["quantity"] == "loss" and row["step"] == "2000":
                found.add((row["label"], int(row["seed"]), round(float(row["value"]), 5)))
    for row in rows("processors_micro.csv"):
        if row["step"] == "2000":
            found.add((row["variant"], int(row["seed"]), round(float(row["loss"]), 5)))
    return sorted(run for run in found if math.isfinite(run[2]))


Curves = dict[tuple[str, int], dict[float, float]]


def curves(*folders: str) -> Curves:
    """Losses of comparisons by tokens, of each label and seed; by steps where a file has no tokens."""
    found: Curves = {}
    for folder in folders:
        for row in rows(f"{folder}/curves.csv"):
            run = label_and_seed(row["run"]) if "run" in row else (row["label"], int(row["seed"]))
            if run is not None:
                at, loss = (row[name] for name in (("step", "val_loss") if "run" in row else ("tokens", "loss")))
                found.setdefault(run, {})[float(at)] = float(loss)
    return found


def mean_curve(runs: Curves, label: str) -> LossCurve:
    """The mean over a label's seeds, at what all of them have."""
    seeds = [points for (name, _), points in runs.items() if name == label]
    common = set.intersection(*map(set, seeds)) if seeds else set[float]()
    return LossCurve((at, statistics.fmean(points[at] for points in seeds)) for at in common)


def gaps(runs: Curves, label: str) -> dict[float, float]:
    """A label minus standard over training: the mean over seeds that both have, at what all runs have."""
    common = sorted(set.intersection(*map(set, runs.values())))
    seeds = [seed for name, seed in runs if name == label and ("standard", seed) in runs]
    return {at: statistics.fmean(runs[label, one][at] - runs["standard", one][at] for one in seeds) for at in common}


def finals(name: str) -> list[Run]:
    """The last loss of each run of a comparison's curves.csv, runs at another learning rate left out."""
    return [(label, seed, points[max(points)]) for (label, seed), points in curves(name).items() if "-lr" not in label]


Pair = tuple[str, str]
REGIMES = (
    ("block-num_blocks4-gatescalar-gate_init-2", "block-num_blocks4"),
    ("cumulative-num_blocks4-recency_bias5", "block-num_blocks4"),
    ("cumulative-num_blocks4-recency_bias5", "cumulative-num_blocks4"),
    ("block-num_blocks4-train_onlylora-residual_lr0.004", "standard-train_onlylora"),
    ("block-num_blocks4-distill_weight0.5", "standard-distill_weight0.5"),
)
"""What is asked of the fine-tuning regimes besides each one's difference to the plain continuation."""


class Answers(dict[Pair, Effect]):
    """Effects of one recipe, of all that its pages ask: questions written down beforehand at 95 %, all others together
    by Holm. So a comparison has one interval, whatever page shows it."""

    def __init__(self, runs: Sequence[Run], asked: Sequence[Pair]) -> None:
        self.runs, self.recipe = runs, Recipe(runs)
        effects = [self.recipe.effect(*pair) for pair in asked]
        super().__init__(zip(asked, judged(effects, [self._is_planned(pair) for pair in asked]), strict=True))

    def _is_planned(self, pair: Pair) -> bool:
        """Whether a question was written down beforehand, of mechanisms that the recipe has in one setting each."""
        mechanisms = tuple(name.split("-")[0] for name in pair)
        every = [name.split("-")[0] for name in self.recipe.counts]
        return pair in QUESTIONS or (mechanisms in QUESTIONS and all(every.count(name) == 1 for name in mechanisms))

    def counts(self, pair: Pair) -> str:
        """How many runs either has."""
        return " and ".join(str(self.recipe.counts[name]) for name in pair)


def own_base(label: str) -> str:
    """What a mechanism of the 0.9 M recipe is compared with: a setting of Block or Full with that."""
    base = label.split("-")[0]
    return base if label != base and base in ("block", "full") else "standard"


def without_copiers() -> Effect:
    """Full minus static mix without the run that has learnt to copy: no question written down beforehand."""
    return Recipe(run for run in micro() if run[:2] != ("static_mix", 2)).effect("full", "static_mix")


@cache
def of_micro() -> Answers:
    """The answers of the 0.9 M recipe: one comparison a mechanism, the five questions, and sigmoid weights beside the
    standard model, of which the paper has a figure."""
    runs = micro()
    names = dict.fromkeys(name for name, *_ in runs if name != "standard")
    pairs = [*QUESTIONS, *((name, own_base(name)) for name in names), ("full-weightssigmoid", "standard")]
    return Answers(runs, list(dict.fromkeys(pairs)))


@cache
def of_folders(*folders: str) -> Answers:
    """The answers of comparisons of one recipe: each variant beside the standard model, and what else is asked."""
    runs = [run for folder in folders for run in last_losses(folder)]
    names = dict.fromkeys(name for name, *_ in runs if name != "standard")
    asked: list[Pair] = [(name, "standard") for name in names]
    return Answers(runs, [*asked, *REGIMES] if "finetune_regimes_seeds" in folders else asked)


def last_losses(folder: str) -> list[Run]:
    """The last loss of each run of a comparison, as its runs.json has it, or its curves.csv."""
    path = DATA / folder / "runs.json"
    named = json.loads(path.read_text("utf-8")).get("runs", {}) if path.is_file() else {}
    ends = {label_and_seed(name): one["val_loss"] for name, one in named.items()}
    return [(*name, loss) for name, loss in ends.items() if name is not None] or finals(folder)


def by_length() -> LossCurve:
    """The standard model's loss at 0.9 M parameters after runs of several lengths, each with its own schedule: what a
    lower loss is worth in tokens."""
    ends = [row for row in rows("studies/micro/exchange/runs.csv") if row["quantity"] == "loss"]
    last = {row["arm"]: (float(row["tokens"]), float(row["value"])) for row in ends}
    return LossCurve(last.values())


def tokens_saved(effect: Effect, base: float, curve: LossCurve) -> tuple[float, float, float]:
    """How many times fewer tokens a difference to a loss of `base` is worth on a curve by length, with the ends of its
    interval, the smaller first."""
    at = curve.tokens(base).tokens
    low, middle, high = (curve.tokens(base + d).tokens / at for d in (effect.high, effect.difference, effect.low))
    return middle, low, high
