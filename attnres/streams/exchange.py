"""A module's class exchanged for a subclass that does one thing more: its parameters and names stay as they are."""

import functools
from typing import Any

from torch import nn


class Exchanged(nn.Module):
    """Mixed in front of a module's own class by `exchange`; copies and pickles of the module keep the exchange."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, type(self).__bases__, self.__dict__


def exchange(module: nn.Module, mixin: type[Exchanged]) -> None:
    """Put `mixin` in front of the class of this one module, unless it is there already."""
    if not isinstance(module, mixin):
        module.__class__ = _exchanged(mixin, type(module))


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before an exchange."""
    cls: Any = type(module)
    return cls.__bases__[1] if isinstance(module, Exchanged) else cls


@functools.cache
def _exchanged(mixin: type[Exchanged], cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class, whose name ends in the mixin's: servers put a norm of their own in place of whatever is called
    `...RMSNorm`, and with it the exchange would be gone."""
    bases: tuple[type, ...] = (mixin, cls)
    return type(f"{cls.__name__}{mixin.__name__.lstrip('_')}", bases, {"__module__": __name__})


def _empty(mixin: type[Exchanged], cls: type[nn.Module]) -> nn.Module:
    """Return an empty module of the exchanged class: what unpickling and copying fill."""
    return object.__new__(_exchanged(mixin, cls))
