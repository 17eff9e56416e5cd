"""Place a run's model on its processes: replicated (DDP), sharded (FSDP2, HSDP), tensor or context parallel, or
pipelined.

`parallelize(objective, layout)` returns a `PlacedModel`, which computes gradients, their clipped norm and held-out
losses, and gives the named tensors of a checkpoint and the complete model at the end.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from attnres.errors import UserError
from attnres.head import called_losses
from attnres.progress import errors_alone
from attnres.training import validate
from attnres.training.checkpoint import saved_buffers
from attnres.training.config import ParallelConfig
from attnres.training.graphs import Micro
from attnres.training.objective import Objective
from attnres.training.parallel import Processes
from attnres.training.prepare import batch_shares


@dataclass(frozen=True)
class Layout:
    """How the processes of a run divide its model and its batches.

    Attributes:
        who: this process among the others.
        parallel: the `parallel` section of the configuration, checked by `prepare.check`.
        batch_size, accumulation: sequences in a step over all processes, micro-batches in a step.
        seq_len: tokens in a sequence.
        dtype: "bf16" for autocast over fp32 parameters, or "fp32".
        compile: whether a sharded or pipelined model is compiled in parts (`compile_parts`).
    """

    who: Processes
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch_size: int = 1
    accumulation: int = 1
    seq_len: int = 1
    dtype: str = "fp32"
    compile: bool = False

    @property
    def shares(self) -> int:
        """Return the number of parts into which every batch is divided."""
        return batch_shares(self.parallel, self.who.world_size)

    @property
    def rows(self) -> int:
        """Return the sequences of a micro-batch on one process, a number known to fit in memory."""
        return self.batch_size // self.accumulation // self.shares


def parallelize(objective: Objective, layout: Layout) -> "PlacedModel":
    """Place a model, which is equal on every process, according to the layout.

    Args:
        objective: the model with its loss. A pipeline takes the model apart, so use only the result afterwards.

    Raises:
        UserError: the model cannot be divided in this way.
    """
    if layout.parallel.pp > 1:
        return PipelinedModel(objective, layout)
    if max(layout.parallel.shard, layout.parallel.tp, layout.parallel.cp) > 1:
        return ShardedModel(objective, layout)
    return PlacedModel(objective, layout)


def compile_parts(model: Any) -> None:
    """Compile the attention and the MLP of every layer separately, one graph for each kind. A whole layer would need
    another graph for each number of sources of its reads, and beyond eight graphs it would not be compiled."""
    for layer in model.depth_layers:
        for part in layer.children():
            if any(parameter.ndim > 1 for parameter in part.parameters()):
                part.compile()


class PlacedModel:
    """A model on the processes of a run. This base class replicates it, and each process takes its part of every batch
    (DDP).

    Attributes:
        model: this process's part; its residual and config are those of the complete model.
        rank, shares: this process takes part `rank` of `shares` of every batch.
        objective: the module that a training pass calls; None for pipelines, whose passes involve several processes.
        summed: number of processes whose gradients are summed rather than averaged.
        whole: whether the first process writes checkpoints alone; otherwise each writes its part.
        saving: process group for checkpoints that are written while training continues; None: training waits.
    """

    model: Any
    objective: nn.Module | None
    summed = 1
    whole = True
    saving: Any = None

    def __init__(self, objective: Objective, layout: Layout) -> None:
        self.layout, self.who = layout, layout.who
        self.rank, self.shares = layout.who.rank, layout.shares
        self.model, self.plain = objective.model, objective
        self.place()

    def place(self) -> None:
        """Divide the model among the processes, in place."""
        self.objective = self.who.wrap(self.plain)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this process trains, by their names in the complete model."""
        return self.model.named_parameters()

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers, by name."""
        return saved_buffers(self.model)

    def gradients(self, x: Tensor, y: Tensor, micro: Micro) -> Tensor:
        """Compute the gradient of the mean loss of this process's part, averaged over the processes; return the loss
        sums."""
        total = torch.zeros(2, dtype=torch.float64, device=self.who.device)
        parts = list(zip(x.chunk(self.layout.accumulation), y.chunk(self.layout.accumulation)))
        for index, (inputs, targets) in enumerate(parts):
            last = index == len(parts) - 1
            with self.syncing(last):
                total += micro(inputs, self.tokens_here(targets), y.numel(), last)
        return total

    def tokens_here(self, targets: Tensor) -> Tensor:
        """Return the part of (B, T) whose losses a pass of this process computes."""
        return targets

    def syncing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Average gradients over the processes in the backward of a micro-batch inside the block if it is the last."""
        if not last and isinstance(self.objective, nn.parallel.DistributedDataParallel):
            return self.objective.no_sync()
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Clip the gradients to a norm of `limit` and return their norm before."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def window_losses(self, windows: Tensor, rows: int) -> np.ndarray:
        """Return mean loss and in-context score of each held-out window (count, 2), on every process."""
        return validate.window_losses(self.model, windows, self.who, self.plain.cast, rows, self.plain.kind)

    def gathered(self) -> Any:
        """Return the complete model on the first process; None on others."""
        return self.model if self.who.first else None


class ShardedModel(PlacedModel):
    """A model whose parameters are sharded, with replicas of the shards if there are more processes (FSDP2, HSDP). With
    tp every layer's matrices and the tokens of every sequence are split too, with cp only the tokens."""

    whole = False

    def __init__(self, objective: Objective, layout: Layout) -> None:
        parallel = layout.parallel
        self.summed = parallel.tp * parallel.cp
        sizes = (parallel.pp, layout.shares // parallel.shard, parallel.shard, self.summed)
        self.mesh = init_device_mesh(layout.who.device.type, sizes, mesh_dim_names=("pp", "dp", "shard", "slice"))
        if parallel.ep > 1:
            from attnres.scale.experts import check_experts

            check_experts(objective.model, parallel.ep)
            sizes = (*sizes[:2], parallel.shard // parallel.ep, parallel.ep)
            axes = ("pp", "dp", "shard", "ep")
            self.expert_mesh = init_device_mesh(layout.who.device.type, sizes, mesh_dim_names=axes)
        self.alike = _groups(self.mesh, ("dp", "shard"))
        """The processes with other shares of a batch, whose gradients are averaged; None for one."""
        if parallel.async_save:
            self.saving = torch.distributed.new_group(backend="gloo")
        super().__init__(objective, layout)
        self.rank = self.mesh["dp"].get_local_rank() * parallel.shard + self.mesh["shard"].get_local_rank()

    def _shard(self, model: Any, root: nn.Module, *, reshard: bool = True) -> None:
        """Shard a model or a stage, with replicas of the shards where there are more processes (HSDP)."""
        from attnres.scale.experts import distribute_experts
        from attnres.scale.shard import shard

        parallel = self.layout.parallel
        axes = ("dp", "shard") if self.mesh["dp"].size() > 1 else ("shard",)
        if parallel.ep > 1:
            distribute_experts(model, self.expert_mesh["ep"])
        if parallel.shard > 1:
            experts = self.expert_mesh[axes] if parallel.ep > 1 else None
            dtype = torch.bfloat16 if self.layout.dtype == "bf16" else None  # None is the dtype of the parameters
            shard(model, root, self.mesh[axes], experts=experts, reshard=reshard, dtype=dtype)

    def place(self) -> None:
        self.objective = self.plain
        self.rebuild = _rebuilder(self.model)
        if self.summed > 1:
            from attnres.scale.context import share_out_tokens
            from attnres.scale.tensor import share_out_layers

            share_out = share_out_layers if self.layout.parallel.tp > 1 else share_out_tokens
            self.slices = share_out(self.model, self.mesh["slice"])
            if not self.slices.splits(self.layout.seq_len):
                raise UserError(
                    f"data.seq_len is {self.layout.seq_len}: too few tokens for {self.summed} processes (tp, cp)"
                )
        if self.layout.compile:
            compile_parts(self.model)
        self._shard(self.model, self.plain)

    def syncing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if self.layout.parallel.shard > 1:
            self.plain.set_requires_gradient_sync(last)  # ty: ignore[not-callable]
        return contextlib.nullcontext()

    def tokens_here(self, targets: Tensor) -> Tensor:
        return self.slices.of(targets) if self.summed > 1 else targets

    def window_losses(self, windows: Tensor, rows: int) -> np.ndarray:
        # called through the module whose forward gathers the parameters outside the layers
        def losses(x: Tensor, y: Tensor) -> Tensor:
            return self.plain(x, self.tokens_here(y), held_out=True)

        return validate.shared_out(
            losses, self.tokens_here, self.plain, windows, self.who, rows, (self.rank, self.shares)
        )

    def gradients(self, x: Tensor, y: Tensor, micro: Micro) -> Tensor:
        from attnres.scale.shard import mean_gradients, sum_gradients

        total = super().gradients(x, y, micro)
        parameters = list(self.model.parameters())
        if self.summed > 1:
            sum_gradients((p for p in parameters if "slice" not in _axes(p)), self.mesh.get_group("slice"))
        if self.alike is not None:
            mean_gradients((p for p in parameters if "shard" not in _axes(p)), self.alike)
        return total

    def clip(self, limit: float) -> Tensor:
        from attnres.scale.shard import clip_gradients, shards_of

        return clip_gradients(self.model.parameters(), limit, lambda p: self.who.world_size / shards_of(p))

    def gathered(self) -> Any:
        tensors = {**dict(self.named_parameters()), **self.named_buffers()}
        return self.rebuild(collected(tensors, self.who))


class PipelinedModel(ShardedModel):
    """A model whose layers are split into stages, one or several for each process; with replicas and shards of the
    stages if there are more processes."""

    objective = None

    def place(self) -> None:
        from attnres.scale.pipeline import Pipeline, plan_cut, refuse_schedule, stages_each

        layout, parallel, model, kind = self.layout, self.layout.parallel, self.model, self.plain.kind
        virtual = parallel.pp_virtual or stages_each(parallel.pp_schedule)
        cut = plan_cut(model, parallel.pp, parallel.pp_schedule, virtual, parallel.pp_layers)
        refuse_schedule(model, cut, parallel.pp_schedule, shards=parallel.shard, loss=kind)
        self.rebuild = _rebuilder(model)

        def prepare(stage: Any) -> None:
            if layout.compile:
                compile_parts(stage.model)
            self._shard(stage.model, stage, reshard=False)

        self.pipeline = Pipeline(
            model,
            cut,
            schedule=parallel.pp_schedule,
            microbatches=layout.accumulation,
            batch=layout.rows,
            tokens=layout.seq_len,
            group=self.mesh.get_group("pp"),
            device=self.who.device,
            losses=functools.partial(called_losses, kind=kind),
            cast=self.plain.cast,
            prepare=prepare,
        )
        self.model = self.pipeline.stages[0].model
        del self.plain  # its model was taken apart

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.pipeline.named_parameters()

    def named_buffers(self) -> dict[str, Tensor]:
        return {name: buffer for stage in self.pipeline.stages for name, buffer in saved_buffers(stage.model).items()}

    def gradients(self, x: Tensor, y: Tensor, micro: Micro) -> Tensor:
        from attnres.scale.shard import mean_gradients

        # `micro` is not called: the schedule runs the passes, so loss and penalty are repeated here.
        total = self.pipeline.step(x, y, 1 / y.numel())
        penalty = self.pipeline.residual("penalty")
        if penalty is not None and self.pipeline.rank == 0:
            penalty.backward()
        self.pipeline.reduce_gradients()
        if self.alike is not None:
            mean_gradients((p for _, p in self.named_parameters() if "shard" not in _axes(p)), self.alike)
        return torch.stack([total, torch.zeros_like(total)])

    def clip(self, limit: float) -> Tensor:
        from attnres.scale.shard import clip_gradients, shards_of

        shared = {id(p) for p in self.pipeline.residual.parameters()}
        tied = {id(p) for p in self.pipeline.tied_here()}

        def copies(parameter: nn.Parameter) -> float:
            stages = self.layout.parallel.pp if id(parameter) in shared else 2 if id(parameter) in tied else 1
            return stages * self.shares / shards_of(parameter)

        return clip_gradients((p for _, p in self.named_parameters()), limit, copies)

    def window_losses(self, windows: Tensor, rows: int) -> np.ndarray:
        from attnres.scale.shard import let_go

        stages = nn.ModuleList(self.pipeline.stages)
        size, place = rows * self.layout.accumulation, (self.rank, self.shares)
        with torch.compiler.set_stance("force_eager"):
            losses = validate.shared_out(
                self.pipeline.evaluate, lambda weights: weights, stages, windows, self.who, size, place, filled=True
            )
        for stage in stages:
            let_go(stage)
        return losses


def _axes(parameter: Tensor) -> tuple[str, ...]:
    """Return the mesh axes over which a parameter is sharded."""
    return parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()


def _groups(mesh: DeviceMesh, names: tuple[str, str]) -> Any:
    """Return the processes along several axes of the mesh as one group; None for a single process."""
    plane = mesh[names]
    if plane.size() == 1:
        return None
    return plane._flatten("alike").get_group() if 1 not in plane.shape else mesh.get_group(names[plane.shape[0] == 1])


def _rebuilder(model: Any) -> Callable[[dict[str, Tensor] | None], Any]:
    """Return a function that builds the model on one process from its tensors; it returns None for None."""
    device = next(model.parameters()).device
    cls, config, generation = type(model), copy.deepcopy(model.config), copy.deepcopy(model.generation_config)

    def rebuild(tensors: dict[str, Tensor] | None) -> Any:
        if tensors is None:
            return None
        with torch.random.fork_rng(devices=[]):
            model = cls(config)
        places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in tensors.items():
            places[name].data = tensor
        model.generation_config = generation
        return model.to(device).train()

    return rebuild


def collected(tensors: Mapping[str, Tensor], who: Processes) -> dict[str, Tensor] | None:
    """Return all named tensors of all processes, gathered, on the first process; None on others. Gathers one at a time.

    A tensor on several processes is taken from the lowest rank.
    """
    names = who.gather(list(tensors))
    owners = {name: rank for rank in reversed(range(who.world_size)) for name in names[rank]}
    forms = {name: (list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()}
    shapes = {name: form for part in who.gather(forms) for name, form in part.items()}
    gathered: dict[str, Tensor] = {}
    for name, owner in owners.items():
        tensor = tensors.get(name)
        if isinstance(tensor, DTensor):
            # experts sharded along two axes take two messages to gather, of which torch would warn tensor by tensor
            with errors_alone("torch.distributed.tensor._redistribute"):
                tensor = tensor.full_tensor()
        if owner and who.rank == owner:
            assert tensor is not None
            torch.distributed.send(tensor.detach().contiguous(), 0)
        elif owner and who.first:
            shape, dtype = shapes[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=who.device)
            torch.distributed.recv(tensor, owner)
        if who.first:
            assert tensor is not None
            gathered[name] = tensor.detach().cpu().clone()
    return gathered if who.first else None
