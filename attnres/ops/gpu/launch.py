"""Launch a Triton kernel, or record the launch in a graph that a compiler traces; lay out its vectors."""

import contextlib
import functools
import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton
from triton import knobs
from triton.runtime import driver

from attnres.ops.backend import check_shapes
from attnres.ops.sharded import settled

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
REGISTERS = 65536  # registers of a multiprocessor
INTERPRETED = bool(knobs.runtime.interpret)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`. Triton's function for it takes five microseconds."""
    return 1 << (count - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def warps_for(block: int, per_thread: int = 16) -> int:
    """Return the number of warps, from 1 to 16, so that a thread holds at most `per_thread` elements of a row."""
    return max(1, min(16, block // (32 * per_thread)))


def registers_for(warps: int, resident: int) -> int:
    """Return the most registers a thread may use if `resident` programs of this many warps are to fit on a
    multiprocessor, which allocates eight registers a thread at a time."""
    return min(255, REGISTERS // (32 * warps * resident) // 8 * 8)


def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; 3 in the interpreter, so that loops over rows are tested."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory of a multiprocessor; without a GPU those of an H100."""
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def rows(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of this shape (..., d) unchanged if it is contiguous, else as (T, d) with unit stride along d, a
    view or a copy. Waits for a pending collective.

    Raises:
        UserError: the tensor has another shape; the kernels would read past its end.
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
    """Return the elements from row to row of a tensor that `rows` returned."""
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
    """A kernel with its arguments and options; on meta tensors it is not run."""

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
        if compiled is None:  # Triton inspects each argument by name, which takes longer than the launch
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
        """Return a function that launches the compiled kernel of this launch, which has run once, with arguments in the
        kernel's order."""
        if INTERPRETED:
            return functools.partial(self.kernel[(self.programs,)], **self.options)
        compiled, programs, hooks = _COMPILED[self._key(device)], self.programs, knobs.runtime
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        active: Any = driver.active
        current_stream = active.get_current_stream
        index = active.get_current_device() if device.index is None else device.index

        def start(*arguments: Any) -> None:
            if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler has set hooks
                compiled[(programs, 1, 1)](*arguments)
            else:  # the same launch, in Triton 3.6 and 3.7, without the objects for hooks
                run(programs, 1, 1, current_stream(index), function, metadata, None, None, None, *arguments)

        return start

    def _record(self) -> None:
        """Record the launch in the graph that is traced."""
        kernel, programs, arguments, constants, options = self
        entry, flat = flattened(kernel, arguments, constants)
        warps = {name: count for name, count in options.items() if name != "maxnreg"}  # a graph cannot hold this option
        wrap_triton(entry)[(programs,)](**flat, **warps)


def is_traced() -> bool:
    """Return whether a compiler records operations; tensors then have no address."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def offset(tensor: Tensor) -> int:
    """Return the tensor's address modulo 16, in bytes. While a graph is traced, storages count as aligned, because the
    compiler copies those that are not."""
    return int(tensor.storage_offset() * tensor.itemsize if is_traced() else tensor.data_ptr()) % 16


def flattened(kernel: Any, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a kernel without tuples, absent arguments and constants, which calls `kernel` with those of this launch,
    and its arguments. A compiler can only call such kernels."""
    flat: dict[str, Any] = {}

    def written(name: str, value: Any) -> str:
        if value is None:
            return "None"
        if isinstance(value, tuple):
            return f"({''.join(written(f'{name}_{j}', part) + ', ' for j, part in enumerate(value))})"
        flat[name] = value
        return name

    call_arguments = [f"{name}={written(name, value)}" for name, value in arguments.items()]
    for name, value in constants.items():
        call_arguments.append(f"{name}=tl.{value.codegen_name()}" if isinstance(value, tl.dtype) else f"{name}={value}")
    return _entry(kernel, tuple(flat), ", ".join(call_arguments)), flat


@functools.cache
def _entry(kernel: Any, names: tuple[str, ...], given: str) -> Any:
    """Generate the kernel with these parameters that calls `kernel`. Triton reads its source where tracebacks do
    (linecache)."""
    name = kernel.fn.__name__
    source = f"def flat_{name}({', '.join(names)}):\n    {name}({given})\n"
    file = f"<attnres {name} {hash((names, given)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"tl": tl, name: kernel, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    unspecialised = [part for part in ("tokens", "tiles", "last") if part in names]
    return triton.jit(scope[f"flat_{name}"], do_not_specialize=unspecialised)  # ty: ignore[no-matching-overload]


_COMPILED: dict[Any, Any] = {}
"""Compiled kernels, by everything that Triton specialises them for."""


def _add_kinds(key: list[Any], values: Iterable[Any]) -> None:
    """Append to the key everything by which Triton specialises a kernel's arguments: dtypes, alignment to 16 bytes, and
    for integers whether they are 1, a multiple of 16, or need 64 bits."""
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
