"""A study carried out: its arms one after the other, and what comes of them (`attnres.studies.outcome`).

    OUT/PRESET/STUDY/ARM/        a comparison's folder, or computed runs, each with measures.json
    OUT/PRESET/STUDY/study.json  what was asked for

Finished runs are skipped and interrupted ones resumed: the same command continues a study, and ends with the same CSV.
"""

import dataclasses
import math
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.device import cores
from attnres.errors import Interrupted, UserError
from attnres.files import locked, write_json
from attnres.folders import refuse_other
from attnres.run_names import label_and_seed
from attnres.studies.adopt import adopt, alike, computed_in, runs_in, same_computation, same_text
from attnres.studies.archive import ARCHIVE, archived_in, unpacked
from attnres.studies.begin import RECORD, Begin, asked, begun, nothing_lost, same_material
from attnres.studies.child import Child
from attnres.studies.children import Runner
from attnres.studies.compare import Work, opened, time_steps
from attnres.studies.cost import costs_of, hours
from attnres.studies.design import Arm, Computed, Design, Setting
from attnres.studies.outcome import Outcome, names_of, survey, write
from attnres.studies.pace import Ended
from attnres.studies.plan import Plan, make_plan
from attnres.studies.rows import MEASURES, Measures, measures_of
from attnres.studies.watch import train_all
from attnres.studies.work import Computation, function
from attnres.text import listed
from attnres.training.branch import branch, branch_step
from attnres.training.checkpoint import kept
from attnres.training.config import to_dict
from attnres.training.records import TIMES
from attnres.training.run_folder import ended
from attnres.training.sameness import differences


@dataclass(frozen=True)
class Elsewhere:
    """What a study may take instead of running it: trained runs by their folder, and what computed ones gave."""

    trained: dict[Path, dict[str, Any]]
    computed: list[Measures]

    def trained_for(self, arm: Arm) -> dict[Path, dict[str, Any]]:
        """The trained runs that will do for an arm's: with weights where others start from them, and where something is
        still to be measured of a finished one."""

        def will_do(path: Path) -> bool:
            measured = not arm.measure or not ended(path) or (path / MEASURES).is_file()
            return (path / "model").is_dir() or (measured and not arm.started_from)

        return {path: run for path, run in self.trained.items() if will_do(path)}

    def computed_as(self, runs: Computed, name: str) -> Measures | None:
        """What the same call as this run's gave there, if it is there."""
        ours = runs.function, runs.runs[name].arguments
        return next((one for one in self.computed if same_computation(one, *ours)), None)


def conduct(
    design: Design,
    setting: Setting,
    *,
    say: Console,
    jobs: int | None = None,
    until: float = math.inf,
    run: Runner | None = None,
    here: bool = True,
    adopted: Sequence[Path] = (),
    only: Collection[str] = (),
) -> Outcome:
    """Run what is not finished yet, arm by arm and seed by seed, and write what came of all of it.

    Args:
        jobs: runs at once; none is one a core or GPU. until: none begins after this moment (`time.monotonic`).
        run: what runs them; none is processes on this machine. here: whether that is on this machine; on others nothing
            is timed, and their devices need not be here.
        adopted: folders whose runs are taken, finished or to be continued, where one of the study has their
            configuration and data; finished ones of the other studies beside it are taken without being named.
        only: names of arms; the others' runs are left for another time.

    Raises:
        UserError: something cannot run, the folder holds something else, or there is no arm of a name in `only` (yet:
            some are asked for when others have finished); what is finished stays.
        Interrupted: Ctrl-C or SIGTERM; the same command continues.
    """
    folder = refuse_other(setting.folder(design.name), "study")
    with ExitStack() as stack:
        archived = _archived(folder)
        elsewhere = stack.enter_context(_elsewhere(folder, adopted, archived))
        stack.enter_context(locked(folder))
        same_material(folder, design, setting)
        begin = stack.enter_context(begun(folder, asked(design, setting)))
        arms, measured = survey(design, setting)
        if only and archived:
            raise UserError(f"the runs of {folder} are in {ARCHIVE} alone and are taken from it all: leave out --arms")
        names = [arm.name for arm in arms]
        for name in only:
            if name not in names:
                raise UserError(f"the study {design.name} has no arm '{name}' by now: expected one of {listed(names)}")
        while left := [
            arm
            for arm in arms
            if (not only or arm.name in only)
            and (not measured.complete(arm.name) or (here and _is_untimed(arm, folder)))
        ]:
            before = measured.finished
            try:
                runs = sum(map(len, measured.planned.values()))
                _carry_out(left, setting, folder, say, jobs, runs, until, run, here, elsewhere, archived, begin)
            except (Interrupted, UserError):
                if begin.done and any((measured := survey(design, setting)[1]).finished.values()):
                    write(design, setting, measured)  # as far as it came
                raise
            arms, measured = survey(design, setting)
            if measured.finished == before or time.monotonic() > until:
                break
        begin()
        return write(design, setting, measured)


def _archived(folder: Path) -> list[tuple[str, str]]:
    """Arm and name of the runs that a study's runs.jsonl alone has, as in a repository."""
    lines = archived_in(folder / ARCHIVE) if (folder / ARCHIVE).is_file() else []
    names = [(line["arm"], line["run"]) for line in lines if "run" in line]
    return [(arm, run) for arm, run in names if not (folder / arm / run).exists()]


@contextmanager
def _elsewhere(folder: Path, adopted: Sequence[Path], archived: Sequence[tuple[str, str]]) -> Generator[Elsewhere]:
    """What a study in `folder` may take: what is adopted, what its own runs.jsonl alone has (`archived`), and the
    finished runs of the studies beside it."""
    siblings = [path for path in sorted(folder.parent.glob("*")) if path != folder and (path / RECORD).is_file()]
    alone = [path / ARCHIVE for path in siblings if _archived(path)]
    with unpacked([folder / ARCHIVE] if archived else []) as own, unpacked(alone) as theirs:
        taken = [*adopted, *own]
        yield Elsewhere(runs_in(taken, unfinished=True) | runs_in([*siblings, *theirs]), computed_in(taken))


def left_of(design: Design, setting: Setting, adopted: Sequence[Path]) -> list[tuple[Arm, set[str]]]:
    """The arms that a study asks for by now, each with its runs that are still to be trained: neither finished nor to
    be had from `adopted` or from studies beside it, if their text is the same, which is not looked at.

    Raises:
        UserError: the study's folder cannot be used, as `conduct` would say.
    """
    folder = refuse_other(setting.folder(design.name), "study")
    same_material(folder, design, setting)
    arms, measured = survey(design, setting)
    lefts, asked_for = [], list[dict[str, Any]]()
    with _elsewhere(folder, adopted, _archived(folder)) as elsewhere:
        elsewhere = dataclasses.replace(
            elsewhere, trained=elsewhere.trained | runs_in([folder] if folder.is_dir() else [])
        )
        for arm in arms:
            missing = set(measured.planned[arm.name]) - set(measured.finished[arm.name])
            if arm.computed is not None:
                missing = {name for name in missing if elsewhere.computed_as(arm.computed, name) is None}
            trained = {path: run for path, run in elsewhere.trained_for(arm).items() if ended(path)}
            if arm.compare is not None and missing:
                plan = make_plan(dataclasses.replace(arm.compare, out=str(folder / arm.name)), here=False)
                missing = {name for name in missing if next(alike(plan.runs[name], trained), None) is None}
                missing = {name for name in missing if not _is_among(to_dict(plan.runs[name]), asked_for)}
                asked_for += [to_dict(plan.runs[name]) for name in missing]
            lefts.append((arm, missing))
    return lefts


def _is_untimed(arm: Arm, folder: Path) -> bool:
    """Whether the steps of an arm's variants are to be timed and were not."""
    return arm.compare is not None and arm.compare.timing_s > 0 and not (folder / arm.name / TIMES).is_file()


def _carry_out(
    arms: Sequence[Arm],
    setting: Setting,
    folder: Path,
    say: Console,
    jobs: int | None,
    runs: int,
    until: float,
    run: Runner | None,
    here: bool,
    elsewhere: Elsewhere,
    archived: Sequence[tuple[str, str]],
    begin: Begin,
) -> None:
    """Run the unfinished runs of these arms, all arms together, and measure them; of those that are one run the first,
    which the others are taken from in the next pass. Of what the folder's runs.jsonl alone had, all has to be there by
    then (UserError), but for runs that others start from: it is written anew. `runs`: how many the study has in all,
    done or not: threads are by that, so that what is left when a study is continued changes no sum."""
    quiet = Console(quiet=True)
    children, done, most, timed = list[Child](), list[Ended](), list[int](), list[tuple[Work, float]]()
    own, asked_for = runs_in([folder]), list[dict[str, Any]]()
    elsewhere = dataclasses.replace(elsewhere, trained=elsewhere.trained | own)
    with ExitStack() as stack:
        for arm in arms:
            if arm.computed is not None:
                children += _computations(arm, setting, folder / arm.name, elsewhere)
                continue
            assert arm.compare is not None
            config = dataclasses.replace(arm.compare, out=str(folder / arm.name), jobs=jobs)

            def fill(plan: Plan, data: dict[str, Any], arm: Arm = arm) -> None:
                same_text(plan, data, own)
                for name in adopt(plan, data, elsewhere.trained_for(arm)):
                    say.print(f"{arm.name}/{name}: taken from a run with this configuration", highlight=False)
                if arm.trunk:
                    _branch(plan, folder / arm.trunk)

            work = stack.enter_context(opened(config, quiet if children else say, fill, here, runs))
            for child in work.children:
                trained = work.plan.runs[child.name]
                if not ended(child.folder) and not _is_among(fields := to_dict(trained), asked_for):
                    name, size = f"{arm.name}/{child.name}", _size(arm, setting, child.folder.name)
                    first = branch_step(trained) if arm.trunk and child.folder.exists() else 0
                    children.append(dataclasses.replace(child, name=name, is_alone=True, size=size, first=first))
                    asked_for.append(fields)
            done += [Ended(f"{arm.name}/{name}", _size(arm, setting, name), wall) for name, wall in work.walls.items()]
            most.append(work.jobs)
            if here and arm.compare.timing_s > 0:
                timed.append((work, arm.compare.timing_s))
        wanted = {(arm.name, name) for arm in arms if not arm.started_from for name in names_of(arm)}
        nothing_lost(folder, [one for one in archived if one in wanted])
        begin()
        children.sort(key=_seed)  # what is there first is one whole study of one seed
        measures = {folder / arm.name / name: arm.measure for arm in arms for name in names_of(arm) if arm.measure}

        def measure(child: Child) -> None:
            if child.folder in measures:
                _measure(measures[child.folder], child.folder)

        for place, name in measures.items():  # what ended before
            _measure(name, place)
        for work, seconds in timed:
            if time.monotonic() < until:
                time_steps(work, seconds, say)
        jobs = jobs or min(most, default=cores())
        train_all(children, done, jobs=jobs, say=say, run=run, until=until, on_end=measure)


def _is_among(run: dict[str, Any], others: Sequence[dict[str, Any]]) -> bool:
    """Whether one of the others is trained as this run, of `to_dict`, and keeps the same checkpoints."""
    same = (other for other in others if sorted(other["keep_at"]) == sorted(run["keep_at"]))
    return any(not differences(run, other) for other in same)


def _measure(name: str, folder: Path) -> None:
    """Write what the study's function of this name makes of a finished run, where that is still to be done."""
    if (folder / "summary.json").is_file() and not (folder / MEASURES).is_file():
        write_json(folder / MEASURES, {"function": name, "rows": function(name)(folder)})


def _size(arm: Arm, setting: Setting, run: str) -> float:
    """How much a run of an arm computes: hours at the preset's speed."""
    return hours(costs_of(arm, setting.config(), [run]), setting.preset.flops_per_s)


def _seed(child: Child) -> int:
    taken = label_and_seed(child.folder.name)
    return taken[1] if taken else 0


def _branch(plan: Plan, trunk: Path) -> None:
    """Begin the runs of a plan that have no folder yet at the checkpoints that their trunks kept. One whose trunk has
    none, for it diverged before that or came from a runs.jsonl, is trained from its start: it is the same run."""
    for name, run in plan.runs.items():
        step = branch_step(run)
        if kept(trunk / name, step).is_dir() and not Path(run.out or ".").exists():
            branch(trunk / name, step, run)


def _computations(arm: Arm, setting: Setting, folder: Path, elsewhere: Elsewhere) -> list[Child]:
    """The computed runs that are still to be made; what was computed elsewhere is written here."""
    assert arm.computed is not None
    children = []
    for name, call in arm.computed.runs.items():
        if (folder / name / MEASURES).is_file():
            before = measures_of(folder / name)
            if "arguments" in before and not same_computation(before, arm.computed.function, call.arguments):
                raise UserError(f"{folder / name} was computed with other arguments: choose another --out")
            continue
        if known := elsewhere.computed_as(arm.computed, name):
            write_json(folder / name / MEASURES, known)
            continue
        config = folder / "configs" / f"{name}.json"
        run = {"function": arm.computed.function, "arguments": call.arguments, "folder": str(folder / name)}
        write_json(config, run)
        size = _size(arm, setting, name)
        children.append(Computation(f"{arm.name}/{name}", folder / name, config, 1, size, is_alone=True))
    return children
