"""Bytes that a rank sends in collectives, counted as they are called."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Messages(TorchDispatchMode):
    """Counts what each of P processes in a ring sends: in a gather of n bytes of each n (P-1), in a scattered sum of n
    bytes n (P-1)/P, in a sum twice that, and in an all-to-all what is for others.

    Attributes:
        sent: bytes.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its shares comes here
        name = str(func)
        if "c10d" in name:
            self.sent += self._bytes(name, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, name: str, args: Any) -> float:
        def size(value: Any) -> int:
            if isinstance(value, Tensor):
                return value.numel() * value.element_size()
            return sum(map(size, value)) if isinstance(value, list | tuple) else 0

        others = self.ranks - 1
        if "allgather_base" in name:
            return size(args[1]) * others
        if "reduce_scatter_base" in name:
            return size(args[1]) * others / self.ranks
        if "all_gather_into_tensor" in name:
            return size(args[0]) * others
        if "reduce_scatter_tensor" in name:
            return size(args[0]) * others / self.ranks
        if "all_to_all" in name:  # all but what a process keeps
            rows, sizes = args[0], list(args[2])
            return size(rows) / max(1, len(rows)) * (sum(sizes) - sizes[dist.get_rank()])
        if "allreduce" in name or "all_reduce" in name:
            return 2 * size(args[0]) * others / self.ranks
        return 0.0
