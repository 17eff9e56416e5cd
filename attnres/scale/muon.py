"""Muon over parameters that lie in shares: momentum stays in shares, one rank orthogonalises a matrix for all.

torch's Muon takes DTensors too, but then each product of the Newton-Schulz steps may communicate, and all ranks make
the same products. Here the update of a matrix is gathered once, by the rank that owns the matrix, orthogonalised there
by torch's own Muon, and the result is scattered: two messages of the matrix's size, and the work is shared out.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

_OPTIONS = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


class OwnedMuon(torch.optim.Muon):
    """torch.optim.Muon, each DTensor orthogonalised by one rank; other parameters as torch does.

    Matrices go to their owners largest first, as many at a time as there are ranks.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # ty: ignore[incompatible-method-override]
        assert closure is None
        plain: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            sharded = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
            sharded.sort(key=lambda p: -p.numel())
            self._owned(sharded, group)
            plain += [(p, p.grad) for p in sharded]
        for parameter, _ in plain:
            parameter.grad = None
        super().step()
        for parameter, gradient in plain:
            parameter.grad = gradient

    def _owned(self, parameters: Sequence[Any], group: dict[str, Any]) -> None:
        if not parameters:
            return
        ranks = _group(parameters[0])
        count, here = dist.get_world_size(ranks), dist.get_rank(ranks)
        for start in range(0, len(parameters), count):
            several = parameters[start : start + count]
            parts = [self._update(p, group) for p in several]
            gathered = [_gather(p, part, owner, ranks) for owner, (p, part) in enumerate(zip(several, parts))]
            for work, _ in gathered:
                work.wait()
            deltas: list[Tensor | None] = [None] * len(several)
            if here < len(several):
                whole = torch.cat(gathered[here][1])[: several[here].shape[0]]
                deltas[here] = _orthogonal(whole, group)
            scattered = [_scatter(p, deltas[owner], owner, ranks) for owner, p in enumerate(several)]
            for parameter, (work, part) in zip(several, scattered, strict=True):
                work.wait()
                ours = parameter.to_local()
                ours.mul_(1 - group["lr"] * group["weight_decay"])
                ours.add_(part[: ours.shape[0]])

    def _update(self, parameter: Any, group: dict[str, Any]) -> Tensor:
        """Return this rank's share of what is to be orthogonalised; its momentum moves on."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer, gradient = state["momentum_buffer"].to_local(), parameter.grad.to_local()
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()


def _group(parameter: Any) -> dist.ProcessGroup:
    """Return the ranks among which rows of the parameter are shared out."""
    dims: Iterator[int] = (
        dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard) and placement.dim == 0
    )
    return parameter.device_mesh.get_group(next(dims))


def _rows(parameter: Any, ranks: dist.ProcessGroup) -> int:
    return -(-parameter.shape[0] // dist.get_world_size(ranks))


def _gather(parameter: Any, part: Tensor, owner: int, ranks: dist.ProcessGroup) -> tuple[Any, list[Tensor]]:
    """Send this rank's rows, filled up to the same number on every rank, to the owner."""
    filled = part.new_zeros(_rows(parameter, ranks), *part.shape[1:])
    filled[: part.shape[0]] = part
    parts = [torch.empty_like(filled) for _ in range(dist.get_world_size(ranks))]
    mine = dist.get_rank(ranks) == owner
    target = dist.get_global_rank(ranks, owner)
    return dist.gather(filled, parts if mine else None, dst=target, group=ranks, async_op=True), parts


def _scatter(parameter: Any, whole: Tensor | None, owner: int, ranks: dist.ProcessGroup) -> tuple[Any, Tensor]:
    """Return this rank's rows of what the owner has, filled up."""
    rows = _rows(parameter, ranks)
    part = parameter.to_local().new_empty(rows, *parameter.shape[1:])
    parts = None
    if whole is not None:
        filled = whole.new_zeros(rows * dist.get_world_size(ranks), *whole.shape[1:])
        filled[: whole.shape[0]] = whole
        parts = list(filled.split(rows))
    source = dist.get_global_rank(ranks, owner)
    return dist.scatter(part, parts, src=source, group=ranks, async_op=True), part


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return what torch's Muon adds to a parameter with this update: it is given one of zeros, without momentum."""
    parameter = nn.Parameter(torch.zeros_like(update))
    parameter.grad = update
    options = {name: group[name] for name in _OPTIONS}
    torch.optim.Muon([parameter], **options, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return parameter.detach()
