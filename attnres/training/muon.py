"""torch's Muon for stacks of small matrices, in fp32 where bf16 is emulated, and for sharded parameters.

torch orthogonalises one matrix after the other, in some thirty operations each, in bf16. For small matrices the call
overhead dominates; here all matrices of one shape are stacked, and an operation is one call for the stack. The result
is that of torch's Muon, on a CPU mostly to the last bit. Where bf16 is emulated (most laptops' CPUs, older GPUs) its
products take tens of times as long as in fp32, so matrices are orthogonalised in fp32 there.

torch's Muon takes DTensors too, but then each product of the Newton-Schulz steps may communicate, and all ranks compute
the same products. `OwnedMuon` gathers the update of a matrix once, on the rank that owns the matrix, which
orthogonalises it and scatters the result: two messages of the matrix's size, and the work is divided among the ranks.
Momentum stays sharded.

A mixture's experts are one tensor (E, rows, columns), and each is a separate matrix. Sharding gives a rank whole
experts, which it orthogonalises without communication.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from attnres.ops.devices import is_host
from attnres.scale.shard import local
from attnres.training import environment


class StackedMuon(torch.optim.Muon):
    """torch.optim.Muon with small matrices of one shape orthogonalised in one stack, and all of them where bf16 is
    emulated.

    Attributes:
        small: values of the largest matrix that is stacked on a CPU. There a stack of 384 x 128 takes 0.72 of the time,
            of 256 x 256 0.89, of 768 x 256 1.05 (`benchmarks/muon.py`). On a GPU, where call overhead dominates, every
            matrix is stacked (not measured).
        most: most values of a stack, unless a single matrix has more: the steps allocate four more tensors of its size.
    """

    small: int = 1 << 16
    most: int = 1 << 26

    def __init__(self, params: Any, **options: Any) -> None:
        """Construct torch's Muon, which refuses stacked experts and so gets a matrix in their place."""
        torch.optim.Muon.__init__(self, [nn.Parameter(torch.zeros(1, 1))], **options)
        self.param_groups.clear()
        params = list(params)
        for group in params if isinstance(params[0], dict) else [{"params": params}]:
            self.add_param_group(dict(group))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # ty: ignore[incompatible-method-override]
        assert closure is None
        updated = [parameter for group in self.param_groups for parameter in self._update_all(group)]
        gradients = [parameter.grad for parameter in updated]
        for parameter in updated:
            parameter.grad = None
        super().step()
        for parameter, gradient in zip(updated, gradients, strict=True):
            parameter.grad = gradient

    def _update_all(self, group: dict[str, Any]) -> Iterable[nn.Parameter]:
        """Update the parameters that are not left to torch, and return them."""
        stacks: dict[Any, list[Any]] = {}
        for p in group["params"]:
            if p.grad is None or isinstance(p, DTensor):
                continue
            alone = p.ndim == 2 and p.numel() > self.small and is_host(p.device)
            if not alone or precision(p.device) is torch.float32:
                stacks.setdefault((p.shape, p.device, p.dtype, p.grad.dtype), []).append(p)
        for parameters in stacks.values():
            size = max(1, self.most // parameters[0].numel())
            for start in range(0, len(parameters), size):
                self._update_stack(parameters[start : start + size], group)
        return [parameter for parameters in stacks.values() for parameter in parameters]

    def _update_stack(self, parameters: list[Any], group: dict[str, Any]) -> None:
        """Update matrices of one shape, or experts, in as many calls as one of them needs."""
        momenta = self._momenta(parameters, group)
        parameters = [local(parameter) for parameter in parameters]
        shape = parameters[0].shape[-2:]
        matrices = [matrix for momentum in momenta for matrix in momentum.view(-1, *shape).unbind()]
        size = max(1, self.most // shape.numel())
        parts = [orthogonal(matrices[start : start + size], group) for start in range(0, len(matrices), size)]
        changes = torch.cat(parts).view(len(parameters), *parameters[0].shape)
        changes = changes.to(parameters[0].dtype, memory_format=torch.contiguous_format)
        rate = rate_of(shape, group)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        if isinstance(rate, Tensor):  # a captured step reads the learning rate on the device
            torch._foreach_add_(parameters, changes.mul_(-rate).unbind())
        else:
            torch._foreach_add_(parameters, changes.unbind(), alpha=-rate)

    def _momenta(self, parameters: list[Any], group: dict[str, Any]) -> Sequence[Tensor]:
        """Update the momenta and return the matrices to orthogonalise; for DTensors this rank's shards."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradients = [local(parameter.grad) for parameter in parameters]
        buffers = [local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            return torch._foreach_lerp(gradients, buffers, group["momentum"])
        return [buffer.clone() for buffer in buffers]


@functools.cache
def precision(device: torch.device) -> torch.dtype:
    """Return the dtype of the Newton-Schulz steps: bf16, as in torch's Muon, or fp32 on a device without bf16
    products."""
    return torch.bfloat16 if environment.has_bf16(device) else torch.float32


def orthogonal(updates: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """Return a stack of matrices of one shape after the Newton-Schulz steps of torch's Muon, in `precision`."""
    (rows, columns), (a, b, c) = updates[0].shape, group["ns_coefficients"]
    x = torch.stack(list(updates)).to(precision(updates[0].device))
    x = x.mT.contiguous() if rows > columns else x
    x /= torch.stack(torch._foreach_norm(x.unbind())).clamp(min=group["eps"])[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


def rate_of(shape: torch.Size, group: dict[str, Any]) -> float | Tensor:
    """Return the learning rate for a matrix of this shape, as in torch's Muon; a tensor if the group's rate is one."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return group["lr"] * 0.2 * math.sqrt(max(rows, columns))
    return group["lr"] * math.sqrt(max(1, rows / columns))


# ------------------------------------------------------------------ sharded parameters


class OwnedMuon(StackedMuon):
    """`StackedMuon`, with each DTensor orthogonalised by one rank.

    Matrices go to their owners largest first, as many at a time as there are ranks. A matrix sharded along two axes of
    the mesh (tensor parallel and FSDP) is gathered and orthogonalised by all ranks.
    """

    def _update_all(self, group: dict[str, Any]) -> Iterable[nn.Parameter]:
        sharded = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
        sharded.sort(key=lambda p: -p.numel())
        experts = [p for p in sharded if p.ndim == 3]
        for parameter in experts:
            if parameter.to_local().numel():  # with fewer experts than ranks some ranks have none
                self._update_stack([parameter], group)
        matrices = [p for p in sharded if p.ndim == 2]
        self._owned([p for p in matrices if len(_axes(p)) == 1], group)
        self._by_all([p for p in matrices if len(_axes(p)) > 1], group)
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
            full_update = DTensor.from_local(update, mesh, places, run_check=False, **form).full_tensor()
            delta = DTensor.from_local(
                _orthogonal(full_update, group), mesh, [Replicate()] * mesh.ndim, run_check=False
            )
            _add(parameter, delta.redistribute(mesh, places).to_local(), group)


def _axes(parameter: Any) -> list[int]:
    """Return the axes of the mesh along which a parameter is sharded."""
    return [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]


def _add(parameter: Any, delta: Tensor, group: dict[str, Any]) -> None:
    shard = parameter.to_local()
    shard.mul_(1 - group["lr"] * group["weight_decay"])
    shard.add_(delta)


class _Divided:
    """A matrix whose rows or columns are sharded over ranks.

    Messages carry rows; a matrix sharded by columns is transposed. They are padded to the same number of rows.
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
        """Send this rank's part to the owner, which alone receives all parts."""
        filled = self._filled(part, self.rows)
        is_owner = dist.get_rank(self.ranks) == owner
        parts = [torch.empty_like(filled) for _ in range(dist.get_world_size(self.ranks) if is_owner else 0)]
        target = dist.get_global_rank(self.ranks, owner)
        return dist.gather(filled, parts if is_owner else None, dst=target, group=self.ranks, async_op=True), parts

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the matrix joined from these parts."""
        return torch.cat(list(parts))[: self.count].transpose(0, self.dim).contiguous()

    def scatter(self, whole: Tensor | None, owner: int) -> tuple[Any, Tensor]:
        """Return this rank's part of the owner's matrix, once the operation is done."""
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
    """Return the orthogonalised update, as torch's Muon would add it to a zero parameter without momentum."""
    if precision(update.device) is torch.float32:
        return orthogonal([update], group)[0].to(update.dtype) * -rate_of(update.shape, group)
    parameter = nn.Parameter(torch.zeros_like(update))
    parameter.grad = update
    options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([parameter], **options, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return parameter.detach()
