"""torch's Muon for many small matrices, and for devices that compute bf16 by emulation.

torch orthogonalises one matrix after the other, in some thirty operations each, in bf16. Of small matrices those take
the time of their calls; here all of one shape are one stack, and an operation is one call for the stack. What comes out
is what torch's Muon gives, on a CPU mostly to the last bit. Where bf16 is emulated (most laptops' processors, older
GPUs) its products take tens of times as long as in fp32: all matrices are orthogonalised in fp32 there.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnres.scale.shard import local
from attnres.training import environment


class StackedMuon(torch.optim.Muon):
    """torch.optim.Muon, small matrices of one shape orthogonalised in one stack; all of them where bf16 is emulated.

    Attributes:
        small: values of the largest matrix that is put into a stack on a CPU. There a stack of 384 x 128 takes 0.72 of
            the time, of 256 x 256 0.89, of 768 x 256 1.05 (`benchmarks/muon.py`). On a GPU, which waits for calls
            rather than for products, every matrix is (not measured).
        most: values of a stack, unless one matrix has more: the steps make four more of its size.
    """

    small: int = 1 << 16
    most: int = 1 << 26

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
        """Update what is not left to torch, and return it."""
        stacks: dict[Any, list[Any]] = {}
        for p in group["params"]:
            if p.grad is None or isinstance(p, DTensor):
                continue
            if p.numel() <= self.small or p.is_cuda or precision(p.device) is torch.float32:
                stacks.setdefault((p.shape, p.device, p.dtype, p.grad.dtype), []).append(p)
        for parameters in stacks.values():
            size = max(1, self.most // parameters[0].numel())
            for start in range(0, len(parameters), size):
                self._update_stack(parameters[start : start + size], group)
        return [parameter for parameters in stacks.values() for parameter in parameters]

    def _update_stack(self, parameters: list[Any], group: dict[str, Any]) -> None:
        """Update matrices of one shape, in as many calls as one of them takes."""
        changes = orthogonal(self._momenta(parameters, group), group)
        changes = changes.to(parameters[0].dtype, memory_format=torch.contiguous_format)
        rate = rate_of(parameters[0].shape, group)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        if isinstance(rate, Tensor):  # of a captured step, which reads it on the device
            torch._foreach_add_(parameters, changes.mul_(-rate).unbind())
        else:
            torch._foreach_add_(parameters, changes.unbind(), alpha=-rate)

    def _momenta(self, parameters: list[Any], group: dict[str, Any]) -> Sequence[Tensor]:
        """Return what is to be orthogonalised, of DTensors this rank's shares; their momenta move on."""
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
    """That of the Newton-Schulz steps: bf16, as torch's Muon has it, or fp32 where the device has no bf16 products."""
    return torch.bfloat16 if environment.has_bf16(device) else torch.float32


def orthogonal(updates: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """Return a stack of matrices of one shape after the Newton-Schulz steps that torch's Muon takes, in `precision`."""
    (rows, columns), (a, b, c) = updates[0].shape, group["ns_coefficients"]
    x = torch.stack(list(updates)).to(precision(updates[0].device))
    x = x.mT.contiguous() if rows > columns else x
    x /= torch.stack(torch._foreach_norm(x.unbind())).clamp(min=group["eps"])[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


def rate_of(shape: torch.Size, group: dict[str, Any]) -> float | Tensor:
    """Return the rate of a matrix of this shape, as torch's Muon has it; a tensor where the group's is one."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return group["lr"] * 0.2 * math.sqrt(max(rows, columns))
    return group["lr"] * math.sqrt(max(1, rows / columns))
