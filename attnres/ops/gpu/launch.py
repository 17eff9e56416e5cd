"""What every kernel launch needs: sizes, counts, dtypes."""

import contextlib
import functools
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton import knobs

from attnres.ops.backend import check_shapes
from attnres.ops.sharded import PLAIN, settled

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
REGISTERS = 65536  # of a multiprocessor
INTERPRETED = bool(knobs.runtime.interpret)


def power_of_two(count: int) -> int:
    """The smallest one that is not less. Triton's own function takes five microseconds."""
    return 1 << (count - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def warps_for(block: int, per_thread: int = 16) -> int:
    """Warps that leave each thread at most `per_thread` elements of a row, from 1 to 16."""
    return max(1, min(16, block // (32 * per_thread)))


@functools.cache
def _properties(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 3 in the interpreter, so that loops over rows are tested."""
    if device.type != "cuda":
        return 3
    return _properties(torch.cuda.current_device() if device.index is None else device.index)[0]


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor; without a GPU those of an H100."""
    if device.type != "cuda":
        return 228 * 1024
    return _properties(torch.cuda.current_device() if device.index is None else device.index)[1]


def rows(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of this shape (..., d) as it lies if it is contiguous, else as (T, d) with unit stride along d: a
    view or one copy. What a collective is still writing is waited for.

    Raises:
        UserError: it has another shape, and the kernels would read past its end.
    """
    if tensor.shape != shape:
        check_shapes((tensor,), shape)
    if type(tensor) is not Tensor:
        tensor = settled(tensor)
    if tensor.is_contiguous():
        return tensor
    tensor = tensor.reshape(-1, shape[-1])
    return tensor if tensor.stride(1) == 1 or shape[-1] == 1 else tensor.contiguous()


def row_stride(tensor: Tensor) -> int:
    """Return the elements from row to row of what `rows` returned."""
    return tensor.shape[-1] if tensor.is_contiguous() else tensor.stride(0)


def laid_out(
    tensors: Iterable[Tensor | None], shape: torch.Size
) -> tuple[tuple[Any, ...], tuple[int | None, ...] | None]:
    """Return `rows` of each tensor, and the elements from row to row of each, or None if all are contiguous."""
    laid, apart = list[Tensor | None](), False
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not Tensor or tensor.shape != shape or not tensor.is_contiguous()):
            tensor = rows(tensor, shape)
            apart = apart or row_stride(tensor) != shape[-1]
        laid.append(tensor)
    return tuple(laid), tuple(None if t is None else row_stride(t) for t in laid) if apart else None


class Launch(NamedTuple):
    """A kernel with everything it is called with; on meta tensors it is only looked at."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self, device: torch.device) -> None:
        if is_traced():
            self._record()
            return
        elsewhere = device.type == "cuda" and device.index not in (None, torch.cuda.current_device())
        with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
            self._launch(device)

    def _launch(self, device: torch.device) -> None:
        kernel, programs, arguments, constants, options = self
        if INTERPRETED:
            kernel[(programs,)](**arguments, **constants, **options)
            return
        key = self._key(device)
        compiled = _COMPILED.get(key)
        if compiled is None:  # Triton looks at each argument by name, which takes longer than the launch
            _COMPILED[key] = kernel[(programs,)](**arguments, **constants, **options)
        else:
            compiled[(programs, 1, 1)](*self.in_order())

    def _key(self, device: torch.device) -> tuple[Any, ...]:
        key = [self.kernel, device.index]
        _add_kinds(key, self.arguments.values())
        return (*key, *self.constants.values(), *self.options.values())

    def in_order(self) -> list[Any]:
        """Return arguments and constants in the kernel's order."""
        named = self.arguments | self.constants
        return [named[name] for name in self.kernel.arg_names]

    def started(self, device: torch.device) -> Callable[..., Any]:
        """Return what launches the kernel as it was compiled for this launch, which has run, when it is called with
        arguments in the kernel's order."""
        if INTERPRETED:
            return functools.partial(self.kernel[(self.programs,)], **self.options)
        return _COMPILED[self._key(device)][(self.programs, 1, 1)]

    def _record(self) -> None:
        """Put the launch into the graph that is traced."""
        kernel, programs, arguments, constants, options = self
        entry, flat = flattened(kernel, arguments, constants)
        warps = {name: count for name, count in options.items() if name != "maxnreg"}  # a graph has no place for it
        wrap_triton(entry)[(programs,)](**flat, **warps)


def is_traced() -> bool:
    """Return whether a compiler records operations: tensors have no address then."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def offset(tensor: Tensor) -> int:
    """Return the bytes from a multiple of 16 to the tensor's first element. The storage of one that is traced is at
    such a multiple: the compiler copies what is not."""
    return int(tensor.storage_offset() * tensor.itemsize if is_traced() else tensor.data_ptr()) % 16


def flattened(kernel: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a kernel that takes no tuples, nothing absent and no constants, and calls `kernel` with those of this
    launch; and its arguments. A compiler knows no other kernels."""
    flat: dict[str, Any] = {}

    def written(name: str, value: Any) -> str:
        if value is None:
            return "None"
        if isinstance(value, tuple):
            return f"({''.join(written(f'{name}_{j}', part) + ', ' for j, part in enumerate(value))})"
        flat[name] = value
        return name

    given = [f"{name}={written(name, value)}" for name, value in arguments.items()]
    for name, value in constants.items():
        given.append(f"{name}=tl.{value.codegen_name()}" if isinstance(value, tl.dtype) else f"{name}={value}")
    return _entry(kernel, tuple(flat), ", ".join(given)), flat


@functools.cache
def _entry(kernel: Any, names: tuple[str, ...], given: str) -> Any:
    """Return the kernel of these parameters that calls `kernel` so. Triton reads its source where tracebacks do."""
    name = kernel.fn.__name__
    source = f"def flat_{name}({', '.join(names)}):\n    {name}({given})\n"
    file = f"<attnres {name} {hash((names, given)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"tl": tl, name: kernel, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    unspecialised = [part for part in ("tokens", "tiles", "last") if part in names]
    return triton.jit(scope[f"flat_{name}"], do_not_specialize=unspecialised)  # ty: ignore[no-matching-overload]


_COMPILED: dict[Any, Any] = {}
"""Kernels as Triton compiled them, by what it compiles them for."""


def _add_kinds(key: list[Any], values: Iterable[Any]) -> None:
    """Add at least what Triton tells a kernel's arguments apart by: dtypes, alignment to 16 bytes, and of integers
    whether they are 1, a multiple of 16, or too large for 32 bits."""
    for value in values:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            key.append(value.dtype)
            key.append(value.data_ptr() % 16)
        elif kind is tuple:
            key.append(len(value))
            _add_kinds(key, value)
        elif kind is int:
            key.append(value if value < 2 else (value % 16 == 0, value >> 31))
        else:
            key.append(kind)


# ------------------------------------------------------------------ plans that are made once

Empty = Callable[..., Tensor]
"""`new_empty(like, shape, dtype)`."""


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a result, on the device of `like` and by default in its dtype."""
    return like.new_empty(shape, dtype=dtype)


def planned(
    plan: Callable[[Any, Empty], tuple[Sequence[Launch], Any]], record: Any, inputs: list[Tensor | None], *fixed: Any
) -> Any:
    """Return the results of a plan whose launches have run. Planning takes the host several times as long as launching:
    of inputs alike it is done once, and then only memory is taken and the kernels are called.

    Args:
        plan: takes the record and the function that makes memory for results, and returns launches and results.
        inputs: the record's tensors. fixed: what else of the record the plan depends on.
    """
    key = alike(plan, inputs, fixed)
    replay = None if key is None else _REPLAYS.get(key)
    if replay is not None:
        return replay(inputs)
    made = list[Tensor]()

    def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        made.append(new_empty(like, shape, dtype))
        return made[-1]

    launches, results = plan(record, empty)
    for launch in launches:
        if launch.programs:
            launch.run(made[0].device)
    if key is not None and (replay := _Replay.of(launches, results, inputs, made)) is not None:
        if len(_REPLAYS) == MOST_REPLAYS:
            _REPLAYS.clear()
        _REPLAYS[key] = replay
    return results


def alike(plan: Any, inputs: Sequence[Tensor | None], fixed: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return what is the same of inputs for which a plan is: their number, shapes, dtypes and alignment; None where one
    is not contiguous or no plain tensor, or a graph is traced."""
    if is_traced():
        return None
    key: list[Any] = [plan, fixed]
    for tensor in inputs:
        if tensor is None:
            key.append(None)
        elif type(tensor) in PLAIN and tensor.is_contiguous():
            key += (tensor.shape, tensor.dtype, tensor.device, tensor.data_ptr() & 15)
        else:
            return None
    return tuple(key)


class _Replay:
    """Launches with a place for each of their inputs: a number is a place in the inputs, the memory made for results
    and the constants, one after the other; a tuple (type, places) is a nest of these."""

    def __init__(self, calls: Any, results: Any, made: Any, constants: list[Any]) -> None:
        self.calls, self.results, self.made, self.constants = calls, results, made, constants

    @classmethod
    def of(
        cls, launches: Sequence[Launch], results: Any, inputs: Sequence[Tensor | None], made: Sequence[Tensor]
    ) -> "_Replay | None":
        """Return None where a launch has a tensor that is neither an input nor made for a result, such as a copy, or an
        input that stands for two."""
        places = {id(tensor): place for place, tensor in enumerate([*inputs, *made]) if tensor is not None}
        if len(places) < sum(tensor is not None for tensor in [*inputs, *made]) or not all(
            launch.programs for launch in launches
        ):
            return None
        constants = list[Any]()

        def place(value: Any) -> Any:
            if isinstance(value, Tensor):
                return places[id(value)]
            if isinstance(value, (tuple, list)):
                return type(value), [place(part) for part in value]
            constants.append(value)
            return len(inputs) + len(made) + len(constants) - 1

        device = made[0].device
        try:
            calls = [(launch.started(device), [place(value) for value in launch.in_order()]) for launch in launches]
            return cls(calls, place(results), [(tensor.shape, tensor.dtype) for tensor in made], constants)
        except KeyError:
            return None

    def __call__(self, inputs: list[Tensor | None]) -> Any:
        like = next(tensor for tensor in inputs if tensor is not None)
        pool: list[Any] = inputs.copy()
        for shape, dtype in self.made:
            pool.append(like.new_empty(shape, dtype=dtype))
        pool += self.constants
        elsewhere = like.is_cuda and like.device.index != torch.cuda.current_device()
        with torch.cuda.device(like.device) if elsewhere else contextlib.nullcontext():
            for call, places in self.calls:
                call(*[pool[place] if type(place) is int else _filled(place, pool) for place in places])
        return _filled(self.results, pool)


def _filled(place: Any, pool: list[Any]) -> Any:
    if type(place) is int:
        return pool[place]
    kind, places = place
    values = [pool[part] if type(part) is int else _filled(part, pool) for part in places]
    return values if kind is list else tuple(values) if kind is tuple else kind(*values)


_REPLAYS: dict[Any, _Replay] = {}
MOST_REPLAYS = 4096
"""Plans that are remembered: a network has a few dozen for each length of its texts."""
