"""Muon over parameters that lie in shares: momentum stays in shares, one rank orthogonalises a matrix for all.

torch's Muon takes DTensors too, but then each product of the Newton-Schulz steps may communicate, and all ranks make
the same products. Here the update of a matrix is gathered once, by the rank that owns the matrix, orthogonalised there
by torch's own Muon (in fp32 by `orthogonal`, where bf16 is emulated), and the result is scattered: two messages of the
matrix's size, and the work is shared out.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from attnres.training.muon import StackedMuon, orthogonal, precision, rate_of

_OPTIONS = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


class OwnedMuon(StackedMuon):
    """`StackedMuon`, each DTensor orthogonalised by one rank.

    Matrices go to their owners largest first, as many at a time as there are ranks. One that lies in shares along two
    axes of the mesh (slices of which each is in shares) is gathered and orthogonalised by all.
    """

    def _update_all(self, group: dict[str, Any]) -> Iterable[nn.Parameter]:
        sharded = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
        sharded.sort(key=lambda p: -p.numel())
        self._owned([p for p in sharded if len(_axes(p)) == 1], group)
        self._by_all([p for p in sharded if len(_axes(p)) > 1], group)
        return [*sharded, *super()._update_all(group)]

    def _owned(self, parameters: Sequence[Any], group: dict[str, Any]) -> None:
        if not parameters:
            return
        ranks = parameters[0].device_mesh.get_group(_axes(parameters[0])[0])
        count, here = dist.get_world_size(ranks), dist.get_rank(ranks)
        for start in range(0, len(parameters), count):
            several = [_Divided(p, ranks) for p in parameters[start : start + count]]
            gathered = [
                divided.gather(self._momenta([divided.parameter], group)[0], owner)
                for owner, divided in enumerate(several)
            ]
            for work, _ in gathered:
                work.wait()
            deltas: list[Tensor | None] = [None] * len(several)
            if here < len(several):
                deltas[here] = _orthogonal(several[here].joined(gathered[here][1]), group)
            scattered = [divided.scatter(deltas[owner], owner) for owner, divided in enumerate(several)]
            for divided, (work, part) in zip(several, scattered, strict=True):
                work.wait()
                _add(divided.parameter, part, group)

    def _by_all(self, parameters: Sequence[Any], group: dict[str, Any]) -> None:
        for parameter in parameters:
            mesh, places = parameter.device_mesh, parameter.placements
            update = self._momenta([parameter], group)[0]
            form = {"shape": parameter.shape, "stride": parameter.stride()}
            whole = DTensor.from_local(update, mesh, places, run_check=False, **form).full_tensor()
            delta = DTensor.from_local(_orthogonal(whole, group), mesh, [Replicate()] * mesh.ndim, run_check=False)
            _add(parameter, delta.redistribute(mesh, places).to_local(), group)


def _axes(parameter: Any) -> list[int]:
    """Return the axes of the mesh along which a parameter is shared out."""
    return [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]


def _add(parameter: Any, delta: Tensor, group: dict[str, Any]) -> None:
    ours = parameter.to_local()
    ours.mul_(1 - group["lr"] * group["weight_decay"])
    ours.add_(delta)


class _Divided:
    """A matrix whose rows or columns are shared out among ranks.

    Messages carry its rows: of one whose columns are shared out it is turned. They are filled up to the same number.
    """

    def __init__(self, parameter: Any, ranks: dist.ProcessGroup) -> None:
        self.parameter, self.ranks = parameter, ranks
        self.dim = parameter.placements[_axes(parameter)[0]].dim
        self.count = parameter.shape[self.dim]
        self.rows = -(-self.count // dist.get_world_size(ranks))

    def _filled(self, part: Tensor, rows: int) -> Tensor:
        turned = part.transpose(0, self.dim)
        filled = turned.new_zeros(rows, *turned.shape[1:])
        filled[: turned.shape[0]] = turned
        return filled

    def gather(self, part: Tensor, owner: int) -> tuple[Any, list[Tensor]]:
        """Send this rank's part to the owner, who alone gets all parts."""
        filled = self._filled(part, self.rows)
        mine = dist.get_rank(self.ranks) == owner
        parts = [torch.empty_like(filled) for _ in range(dist.get_world_size(self.ranks) if mine else 0)]
        target = dist.get_global_rank(self.ranks, owner)
        return dist.gather(filled, parts if mine else None, dst=target, group=self.ranks, async_op=True), parts

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the matrix of which these are the parts."""
        return torch.cat(list(parts))[: self.count].transpose(0, self.dim).contiguous()

    def scatter(self, whole: Tensor | None, owner: int) -> tuple[Any, Tensor]:
        """Return this rank's part of what the owner has, once the work is done."""
        ours = self.parameter.to_local()
        turned = ours.transpose(0, self.dim)
        received = turned.new_empty(self.rows, *turned.shape[1:])
        parts = None
        if whole is not None:
            parts = list(self._filled(whole, self.rows * dist.get_world_size(self.ranks)).split(self.rows))
        source = dist.get_global_rank(self.ranks, owner)
        work = dist.scatter(received, parts, src=source, group=self.ranks, async_op=True)
        return work, received[: turned.shape[0]].transpose(0, self.dim)


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Return what torch's Muon adds to a parameter with this update. It is given one of zeros, without momentum."""
    if precision(update.device) is torch.float32:
        return orthogonal([update], group)[0].to(update.dtype) * -rate_of(update.shape, group)
    parameter = nn.Parameter(torch.zeros_like(update))
    parameter.grad = update
    options = {name: group[name] for name in _OPTIONS}
    torch.optim.Muon([parameter], **options, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return parameter.detach()
