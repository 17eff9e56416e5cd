"""Tune several mechanisms: all seeds at the recipe's learning rates, one seed at others, all seeds at the best of
each."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres.comparison.plan import label_of, parse_variant
from attnres.residuals import make_residual
from attnres.text import listed, number
from attnres.training.config import READ_RATE
from lab.analyses import at_best
from lab.contrast import Contrast, contrast, noise_note
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult

RECIPE, COARSE, BEST = "recipe", "coarse", "best"
WAYS = ("recipe's", "half", "twice", "own parameters at the other rate")
"""Names, in tables, of the ways that `candidates` tries."""
FLATTERED = 1.0
"""Standard deviations by which the best of three (0.85) or four (1.03) equal draws is better than their mean."""


def candidates(setting: Setting, variant: str) -> list[str]:
    """Return the ways to train a mechanism: at 1x, 0.5x and 2x the recipe's learning rates and, if it has parameters,
    with those at 1x or 0.1x AdamW's learning rate, whichever is not its default."""
    lr, parsed = setting.config().optim.lr, parse_variant(variant)
    # In four sublayers of width 16: whether there are parameters does not depend on settings that need more.
    sizes = ("num_blocks", "block_size", "heads", "window")
    settings = {name: value for name, value in parsed.settings.items() if name not in sizes}
    residual = make_residual(parsed.residual, 4, 16, **settings)
    ways = [variant, f"{variant}@lr={lr / 2:g}", f"{variant}@lr={2 * lr:g}"]
    other = lr if residual.slow else READ_RATE * lr
    return [*ways, f"{variant}@residual_lr={other:g}"] if list(residual.parameters()) else ways


def tuned_study(
    name: str, question: str, about: str, source: str, published: Mapping[str, str], title: str, best_title: str
) -> Design:
    """Return a study of variants: all at the recipe's learning rates with all seeds, then at other rates with one seed,
    then each at its best rates with all seeds. Runs requested twice are made once.

    Args:
        published: variant -> published result, "" for none.
        title, best_title: titles of the tables at the recipe's learning rates and at the best ones.
    """

    def arms(setting: Setting, measured: Measured) -> list[Arm]:
        variants, config = setting.some(list(published)), setting.config(steps=setting.preset.many)
        recipe = setting.arm(RECIPE, variants, of=config, timed=True)
        if not measured.complete(RECIPE) and COARSE not in measured.begun:
            return [recipe]
        # All ways of one mechanism before the next mechanism's, best first, so that an interrupted study can be
        # compared.
        ways = [way for variant in _by_loss(measured, variants) for way in candidates(setting, variant)]
        coarse = setting.arm(COARSE, ways, [0], of=config)
        best = chosen_rates(setting, measured, variants)
        if "standard" not in best:
            return [recipe, coarse]
        return [recipe, coarse, setting.arm(BEST, list(best.values()), of=config)]

    def analyse(setting: Setting, measured: Measured) -> StudyResult:
        variants = setting.some(list(published))
        if "standard" not in measured.labels(RECIPE):
            return StudyResult("Too few runs have finished.")
        plain = _held_beside(measured, RECIPE, {variant: variant for variant in variants}, title, published)
        plain.tables[0].notes.append(
            "Queries of depth reads and gains of their keys train at 0.1x AdamW's learning rate (chosen for Block), "
            "all other parameters of a mechanism at 1x."
        )
        best = chosen_rates(setting, measured, variants)
        values, sentence = {RECIPE: plain.values, "rates": best}, f"At the recipe's rates: {plain.answer}"
        ended = [one for one in variants if _all_finished(measured, candidates(setting, one))]
        searched = [_search_table(setting, measured, ended)] if best else []
        judged = {variant: way for variant, way in best.items() if _is_judged(setting, measured, way)}
        if "standard" not in judged:
            plain.tables[0].notes.append("No mechanism has been given a rate of its own with all seeds yet.")
            return StudyResult(sentence, [*plain.tables, *searched], [plain.contrasts[0].chart(name, title)], values)
        at_best_rates = _held_beside(
            timed_at_best(measured, judged), BEST, judged, best_title, published, plain.comparisons
        )
        finals = [measured.finals(BEST, label_of(way)) for way in judged.values()]
        fewest = min((len(seeds) for seeds in finals if seeds), default=1)
        at_best_rates.tables[0].notes.append(
            "Each mechanism is at its best rate with seed 0, which counts here too. Where rates are equally good "
            f"this flatters it, the standard model too, by about {FLATTERED / fewest:.1f} sigma. A mechanism with "
            "parameters of its own had four rates, the others three."
        )
        if waiting := [label_of(way) for variant, way in best.items() if variant not in judged]:
            at_best_rates.tables[0].notes.append(f"Not compared before a second seed has finished: {listed(waiting)}.")
        if edge := [label_of(chosen) for chosen in judged.values() if "@lr=" in chosen]:
            at_best_rates.tables[0].notes.append(
                f"Best at an end of the rates that were tried, and maybe better beyond: {listed(edge)}."
            )
        lost = [variant for variant in ended if variant not in best]
        sentence = f"At their own best rates: {at_best_rates.answer} {sentence}"
        sentence += f" Diverged at every rate: {listed(lost)}." if lost else ""
        chart = at_best_rates.contrasts[0].chart(name, best_title)
        return StudyResult(
            sentence, [*at_best_rates.tables, *searched, *plain.tables], [chart], values | {BEST: at_best_rates.values}
        )

    return Design(name, question, about, source, arms, analyse)


@dataclass(frozen=True)
class _Beside:
    """All variants of an arm compared with the standard model, and those with settings compared with the same mechanism
    without.

    Attributes:
        comparisons: planned number of comparisons.
    """

    contrasts: list[Contrast]
    tables: list[ResultTable]
    comparisons: int

    @property
    def answer(self) -> str:
        return " ".join(one.sentence() for one in self.contrasts)

    @property
    def values(self) -> dict[str, Any]:
        return {one.baseline: one.values() for one in self.contrasts}


def _held_beside(
    measured: Measured,
    arm: str,
    ways: Mapping[str, str],
    title: str,
    published: Mapping[str, str],
    comparisons: int = 0,
) -> _Beside:
    """Return the contrasts, the standard model's first, and their tables.

    Args:
        ways: how each variant was trained in this arm.
        comparisons: planned number of comparisons; 0 if all variants are among `ways`.
    """
    groups = {"standard": [variant for variant in ways if variant != "standard"]}
    for variant in ways:
        if (base := parse_variant(variant).residual) != variant and base in ways:
            groups.setdefault(base, []).append(variant)
    comparisons = comparisons or sum(map(len, groups.values()))
    texts = {label_of(way): published[variant] for variant, way in ways.items()}
    contrasts, tables = [], []
    for base, members in groups.items():
        labels = [label_of(ways[variant]) for variant in members]
        gaps = {label_of(ways[one]): _published_gap(published[one], published[base]) for one in members}
        effects = {label: gap for label, gap in gaps.items() if gap is not None}
        one = contrast(measured, arm, label_of(ways[base]), labels, comparisons=comparisons, published=effects)
        if one.others or base == "standard":
            contrasts.append(one)
            tables.append(one.table(title if base == "standard" else f"{title}, beside {base}", texts))
    return _Beside(contrasts, tables, comparisons)


def _published_gap(one: str, base: str) -> float | None:
    """Return the difference of two published losses, parsed from the beginnings of texts; None if one has none."""
    if both := re.match(r"(\d+\.\d+) where standard has (\d+\.\d+)", one):
        return round(float(both[1]) - float(both[2]), 6)
    losses = [re.match(r"\d+\.\d+", text) for text in (one, base)]
    return round(float(losses[0][0]) - float(losses[1][0]), 6) if losses[0] and losses[1] else None


def _by_loss(measured: Measured, variants: Sequence[str]) -> list[str]:
    """Return the standard model, then the others by loss at the recipe's learning rates, lowest first, unknown ones
    last."""
    losses = {variant: measured.mean(RECIPE, label_of(variant)) for variant in variants}
    return sorted(variants, key=lambda one: (one != "standard", math.isnan(losses[one]), losses[one]))


def timed_at_best(measured: Measured, best: Mapping[str, str]) -> Measured:
    """Return the measurements with the step times at the recipe's learning rates used for the best ones too, since a
    learning rate does not change step times."""
    times = {
        (BEST, label_of(way)): measured.step_times[RECIPE, label_of(variant)]
        for variant, way in best.items()
        if (RECIPE, label_of(variant)) in measured.step_times
    }
    return dataclasses.replace(measured, step_times=measured.step_times | times)


def _search_table(setting: Setting, measured: Measured, variants: Sequence[str]) -> ResultTable:
    """Return the losses of each way to train, for mechanisms of which all ways have finished at the coarse seed."""
    rows = []
    for variant in _by_loss(measured, variants):
        ways = candidates(setting, variant)
        losses = [measured.mean(COARSE, label_of(way)) for way in ways]
        cells = ["diverged" if math.isnan(loss) else number(loss, 4) for loss in losses]
        lowest = min((loss for loss in losses if not math.isnan(loss)), default=math.nan)
        gain = number(lowest - losses[0], 4, signed=True)  # unknown if the run at the recipe's rates diverged
        rows.append([label_of(variant), *cells, *[""] * (len(WAYS) - len(ways)), gain])
    notes = [
        f"One seed each. {WAYS[-1].capitalize()}: at 1x or 0.1x AdamW's learning rate, whichever is not the recipe's."
    ]
    return ResultTable(
        "Losses by rate, seed 0",
        ["variant", *WAYS, "best minus recipe's"],
        rows,
        [*notes, noise_note(measured.recipe_of(RECIPE))],
    )


def chosen_rates(setting: Setting, measured: Measured, variants: Sequence[str]) -> dict[str, str]:
    """Return variant -> its candidate with the lowest loss at the coarse seed; variants with an unfinished candidate
    are left out."""
    ways = {variant: candidates(setting, variant) for variant in variants}
    mechanism = {one: v for v, those in ways.items() if _all_finished(measured, those) for one in those}
    losses = {one: measured.mean(COARSE, label_of(one)) for one in mechanism}
    return at_best(losses, mechanism)


def _is_judged(setting: Setting, measured: Measured, way: str) -> bool:
    """Return whether runs other than that of the selecting seed have been trained at the chosen rate, diverged or not,
    if any are requested."""
    label = label_of(way)
    return len({*measured.finals(BEST, label), *measured.diverged(BEST, label)}) >= min(2, setting.seeds)


def _all_finished(measured: Measured, ways: Sequence[str]) -> bool:
    """Return whether each way to train a mechanism has finished at the coarse seed, diverged or not."""
    return {label_of(way) for way in ways} <= set(measured.labels(COARSE))
