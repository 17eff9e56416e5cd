"""A pipeline: this rank's stages, torch's schedule over them, and gradients that are those of one process.

name                     torch's schedule         stages a rank    placed
gpipe                    GPipe                    1                round and round
1f1b                     1F1B                     1                round and round
looped_bfs               LoopedBFS                virtual          round and round
interleaved              Interleaved1F1B          virtual          round and round
interleaved_zero_bubble  InterleavedZeroBubble    virtual          round and round
zbv                      ZBVZeroBubble            2                there and back again
dualpipev                DualPipeV                2                there and back again
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from attnres.errors import UserError, unknown
from attnres.models import DepthMixin
from attnres.models.step_cost import share_of_token
from attnres.ops import compute_dtype
from attnres.scale.cut import PipelineCut, balanced, crossings, cut_of, placed
from attnres.scale.lean_stage import stage_class
from attnres.scale.shard import local
from attnres.scale.stage import RankCache, StageModule, refuse_stages, shapes, shell


class Schedule(NamedTuple):
    """A schedule of torch's: its name in torch, whether a rank has several stages, whether they are placed as a V, and
    whether it computes gradients of inputs and of weights separately."""

    torch_name: str
    several: bool = False
    v_shaped: bool = False
    apart: bool = False


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "looped_bfs": Schedule("LoopedBFS", several=True),
    "interleaved": Schedule("Interleaved1F1B", several=True),
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", several=True, apart=True),
    "zbv": Schedule("ZBVZeroBubble", several=True, v_shaped=True, apart=True),
    "dualpipev": Schedule("DualPipeV", several=True, v_shaped=True, apart=True),
}


def schedule_named(name: str) -> Schedule:
    """Return the schedule of that name. Raises UserError."""
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def stages_each(name: str) -> int:
    """Return the default number of stages of a rank."""
    return 2 if schedule_named(name).several else 1


def fitting_microbatches(name: str, ranks: int, virtual: int, *, at_least: int = 1, divides: int | None = None) -> int:
    """Return the smallest number of micro-batches that the schedule accepts, and that divides `divides` if possible."""
    accepted = []
    for count in range(at_least, at_least + 2 * ranks * virtual + 1):
        with contextlib.suppress(UserError):
            check_schedule(name, ranks, virtual, count)
            accepted.append(count)
    if not accepted:
        check_schedule(name, ranks, virtual, at_least)  # raises the error that no number of micro-batches avoids
    return next((count for count in accepted if divides is not None and divides % count == 0), accepted[0])


def check_schedule(name: str, ranks: int, virtual: int, microbatches: int) -> None:
    """Raise UserError for numbers that the schedule does not accept."""
    schedule = schedule_named(name)
    if virtual != 1 and not schedule.several:
        raise UserError(f"virtual is {virtual} and the schedule {name} has one stage a rank: choose interleaved")
    if schedule.v_shaped and virtual != 2:
        raise UserError(f"virtual is {virtual} and the schedule {name} has two stages a rank: leave virtual out")
    stages = ranks * virtual
    least = {"1f1b": stages, "dualpipev": stages}.get(name, 1)
    if microbatches < least:
        raise UserError(
            f"{microbatches} microbatches a step (accumulation) are too few for the schedule {name} with {stages} "
            f"stages: give at least {least}"
        )
    rounds = max(1, microbatches // ranks)
    if name.startswith("interleaved") and microbatches % rounds:
        raise UserError(
            f"{microbatches} microbatches a step (accumulation) do not divide into {rounds} rounds for the schedule "
            f"{name} on {ranks} ranks: give a multiple of {ranks}"
        )


def layer_costs(model: DepthMixin) -> tuple[list[float], float]:
    """Return the multiplications of each layer for a token, by the weights that it has, and those of the head."""
    head = model.get_output_embeddings()
    layers = [
        sum(p.numel() * share_of_token(name, p, model.config) for name, p in layer.named_parameters())
        for layer in model.depth_layers
    ]
    return layers, 0.0 if head is None else float(sum(p.numel() for p in head.parameters()))


def plan_cut(
    model: DepthMixin,
    ranks: int,
    schedule: str,
    virtual: int,
    layers: tuple[int, ...] | None = None,
    costs: tuple[list[float], float] | None = None,
) -> PipelineCut:
    """Return where the model is cut: with these `layers` in each stage, or balanced by the costs of layers and head.

    Args:
        costs: for example of `layer_times`; by default `layer_costs`, multiplications.

    Raises:
        UserError: more stages than layers, or `layers` of another number of stages.
    """
    stages = ranks * virtual
    rank_of = placed(stages, ranks, v_shaped=schedule_named(schedule).v_shaped)
    if layers is None:
        of_layers, head = costs or layer_costs(model)
        layers = balanced(of_layers, stages, last=head)
    elif sum(layers) != len(model.depth_layers):
        raise UserError(f"the layers of the stages are {list(layers)}, and the model has {len(model.depth_layers)}")
    return cut_of(layers, rank_of, sublayers=len(model.residual.itself().sublayers))


def refuse_schedule(model: DepthMixin, cut: PipelineCut, name: str, *, shards: int, loss: str) -> None:
    """Raise UserError for a model that the schedule would train wrongly or not at all with this number of shards and
    kind of loss."""
    if shards > 1 and cut.stages > 1 and cut.ranks[0] == cut.ranks[-1] and _tied(model):
        raise UserError(
            f"the schedule {name} has both ends of the model in one process, and a tied table of embedding and head "
            "cannot be sharded with each: use --shard 1, --pp-schedule interleaved, or a model whose head is untied"
        )
    if schedule_named(name).apart and loss != "whole":
        raise UserError(
            f"the loss is {loss} and the schedule {name} computes gradients of inputs and of weights separately, which "
            "needs a whole loss: give --loss whole or --pp-schedule interleaved"
        )


def _tied(model: DepthMixin) -> set[int]:
    """Return the ids of the parameters that the embedding and the head share."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return {id(p) for p in head.parameters()} & {id(p) for p in table.parameters()}


class Pipeline:
    """This rank's stages of a model that is cut, and the schedule that runs them.

    Attributes:
        stages: the modules of its stages. `model` is taken apart: do not use it afterwards.

    Args:
        model: the whole model, equal on every rank.
        batch, tokens: sequences of a microbatch on this rank, tokens of a sequence.
        group: the ranks of this pipeline.
        losses: (model, keyword arguments of its forward, targets (B, T)) -> their sum (1,), without gradients (B, T).
        cast: returns the context of a forward pass.
        cached: whether ranks keep slots that do not change.
        prepare: called with each stage before it is wrapped, for example to shard it.
    """

    def __init__(
        self,
        model: DepthMixin,
        cut: PipelineCut,
        *,
        schedule: str,
        microbatches: int,
        batch: int,
        tokens: int,
        group: dist.ProcessGroup,
        device: torch.device,
        losses: Callable[[Any, dict[str, Any], Tensor], Tensor],
        cast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        cached: bool = True,
        prepare: Callable[[StageModule], None] = lambda stage: None,
    ) -> None:
        refuse_stages(model)
        self.cut, self.group, self.rank, self.device = cut, group, dist.get_rank(group), device
        self.microbatches, self.batch = microbatches, batch
        self.residual = model.residual
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.table = crossings(self.residual.itself(), cut, cached=cached)
        self.cache = RankCache()
        self.width = model.config.hidden_size
        self.dtype = self.residual.itself().stream_dtype or next(model.depth_layers[0].parameters()).dtype
        head: Any = model.get_output_embeddings()
        tied = _tied(model)
        ends = [stage for stage in (0, cut.stages - 1) if cut.ranks[stage] == self.rank]
        self.tied = [p for p in head.parameters() if id(p) in tied and len(ends) == 1]
        """Parameters of which the first stage's rank and the last one's have a copy each."""
        stages = [stage for stage, rank in enumerate(cut.ranks) if rank == self.rank]
        self.stages = [StageModule(shell(model), stage, cut, self.table, self.cache, losses, cast) for stage in stages]
        self.parameters = {  # before they are sharded, which makes new ones
            self.names[id(parameter)]: (stage, path) for stage in self.stages for path, parameter in stage.named_owned()
        }
        for stage in self.stages:
            prepare(stage)
        self.schedule = self._schedule(schedule, tokens)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank trains, each once, by their names in the whole model."""
        for name, (stage, path) in self.parameters.items():
            yield name, stage.model.get_parameter(path)

    def _schedule(self, name: str, tokens: int) -> Any:
        batch, width, dtype = self.batch, self.width, self.dtype
        ids = torch.empty(batch, tokens, dtype=torch.long, device="meta")
        base = stage_class()

        class Numbered(base):  # ty: ignore[unsupported-base]
            def forward_one_chunk(
                self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, *more: Any, **named: Any
            ) -> Any:
                kwargs = {**(kwargs or {}), "microbatch": fwd_chunk_id}  # a tensor of it would be waited for
                return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *more, **named)

        losses = torch.empty(1, dtype=compute_dtype(dtype), device="meta", requires_grad=True)
        wrapped = [
            Numbered(
                module,
                module.stage,
                self.cut.stages,
                self.device,
                input_args=ids if module.came is None else shapes(module.came, batch, tokens, width, dtype),
                output_args=losses if module.goes is None else shapes(module.goes, batch, tokens, width, dtype),
                group=self.group,
            )
            for module in self.stages
        ]
        cls: Any = get_schedule_class(schedule_named(name).torch_name)
        return cls(
            wrapped[0] if issubclass(cls, PipelineScheduleSingle) else wrapped,
            self.microbatches,
            loss_fn=lambda total, weight: total.sum() * weight[0],
            scale_grads=False,
        )

    @property
    def has_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.cut.ranks[-1] == self.rank

    def step(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        """Compute the gradients of `weight` times the summed losses of a batch, and return that sum in fp64; zero on a
        rank without the last stage.

        x, y: (microbatches * batch, tokens), the same on every rank of the pipeline. Gradients are those of this
        rank's stages; `reduce_gradients` completes them.

        Raises:
            RuntimeError: a gradient that no stage collected.
        """
        args = (x,) if self.cut.ranks[0] == self.rank else ()
        losses: list[Tensor] = []
        weights = torch.full((self.microbatches,), weight, dtype=torch.float64, device=self.device)
        last = {"target": weights, "losses": losses} if self.has_last else {}
        self.schedule.step(*args, **last, return_outputs=False, targets=y)
        self.cache.check()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        return sum((loss.detach().double() for loss in losses), total)

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the losses (B, T) of any number of microbatches of `batch` sequences; zeros on ranks without the last
        stage.

        Microbatch by microbatch, through all stages of this rank: torch's schedules that place stages as a V cannot run
        forward alone (2.13), and stage by stage two ranks could each wait for the other to receive.
        """
        parts = zip(x.split(self.batch), y.split(self.batch), strict=True)
        outputs = list[Tensor]()
        works = []
        for number, (inputs, targets) in enumerate(parts):
            output: Any = None
            for module in self.stages:
                came, goes = module.came, module.goes
                if came is None:
                    received: tuple[Tensor, ...] = (inputs,)
                elif came.local:  # the stage before is this rank's too
                    received = output
                else:
                    like = shapes(came, self.batch, x.shape[1], self.width, self.dtype)
                    received = tuple(torch.empty_like(meta, device=self.device) for meta in like)
                    _wait(self._with(dist.irecv, received, self.cut.ranks[module.stage - 1]))
                output = module(*received, microbatch=number, targets=targets)
                if goes is None:
                    outputs.append(output)
                elif not goes.local:
                    works += self._with(dist.isend, output, self.cut.ranks[module.stage + 1])
        _wait(works)
        self.cache.check()
        return torch.cat(outputs) if self.has_last else torch.zeros(y.shape, device=self.device)

    def _with(self, operation: Any, tensors: Sequence[Tensor], rank: int) -> list[Any]:
        peer = dist.get_global_rank(self.group, rank)
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.group) for tensor in tensors])

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the gradients of the residual over the stages, and of tied tables over the two ends, after a step."""
        for parameter in self.residual.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.group)
        for parameter in self.tied_here():
            if parameter.requires_grad:
                _add_between(parameter, self.cut.ranks[0], self.cut.ranks[-1], self.group)

    def tied_here(self) -> list[nn.Parameter]:
        """Return this rank's copies of tables that the first stage's rank and the last one's both have."""
        names = {self.names[id(parameter)] for parameter in self.tied}
        return [parameter for name, parameter in self.named_parameters() if name in names]


def _add_between(parameter: nn.Parameter, first: int, last: int, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the two ends."""
    gradient = parameter.grad
    assert gradient is not None
    ours = local(gradient)
    theirs = torch.empty_like(ours)
    other = last if dist.get_rank(group) == first else first
    peer = dist.get_global_rank(group, other)
    operations = [dist.P2POp(dist.isend, ours.contiguous(), peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    _wait(dist.batch_isend_irecv(operations))
    ours.add_(theirs)


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
