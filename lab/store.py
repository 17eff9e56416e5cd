"""The store of runs: where they are, which of them a study may reuse, and runs.jsonl.

A run is identified by its key and by the digest of its data. The key is a hash of the configuration fields that affect
the result (for a computed run the function and its arguments) and of the version class of the code. Runs with equal key
and digest are the same run, in whatever arm, study or folder.

runs.jsonl has the finished runs of a study without their weights, to be stored in a repository and read by `--adopt`. A
line is a run. For a trained run it holds config.json, data.json, environment.json and summary.json, or diverged.json,
the held-out losses (of each window at the end) and the last measurements by depth; for a computed run its function,
arguments and result. Paths of text and images are left out. A line without a run holds the step times of an arm,
speed.json.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

import attnres
from attnres.comparison.plan import ComparisonPlan
from attnres.data.sources import title_of
from attnres.errors import UserError
from attnres.files import LOCK, is_half_written, locked, replaced_folder, write_json, write_text
from attnres.reading import parse_json, read_json, read_text
from attnres.text import label_and_seed
from attnres.training.checkpoint import kept, reconfigure
from attnres.training.config import TrainConfig, deciding, to_dict, unused
from attnres.training.records import (
    ADVICE,
    TIMES,
    Environment,
    RunConfig,
    RunData,
    Summary,
    Timing,
    line_of,
    read_metrics,
)
from attnres.training.run_folder import DIVERGED, ended
from attnres.training.validate import read_windows, save_windows, windows_files
from attnres.typed import checked
from lab.design import Arm, Design, Measured, Setting
from lab.measures import MEASURES, Measures, measures_of

ARCHIVE, RECORD, VERSION = "runs.jsonl", "study.json", 1
CHANGED_AT = ((0, 1),)
"""Versions of attnres that changed the result of some configuration: versions between two of these form one class."""
PLACES = ("images",)
"""Arguments of a computed run that are paths: only the last part of the path counts."""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hashable(value: Any) -> Any:
    """Return a value in a form that is equal for equal values: 1 as 1.0, a tuple as a list."""
    if isinstance(value, list | tuple):
        return [_hashable(part) for part in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def run_key(config: Mapping[str, Any], version: str | None = None) -> str:
    """Return the key of a trained run.

    Args:
        config: a `to_dict` form, of this or an earlier version.
        version: version of attnres; None is the present one.
    """
    fields = deciding(config)
    left_out = {"data.source", *unused(fields)}  # the digest identifies the text
    if fields["finetune.init_from"]:  # these belong to the start model; an earlier version stored them
        left_out |= {"data.tokenizer", *(name for name in fields if name.split(".")[:2] == ["model", "size"])}
    named = {name: _hashable(value) for name, value in fields.items() if name not in left_out and value is not None}
    numbers = tuple(map(int, re.findall(r"\d+", version or attnres.__version__)[:2]))
    version_class = sum(numbers >= first for first in CHANGED_AT)
    return _digest([named, version_class])


def call_key(function: str, arguments: Mapping[str, Any]) -> str:
    """Return the key of a computed run."""
    values = {name: Path(value).name if name in PLACES and value else value for name, value in arguments.items()}
    return _digest([function, {name: _hashable(value) for name, value in values.items()}])


@dataclass(frozen=True)
class StoredRun:
    """A run on the disk.

    Attributes:
        key: `run_key` or `call_key`. config: configuration of a trained run. data: the digest of its data.json, ""
            without one.
    """

    folder: Path
    key: str
    config: Mapping[str, Any] | None = None
    data: str = ""

    @property
    def ended(self) -> bool:
        return self.config is None or ended(self.folder)

    def serves(self, arm: Arm) -> bool:
        """Return whether an arm may reuse the run: it needs weights if other arms start from it, or if the arm still
        has to measure it."""
        if (self.folder / "model").is_dir():
            return True
        return not arm.started_from and (not arm.measure or not self.ended or (self.folder / MEASURES).is_file())


def find_runs(folders: Iterable[Path], *, unfinished: bool = False) -> list[StoredRun]:
    """Return the finished runs in these folders, up to four levels down (a study, or OUT of studies).

    Args:
        unfinished: also return unfinished runs with a checkpoint, after the finished ones.

    Raises:
        UserError: a missing folder, or a damaged file.
    """
    runs = dict[Path, StoredRun]()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder: give one with the run folders to adopt, or a file runs.jsonl")
        for name in ("summary.json", DIVERGED, MEASURES, *(["checkpoint"] if unfinished else [])):
            for path in sorted(path for depth in range(5) for path in folder.glob("*/" * depth + name)):
                if path.parent in runs or any(map(is_half_written, path.relative_to(folder).parts)):
                    continue
                if (run := _stored(path.parent)) is not None:
                    runs[path.parent] = run
    return list(runs.values())


def attnres_version(folder: Path) -> str | None:
    """Return the version of attnres with which a run was begun; None if it is not recorded."""
    path = folder / "environment.json"
    return read_json(path).get("attnres") if path.is_file() else None


def _stored(folder: Path) -> StoredRun | None:
    """Return the run in a folder; None if there is none."""
    path, data = folder / "config.json", folder / "data.json"
    if path.is_file():
        config = dict(checked(read_json(path), RunConfig, path, ADVICE))
        key = run_key(config, attnres_version(folder))
        return StoredRun(folder, key, config, _digest(read_json(data)) if data.is_file() else "")
    measures = measures_of(folder)
    if "arguments" not in measures:
        return None
    return StoredRun(folder, call_key(measures.get("function", ""), measures["arguments"]))


def same_runs(stored: Iterable[StoredRun], run: TrainConfig, arm: Arm) -> list[StoredRun]:
    """Return the stored trained runs that are the same as a run of this arm, if their data are the same; those with the
    kept checkpoints first, and among them the finished ones."""
    key, folder = run_key(to_dict(run)), Path(run.out or ".").resolve()
    same = [one for one in stored if one.key == key and one.folder.resolve() != folder and one.serves(arm)]
    return sorted(same, key=lambda one: (not all(kept(one.folder, at).is_dir() for at in run.keep_at), not one.ended))


def adopt(plan: ComparisonPlan, data: dict[str, Any], stored: Sequence[StoredRun], arm: Arm) -> list[str]:
    """Copy stored runs with an arm's keys and data into its folders. The checkpoint of a finished run is not copied,
    because only a continued run needs it; kept checkpoints are.

    Returns:
        The names of the copied runs.

    Raises:
        UserError: a process is training such a run.
    """
    names, digest = [], _digest(data)
    for name, run in plan.runs.items():
        folder = Path(run.out or ".")
        if folder.exists():
            continue
        there = next((one.folder for one in same_runs(stored, run, arm) if one.data == digest), None)
        if there is None:
            continue
        left_out = [".*", *([] if run.keep_at else ["kept"]), *(["checkpoint"] if ended(there) else [])]
        with nullcontext() if ended(there) else locked(there), replaced_folder(folder) as temporary:
            shutil.copytree(there, temporary, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
            reconfigure(temporary, to_dict(run))
        names.append(name)
    return names


def refuse_other_text(plan: ComparisonPlan, data: dict[str, Any], own: Iterable[StoredRun]) -> None:
    """Refuse `data` if a study's own runs with the plan's settings and a text of that name had other data: all arms of
    a study must have the same text. Raises UserError."""

    def named(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, "source": Path(settings.get("source") or "").name}

    ours, digest = to_dict(plan.first)["data"], _digest(data)
    for run in own:
        if run.config is not None and run.data not in ("", digest) and named(run.config["data"]) == named(ours):
            raise UserError(
                f"{run.folder} was trained on another text than {ours['source']} now has: give the same --source, or "
                "choose another --out"
            )


def texts_of(study: Path) -> set[str]:
    """Return the digests of the texts of a study's trained runs, with those in its runs.jsonl. Raises UserError for a
    damaged file."""
    files = [read_json(path) for path in study.glob("*/*/data.json")]
    if is_alone(study):
        files += [line["files"]["data.json"] for line in archived_in(study / ARCHIVE) if "data.json" in line["files"]]
    return set(map(_digest, files))


@contextmanager
def takeable(folder: Path, adopted: Sequence[Path], archived: Sequence[tuple[str, str]]) -> Generator[list[StoredRun]]:
    """Give the runs that a study in `folder` may copy: those in `adopted`, those that only its runs.jsonl has
    (`archived`), and finished runs of the neighbouring studies."""
    siblings = [path for path in sorted(folder.parent.glob("*")) if path != folder and (path / RECORD).is_file()]
    alone = [path / ARCHIVE for path in siblings if archived_alone(path)]
    with unpacked([folder / ARCHIVE] if archived else []) as own, unpacked(alone) as theirs:
        yield [*find_runs([*adopted, *own], unfinished=True), *find_runs([*siblings, *theirs])]


# ------------------------------------------------------------------ study.json


class StudyRequest(TypedDict):
    """study.json: the study, its preset, seeds and texts."""

    version: int
    study: str
    preset: str
    seeds: int
    source: str | None
    column: NotRequired[str | None]
    images: str | None


def asked(design: Design, setting: Setting) -> StudyRequest:
    """Return the content of study.json for a study at this setting."""
    return {
        "version": VERSION,
        "study": design.name,
        "preset": setting.name,
        "seeds": setting.seeds,
        "source": setting.source,
        "column": setting.column,
        "images": setting.images,
    }


def asked_in(path: Path) -> StudyRequest:
    """Read a study.json. Raises UserError, also for another version."""
    record = checked(read_json(path), StudyRequest, path, "carry the study out again")
    if record["version"] != VERSION:
        raise UserError(f"{path} is of version {record['version']}, expected {VERSION}: carry the study out again")
    return record


def refuse_other_material(folder: Path, design: Design, setting: Setting) -> None:
    """Refuse to continue with a text or images of another name than those of finished runs, if the study uses them; for
    equal names the store compares the text itself. Raises UserError."""
    path = folder / RECORD
    if not path.is_file() or not (is_alone(folder) or any(map(has_ended, folder.glob("*/*")))):
        return
    before, text = asked_in(path), setting.config().data.source
    compared = [arm.compare for arm in design.arms(setting, Measured()) if arm.compare is not None]
    names = ["source", "column"] if any(one.base.data.source == text for one in compared) else []
    names += ["images"] if setting.images is not None and before["images"] is not None else []
    for name in names:
        there, here = before.get(name), getattr(setting, name)
        if Path(there or "").name != Path(here or "").name:
            raise UserError(
                f"the study in {folder} was run with --{name} {there or 'of the preset'}, not "
                f"{here or 'of the preset'}: give the same, or choose another --out"
            )


@dataclass
class Record:
    """study.json of a running study."""

    path: Path
    content: StudyRequest
    written: bool = False

    def write(self) -> None:
        """Write the file, once all checks have passed."""
        write_json(self.path, self.content)
        self.written = True


@contextmanager
def recorded(folder: Path, content: StudyRequest) -> Generator[Record]:
    """Give the record of a study. A new folder gets the file at once, to be recognised by; if a check fails before the
    record is written, the folder is restored."""
    before = {path.name for path in folder.iterdir()}
    record = Record(folder / RECORD, content)
    if not record.path.is_file():
        write_json(record.path, content)
    try:
        yield record
    except UserError:
        for path in folder.iterdir() if not record.written else ():
            if path.name not in before | {LOCK}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def has_ended(run: Path) -> bool:
    """Return whether a run, trained or computed, is finished."""
    return ended(run) or (run / MEASURES).is_file()


# ------------------------------------------------------------------ runs.jsonl

_FILES: dict[str, Any] = {
    "config.json": RunConfig,
    "data.json": RunData,
    "environment.json": Environment,
    "summary.json": Summary,
    DIVERGED: dict[str, Any],
    MEASURES: Measures,
    TIMES: Timing,
}
_ADVICE = "take it from where it was written again"


class Losses(TypedDict):
    """Losses of the held-out windows after a step, nats per token."""

    step: int
    values: list[float]


class Archived(TypedDict):
    """A line of the file; `files` are JSON files of a run by name, or of its arm if there is no `run`."""

    arm: str
    run: NotRequired[str]
    files: dict[str, dict[str, Any]]
    metrics: NotRequired[list[dict[str, Any]]]
    windows: NotRequired[Losses]


def archive(folder: Path, names: Mapping[str, Iterable[str]]) -> str:
    """Return these runs of a study as lines of JSON, with the lines of its runs.jsonl for other runs; `names` are the
    finished runs by arm."""
    lines = [_archived(folder / arm / name, arm) for arm in names for name in names[arm]]
    times = {arm: folder / arm / TIMES for arm in names if (folder / arm / TIMES).is_file()}
    lines += [{"arm": arm, "files": {TIMES: read_json(path)}} for arm, path in times.items()]
    written = {(line["arm"], line.get("run")) for line in lines}
    if (folder / ARCHIVE).is_file():
        lines += [one for one in archived_in(folder / ARCHIVE) if (one["arm"], one.get("run")) not in written]
    lines.sort(key=lambda line: (line["arm"], line.get("run", "")))
    return "".join(f"{json.dumps(line, sort_keys=True)}\n" for line in lines)


def is_alone(study: Path) -> bool:
    """Return whether a study's folder has its runs.jsonl and no run folder, as in a repository."""
    return (study / ARCHIVE).is_file() and not any(path.is_dir() for path in study.iterdir())


def archived_alone(study: Path) -> list[tuple[str, str]]:
    """Return arm and name of the runs that only a study's runs.jsonl has."""
    lines = archived_in(study / ARCHIVE) if (study / ARCHIVE).is_file() else []
    names = [(line["arm"], line["run"]) for line in lines if "run" in line]
    return [(arm, run) for arm, run in names if not (study / arm / run).exists()]


def _archived(folder: Path, arm: str) -> Archived:
    files = {name: read_json(folder / name) for name in _FILES if (folder / name).is_file()}
    run: Archived = {"arm": arm, "run": folder.name, "files": files}
    if arguments := files.get(MEASURES, {}).get("arguments"):
        arguments |= {key: Path(arguments[key]).name for key in PLACES if arguments.get(key)}
    if config := files.get("config.json"):
        config |= {"out": None, "data": config["data"] | {"source": title_of(config["data"]["source"])}}
        lines = read_metrics(folder / "metrics.jsonl")
        last = {line["kind"]: line for line in lines}
        run["metrics"] = [line for line in lines if line["kind"] == "val" or line is last[line["kind"]]]
        if windows := windows_files(folder):
            run["windows"] = {"step": max(windows), "values": read_windows(windows[max(windows)]).tolist()}
    return run


@contextmanager
def unpacked(paths: Iterable[Path]) -> Generator[list[Path]]:
    """Give folders with run folders: given folders themselves, and temporary folders, removed afterwards, for files
    written by `archive` and for studies that have only such a file.

    Raises:
        UserError: another kind of file, or a folder without any run.
    """
    with ExitStack() as stack:
        folders = []
        for path in paths:
            files = [path] if path.is_file() else [one for one in sorted(path.rglob(ARCHIVE)) if is_alone(one.parent)]
            folders += [path] if path.is_dir() or not files else []
            if not files and not find_runs([path], unfinished=True):
                raise UserError(f"{path} has no run to adopt: expected run folders, folders of them, or {ARCHIVE}")
            for file in files:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attnres-runs-")))
                _unpack(file, folder)
                folders.append(folder)
        yield folders


@contextmanager
def run_folders(study: Path) -> Generator[Path]:
    """Give the folder with the arms of a study: its own, or if it has only a runs.jsonl a temporary one made from it.
    Raises UserError for an invalid runs.jsonl."""
    if not is_alone(study):
        yield study
        return
    with tempfile.TemporaryDirectory(prefix="attnres-study-") as temporary:
        _unpack(study / ARCHIVE, Path(temporary))
        yield Path(temporary)


def archived_in(path: Path) -> list[Archived]:
    """Return the checked lines of a runs.jsonl. Raises UserError."""
    lines = []
    for number, text in enumerate(read_text(path).splitlines(), 1):
        where = f"line {number} of {path}"
        line = checked(parse_json(text, where), Archived, where, _ADVICE)
        names = [line["arm"], line["run"]] if "run" in line else [line["arm"]]
        for name in (*names, *line["files"]):
            if not name or name != Path(name).name or name.startswith("."):
                raise UserError(f"{where} names '{name}', which is no name of a file or folder: {_ADVICE}")
        for name in set(line["files"]) & set(_FILES):
            checked(line["files"][name], _FILES[name], f"{name} in {where}", _ADVICE)
        for metrics in line.get("metrics", []):
            line_of(metrics, f"a measurement in {where}", _ADVICE)
        if "run" not in line and set(line["files"]) != {TIMES}:
            raise UserError(f"{where} has no run: expected LABEL-seedK, or none and {TIMES} alone; {_ADVICE}")
        if "run" in line and label_and_seed(line["run"]) is None:
            raise UserError(f"{where} has the run '{line['run']}': expected LABEL-seedK; {_ADVICE}")
        if "summary.json" in line["files"] and "metrics" not in line:
            raise UserError(f"{where} has no metrics of a trained run: {_ADVICE}")
        lines.append(line)
    return lines


def _unpack(path: Path, folder: Path) -> None:
    lines = archived_in(path)
    if not lines:
        raise UserError(f"{path} is empty: expected a run a line, as a study writes them to {ARCHIVE}")
    for line in lines:
        there = folder / line["arm"] / line.get("run", "")
        there.mkdir(parents=True, exist_ok=True)
        for name, values in line["files"].items():
            write_json(there / name, values)
        if "metrics" in line:
            write_text(there / "metrics.jsonl", "".join(f"{json.dumps(one)}\n" for one in line["metrics"]))
        if "windows" in line:
            save_windows(there, line["windows"]["step"], np.array(line["windows"]["values"]))
