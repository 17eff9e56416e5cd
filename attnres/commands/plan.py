"""`attnres plan`: estimate what layouts of GPUs cost, before anything is started."""

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from attnres.errors import UserError, unknown
from attnres.files import user_path
from attnres.flags import NAMED_SIZES, Settings, Size, parse

if TYPE_CHECKING:
    from attnres.scale.plan import Planned

MOST = 10**9
"""Largest number of GPUs, tokens, sequences or words that is accepted."""
MICROBATCHES = 16
"""Micro-batches of a step on each replica by default."""


@dataclass
class PlanOptions:
    """Print layouts of GPUs for a model: memory of the fullest rank, bytes of a step, bubble, and a model of its time.

    Nothing is allocated: the model is built of shapes. Vectors that cross between stages are those that `attnres train`
    sends, from the same table.
    """

    model: Annotated[
        tyro.conf.Positional[Size],
        tyro.conf.arg(
            metavar="MODEL",
            help=f"{NAMED_SIZES}; or the folder, run or hub name of a model, of which config.json is read.",
        ),
    ] = "nano"
    gpus: int = 8
    """Number of GPUs."""
    residual: str | None = None
    """How sublayers read earlier outputs; none is block, or what the model of a folder has."""
    settings: Settings = field(default_factory=dict)
    """Settings of the residual, e.g. block_size=6."""
    vocab_size: int | None = None
    """Vocabulary size of a named size; none is 65536."""
    dp: int | None = None
    """Replicas (data parallel); none tries all."""
    shard: int | None = None
    """Processes over which every parameter is sharded (FSDP); none tries all."""
    pp: int | None = None
    """Pipeline stages; none tries all."""
    tp: int | None = None
    """Tensor parallel size; none tries all within a node."""
    ep: int | None = None
    """Expert parallel size, a part of shard; none tries all."""
    schedule: str | None = None
    """Pipeline schedule; none tries 1f1b and interleaved."""
    microbatches: int | None = None
    """Micro-batches of a step on each replica; none is 16, or with --pp the next number that the schedule takes."""
    batch: int = 1
    """Sequences of a micro-batch."""
    context: int = 4096
    """Tokens of a sequence."""
    gpu: Literal["a100", "b200", "h100", "h200"] = "h100"
    """GPU model."""
    gradient_checkpointing: Literal["none", "layer", "sublayer", "reads"] = "none"
    """What is recomputed in the backward pass instead of stored, as for attnres train."""
    rows: int = 8
    """Layouts to show; 0 shows all."""
    measure: bool = False
    """Balance stages by the time that each layer and the head take here, which builds the model and runs it."""
    json: bool = False
    """Print JSON."""


def _model(options: PlanOptions, device: str) -> Any:
    """Return the model with randomly drawn weights, or with shapes alone on the meta device. Raises UserError."""
    import torch

    from attnres.models import build
    from attnres.models.build import SIZES, build_shapes

    size = options.model or "nano"
    if isinstance(size, str) and size not in SIZES:
        if not user_path(size).exists() and difflib.get_close_matches(size.lower(), SIZES, cutoff=0.8):
            raise unknown("size", size, SIZES)  # a name on the hub is looked up otherwise
        if options.vocab_size is not None:
            raise UserError(f"vocab_size is given and {size} is a model, which has a vocabulary already: leave it out")
        return build_shapes(size, options.residual, options.settings, device)
    vocabulary = options.vocab_size or 65536
    positions, settings = options.context, options.settings
    with torch.device(device):
        return build(
            size, options.residual or "block", vocab_size=vocabulary, max_positions=positions, settings=settings
        )


def _measured(options: PlanOptions) -> tuple[list[float], float]:
    """Measure the seconds of each layer and of the head on this machine's device, and return them."""
    from attnres.ops.devices import pick_device
    from attnres.scale.cut import layer_times
    from attnres.training.environment import has_bf16, tune
    from attnres.training.objective import precision

    device = pick_device("auto")
    model = _model(options, str(device))
    tune(model, device, options.context)
    with precision("bf16" if has_bf16(device) else "fp32", device):  # the precision that training chooses
        return layer_times(model, batch=options.batch, tokens=options.context)


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    options = parse("plan", PlanOptions, arguments, doing="counting layouts")
    numbers = ("gpus", "vocab_size", "dp", "shard", "pp", "tp", "ep", "microbatches", "batch", "context")
    for name in numbers:
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST:
            raise UserError(f"{name} is {value}: it must be a number from 1 to {MOST:,}")
    if options.rows < 0:
        raise UserError(f"rows is {options.rows}: expected a number, or 0 for all layouts")

    import json

    from attnres.scale.plan import ASSUMPTIONS, Load, beside_standard, plan

    costs = _measured(options) if options.measure else None
    model = _model(options, "meta")
    checkpointing = options.gradient_checkpointing
    load = Load(
        options.gpus, options.gpu, options.context, options.batch, _microbatches(options), checkpointing=checkpointing
    )
    held = {name: getattr(options, name) for name in ("dp", "shard", "pp", "tp", "ep", "schedule")}
    rows = plan(model, load, **held, costs=costs)
    shown = rows[: options.rows or None]
    standard = None if model.config.residual == "standard" else beside_standard(model, load, rows[0], costs)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.json:
        layouts = [row.to_dict() for row in shown]
        record = {"parameters": parameters, "layouts": layouts, "standard": standard and standard.to_dict()}
        print(json.dumps(record | {"assumptions": ASSUMPTIONS}, indent=2))
        return

    billions = parameters / 1e9
    size = f"{billions:,.0f}" if billions >= 100 else f"{billions:.3g}"
    title = f"{size} billion parameters on {options.gpus} {options.gpu}, residual {model.config.residual}"
    _print_table(shown, model.config.residual, standard, title)
    if costs is not None:
        layers, head = costs
        print(
            f"Measured here, forward: a layer {min(layers) * 1e3:.3g} to {max(layers) * 1e3:.3g} ms, the head with the "
            f"loss {head * 1e3:.3g} ms."
        )
    staged = [row for row in shown if row.pp > 1]
    for pp, schedule, virtual, layers in dict.fromkeys(
        (row.pp, row.schedule, row.virtual, row.layers) for row in staged
    ):
        stages = f"--pp {pp} --pp-schedule {schedule}" + f" --pp-virtual {virtual}" * (virtual > 1)
        print(f"{stages}: --pp-layers {' '.join(map(str, layers))}")
    if standard is not None:
        slower = shown[0].seconds / standard.seconds - 1
        print(
            f"The last row has the first layout; with {model.config.residual} a step takes {slower:.1%} longer in this "
            "model of fused kernels at full bandwidth. Measured steps took more: docs/results/cost.md"
        )
    print("Memory of the fullest rank; bytes that one rank sends, or its reads move, in a step; the time is a model:")
    for assumption in ASSUMPTIONS:
        print(f"- {assumption}")


def _microbatches(options: PlanOptions) -> int:
    """Return --microbatches; by default 16, or with --pp the next number that the schedule accepts."""
    from attnres.scale.pipeline import fitting_microbatches, stages_each

    if options.microbatches is not None:
        return options.microbatches
    if options.pp is None or options.pp == 1:
        return MICROBATCHES
    schedule = options.schedule or "1f1b"
    return fitting_microbatches(schedule, options.pp, stages_each(schedule), at_least=MICROBATCHES)


def _print_table(rows: "list[Planned]", residual: str, standard: "Planned | None", title: str) -> None:
    """Print a line for each layout and one for the first layout with the standard residual, then memory and traffic by
    part."""
    from rich.table import Table

    from attnres.progress import wide
    from attnres.text import duration, memory

    answers = Table(
        "residual", "dp x shard x pp x tp, ep", "schedule", "memory", "fits", "bubble", "step", "tokens/s", title=title
    )
    parts = Table("residual", "sharded states", "gathered", "activations", "stage buffers", "vectors sent (uncached)")
    for head in ("pp bytes", "dp, shard bytes", "tp bytes", "ep bytes", "read bytes"):
        parts.add_column(head)
    for name, row in [*((residual, row) for row in rows), *([("standard", standard)] if standard else [])]:
        stages = f"{row.schedule}{f' V={row.virtual}' if row.virtual > 1 else ''}" if row.pp > 1 else "-"
        answers.add_row(
            *(name, f"{row.dp} x {row.shard} x {row.pp} x {row.tp}, {row.ep}", stages, memory(row.memory)),
            *("yes" if row.fits else "no", f"{row.bubble:.0%}", duration(row.seconds), f"{row.tokens_per_s:,.0f}"),
        )
        parts.add_row(
            name,
            *map(memory, (row.states, row.whole, row.activations, row.sources + row.buffers)),
            f"{row.vectors} ({row.vectors_naive})" if row.pp > 1 else "-",
            *map(memory, (row.stage_bytes, row.share_bytes, row.slice_bytes, row.expert_bytes)),
            "not counted" if row.read_bytes is None else memory(row.read_bytes),
        )
    wide().print(answers)
    print("The same rows by part:")
    wide().print(parts)
