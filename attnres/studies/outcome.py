"""A study as far as it came: what its finished runs gave, and what is made of that.

OUT/PRESET/STUDY/runs.csv    every measurement of finished runs
OUT/PRESET/STUDY/runs.jsonl  the finished runs without their weights, for `--adopt`
OUT/PRESET/STUDY/result.json, study.html
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from attnres.errors import UserError, unknown
from attnres.files import write_json, write_text
from attnres.reading import read_json
from attnres.run_names import run_name
from attnres.stats import plain
from attnres.studies.analyses.noise import Noise
from attnres.studies.archive import ARCHIVE, archive, restored, texts_of
from attnres.studies.begin import RECORD, asked, asked_in
from attnres.studies.design import Arm, Design, Measured, Result, Setting
from attnres.studies.lab import STUDIES
from attnres.studies.presets import PRESETS
from attnres.studies.rows import MEASURES, rows_of, step_times, to_csv
from attnres.studies.variants import parse_variants
from attnres.text import listed
from attnres.training.run_folder import DIVERGED, ended
from attnres.typed import checked


class Sigma(TypedDict):
    """The noise of runs of a length, as the study of noise has it."""

    sigma: float | None
    degrees: int


class Values(TypedDict, total=False):
    """`values` of result.json, as far as other studies read it; keys are numbers of steps."""

    by_steps: dict[str, Sigma] | None
    curve: dict[str, float] | None
    control_inside: bool | None


class Known(TypedDict):
    """result.json, as far as other studies read it."""

    values: Values


@dataclass(frozen=True)
class Outcome:
    """A study as far as it came."""

    design: Design
    setting: Setting
    measured: Measured
    result: Result

    @property
    def folder(self) -> Path:
        return self.setting.folder(self.design.name)

    @property
    def counts(self) -> tuple[int, int]:
        """Finished runs, and those that were asked for so far."""
        planned = self.measured.planned
        return sum(len(self.measured.finished[arm]) for arm in planned), sum(map(len, planned.values()))

    @property
    def not_used(self) -> str:
        """The studies whose results are left out because they are of another text, in words; "" for none."""
        names = self.measured.of_other_texts
        if not names:
            return ""
        where = f"{listed(names)} in {self.folder.parent}"
        return f"the results of {where}, none of whose runs had the tokenizer and held-out text of these"


def survey(design: Design, setting: Setting) -> tuple[list[Arm], Measured]:
    """The arms that a study asks for by now, and what their finished runs gave. Nothing is run."""
    folder = setting.folder(design.name)
    begun = frozenset(path.name for path in folder.glob("*") if path.is_dir())
    known, texts = {name: _values(setting, name) for name in ("noise", "exchange")}, texts_of(folder)
    ours = {name for name in known if texts & texts_of(setting.folder(name))}
    others = tuple(name for name in known if texts and known[name] and name not in ours)
    measured = Measured(
        noises=_noises(known["noise"], setting) if "noise" in ours else {},
        curve=_curve(known["exchange"]) if "exchange" in ours else {},
        of_other_texts=others,
        begun=begun,
    )
    while True:
        arms = design.arms(setting, measured)
        if {arm.name for arm in arms} <= set(measured.planned):
            return arms, measured
        measured = _read(arms, setting, folder, measured)


def write(design: Design, setting: Setting, measured: Measured) -> Outcome:
    """Analyse what there is, and write runs.csv, runs.jsonl, result.json and study.html into the study's folder."""
    from attnres.studies.page import study_page

    outcome = Outcome(design, setting, measured, design.analyse(setting, measured))
    done, planned = outcome.counts
    result = {
        **asked(design, setting),
        "finished": done,
        "planned": planned,
        "verdict": outcome.result.verdict,
        "values": plain(outcome.result.values, digits=9),
        "tables": [dataclasses.asdict(table) for table in outcome.result.tables],
    }
    write_text(outcome.folder / "runs.csv", to_csv(measured.rows))
    write_text(outcome.folder / ARCHIVE, archive(outcome.folder, measured.finished))
    write_json(outcome.folder / "result.json", result)
    write_text(outcome.folder / "study.html", study_page(outcome))
    return outcome


def outcome_in(folder: Path) -> Outcome:
    """Read a study's folder and analyse it again; nothing is run or written. Raises UserError if it is none."""
    path = folder / RECORD
    record = asked_in(path)
    for what, name, known in (("study", record["study"], STUDIES), ("preset", record["preset"], PRESETS)):
        if name not in known:
            raise unknown(what, str(name), known)
    out = folder.parent.parent
    setting = Setting(
        record["preset"],
        PRESETS[record["preset"]],
        int(record["seeds"]),
        record["source"],
        out,
        record["images"],
        record.get("column"),
    )
    design = STUDIES[record["study"]]
    measured = survey(design, setting)[1]
    return Outcome(design, setting, measured, design.analyse(setting, measured))


def report(out: Path) -> Path:
    """Write OUT/report.html of all studies in OUT, analysed again, from their runs.jsonl where their runs are gone.

    Raises:
        UserError: there are none, or a folder or file of one is damaged.
    """
    from attnres.studies.page import report_page

    with restored(out) as studies:
        folders = sorted(path.parent for path in studies.glob("*/*/study.json"))
        if not folders:
            raise UserError(f"{out} holds no studies: expected OUT/PRESET/NAME/study.json, as attnres study writes it")
        page = report_page([outcome_in(folder) for folder in folders])
    write_text(out / "report.html", page)
    return out / "report.html"


def names_of(arm: Arm) -> list[str]:
    """The names of an arm's runs, seed by seed."""
    if arm.computed is not None:
        return list(arm.computed.runs)
    assert arm.compare is not None
    labels = [variant.label for variant in parse_variants(arm.compare.variants, arm.compare.lrs)]
    return [run_name(label, seed) for seed in arm.compare.seeds for label in labels]


def _read(arms: Sequence[Arm], setting: Setting, folder: Path, before: Measured) -> Measured:
    rows, times = [], dict[tuple[str, str], list[float]]()
    planned, finished = dict[str, list[str]](), dict[str, list[str]]()
    for arm in arms:
        planned[arm.name] = names_of(arm)
        finished[arm.name] = [name for name in planned[arm.name] if _is_finished(arm, folder / arm.name / name)]
        rows += rows_of(arm, folder / arm.name, finished[arm.name])
        times |= {(arm.name, label): each for label, each in step_times(folder / arm.name).items()}
    recipe = frozenset(arm.name for arm in arms if arm.compare and setting.is_recipe(arm.compare.base))
    return dataclasses.replace(before, rows=rows, planned=planned, finished=finished, step_times=times, recipe=recipe)


def _is_finished(arm: Arm, run: Path) -> bool:
    """Whether a run of an arm has given all that it will: what was measured of it, or that it diverged."""
    if arm.computed is not None:
        return (run / MEASURES).is_file()
    return (run / DIVERGED).is_file() or (ended(run) and (not arm.measure or (run / MEASURES).is_file()))


def _noises(values: Values, setting: Setting) -> dict[int, Noise]:
    """The noise of this preset and text as its study has it, by the steps of a run."""
    known = values.get("by_steps") or {}
    outside = ", whose control, the same function, is OUTSIDE it" if values.get("control_inside") is False else ""
    source = f"the study of noise at {setting.name}{outside}"
    return {
        int(n): Noise(one["sigma"], one["degrees"], source)
        for n, one in known.items()
        if n.isdecimal() and one["sigma"] is not None and one["degrees"] > 0
    }


def _curve(values: Values) -> dict[int, float]:
    return {int(steps): loss for steps, loss in (values.get("curve") or {}).items() if steps.isdecimal()}


def _values(setting: Setting, study: str) -> Values:
    path = setting.folder(study) / "result.json"
    return checked(read_json(path), Known, path, "carry that study out again")["values"] if path.is_file() else {}
