"""Phase 2, the norm after it, and their backward in Triton: one pass over memory each.

The interface and the formulas are those of ops/eager.py. A program holds a whole row, one token of one vector, in
registers. Forward: one program a row, and the load of the next source is in flight while one is reduced. Backward: a
few programs on each multiprocessor walk over the rows, because the gradients of query, weight and bias are sums over
tokens: each program keeps its share in registers, and the shares are added in a fixed order, so results repeat bit for
bit.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnres.ops.backend import (
    MAX_ONE_PASS,
    MOST_AGAIN,
    MergeGradInputs,
    MergeGrads,
    MergeInputs,
    MergeSaved,
    check_shapes,
    scalar_rows,
)
from attnres.ops.gpu.launch import (
    DTYPES,
    Launch,
    laid_out,
    multiprocessors,
    power_of_two,
    registers_for,
    rows,
    shared_memory,
    warps_for,
)
from attnres.ops.gpu.merge_kernels import WIDE, merge_row, merge_rows_backward, mix_row
from attnres.ops.gpu.replay import Empty, new_empty, planned
from attnres.ops.norms import Norm

PROGRAM_WARPS = 16  # warps of all programs of the backward on a multiprocessor


def _check_opens(count: int) -> None:
    if count > MAX_ONE_PASS:
        raise ValueError(
            f"{count} open sources in one merge: these kernels take at most {MAX_ONE_PASS}. Read the others in phase 1."
        )


def _together(most: int, block: int, warps: int) -> int:
    """Return how many open sources are summed in one exchange between warps: one if there is one warp, or no registers
    for the rows of more."""
    return most if warps > 1 and block <= WIDE.value else 1


def plan_merge(
    m: MergeInputs, empty: Empty = new_empty, partial: Tensor | None = None
) -> tuple[list[Launch], tuple[Tensor, MergeSaved, Tensor | None]]:
    """Return the launch, and the results of `merge` that it fills."""
    opens, added, query, eps, output, top, total, norm, dtype, saves = m
    _check_opens(len(opens))
    first = opens[0] if opens else output
    assert first is not None
    shape, width = first.shape, first.shape[-1]
    k, block, tokens = len(opens), power_of_two(width), first.numel() // width
    if query is not None:
        check_shapes((query,), (width,))
    opens, open_strides = laid_out(opens, shape)
    (added,), added_stride = laid_out((added,), shape)
    (output,), output_stride = laid_out((output,), shape)
    if added is not None and partial is None:
        partial = empty(first, shape, dtype)
    h = h_out = None
    if output is not None and not opens and torch.promote_types(output.dtype, dtype) == dtype:
        h = m.output  # `output` holds it exactly
    elif saves in ("h", "h alone") or (saves == "least" and k > MOST_AGAIN) or not k:
        h = h_out = empty(first, shape, torch.float32 if norm is None else dtype)  # unrounded if no norm follows
    x = x_out = None
    if norm is None and h is not None and h.dtype == dtype:
        x = h
    else:
        x = x_out = empty(first, shape, dtype if norm is None else norm.out_dtype or torch.float32)
    rows_of_scalars = scalar_rows(k, sealed=output is not None)
    scalars = None if saves in ("nothing", "h alone") else empty(first, (rows_of_scalars, tokens), torch.float32)
    arguments = {
        "opens": opens,
        "open_strides": open_strides,
        "added": added,
        "added_stride": added_stride,
        "query": None if query is None else query.contiguous(),
        "output": output,
        "output_stride": output_stride,
        "top": top,
        "top_stride": None if top is None else top.stride(0),
        "total": total,
        "total_stride": None if total is None else total.stride(0),
        "weight": None if norm is None or norm.weight is None else norm.weight.contiguous(),
        "bias": None if norm is None or norm.bias is None else norm.bias.contiguous(),
        "partial_out": partial,
        "h_out": h_out,
        "x_out": x_out,
        "scalars_out": scalars,
        "eps": float(eps),
        "norm_eps": 0.0 if norm is None else float(norm.eps),
    }
    constants = {
        "K": k,
        "SLOTS": power_of_two(max(k, 1)),
        "NORM": norm is not None,
        "CENTER": norm is not None and norm.center,
        "DTYPE": DTYPES[dtype],
        "D": width,
        "BLOCK": block,
        "TOGETHER": _together(2, block, warps_for(block)),
    }
    options = {"num_warps": warps_for(block), "num_stages": 1}
    if WIDE.value < block <= 2 * WIDE.value:
        options["maxnreg"] = 64  # two programs on a multiprocessor: one loads while the other finishes its row
    return [Launch(merge_row, tokens, arguments, constants, options)], (x, MergeSaved(h, scalars), partial)


def merge(m: MergeInputs, partial: Tensor | None = None) -> tuple[Tensor, MergeSaved, Tensor | None]:
    """Compute phase 2 and the norm in one launch: see eager.merge. partial: memory for the sum with `added`, which may
    be that of the last open source.

    Raises:
        ValueError: more than 32 open sources.
    """
    if not m.opens and m.norm is None:
        assert m.output is not None
        return m.output.to(m.dtype), MergeSaved(m.output), None
    opens, added, query, eps, output, top, total, norm, dtype, saves = m
    weight, bias, of_norm = _parts(norm)
    inputs = (*opens, added, query, output, top, total, weight, bias, partial)
    return planned(plan_merge, m, inputs, eps, dtype, saves, of_norm, out=partial)


def _parts(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, tuple[Any, ...]]:
    """Return a norm's weight, bias, and other fields."""
    return (None, None, ()) if norm is None else (norm[0], norm[1], norm[2:])


@functools.cache
def _residents(warps: int, row_bytes: int, shared: int, scratch: int = 4096) -> tuple[int, int]:
    """Return the programs on a multiprocessor, and the stages of their pipeline: at least two rows wait in shared
    memory, or none.

    Arguments are bytes: a row of every tensor read, the multiprocessor's shared memory, and the rest of what a program
        needs of it.
    """
    most = max(1, PROGRAM_WARPS // warps)
    for resident in range(most, 0, -1):
        ahead = (shared // resident - scratch) // row_bytes
        if ahead >= 2:
            return resident, min(4, 1 + ahead)
    return most, 1


def plan_backward(m: MergeGradInputs, empty: Empty = new_empty) -> tuple[list[Launch], tuple[Any, ...]]:
    """Return the launch and the gradients that it fills: of phase 1's output and top, the open sources and `added`. Of
    query, weight and bias it gives one row (d,) a program: (count, programs, d) for the `count` of them that exist, in
    order."""
    grad, carried, opens, query, norm, saved, dtype, output, output_dtype, last_dtype, added_dtype = m
    _check_opens(len(opens))
    shape, width = grad.shape, grad.shape[-1]
    k, block, tokens = len(opens), power_of_two(width), grad.numel() // width
    warps = warps_for(block, per_thread=8)  # about eight rows are in registers at once
    (grad,), grad_stride = laid_out((grad,), shape)
    (h,), h_stride = laid_out((saved.h,), shape)
    (output,), output_stride = laid_out((output,), shape)
    opens, open_strides = laid_out(opens, shape)
    carried, carried_strides = laid_out(carried[:k], shape)

    sizes = list[int]()
    for stream in (grad, h, output, *opens, *carried):
        if stream is not None:
            sizes.append(stream.itemsize)
    # converting between rows of different dtypes needs shared memory
    scratch = 4096 + (4 * block if len(set(sizes)) > 1 else 0)
    resident, stages = _residents(warps, block * sum(sizes), shared_memory(grad.device), scratch)
    programs = min(tokens, resident * multiprocessors(grad.device))

    shares = empty(grad, (sum(_summed(k, norm)), programs, width), torch.float32)
    joined = k > 0 and saved.scalars is not None and len(saved.scalars) == scalar_rows(k, sealed=True)
    to_sealed = joined or not opens
    if output_dtype is None:
        output_dtype = grad.dtype if norm is None or h is None else h.dtype
    copied = not opens and norm is None  # the gradient of the read is the gradient of its output
    doutput = empty(grad, shape, output_dtype) if to_sealed and not copied else None
    dtop = empty(grad, (tokens,), torch.float32) if to_sealed else None
    dopens, dadded = [empty(source, shape, source.dtype) for source in opens[: k - 1]], None
    if opens:
        last_dtype = last_dtype or opens[-1].dtype
        dopens.append(empty(opens[-1], shape, last_dtype))
        if added_dtype is not None and added_dtype != last_dtype:
            dadded = empty(opens[-1], shape, added_dtype)
    arguments = {
        "grad": grad,
        "grad_stride": grad_stride,
        "opens": opens,
        "open_strides": open_strides,
        "carried": carried,
        "carried_strides": carried_strides,
        "query": None if not opens or query is None else query.contiguous(),
        "weight": None if norm is None or norm.weight is None else norm.weight.contiguous(),
        "h": h,
        "h_stride": h_stride,
        "output": output,
        "output_stride": output_stride,
        "scalars": saved.scalars,
        "dopens": tuple(dopens),
        "dadded": dadded,
        "doutput": doutput,
        "dtop": dtop,
        "shares": shares,
        "tokens": tokens,
        "last": tokens - 1,
        "norm_eps": 0.0 if norm is None else float(norm.eps),
    }
    constants = {
        "K": k,
        "NORM": norm is not None,
        "CENTER": norm is not None and norm.center,
        "BIASED": _summed(k, norm)[2],
        "D": width,
        "BLOCK": block,
        "STAGES": stages,
        "DTYPE": DTYPES[dtype or torch.float32],
        "SEALED": joined,
        "ROUNDED": doutput is not None and doutput.dtype != torch.float32,
        "TOGETHER": _together(4, block, warps) if stages > 1 or h is None else 1,
    }
    options = {"num_warps": warps, "num_stages": 1, "maxnreg": registers_for(warps, resident)}
    results = doutput, dtop, dopens, dadded, shares
    return [Launch(merge_rows_backward, programs, arguments, constants, options)], results


def _summed(k: int, norm: Norm | None) -> tuple[bool, bool, bool]:
    """Return which of query, weight and bias have gradients, which are sums over tokens."""
    weighted = norm is not None and norm.weight is not None
    return k > 0, weighted, norm is not None and norm.bias is not None


def merge_backward(m: MergeGradInputs) -> MergeGrads:
    """Compute the gradients of a merge in one launch and a sum over programs: see eager.merge_backward.

    Raises:
        ValueError: more than 32 open sources.
    """
    grad, carried, opens, query, norm, (h, scalars), _, again, *_ = m
    k = len(opens)
    weight, bias, of_norm = _parts(norm)
    inputs = (grad, *carried[:k], *opens, query, weight, bias, h, scalars, again)
    output, top, dopens, added, shares = planned(plan_backward, m, inputs, k, m[6], m[8:], of_norm)
    if not k and norm is None:
        return MergeGrads(grad, top, dopens, None, None, None)
    several = shares.shape[0] > 1  # each row of a sum is a view, which takes longer than a launch
    sums = [*shares.sum(1).unbind(0)] if several else [shares.sum((0, 1))]
    dbias = sums.pop() if bias is not None else None
    dweight = sums.pop() if weight is not None else None
    return MergeGrads(output, top, dopens, sums.pop() if k else None, dweight, dbias, added)


def plan_mix(sources: Sequence[Tensor], weights: Tensor, earlier: Tensor | None, dtype: torch.dtype) -> Launch:
    shape, width = sources[0].shape, sources[0].shape[-1]
    block, tokens = power_of_two(width), sources[0].numel() // width
    sources, strides = laid_out(sources, shape)
    arguments = {
        "sources": sources,
        "strides": strides,
        "weights": weights,
        "weights_stride": weights.stride(0),
        "earlier": earlier,
        "out": sources[0].new_empty(shape, dtype=dtype),
    }
    constants = {"N": len(sources), "D": width, "BLOCK": block}
    return Launch(mix_row, tokens, arguments, constants, {"num_warps": warps_for(block), "num_stages": 1})


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_j weights[:, j] v_j, (T, d) in `dtype`, with a launch for every 32 sources and the running sum in
    fp32."""
    weights, out = rows(weights, weights.shape), None
    for start in range(0, len(sources), MAX_ONE_PASS):
        group = sources[start : start + MAX_ONE_PASS]
        last = start + len(group) == len(sources)
        launch = plan_mix(group, weights[:, start : start + len(group)], out, dtype if last else torch.float32)
        if launch.programs:
            launch.run(weights.device)
        out = launch.arguments["out"]
    assert out is not None
    return out
