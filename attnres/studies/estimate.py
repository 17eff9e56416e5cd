"""What studies would run and what that costs, before anything is run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.folders import refuse_other
from attnres.progress import Bars
from attnres.studies.adopt import alike, is_among, runs_in
from attnres.studies.begin import same_material
from attnres.studies.cost import Cost, Step, costs_of, hours, measured_speeds, on_gpu
from attnres.studies.design import Arm, Design, Measured, Setting
from attnres.studies.elsewhere import archived_alone, elsewhere
from attnres.studies.means import Means
from attnres.studies.outcome import names_of, survey
from attnres.studies.plan import make_plan
from attnres.terminal import grid, say, wide
from attnres.training.config import to_dict
from attnres.training.run_folder import ended


def print_estimate(designs: Sequence[Design], setting: Setting, means: Means, *, adopted: Sequence[Path] = ()) -> None:
    """Time a few steps of each model here, and print a row an arm.

    Args:
        adopted: as for `attnres.studies.conduct.conduct`.

    Raises:
        UserError: a study's folder cannot be used, or no run fits a pattern, as `conduct` would say.
    """
    out, recipe = wide(Console()), setting.config()
    costs, usual = list[tuple[Design, Arm, list[Cost]]](), Step.of(recipe, recipe)
    with Bars(stays=False, console=means.say) as bars:
        looking = bars.add("looking for the runs that are left", len(designs))
        for design in designs:
            arms = left_of(design, setting, means, adopted=adopted)
            costs += [(design, arm, costs_of(arm, recipe, left)) for arm, left in arms]
            looking.advance(1, design.name)
        looking.remove()
        steps = dict.fromkeys([usual, *(one.step for *_, each in costs for one in each if one.step is not None)])
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
    unit = "one GPU" if on_gpu(recipe) else "one core"
    if speeds:
        say(out, f"{total:.1f} hours of {unit}, by a few steps of each model here.")
    else:
        say(out, f"{total:.1f} hours of {unit} at {otherwise:.2g} FLOP/s, assumed: the preset's device is not here.")
        say(out, "Reads take longer than their FLOPs say: expect up to three times as much of a mechanism.")
    say(out, "Left are runs that are neither finished nor the same as finished ones of --adopt and of other studies,")
    say(out, "provided that these were of the same text, which is not looked at here.")
    say(out, "Arms that depend on what earlier ones give are not counted before those have run.")
    if jobs := means.jobs:
        say(out, f"{total / jobs:.1f} hours with {jobs} runs at once on as many cores or GPUs.")


def left_of(
    design: Design, setting: Setting, means: Means, *, adopted: Sequence[Path] = ()
) -> list[tuple[Arm, set[str]]]:
    """The arms that a study asks for by now, each with its runs that would be trained: wanted, neither finished nor to
    be had from `adopted` or from studies beside it, if their text is the same, which is not looked at.

    Raises:
        UserError: the study's folder cannot be used, or no run fits a pattern, as `conduct` would say.
    """
    folder = refuse_other(setting.folder(design.name), "study")
    same_material(folder, design, setting)
    arms, measured = survey(design, setting)
    means.check(design, arms)
    lefts, asked_for = [], list[dict[str, Any]]()
    own = runs_in([folder] if folder.is_dir() else [])
    with elsewhere(folder, adopted, archived_alone(folder)) as there:
        there = dataclasses.replace(there, trained=there.trained | own)
        for arm in arms:
            missing = set(measured.planned[arm.name]) - set(measured.finished[arm.name])
            missing = {name for name in missing if means.wants(arm, name)}
            if arm.computed is not None:
                missing = {name for name in missing if there.computed_as(arm.computed, name) is None}
            trained = {path: run for path, run in there.trained_for(arm).items() if ended(path)}
            if arm.compare is not None and missing:
                plan = make_plan(dataclasses.replace(arm.compare, out=str(folder / arm.name)), here=False)
                missing = {name for name in missing if next(alike(plan.runs[name], trained), None) is None}
                missing = {name for name in missing if not is_among(to_dict(plan.runs[name]), asked_for)}
                asked_for += [to_dict(plan.runs[name]) for name in missing]
            lefts.append((arm, missing))
    return lefts
