"""Read and write what a run measures: metrics.jsonl, an optional tracker, and the types of all files of a run.

The types say what a file must hold when it is read back. Fields that they do not name are left as they are.
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
    """`model` of a run's config.json, as far as it is looked at by itself."""

    residual: str
    settings: NotRequired[dict[str, Any] | None]


class OptimPart(TypedDict, total=False):
    """`optim` there."""

    lr: float | None


class DataPart(TypedDict, total=False):
    """`data` there."""

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
    """environment.json: the machine; `resumed` are later ones."""

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
    """A line of metrics.jsonl of any kind; what is measured by depth is a list."""

    kind: str
    step: Count


class TrainLine(MetricsLine, total=False):
    """One of kind `train`."""

    tokens: Count
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: Positive
    step_s: Positive


class ValLine(MetricsLine):
    """One of kind `val`."""

    loss: float
    windows: NotRequired[Count]
    se: NotRequired[float | None]
    in_context: NotRequired[float]


Numbers = list[float | None]


class DepthLine(MetricsLine, total=False):
    """One of kind `depth`."""

    output_rms: Numbers
    input_rms: Numbers
    grad_rms: Numbers
    entropy: Numbers
    sharpness: Numbers


LINES: dict[str, Any] = {"train": TrainLine, "val": ValLine, "depth": DepthLine}


class Tracked(TypedDict):
    """tracker.json: the id by which a tracker knows a run again."""

    id: str


class ArithmeticRecord(TypedDict, total=False):
    """The arithmetic of a run, as its checkpoint records it.

    Attributes:
        device: name of the processor with the instructions that torch uses, or of the GPU.
        threads: of each process, on a CPU.
        reads: the backend of depth reads, see `attnres.ops.explain`; kernels: which build of the C kernels that is.
        loss: how the loss is made, where that was left to `loss_kind`.
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
"""Of a comparison's folder: its variants' steps, timed in turn."""


class Speed(TypedDict):
    """The step times of one variant in `TIMES`."""

    median_s: Positive
    ratio: Positive
    ratio_quartiles: NotRequired[list[float]]
    times: NotRequired[list[Positive]]


class Timing(TypedDict, total=False):
    """`TIMES`."""

    key: dict[str, Any]
    device: str | None
    variants: dict[str, Speed]
    plain: Speed


# ------------------------------------------------------------------ metrics.jsonl and trackers


TRACKED = "tracker.json"
"""In the folder of a run that is sent to a tracker: see `tracked`."""


def growing(path: Path, kind: str, tail: int | None = None) -> list[tuple[int, float]]:
    """Step and loss of the lines of one kind in a metrics.jsonl that another process is writing, a line that is half
    written left out; of its last `tail` bytes, if given. Raises OSError."""
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
        """Open the file to go on after `step`: lines past it, and a line cut short by a kill, are dropped."""
        self.path = Path(folder) / "metrics.jsonl"
        self.tracker = tracker
        write_text(
            self.path, "".join(f"{json.dumps(line)}\n" for line in read_metrics(self.path) if line["step"] <= step)
        )
        with self._no_room():
            self.file = self.path.open("a+", encoding="utf-8")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a line; raises UserError when it cannot be written, ValueError for NaN and infinity."""
        line = {"kind": kind, "step": step, **values}
        text = json.dumps(line, allow_nan=False) + "\n"
        with self._no_room():
            self.file.write(text)
            self.file.flush()
        if self.tracker:
            self.tracker.log(kind, step, values)

    def in_place(self) -> bool:
        """Return whether the file is still the one of its name."""
        return is_same_file(self.file.fileno(), self.path)

    def text(self) -> str:
        """Return the content of the file, though it may have been removed."""
        with self._no_room():
            self.file.seek(0)
            return self.file.read()

    def sync(self) -> None:
        """Force the lines to disk: a checkpoint must not be newer than the metrics that lead to it."""
        with self._no_room():
            os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file and the tracker."""
        with suppress(OSError):  # every line was flushed when it was written, and a failure was raised there
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
    """Return the complete lines of a metrics file; a missing file has none. Raises UserError for one that is not
    ours."""
    if not Path(path).exists():
        return []
    lines = []
    for number, text in enumerate(read_text(path).split("\n")[:-1], start=1):  # the last one may have been cut short
        where = f"line {number} of {path}"
        lines.append(line_of(parse_json(text, where), where, ADVICE))
    return lines


def line_of(value: Any, where: str, advice: str) -> dict[str, Any]:
    """Return a line as its kind has to be. Raises UserError."""
    line: dict[str, Any] = dict(checked(value, MetricsLine, where, advice))
    return checked(line, LINES.get(line["kind"], MetricsLine), where, advice)


class Tracker:
    """Sends the lines of metrics.jsonl to trackio, wandb or tensorboard. A list becomes one value a sublayer.

    A tracker that fails after it has started is reported once on stderr and stops no run.
    """

    def __init__(self, kind: str, folder: str | Path, name: str, same: str, config: dict[str, Any], step: int = 0):
        """Open a run called `name`, or go on after `step` with the one that has the id `same`; UserError if the tracker
        is not installed or fails."""
        self.kind, self.failed = kind, False
        module = import_tracker(kind)
        try:
            if kind == "trackio":  # which knows a run by its name
                self.run = module.init(project="attnres", name=f"{name}-{same}", config=config, resume="allow")
            elif kind == "wandb":
                self.run = module.init(
                    project="attnres", name=name, id=same, config=config, dir=str(folder), resume="allow"
                )
            else:
                self.run = module.SummaryWriter(log_dir=str(Path(folder) / "tensorboard"), purge_step=step + 1)
        except Exception as error:  # whatever the package raises, the user asked for it and must hear why
            raise UserError(f"{kind} does not start ({error}): mend it or train with --track none") from error

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Send the numbers among `values` as `kind/name`, those of lists as `kind/name/index`."""
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
                print(f"{self.kind} failed ({error}): the run goes on, its metrics.jsonl is complete", file=sys.stderr)
            self.failed = True


def tracked(folder: Path) -> Tracked:
    """Return the content of tracker.json in a run's folder, or of a new one: other runs may have its name."""
    path = folder / TRACKED
    return checked(read_json(path), Tracked, path, ADVICE) if path.exists() else {"id": uuid.uuid4().hex[:16]}


def import_tracker(kind: str) -> ModuleType:
    """Return the package of a tracker; raises UserError if there is none of that name or it is not installed."""
    modules = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}
    if kind not in modules:
        raise unknown("tracker", kind, ("none", *modules))
    sentence = f"--track {kind} needs the package {kind}: pip install {kind}, or train with --track none"
    return require(modules[kind], sentence)


# ------------------------------------------------------------------ progress in a checkpoint


@dataclass
class RunState:
    """Where a run is and what it measured; saved with every checkpoint."""

    step: Count = 0
    wall_s: float = 0.0
    train_loss: float | None = None
    """Of the last training line."""
    val_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """Since the last training line."""
    times: list[float] = field(default_factory=list)
    """Seconds of the last steps, without validation, saving and the first steps."""
    last_s: float = 0.0
    """Seconds of the last step."""
    peak_memory_bytes: Count = 0
    """The most that any process took in any session up to the checkpoint."""


def run_state_of(state: dict[str, Any]) -> RunState:
    """Return a checkpoint's `progress`; one that the run could not go on from raises ValueError."""
    try:
        run_state: RunState = fit(state["progress"], RunState)
    except Misfit as error:
        raise ValueError(error.sentence("progress")) from error
    if run_state.step != state["step"]:
        raise ValueError("its progress is not that of its step")
    return run_state
