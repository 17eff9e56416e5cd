"""The results of a study so far: measurements of its finished runs, and their analysis.

OUT/PRESET/STUDY/runs.csv    every measurement of finished runs
OUT/PRESET/STUDY/runs.jsonl  the finished runs without their weights, for `--adopt`
OUT/PRESET/STUDY/result.json, study.html
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rich.console import Console

from attnres.comparison.plan import parse_variants
from attnres.errors import UserError, unknown
from attnres.figures import style
from attnres.figures.draw import write_drawn
from attnres.figures.write import Drawn, check_formats
from attnres.files import write_json, write_text
from attnres.folders import refuse_other
from attnres.progress import say
from attnres.reading import read_json
from attnres.report.page import figure_cards, framed, html_table
from attnres.stats import plain
from attnres.text import UNKNOWN, listed, number, run_name
from attnres.training.run_folder import DIVERGED, ended
from attnres.typed import checked
from lab.design import Arm, Design, KnownNoise, Measured, ResultTable, Setting, StudyResult
from lab.measures import MEASURES, rows_of, step_times, to_csv
from lab.presets import PRESETS
from lab.store import ARCHIVE, RECORD, archive, asked, asked_in, run_folders, texts_of
from lab.studies import STUDIES

FOOTER = (
    "Made by <code>python -m lab</code>. The mechanism: Attention Residuals, Kimi Team, arXiv 2603.15031. "
    "Losses depend on the tokenizer and the text: compare them only within a table."
)
RULE = (
    "Two gates for a claim: the interval excludes 0, and the sign is the same at two sizes. What holds at one size "
    "alone is a hint."
)


class Sigma(TypedDict):
    """Noise of runs of one length, from the noise study."""

    sigma: float | None
    degrees: float
    runs: NotRequired[dict[str, dict[str, float]]]


class Values(TypedDict, total=False):
    """The part of `values` in result.json that other studies read; keys are numbers of steps."""

    by_steps: dict[str, Sigma] | None
    curve: dict[str, float] | None
    control_inside: bool | None


class Known(TypedDict):
    """The part of result.json that other studies read."""

    values: Values


@dataclass(frozen=True)
class StudyOutcome:
    """A study's results so far."""

    design: Design
    setting: Setting
    measured: Measured
    result: StudyResult

    @property
    def folder(self) -> Path:
        return self.setting.folder(self.design.name)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of finished and of requested runs."""
        planned = self.measured.planned
        return sum(len(self.measured.finished[arm]) for arm in planned), sum(map(len, planned.values()))

    @property
    def not_used(self) -> str:
        """Return in words the studies whose results are not used because they have another text; empty for none."""
        names = self.measured.of_other_texts
        if not names:
            return ""
        where = f"{listed(names)} in {self.folder.parent}"
        return f"the results of {where}, none of whose runs had the tokenizer and held-out text of these"


def survey(design: Design, setting: Setting, runs: Path | None = None) -> tuple[list[Arm], Measured]:
    """Return the arms that a study requests so far, and the measurements of their finished runs, without running
    anything.

    Args:
        runs: the folder with its arms; None is the study's own.
    """
    study = setting.folder(design.name)
    folder = runs or study
    begun = frozenset(path.name for path in folder.glob("*") if path.is_dir())
    known, texts = {name: _values(setting, name) for name in ("noise", "exchange")}, texts_of(study)
    ours = {name for name in known if texts & texts_of(setting.folder(name))}
    others = tuple(name for name in known if texts and known[name] and name not in ours)
    curve = (known["exchange"].get("curve") or {}) if "exchange" in ours else {}
    measured = Measured(
        noises=_noises(known["noise"], setting) if "noise" in ours else {},
        curve={int(steps): loss for steps, loss in curve.items() if steps.isdecimal()},
        of_other_texts=others,
        begun=begun,
    )
    while True:
        arms = design.arms(setting, measured)
        if {arm.name for arm in arms} <= set(measured.planned):
            return arms, measured
        measured = _read(arms, setting, folder, measured)


def write(design: Design, setting: Setting, measured: Measured) -> StudyOutcome:
    """Analyse the measurements, and write runs.csv, runs.jsonl, result.json and study.html into the study's folder."""
    outcome = StudyOutcome(design, setting, measured, design.analyse(setting, measured))
    write_text(outcome.folder / "runs.csv", to_csv(measured.rows))
    write_text(outcome.folder / ARCHIVE, archive(outcome.folder, measured.finished))
    write_result(outcome)
    write_text(outcome.folder / "study.html", study_page(outcome))
    return outcome


def write_result(outcome: StudyOutcome) -> None:
    """Write only result.json, which can be recreated for a study without run folders (`outcome_in`)."""
    done, planned = outcome.counts
    result = {
        **asked(outcome.design, outcome.setting),
        "finished": done,
        "planned": planned,
        "answer": outcome.result.answer,
        "values": plain(outcome.result.values, digits=9),
        "tables": [dataclasses.asdict(table) for table in outcome.result.tables],
    }
    write_json(outcome.folder / "result.json", result)


def outcome_in(folder: Path) -> StudyOutcome:
    """Read a study's folder, or its runs.jsonl if its run folders are missing, and analyse it again; nothing is
    written.

    Raises:
        UserError: the folder is no study, or a file in it is damaged.
    """
    path = folder / RECORD
    record = asked_in(path)
    for what, name, known in (("study", record["study"], STUDIES), ("preset", record["preset"], PRESETS)):
        if name not in known:
            raise unknown(what, str(name), known)
    out = folder.parent.parent
    preset, seeds = PRESETS[record["preset"]], int(record["seeds"])
    column = record.get("column")
    setting = Setting(record["preset"], preset, seeds, record["source"], out, record["images"], column)
    design = STUDIES[record["study"]]
    with run_folders(folder) as runs:
        measured = survey(design, setting, runs)[1]
    return StudyOutcome(design, setting, measured, design.analyse(setting, measured))


def report(out: Path) -> Path:
    """Write OUT/report.html of all studies in OUT, analysed again, from their runs.jsonl if their run folders are
    missing.

    Raises:
        UserError: there is no study, or a folder or file of one is damaged.
    """
    folders = sorted(path.parent for path in out.glob("*/*/study.json"))
    if not folders:
        raise UserError(f"{out} holds no studies: expected OUT/PRESET/NAME/study.json, as python -m lab writes it")
    page = report_page([outcome_in(folder) for folder in folders])
    write_text(out / "report.html", page)
    return out / "report.html"


def draw(folders: Sequence[Path], out: str, formats: Sequence[str]) -> None:
    """Write the charts of studies, and `captions.md`, into `out`; each of several studies has a folder there. If a
    study's run folders are missing, its runs.jsonl replaces them.

    Raises:
        UserError: a folder is no study, `formats` has another than pdf, png and svg, or `out` holds something else.
    """
    check_formats(formats)
    into, console, drawings = refuse_other(out, "figures"), Console(), dict[str, Drawn]()
    for folder in folders:
        drawn = drawings[f"{folder.parent.name}-{folder.name}"] = Drawn()
        for chart in outcome_in(folder).result.charts:
            drawn.add(chart.name, chart.draw)
    several = len(folders) > 1
    if several:
        write_text(into / "captions.md", "")  # first: the folder is recognised by it
    files = [
        write_drawn(console, name, one, into / name if several else into, formats) for name, one in drawings.items()
    ]
    say(console, f"{sum(map(len, files))} files in {into}")


def names_of(arm: Arm) -> list[str]:
    """Return the names of an arm's runs, seed by seed."""
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
        finished[arm.name] = []
        for name in planned[arm.name]:
            run = folder / arm.name / name
            is_measured = not (arm.measure or arm.computed) or (run / MEASURES).is_file()
            if (run / DIVERGED).is_file() or (is_measured and (arm.computed is not None or ended(run))):
                finished[arm.name].append(name)
        rows += rows_of(arm, folder / arm.name, finished[arm.name])
        times |= {(arm.name, label): each for label, each in step_times(folder / arm.name).items()}
    recipe = frozenset(arm.name for arm in arms if arm.compare and setting.is_recipe(arm.compare.base))
    return dataclasses.replace(before, rows=rows, planned=planned, finished=finished, step_times=times, recipe=recipe)


def _noises(values: Values, setting: Setting) -> dict[int, KnownNoise]:
    """Return the noise of this preset and text from the noise study, by the steps of a run."""
    known = values.get("by_steps") or {}
    outside = f"The noise of {setting.name}: its control, the same function, lies OUTSIDE it."
    remark = outside if values.get("control_inside") is False else ""
    noises = {}
    for steps, noise in known.items():
        if steps.isdecimal() and noise["sigma"] is not None and noise["degrees"] > 0:
            by_label = noise.get("runs", {})
            runs = ((label, int(seed), loss) for label, each in by_label.items() for seed, loss in each.items())
            noises[int(steps)] = KnownNoise(noise["sigma"], noise["degrees"], tuple(runs), remark)
    return noises


def _values(setting: Setting, study: str) -> Values:
    path = setting.folder(study) / "result.json"
    return checked(read_json(path), Known, path, "carry that study out again")["values"] if path.is_file() else {}


def study_page(outcome: StudyOutcome) -> str:
    """Return the page of one study, as HTML."""
    title = f"{outcome.design.title} ({outcome.setting.name})"
    return framed(title, _kicker(outcome), outcome.result.answer, _sections(outcome), FOOTER)


def report_page(outcomes: Sequence[StudyOutcome]) -> str:
    """Return the page of several studies: a table of them, questions answered at several sizes, then each study."""
    rows = [
        [outcome.design.title, outcome.setting.name, "{} of {}".format(*outcome.counts), outcome.result.answer]
        for outcome in outcomes
    ]
    head = ["study", "preset", "runs", "answer"]
    table = _card(html_table(head, rows, "worded", [_anchor(outcome) for outcome in outcomes]))
    parts = [f"<section>\n<h2>All studies</h2>\n{table}</section>"]
    parts += map(_section, at_sizes(outcomes))
    for outcome in outcomes:
        body = f'<p class="lead">{escape(outcome.result.answer)}</p>' + "\n".join(_sections(outcome))
        title = f"{escape(outcome.design.title)} · {escape(outcome.setting.name)}"
        parts.append(f'<section id="{_anchor(outcome)}">\n<h2>{title}</h2>\n{body}\n</section>')
    finished = sum(outcome.counts[0] == outcome.counts[1] for outcome in outcomes)
    headline = f"{finished} of {len(outcomes)} are complete"
    return framed("Studies of depth reads", "The laboratory", headline, parts, FOOTER)


def _kicker(outcome: StudyOutcome) -> str:
    done, planned = outcome.counts
    setting = outcome.setting
    source = setting.source or setting.config().data.source
    return f"{outcome.design.title}  ·  preset {setting.name}, data {source}, {done} of {planned} runs"


def _sections(outcome: StudyOutcome) -> list[str]:
    design, result = outcome.design, outcome.result
    parts = [*map(_section, result.tables)]
    if result.charts:
        with style.style():
            plots = [chart.draw() for chart in result.charts]
        parts.append(f"<section>\n{figure_cards(plots, f'{_anchor(outcome)}-')}\n</section>")
    done, planned = outcome.counts
    known = outcome.measured.noises
    floor = ", ".join(
        f"sigma {one.sigma:.4f} at {steps:,} steps ({len(one.runs)} runs)" for steps, one in known.items()
    )
    if known and not outcome.measured.recipe:
        floor = f"as the tables say; the preset's recipe, which none of these runs is, has {floor}"
    floor = " ".join([floor, *dict.fromkeys(one.remark for one in known.values() if one.remark)])
    facts = [
        ["what is done", design.about],
        ["published", design.published],
        ["runs", f"{done} of {planned} that were asked for so far"],
        ["noise floor", floor or "python -m lab noise: not run at this preset and text"],
        *([["not used", outcome.not_used]] if outcome.not_used else []),
        ["command", command(outcome)],
    ]
    how = _card(html_table([], facts, "plain"))
    parts.append(f"<section>\n<h2>How</h2>\n{how}\n</section>")
    return parts


def command(outcome: StudyOutcome) -> str:
    """Return the command that runs the study again."""
    setting = outcome.setting
    words = ["python -m lab", outcome.design.name, "--preset", setting.name, "--seeds", str(setting.seeds)]
    places = {"--source": setting.source, "--column": setting.column, "--images": setting.images}
    return " ".join([*words, *(word for flag, value in places.items() if value for word in (flag, value))])


def _anchor(outcome: StudyOutcome) -> str:
    return f"{outcome.setting.name}-{outcome.design.name}"


def _section(table: ResultTable) -> str:
    kind = "worded" if table.head[-1] == "published" else "numbers"
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    body = _card(html_table(table.head, table.rows, kind)) + (f'<ul class="notes">{notes}</ul>' if notes else "")
    return f"<section>\n<h2>{escape(table.title)}</h2>\n{body}\n</section>"


def _card(table: str) -> str:
    return f'<div class="card scroll">{table}</div>\n'


def at_sizes(outcomes: Sequence[StudyOutcome]) -> list[ResultTable]:
    """Return a table for each study that ran at several presets: each difference at each size, and a joint statement.

    Differences belong to one question if they have the same baseline, arm and name. Two presets with the same model are
    one size, represented by the one with more steps.
    """
    by_study: dict[str, dict[str, Mapping[str, Any]]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: list(PRESETS).index(outcome.setting.name)):
        by_study.setdefault(outcome.design.title, {})[outcome.setting.name] = outcome.result.values
    tables = []
    for title, of_presets in by_study.items():
        presets = {name: values for name, values in of_presets.items() if name == _longest(name, of_presets)}
        answers: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for preset, values in presets.items():
            for where, contrast in contrasts(values):
                baseline = contrast["baseline"]
                question = f"{where.removesuffix(baseline).strip()} minus {baseline}".strip()
                for label, answer in contrast["variants"].items():
                    answers.setdefault((label, question), {})[preset] = answer
        shared = {question: each for question, each in answers.items() if len(each) > 1}
        if shared:
            head = ["variant", "difference", *presets, "together"]
            rows = [
                [*question, *(_cell(each.get(preset)) for preset in presets), together(list(each.values()))]
                for question, each in shared.items()
            ]
            tables.append(ResultTable(f"{title} · several sizes", head, rows, [RULE]))
    return tables


def _longest(name: str, presets: Iterable[str]) -> str:
    """Return the preset with the most steps among those with the same model as `name`."""
    size = PRESETS[name].train["model"]
    return max((one for one in presets if PRESETS[one].train["model"] == size), key=lambda one: PRESETS[one].steps)


def contrasts(values: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the comparisons with a baseline in the values of a result, each with the path of names to it."""
    if "baseline" in values and "variants" in values:
        yield where, values
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from contrasts(value, f"{where} {name}".strip())


def together(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return a joint statement about a question's answers at several sizes.

    >>> clear, open_ = {"excludes_0": True, "difference": -0.04}, {"excludes_0": False, "difference": -0.01}
    >>> together([clear, clear]), together([clear, open_])
    ('below 0 at 2 sizes', 'below 0 at one, the same sign at the others')
    >>> together([clear, clear, open_ | {"difference": 0.01}])
    'below 0 at 2 sizes, not of one sign at the others'
    >>> together([open_, open_]), together([clear, open_ | {"difference": 0.01}])
    ('includes 0', 'below 0 at one, not of one sign')
    """
    above = [one["difference"] > 0 for one in answers if one["excludes_0"]]
    if not above:
        return "includes 0"
    if len(set(above)) > 1:
        return "of both signs"
    side, signs = "above 0" if above[0] else "below 0", {one["difference"] > 0 for one in answers}
    if len(above) > 1:
        return f"{side} at {len(above)} sizes{', not of one sign at the others' * (len(signs) > 1)}"
    return f"{side} at one, {'the same sign at the others' if len(signs) == 1 else 'not of one sign'}"


def _cell(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return UNKNOWN
    low, high = answer["low"], answer["high"]
    bounds = f" ({number(low, 4, signed=True)} to {number(high, 4, signed=True)})" if low is not None else ""
    return f"{number(answer['difference'], 4, signed=True)}{bounds}, {answer['runs']} runs"
