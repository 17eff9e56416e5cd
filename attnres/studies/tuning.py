"""Several mechanisms, each at its own best rate: all candidates at one seed, then the best of each with all seeds."""

from collections.abc import Sequence

from attnres.residuals import make_residual
from attnres.studies.analyses.halving import at_best
from attnres.studies.design import Arm, Measured, Setting
from attnres.studies.variants import parse_variant
from attnres.training.config import TrainConfig

COARSE, BEST = "coarse", "best"


def candidates(setting: Setting, variant: str) -> list[str]:
    """Three ways to train a mechanism, the recipe's first.

    One with parameters of its own gets them at the preset's fraction of AdamW's rate and at the whole of it, and all
    rates doubled; one without gets half, one and two times the recipe's rate.
    """
    lr, parsed = setting.config().optim.lr, parse_variant(variant)
    own = any(True for _ in make_residual(parsed.residual, 4, 16, **_small(parsed.settings)).parameters())
    if not own:
        return [variant, f"{variant}@lr={lr / 2:g}", f"{variant}@lr={2 * lr:g}"]
    low, high = setting.own_rate(setting.preset.own_rate), setting.own_rate(1.0)
    twice = setting.own_rate(2 * setting.preset.own_rate)
    return [
        f"{variant}@residual_lr={low:g}",
        f"{variant}@residual_lr={high:g}",
        f"{variant}@lr={2 * lr:g},residual_lr={twice:g}",
    ]


def _small(settings: dict) -> dict:
    """Settings that fit four sublayers of width 16: whether there are parameters does not depend on these."""
    return {
        name: value for name, value in settings.items() if name not in ("num_blocks", "block_size", "heads", "window")
    }


def tuned_arms(setting: Setting, measured: Measured, variants: Sequence[str], of: TrainConfig) -> list[Arm]:
    """The coarse arm, and once it has finished the best of each with all seeds (the coarse seed is taken over)."""
    of_each = {variant: candidates(setting, variant) for variant in variants}
    coarse = setting.arm(COARSE, [one for many in of_each.values() for one in many], [0], of=of)
    if not measured.complete(COARSE):
        return [coarse]
    best = chosen_rates(setting, measured, variants)
    return [coarse, setting.arm(BEST, list(best.values()), of=of)]


def chosen_rates(setting: Setting, measured: Measured, variants: Sequence[str]) -> dict[str, str]:
    """Variant -> its candidate with the lowest loss at the coarse seed; those that have not finished are left out."""
    mechanism = {one: variant for variant in variants for one in candidates(setting, variant)}
    losses = {one: measured.mean(COARSE, label_of(one)) for one in mechanism}
    return at_best(losses, mechanism)


def label_of(variant: str) -> str:
    """How runs of a variant are called."""
    return parse_variant(variant).label
