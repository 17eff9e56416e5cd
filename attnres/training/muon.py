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
        small: values of the largest matrix that is put into a stack. On a CPU a stack of 384 x 128 takes 0.72 of the
            time, of 256 x 256 0.89, of 768 x 256 1.05 (`benchmarks/muon.py`; not measured on a GPU).
    """

    small: int = 1 << 16

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
            if p.numel() <= self.small or precision(p.device) is torch.float32:
                stacks.setdefault((p.shape, p.device, p.dtype, p.grad.dtype), []).append(p)
        for parameters in stacks.values():
            changes = orthogonal([self._momentum(p, group) for p in parameters], group)
            rate = rate_of(parameters[0].shape, group)
            for parameter, change in zip(parameters, changes, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(change, alpha=-rate)
        return [parameter for parameters in stacks.values() for parameter in parameters]

    def _momentum(self, parameter: Any, group: dict[str, Any]) -> Tensor:
        """Return what is to be orthogonalised, of a DTensor this rank's share; its momentum moves on."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        gradient, buffer = local(parameter.grad), local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()


@functools.cache
def precision(device: torch.device) -> torch.dtype:
    """That of the Newton-Schulz steps: bf16, as torch's Muon has it, or fp32 where the device has no bf16 products."""
    return torch.bfloat16 if environment.has_bf16(device) else torch.float32


def orthogonal(updates: Sequence[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
    """Return matrices of one shape after the Newton-Schulz steps that torch's Muon takes, in `precision`."""
    (rows, columns), (a, b, c) = updates[0].shape, group["ns_coefficients"]
    x = torch.stack(list(updates)).to(precision(updates[0].device))
    x = x.mT.contiguous() if rows > columns else x
    x /= torch.stack([each.norm() for each in x]).clamp(min=group["eps"])[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if rows > columns else x).unbind()


def rate_of(shape: torch.Size, group: dict[str, Any]) -> float:
    """Return the rate of a matrix of this shape, as torch's Muon has it."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return group["lr"] * 0.2 * math.sqrt(max(rows, columns))
    return group["lr"] * math.sqrt(max(1, rows / columns))
