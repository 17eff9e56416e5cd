"""A study carried out: its arms one after the other, and what comes of them (`attnres.studies.outcome`).

    OUT/PRESET/STUDY/ARM/        a comparison's folder, or computed runs, each with measures.json
    OUT/PRESET/STUDY/study.json  what was asked for

Finished runs are skipped and interrupted ones resumed: the same command continues a study, and ends with the same CSV.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.device import cores
from attnres.errors import Interrupted, UserError
from attnres.files import locked, write_json
from attnres.folders import refuse_other
from attnres.run_names import label_and_seed
from attnres.studies.adopt import adopt, is_among, runs_in, same_computation, same_text
from attnres.studies.begin import Begin, asked, begun, nothing_lost, same_material
from attnres.studies.child import Child
from attnres.studies.compare import Work, opened, time_steps
from attnres.studies.cost import costs_of, hours
from attnres.studies.design import Arm, Design, Setting
from attnres.studies.elsewhere import Elsewhere, archived_alone, elsewhere
from attnres.studies.means import Means
from attnres.studies.outcome import Outcome, names_of, survey, write
from attnres.studies.pace import Ended
from attnres.studies.plan import Plan
from attnres.studies.rows import MEASURES, measures_of
from attnres.studies.watch import train_all
from attnres.studies.work import Computation, function
from attnres.training.branch import branch, branch_step
from attnres.training.checkpoint import kept
from attnres.training.config import TrainConfig, to_dict
from attnres.training.records import TIMES
from attnres.training.run_folder import ended


def conduct(design: Design, setting: Setting, means: Means, *, adopted: Sequence[Path] = ()) -> Outcome:
    """Run what is not finished yet, arm by arm and seed by seed, and write what came of all of it.

    Args:
        adopted: folders whose runs are taken, finished or to be continued, where one of the study has their
            configuration and data; finished ones of the other studies beside it are taken without being named.

    Raises:
        UserError: something cannot run, the folder holds something else, or no run fits a pattern (yet: some are asked
            for when others have finished); what is finished stays.
        Interrupted: Ctrl-C or SIGTERM; the same command continues.
    """
    folder = refuse_other(setting.folder(design.name), "study")
    archived = archived_alone(folder)
    with ExitStack() as stack:
        there = stack.enter_context(elsewhere(folder, adopted, archived))
        stack.enter_context(locked(folder))
        same_material(folder, design, setting)
        begin = stack.enter_context(begun(folder, asked(design, setting)))
        arms, measured = survey(design, setting)
        means.check(design, arms)
        while left := [arm for arm in arms if not measured.complete(arm.name) or _is_untimed(arm, folder, means)]:
            before = measured.finished
            try:
                runs = sum(map(len, measured.planned.values()))
                _Pass(setting, folder, means, there, archived, begin, runs).carry_out(left)
            except (Interrupted, UserError):
                if begin.done and any((measured := survey(design, setting)[1]).finished.values()):
                    write(design, setting, measured)  # as far as it came
                raise
            arms, measured = survey(design, setting)
            if measured.finished == before or time.monotonic() > means.until:
                break
        begin()
        outcome = write(design, setting, measured)
        if outcome.not_used:
            means.say.print(f"Not used: {outcome.not_used}.", highlight=False)
        return outcome


def _is_untimed(arm: Arm, folder: Path, means: Means) -> bool:
    """Whether the steps of an arm's variants are to be timed and were not."""
    return means.times(arm) and not (folder / arm.name / TIMES).is_file()


@dataclass
class _Pass:
    """The unfinished runs of some arms, all arms together.

    Attributes:
        there: what may be taken. archived: what the folder's runs.jsonl alone had when the study was opened.
        begin: called once nothing can be refused any more.
        runs: how many the study has in all, done or not: threads are by that, so that what is left when a study is
            continued changes no sum.
        children: to be run. asked_for: the configurations of those that are trained. done: those that are finished.
        jobs: how many runs each arm has at once.
        timed: comparisons whose steps are to be timed, and for how many seconds.
    """

    setting: Setting
    folder: Path
    means: Means
    there: Elsewhere
    archived: Sequence[tuple[str, str]]
    begin: Begin
    runs: int
    children: list[Child] = field(default_factory=list)
    asked_for: list[dict[str, Any]] = field(default_factory=list)
    done: list[Ended] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    timed: list[tuple[Work, float]] = field(default_factory=list)

    def carry_out(self, arms: Sequence[Arm]) -> None:
        """Run them and measure them; of those that are one run the first, which the others are taken from in the next
        pass. Of what the folder's runs.jsonl alone had, all has to be there by then (UserError), but for runs that
        others start from: it is written anew."""
        own = runs_in([self.folder])
        there = dataclasses.replace(self.there, trained=self.there.trained | own)
        with ExitStack() as stack:
            for arm in arms:
                if arm.computed is not None:
                    self._compute(arm, there)
                else:
                    self._train(arm, there, own, stack)
            wanted = {(arm.name, name) for arm in arms if not arm.started_from for name in names_of(arm)}
            nothing_lost(self.folder, [one for one in self.archived if one in wanted])
            self.begin()
            self._run({self.folder / arm.name / name: arm.measure for arm in arms for name in names_of(arm)})

    def _run(self, measures: dict[Path, str]) -> None:
        """Time, run and measure; `measures`: the function that measures each run, by its folder, "" for none."""
        for place, name in measures.items():  # what ended before
            _measure(name, place)
        for work, seconds in self.timed:
            if time.monotonic() < self.means.until:
                time_steps(work, seconds, self.means.say)
        train_all(
            sorted(self.children, key=_seed),  # what is there first is one whole study of one seed
            self.done,
            jobs=self.means.jobs or min(self.jobs, default=cores()),
            say=self.means.say,
            run=self.means.run,
            until=self.means.until,
            on_end=lambda child: _measure(measures.get(child.folder, ""), child.folder),
        )

    def _train(self, arm: Arm, there: Elsewhere, own: dict[Path, dict[str, Any]], stack: ExitStack) -> None:
        """Open an arm's comparison until the pass ends, take what can be taken, and ask for the rest. `own`: the runs
        of this study that are finished."""
        assert arm.compare is not None
        config = dataclasses.replace(arm.compare, out=str(self.folder / arm.name), jobs=self.means.jobs)

        def fill(plan: Plan, data: dict[str, Any]) -> None:
            same_text(plan, data, own)
            for name in adopt(plan, data, there.trained_for(arm)):
                self.means.say.print(f"{arm.name}/{name}: taken from a run with this configuration", highlight=False)
            if arm.trunk:
                _branch(plan, self.folder / arm.trunk)

        say = Console(quiet=True) if self.children else self.means.say
        work = stack.enter_context(opened(config, say, fill, self.means.here, self.runs))
        for child in work.children:
            run = work.plan.runs[child.name]
            fields = to_dict(run)
            if self.means.wants(arm, child.name) and not ended(child.folder) and not is_among(fields, self.asked_for):
                self.children.append(self._of_study(arm, child, run))
                self.asked_for.append(fields)
        self.done += [
            Ended(f"{arm.name}/{name}", _size(arm, self.setting, name), wall) for name, wall in work.walls.items()
        ]
        self.jobs.append(work.jobs)
        if self.means.times(arm):
            self.timed.append((work, arm.compare.timing_s))

    def _of_study(self, arm: Arm, child: Child, run: TrainConfig) -> Child:
        """A run of an arm as one of a study's."""
        first = branch_step(run) if arm.trunk and child.folder.exists() else 0
        size = _size(arm, self.setting, child.name)
        return dataclasses.replace(child, name=f"{arm.name}/{child.name}", is_alone=True, size=size, first=first)

    def _compute(self, arm: Arm, there: Elsewhere) -> None:
        """Ask for an arm's computed runs that are still to be made; what was computed elsewhere is written here."""
        assert arm.computed is not None
        folder = self.folder / arm.name
        for name, call in arm.computed.runs.items():
            if (folder / name / MEASURES).is_file():
                before = measures_of(folder / name)
                if "arguments" in before and not same_computation(before, arm.computed.function, call.arguments):
                    raise UserError(f"{folder / name} was computed with other arguments: choose another --out")
            elif known := there.computed_as(arm.computed, name):
                write_json(folder / name / MEASURES, known)
            elif self.means.wants(arm, name):
                config = folder / "configs" / f"{name}.json"
                run = {"function": arm.computed.function, "arguments": call.arguments, "folder": str(folder / name)}
                write_json(config, run)
                size = _size(arm, self.setting, name)
                self.children.append(Computation(f"{arm.name}/{name}", folder / name, config, 1, size, is_alone=True))


def _measure(name: str, folder: Path) -> None:
    """Write what the study's function of this name ("" for none) makes of a finished run, where that is still to be
    done."""
    if name and (folder / "summary.json").is_file() and not (folder / MEASURES).is_file():
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
