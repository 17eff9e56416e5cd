"""Describe and prepare the machine of a run: device, precision, versions, memory, and everything that affects the last
bits of results."""

import contextlib
import ctypes
import datetime
import functools
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import attnres
from attnres import typed
from attnres.errors import UserError
from attnres.files import write_json
from attnres.ops import explain
from attnres.ops.devices import KERNELS, is_host
from attnres.reading import read_json
from attnres.text import listed
from attnres.training.parallel import Processes
from attnres.training.records import ADVICE, ArithmeticRecord, Environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def has_bf16(device: torch.device) -> bool:
    """Return whether the device computes in bf16 natively; otherwise bf16 is slower than fp32."""
    return device.type in KERNELS and KERNELS[device.type].bf16(device)


def emulated(device: torch.device, dtype: str) -> str | None:
    """Return a warning for a precision that the device only emulates; None for another."""
    if dtype != "bf16" or has_bf16(device):
        return None
    return (
        f"bf16 is emulated here ({name_of(device)}): a step takes many times as long as in fp32 (dtype fp32 or auto; "
        "studies have presets in fp32)"
    )


def name_of(device: torch.device) -> str:
    """Return the product name of a GPU or of the CPU."""
    return processor() if is_host(device) else torch.get_device_module(device).get_device_name(device)


def describe(device: torch.device, dtype: str) -> dict[str, Any]:
    """Return the content of environment.json: versions, device, processor, threads, precision, commit and date."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "attnres": attnres.__version__,
        "platform": platform.platform(),
        "device": name_of(device),
        "device_type": device.type,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def record(path: Path, environment: dict[str, Any], *, resumed: bool) -> None:
    """Write the result of `describe`; a resumed run keeps its first environment and lists later, different ones in it.

    Later environments are listed under the key `resumed`, consecutive equal ones once.
    """
    if not (resumed and path.exists()):
        write_json(path, environment)
        return
    first: dict[str, Any] = dict(typed.checked(read_json(path), Environment, path, ADVICE))
    later = first.get("resumed", [])
    last = later[-1] if later else first
    if any(last.get(name) != value for name, value in environment.items() if name != "date"):
        write_json(path, {**first, "resumed": [*later, environment]})


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of `peak_memory`. On a CPU only Linux can reset the peak; elsewhere it is that of the
    process.

    Memory of an earlier run in this process is freed first.
    """
    gc.collect()
    if not is_host(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of tensors on a GPU, or the largest resident set of the process on a CPU."""
    if not is_host(device):
        return torch.get_device_module(device).max_memory_allocated(device)
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not available on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def processor() -> str:
    """Return the processor's name and the number of its cores."""
    name = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


def _commit() -> str | None:
    """Return the commit of the checkout that contains this package; None for an installed package."""
    root = Path(attnres.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        process = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


# ------------------------------------------------------------------ fast steps


def tune(model: "PreTrainedModel", device: torch.device, seq_len: int) -> None:
    """Choose the attention implementation and, on a CPU, let freed memory be reused; the same for every residual.

    Up to `Kernels.whole_scores` tokens attention uses plain matrix products, beyond that PyTorch's fused kernel.
    Families whose scores the fused kernel cannot compute (Gemma 2, GPT-OSS) always use plain products.
    """
    fused = model._supports_sdpa and seq_len > (KERNELS[device.type].whole_scores if device.type in KERNELS else 0)
    model.set_attn_implementation("sdpa" if fused else "eager")
    if is_host(device):
        keep_freed_memory()


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library reuse memory that a step frees in the next one, instead of returning it to the system.

    Otherwise every activation of a few MB is mapped again, page by page, in each step. Does nothing without glibc.
    """
    if platform.system() != "Linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold = -1, -3
        sizes = 1 << 30, 32 << 20  # older versions refuse more than 32 MiB
        if any(libc.mallopt(mmap_threshold, size) for size in sizes):
            libc.mallopt(trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        return


# ------------------------------------------------------------------ bit-for-bit resumption


_NAMES = {
    "device": "the device",
    "threads": "the number of threads",
    "reads": "the backend of depth reads",
    "kernels": "the build of the C kernels",
    "loss": "how the loss is made",
}


def arithmetic(who: Processes, width: int, loss: str | None) -> ArithmeticRecord:
    """Return everything that affects the last bits of this process's results, for depth reads of vectors of `width`.
    `loss` is how the loss is computed if that depends on installed packages, None if it was configured."""
    backend = explain([torch.zeros(1, width, device=who.device)]).backend
    record: ArithmeticRecord = {
        "device": _processor() if is_host(who.device) else name_of(who.device),
        "reads": backend,
        "kernels": next((row.version() for row in KERNELS.values() if row.name == backend), None),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "attnres": attnres.__version__,
    }
    if loss is not None:
        record["loss"] = loss
    return {**record, "threads": torch.get_num_threads()} if is_host(who.device) else record


@contextmanager
def restored_arithmetic(
    recorded: Mapping[str, Any], who: Processes, width: int, loss: str | None, *, different: bool
) -> Generator[None]:
    """Compute inside the block with the recorded number of threads, and with C kernels or plain torch as recorded.

    Args:
        recorded: an `ArithmeticRecord`; fields that an earlier version did not record are ignored.
        width, loss: as for `arithmetic`.
        different: continue if something else differs, instead of refusing.

    Raises:
        UserError: a recorded property cannot be restored; the message names it.
    """
    with ExitStack() as stack:
        if is_host(who.device):
            if threads := recorded.get("threads"):
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            kernels = KERNELS[who.device.type]
            if recorded.get("reads") in (kernels.name, "eager"):
                stack.enter_context(kernels.switched(recorded["reads"] == kernels.name))
        present: dict[str, Any] = {**arithmetic(who, width, loss)}
        changed = [name for name in recorded if name in present and present[name] != recorded[name]]
        if changed and not different:
            pairs = [f"{_NAMES.get(name, name)} ({recorded[name]} there, {present[name]} here)" for name in changed]
            raise UserError(
                "the run would not continue bit for bit, because it was trained with other arithmetic: "
                f"{listed(pairs)}; "
                "resume it where these are the same, or give --allow-different"
            )
        yield


def _processor() -> str:
    """Return the CPU's name, without its number of cores (which changes no result), and the instruction set that torch
    uses."""
    return f"{processor().rpartition(', ')[0]} ({torch.backends.cpu.get_cpu_capability()})"
