"""What is known of a norm's arithmetic from its module: the value that a read takes to norm what it gives."""

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres.device import autocast_dtype
from attnres.models.exchange import own_class
from attnres.ops.bank import Bank
from attnres.ops.norms import Norm
from attnres.residuals.base import NormLike, as_it_is


def _forward(module: nn.Module) -> Callable:
    """The forward of a norm's own class."""
    return own_class(module).forward


def describe_norm(module: nn.Module, like: Tensor) -> NormLike:
    """A pre-norm as a value, where its arithmetic is known; else what it computes, as a function: the module has been
    called with the stream already, and its hooks with it.

    Under autocast the normed vector comes out in the autocast dtype, since only matrix products consume it.
    """
    out_dtype = autocast_dtype(like.device.type)
    if isinstance(module, nn.LayerNorm) and _forward(module) is nn.LayerNorm.forward:
        return Norm(module.weight, module.bias, module.eps, center=True, out_dtype=out_dtype)
    eps = getattr(module, "variance_epsilon", None)  # the RMSNorm that most families copy from each other
    if eps is not None and module.__dict__.get("is_rms_norm", True):
        weight: Any = module._parameters.get("weight")
        return Norm(cast(Tensor, module.weight) if weight is None else weight, None, eps, False, out_dtype)
    return functools.partial(_forward(module), module)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a norm with a `variance_epsilon` computes x / rms(x) * weight, as far as one vector tells."""
    weight: Any = module._parameters.get("weight")
    if weight is None:
        return True
    norm, eps = copy.copy(module), cast(float, module.variance_epsilon)
    grid = torch.linspace(0.0, 1.0, weight.numel(), dtype=torch.float32, device="cpu")
    scale, x = (0.5 + grid).view(weight.shape), (3 * grid - 1).view(1, *weight.shape)
    norm._parameters = {**module._parameters, "weight": nn.Parameter(scale, requires_grad=False)}
    with torch.no_grad():
        try:
            return torch.allclose(
                _forward(module)(norm, x), nn.functional.rms_norm(x, scale.shape, scale, eps), atol=1e-4
            )
        except (RuntimeError, TypeError):
            return False


class KnownNorm:
    """A norm module as a bank's read knows it from one pass to the next.

    Attributes:
        fused: its arithmetic, where that is known; else None, and `apply` is the module's forward, or nothing.
    """

    def __init__(self, module: nn.Module | None, like: Tensor, bank: Bank) -> None:
        spec = as_it_is if module is None else describe_norm(module, like)
        self.module, self.fused = module, spec if isinstance(spec, Norm) else None
        self.apply = as_it_is if isinstance(spec, Norm) else spec
        self.places = _places(self.fused)
        vectors = () if self.fused is None else (self.fused.weight, self.fused.bias)
        self.is_copied = not all(vector is None or bank.takes(vector) for vector in vectors)
        self.device = like.device.type
        self.eps_name = "eps" if isinstance(module, nn.LayerNorm) else "variance_epsilon"

    def holds(self, module: nn.Module | None) -> bool:
        """Whether this is the module, and its weights, of which the bank has no copies, lie where they lay, with the
        same eps and autocast."""
        fused = self.fused
        if module is not self.module or fused is None or module is None:
            return module is self.module
        if self.is_copied:
            return False
        vectors = module._parameters
        return (
            vectors.get("weight") is fused.weight
            and vectors.get("bias") is fused.bias
            and self.places == _places(fused)
            and getattr(module, self.eps_name) == fused.eps
            and autocast_dtype(self.device) is fused.out_dtype
        )


def _places(norm: Norm | None) -> tuple[int, int]:
    """Where a norm's weight and bias lie."""
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return (0 if weight is None else weight.data_ptr()), (0 if bias is None else bias.data_ptr())
