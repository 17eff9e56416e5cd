"""Read run folders: the files that a training run wrote, finished or not.

A run folder holds `config.json`, `data.json`, `environment.json`, `metrics.jsonl`, `val/STEP.npy` (mean loss of each
held-out window), `inspection.json` and, once finished, `summary.json`.
A comparison is a folder of run folders, named `LABEL-seedK`, with `compare.json` and optionally `speed.json`.

An unfinished run is read up to its last record. A folder that is no run, or is damaged, raises `UserError`.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnres.errors import UserError
from attnres.inspect.inspection import Inspection
from attnres.reading import read_json
from attnres.residuals import Traits, traits_of
from attnres.text import label_and_seed, run_name
from attnres.training.config import with_all_settings
from attnres.training.records import (
    ADVICE,
    TIMES,
    Compared,
    Environment,
    RunConfig,
    RunData,
    Summary,
    Timing,
    read_metrics,
)
from attnres.training.validate import read_windows, windows_files
from attnres.typed import checked


@dataclass(frozen=True)
class Run:
    """One training run up to its last record. Records are sorted by step, one for each step."""

    folder: Path
    label: str
    seed: int
    config: dict[str, Any]
    # source and checksums of the tokens; empty for runs of earlier versions
    data: dict[str, Any] = field(default_factory=dict)
    # the first, and those of resumptions on other machines
    environments: list[dict[str, Any]] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    val: list[dict[str, Any]] = field(default_factory=list)
    depth: list[dict[str, Any]] = field(default_factory=list)
    windows: dict[int, np.ndarray] = field(default_factory=dict)  # step -> (windows,) nats per token
    inspection: Inspection | None = None
    unread: str = ""  # why `inspection` is None although there is a file
    summary: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def residual(self) -> str:
        return str(self.config.get("model", {}).get("residual", self.label))

    @property
    def traits(self) -> Traits:
        """Return the traits of its mechanism, as stored in the run if it has finished."""
        with suppress(TypeError):  # the file holds something that a run does not write
            return traits_of(self.residual, (self.summary or {}).get("traits"))
        return traits_of(self.residual)

    @property
    def lr(self) -> float | None:
        lr = self.config.get("optim", {}).get("lr")
        return None if lr is None else float(lr)

    @property
    def steps(self) -> int | None:
        steps = self.config.get("steps")
        return None if steps is None else int(steps)

    @property
    def last_step(self) -> int:
        """Return the last step with any record."""
        return max((records[-1]["step"] for records in (self.train, self.val) if records), default=0)

    def tokens_at(self, step: int) -> float:
        """Return the tokens seen by `step`; the step itself if the run does not record tokens."""
        for record in reversed(self.train):
            if record.get("tokens") and record["step"]:
                return step * record["tokens"] / record["step"]
        return float(step)


@dataclass(frozen=True)
class Study:
    """Runs to compare: the labels in order, the baseline, and an interleaved timing if there is one."""

    title: str
    labels: list[str]
    runs: list[Run]
    baseline: str | None
    speed: dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)  # planned runs without files on the disk

    def of(self, label: str) -> list[Run]:
        """Return the runs of one label, by seed."""
        return sorted((run for run in self.runs if run.label == label), key=lambda run: run.seed)

    def counted(self, label: str) -> list[Run]:
        """Return the runs that means are taken over: the finished ones, or all if none has finished."""
        runs = self.of(label)
        return [run for run in runs if run.finished] or runs


def load_run(folder: Path | str) -> Run:
    """Read one run folder. Raises `UserError` if it is not one, or if a file in it is damaged.

    >>> load_run("runs/demo/block-seed0").windows  # doctest: +SKIP
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run folder, or a folder of runs as `attnres compare` makes")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    path = folder / "config.json"
    fields = read_json(path)
    if isinstance(fields, dict) and "model_type" in fields:
        raise UserError(
            f"{folder} holds a model and no run: expected what attnres train or attnres compare has written"
        )
    config: Any = with_all_settings(checked(fields, RunConfig, path, ADVICE))
    seed = int(config.get("seed") or 0)
    # the folder may have been renamed: its present name comes first
    names = (folder.resolve().name, str(config.get("name") or ""))
    named = (label_and_seed(name) for name in names)
    labels = [one[0] for one in named if one is not None and one[1] == seed]
    label = labels[0] if labels else names[1] or names[0]
    by_kind: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "val": {}, "depth": {}}
    for line in read_metrics(folder / "metrics.jsonl"):  # a resumed run repeats steps: the later line counts
        if line["kind"] in by_kind:
            by_kind[line["kind"]][line["step"]] = line
    records = {kind: [lines[step] for step in sorted(lines)] for kind, lines in by_kind.items()}
    first = _read(folder / "environment.json", Environment)
    resumed = first.pop("resumed", [])
    inspection, unread = _read_inspection(folder / "inspection.json")
    return Run(
        folder=folder,
        label=label,
        seed=seed,
        config=config,
        data=_read(folder / "data.json", RunData),
        environments=[part for part in (first, *resumed) if part],
        **records,
        windows={step: read_windows(path) for step, path in windows_files(folder).items()},
        inspection=inspection,
        unread=unread,
        summary=_read(folder / "summary.json", Summary) or None,
    )


def load_study(*folders: Path | str) -> Study:
    """Read run folders, folders of runs, or several of either, as one study.

    >>> load_study("runs/demo").labels  # doctest: +SKIP
    ['standard', 'block', 'full', 'rescaled']

    If two folders have runs of the same label and seed, labels get the folder's name: `first/block`, `second/block`.

    Raises:
        UserError: a folder without a run, a damaged file, or a run that is given twice.
    """
    if not folders:
        raise UserError("no folder given; give a run folder, or a folder of runs as `attnres compare` makes")
    parts = [_load_folder(Path(folder)) for folder in folders]
    if len(parts) == 1:
        return parts[0]
    places = [run.folder.resolve() for part in parts for run in part.runs]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise UserError(f"the run in {twice} is given twice: give each run, or the folder that it is in, once")
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    keys = [(run.label, run.seed) for part in parts for run in part.runs]
    if len(set(keys)) < len(keys):
        parts = [_prefixed(part, name) for part, name in zip(parts, names, strict=True)]
    return Study(
        title=", ".join(names),
        labels=list(dict.fromkeys(label for part in parts for label in part.labels)),
        runs=[run for part in parts for run in part.runs],
        baseline=next((part.baseline for part in parts if part.baseline is not None), None),
        missing=[name for part in parts for name in part.missing],
    )


def _load_folder(folder: Path) -> Study:
    if (folder / "config.json").is_file() or not folder.is_dir():
        run = load_run(folder)
        return Study(run.label, [run.label], [run], baseline=_baseline([run], [run.label], None))
    runs = _told_apart([load_run(child) for child in sorted(folder.iterdir()) if (child / "config.json").is_file()])
    if not runs:
        raise UserError(f"{folder} holds no runs: expected run folders such as standard-seed0, each with a config.json")
    plan = _read(folder / "compare.json", Compared)
    labels = list(dict.fromkeys(run.label for run in runs))
    planned = [label for label in plan.get("labels", []) if label in labels]
    # Without a plan: standard first, then its control, then the rest by name.
    first = {run.label: run for run in reversed(runs)}
    ranks = {
        label: 0 if run.residual == "standard" else 1 if run.traits.is_control else 2 for label, run in first.items()
    }
    unplanned = sorted((label for label in labels if label not in planned), key=lambda label: (ranks[label], label))
    present = {(run.label, run.seed) for run in runs}
    return Study(
        title=folder.resolve().name,
        labels=planned + unplanned,
        runs=runs,
        baseline=_baseline(runs, planned + unplanned, plan.get("baseline")),
        speed=_read(folder / TIMES, Timing) or None,
        missing=[
            run_name(label, seed)
            for label in plan.get("labels", [])
            for seed in plan.get("seeds", [])
            if (label, seed) not in present
        ],
    )


def _told_apart(runs: list[Run]) -> list[Run]:
    """Return the runs of a folder with copies told apart: a copy of a run (such as NAME.saved) is no further seed, so
    it is labelled by its folder's name, unless that is the run's own name."""
    keys = [(run.label, run.seed) for run in runs]
    return [
        run if keys.count(key) == 1 or run.folder.name == run_name(*key) else replace(run, label=run.folder.name)
        for run, key in zip(runs, keys, strict=True)
    ]


def _baseline(runs: list[Run], labels: list[str], planned: str | None) -> str | None:
    """Return the label that the others are compared with: the planned one, else the standard residual's."""
    if planned in labels:
        return planned
    return next((label for label in labels for run in runs if run.label == label and run.residual == "standard"), None)


def _prefixed(study: Study, name: str) -> Study:
    """Return a study with `name`/ before its labels."""
    return Study(
        title=study.title,
        labels=[f"{name}/{label}" for label in study.labels],
        runs=[replace(run, label=f"{name}/{run.label}") for run in study.runs],
        baseline=None if study.baseline is None else f"{name}/{study.baseline}",
        missing=[f"{name}/{run}" for run in study.missing],
    )


def _read(path: Path, kind: Any) -> dict[str, Any]:
    """Read a JSON object of this kind; empty if there is no such file. Raises UserError."""
    return checked(read_json(path), kind, path, ADVICE) if path.exists() else {}


def _read_inspection(path: Path) -> tuple[Inspection | None, str]:
    """Return a run's inspection, or None and the reason if it cannot be read; a report works without it."""
    try:
        return Inspection.load(path) if path.is_file() else None, ""
    except UserError as error:
        return None, str(error)
