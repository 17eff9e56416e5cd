"""Tensors that are no memory a kernel could read: results of collectives under way, and shares of a distributed tensor.

A kernel takes an address. `AsyncCollectiveTensor`, which tensor and sequence parallelism hand to the next operation,
has none of its own, and what it stands for may not have arrived yet; a `DTensor` holds one rank's part only.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError

PLAIN = (Tensor, nn.Parameter)
"""Types whose numbers lie where they say; other ones (sharded, in flight, fake) know better what is to be done."""


def settled(tensor: Tensor) -> Tensor:
    """Return `tensor`, or what it stands for where it is the result of a collective: waits until that has arrived."""
    if type(tensor) in PLAIN or torch.compiler.is_compiling():
        return tensor
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def refuse_sharded(values: Iterable[Any]) -> None:
    """Raise UserError for a DTensor among `values`: a read needs whole vectors and whole parameters."""
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is None or torch.compiler.is_compiling():
        return
    for value in values:
        if type(value) not in PLAIN and isinstance(value, sharded.DTensor):
            raise UserError(
                f"a depth read was given a DTensor of shape {tuple(value.shape)} with placements {value.placements}: "
                "reads need whole vectors and parameters, so leave the residual out of what is sharded "
                "(ignored_params of fully_shard), or hand over to_local() or full_tensor()"
            )
