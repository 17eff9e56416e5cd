"""Phase 1 and its backward in Triton: all S reads over the sealed sources in one pass.

The interface and the formulas are those of ops/eager.py. Sources are not stacked: the kernels take their addresses.
Each program has its sums over tokens, which are added in a fixed order, so results repeat bit for bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres.ops.backend import MAX_SHARED, ReadGradInputs, ReadInputs, Sealed, check_shapes
from attnres.ops.gpu.launch import (
    INTERPRETED,
    Launch,
    cdiv,
    laid_out,
    multiprocessors,
    offset,
    power_of_two,
    registers_for,
)
from attnres.ops.gpu.replay import Empty, new_empty, planned
from attnres.ops.gpu.sealed_kernels import dqueries, read, read_backward
from attnres.ops.gpu.token_kernels import read_token, read_token_backward

FEW = 256  # up to so many tokens, each has its program

# (fp32?, backward?) -> rows of: most reads, and most values of a thread, of a program that holds a token's sources in
# registers; most warps of a program, in the backward of all programs on a multiprocessor. The first row that fits is
# used. More warps leave fewer registers to a thread, and values that have none are spilled: tests/benchmarks compiles
# the last shape of each row. In the backward the values are those of sources, of their gradients and of the queries'
# gradients. Shapes that no row fits spill, or were slower than tiles on an H200 (docs/results/speed_gpu.md).
HELD: dict[tuple[bool, bool], tuple[tuple[int, int, int], ...]] = {
    (True, False): ((8, 64, 16), (8, 160, 8)),
    (False, False): ((8, 64, 16), (8, 128, 8)),
    (True, True): ((4, 48, 16), (4, 76, 12), (8, 80, 8)),
    (False, True): (),
}


class _Bunch(NamedTuple):
    """Tensors (T, d) of at most two dtypes; bit j of `wide` is set if tensor j has the dtype of tensor `other`.

    One stride stands for all tensors, None for contiguous rows. aligned: all rows start at a multiple of 16 bytes.
    """

    tensors: tuple[Tensor, ...]
    strides: tuple[int | None, ...] | None
    wide: int
    other: int
    aligned: bool


def _bunch(tensors: Sequence[Tensor]) -> _Bunch:
    first, shape = tensors[0].dtype, tensors[0].shape
    laid, strides = laid_out(tensors, shape)
    if len({t.dtype for t in laid}) > 2:
        laid, strides = laid_out([t if t.dtype == first else t.float() for t in laid], shape)
    wide = other = misplaced = 0
    for j, t in enumerate(laid):
        if t.dtype != first:
            wide, other = wide | 1 << j, other or j
        stride: Any = shape[-1] if strides is None else strides[j]
        misplaced |= (offset(t) | stride * t.itemsize) & 15
    if strides is not None and len(set(strides)) == 1:
        strides = strides[:1]
    return _Bunch(laid, strides, wide, other, not misplaced)


def _check(n: int, reads: int) -> None:
    for count, of in ((n, "sources"), (reads, "reads")):
        if not 1 <= count <= MAX_SHARED:
            raise ValueError(f"the GPU kernels take 1 to {MAX_SHARED} {of}, got {count}")


def _tokens(n: int, padded: int, most_rows: int, most_columns: int) -> int:
    """Return the tokens of a tile: as many as fit, among the counts that leave at most a quarter of its rows empty."""

    def merit(tokens: int) -> tuple[float, int]:
        return min(0.75, tokens * n / power_of_two(tokens * n)), tokens

    fits = range(1, min(most_rows // n, most_columns // padded) + 1)
    return max((t for t in fits if power_of_two(t) * padded <= most_columns), key=merit, default=1)


def _tile(n: int, reads: int, tokens: int, width: int, of_bf16: bool, backward: bool) -> tuple[dict[str, int], int]:
    """Return the sizes of a program's tile, and its warps. For bf16 they are the fastest of a sweep on an H100
    (docs/results/speed_gpu.md); otherwise, and for many sources, they keep the accumulators in registers
    (benchmarks/sm90.py).

    Rows are (token, source) pairs and columns (token, read) pairs: as many tokens as fit, at least one.
    """
    padded = max(8, power_of_two(reads))
    most_rows, most_columns = (32, 128 if padded > 16 else 64) if backward else (64, 128)
    if not of_bf16:
        most_rows = most_columns = 32 if backward else 64
        most_columns *= 2 if padded > 16 and not backward else 1
    taken = 1 if tokens <= FEW else _tokens(n, padded, most_rows, most_columns)
    height = max(16, power_of_two(taken * n))
    columns = max(16, power_of_two(taken) * padded)
    longer = max(height, columns)
    if of_bf16 and tokens > FEW and height <= 64 and columns <= 128:
        flat = 16 if padded > 16 else 32 if backward else 64  # taller tiles with so many columns spill registers
        block, warps = 128 if height <= flat else 64, 4
    else:
        least, room = (64, 4096) if of_bf16 else (32, 1024 if backward else 2048)
        block = max(least // 2 if longer >= 256 else least, min(256, room // longer))
        warps = 8 if longer > 64 or (backward and longer == 64) else 4
    sizes = {"TOKENS": taken, "ROWS": height, "COLS": columns, "READS": padded}
    sizes["BLOCK"] = min(block, max(16, power_of_two(width)))
    return sizes, warps


def _held(
    n: int, reads: int, width: int, element_size: int, *, backward: bool
) -> tuple[dict[str, int], int, int] | None:
    """Return the sizes of a program that holds all sources of a token in registers; its warps, few enough that a thread
    holds the same columns of all sources; and the programs on a multiprocessor. None for tiles (HELD)."""
    height, block = max(2, power_of_two(n)), power_of_two(width)
    warps = min(16, max(1, block * element_size // (512 if backward else 1024)))
    values = (2 * height + reads if backward else n) * block / (32 * warps)
    resident = 0
    for most_reads, most_values, every in HELD[element_size >= 4, backward]:
        if reads <= most_reads and values <= most_values:
            resident = every // warps
            break
    # One warp needs no exchange. In a forward of more than 64 values a thread, four sums at once would spill.
    single = warps == 1 or (values > 64 and not backward)
    return ({"ROWS": height, "BLOCK": block, "TOGETHER": 1 if single else 4}, warps, resident) if resident else None


def _in_bf16(*bunches: _Bunch) -> bool:
    """Return whether products are computed in bf16 pieces; False in the interpreter, whose bf16 arithmetic is wrong."""
    return not INTERPRETED and all(t.dtype == torch.bfloat16 for bunch in bunches for t in bunch.tensors)


def _pieces(of_bf16: bool, *outputs: Tensor) -> dict[str, int]:
    """Return into how many bf16 pieces an fp32 factor is split: three are exact, two suffice if the result is
    rounded."""
    fine = any(t.dtype == torch.float32 for t in outputs)
    return {"PIECES": 3 if of_bf16 else 0, "OUT_PIECES": (3 if fine else 2) if of_bf16 else 0}


def plan_read(r: ReadInputs, empty: Empty = new_empty, out: Sealed | None = None) -> tuple[list[Launch], Sealed]:
    queries, sources, eps, dtype = r
    shape, n, (reads, width) = sources[0].shape, len(sources), queries.shape
    _check(n, reads)
    check_shapes((queries,), (reads, shape[-1]))
    bunch, tokens = _bunch(sources), sources[0].numel() // width

    def scalars(*shape: int) -> Tensor:
        return empty(queries, shape, torch.float32)

    if out is None:
        # Separate tensors: one that a read keeps must not keep the others alive.
        outputs = [empty(queries, shape, dtype) for _ in range(reads)]
        out = Sealed(
            outputs, scalars(reads, tokens), scalars(reads, tokens), scalars(tokens, n, reads), scalars(tokens, n)
        )
    arguments: dict[str, Any] = {
        "queries": queries.float().contiguous(),
        "sources": bunch.tensors,
        "strides": bunch.strides,
        "outputs": tuple(out.outputs),
        "top": out.top,
        "total": out.total,
        "logits": out.logits,
        "inv_rms": out.inv_rms,
        "tokens": tokens,
        "eps": float(eps),
    }
    constants = {
        "N": n,
        "S": reads,
        "D": width,
        "WIDE": bunch.wide,
        "OTHER": bunch.other,
        "ALIGNED": bunch.aligned and not any((offset(o) | width * o.itemsize) & 15 for o in out.outputs),
    }
    held = _held(n, reads, width, sources[-1].element_size(), backward=False)
    if held is not None:
        sizes, warps, _ = held
        options = {"num_warps": warps, "num_stages": 1}
        return [Launch(read_token, tokens, arguments, constants | sizes, options)], out
    sizes, warps = _tile(n, reads, tokens, width, _in_bf16(bunch), backward=False)
    constants |= {**sizes, **_pieces(_in_bf16(bunch), *out.outputs), "STAGES": 3}
    programs = cdiv(tokens, sizes["TOKENS"])
    return [Launch(read, programs, arguments, constants, {"num_warps": warps, "num_stages": 3})], out


def read_sealed(r: ReadInputs, out: Sealed | None = None) -> Sealed:
    """Compute phase 1 in one launch: see eager.read_sealed. out: memory for the results that are not None.

    Raises:
        ValueError: more than 256 sources or reads.
    """
    queries, sources, eps, dtype = r
    if out is None:
        return planned(plan_read, r, (queries, *sources), eps, dtype)
    memory = *out.outputs, out.top, out.total, out.logits, out.inv_rms
    return planned(plan_read, r, (queries, *memory, *sources), eps, dtype, out=out)


def plan_backward(
    r: ReadGradInputs, empty: Empty = new_empty
) -> tuple[list[Launch], tuple[Tensor, tuple[Tensor, ...]]]:
    """Return one or two launches, the partial sums of dqueries, and the gradients of the sources."""
    queries, sources, inv_rms, logits, grads, dtop, carried = r
    shape, n, (reads, width) = sources[0].shape, len(sources), queries.shape
    _check(n, reads)
    bunch, tokens = _bunch(sources), sources[0].numel() // width
    upstream = _bunch(grads)
    if upstream.wide:
        upstream = _bunch([grad.float() for grad in grads])
    present = [grad for grad in carried if grad is not None]
    # An absent tensor is replaced by a present one, which is not read.
    earlier = _bunch([present[0] if grad is None else grad for grad in carried]) if present else None
    dsources = tuple(empty(t, shape, t.dtype) for t in bunch.tensors)
    processors = multiprocessors(queries.device)
    arguments: dict[str, Any] = {
        "queries": queries.float().contiguous(),
        "sources": bunch.tensors,
        "strides": bunch.strides,
        "inv_rms": inv_rms.contiguous(),
        "logits": logits.contiguous(),
        "grads": upstream.tensors,
        "grad_strides": upstream.strides,
        "dtop": tuple(t.float().contiguous() for t in dtop),
        "carried": earlier and earlier.tensors,
        "carried_strides": earlier and earlier.strides,
        "dsources": dsources,
        "tokens": tokens,
    }
    common = {"N": n, "S": reads, "D": width, "WIDE": bunch.wide, "OTHER": bunch.other, "ALIGNED": bunch.aligned}
    constants = {
        **common,
        "CARRIED": sum(1 << j for j, grad in enumerate(carried) if grad is not None),
        "CARRIED_WIDE": earlier.wide if earlier else 0,
        "CARRIED_OTHER": earlier.other if earlier else 0,
        "ALIGNED": all(b is None or b.aligned for b in (bunch, upstream, earlier))
        and not any(width * t.element_size() % 16 for t in dsources),
    }

    def partial_sums(programs: int) -> Tensor:
        return empty(queries, (programs, reads, width), torch.float32)

    held = _held(n, reads, width, sources[-1].element_size(), backward=True)
    if held is not None:
        sizes, warps, resident = held
        programs = min(tokens, resident * processors)
        partials = partial_sums(programs)
        constants |= sizes
        options = {"num_warps": warps, "num_stages": 1, "maxnreg": registers_for(warps, resident)}
        launch = Launch(read_token_backward, programs, arguments | {"partials": partials}, constants, options)
        return [launch], (partials, dsources)

    of_bf16 = _in_bf16(bunch, upstream)
    sizes, warps = _tile(n, reads, tokens, width, of_bf16, backward=True)
    tiles = cdiv(tokens, sizes["TOKENS"])

    # The sum over tokens. Either a program adds the sum of each of its tiles to one in the cache, or a second kernel
    # reads the sources again: whichever moves fewer bytes.
    together = 8 * reads < bunch.tensors[-1].element_size() * n * sizes["TOKENS"]
    slices = cdiv(width, sizes["BLOCK"])
    splits = min(tiles, 2 * processors if together else cdiv(4 * processors, slices))
    partials = partial_sums(splits)
    along = None if together else empty(logits, logits.shape, logits.dtype)
    arguments |= {"along": along, "partials": partials if together else None, "tiles": tiles}
    constants |= {**sizes, "GROUP": max(16, sizes["READS"]), **_pieces(of_bf16, *dsources), "STAGES": 3}
    options = {"num_warps": warps, "num_stages": 3}
    launches = [Launch(read_backward, splits if together else tiles, arguments, constants, options)]
    if not together:
        arguments = {"sources": bunch.tensors, "strides": bunch.strides, "along": along, "partials": partials}
        arguments |= {"tokens": tokens, "tiles": tiles}
        constants = common | {name: sizes[name] for name in ("TOKENS", "ROWS", "READS", "BLOCK")}
        constants |= {"SPLITS": splits, "PIECES": 3 if _in_bf16(bunch) else 0, "STAGES": 3}
        options = {"num_warps": 4, "num_stages": 3}
        launches.append(Launch(dqueries, slices * splits, arguments, constants, options))
    return launches, (partials, dsources)


def read_sealed_backward(r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]:
    """Compute the gradients in one or two launches, and a sum over programs: see eager.read_sealed_backward.

    Raises:
        ValueError: more than 256 sources or reads.
    """
    queries, sources, inv_rms, logits, grads, dtop, carried = r
    if not sources[0].numel():
        return torch.zeros_like(queries), [source.new_empty(source.shape) for source in sources]
    inputs = (queries, *sources, inv_rms, logits, *grads, *dtop, *carried)
    partials, dsources = planned(plan_backward, r, inputs, len(sources), len(grads))
    pairs = zip(dsources, sources, strict=True)
    return partials.sum(0), [g if g.dtype == source.dtype else g.to(source.dtype) for g, source in pairs]
