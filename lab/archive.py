"""The finished runs of a study in one file, runs.jsonl, without weights: what a repository keeps and `--adopt` takes.

A line is a run. Of a trained one it holds config.json, data.json, environment.json and summary.json, or diverged.json,
the held-out losses (of each window at the end) and the last measurements by depth; of a computed one its function, its
arguments and what that returned. Where text and images lay is left out. A line without a run holds the step times of an
arm, speed.json.
"""

import json
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from attnres.data.sources import title_of
from attnres.errors import UserError
from attnres.files import write_json, write_text
from attnres.reading import parse_json, read_json, read_text
from attnres.text import label_and_seed
from attnres.training.records import TIMES, Environment, RunConfig, RunData, Summary, Timing, line_of, read_metrics
from attnres.training.run_folder import DIVERGED
from attnres.training.validate import read_windows, save_windows, windows_files
from attnres.typed import checked
from lab.adopt import PLACES, computed_in, runs_in
from lab.measures import MEASURES, Measures

ARCHIVE = "runs.jsonl"
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
    """Those of the held-out windows after a step, nats per token."""

    step: int
    values: list[float]


class Archived(TypedDict):
    """A line of the file; `files` are JSON files of a run, or of its arm where there is no `run`, by name."""

    arm: str
    run: NotRequired[str]
    files: dict[str, dict[str, Any]]
    metrics: NotRequired[list[dict[str, Any]]]
    windows: NotRequired[Losses]


def archive(folder: Path, names: Mapping[str, Iterable[str]]) -> str:
    """Return these runs of a study as lines of JSON, and what else its runs.jsonl has: arms and runs that are not asked
    for now, or that were not taken of it yet; `names` are those of the finished ones by arm."""
    lines = [_archived(folder / arm / name, arm) for arm in names for name in names[arm]]
    times = {arm: folder / arm / TIMES for arm in names if (folder / arm / TIMES).is_file()}
    lines += [{"arm": arm, "files": {TIMES: read_json(path)}} for arm, path in times.items()]
    written = {(line["arm"], line.get("run")) for line in lines}
    if (folder / ARCHIVE).is_file():
        lines += [one for one in archived_in(folder / ARCHIVE) if (one["arm"], one.get("run")) not in written]
    lines.sort(key=lambda line: (line["arm"], line.get("run", "")))
    return "".join(f"{json.dumps(line, sort_keys=True)}\n" for line in lines)


def is_alone(study: Path) -> bool:
    """Whether a study's folder has its runs.jsonl and no folder of a run, as in a repository."""
    return (study / ARCHIVE).is_file() and not any(path.is_dir() for path in study.iterdir())


def texts_of(study: Path) -> set[tuple[str, str]]:
    """Return the texts of a study's trained runs, those in its runs.jsonl included, as SHA-256 of the tokenizer and of
    the held-out windows. Raises UserError: a file that is damaged."""
    files = [read_json(path) for path in study.glob("*/*/data.json")]
    if is_alone(study):
        files += [line["files"].get("data.json", {}) for line in archived_in(study / ARCHIVE)]
    hashes = ((data.get("tokenizer_sha256"), data.get("windows_sha256")) for data in files)
    return {(tokenizer, windows) for tokenizer, windows in hashes if tokenizer and windows}


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
    """Folders of runs, of folders, of files that `archive` made and of studies that have such a file alone; what comes
    of files is removed afterwards.

    Raises:
        UserError: a file that is none, a folder without any run.
    """
    with ExitStack() as stack:
        folders = []
        for path in paths:
            files = [path] if path.is_file() else [one for one in sorted(path.rglob(ARCHIVE)) if is_alone(one.parent)]
            folders += [path] if path.is_dir() or not files else []
            if not files and not runs_in([path], unfinished=True) and not computed_in([path]):
                raise UserError(f"{path} has no run to adopt: expected run folders, folders of them, or {ARCHIVE}")
            for file in files:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attnres-runs-")))
                _unpack(file, folder)
                folders.append(folder)
        yield folders


@contextmanager
def restored(out: Path, study: Path | None = None) -> Generator[Path]:
    """The folder OUT of studies, or where one has no run folders, as in a repository, a copy of all with those that its
    runs.jsonl gives, which is removed afterwards. `study` is the only one whose runs are wanted; none is all. Raises
    UserError: a runs.jsonl that is none."""
    studies = sorted(path.parent for path in out.glob("*/*/study.json"))
    wanted = [one for one in studies if study in (None, one)]
    without = [one for one in wanted if is_alone(one)]
    if not without:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="attnres-studies-") as temporary:
        copy = Path(temporary)
        for one in studies:
            there = copy / one.relative_to(out)
            if one in without:
                _unpack(one / ARCHIVE, there)
                for name in ("study.json", "result.json"):
                    if (one / name).is_file():
                        shutil.copy2(one / name, there)
            else:
                there.parent.mkdir(parents=True, exist_ok=True)
                there.symlink_to(one.resolve(), target_is_directory=True)
        yield copy


def archived_in(path: Path) -> list[Archived]:
    """The lines of such a file, checked. Raises UserError."""
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
        for one in line.get("metrics", []):
            line_of(one, f"a measurement in {where}", _ADVICE)
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
