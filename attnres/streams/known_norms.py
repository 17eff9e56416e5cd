"""Norm modules as values with which a read is fused, and the replacement of a module's class by one that reads."""

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from attnres.device import autocast_dtype
from attnres.ops.norms import Norm
from attnres.residuals.watch import NormLike


class Exchanged(nn.Module):
    """Base class of the mixins that `exchange` adds to a module's class; copies and pickles of the module keep it."""

    renames: ClassVar[bool] = True
    """Whether the class gets another name: inference servers replace any class named `...RMSNorm` by their norm, which
    would undo the exchange. A layer keeps its name, by which FSDP finds it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, type(self).__bases__, self.__dict__


def exchange(module: nn.Module, mixin: type[Exchanged]) -> None:
    """Add `mixin` in front of the class of this module, unless it is there already."""
    if not isinstance(module, mixin):
        module.__class__ = _exchanged(mixin, type(module))


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before an exchange."""
    cls: Any = type(module)
    while issubclass(cls, Exchanged):
        cls = cls.__bases__[1]
    return cls


@functools.cache
def _exchanged(mixin: type[Exchanged], cls: type[nn.Module]) -> type[nn.Module]:
    """Return the combined class; it has the module's class name, followed by the mixin's if `renames` is set."""
    bases: tuple[type, ...] = (mixin, cls)
    name = f"{cls.__name__}{mixin.__name__.lstrip('_')}" if mixin.renames else cls.__name__
    return type(name, bases, {"__module__": __name__})


def _empty(mixin: type[Exchanged], cls: type[nn.Module]) -> nn.Module:
    """Return an empty module of the combined class, for unpickling and copying."""
    return object.__new__(_exchanged(mixin, cls))


def _forward(module: nn.Module) -> Callable:
    """Return the forward of a norm's original class."""
    return own_class(module).forward


def describe_norm(module: nn.Module, like: Tensor) -> NormLike:
    """Return a pre-norm as a value if its arithmetic is known, else as a function; the module itself has already been
    called with the stream, and its hooks have run.

    Under autocast the normed vector has the autocast dtype, since only matrix products use it.
    """
    out_dtype = autocast_dtype(like.device.type)
    if isinstance(module, nn.LayerNorm) and _forward(module) is nn.LayerNorm.forward:
        return Norm(module.weight, module.bias, module.eps, center=True, out_dtype=out_dtype)
    if isinstance(module, nn.RMSNorm) and _forward(module) is nn.RMSNorm.forward and len(module.normalized_shape) == 1:
        eps = torch.finfo(like.dtype).eps if module.eps is None else module.eps
        return Norm(module.weight, None, eps, False, out_dtype)
    eps = getattr(module, "variance_epsilon", None)  # many families have a copy of this RMSNorm
    if eps is not None and module.__dict__.get("is_rms_norm", True):
        weight: Any = module._parameters.get("weight")
        return Norm(cast(Tensor, module.weight) if weight is None else weight, None, eps, False, out_dtype)
    return functools.partial(_forward(module), module)


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a norm with a `variance_epsilon` computes x / rms(x) * weight, as tried on one vector."""
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
