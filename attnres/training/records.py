"""What a run's files hold, as types that a file must fit when it is read back. Other fields are kept as they are."""

from typing import Annotated, Any, NotRequired, TypedDict

from attnres.typed import Count, Least, Positive

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
    """What of it is needed of a run that others are measured by, or that is asked for again."""

    step: Count
    tokens: Count
    val_loss: float
    perplexity: float
    step_s: Positive
    parameters: Count
    extra_parameters: Count


class Line(TypedDict):
    """A line of metrics.jsonl, of whatever kind; what is measured by depth is a list."""

    kind: str
    step: Count


class TrainLine(Line, total=False):
    """One of kind `train`."""

    tokens: Count
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: Positive
    step_s: Positive


class ValLine(Line):
    """One of kind `val`."""

    loss: float
    windows: NotRequired[Count]
    se: NotRequired[float | None]


Numbers = list[float | None]


class DepthLine(Line, total=False):
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


class Arithmetic(TypedDict, total=False):
    """What a run computes with, as its checkpoint says.

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
    arithmetic: NotRequired[Arithmetic]


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
    """Of one variant in `TIMES`."""

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
