"""Run a study, its arms in order, or estimate its cost; `lab.outcome` analyses and writes the results.

    OUT/PRESET/STUDY/ARM/ a comparison's folder, or computed runs, each with measures.json OUT/PRESET/STUDY/study.json
    the request: preset, seeds, texts

Finished runs are skipped and interrupted ones resumed: the same command continues a study, and ends with the same CSV.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.comparison.children import Child, Runner
from attnres.comparison.compare import OpenComparison, opened, time_steps
from attnres.comparison.plan import ComparisonPlan, make_plan
from attnres.comparison.watch import Ended, train_all
from attnres.device import cores
from attnres.errors import Interrupted, UserError
from attnres.files import locked, write_json
from attnres.folders import refuse_other
from attnres.progress import Bars, grid, say, wide
from attnres.text import label_and_seed
from attnres.training.checkpoint import kept
from attnres.training.config import TrainConfig, to_dict
from attnres.training.records import TIMES
from attnres.training.run_folder import ended
from lab.branch import branch
from lab.cost import Cost, StepKind, costs_of, hours, measured_speeds, on_gpu
from lab.design import Arm, Design, Measured, Setting, branch_step
from lab.measures import MEASURES, Computation, function, measures_of
from lab.outcome import StudyOutcome, names_of, survey, write
from lab.store import (
    ARCHIVE,
    Record,
    StoredRun,
    adopt,
    archived_alone,
    asked,
    call_key,
    find_runs,
    has_ended,
    recorded,
    refuse_other_material,
    refuse_other_text,
    run_key,
    same_runs,
    takeable,
)


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of a study: executor, number of jobs, time.

    Attributes:
        say: console for progress.
        jobs: parallel runs; None is one a core or GPU. until: no run begins after this moment (`time.monotonic`).
        run: the executor; None is processes on this machine. here: whether runs are on this machine; otherwise nothing
            is timed, and devices are not checked.
    """

    say: Console
    jobs: int | None = None
    until: float = math.inf
    run: Runner | None = None
    here: bool = True

    def times(self, arm: Arm) -> bool:
        """Return whether the steps of an arm's variants are to be timed."""
        return self.here and arm.compare is not None and arm.compare.timing_s > 0


def conduct(
    design: Design, setting: Setting, options: ExecutionOptions, *, adopted: Sequence[Path] = ()
) -> StudyOutcome:
    """Run what is not finished yet, arm by arm and seed by seed, and write the results of all.

    Args:
        adopted: folders whose runs, finished or resumable, are reused if one of the study has their configuration and
            data. Finished runs of other studies in the same folder are reused without being named.

    Raises:
        UserError: something cannot run, or the folder holds something else; finished runs stay.
        Interrupted: Ctrl-C or SIGTERM; the same command continues.
    """
    folder = refuse_other(setting.folder(design.name), "study")
    archived = archived_alone(folder)
    with ExitStack() as stack:
        stored = stack.enter_context(takeable(folder, adopted, archived))
        stack.enter_context(locked(folder))
        refuse_other_material(folder, design, setting)
        record = stack.enter_context(recorded(folder, asked(design, setting)))
        arms, measured = survey(design, setting)
        while left := [
            arm
            for arm in arms
            if not measured.complete(arm.name) or (options.times(arm) and not (folder / arm.name / TIMES).is_file())
        ]:
            before = measured.finished
            try:
                runs = sum(map(len, measured.planned.values()))
                _Pass(setting, folder, options, stored, archived, record, runs).carry_out(left)
            except (Interrupted, UserError):
                if record.written and any((measured := survey(design, setting)[1]).finished.values()):
                    write(design, setting, measured)  # with the runs finished so far
                raise
            arms, measured = survey(design, setting)
            if measured.finished == before or time.monotonic() > options.until:
                break
        record.write()
        outcome = write(design, setting, measured)
        if outcome.not_used:
            options.say.print(f"Not used: {outcome.not_used}.", highlight=False)
        return outcome


@dataclass
class _Pass:
    """One pass over a study: the unfinished runs of the arms known so far.

    Attributes:
        stored: reusable runs. archived: runs that only the folder's runs.jsonl had when the study was opened.
        record: study.json, written once all checks have passed.
        runs: number of runs of the study, finished or not, which determines the threads of each, so that a continued
            study computes the same sums.
        children: runs to execute. asked_for: keys of those to be trained, with the checkpoints that they keep.
        done: finished runs.
        jobs: number of parallel runs of each arm.
        timed: comparisons whose steps are to be timed, and for how many seconds.
    """

    setting: Setting
    folder: Path
    options: ExecutionOptions
    stored: Sequence[StoredRun]
    archived: Sequence[tuple[str, str]]
    record: Record
    runs: int
    children: list[Child] = field(default_factory=list)
    asked_for: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    done: list[Ended] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    timed: list[tuple[OpenComparison, float]] = field(default_factory=list)

    def carry_out(self, arms: Sequence[Arm]) -> None:
        """Run and measure the unfinished runs of the arms. If several are the same run, the first is trained, and the
        next pass copies it. Raises UserError if a run that only runs.jsonl has would be lost when that file is written
        again; runs that others start from are exempt."""
        own_runs = find_runs([self.folder])
        stored = [*self.stored, *own_runs]
        with ExitStack() as stack:
            for arm in arms:
                if arm.computed is not None:
                    self._compute(arm, stored)
                else:
                    self._train(arm, stored, own_runs, stack)
            wanted = {(arm.name, name) for arm in arms if not arm.started_from for name in names_of(arm)}
            archived = [f"{arm}/{name}" for arm, name in self.archived if (arm, name) in wanted]
            if lost := [name for name in archived if not has_ended(self.folder / name)]:
                raise UserError(
                    f"{self.folder / ARCHIVE} would lose runs that this command does not reuse ({len(lost)}, "
                    f"{lost[0]} for one: of other data or another configuration): choose another --out"
                )
            self.record.write()
            self._run({self.folder / arm.name / name: arm.measure for arm in arms for name in names_of(arm)})

    def _run(self, measures: dict[Path, str]) -> None:
        """Time, run and measure; `measures`: the function that measures each run, by its folder, "" for none."""
        for place, name in measures.items():  # runs that ended earlier
            _measure(name, place)
        for work, seconds in self.timed:
            if time.monotonic() < self.options.until:
                time_steps(work, seconds, self.options.say)
        # Seed by seed, so that a complete study of one seed is available first.
        children = sorted(self.children, key=lambda child: (label_and_seed(child.folder.name) or ("", 0))[1])
        train_all(
            children,
            self.done,
            jobs=self.options.jobs or min(self.jobs, default=cores()),
            say=self.options.say,
            run=self.options.run,
            until=self.options.until,
            on_end=lambda child: _measure(measures.get(child.folder, ""), child.folder),
        )

    def _train(self, arm: Arm, stored: Sequence[StoredRun], own: Sequence[StoredRun], stack: ExitStack) -> None:
        """Open an arm's comparison until the pass ends, copy the reusable runs, and request the others. `own`: the
        finished runs of this study."""
        assert arm.compare is not None
        config = dataclasses.replace(arm.compare, out=str(self.folder / arm.name), jobs=self.options.jobs)

        def fill(plan: ComparisonPlan, data: dict[str, Any]) -> None:
            refuse_other_text(plan, data, own)
            for name in adopt(plan, data, stored, arm):
                self.options.say.print(f"{arm.name}/{name}: copied from a run with this configuration", highlight=False)
            if arm.trunk:
                _branch(plan, self.folder / arm.trunk)

        say = Console(quiet=True) if self.children else self.options.say
        work = stack.enter_context(opened(config, say, fill, self.options.here, self.runs))
        for child in work.children:
            run = work.plan.runs[child.name]
            request = _request(run)
            if not ended(child.folder) and request not in self.asked_for:
                first = branch_step(run) if arm.trunk and child.folder.exists() else 0
                size = _size(arm, self.setting, child.name)
                name = f"{arm.name}/{child.name}"
                self.children.append(dataclasses.replace(child, name=name, is_alone=True, size=size, first=first))
                self.asked_for.add(request)
        self.done += [
            Ended(f"{arm.name}/{name}", _size(arm, self.setting, name), wall) for name, wall in work.walls.items()
        ]
        self.jobs.append(work.jobs)
        if self.options.times(arm):
            self.timed.append((work, arm.compare.timing_s))

    def _compute(self, arm: Arm, stored: Sequence[StoredRun]) -> None:
        """Request an arm's missing computed runs; results that are stored somewhere else are copied."""
        assert arm.computed is not None
        folder, known = self.folder / arm.name, {one.key: one.folder for one in stored}
        for name, call in arm.computed.runs.items():
            key = call_key(arm.computed.function, call.arguments)
            if (folder / name / MEASURES).is_file():
                if any(one.folder == folder / name and one.key != key for one in stored):
                    raise UserError(f"{folder / name} was computed with other arguments: choose another --out")
            elif key in known:
                write_json(folder / name / MEASURES, measures_of(known[key]))
            else:
                config = folder / "configs" / f"{name}.json"
                run = {"function": arm.computed.function, "arguments": call.arguments, "folder": str(folder / name)}
                write_json(config, run)
                size = _size(arm, self.setting, name)
                self.children.append(Computation(f"{arm.name}/{name}", folder / name, config, 1, size, is_alone=True))


def _measure(name: str, folder: Path) -> None:
    """Write the result of the study's function of this name ("" for none) for a finished run, unless it is there."""
    if name and (folder / "summary.json").is_file() and not (folder / MEASURES).is_file():
        write_json(folder / MEASURES, {"function": name, "rows": function(name)(folder)})


def _request(run: TrainConfig) -> tuple[str, tuple[int, ...]]:
    """Return what identifies a planned run: its key, and the checkpoints that it keeps."""
    return run_key(to_dict(run)), tuple(sorted(run.keep_at))


def _size(arm: Arm, setting: Setting, run: str) -> float:
    """Return the amount of computation of a run of an arm: hours at the preset's speed."""
    return hours(costs_of(arm, setting.config(), [run]), setting.preset.flops_per_s)


def _branch(plan: ComparisonPlan, trunk: Path) -> None:
    """Start the runs of a plan that have no folder yet from the checkpoints of their trunks. Without such a checkpoint
    (the trunk diverged earlier, or came from a runs.jsonl) a run is trained from its start, with the same result."""
    for name, run in plan.runs.items():
        step = branch_step(run)
        if kept(trunk / name, step).is_dir() and not Path(run.out or ".").exists():
            branch(trunk / name, step, run)


def print_estimate(
    designs: Sequence[Design], setting: Setting, options: ExecutionOptions, *, adopted: Sequence[Path] = ()
) -> None:
    """Time a few steps of each model here, and print a row for each arm.

    Args:
        adopted: as for `lab.conduct.conduct`.

    Raises:
        UserError: a study's folder cannot be used.
    """
    out, recipe = wide(Console()), setting.config()
    costs, usual = list[tuple[Design, Arm, list[Cost]]](), StepKind.of(recipe, recipe)
    with Bars(stays=False, console=options.say) as bars:
        looking = bars.add("looking for the runs that are left", len(designs))
        for design in designs:
            arms = left_of(design, setting, adopted=adopted)
            costs += [(design, arm, costs_of(arm, recipe, left)) for arm, left in arms]
            looking.advance(1, design.name)
        looking.remove()
        steps = dict.fromkeys([usual, *(cost.step for *_, each in costs for cost in each if cost.step is not None)])
        speeds = measured_speeds(recipe, steps, bars.add("timing a few steps of each model", len(steps)).advance)
    otherwise = speeds.get(usual, setting.preset.flops_per_s)
    table = grid("study", "arm", right=("runs", "left", "tokens", "FLOPs", "hours"))
    total = 0.0
    for design, arm, each in costs:
        time_h = hours(each, otherwise, speeds)
        total += time_h
        runs, tokens, flops = (sum(getattr(cost, what) for cost in each) for what in ("runs", "tokens", "flops"))
        counts = f"{len(names_of(arm))}", f"{runs}"
        table.add_row(design.name, arm.name, *counts, f"{tokens:,.0f}", f"{flops:.2e}", f"{time_h:.2f}")
    out.print(table)
    counted = {design.name for design, *_ in costs}
    for design in designs:
        if design.name not in counted:
            say(out, f"{design.name}: {design.analyse(setting, Measured()).answer}")
    unit = "one GPU" if on_gpu(recipe) else "one core"
    if speeds:
        say(out, f"{total:.1f} hours of {unit}, by a few steps of each model here.")
    else:
        say(out, f"{total:.1f} hours of {unit} at {otherwise:.2g} FLOP/s, assumed: the preset's device is not here.")
        say(out, "Reads take longer than their FLOPs suggest: expect up to three times as much for a mechanism.")
    say(out, "Counted are runs that are neither finished nor equal to finished ones in --adopt and other studies,")
    say(out, "provided that these had the same text, which is not checked here.")
    say(out, "Arms that depend on earlier results are not counted before those runs have finished.")
    if jobs := options.jobs:
        say(out, f"{total / jobs:.1f} hours with {jobs} runs at once on as many cores or GPUs.")


def left_of(design: Design, setting: Setting, *, adopted: Sequence[Path] = ()) -> list[tuple[Arm, set[str]]]:
    """Return the arms that a study requests so far, each with the runs to train: unfinished, and not available in
    `adopted` or in neighbouring studies. Whether those had the same text is not checked.

    Raises:
        UserError: the study's folder cannot be used, as `conduct` would say.
    """
    folder = refuse_other(setting.folder(design.name), "study")
    refuse_other_material(folder, design, setting)
    arms, measured = survey(design, setting)
    lefts, asked_for = [], set[tuple[str, tuple[int, ...]]]()
    own_runs = find_runs([folder] if folder.is_dir() else [])
    with takeable(folder, adopted, archived_alone(folder)) as elsewhere:
        stored = [one for one in (*elsewhere, *own_runs) if one.ended]
        keys = {one.key for one in stored}
        for arm in arms:
            missing = set(measured.planned[arm.name]) - set(measured.finished[arm.name])
            if arm.computed is not None:
                runs = arm.computed.runs
                missing = {
                    name for name in missing if call_key(arm.computed.function, runs[name].arguments) not in keys
                }
            if arm.compare is not None and missing:
                plan = make_plan(dataclasses.replace(arm.compare, out=str(folder / arm.name)), here=False)
                missing = {name for name in missing if not same_runs(stored, plan.runs[name], arm)}
                missing = {name for name in missing if _request(plan.runs[name]) not in asked_for}
                asked_for |= {_request(plan.runs[name]) for name in missing}
            lefts.append((arm, missing))
    return lefts
