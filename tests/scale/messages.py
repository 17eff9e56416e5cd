"""What a rank sends and holds: bytes of collectives, counted as they are called, and tensors of pipeline stages."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnres.scale.lean_stage import LeanStage
from attnres.scale.stage import RankCache


def size(value: Any) -> int:
    """Bytes of a tensor, or of several."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(size, value)) if isinstance(value, list | tuple) else 0


class StageCounts:
    """Inside `with`, counts what the pipeline stages of this rank send and hold.

    Attributes:
        forward, backward: elements sent to other ranks.
        buffers: bytes of receive buffers, summed over stages: "peak" the most at once, "stock" if all were allocated
            all the time, as in torch's own stage.
        cache: the most bytes of slots that the rank held at once.
    """

    def __init__(self) -> None:
        self.forward = self.backward = self.cache = 0
        self._stages: dict[PipelineStage, tuple[int, int]] = {}

    @property
    def buffers(self) -> dict[str, int]:
        return {name: sum(counts) for name, counts in zip(("peak", "stock"), zip(*self._stages.values()))}

    def _sent(self, way: str, ops: list[Any]) -> None:
        setattr(self, way, getattr(self, way) + sum(op.tensor.numel() for op in ops))

    def _allocated(self, stage: PipelineStage) -> None:
        every = [*stage.args_recv_info.values(), *getattr(stage, "grad_recv_info", {}).values()]
        infos = [info for several in every for info in several if not info.is_root_arg and info.tensor_meta is not None]
        now = sum(size(info.buffer) for info in infos)
        stock = sum(info.tensor_meta.shape.numel() * info.tensor_meta.dtype.itemsize for info in infos)
        peak, _ = self._stages.get(stage, (0, 0))
        self._stages[stage] = max(peak, now), stock

    def _held(self, cache: RankCache) -> None:
        self.cache = max(self.cache, sum(size(list(slots.values())) for slots in cache.held.values()))

    def __enter__(self) -> "StageCounts":
        def after(owner: type, name: str, count: Callable[[Any, Any], None]) -> Any:
            method = getattr(owner, name)

            def counted(self: Any, *args: Any) -> Any:
                result = method(self, *args)
                count(self, result)
                return result

            return mock.patch.object(owner, name, counted)

        self._patches = [
            after(PipelineStage, "get_fwd_send_ops", lambda _, ops: self._sent("forward", ops)),
            after(PipelineStage, "get_bwd_send_ops", lambda _, ops: self._sent("backward", ops)),
            after(LeanStage, "_make", lambda stage, _: self._allocated(stage)),
            after(RankCache, "keep", lambda cache, _: self._held(cache)),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()


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
