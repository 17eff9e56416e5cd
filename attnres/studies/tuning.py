"""Several mechanisms, each at its own best rate: all candidates at one seed, then the best of each with all seeds."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from attnres.residuals import make_residual
from attnres.studies.analyses.halving import at_best
from attnres.studies.contrast import contrast
from attnres.studies.design import Arm, Design, Measured, Result, Setting
from attnres.studies.variants import parse_variant
from attnres.text import listed
from attnres.training.config import READ_RATE
from attnres.training.optim import QUERY

COARSE, BEST = "coarse", "best"
CHOSEN = (
    "Each mechanism is at the best of its rates by seed 0, which counts here too: where they are level that flatters "
    "it, the standard model as well, by 0.3 sigma or so. One with parameters of its own had four to choose from, one "
    "without three."
)


def candidates(setting: Setting, variant: str) -> list[str]:
    """The ways to train a mechanism: at the recipe's rates, at half of them and at twice, and one with parameters of
    its own with these at the other of AdamW's rate and a tenth of it, which is the default of queries and gains."""
    lr, parsed = setting.config().optim.lr, parse_variant(variant)
    residual = make_residual(parsed.residual, 4, 16, **_small(parsed.settings))
    names = [name.rpartition(".")[2] for name, _ in residual.named_parameters()]
    ways = [variant, f"{variant}@lr={lr / 2:g}", f"{variant}@lr={2 * lr:g}"]
    other = lr if QUERY in names else READ_RATE * lr
    return [*ways, f"{variant}@residual_lr={other:g}"] if names else ways


def _small(settings: dict) -> dict:
    """Settings that fit four sublayers of width 16: whether there are parameters does not depend on these."""
    return {
        name: value for name, value in settings.items() if name not in ("num_blocks", "block_size", "heads", "window")
    }


def tuned_study(name: str, question: str, about: str, source: str, published: Mapping[str, str], title: str) -> Design:
    """A study of variants that each train at their own best rate: all candidates at one seed, and once these have
    finished the best of each with all seeds (the coarse seed is taken over).

    Args:
        published: variant -> what others have for it, "" for nothing.
        title: of its table.
    """

    def arms(setting: Setting, measured: Measured) -> list[Arm]:
        variants, config = setting.some(list(published)), setting.config(steps=setting.preset.many)
        # Every mechanism's first way before any other's second: a study that is stopped compares them all.
        ways = zip_longest(*(candidates(setting, variant) for variant in variants))
        all_candidates = [one for way in ways for one in way if one is not None]
        coarse = setting.arm(COARSE, all_candidates, [0], of=config)
        if not measured.complete(COARSE):
            return [coarse]
        best = chosen_rates(setting, measured, variants)
        return [coarse, setting.arm(BEST, list(best.values()), of=config, timed=True)]

    def analyse(setting: Setting, measured: Measured) -> Result:
        variants = setting.some(list(published))
        best = chosen_rates(setting, measured, variants)
        if "standard" not in best or not measured.labels(BEST):
            return _coarse(measured, title, len(variants) - 1)
        one = contrast(measured, BEST, label_of(best["standard"]))
        others = {label_of(candidate): published.get(variant, "") for variant, candidate in best.items()}
        table = one.table(title, others)
        table.notes.append(CHOSEN)
        if edge := [label_of(chosen) for chosen in best.values() if "@lr=" in chosen]:
            table.notes.append(f"Best at an end of the rates that were tried, and maybe better beyond: {listed(edge)}.")
        lost = [variant for variant in variants if variant not in best]
        sentence = one.sentence() + (f" Diverged at every rate: {listed(lost)}." if lost else "")
        return Result(sentence, [table], [one.chart(name, title)], {name: one.values(), "rates": best})

    return Design(name, question, about, source, arms, analyse)


def _coarse(measured: Measured, title: str, comparisons: int) -> Result:
    """What may be said before every mechanism has its best rate."""
    if "standard" not in measured.labels(COARSE):
        return Result("Too few runs have finished: the coarse rates come first.")
    one = contrast(measured, COARSE, "standard", comparisons=comparisons)
    note = "One seed each, and not every rate has been tried: no mechanism is at its best here. "
    return Result(note + one.sentence(), [one.table(f"{title}, so far")], [], {COARSE: one.values()})


def chosen_rates(setting: Setting, measured: Measured, variants: Sequence[str]) -> dict[str, str]:
    """Variant -> its candidate with the lowest loss at the coarse seed; those that have not finished are left out."""
    mechanism = {one: variant for variant in variants for one in candidates(setting, variant)}
    losses = {one: measured.mean(COARSE, label_of(one)) for one in mechanism}
    return at_best(losses, mechanism)


def label_of(variant: str) -> str:
    """How runs of a variant are called."""
    return parse_variant(variant).label
