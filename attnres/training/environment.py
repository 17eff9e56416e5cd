"""Describe and prepare the machine of a run: device, precision, versions, memory, and what decides the last bits."""

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
    """Return whether the device computes in bf16 natively; elsewhere bf16 is slower than fp32."""
    return device.type in KERNELS and KERNELS[device.type].bf16(device)


def emulated(device: torch.device, dtype: str) -> str | None:
    """Return a warning for a precision that the device computes by emulation; None for another."""
    if dtype != "bf16" or has_bf16(device):
        return None
    return (
        f"bf16 is emulated here ({name_of(device)}): a step takes many times as long as in fp32 (dtype fp32 or auto; "
        "studies have presets in fp32)"
    )


def name_of(device: torch.device) -> str:
    """Return the product's name of a GPU or of the processor."""
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
    """Write what `describe` found; a resumed run keeps its first environment and lists later, different ones in it.

    Those stand under the key `resumed`, each once however often the run was resumed there in a row.
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
    """Start a new measurement of `peak_memory`; on the CPU only Linux can, elsewhere the peak is the process's.

    What an earlier run in this process left behind is given back first.
    """
    gc.collect()
    if not is_host(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors took on a GPU; on the CPU the largest resident set of the process."""
    if not is_host(device):
        return torch.get_device_module(device).max_memory_allocated(device)
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not on Windows

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
    """Return the commit of the checkout that this package lies in; None for an installed package."""
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
    """Choose the attention implementation and, on a CPU, let freed memory be reused; for every residual alike.

    Up to `Kernels.whole_scores` tokens plain matrix products are taken, beyond that PyTorch's fused attention. A family
    whose scores that cannot make (Gemma 2, GPT-OSS) keeps whole matrices everywhere.
    """
    fused = model._supports_sdpa and seq_len > (KERNELS[device.type].whole_scores if device.type in KERNELS else 0)
    model.set_attn_implementation("sdpa" if fused else "eager")
    if is_host(device):
        keep_freed_memory()


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one, instead of giving it back to the system.

    Otherwise every activation of a few MB is mapped, page by page, anew in each step. glibc only; elsewhere nothing.
    """
    if platform.system() != "Linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold = -1, -3
        sizes = 1 << 30, 32 << 20  # older ones refuse more than 32 MiB
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
    """Return what decides the last bits of this process's results, for depth reads of vectors of `width`; `loss` is how
    the loss is computed where that depends on what is installed, None where it was asked for."""
    backend = explain([torch.zeros(1, width, device=who.device)]).backend
    here: ArithmeticRecord = {
        "device": _processor() if is_host(who.device) else name_of(who.device),
        "reads": backend,
        "kernels": next((row.version() for row in KERNELS.values() if row.name == backend), None),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "attnres": attnres.__version__,
    }
    if loss is not None:
        here["loss"] = loss
    return {**here, "threads": torch.get_num_threads()} if is_host(who.device) else here


@contextmanager
def restored_arithmetic(
    recorded: Mapping[str, Any], who: Processes, width: int, loss: str | None, *, different: bool
) -> Generator[None]:
    """Compute as `recorded` says inside the block: its number of threads, its C kernels or plain torch.

    Args:
        recorded: an `ArithmeticRecord`; what a checkpoint of an earlier version does not have is not kept.
        width, loss: as for `arithmetic`.
        different: go on where something else differs, instead of refusing.

    Raises:
        UserError: what differs cannot be kept, by name.
    """
    with ExitStack() as stack:
        if is_host(who.device):
            if threads := recorded.get("threads"):
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            kernels = KERNELS[who.device.type]
            if recorded.get("reads") in (kernels.name, "eager"):
                stack.enter_context(kernels.switched(recorded["reads"] == kernels.name))
        here: dict[str, Any] = {**arithmetic(who, width, loss)}
        other = [name for name in recorded if name in here and here[name] != recorded[name]]
        if other and not different:
            pairs = [f"{_NAMES.get(name, name)} ({recorded[name]} there, {here[name]} here)" for name in other]
            raise UserError(
                f"the run would not go on bit for bit, for it was trained with other arithmetic: {listed(pairs)}; "
                "resume it where these are the same, or give --allow-different"
            )
        yield


def _processor() -> str:
    """Return the processor's name without the number of its cores, which changes no result, and the instructions that
    torch uses."""
    return f"{processor().rpartition(', ')[0]} ({torch.backends.cpu.get_cpu_capability()})"
