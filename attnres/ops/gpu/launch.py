"""What every kernel launch needs: sizes, counts, dtypes, and the shape of a kernel to be compiled ahead of time."""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTERPRETED = bool(knobs.runtime.interpret)


class Specimen(NamedTuple):
    """One instance of a kernel for the cross-compile check (`triton.compiler.ASTSource`).

    All pointers, and all integers whose parameter name contains "stride", are to be compiled as divisible by 16, as
    they are for tensors of a width divisible by 16.

    Attributes:
        name: of the case, without its width.
        width: d.
        kernel: a `triton.jit` function.
        signature: type of every parameter by name, such as "*bf16", "i64", "constexpr", or a tuple of these.
        constants: values of the constexpr parameters by name.
        options: num_warps and num_stages.
    """

    name: str
    width: int
    kernel: Any
    signature: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


def block_of(width: int) -> int:
    """The smallest power of two that holds a row."""
    return triton.next_power_of_2(width)


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


def rows(tensor: Tensor) -> Tensor:
    """(T, d) with unit stride along d: the tensor itself, or one copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class Launch(NamedTuple):
    """A kernel with everything it is called with; on meta tensors it is only looked at."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self, device: torch.device) -> None:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[(self.programs,)](**self.arguments, **self.constants, **self.options)

    def specimen(self, name: str, width: int) -> Specimen:
        signature = {key: _type_of(value) for key, value in self.arguments.items()}
        absent = {key: None for key, value in self.arguments.items() if value is None}
        signature |= dict.fromkeys(self.constants, "constexpr")
        return Specimen(name, width, self.kernel, signature, self.constants | absent, self.options)


def _type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_type_of(v) for v in value)
    if isinstance(value, Tensor):
        return "*" + NAMES[value.dtype]
    return "constexpr" if value is None else "fp32" if isinstance(value, float) else "i32"
