"""The same four functions on C kernels, compiled on first use: several times faster than plain torch on a CPU.

`cpu_kernels.c` is built with the machine's own compiler (`cc`) into the cache folder, keyed by source, compiler and
processor. Without a compiler, or with ATTNRES_CPU_KERNELS=0, `load()` is None and plain torch is used.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache import cache_dir
from .eager import MergeGrads, MergeSaved
from .norms import Norm

LANES = 16
"""Widths must be a multiple of this: one vector register of fp32."""

_SOURCE = Path(__file__).with_name("cpu_kernels.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp", "-fPIC")
_DTYPES = (torch.float32, torch.bfloat16)


class _Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("bf16", ctypes.c_int32)]


def _processor() -> str:
    """Model name and flags: a cache folder may be shared by machines on which one build does not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(next((line for line in lines if line.startswith(key)), "") for key in ("model name", "flags"))
    except OSError:
        return platform.processor() + platform.machine()


def _torch_openmp() -> list[str]:
    """Torch's own OpenMP runtime: a second one in the process would fight it for the cores."""
    root = Path(torch.__file__).parent
    return sorted(
        str(path) for folder in (root / "lib", root.parent / "torch.libs") for path in folder.glob("libgomp*")
    )


def _build(target: Path, compiler: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built, obj = Path(folder) / "kernels.so", Path(folder) / "kernels.o"
        subprocess.run(
            [compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(obj)], check=True, capture_output=True, timeout=120
        )
        link = [] if _torch_openmp() else ["-fopenmp"]
        subprocess.run(
            [compiler, "-shared", str(obj), *link, "-o", str(built), "-lm"],
            check=True,
            capture_output=True,
            timeout=120,
        )
        built.replace(target)


@functools.cache
def load() -> Any:
    """The compiled kernels, or None where they cannot be had. Never raises."""
    if os.environ.get("ATTNRES_CPU_KERNELS", "1") == "0" or platform.system() != "Linux":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    try:
        key = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), compiler.encode(), _processor().encode()]))
        target = cache_dir() / "kernels" / f"{key.hexdigest()[:16]}.so"
        if not target.exists():
            _build(target, compiler)
        for runtime in _torch_openmp():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # no compiler, no home, no space: plain torch serves
        return None


def supports(tensors: Sequence[Tensor], compute: torch.dtype, made: Sequence[torch.dtype] = ()) -> bool:
    """Whether the kernels can take these (T, d) tensors and make vectors of these dtypes."""
    return (
        compute == torch.float32
        and all(dtype in _DTYPES for dtype in made)
        and all(
            t.device.type == "cpu" and t.dtype in _DTYPES and t.stride(-1) == 1 and t.shape[-1] % LANES == 0
            for t in tensors
        )
        and load() is not None
    )


def _rows(tensors: Sequence[Tensor | None]) -> Any:
    array = (_Rows * max(1, len(tensors)))()
    for row, tensor in zip(array, tensors):
        if tensor is not None:
            row.data, row.stride, row.bf16 = tensor.data_ptr(), tensor.stride(0), tensor.dtype == torch.bfloat16
    return array


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * max(1, len(tensors)))(*(t.data_ptr() for t in tensors))


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _sizes(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(value) for value in values]


def _threads(tokens: int) -> int:
    return max(1, min(torch.get_num_threads(), tokens // 16))


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _unit(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 and tensor.dtype in _DTYPES else tensor.float().contiguous()


def read_sealed(
    queries: Tensor, sources: Sequence[Tensor], inv_rms: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """As `eager.read_sealed`."""
    (tokens, d), n, reads = sources[0].shape, len(sources), queries.shape[0]
    new = queries.new_empty
    top, total, logits = new(reads, tokens), new(reads, tokens), new(tokens, n, reads)
    outputs = [new(tokens, d) for _ in range(reads)]  # apart: what one read keeps must not keep the others alive
    threads = _threads(tokens)
    values, weights = new(threads, n, d), new(threads, n, reads)
    queries, inv_rms = queries.contiguous(), [r.contiguous() for r in inv_rms]
    load().attnres_read_sealed(
        *_sizes(tokens, n, reads, d),
        _rows(sources),
        _pointers(inv_rms),
        *map(_pointer, (queries, logits, top, total)),
        _pointers(outputs),
        *map(_pointer, (values, weights)),
        threads,
    )
    return outputs, top, total, logits


def read_sealed_backward(
    queries: Tensor,
    sources: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    logits: Tensor,
    grads: Sequence[Tensor],
    dtop: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """As `eager.read_sealed_backward`."""
    (tokens, d), n, reads = sources[0].shape, len(sources), queries.shape[0]
    threads = _threads(tokens)
    dqueries = queries.new_zeros(threads, reads, d)
    workspace = queries.new_empty(threads, (n + reads) * d + 2 * n * reads + n)
    dsources = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
    queries = queries.contiguous()
    inv_rms, dtop = [r.contiguous() for r in inv_rms], [x.contiguous() for x in dtop]
    grads = [_unit(grad) for grad in grads]
    load().attnres_read_sealed_backward(
        *_sizes(tokens, n, reads, d),
        _rows(sources),
        _pointers(inv_rms),
        *map(_pointer, (queries, logits)),
        _rows(grads),
        _pointers(dtop),
        _rows(dsources),
        *map(_pointer, (dqueries, workspace)),
        threads,
    )
    return dqueries.sum(0), dsources


def _kind(norm: Norm | None) -> int:
    return 0 if norm is None else 2 if norm.center else 1


def merge(
    opens: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    query: Tensor | None,
    output: Tensor,
    top: Tensor | None,
    total: Tensor | None,
    norm: Norm | None,
    dtype: torch.dtype,
) -> tuple[Tensor, MergeSaved]:
    """As `eager.merge`."""
    (tokens, d), k = output.shape, len(opens)
    new = functools.partial(torch.empty, dtype=torch.float32)
    if not k:
        if norm is None:
            return output.to(dtype), MergeSaved(output)
        output = output.to(dtype)
    h = output if not k else new(tokens, d) if norm is None else torch.empty(tokens, d, dtype=dtype)
    x = h if norm is None else torch.empty(tokens, d, dtype=norm.out_dtype or dtype)
    rstd = None if norm is None else new(tokens)
    weights, sealed, scores = (new(tokens, k), new(tokens), new(tokens, k)) if k else (None, None, None)
    threads = _threads(tokens)
    workspace = new(threads, (k + 1) * d)
    weight, bias = (None, None) if norm is None else (_float(norm.weight), _float(norm.bias))
    top, total, query = _float(top), _float(total), _float(query)
    inv_rms = [r.contiguous() for r in inv_rms]
    load().attnres_merge(
        *_sizes(tokens, k, d),
        _rows(opens),
        _pointers(inv_rms),
        _pointer(query),
        _rows([output]),
        *map(_pointer, (top, total)),
        _kind(norm),
        ctypes.c_float(0.0 if norm is None else norm.eps),
        *map(_pointer, (weight, bias)),
        *map(_rows, ([h], [x])),
        *map(_pointer, (rstd, weights, sealed, scores, workspace)),
        threads,
    )
    return x if norm is not None else x.to(dtype), MergeSaved(h, rstd, weights, sealed, scores)


def merge_backward(
    grad: Tensor,
    opens: Sequence[Tensor],
    inv_rms: Sequence[Tensor],
    query: Tensor | None,
    norm: Norm | None,
    saved: MergeSaved,
) -> MergeGrads:
    """As `eager.merge_backward`."""
    (tokens, d), k = saved.h.shape, len(opens)
    threads = _threads(tokens)
    new = functools.partial(torch.empty, dtype=torch.float32)
    doutput, dtop = new(tokens, d), new(tokens)
    dopens = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in opens]
    dvectors = torch.zeros(threads, 3, d)
    workspace = new(threads, d)
    weight = None if norm is None else _float(norm.weight)
    query, inv_rms, grad = _float(query), [r.contiguous() for r in inv_rms], _unit(grad)
    load().attnres_merge_backward(
        *_sizes(tokens, k, d),
        _rows(opens),
        _pointers(inv_rms),
        *map(_pointer, (query, saved.weights, saved.sealed, saved.scores)),
        _kind(norm),
        ctypes.c_float(0.0 if norm is None else norm.eps),
        _pointer(weight),
        _rows([saved.h]),
        _pointer(saved.rstd),
        *map(_rows, ([grad], [doutput])),
        _pointer(dtop),
        _rows(dopens),
        *map(_pointer, (dvectors, workspace)),
        threads,
    )
    dquery, dweight, dbias = dvectors.sum(0).unbind(0)
    return MergeGrads(
        doutput,
        dtop,
        dopens,
        dquery if k else None,
        dweight if norm is not None and norm.weight is not None else None,
        dbias if norm is not None and norm.bias is not None else None,
    )
