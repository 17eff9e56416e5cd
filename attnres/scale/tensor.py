"""Tensor and sequence parallelism: layers' matrices and the stream's tokens are split over ranks, layers unchanged.

How a matrix is split is Transformers' `tp_plan` of the family: by columns where queries, keys, values and gates are
computed, by rows after them. Between those the stream is split along the sequence. The decoder makes masks and rotary
embeddings for all tokens; a pass begins with a rank's tokens, which are gathered before an attention or MLP and
reduce-scattered after it. Depth reads and norms are per token, so they need no communication, and the N sources of a
network are N/P vectors a token on each of P ranks.

A pass of fewer tokens than ranks (a decoded token) keeps the stream replicated.
"""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attnres.errors import UserError
from attnres.models import DepthMixin
from attnres.streams.stream import Stream

COLUMNS, ROWS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of a tp_plan that are implemented; others distribute whole heads or experts."""


class TokenSlices:
    """The tokens of a pass that this rank has.

    Attributes:
        shape: shape of the running pass's hidden state with all tokens, (B, T, d).
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.ranks = mesh, mesh.get_local_rank(), mesh.size()
        self.shape = torch.Size()

    def splits(self, tokens: int) -> bool:
        """Return whether this many tokens are split over the ranks: each must get one."""
        return -(-tokens // self.ranks) * (self.ranks - 1) < tokens

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of all tokens (B, T, ...), split as by `torch.chunk`."""
        return tensor.chunk(self.ranks, 1)[self.rank].contiguous() if self.splits(tensor.shape[1]) else tensor

    def begin(self, hidden: Tensor) -> Tensor:
        """Record the shape of the pass that begins with (B, T, d), and return this rank's tokens."""
        self.shape = hidden.shape
        return self.of(hidden)

    @property
    def placement(self) -> Shard | Replicate:
        """Return the placement of the stream on the ranks."""
        return Shard(1) if self.splits(self.shape[1]) else Replicate()

    def gathered(self, ours: Tensor) -> DTensor:
        """Return all tokens (B, T, d') from each rank's."""
        shape = torch.Size((*self.shape[:2], *ours.shape[2:]))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(ours.contiguous(), self.mesh, [self.placement], shape=shape, stride=stride)
        return parts.redistribute(placements=[Replicate()])


def share_out_layers(model: DepthMixin, mesh: DeviceMesh, *, whole_output: bool = False) -> TokenSlices:
    """Split the matrices of a model's layers over `mesh` (of one dimension), and the tokens of its passes.

    Parameters that are not split (embedding, norms, residual, head) get gradients of this rank's tokens or heads: their
    sum over the mesh is the gradient.

    Args:
        whole_output: gather the final norm's output, so that every rank has the logits of all tokens, as generation
            needs; otherwise each has those of its tokens.

    Raises:
        UserError: a model that does not divide by the mesh, or whose plan or residual is not supported.
    """
    check_slices(model, mesh.size())
    styles = plan_of(model)
    slices = TokenSlices(mesh)
    layers = model.depth_layers
    for layer in layers:
        columns = [name for name, style in styles.items() if style == COLUMNS and _has(layer, name)]
        rows = [name for name, style in styles.items() if style == ROWS and _has(layer, name)]
        plan: dict[str, Any] = dict.fromkeys(columns, ColwiseParallel())
        plan |= dict.fromkeys(rows, RowwiseParallel(output_layouts=Partial(), use_local_output=False))
        parallelize_module(layer, mesh, plan)
        for name in dict.fromkeys(name.rpartition(".")[0] for name in columns):
            layer.get_submodule(name).register_forward_pre_hook(InputHook(slices.gathered), with_kwargs=True)
        for name in rows:
            layer.get_submodule(name).register_forward_hook(partial(_scattered, slices))
    layers[0].register_forward_pre_hook(InputHook(slices.begin), prepend=True, with_kwargs=True)
    if whole_output:
        norm = model.depth_base.get_submodule(model.family.final_norm)
        norm.register_forward_hook(partial(_whole, slices))
    return slices


def plan_of(model: DepthMixin) -> dict[str, str]:
    """Return the styles of Transformers' plan, by path in a layer. Raises UserError without a plan, or for another
    style."""
    config: Any = model.config
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix = f"{model.family.layers}.*."
    styles = {name.removeprefix(prefix): style for name, style in plan.items() if name.startswith(prefix)}
    if not styles:
        raise UserError(f"Transformers has no tp_plan for {type(model).__name__}: train it with dp, shard or pp")
    for name, style in styles.items():
        if style not in (COLUMNS, ROWS, WHOLE):
            raise UserError(
                f"Transformers' tp_plan for {type(model).__name__} splits {name} as '{style}', which is not "
                f"implemented ({COLUMNS} and {ROWS} are): train it with dp, shard or pp"
            )
    return styles


def _has(layer: nn.Module, path: str) -> bool:
    return any(fnmatchcase(name, path) for name, _ in layer.named_modules())


def check_slices(model: DepthMixin, ranks: int) -> None:
    """Raise UserError for a model whose layers cannot be split over so many ranks."""
    plan_of(model)
    config = cast(Any, model.config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % ranks:
            raise UserError(f"{name} is {heads}, which does not divide by tp {ranks}: use a tp that divides the heads")
    for path, style, weight in sliced_weights(model):
        size = weight.shape[0 if style == COLUMNS else 1]
        if size % ranks:
            raise UserError(f"{path} has {size} features, which do not divide by tp {ranks}")
    residual = model.residual.itself()
    several = any(isinstance(way, str) for index in range(residual.num_sublayers) for way in residual.ways(index))
    if several or residual.value_mix is not None:
        raise UserError(
            f"the residual '{residual.name}' gives an attention several inputs, which tp does not gather: train it "
            "with dp and shard"
        )


def sliced_weights(model: DepthMixin) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the matrices that are split: path in a layer, style, weight."""
    for path, style in plan_of(model).items():
        for layer in model.depth_layers if style in (COLUMNS, ROWS) else ():
            if _has(layer, path):
                yield path, style, layer.get_parameter(f"{path}.weight")


class InputHook:
    """A pre-hook that applies a function to a module's input: `TokenSlices.begin` before the first layer takes this
    rank's tokens of the embedding, `TokenSlices.gathered` before an attention or MLP gathers all tokens."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.change(kwargs["hidden_states"])}


def _scattered(slices: TokenSlices, module: nn.Module, args: Any, output: DTensor) -> Tensor:
    """Return this rank's tokens of the sum over ranks, after the last matrix of an attention or MLP."""
    return output.redistribute(placements=[slices.placement]).to_local()


def _whole(slices: TokenSlices, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Return all tokens after the read of the final norm, which calls an unknown norm once more with a tensor."""
    return slices.gathered(output).to_local() if isinstance(args[0], Stream) else None
