"""What studies would run and what that costs, before anything is run."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnres.progress import Bars
from attnres.studies.conduct import left_of
from attnres.studies.cost import Step, costs_of, hours, measured_speeds
from attnres.studies.design import Design, Measured, Setting
from attnres.studies.outcome import names_of
from attnres.terminal import grid, say, wide


def print_estimate(
    designs: Sequence[Design], setting: Setting, adopted: Sequence[Path], *, jobs: int | None = None
) -> None:
    """Time a few steps of each model here, and print a row an arm.

    Args:
        adopted: as for `attnres.studies.conduct.conduct`.
        jobs: runs at once, where that is known.

    Raises:
        UserError: a study's folder cannot be used, as `conduct` would say.
    """
    out, recipe = wide(Console()), setting.config()
    costs = [
        (design, arm, costs_of(arm, recipe, left))
        for design in designs
        for arm, left in left_of(design, setting, adopted)
    ]
    usual = Step.of(recipe, recipe)
    steps = dict.fromkeys([usual, *(one.step for *_, each in costs for one in each if one.step is not None)])
    with Bars(stays=False) as bars:
        speeds = measured_speeds(recipe, steps, bars.add("timing a few steps of each model", len(steps)).advance)
    otherwise = speeds.get(usual, setting.preset.flops_per_s)
    table = grid("study", "arm", right=("runs", "left", "tokens", "FLOPs", "hours"))
    total = 0.0
    for design, arm, each in costs:
        time_h = hours(each, otherwise, speeds)
        total += time_h
        runs, tokens, flops = (sum(getattr(one, what) for one in each) for what in ("runs", "tokens", "flops"))
        counts = f"{len(names_of(arm))}", f"{runs}"
        table.add_row(design.name, arm.name, *counts, f"{tokens:,.0f}", f"{flops:.2e}", f"{time_h:.2f}")
    out.print(table)
    counted = {design.name for design, *_ in costs}
    for design in designs:
        if design.name not in counted:
            say(out, f"{design.name}: {design.analyse(setting, Measured()).verdict}")
    unit = "one core" if recipe.device in ("auto", "cpu") else "one GPU"
    if speeds:
        say(out, f"{total:.1f} hours of {unit}, by a few steps of each model here.")
    else:
        say(out, f"{total:.1f} hours of {unit} at {otherwise:.2g} FLOP/s, assumed: the preset's device is not here.")
        say(out, "Reads take longer than their FLOPs say: expect up to three times as much of a mechanism.")
    say(out, "Left are runs that are neither finished nor the same as finished ones of --adopt and of other studies,")
    say(out, "provided that these were of the same text, which is not looked at here.")
    say(out, "Arms that depend on what earlier ones give are not counted before those have run.")
    if jobs:
        say(out, f"{total / jobs:.1f} hours with {jobs} runs at once on as many cores or GPUs.")
