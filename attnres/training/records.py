"""Read and write a run's measurements: metrics.jsonl, an optional tracker, and the types of all files of a run.

The types list the fields that a file must have when it is read. Other fields are ignored.
"""

import json
import os
import sys
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NotRequired, TypedDict

from attnres.errors import UserError, require, unknown
from attnres.files import is_same_file, write_text
from attnres.reading import parse_json, read_json, read_text
from attnres.typed import Count, Least, Misfit, Positive, checked, fit

ADVICE = "restore the file, or remove that run's folder and run it again"


class ModelPart(TypedDict):
    """The fields of `model` in a run's config.json that are read separately."""

    residual: str
    settings: NotRequired[dict[str, Any] | None]


class OptimPart(TypedDict, total=False):
    """The fields of `optim` in config.json."""

    lr: float | None


class DataPart(TypedDict, total=False):
    """The fields of `data` in config.json."""

    source: str
    column: str
    seq_len: Count


class RunConfig(TypedDict):
    """config.json of a run, of this version or an earlier one."""

    model: ModelPart
    optim: NotRequired[OptimPart]
    data: NotRequired[DataPart]
    finetune: NotRequired[dict[str, Any]]
    name: NotRequired[str | None]
    seed: NotRequired[Count | None]
    steps: NotRequired[Count | None]
    batch_size: NotRequired[Count]


class RunData(TypedDict, total=False):
    """data.json."""

    tokenizer_sha256: str
    vocab_size: Count
    splits: dict[str, dict[str, Any]]
    windows_sha256: str


class Environment(TypedDict, total=False):
    """environment.json: the machine; `resumed` lists later machines."""

    resumed: list[dict[str, Any]]
    threads: Count


class Summary(TypedDict, total=False):
    """summary.json."""

    step: Count
    tokens: Count
    val_loss: float | None
    val_se: float | None
    perplexity: float
    last_three: float
    final_loss: float
    final_se: float | None
    final_windows: Count
    in_context: float
    train_loss: float | None
    tokens_per_s: Positive
    step_s: Positive
    flops_per_token: float | None
    peak_flops: Positive | None
    peak_memory_bytes: Count
    parameters: Count
    extra_parameters: Count
    wall_s: float
    windows: Count
    traits: dict[str, bool | str | None]


class Finished(TypedDict):
    """The fields of summary.json that other runs are compared by, or that a repeated command prints."""

    step: Count
    tokens: Count
    val_loss: float
    perplexity: float
    step_s: Positive
    parameters: Count
    extra_parameters: Count
    final_loss: NotRequired[float]
    in_context: NotRequired[float]


class MetricsLine(TypedDict):
    """A line of metrics.jsonl of any kind; quantities by depth are lists."""

    kind: str
    step: Count


class TrainLine(MetricsLine, total=False):
    """A line of kind `train`."""

    tokens: Count
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: Positive
    step_s: Positive


class ValLine(MetricsLine):
    """A line of kind `val`."""

    loss: float
    windows: NotRequired[Count]
    se: NotRequired[float | None]
    in_context: NotRequired[float]


Numbers = list[float | None]


class DepthLine(MetricsLine, total=False):
    """A line of kind `depth`."""

    output_rms: Numbers
    input_rms: Numbers
    grad_rms: Numbers
    entropy: Numbers
    sharpness: Numbers


LINES: dict[str, Any] = {"train": TrainLine, "val": ValLine, "depth": DepthLine}


class Tracked(TypedDict):
    """tracker.json: the id of the run in a tracker."""

    id: str


class ArithmeticRecord(TypedDict, total=False):
    """The arithmetic of a run, as its checkpoint records it.

    Attributes:
        device: name of the CPU with the instruction set that torch uses, or of the GPU.
        threads: threads of each process, on a CPU.
        reads: the backend of depth reads, see `attnres.ops.explain`; kernels: the build of the C kernels.
        loss: how the loss is computed, if that was left to `loss_kind`.
    """

    device: str
    threads: Annotated[int, Least(1)]
    reads: str
    kernels: str | None
    loss: str
    torch: str
    transformers: str | None
    attnres: str


class Checkpointed(TypedDict):
    """state.json of a checkpoint, before its parts are restored."""

    format: str
    step: Count
    config: dict[str, Any]
    data: dict[str, Any]
    random: list[dict[str, Any]]
    progress: dict[str, Any]
    checksums: dict[str, int]
    arithmetic: NotRequired[ArithmeticRecord]


class Compared(TypedDict, total=False):
    """compare.json."""

    labels: list[str]
    seeds: list[int]
    baseline: str | None
    variants: dict[str, dict[str, Any]]
    jobs: Count
    threads: Count
    kernels: str | None


TIMES = "speed.json"
"""File in a comparison's folder with the step times of its variants, from an interleaved timing."""


class Speed(TypedDict):
    """The step times of one variant in `TIMES`."""

    median_s: Positive
    ratio: Positive
    ratio_quartiles: NotRequired[list[float]]
    times: NotRequired[list[Positive]]


class Timing(TypedDict, total=False):
    """The content of `TIMES`."""

    key: dict[str, Any]
    device: str | None
    variants: dict[str, Speed]
    plain: Speed


# ------------------------------------------------------------------ metrics.jsonl and trackers


TRACKED = "tracker.json"
"""File in the folder of a run that is sent to a tracker: see `tracked`."""


def growing(path: Path, kind: str, tail: int | None = None) -> list[tuple[int, float]]:
    """Return step and loss of the lines of one kind in a metrics.jsonl that another process is writing, without a
    half-written line; only from its last `tail` bytes, if given. Raises OSError."""
    with path.open("rb") as file:
        if tail is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
        lines = file.read().splitlines()
    losses = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["kind"] == kind:
                losses.append((int(record["step"]), float(record["loss"])))
    return losses


class Metrics:
    """The run's metrics.jsonl: one JSON object a line, each with its `kind` and `step`."""

    def __init__(self, folder: str | Path, step: int = 0, tracker: "Tracker | None" = None):
        """Open the file to continue after `step`: later lines, and a line cut short by a kill, are dropped."""
        self.path = Path(folder) / "metrics.jsonl"
        self.tracker = tracker
        write_text(
            self.path, "".join(f"{json.dumps(line)}\n" for line in read_metrics(self.path) if line["step"] <= step)
        )
        with self._no_room():
            self.file = self.path.open("a+", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a line; raises UserError if it cannot be written, ValueError for NaN and infinity."""
        line = {"kind": kind, "step": step, **values}
        text = json.dumps(line, allow_nan=False) + "\n"
        with self._no_room():
            self.file.write(text)
            self.file.flush()
        if self.tracker:
            self.tracker.log(kind, step, values)

    def in_place(self) -> bool:
        """Return whether the open file is still the file at its path."""
        return is_same_file(self.file.fileno(), self.path)

    def text(self) -> str:
        """Return the content of the file, even if it was removed."""
        with self._no_room():
            self.file.seek(0)
            return self.file.read()

    def sync(self) -> None:
        """Force the lines to disk: a checkpoint must not be newer than the metrics that lead to it."""
        with self._no_room():
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file and the tracker."""
        with suppress(OSError):  # every line was flushed when it was written, and a failure was raised then
            self.file.close()
        if self.tracker:
            self.tracker.close()

    @contextmanager
    def _no_room(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write {self.path}: {reason}; the last checkpoint is intact") from error


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; empty if the file is missing. Raises UserError for another kind of
    file."""
    if not Path(path).exists():
        return []
    lines = []
    for number, text in enumerate(read_text(path).split("\n")[:-1], start=1):  # the last line may be incomplete
        where = f"line {number} of {path}"
        lines.append(line_of(parse_json(text, where), where, ADVICE))
    return lines


def line_of(value: Any, where: str, advice: str) -> dict[str, Any]:
    """Check a line against the type of its kind, and return it. Raises UserError."""
    line: dict[str, Any] = dict(checked(value, MetricsLine, where, advice))
    return checked(line, LINES.get(line["kind"], MetricsLine), where, advice)


class Tracker:
    """Sends the lines of metrics.jsonl to trackio, wandb or tensorboard. A list becomes one value a sublayer.

    A tracker that fails after it has started is reported once on stderr and stops no run.
    """

    def __init__(self, kind: str, folder: str | Path, name: str, same: str, config: dict[str, Any], step: int = 0):
        """Open a run called `name`, or continue after `step` the one with the id `same`; UserError if the tracker is
        not installed or fails."""
        self.kind, self.failed = kind, False
        module = import_tracker(kind)
        try:
            if kind == "trackio":  # trackio identifies a run by its name
                self.run = module.init(project="attnres", name=f"{name}-{same}", config=config, resume="allow")
            elif kind == "wandb":
                self.run = module.init(
                    project="attnres", name=name, id=same, config=config, dir=str(folder), resume="allow"
                )
            else:
                self.run = module.SummaryWriter(log_dir=str(Path(folder) / "tensorboard"), purge_step=step + 1)
        # whatever the package raises: the user asked for the tracker and must learn why it fails
        except Exception as error:
            raise UserError(f"{kind} does not start ({error}): fix it or train with --track none") from error

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Send the numbers among `values` as `kind/name`, and those of lists as `kind/name/index`."""
        flat: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, list):
                flat |= {f"{kind}/{name}/{index}": part for index, part in enumerate(value) if part is not None}
            elif isinstance(value, int | float):
                flat[f"{kind}/{name}"] = value
        with self._not_fatal():
            if self.kind == "tensorboard":
                for name, value in flat.items():
                    self.run.add_scalar(name, value, step)
            else:
                self.run.log(flat, step=step)

    def close(self) -> None:
        """End the tracker's run."""
        with self._not_fatal():
            self.run.close() if self.kind == "tensorboard" else self.run.finish()

    @contextmanager
    def _not_fatal(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # whatever the package raises: metrics.jsonl has the numbers
            if not self.failed:
                print(
                    f"{self.kind} failed ({error}): the run continues, its metrics.jsonl is complete", file=sys.stderr
                )
            self.failed = True


def tracked(folder: Path) -> Tracked:
    """Return the content of tracker.json in a run's folder, or of a new one, because other runs may have its name."""
    path = folder / TRACKED
    return checked(read_json(path), Tracked, path, ADVICE) if path.exists() else {"id": uuid.uuid4().hex[:16]}


def import_tracker(kind: str) -> ModuleType:
    """Return the package of a tracker; raises UserError if the name is unknown or the package is not installed."""
    modules = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}
    if kind not in modules:
        raise unknown("tracker", kind, ("none", *modules))
    sentence = f"--track {kind} needs the package {kind}: pip install {kind}, or train with --track none"
    return require(modules[kind], sentence)


# ------------------------------------------------------------------ progress in a checkpoint


@dataclass
class RunState:
    """A run's position and measurements, saved with every checkpoint."""

    step: Count = 0
    wall_s: float = 0.0
    train_loss: float | None = None
    """Loss of the last training line."""
    val_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """Losses since the last training line."""
    times: list[float] = field(default_factory=list)
    """Seconds of the last steps, without validation, saving and the first steps."""
    last_s: float = 0.0
    """Seconds of the last step."""
    peak_memory_bytes: Count = 0
    """Largest memory of any process in any session up to the checkpoint."""


def run_state_of(state: dict[str, Any]) -> RunState:
    """Return a checkpoint's `progress`; raises ValueError if the run could not continue from it."""
    try:
        run_state: RunState = fit(state["progress"], RunState)
    except Misfit as error:
        raise ValueError(error.sentence("progress")) from error
    if run_state.step != state["step"]:
        raise ValueError("its progress is not that of its step")
    return run_state
