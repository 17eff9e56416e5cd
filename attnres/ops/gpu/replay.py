"""Plan the launches of a call once for inputs alike, and replay them: planning takes several times as long on the
host."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attnres.ops.gpu.launch import Launch, is_traced
from attnres.ops.sharded import PLAIN

Empty = Callable[..., Tensor]
"""`new_empty(like, shape, dtype)`."""


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Allocate memory for a result, on the device of `like` and by default in its dtype."""
    return like.new_empty(shape, dtype=dtype)


def planned(
    plan: Callable[..., tuple[Sequence[Launch], Any]],
    record: Any,
    inputs: list[Tensor | None],
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
    key = alike(plan, inputs, (*fixed, out is None))
    replay = None if key is None else _REPLAYS.get(key)
    if replay is not None:
        return replay(inputs)
    allocated = list[Tensor]()

    def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        allocated.append(new_empty(like, shape, dtype))
        return allocated[-1]

    launches, results = plan(record, empty) if out is None else plan(record, empty, out)
    device = next(tensor.device for tensor in inputs if tensor is not None)
    for launch in launches:
        if launch.programs:
            launch.run(device)
    if key is not None and (replay := _Replay.of(launches, results, inputs, allocated)) is not None:
        if len(_REPLAYS) == MOST_REPLAYS:
            _REPLAYS.clear()
        _REPLAYS[key] = replay
    return results


def alike(plan: Any, inputs: Sequence[Tensor | None], fixed: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a key that is equal for inputs with one plan: number, shapes, dtypes, alignment and device. None if an
    input is not contiguous or no plain tensor, or if a graph is traced."""
    if is_traced():
        return None
    key, device = [plan, fixed], None
    for tensor in inputs:
        if tensor is None:
            key.append(None)
        elif type(tensor) in PLAIN and tensor.is_contiguous():
            key += (tensor.shape, tensor.dtype, tensor.data_ptr() & 15)
            device = tensor.device
        else:
            return None
    return (device, *key)


class _Replay:
    """Launches that are repeated with new inputs and new memory for results.

    Args:
        calls: for each launch a function that starts it, and one that picks its arguments from the pool (inputs, then
            memory).
        results: picks the plan's results from the pool. made: shapes, strides and dtypes of the memory.
        first: index of an input whose device is that of all tensors.
    """

    def __init__(self, calls: Any, results: Callable[..., Any], made: Any, first: int) -> None:
        self.calls, self.results, self.made, self.first = calls, results, made, first

    @classmethod
    def of(
        cls, launches: Sequence[Launch], results: Any, inputs: Sequence[Tensor | None], made: Sequence[Tensor]
    ) -> "_Replay | None":
        """Make a replay of launches; None if a launch uses a tensor that is neither an input nor memory for a result,
        such as a copy, or if one tensor is two inputs."""
        places = {id(tensor): place for place, tensor in enumerate([*inputs, *made]) if tensor is not None}
        if len(places) < sum(tensor is not None for tensor in [*inputs, *made]) or not all(
            launch.programs for launch in launches
        ):
            return None
        first = next(place for place, tensor in enumerate(inputs) if tensor is not None)
        device = cast(Tensor, inputs[first]).device
        try:
            calls = [(launch.started(device), _put_in(launch.in_order(), places)) for launch in launches]
            memory = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made]
            return cls(calls, _put_in(results, places), memory, first)
        except KeyError:
            return None

    def __call__(self, inputs: list[Any]) -> Any:
        device: torch.device = inputs[self.first].device
        # `empty_strided` takes a third of the time of `new_empty`
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self.made]
        pool = inputs + made
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(pool)
        else:
            self._start(pool)
        return self.results(pool)

    def _start(self, pool: list[Any]) -> None:
        for call, arguments in self.calls:
            call(*arguments(pool))


def _put_in(value: Any, places: dict[int, int]) -> Callable[[list[Any]], Any]:
    """Return a function that builds a nest like `value` from a pool, taking each tensor from its index in `places`. The
    function is compiled, because a Python call for each part of the nest would take longer than the launch.

    Raises:
        KeyError: a tensor is not in `places`.
    """
    constants = list[Any]()

    def constant(value: Any) -> str:
        constants.append(value)
        return f"constants[{len(constants) - 1}]"

    def written(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"pool[{places[id(value)]}]"
        if not isinstance(value, (tuple, list)):
            return constant(value)
        parts = "".join(f"{written(part)}, " for part in value)
        if type(value) in (list, tuple):
            return f"[{parts}]" if type(value) is list else f"({parts})"
        return f"new({constant(type(value))}, ({parts}))"  # a named tuple

    return eval(f"lambda pool: {written(value)}", {"constants": constants, "new": tuple.__new__})


_REPLAYS: dict[Any, _Replay] = {}
MOST_REPLAYS = 4096
"""Most plans that are stored: a network has a few dozen for each length of its texts."""
