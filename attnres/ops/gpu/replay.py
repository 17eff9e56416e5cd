"""Plan the launches of a call once for inputs alike, and replay them: planning takes several times as long on the
host."""

import functools
import operator
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from attnres.ops.gpu.launch import Launch, is_traced
from attnres.ops.sharded import PLAIN

Empty = Callable[..., Tensor]
"""`new_empty(like, shape, dtype)`."""

_inductor: Any = guards
ALLOCATORS: dict[str, Callable[..., Tensor]] = {
    "cpu": _inductor._empty_strided_cpu,
    "cuda": _inductor._empty_strided_cuda,
}
"""By type of device, the function of a shape, strides and a dtype that allocates memory on the current device. Code
that Inductor generates calls these functions too: they take half of the time of `torch.empty_strided`."""


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Allocate memory for a result, on the device of `like` and by default in its dtype."""
    return like.new_empty(shape, dtype=dtype)


def planned(
    plan: Callable[..., tuple[Sequence[Launch], Any]],
    record: Any,
    inputs: Sequence[Tensor | None],
    *fixed: Any,
    out: Any = None,
) -> Any:
    """Return the results of a plan after running its launches. For inputs alike the plan is made once; after that only
    memory is allocated and the kernels are called.

    Args:
        plan: function of the record, the allocator of results (`Empty`) and, if given, `out`; returns launches and
            results.
        inputs: the tensors of the record and of `out`. fixed: all other fields of the record that the plan depends on.
        out: memory for the results.
    """
    key = alike(plan, inputs, out is None, fixed)
    replay = _REPLAYS.get(key)
    if replay is not None:
        return replay(*inputs)
    allocated = list[Tensor]()

    def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        allocated.append(new_empty(like, shape, dtype))
        return allocated[-1]

    launches, results = plan(record, empty) if out is None else plan(record, empty, out)
    device = next(tensor.device for tensor in inputs if tensor is not None)
    for launch in launches:
        if launch.programs:
            launch.run(device)
    if key is not None and (replay := _replay(launches, results, inputs, allocated, device)) is not None:
        if len(_REPLAYS) == MOST_REPLAYS:
            _REPLAYS.clear()
        _REPLAYS[key] = replay
    return results


def alike(plan: Any, inputs: Sequence[Tensor | None], *others: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for inputs with one plan: number, shapes, dtypes, alignment and device; and `others`.
    None if an input is not contiguous or no plain tensor, or if a graph is traced.

    It takes longer than a launch, so that its loops over the inputs are those of `map`."""
    types = tuple(map(type, inputs))
    if is_traced() or not _PLAIN.issuperset(types):
        return None
    tensors: list[Any] = [*filter(_IS_PRESENT, inputs)]
    if not all(map(Tensor.is_contiguous, tensors)):
        return None
    places = map(_OFFSET, map(Tensor.data_ptr, tensors))
    return (plan, others, types, tensors[0].device, *map(_KIND, tensors), *places)


_PLAIN = frozenset([*PLAIN, NoneType])
_IS_PRESENT = functools.partial(operator.is_not, None)
_KIND: Callable[[Tensor], tuple[torch.Size, torch.dtype]] = operator.attrgetter("shape", "dtype")
_OFFSET = (15).__and__
"""Return an address modulo 16, in bytes."""


def _replay(
    launches: Sequence[Launch],
    results: Any,
    inputs: Sequence[Tensor | None],
    made: Sequence[Tensor],
    device: torch.device,
) -> Callable[..., Any] | None:
    """Return a function of new inputs that allocates memory, repeats the launches and returns the results. It is
    compiled from source without loops, because a loop over the arguments would take longer than a launch.

    Return None if a launch uses a tensor that is neither an input nor memory for a result, such as a copy, or if one
    tensor is two inputs.
    """
    tensors = [tensor for tensor in (*inputs, *made) if tensor is not None]
    names = {id(tensor): f"t{place}" for place, tensor in enumerate(tensors)}
    if len(names) < len(tensors) or device.type not in ALLOCATORS or not all(launch.programs for launch in launches):
        return None
    scope = {"empty": ALLOCATORS[device.type], "new": tuple.__new__}

    def constant(value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        scope[f"constant{len(scope)}"] = value
        return f"constant{len(scope) - 1}"

    def written(value: Any) -> str:
        if isinstance(value, Tensor):
            return names[id(value)]
        if not isinstance(value, (tuple, list)):
            return constant(value)
        parts = "".join(f"{written(part)}, " for part in value)
        if type(value) in (list, tuple):
            return f"[{parts}]" if type(value) is list else f"({parts})"
        return f"new({constant(type(value))}, ({parts}))"  # a named tuple

    taken = [f"absent{place}" if tensor is None else names[id(tensor)] for place, tensor in enumerate(inputs)]
    lines = [f"def replay({', '.join(taken)}):"]
    for tensor in made:
        lines.append(f"{names[id(tensor)]} = empty({tuple(tensor.shape)}, {tensor.stride()}, {constant(tensor.dtype)})")
    try:
        for launch in launches:
            lines.append(f"{constant(launch.started(device))}{written(tuple(launch.in_order()))}")
        lines.append(f"return {written(results)}")
    except KeyError:
        return None
    exec("\n    ".join(lines), scope)
    replay: Any = scope["replay"]
    return _on(device, replay) if device.type == "cuda" and torch.cuda.device_count() > 1 else replay


def _on(device: torch.device, replay: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, run with `device` as the current one."""

    def there(*inputs: Tensor | None) -> Any:
        if device.index == torch.cuda.current_device():
            return replay(*inputs)
        with torch.cuda.device(device):
            return replay(*inputs)

    return there


_REPLAYS: dict[Any, Callable[..., Any]] = {}
MOST_REPLAYS = 4096
"""Most plans that are stored: a network has a few dozen for each length of its texts."""
