"""Triton kernels for NVIDIA GPUs: the row in the table of devices. `kernels` is the backend and imports Triton."""

import functools
import importlib.util

import torch

from attnres.errors import first_line
from attnres.ops.backend import MAX_ONE_PASS, MAX_SHARED, MOST_AGAIN, Backend, Call, Kernels
from attnres.ops.bank import Bank

MAX_WIDTH = 16384
"""The widest vector, since a row is held in registers."""


@functools.cache
def load() -> Backend | str:
    """Return the backend, or the reason why there is none."""
    if torch.version.hip is not None:
        return "the Triton kernels are for NVIDIA GPUs, and this torch is built for ROCm"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        from attnres.ops.gpu import kernels
    except Exception as error:  # Triton may not fit this torch or driver
        return f"the Triton kernels cannot be loaded ({type(error).__name__}: {first_line(error)})"
    return kernels


def why_not(call: Call) -> str | None:
    """Return the reason why the kernels cannot take a call, None if they can."""
    backend, width = load(), call.tensors[0].shape[-1]
    if isinstance(backend, str):
        return backend
    if width > MAX_WIDTH:
        return f"width {width} is more than {MAX_WIDTH}"
    counts = ("sources", len(call.tensors), MAX_SHARED), ("reads", call.reads, MAX_SHARED)
    for name, count, most in (*counts, ("open sources", call.opens, MAX_ONE_PASS)):
        if count > most:
            return f"{count} {name} are more than {most}"
    return None


def devices() -> list[torch.device]:
    """Return the CUDA devices that torch finds."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def missing() -> str | None:
    """Return the reason why there is no CUDA device, None if there is one."""
    if torch.cuda.device_count():
        return None
    return "torch finds no CUDA device" if torch.backends.cuda.is_built() else "this build of torch has no CUDA"


KERNELS = Kernels(
    device="cuda",
    name="gpu",
    title="the Triton kernels",
    found="CUDA with Triton",
    load=load,
    why_not=why_not,
    narrow=True,  # reads are limited by memory: bf16 halves the bytes, and phase 1 multiplies bf16 instead of TF32
    few_compiled={2: 1 << 24},  # up to this size the host is slower than the GPU; phase 1 is an operator at any size
    torch_norm=1 << 24,
    traced=True,
    most_again=MOST_AGAIN,
    devices=devices,
    missing=missing,
    visible="CUDA_VISIBLE_DEVICES",
    bf16=lambda _: torch.cuda.is_bf16_supported(including_emulation=False),
    bank=Bank,
    # Inductor's kernel holds all vectors of a token in registers; the backward of nine spills most of them
    most_open=6,
    one_pass_width=4096,  # at 7168 one pass reached 19 % of a copy's bandwidth, two phases of 24 reads 58 %
)
