"""Studies whose runs are made up: a loss by arm, variant and seed in place of a training run."""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from attnres.data.sources import STEPS
from attnres.text import label_and_seed
from lab.cost import costs_of
from lab.design import Arm, Design, Measured, MeasuredRow, Setting
from lab.outcome import names_of
from lab.presets import PRESETS

SIGMA = 0.01
RETURNED = {
    "mixture": [f"loss/{alpha:g}" for alpha in (0, 0.25, 0.5, 0.75, 1)],
    "taught": [f"loss/{rate:g}" for rate in (0.001, 0.003, 0.01, 0.03)],
    "train": ["error", "train_loss"],
    "grow": [*[f"stream {depth}" for depth in range(1, 9)], "dilution", "from_standard"],
    "simulate": [f"count {step}" for step in range(13)],
}
"""What the functions of computed runs return; a number after a space is the step."""


def at(preset: str, seeds: int = 3) -> Setting:
    """A setting whose folder is not used."""
    return Setting(preset, PRESETS[preset], seeds, None, Path("unused"), "images")


def draw(*key: object) -> np.random.Generator:
    """Random numbers of their own for whatever the key names, the same wherever it is drawn."""
    return np.random.default_rng(int(hashlib.sha256(repr(key).encode()).hexdigest()[:15], 16))


def chance(arm: Arm, label: str, seed: int, world: int = 0) -> float:
    """A loss that depends on steps and seed alone: every mechanism is the same function."""
    assert arm.compare is not None
    key = (world, arm.compare.base.steps, str(arm.compare.base.model), label, seed)
    return 3 + 10 / math.sqrt(arm.compare.base.steps) + SIGMA * draw(*key).standard_normal()


def simulated(
    design: Design,
    setting: Setting,
    loss: Callable[[Arm, str, int], float] = chance,
    finished: Callable[[str, str], bool] = lambda arm, run: True,
    **known: object,
) -> Measured:
    """What `survey` would read, of runs that ended with `loss` (infinity: diverged) where they are `finished`."""
    measured = Measured(**known)  # type: ignore
    while True:
        arms = design.arms(setting, measured)
        if {arm.name for arm in arms} <= set(measured.planned):
            return measured
        planned = {arm.name: names_of(arm) for arm in arms}
        done = {arm: [name for name in names if finished(arm, name)] for arm, names in planned.items()}
        rows = [row for arm in arms for name in done[arm.name] for row in _rows(arm, name, loss)]
        recipe = frozenset(arm.name for arm in arms if arm.compare and setting.is_recipe(arm.compare.base))
        measured = dataclasses.replace(measured, rows=rows, planned=planned, finished=done, recipe=recipe)


FLOPS: dict[tuple[str, ...], float] = {}
"""By the arm, its model and the variant: thousands of runs that are simulated differ in their seed alone."""


def flops_a_token(arm: Arm, label: str, name: str) -> float:
    assert arm.compare is not None
    run = arm.compare.base
    key = (arm.name, repr(run.model), repr(run.data), " ".join(arm.compare.variants), label)
    if key not in FLOPS:
        (cost,) = costs_of(arm, run, [name])
        FLOPS[key] = cost.flops / cost.tokens
    return FLOPS[key]


def _rows(arm: Arm, name: str, loss: Callable[[Arm, str, int], float]) -> list[MeasuredRow]:
    label, seed = label_and_seed(name) or ("", 0)
    noise = draw(arm.name, name)
    if arm.computed is not None:
        places = [place.partition(" ") for place in RETURNED[arm.computed.function.rpartition(":")[2]]]
        return [
            MeasuredRow(arm.name, label, seed, int(k or 0), 0, 0.0, q, float(noise.uniform(1, 2))) for q, _, k in places
        ]
    assert arm.compare is not None
    run = arm.compare.base
    end = loss(arm, label, seed)
    if not math.isfinite(end):
        return [MeasuredRow(arm.name, label, seed, run.steps, 0, 0.0, "loss", math.inf)]
    size = run.model.size
    each = flops_a_token(arm, label, name) if size is not None else 1e6
    half, tokens = max(1, run.steps // 2), run.batch_size * run.data.seq_len
    points = {half: end + 1, run.steps: end}
    rows = [
        MeasuredRow(arm.name, label, seed, n, n * tokens, each * n * tokens, "loss", value)
        for n, value in points.items()
    ]
    more = {"parameters": 1000.0, "own_parameters": 3.0}
    more |= {f"{quantity}/{place}": 1.0 + place for quantity in arm.depth for place in range(8)}
    if arm.measure:
        more |= {f"accuracy{k}": float(noise.uniform()) for k in (*(f"/{k}" for k in range(1, STEPS + 1)), "")}
    return [
        *rows,
        *(MeasuredRow(arm.name, label, seed, run.steps, 0, 0.0, quantity, value) for quantity, value in more.items()),
    ]
