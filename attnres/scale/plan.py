"""What a layout costs before anything is started: memory of a rank, bytes of a step, and a model of its time.

Vectors that cross and slots that a rank keeps come from the very table that the runtime follows (`crossings`); the rest
are counts and a model, with its assumptions in `ASSUMPTIONS`.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnres.errors import UserError, unknown
from attnres.models import DepthMixin
from attnres.models.step_cost import PEAKS, share_of_token, step_flops, step_vectors
from attnres.scale.activation_bytes import Activations
from attnres.scale.cut import PipelineCut, crossings, layers_of, most_kept, vectors
from attnres.scale.experts import check_experts, stacked_experts
from attnres.scale.pipeline import check_schedule, plan_cut, stages_each
from attnres.scale.tensor import check_slices, sliced_weights


class Device(NamedTuple):
    """A kind of GPU: bytes of memory, bytes a second from and to that memory, to its neighbours in a node and to those
    in another, GPUs a node.

    From data sheets (SXM modules): NVLink's two directions halved, one 400 Gbit/s adapter a GPU.
    """

    memory: float
    bandwidth: float
    inside: float
    outside: float
    node: int = 8


DEVICES = {
    "h100": Device(80e9, 3.35e12, 450e9, 50e9),
    "h200": Device(141e9, 4.8e12, 450e9, 50e9),
    "b200": Device(192e9, 8e12, 900e9, 50e9),
    "a100": Device(80e9, 2.039e12, 300e9, 25e9),
}
STREAM = 4
"""Bytes of a number of the residual stream, which is fp32 under bf16 autocast."""

EFFICIENCY = 0.4
"""Of a device's peak that matrix products reach in the middle of a step."""

ASSUMPTIONS = (
    "parameters, gradients and AdamW's two moments are fp32 (16 bytes a parameter), matrix products bf16 at "
    f"{EFFICIENCY:.0%} of the peak, backward twice the forward",
    "reads: the depth reads of standard, block and full, with norms and residual additions, take their memory traffic, "
    "forward and backward, over the GPU's memory bandwidth ("
    + ", ".join(f"{name} {device.bandwidth / 1e9:,.0f}" for name, device in DEVICES.items())
    + " GB/s), in addition to the matrix products; the stream is fp32, kernels are fused, each sealed source is loaded "
    "once a block; recomputation (layer, sublayer) costs a third more; other mechanisms' reads are not counted",
    "activations: what the model's own code saves for backward, counted on the meta device, with fused attention; of "
    "parameters that are not sharded, bf16 copies as well",
    "gathered: sharded parameters are all-gathered in bf16, two layers at a time (with pipeline stages all of them); "
    "gradients stay unsharded until the last micro-batch, which reduce-scatters them",
    "a stage's transfers overlap with its work and cost what is left of them; sharded gradients are sent once a step, "
    "parameters gathered twice (once with stages), within a node where all shards of a replica are in one; gradients "
    "of replicas are sent within a node where all replicas of a stage are",
    "experts that are distributed (ep) get as many tokens each; their messages are in bf16, forward and backward, and "
    "nothing of them overlaps",
    "tensor parallelism gathers and reduces tokens twice a sublayer, forward and backward, in bf16 within a node; "
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
    checkpointing: str = "none"
    """What is recomputed in backward, as in `checkpoint_activations`."""


@dataclass(frozen=True)
class Planned:
    """One layout: bytes are of the fullest rank, seconds of a step.

    Attributes:
        states: bytes of parameters, gradients and moments.
        whole: bytes more for those of them that are put together.
        activations: bytes for the backward of the micro-batches in flight.
        sources: bytes of what they received from other stages.
        buffers: bytes of the largest receive.
        fits: the sum leaves a twelfth of the device free.
        vectors, vectors_naive: that cross, a token, with slots kept and without.
        kept: vectors a token that a rank keeps for its later stages (aliases: no bytes of their own).
        stage_bytes, share_bytes, slice_bytes, expert_bytes: a step's, that a rank sends: between stages; for
            parameters and gradients; of tokens before and behind layers in slices; of tokens to experts and back.
        expert_messages: all-to-alls of a rank in a step.
        bubble: share of a step in which a rank waits.
        read_bytes: a step's between a GPU's memory and its cores, for depth reads with norms and additions; None for a
            mechanism whose reads are not counted.
    """

    dp: int
    shard: int
    pp: int
    tp: int
    ep: int
    virtual: int
    schedule: str
    layers: tuple[int, ...]
    states: float
    whole: float
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
    expert_bytes: float
    expert_messages: float
    read_bytes: float | None
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
    ep: int | None = None,
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
    if ep is not None and ep > 1:
        check_experts(model, ep)
    counted = _Counted.of(model)
    layouts = list(_layouts(load, counted, dp, shard, pp, tp, ep, schedule))
    rows = []
    if layouts:
        kept = Activations(model, load.batch, load.context, itemsize=load.itemsize, checkpointing=load.checkpointing)
        flops = step_flops(model, load.context)
        cut = functools.cache(functools.partial(plan_cut, model, costs=costs))  # layouts share few
        planned = (_planned(model, load, layout, cut, counted, kept, flops) for layout in layouts)
        rows = [row for row in planned if row is not None]
    if not rows:
        request = {"dp": dp, "shard": shard, "pp": pp, "tp": tp, "ep": ep, "schedule": schedule}
        table = ", ".join(f"{name} {value or 'any'}" for name, value in request.items())
        raise UserError(
            f"no layout of {load.gpus} GPUs has {table} with {load.microbatches} micro-batches and "
            f"{len(model.depth_layers)} layers"
        )
    return sorted(rows, key=lambda row: (not row.fits, -row.tokens_per_s))


def beside_standard(
    model: DepthMixin, load: Load, row: Planned, costs: tuple[list[float], float] | None = None
) -> Planned:
    """Return the same layout of the same model with the standard residual."""
    config = copy.deepcopy(model.config)
    config.residual, config.residual_settings = "standard", {}
    with torch.device("meta"):
        standard = type(model)(config)
    schedule = row.schedule if row.pp > 1 else None
    sizes = {name: getattr(row, name) for name in ("dp", "shard", "pp", "tp", "ep")}
    return plan(standard, load, **sizes, schedule=schedule, costs=costs)[0]


class _Layout(NamedTuple):
    dp: int
    shard: int
    pp: int
    tp: int
    ep: int
    virtual: int
    schedule: str


class _Counted(NamedTuple):
    """Parameters of a model, counted once: those of each layer, those of its experts, and the modules of experts by
    name."""

    layers: list[int]
    of_experts: list[int]
    experts: dict[str, Any]

    @classmethod
    def of(cls, model: DepthMixin) -> "_Counted":
        of_experts = [sum(map(_numel, stacked_experts(layer).values())) for layer in model.depth_layers]
        return cls([_numel(layer) for layer in model.depth_layers], of_experts, stacked_experts(model))


def _layouts(
    load: Load,
    counted: _Counted,
    dp: int | None,
    shard: int | None,
    pp: int | None,
    tp: int | None,
    ep: int | None,
    schedule: str | None,
) -> Iterator[_Layout]:
    """Give the layouts whose processes are the GPUs; slices within a node, and not of stages; experts distributed
    among the processes of `shard`, and not with slices."""
    gpus, node, layers = load.gpus, DEVICES[load.device].node, len(counted.layers)
    experts = math.gcd(*(module.num_experts for module in counted.experts.values()))
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
                    virtual = stages_each(name) if stages > 1 else 1
                    among = _divisors(math.gcd(shares, experts)) if slices == 1 and experts else [1]
                    for processes in among:
                        if stages * virtual <= layers and ep in (None, processes):
                            yield _Layout(copies, shares, stages, slices, processes, virtual, name)


def _divisors(number: int) -> list[int]:
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return sorted({*small, *(number // part for part in small)})


def _planned(
    model: DepthMixin,
    load: Load,
    layout: _Layout,
    cut_of: Callable[[int, str, int], PipelineCut],
    counted: _Counted,
    kept: Activations,
    flops: float,
) -> Planned | None:
    """Return the memory, traffic and time of a layout; None if it cannot be. `cut_of`: `plan_cut` of a model."""
    try:
        if layout.pp > 1:
            check_schedule(layout.schedule, layout.pp, layout.virtual, load.microbatches)
        if layout.tp > 1:
            check_slices(model, layout.tp)
    except UserError:
        return None
    cut = cut_of(layout.pp, layout.schedule, layout.virtual)
    laid = _LaidOut(model, counted, load, layout, cut)
    memory, traffic = laid.memory(kept), laid.traffic()
    fields: dict[str, Any] = {
        **(layout._asdict() if layout.pp > 1 else layout._replace(schedule="none")._asdict()),
        **memory,
        **traffic,
        **laid.time(traffic, flops, again=4 / 3 if kept.made_again else 1),
    }
    total = sum(memory.values())
    return Planned(
        layers=tuple(map(len, layers_of(laid.cut, laid.sublayers))),
        memory=total,
        fits=total < 0.92 * DEVICES[load.device].memory,
        vectors=vectors(laid.table),
        vectors_naive=vectors(crossings(model.residual.itself(), laid.cut, cached=False)),
        kept=max(most_kept(laid.table, laid.cut).values()),
        **fields,
    )


class _LaidOut:
    """A model in a layout: the parameters, messages and times of its ranks.

    Attributes:
        table: what crosses from stage to stage.
        vector: bytes of one vector of a micro-batch's tokens: the stream is fp32 under autocast.
        of_residual: parameters of the residual, which every rank has whole.
        sliced: parameters that are cut among the slices.
        sublayers: of a layer.
        inside, outside: of the needed ones those in each of its layers, and in what is in no layer.
        owned: parameters of each rank but the residual's, before they are shared out. needed: of experts its part.
    """

    def __init__(self, model: DepthMixin, counted: _Counted, load: Load, layout: _Layout, cut: PipelineCut) -> None:
        self.model, self.counted, self.load, self.layout, self.cut = model, counted, load, layout, cut
        self.table = crossings(model.residual.itself(), cut)
        self.tokens = load.batch * load.context
        self.vector = self.tokens * model.config.hidden_size * 4
        self.of_residual = _numel(model.residual.itself())
        self.sublayers = len(model.residual.itself().sublayers)
        self.sliced = sum(weight.numel() for _, _, weight in sliced_weights(model)) if layout.tp > 1 else 0
        self.outside = _outside(model, cut)
        self.inside: list[list[float]] = [[] for _ in self.outside]
        self.owned = [rest - self.sliced * (1 - 1 / layout.tp) for rest in self.outside]
        self.needed = list(self.owned)
        for ours, rank in zip(layers_of(cut, self.sublayers), cut.ranks, strict=True):
            for layer, experts in list(zip(counted.layers, counted.of_experts, strict=True))[ours.start : ours.stop]:
                self.owned[rank] += layer
                self.inside[rank].append(layer - experts * (1 - 1 / layout.ep))
                self.needed[rank] += self.inside[rank][-1]

    def memory(self, kept: Activations) -> dict[str, float]:
        """Return the bytes of the fullest rank by purpose. Slots that a rank keeps are aliases of tensors that it
        received or computed, and count nothing."""
        layout, load = self.layout, self.load
        held = in_flight(layout.schedule, layout.pp, layout.virtual, load.microbatches)

        def most(of: Callable[[int], float]) -> float:
            """Return the largest sum over a rank's micro-batches in flight of what each of its stages needs for one."""
            sums = []
            for rank, moments in enumerate(held):
                needs = [of(stage) for stage, owner in enumerate(self.cut.ranks) if owner == rank]
                sums += [sum(count * need for count, need in zip(moment, needs)) for moment in moments]
            return max(sums)

        whole = 0.0
        if layout.shard > 1:
            together = (sum(layers if layout.pp > 1 else sorted(layers)[-2:]) for layers in self.inside)
            whole = max(load.itemsize * part + 4 * rest for part, rest in zip(together, self.outside)) / layout.tp
        if layout.shard > 1 and load.microbatches > 1:
            whole += max(need - own / layout.shard for need, own in zip(self.needed, self.owned, strict=True)) * 4
        copies = load.itemsize == 2 and layout.shard == 1
        return {
            "states": max(self.owned) * 16 / layout.shard + self.of_residual * 16,
            "whole": whole,
            "activations": most(lambda stage: kept.of(self.cut, stage, layout.tp, copies)) + kept.remade / layout.tp,
            "sources": most(lambda stage: self.table[stage - 1].vectors if stage else 0) * self.vector,
            "buffers": max((crossing.vectors for crossing in self.table), default=0) * self.vector,
        }

    def traffic(self) -> dict[str, float]:
        """Return the bytes that a rank sends in a step."""
        (_, shard, pp, tp, ep, *_), load = self.layout, self.load
        owned, outside, of_experts = self.owned, self.outside, self.counted.of_experts
        mean, rest, experts = (sum(parameters) / pp for parameters in (owned, outside, of_experts))
        gathered = (1 if pp > 1 else 2) * load.microbatches ** (pp == 1)

        def shared(ranks: int, layers: float, rest: float = 0.0) -> float:
            return (ranks - 1) / ranks * (gathered * (layers * load.itemsize + rest * 4) + (layers + rest) * 4)

        share_bytes = shared(shard, mean - rest - experts, rest) + shared(shard // ep, experts / ep) + self.copied()
        sublayers = len(self.model.depth_layers) * self.sublayers
        passes = 2 * 2 * sublayers * load.microbatches  # gathered and added up, forward and back
        slice_bytes = passes * (1 - 1 / tp) * self.vector / 4 * load.itemsize
        slice_bytes += 8 * (mean - self.sliced / tp) * (1 - 1 / tp) / shard
        slice_bytes += 8 * self.of_residual * (1 - 1 / tp)
        return {
            "stage_bytes": 2 * vectors(self.table) * self.vector * load.microbatches / pp,  # forward and back
            "share_bytes": share_bytes,
            "slice_bytes": slice_bytes,
            **self.sent_to_experts(),
        }

    def sent_to_experts(self) -> dict[str, float]:
        """Return the bytes of tokens that a rank sends to experts and back in a step, and the number of messages."""
        load, ep, total = self.load, self.layout.ep, 0.0
        forward = 2 if load.checkpointing in ("layer", "sublayer") else 1
        for name, module in self.counted.experts.items() if ep > 1 else ():
            down, count = module.down_proj, module.num_experts
            width = down.shape[2 if module.is_transposed else 1]
            experts_used = count * share_of_token(f"{name}.down_proj", down, self.model.config)
            total += (forward + 1) * 2 * self.tokens * experts_used * width * load.itemsize  # to experts and back
            total += forward * count * 8  # how many to each
        messages = (3 * forward + 2) * len(self.counted.experts) * (ep > 1)
        times = load.microbatches / self.layout.pp
        return {"expert_bytes": total * (1 - 1 / ep) * times, "expert_messages": messages * times}

    def copied(self) -> float:
        """Return the bytes of gradients that a rank sends to the copies of its share, the residual's to all."""
        dp, shard, pp, *_ = self.layout
        return 8 * (sum(self.owned) / pp / shard * (dp - 1) / dp + self.of_residual * (1 - 1 / (dp * shard)))

    def time(self, traffic: Mapping[str, float], flops: float, *, again: float) -> dict[str, float | None]:
        """Return the bubble, the bytes of reads, the seconds of a step and the tokens a second, at `flops` operations a
        token. With recomputed activations all of it counts `again` times."""
        (dp, shard, pp, tp, ep, virtual, schedule), load = self.layout, self.load
        device = DEVICES[load.device]
        step_tokens = self.tokens * load.microbatches * dp * shard
        work = again * flops * step_tokens / load.gpus / (PEAKS[load.device.upper()][0] * EFFICIENCY)
        moved = step_vectors(self.model.residual.itself())
        reads = None if moved is None else moved * self.model.config.hidden_size * STREAM * step_tokens / load.gpus
        work += again * (reads or 0) / device.bandwidth
        bubble = 0.0
        if pp > 1 and not (schedule in ("zbv", "interleaved_zero_bubble", "dualpipev") and load.microbatches >= 2 * pp):
            bubble = (pp - 1) / (virtual * load.microbatches + pp - 1)
        within = (device.inside if group * tp <= device.node else device.outside for group in (shard, dp * shard))
        of_shares, of_copies = within  # stages are further apart than copies, copies than shares
        between = device.inside if load.gpus <= device.node else device.outside
        shares = (traffic["share_bytes"] - self.copied()) / of_shares + self.copied() / of_copies
        sending = max(0.0, traffic["stage_bytes"] / between - work) + max(0.0, shares - work)
        seconds = work / (1 - bubble) + sending + traffic["slice_bytes"] / device.inside
        seconds += traffic["expert_bytes"] / (device.inside if ep <= device.node else device.outside)
        return {"read_bytes": reads, "bubble": bubble, "seconds": seconds, "tokens_per_s": step_tokens / seconds}


def in_flight(schedule: str, ranks: int, virtual: int, microbatches: int) -> list[set[tuple[int, ...]]]:
    """Return for each rank how many micro-batches each of its stages may hold at once: those that went forward and not
    back.

    Of several stages a rank as in torch's interleaved 1F1B, which the other schedules of that kind stay close to.
    """
    if schedule in ("gpipe", "looped_bfs"):
        return [{(microbatches,) * virtual}] * ranks
    if virtual == 1:
        return [{(min(microbatches, ranks - rank),)} for rank in range(ranks)]
    together = microbatches // max(1, microbatches // ranks)  # micro-batches of a stage in a row
    by_rank = []
    for rank in range(ranks):
        ahead = min(virtual * microbatches, (virtual - 1) * together + 2 * (ranks - 1 - rank))
        counts, moments = [0] * virtual, set[tuple[int, ...]]()
        period = virtual * together  # after which, once the first goes back, as many went back as forward
        for step in range(min(virtual * microbatches, ahead + 1 + period)):
            if step > ahead:
                counts[virtual - 1 - (step - ahead - 1) // together % virtual] -= 1
            counts[step // together % virtual] += 1
            moments.add(tuple(counts))
        by_rank.append(moments)
    return by_rank


def _outside(model: DepthMixin, cut: PipelineCut) -> list[int]:
    """Return for each rank the number of parameters outside the layers, without the residual's."""
    outside = [0] * len(set(cut.ranks))
    outside[cut.ranks[0]] += _numel(model.get_input_embeddings())
    outside[cut.ranks[-1]] += _numel(model.depth_base.get_submodule(model.family.final_norm))
    if not (cut.stages == 1 and getattr(model.config, "tie_word_embeddings", False)):
        outside[cut.ranks[-1]] += _numel(model.get_output_embeddings())
    return outside


def _numel(module: Any) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
