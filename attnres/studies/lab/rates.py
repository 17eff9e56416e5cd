"""Which learning rates: the residual's own parameters', the standard model's; what else keeps reads from settling."""

import math
from collections.abc import Mapping

from attnres.figures.chart import Curves, Line
from attnres.figures.plot import DIFFERENCE, LOSS, TOKENS
from attnres.studies.analyses.halving import beyond, survivors
from attnres.studies.contrast import contrast
from attnres.studies.design import Arm, Design, Measured, Result, Setting, Table
from attnres.studies.presets import shape
from attnres.studies.variants import label_of
from attnres.text import number
from attnres.training.config import READ_RATE, TrainConfig

OWN = (READ_RATE, 1.0, 1 / 30, 1 / 3, 0.01)
"""Of AdamW's rate, for the residual's own parameters, the default first; recipes/lasting_rates.yaml has the same."""
MODEL = (0.5, 2.0)
"""Of the recipe's rates, for the standard model, beside the recipe's own."""
MOST = 16.0
"""The highest rate of the standard model that is tried, in multiples of the recipe's; the lowest is one over it."""


def _own(setting: Setting, factor: float) -> str:
    """Block with its own parameters at this multiple of AdamW's rate."""
    if factor == READ_RATE:
        return "block"
    rate = setting.config().optim.lr * factor
    digits = float(f"{rate:.3g}")
    return f"block@residual_lr={digits:g}"


def _at(setting: Setting, factor: float, residual: str = "standard") -> str:
    """A residual with all rates at this multiple of the recipe's."""
    return residual if factor == 1 else f"{residual}@lr={setting.config().optim.lr * factor:g}"


def _also(variant: str, change: str) -> str:
    """A variant that is trained in one more way of its own."""
    return f"{variant}{',' if '@' in variant else '@'}{change}"


def _best(setting: Setting, measured: Measured) -> list[str]:
    """Block at the two of its own rates with the lowest losses at the coarse seed, the better one first."""
    variants = setting.some([_own(setting, factor) for factor in OWN])
    return survivors({one: measured.mean("own", label_of(one)) for one in variants}, 2) or variants[:1]


def _search(
    setting: Setting, measured: Measured, name: str, of: TrainConfig, base: str
) -> tuple[list[Arm], dict[float, float]]:
    """The standard model at one seed, up or down from the recipe's rates until its loss turns: the arms `name`,
    `name`-xFACTOR asked for so far (the arm `base` has it at the recipe's), and the loss by multiple of those rates,
    empty until the search has ended."""
    ways = [_at(setting, factor) for factor in MODEL]
    parts = [setting.arm(name, ["standard", *ways] if base == name else ways, [0], of=of)]
    if not (measured.complete(name) and measured.complete(base)):
        return parts, {}
    losses = {1.0: measured.mean(base, "standard")}
    losses |= {factor: measured.mean(name, label_of(_at(setting, factor))) for factor in MODEL}
    while (further := beyond(losses, 2.0, MOST)) is not None:
        one = setting.arm(f"{name}-x{further:g}", [_at(setting, further)], [0], of=of)
        parts.append(one)
        if not measured.complete(one.name):
            return parts, {}
        losses[further] = measured.mean(one.name, label_of(_at(setting, further)))
    return parts, losses


def _turn(losses: Mapping[float, float]) -> float:
    """The multiple of the recipe's rates with the lowest loss; 1 where all diverged."""
    return min((rate for rate, loss in losses.items() if math.isfinite(loss)), key=losses.__getitem__, default=1.0)


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Coarse at one seed; the standard model up or down until it turns, with either optimizer; then the best with all
    seeds, both residuals at the standard model's best rate, and what is near."""
    recipe = setting.config()
    adamw = setting.config(optim={"optimizer": "adamw"})
    variants = setting.some([_own(setting, factor) for factor in OWN])
    coarse = setting.arm("own", ["standard", *variants], [0], of=recipe, depth=("sharpness", "entropy"))
    searched, losses = _search(setting, measured, "model", recipe, "own")
    searched_adamw, losses_adamw = _search(setting, measured, "adamw", adamw, "adamw")
    parts = [coarse, *searched, *searched_adamw]
    if losses_adamw:
        factor = _turn(losses_adamw)
        parts.append(setting.arm("tuned-adamw", [_at(setting, factor), _at(setting, factor, "block")], of=adamw))
    if not (measured.complete("own") and losses):
        return parts
    best = _best(setting, measured)
    rate = best[0].removeprefix("block")
    whole = f"full@residual_lr={recipe.optim.lr:g}"
    layers = setting.preset.depth
    if (factor := _turn(losses)) != 1:
        parts.append(setting.arm("tuned", [_at(setting, factor), _at(setting, factor, "block")], of=recipe))
    parts += [
        setting.arm("best", ["standard", *best], of=recipe),
        setting.arm("full", list(dict.fromkeys([f"full{rate}", whole])), range(min(2, setting.seeds)), of=recipe),
        setting.arm(
            "knobs",
            setting.some(
                [
                    best[0],
                    *(_also(best[0], f"residual_{knob}") for knob in ("warmup=0.05", "hold=0.05", "decay=0.01")),
                    f"block:read_temperature=4{rate}",
                ]
            ),
            [0],
            of=recipe,
        ),
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


def analyse(setting: Setting, measured: Measured) -> Result:
    """The loss by rate, the gap of the best over training, and what the rest changes."""
    optim = setting.config().optim
    loss_by_factor = {f: measured.mean("own", label_of(_own(setting, f))) for f in sorted(OWN)}
    loss_by_factor = {factor: loss for factor, loss in loss_by_factor.items() if math.isfinite(loss)}
    model, adamw = _searched(measured, "model", optim.lr, "own"), _searched(measured, "adamw", optim.lr, "adamw")
    rows = [[f"{f:.3g}", number(loss, 4), "block, own parameters"] for f, loss in loss_by_factor.items()]
    rows += [[f"{f:.3g}", number(loss, 4), "standard, all"] for f, loss in model.items()]
    rows += [[f"{f:.3g}", number(loss, 4), "standard, all, AdamW alone"] for f, loss in adamw.items()]
    head = ["multiple of the recipe's rate", "loss", "which"]
    tables = [Table("Loss by rate, seed 0", head, rows, [measured.noise("own").note])]
    values: dict = {"own": {f"{f:.4g}": loss for f, loss in loss_by_factor.items()}}
    values["model"] = {f"{f:.4g}": loss for f, loss in model.items()}
    values["adamw"] = {f"{f:.4g}": loss for f, loss in adamw.items()}
    charts = []
    if loss_by_factor and model:
        lines = [Line("block, own parameters", list(loss_by_factor), list(loss_by_factor.values()))]
        lines.append(Line("standard, all parameters", list(model), list(model.values())))
        if adamw:
            lines.append(Line("standard, AdamW alone", list(adamw), list(adamw.values())))
        caption = "Held-out loss at the end by the rate as a multiple of the recipe's, one seed."
        panels = {"": lines}
        charts.append(
            Curves("rates", "Loss by rate", caption, "multiple of the recipe's rate", LOSS, panels, log_x=True)
        )
    over = _over_training(setting, measured)
    charts += [over] if over else []
    sentences = []
    if loss_by_factor:
        best = min(loss_by_factor, key=loss_by_factor.__getitem__)
        values["best_own"] = best
        sentences.append(f"Of the own rates {best:.3g} times AdamW's is best at one seed.")
    for losses, which, key in ((model, "The standard model", "model"), (adamw, "With AdamW alone it", "adamw")):
        if losses:
            best = min(losses, key=losses.__getitem__)
            turned = min(losses) < best < max(losses)
            end = "highest" if best == max(losses) else "lowest"
            where = "and higher and lower ones are worse" if turned else f"the {end} that was tried: it has not turned"
            sentences.append(f"{which} is best at {best:g} times the recipe's rate, {where}.")
            values[f"best_{key}"], values[f"turned_{key}"] = best, turned
    titles = {
        "tuned": ("Both at the best rate of the standard model", _tuned_baseline(measured, "tuned")),
        "tuned-adamw": ("The same with AdamW alone", _tuned_baseline(measured, "tuned-adamw")),
        "best": ("The best rates with all seeds", "standard"),
        "knobs": ("What else holds queries back", label_of(_best(setting, measured)[0])),
    }
    for arm, (title, baseline) in titles.items():
        if measured.labels(arm):
            one = contrast(measured, arm, baseline, comparisons=len(OWN) if arm == "best" else 0)
            table = one.table(title)
            if arm == "best":
                table.notes.append(
                    f"The best two of {len(OWN)} own rates by seed 0, which counts here too: where they are level that "
                    "flatters them. The standard model is at the recipe's rate."
                )
            tables.append(table)
            values[arm] = one.values()
            if arm != "knobs":
                sentences.append(("With AdamW alone: " if arm == "tuned-adamw" else "") + one.sentence())
    others = [arm for arm in measured.planned if arm.startswith("layers") or arm == "full"]
    lines_of = []
    for arm in others:
        for label in measured.labels(arm):
            seeds = len(measured.finals(arm, label))
            lines_of.append([arm, label, number(measured.mean(arm, label), 4), str(seeds)])
    if lines_of:
        notes = [f"Of {arm}. {measured.noise(arm).note}" for arm in others if measured.labels(arm)]
        tables.append(Table("Depth, Full", ["arm", "variant", "loss", "seeds"], lines_of, notes))
    return Result(" ".join(sentences) or "Nothing has finished yet.", tables, charts, values)


def _searched(measured: Measured, name: str, lr: float, base: str) -> dict[float, float]:
    """The standard model's loss by multiple of the recipe's rate `lr`, lowest rate first, in the arms of a search."""
    labels = sorted({(row.arm, row.label) for row in measured.rows if row.quantity == "loss"})
    losses = {
        float(label.rpartition("lr")[2]) / lr: measured.mean(arm, label)
        for arm, label in labels
        if (arm == name or arm.startswith(f"{name}-x")) and label != "standard"
    }
    losses[1.0] = measured.mean(base, "standard")
    return {factor: loss for factor, loss in sorted(losses.items()) if math.isfinite(loss)}


def _tuned_baseline(measured: Measured, arm: str) -> str:
    """The standard model at the rate at which both are."""
    return next((label for label in measured.asked_for(arm) if label.startswith("standard")), "standard")


def _over_training(setting: Setting, measured: Measured) -> Curves | None:
    """The gap of each own rate to the standard model of the same seed over training, in the band of the noise."""
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
    "turns, both at that one's best, the best with all seeds; the same with AdamW alone; warm-up, hold, decay and "
    "temperature of the queries; deeper models. "
    "--adopt takes the runs of recipes/lasting_rates.yaml and of docs/data/lasting_runs.",
    "Nobody has published a rate of the queries' own; the paper gives one rate a size, open-attention-residuals decays "
    "queries with the weights.",
    arms,
    analyse,
)
