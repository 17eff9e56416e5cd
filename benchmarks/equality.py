"""How far a depth read and its gradients are from the fp64 oracle."""

from collections.abc import Callable
from typing import Any

import torch
from harness import attempt, randn
from torch import Tensor

from attnres.ops import depth_read_reference

WRONG = 0.05
"""Relative rms error beyond which a peer is wrong (bf16 rounds to 0.004): it is then shown, and not timed."""


class Inputs:
    """One read's inputs that every peer takes without further rounding: queries and gains exact in bf16, and so their
    product, gains being powers of two."""

    def __init__(self, n: int, tokens: int, width: int, device: torch.device, dtype: torch.dtype, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        cpu = torch.device("cpu")
        self.sources = [randn((tokens, width), generator, device, dtype) for _ in range(n)]
        query = randn((width,), generator, cpu, torch.float32) / width**0.5
        self.query = query.bfloat16().float().to(device)
        self.gain = torch.tensor([0.5, 1.0, 2.0])[torch.arange(width) % 3].to(device)
        self.grad = randn((tokens, width), generator, device, dtype)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """query, gain and the sources as leaves that want gradients, in their own dtypes or in `dtype`."""
        tensors = [self.query, self.gain, *self.sources]
        return [tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_() for tensor in tensors]


def _results(leaves: list[Tensor], h: Tensor, grad: Tensor) -> dict[str, list[Tensor]]:
    gradients = torch.autograd.grad(h, leaves, grad.to(h.dtype))
    return {"h": [h.detach()], "query": [gradients[0]], "gain": [gradients[1]], "sources": list(gradients[2:])}


def errors(read: Callable[..., Tensor], inputs: Inputs, eps: float = 1e-6) -> dict[str, dict[str, float]]:
    """How far a read and its gradients are from the fp64 oracle: {h, query, gain, sources} -> {max, relative rms}.

    `read(sources, query, gain, eps)` is called on `inputs`.
    """
    exact = inputs.leaves(torch.float64)
    oracle = _results(exact, depth_read_reference(exact[2:], exact[0], exact[1], eps=eps)[0], inputs.grad)
    leaves = inputs.leaves()
    mine = _results(leaves, read(leaves[2:], leaves[0], leaves[1], eps), inputs.grad)
    largest = {}
    for part, tensors in oracle.items():
        difference = torch.stack([a.double() - b for a, b in zip(mine[part], tensors, strict=True)])
        scale = torch.stack(tensors).square().mean().sqrt().item()
        largest[part] = {
            "max": difference.abs().max().item(),
            "relative_rms": difference.square().mean().sqrt().item() / max(scale, 1e-300),
        }
    return largest


def compare(read: Callable[..., Tensor], inputs: Inputs) -> dict[str, Any]:
    """How exact a read is: {"errors", "max_error" of h}, with a "reason" if it is wrong; that alone if it fails."""
    rows: dict[str, Any] = {}
    reason = attempt(lambda: rows.update(errors(read, inputs)))
    if reason is not None:
        return {"reason": reason}
    worst = max(error["relative_rms"] for error in rows.values())
    wrong = not worst <= WRONG
    reason = {"reason": f"wrong: relative rms error {worst:.2g}"} if wrong else {}
    return {"max_error": rows["h"]["max"], "errors": rows, **reason}
