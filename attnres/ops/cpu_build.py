"""Compile `cpu_kernels.c` with the machine's C compiler, once, into the cache folder.

The file name of the library contains a hash of everything that determines its content: source, flags, compiler and its
version, processor, and torch's OpenMP runtime. Processes that need it at the same time build it once.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import torch

from attnres.errors import UserError
from attnres.files import cache_dir, lock

_SOURCE = Path(__file__).with_name("cpu_kernels.c")  # this file includes the other one
_SOURCES = (_SOURCE, _SOURCE.with_name("cpu_streams.c"))
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp", "-fPIC")
SWITCH = "ATTNRES_CPU_KERNELS"
"""Environment variable: 0 uses plain torch."""
_OF_PROCESSOR = ("model name", "flags", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")
"""Keys of /proc/cpuinfo that identify a processor, on x86 and on ARM."""
_SECONDS = 120
"""Time limit of the compiler, in seconds."""


def turned_off() -> bool:
    """Return whether the user asked for plain torch."""
    return os.environ.get(SWITCH, "1") == "0"


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the compiled kernels, or the reason in a few words why there are none. Never raises."""
    if turned_off():
        return "ATTNRES_CPU_KERNELS is 0"
    if platform.system() != "Linux":
        return f"the C kernels are built on Linux, not on {platform.system()}"
    name = os.environ.get("CC", "cc")
    compiler = shlex.split(name)
    if not compiler or shutil.which(compiler[0]) is None:
        return f"there is no C compiler '{name}' to build the kernels with"
    try:
        runtimes = torch_openmp()
        target = cache_dir() / "kernels" / f"{_key(compiler, runtimes)}.so"
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_strange(target.parent):
            return f"the C kernels in {target.parent} could be put there by another user"
        _make(target, compiler, link_openmp=not runtimes)
        if _is_strange(target):
            return f"the C kernels in {target} could have been put there by another user"
        for runtime in runtimes:
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        return _with_prototypes(ctypes.CDLL(str(target)))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        return f"the C kernels do not build with {name}: {lines[0] if lines else error}"
    # no home, no space left, no permission to execute
    except (OSError, RuntimeError, UserError, subprocess.SubprocessError) as error:
        return f"the C kernels cannot be built or loaded ({type(error).__name__}: {error})"


def _with_prototypes(kernels: Any) -> ctypes.CDLL:
    """Set the argument and result types of the library's functions, and return it."""
    for name in (
        "read_sealed",
        "read_sealed_backward",
        "merge",
        "merge_backward",
        "mix",
        "connect",
        "connect_backward",
    ):
        function = getattr(kernels, f"attnres_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    write, read = kernels.attnres_bank_write, kernels.attnres_bank_read
    # bank, step, address of the output and whether it is bf16; the same two for the read's result
    write.argtypes, write.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    read.argtypes, read.restype = [*write.argtypes, ctypes.c_void_p, ctypes.c_int64], ctypes.c_int
    return kernels


def _is_strange(path: Path) -> bool:
    """Return whether a user other than this one and the administrator can change the file."""
    status = path.stat()
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & (stat.S_IWOTH | stat.S_IWGRP))


def torch_openmp() -> list[Path]:
    """Return torch's OpenMP runtime; a second one in the process would compete with it for the cores."""
    root = Path(torch.__file__).parent
    return sorted(path for folder in (root / "lib", root.parent / "torch.libs") for path in folder.glob("libgomp*"))


def _key(compiler: list[str], runtimes: list[Path]) -> str:
    """Return sixteen hexadecimal digits that change with everything that changes the library."""
    texts = [" ".join(_FLAGS), " ".join(compiler), _processor(), *(path.name for path in runtimes)]
    parts = [*(source.read_bytes() for source in _SOURCES), _run(*compiler, "--version"), *map(str.encode, texts)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's model and features, because machines that cannot run one build may share a cache
    folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    known = (next((line for line in lines if line.startswith(name)), "") for name in _OF_PROCESSOR)
    return "".join((platform.machine(), *known))


def _make(target: Path, compiler: list[str], *, link_openmp: bool) -> None:
    """Build the library if it is missing, one process at a time."""
    if not target.exists():
        with lock(target.with_suffix(".lock"), wait=True):
            if not target.exists():  # another process may have built it meanwhile
                _build(target, compiler, link_openmp=link_openmp)


def _build(target: Path, compiler: list[str], *, link_openmp: bool) -> None:
    folder = target.with_suffix(".build")
    shutil.rmtree(folder, ignore_errors=True)  # left by a build that was killed
    folder.mkdir()
    try:
        built, object_file = folder / "kernels.so", folder / "kernels.o"
        _run(*compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(object_file))
        _run(*compiler, "-shared", str(object_file), *(["-fopenmp"] if link_openmp else []), "-o", str(built), "-lm")
        built.chmod(0o755)
        with built.open("rb+") as file:
            os.fsync(file.fileno())  # loading an incomplete library would kill the process
        built.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS).stdout
