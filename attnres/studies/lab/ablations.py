"""What each part of the mechanism does: the paper's Table 4."""

from collections.abc import Mapping, Sequence

from attnres.studies.contrast import contrast
from attnres.studies.design import Arm, Design, Measured, Result, Setting
from attnres.studies.tuning import BEST, chosen_rates, label_of, tuned_arms

PUBLISHED = {
    "standard": "1.766",
    "block": "1.746 (S = 4)",
    "full": "1.737",
    "denseformer": "1.767",
    "mhc": "1.747",
    "full:query=input": "1.731",
    "full:weights=sigmoid": "1.741",
    "full:key_norm=false": "1.743",
    "full:window=8": "1.764",
    "block:heads=4": "1.752 (16 heads)",
    "block:key_norm=false": "1.750",
    "rescaled": "not published: control",
}
"""Variant -> validation loss at 436 M active parameters, 87.9 B tokens. The paper's other row, mixing weights that
depend on no input (1.749), has no mechanism here."""


def tuned_result(
    setting: Setting, measured: Measured, published: Mapping[str, str], variants: Sequence[str], name: str, title: str
) -> Result:
    """Every variant at its own best rate against the standard model at its own."""
    best = chosen_rates(setting, measured, variants)
    if "standard" not in best or not measured.labels(BEST):
        return Result("Too few runs have finished: the coarse rates come first.")
    baseline = label_of(best["standard"])
    one = contrast(measured, BEST, baseline)
    notes = {label_of(chosen): published.get(variant, "") for variant, chosen in best.items()}
    return Result(
        one.sentence(), [one.table(title, notes)], [one.chart(name, title)], {name: one.values(), "rates": best}
    )


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """All variants at one seed and three rates, then at the best."""
    return tuned_arms(setting, measured, setting.some(list(PUBLISHED)), setting.config(steps=setting.preset.many))


def analyse(setting: Setting, measured: Measured) -> Result:
    """Table 4, each row at its best rate."""
    variants = setting.some(list(PUBLISHED))
    return tuned_result(setting, measured, PUBLISHED, variants, "ablations", "Table 4 at each variant's own best rate")


STUDY = Design(
    "ablations",
    "What does each part of the mechanism do?",
    "Eleven of the twelve rows of the paper's Table 4 and the control, each at the best of three rates.",
    "arXiv 2603.15031, Table 4: one run a row, 436 M active parameters; baseline 1.766, Full 1.737, input-dependent "
    "queries 1.731, sigmoid 1.741, no key norm 1.743, sliding window 1.764, Block 1.746.",
    arms,
    analyse,
)
