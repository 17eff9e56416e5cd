"""What a layout costs before anything is started: memory of a rank, bytes of a step, and a model of its time.

Vectors that cross and slots that a rank keeps come from the very table that the runtime follows (`crossings`); the rest
are counts and a model, with its assumptions in `ASSUMPTIONS`.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from attnres.errors import UserError, unknown
from attnres.models import DepthMixin
from attnres.models.flops import PEAKS, step_flops
from attnres.scale.crossings import Crossing, Cut, crossings, most_kept, vectors
from attnres.scale.pipeline import check_schedule, plan_cut, schedule_named
from attnres.scale.tensor import check_slices, sliced_weights


class Device(NamedTuple):
    """A kind of GPU: bytes of memory, bytes a second to its neighbours in a node and to those in another, GPUs a node.

    From data sheets: NVLink's two directions halved, one 400 Gbit/s adapter a GPU.
    """

    memory: float
    inside: float
    outside: float
    node: int = 8


DEVICES = {
    "h100": Device(80e9, 450e9, 50e9),
    "h200": Device(141e9, 450e9, 50e9),
    "b200": Device(192e9, 900e9, 50e9),
    "a100": Device(80e9, 300e9, 25e9),
}

EFFICIENCY = 0.4
"""Of a device's peak that matrix products reach in the middle of a step."""

ASSUMPTIONS = (
    "parameters, gradients and AdamW's two moments are fp32 (16 bytes a parameter), matrix products bf16 at "
    f"{EFFICIENCY:.0%} of the peak, backward twice the forward",
    "activations: inputs of matrix products, and attention's queries, keys and values, in bf16, with two fp32 vectors "
    "a sublayer for the stream; nothing is made again",
    "a stage's transfers overlap with its work and cost what is left of them; gradients of shares are sent once a "
    "step, parameters gathered twice (once in stages), within a node where pp and dp leave room",
    "tokens of slices (tp) are gathered and added up twice a sublayer, forward and back, in bf16 within a node, and "
    "nothing of that overlaps",
    "bubble (P-1)/(V M + P-1); zero-bubble schedules are taken as without one at M >= 2 P",
)


@dataclass(frozen=True)
class Load:
    """What is trained, and how: M micro-batches of `batch` sequences of `context` tokens a step on each copy."""

    gpus: int
    device: str = "h100"
    context: int = 4096
    batch: int = 1
    microbatches: int = 16
    itemsize: int = 2
    """Bytes of a number that matrix products take in and keep."""


@dataclass(frozen=True)
class Planned:
    """One layout: bytes are of the fullest rank, seconds of a step.

    Attributes:
        states: bytes of parameters, gradients and moments.
        activations: bytes for the backward of the micro-batches in flight.
        sources: bytes of what they received from other stages.
        buffers: bytes of the largest receive.
        fits: the sum leaves a twelfth of the device free.
        vectors, vectors_naive: that cross, a token, with slots kept and without.
        kept: vectors a token that a rank keeps for its later stages (aliases: no bytes of their own).
        stage_bytes, share_bytes, slice_bytes: a step's, that a rank sends: between stages; for parameters and
            gradients; of tokens before and behind layers in slices.
        bubble: share of a step in which a rank waits.
    """

    dp: int
    shard: int
    pp: int
    tp: int
    virtual: int
    schedule: str
    layers: tuple[int, ...]
    states: float
    activations: float
    sources: float
    buffers: float
    memory: float
    fits: bool
    vectors: int
    vectors_naive: int
    kept: int
    stage_bytes: float
    share_bytes: float
    slice_bytes: float
    bubble: float
    seconds: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)


def plan(
    model: DepthMixin,
    load: Load,
    *,
    dp: int | None = None,
    shard: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    schedule: str | None = None,
    costs: tuple[list[float], float] | None = None,
) -> list[Planned]:
    """Return the layouts that these numbers leave open, those that fit first, the fastest first.

    Args:
        model: on the meta device: only its shapes are looked at.
        costs: by which stages are balanced, see `plan_cut`.

    Raises:
        UserError: numbers that cannot be, or a device that is not in `DEVICES`.
    """
    if load.device not in DEVICES:
        raise unknown("gpu", load.device, DEVICES)
    rows = [
        planned
        for layout in _layouts(load, len(model.depth_layers), dp, shard, pp, tp, schedule)
        if (planned := _planned(model, load, layout, costs)) is not None
    ]
    if not rows:
        held = {"dp": dp, "shard": shard, "pp": pp, "tp": tp, "schedule": schedule}
        table = ", ".join(f"{name} {value or 'any'}" for name, value in held.items())
        raise UserError(
            f"no layout of {load.gpus} GPUs has {table} with {load.microbatches} micro-batches and "
            f"{len(model.depth_layers)} layers"
        )
    return sorted(rows, key=lambda row: (not row.fits, -row.tokens_per_s))


class _Layout(NamedTuple):
    dp: int
    shard: int
    pp: int
    tp: int
    virtual: int
    schedule: str


def _layouts(
    load: Load, layers: int, dp: int | None, shard: int | None, pp: int | None, tp: int | None, schedule: str | None
) -> Iterator[_Layout]:
    """Give the layouts whose processes are the GPUs; slices within a node, and not of stages."""
    gpus, node = load.gpus, DEVICES[load.device].node
    for stages in _divisors(gpus) if pp is None else [pp]:
        widths = [width for width in _divisors(gpus // stages) if width <= node] if tp is None else [tp]
        for slices in widths if stages == 1 else [width for width in widths if width == 1]:
            rest = gpus // stages // slices
            for shares in _divisors(rest) if shard is None else [shard]:
                copies = rest // shares
                if stages * slices * shares * copies != gpus or (dp is not None and dp != copies):
                    continue
                names = ["1f1b", "interleaved"] if schedule is None else [schedule]
                for name in names[: 1 if stages == 1 else None]:
                    virtual = 2 if schedule_named(name).several and stages > 1 else 1
                    if stages * virtual <= layers:
                        yield _Layout(copies, shares, stages, slices, virtual, name)


def _divisors(number: int) -> list[int]:
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def _planned(model: DepthMixin, load: Load, layout: _Layout, costs: tuple[list[float], float] | None) -> Planned | None:
    dp, shard, pp, tp, virtual, schedule = layout
    try:
        if pp > 1:
            check_schedule(schedule, pp, virtual, load.microbatches)
        if tp > 1:
            check_slices(model, tp)
    except UserError:
        return None
    cut = plan_cut(model, pp, schedule, virtual, costs=costs)
    residual = model.residual.itself()
    table, naive = crossings(residual, cut), crossings(residual, cut, cached=False)
    device, width = DEVICES[load.device], model.config.hidden_size
    tokens = load.batch * load.context
    vector = tokens * width * 4  # bytes of one a micro-batch: the stream is fp32 under autocast

    of_residual = sum(p.numel() for p in residual.parameters())
    sliced = sum(weight.numel() for _, _, weight in sliced_weights(model)) if tp > 1 else 0
    owned = {rank: count - sliced * (1 - 1 / tp) for rank, count in _parameters(model, cut).items()}
    states = max(owned.values()) * 16 / shard + of_residual * 16
    held = in_flight(schedule, pp, virtual, load.microbatches)
    activations = max(_activations(model, cut, load, rank, tp) * held[rank] / virtual for rank in range(pp))
    sources = max(_received(table, cut, rank) * held[rank] / virtual for rank in range(pp)) * vector
    buffers = max((crossing.vectors for crossing in table), default=0) * vector
    memory = states + activations + sources + buffers  # what a rank keeps are aliases of what it received or made

    step_tokens = tokens * load.microbatches * dp * shard
    work = step_flops(model, load.context) * step_tokens / load.gpus / (PEAKS[load.device.upper()][0] * EFFICIENCY)
    bubble = 0.0
    if pp > 1 and not (schedule in ("zbv", "interleaved_zero_bubble", "dualpipev") and load.microbatches >= 2 * pp):
        bubble = (pp - 1) / (virtual * load.microbatches + pp - 1)
    stage_bytes = 2 * vectors(table) * vector * load.microbatches / pp  # of a rank, forward and back
    mean = sum(owned.values()) / len(owned)
    gathered = (1 if pp > 1 else 2) * load.microbatches ** (pp == 1)
    share_bytes = mean * 4 * (shard - 1) / shard * (gathered + 1)
    share_bytes += 8 * (mean / shard * (dp - 1) / dp + of_residual * (1 - 1 / (dp * shard)))
    layers, sublayers = len(model.depth_layers), len(residual.sublayers)
    passes = 2 * 2 * layers * sublayers * load.microbatches  # gathered and added up, forward and back
    slice_bytes = passes * (1 - 1 / tp) * tokens * width * load.itemsize
    slice_bytes += 8 * (mean - sliced / tp) * (1 - 1 / tp) / shard + (8 * of_residual * (1 - 1 / tp) if tp > 1 else 0.0)
    link = device.inside if shard * pp * tp <= device.node else device.outside
    between = device.inside if load.gpus <= device.node else device.outside
    sending = max(0.0, stage_bytes / between - work) + max(0.0, share_bytes / link - work) + slice_bytes / device.inside
    seconds = work / (1 - bubble) + sending
    return Planned(
        dp=dp,
        shard=shard,
        pp=pp,
        tp=tp,
        virtual=virtual,
        schedule=schedule if pp > 1 else "none",
        layers=tuple((stop - start) // sublayers for start, stop in pairwise(cut.bounds)),
        states=states,
        activations=activations,
        sources=sources,
        buffers=buffers,
        memory=memory,
        fits=memory < 0.92 * device.memory,
        vectors=vectors(table),
        vectors_naive=vectors(naive),
        kept=max(most_kept(table, cut).values()),
        stage_bytes=stage_bytes,
        share_bytes=share_bytes,
        slice_bytes=slice_bytes,
        bubble=bubble,
        seconds=seconds,
        tokens_per_s=step_tokens / seconds,
    )


def in_flight(schedule: str, ranks: int, virtual: int, microbatches: int) -> list[int]:
    """Return how many micro-batches' stages each rank holds at most: forward passes made whose backward is to come."""
    if schedule in ("gpipe", "looped_bfs"):
        return [virtual * microbatches] * ranks
    if virtual == 1:
        return [min(microbatches, ranks - rank) for rank in range(ranks)]
    return [min(virtual * microbatches, ranks * (virtual + 1) - 2 * rank - 1) for rank in range(ranks)]


def _parameters(model: DepthMixin, cut: Cut) -> dict[int, float]:
    """Return the number of parameters of each rank but the residual's, which are whole on every one."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.depth_layers]
    per_layer = len(model.residual.itself().sublayers)
    ends = {0: _numel(model.get_input_embeddings())}
    tied = cut.stages == 1 and getattr(model.config, "tie_word_embeddings", False)
    norm = _numel(model.depth_base.get_submodule(model.family.final_norm))
    last = norm + (0 if tied else _numel(model.get_output_embeddings()))
    ends[cut.stages - 1] = ends.get(cut.stages - 1, 0) + last
    owned = dict.fromkeys(cut.ranks, 0.0)
    for stage, rank in enumerate(cut.ranks):
        start, stop = (bound // per_layer for bound in cut.bounds[stage : stage + 2])
        owned[rank] += sum(layers[start:stop]) + ends.get(stage, 0)
    return owned


def _numel(module: Any) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _activations(model: DepthMixin, cut: Cut, load: Load, rank: int, tp: int) -> float:
    """Return bytes that the backward of one micro-batch needs on a rank, in all of its stages.

    In slices what goes into a layer's attention and MLP is of all tokens, everything else of a share.
    """
    sublayers = len(model.residual.itself().sublayers)
    tokens, width = load.batch * load.context, model.config.hidden_size
    total = 0.0
    for stage, owner in enumerate(cut.ranks):
        if owner != rank:
            continue
        start, stop = (bound // sublayers for bound in cut.bounds[stage : stage + 2])
        for layer in list(model.depth_layers)[start:stop]:
            entering = 0 if tp == 1 else sublayers * width * (1 - 1 / tp)
            kept = _kept_by_products(layer, model.config) / tp + entering
            total += tokens * (load.itemsize * kept + 2 * sublayers * width * 4 / tp)
        if stage == cut.stages - 1:
            total += tokens * width * 4 / tp
    return total


def _kept_by_products(layer: nn.Module, config: Any) -> float:
    """Return numbers a token that a layer's matrix products keep: distinct inputs, and what is made of them."""
    kept, active = 0.0, getattr(config, "num_experts_per_tok", 1)
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2 and name.endswith("weight"):
            kept += max(parameter.shape)
        elif parameter.ndim == 3:
            kept += max(parameter.shape[1:]) * (active if isinstance(active, int) else sum(active) / len(active))
    return kept


def _received(table: tuple[Crossing, ...], cut: Cut, rank: int) -> int:
    """Return vectors a token that a rank receives for one micro-batch, in all of its stages."""
    return sum(crossing.vectors for stage, crossing in enumerate(table) if cut.ranks[stage + 1] == rank)
