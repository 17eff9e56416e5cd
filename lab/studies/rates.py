"""Learning rates of the residual's parameters and of the standard model, and other changes that keep reads from
settling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attnres.comparison.plan import label_of
from attnres.figures.plot import DIFFERENCE, LOSS, TOKENS
from attnres.stats import Effect, Recipe
from attnres.text import number
from attnres.training.config import READ_RATE
from lab.analyses import beyond, survivors
from lab.charts import Curves, Line
from lab.contrast import contrast, noise_note
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult
from lab.presets import shape

MODEL = (0.5, 2.0)
"""Learning rates of the standard model, relative to the recipe's, that are tried besides the recipe's."""
MOST = 16.0
"""Highest learning rate that is tried for the standard model, relative to the recipe's; the lowest is one over it."""


@dataclass(frozen=True)
class Kind:
    """A search for the standard model's learning rate.

    Attributes:
        base: the arm with the recipe's learning rates. judged: the arm whose noise applies to its losses.
        subject: beginning of a sentence about it. optim: differences from the recipe.
    """

    base: str
    judged: str
    subject: str
    optim: Mapping[str, str]


SEARCHES = {
    "model": Kind("own", "own", "The standard model", {}),
    "adamw": Kind("adamw", "tuned-adamw", "With AdamW alone it", {"optimizer": "adamw"}),
}
"""Searches by the name of their first arm."""


@dataclass(frozen=True)
class RateSearch:
    """The standard model at one seed, at learning rates up or down from the recipe's until its loss rises.

    Attributes:
        arms: arms requested so far.
        losses: multiple of the recipe's learning rates -> loss; NaN for a run that diverged or has not finished.
        ended: whether the search is complete.
    """

    arms: list[Arm]
    losses: dict[float, float]
    ended: bool

    @property
    def finite(self) -> dict[float, float]:
        """Return the known losses, lowest learning rate first."""
        return {factor: loss for factor, loss in sorted(self.losses.items()) if math.isfinite(loss)}

    @property
    def best(self) -> float:
        """Return the multiple with the lowest loss; 1 if none is known."""
        return min(self.finite, key=self.losses.__getitem__, default=1.0)

    @property
    def turned(self) -> bool:
        """Return whether learning rates on both sides of the best were tried."""
        return min(self.losses) < self.best < max(self.losses)

    def where(self, recipe: Recipe | None) -> str:
        """Return how well the best learning rate is known, judged by its neighbours; one that diverged counts as
        worse."""
        if not self.turned:
            return f"the {'highest' if self.best == max(self.losses) else 'lowest'} that was tried: it has not turned"
        rates = sorted(self.losses)
        place = rates.index(self.best)
        gaps = [self.losses[rate] - self.losses[self.best] for rate in (rates[place - 1], rates[place + 1])]
        sigma, degrees = (math.nan, 0) if recipe is None else (recipe.sigma, recipe.degrees)
        effects = [Effect(gap, sigma * math.sqrt(2), degrees) for gap in gaps if math.isfinite(gap)]
        if all(one.excludes() for one in effects):
            return "and the intervals of a lower and a higher one exclude 0"
        return "and the interval of a lower or a higher one includes 0"


def at_rate(setting: Setting, factor: float, residual: str = "standard") -> str:
    """Return a residual's variant with all learning rates at this multiple of the recipe's."""
    return residual if factor == 1 else f"{residual}@lr={setting.config().optim.lr * factor:g}"


def searched(setting: Setting, measured: Measured, name: str) -> RateSearch:
    """Return a search so far, in the arms `name`, `name`-xFACTOR."""
    kind = SEARCHES[name]
    of, ways = setting.config(optim=kind.optim), [at_rate(setting, factor) for factor in MODEL]
    parts = [setting.arm(name, ["standard", *ways] if kind.base == name else ways, [0], of=of)]
    losses = {1.0: measured.mean(kind.base, "standard")}
    losses |= {factor: measured.mean(name, label_of(at_rate(setting, factor))) for factor in MODEL}
    if not (measured.complete(name) and measured.complete(kind.base)):
        return RateSearch(parts, losses, ended=False)
    while (further := beyond(losses, 2.0, MOST)) is not None:
        arm = setting.arm(f"{name}-x{further:g}", [at_rate(setting, further)], [0], of=of)
        parts.append(arm)
        losses[further] = measured.mean(arm.name, label_of(at_rate(setting, further)))
        if not measured.complete(arm.name):
            return RateSearch(parts, losses, ended=False)
    return RateSearch(parts, losses, ended=True)


# ------------------------------------------------------------------ study


OWN = (READ_RATE, 1.0, 1 / 30, 1 / 3, 0.01)
"""Learning rates of the residual's parameters relative to AdamW's, the default first; recipes/lasting_rates.yaml has
the same."""


def _own(setting: Setting, factor: float) -> str:
    """Return Block with its parameters at this multiple of AdamW's learning rate."""
    if factor == READ_RATE:
        return "block"
    rate = setting.config().optim.lr * factor
    digits = float(f"{rate:.3g}")
    return f"block@residual_lr={digits:g}"


def _best(setting: Setting, measured: Measured) -> list[str]:
    """Return Block at the two of these learning rates with the lowest losses at the coarse seed, the better one
    first."""
    variants = setting.some([_own(setting, factor) for factor in OWN])
    return survivors({one: measured.mean("own", label_of(one)) for one in variants}, 2) or variants[:1]


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request a coarse search at one seed; the standard model up or down until its loss rises, with either optimizer;
    both residuals at its best learning rate; and the best learning rates of the residual, and their neighbours, with
    all seeds."""
    recipe = setting.config()
    variants = setting.some([_own(setting, factor) for factor in OWN])
    coarse = setting.arm("own", ["standard", *variants], [0], of=recipe, depth=("sharpness", "entropy"))
    muon, adamw = searched(setting, measured, "model"), searched(setting, measured, "adamw")
    parts = [coarse, *muon.arms, *adamw.arms]
    if adamw.ended:
        tuned = [at_rate(setting, adamw.best, residual) for residual in ("standard", "block", "full")]
        parts.append(setting.arm("tuned-adamw", tuned, of=setting.config(optim=SEARCHES["adamw"].optim)))
    if muon.ended and muon.best != 1:
        tuned = [at_rate(setting, muon.best, residual) for residual in ("standard", "block")]
        parts.append(setting.arm("tuned", tuned, of=recipe))
    if not measured.complete("own"):
        return parts
    best = _best(setting, measured)
    rate = best[0].removeprefix("block")
    whole = f"full@residual_lr={recipe.optim.lr:g}"
    layers = setting.preset.depth
    decayed = f"{best[0]}{',' if '@' in best[0] else '@'}residual_decay=0.01"
    knobs = [best[0], decayed, f"block:read_temperature=4{rate}"]
    parts += [
        setting.arm("best", ["standard", *best], of=recipe),
        setting.arm("full", list(dict.fromkeys([f"full{rate}", whole])), range(min(2, setting.seeds)), of=recipe),
        setting.arm("knobs", setting.some(knobs), [0], of=recipe),
        *(
            setting.arm(
                f"layers{depth}",
                ["standard", best[0]],
                range(min(2, setting.seeds)),
                of=setting.config(model={"size": shape(depth, setting.preset.layer_parameters)}),
            )
            for depth in (2 * layers, 4 * layers)
        ),
    ]
    return parts


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report the loss by learning rate, the best gap over training, and the effect of the other changes."""
    own_losses = {factor: measured.mean("own", label_of(_own(setting, factor))) for factor in sorted(OWN)}
    own_losses = {factor: loss for factor, loss in own_losses.items() if math.isfinite(loss)}
    searches = {name: searched(setting, measured, name) for name in SEARCHES}
    losses = {"own": own_losses} | {name: search.finite for name, search in searches.items()}
    values: dict = {name: {f"{factor:.4g}": loss for factor, loss in those.items()} for name, those in losses.items()}
    sentences = []
    if own_losses:
        values["best_own"] = min(own_losses, key=own_losses.__getitem__)
        sentences.append(f"Of the own rates {values['best_own']:.3g} times AdamW's is best at one seed.")
    for name, search in searches.items():
        if search.ended and search.finite:
            values[f"best_{name}"], values[f"turned_{name}"] = search.best, search.turned
            kind = SEARCHES[name]
            where = search.where(measured.recipe_of(kind.judged))
            sentences.append(f"{kind.subject} is best at {search.best:g} times the recipe's rate at one seed, {where}.")
    tables = [_loss_table(measured, losses)]
    for arm, (title, baseline) in {
        "tuned": ("Both at the best rate of the standard model", _tuned_baseline(measured, "tuned")),
        "tuned-adamw": (
            "With AdamW alone, all at the best rate of the standard model",
            _tuned_baseline(measured, "tuned-adamw"),
        ),
        "best": ("The best rates with all seeds", "standard"),
        "knobs": ("What else holds queries back", label_of(_best(setting, measured)[0])),
    }.items():
        if measured.labels(arm):
            contrasts = contrast(measured, arm, baseline, comparisons=len(OWN) if arm == "best" else 0)
            tables.append(contrasts.table(title))
            values[arm] = contrasts.values()
            if arm == "best":
                tables[-1].notes.append(
                    f"Of {len(OWN)} own rates the two that were best with seed 0, which counts here too: where rates "
                    "are equally good this flatters them. The standard model is at the recipe's rate."
                )
            if arm.startswith("tuned"):
                tables[-1].notes.append(
                    "The rate is the one at which the standard model was best with seed 0, which counts here too: this "
                    "flatters the standard model."
                )
            if arm != "knobs":
                sentences.append(("With AdamW alone: " if arm == "tuned-adamw" else "") + contrasts.sentence())
    tables += _other_losses(measured)
    charts = [chart for chart in (_by_rate(losses), _over_training(setting, measured)) if chart]
    return StudyResult(" ".join(sentences) or "Nothing has finished yet.", tables, charts, values)


def _loss_table(measured: Measured, losses: Mapping[str, Mapping[float, float]]) -> ResultTable:
    """Return the losses at each multiple of a learning rate: of Block's parameters', and of the standard model's."""
    which = {"own": "block, own parameters", "model": "standard, all", "adamw": "standard, AdamW alone"}
    rows = [
        [f"{factor:.3g}", number(loss, 4), which[name]]
        for name, those in losses.items()
        for factor, loss in those.items()
    ]
    head = ["multiple of the recipe's rate", "loss", "which"]
    notes = [noise_note(measured.recipe_of("own"))]
    if losses["adamw"]:
        notes.append(f"With AdamW alone: {noise_note(measured.recipe_of(SEARCHES['adamw'].judged))}")
    return ResultTable("Loss by rate, seed 0", head, rows, notes)


def _other_losses(measured: Measured) -> list[ResultTable]:
    """Return a table of the arms without a baseline, if any has finished."""
    arms = [arm for arm in measured.planned if (arm.startswith("layers") or arm == "full") and measured.labels(arm)]
    rows = [
        [arm, label, number(measured.mean(arm, label), 4), str(len(measured.finals(arm, label)))]
        for arm in arms
        for label in measured.labels(arm)
    ]
    notes = [f"Of {arm}. {noise_note(measured.recipe_of(arm))}" for arm in arms]
    return [ResultTable("Depth, Full", ["arm", "variant", "loss", "seeds"], rows, notes)] if rows else []


def _by_rate(losses: Mapping[str, Mapping[float, float]]) -> Curves | None:
    """Return a chart of the final loss by learning rate."""
    if not (losses["own"] and losses["model"]):
        return None
    which = {"own": "block, own parameters", "model": "standard, all parameters", "adamw": "standard, AdamW alone"}
    lines = [Line(which[name], list(those), list(those.values())) for name, those in losses.items() if those]
    caption = "Held-out loss at the end by the rate as a multiple of the recipe's, one seed."
    return Curves("rates", "Loss by rate", caption, "multiple of the recipe's rate", LOSS, {"": lines}, log_x=True)


def _tuned_baseline(measured: Measured, arm: str) -> str:
    """Return the variant of the standard model at the learning rate common to both."""
    return next((label for label in measured.asked_for(arm) if label.startswith("standard")), "standard")


def _over_training(setting: Setting, measured: Measured) -> Curves | None:
    """Return a chart over training of the gap of each of Block's learning rates to the standard model of the same
    seed."""
    base = {row.step: row.value for row in measured.of("own", "standard")}
    lines = []
    for factor in sorted(OWN):
        label = label_of(_own(setting, factor))
        points = [(row.tokens, row.value - base[row.step]) for row in measured.of("own", label) if row.step in base]
        if points:
            lines.append(Line.through(f"{factor:.3g}", points))
    if not lines:
        return None
    caption = "Block minus standard, seed 0, by the own parameters' rate as a multiple of AdamW's."
    return Curves("rates-gap", "The gap over training", caption, TOKENS, DIFFERENCE, {"": lines}, zero=True)


STUDY = Design(
    "rates",
    "Which learning rates make an advantage that lasts?",
    "Block with its queries and gains at 1 to 1/100 of the rate, the standard model at rates up or down until it "
    "turns, both at that one's best, the best with all seeds; the same with AdamW alone; decay and temperature "
    "of the queries; deeper models. "
    "--adopt takes the runs of recipes/lasting_rates.yaml and of docs/data/lasting_runs.",
    "Nobody has published a rate of the queries' own; the paper gives one rate a size, open-attention-residuals decays "
    "queries with the weights.",
    arms,
    analyse,
)
