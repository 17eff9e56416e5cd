"""Where a run happens: device, precision, versions, memory."""

import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import attnres
from attnres import typed
from attnres.files import write_json
from attnres.reading import read_json
from attnres.training.records import ADVICE, Environment


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 natively; elsewhere bf16 is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16") or features.get("arm_bf16"))


def emulated(device: torch.device, dtype: str) -> str | None:
    """What a user is told of a precision that the device computes by emulation; None of another."""
    if dtype != "bf16" or has_bf16(device):
        return None
    return (
        f"bf16 is emulated here ({name_of(device)}): a step takes many times as long as in fp32 (dtype fp32 or auto; "
        "studies have presets in fp32)"
    )


def name_of(device: torch.device) -> str:
    """The product's name of a GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def describe(device: torch.device, dtype: str) -> dict[str, Any]:
    """The content of environment.json: versions, device, processor, threads, precision, commit and date."""
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
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on CUDA; on the CPU the largest resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
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
    """The installed version of a package, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def processor() -> str:
    """The processor's name and the number of its cores."""
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
    """The commit of the checkout that this package lies in; None for an installed package."""
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
