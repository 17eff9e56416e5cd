"""Compiles `cpu_kernels.c` with the machine's own compiler, once, into the cache folder.

The library is kept under a key of everything that decides what is in it and what it is linked to: source, flags,
compiler and its version, processor, torch's OpenMP runtime. Processes that need it at the same time build it once.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path

import torch

from attnres.cache import cache_dir
from attnres.errors import UserError
from attnres.locks import lock

_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp", "-fPIC")
SWITCH = "ATTNRES_CPU_KERNELS"
"""Environment variable: 0 takes plain torch."""
_SECONDS = 120
"""A compiler that takes longer is given up."""


def turned_off() -> bool:
    """Whether the user asked for plain torch."""
    return os.environ.get(SWITCH, "1") == "0"


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled kernels, or in a few words why there are none. Never raises."""
    if turned_off():
        return "ATTNRES_CPU_KERNELS is 0"
    if platform.system() != "Linux":
        return f"the C kernels are built on Linux, not on {platform.system()}"
    name = os.environ.get("CC", "cc")
    compiler = shutil.which(name)
    if compiler is None:
        return f"there is no C compiler '{name}' to build the kernels with"
    try:
        runtimes = torch_openmp()
        target = cache_dir() / "kernels" / f"{_key(compiler, runtimes)}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with lock(target.with_suffix(".lock"), wait=True):
                if not target.exists():  # another process may have built it meanwhile
                    _build(target, compiler, link_openmp=not runtimes)
        if stranger := _stranger(target):
            return f"the C kernels in {stranger} could have been put there by another user"
        for runtime in runtimes:
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        return f"the C kernels do not build with {compiler}: {lines[0] if lines else error}"
    except (OSError, RuntimeError, UserError, subprocess.SubprocessError) as error:  # no home, no space, not executable
        return f"the C kernels cannot be built or loaded ({type(error).__name__}: {error})"


def _stranger(library: Path) -> Path | None:
    """The library or its folder, if somebody other than this user and the administrator may change it."""
    for path in (library, library.parent):
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            return path
    return None


def torch_openmp() -> list[Path]:
    """Torch's own OpenMP runtime: a second one in the process would fight it for the cores."""
    root = Path(torch.__file__).parent
    return sorted(path for folder in (root / "lib", root.parent / "torch.libs") for path in folder.glob("libgomp*"))


def _key(compiler: str, runtimes: list[Path]) -> str:
    """Sixteen hexadecimal digits that change with whatever changes the library."""
    parts = [_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), compiler.encode(), _run(compiler, "--version")]
    parts += [_processor().encode(), *(path.name.encode() for path in runtimes)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Model name and flags: a cache folder may be shared by machines on which one build does not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))
    except OSError:
        return platform.processor() + platform.machine()


def _build(target: Path, compiler: str, *, link_openmp: bool) -> None:
    folder = target.with_suffix(".build")
    shutil.rmtree(folder, ignore_errors=True)  # of a build that was killed
    folder.mkdir()
    try:
        built, object_file = folder / "kernels.so", folder / "kernels.o"
        _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(object_file))
        _run(compiler, "-shared", str(object_file), *(["-fopenmp"] if link_openmp else []), "-o", str(built), "-lm")
        built.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS).stdout
