"""Sharded parameters (FSDP2, HSDP), and the norm of gradients that are sharded, replicated or both."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from attnres.models import DepthMixin
from attnres.scale.experts import stacked_experts
from attnres.scale.stage import Skipped


def shard(
    model: DepthMixin,
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    experts: DeviceMesh | None = None,
    reshard: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Shard every parameter over `mesh` but the residual's, which stay replicated and fp32.

    Each layer is gathered and resharded separately; what is in no layer (embedding, final norm, head) belongs to
    `root`. The residual's gradients differ between ranks: `mean_gradients` averages them.

    Args:
        root: the module that is called: the model, or the stage around it.
        experts: the processes with the same experts, among which these are sharded instead (`distribute_experts`).
        reshard: reshard a layer's parameters after its forward pass, and gather them again in backward.
        dtype: dtype in which layers are gathered: bf16 halves the bytes, and autocast would keep its casts of all
            layers until backward. The root is gathered in it if it is the stream's dtype. Gradients are summed in the
            parameters' dtype.
    """
    # Nothing here changes a layer's output in place, which is all that this warning is about.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    reduced = next(model.parameters()).dtype
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    for module in stacked_experts(model).values() if experts is not None else ():
        fully_shard(module, mesh=experts, reshard_after_forward=reshard, mp_policy=precision)
    for layer in model.depth_layers:
        if not isinstance(layer, Skipped):
            fully_shard(layer, **options, mp_policy=precision)
    if dtype is not None and model.residual.itself().stream_dtype == dtype:
        options["mp_policy"] = precision  # an embedding gathered in fp32 would be rounded to it anyway
    fully_shard(root, **options, ignored_params=set(model.residual.parameters()))


def let_go(root: nn.Module) -> None:
    """Reshard every parameter that a forward pass gathered, which nothing else does if no backward pass follows."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, not copied; another tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: Tensor) -> int:
    """Return the number of shards of a tensor; 1 if it is replicated."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, over: int = 1) -> None:
    """Replace gradients by their sum over a group divided by `over`, in one message; sharded ones shard by shard.

    A parameter without a gradient on one rank counts as zero there.
    """
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local(p.grad) for p in trained if p.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        several = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in several])
        dist.all_reduce(flat, group=group)
        if over > 1:
            flat /= over
        for gradient, part in zip(several, flat.split([gradient.numel() for gradient in several]), strict=True):
            gradient.copy_(part.view_as(gradient))


def mean_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over a group."""
    sum_gradients(parameters, group, dist.get_world_size(group))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, copies: Callable[[nn.Parameter], float]) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `limit`; return the norm it was.

    Args:
        copies: returns the number of ranks that hold the same values of a gradient, which count once.
    """
    gradients = [(parameter, local(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    device = gradients[0][1].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter, gradient in gradients:
        total += torch.linalg.vector_norm(gradient).double().square() / copies(parameter)
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm
