"""Parallel streams in Triton: the interface and the formulas are those of ops/streams.py.

One launch forward. Two backward: the gradients of the tokens, then the sums over them for the table and the norm, in a
fixed order, so that results repeat bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

from attnres.ops.backend import Connect, ConnectGradInputs
from attnres.ops.gpu.launch import Launch, cdiv, power_of_two, rows
from attnres.ops.gpu.replay import Empty, new_empty, planned
from attnres.ops.gpu.streams_kernels import connect_sums, connect_tokens, connect_tokens_backward
from attnres.ops.norms import norm_kind
from attnres.ops.sharded import settled

TOKENS = 16
"""Tokens of a program: the fewest rows of a product on tensor cores."""


def _sizes(c: Connect) -> dict[str, Any]:
    """Return the kernels' constants."""
    n, width, form = c.streams.shape[-2], c.streams.shape[-1], c.form
    columns = form.columns(n)
    return {
        "KIND": form.number,
        "N": n,
        "NP": power_of_two(n),
        "D": width,
        "M": columns,
        "MP": max(16, power_of_two(columns or 1)),
        "C": form.count(n),
        "E": 0 if c.earlier is None else c.earlier.shape[-1],
        "NORM": norm_kind(c.norm),
        "LATE": form.late,
        "STEPS": form.steps,
        "FIRST": 2 if form.over_in else 1,
        "EPS": form.sinkhorn_eps > 0,
        "TOKENS": TOKENS,
        "BLOCK": min(64, max(16, power_of_two(width))),
    }


def _placed(streams: Tensor) -> tuple[Tensor, int, int]:
    """Return streams with unit stride along the width, and the elements from token to token and stream to stream."""
    streams = settled(streams)
    n, width = streams.shape[-2:]
    if streams.is_contiguous():
        return streams, n * width, width
    streams = streams.reshape(-1, n, width)
    streams = streams if streams.stride(2) == 1 else streams.contiguous()
    return streams, streams.stride(0), streams.stride(1)


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else settled(tensor).contiguous()


def _shared(c: Connect, made: Tensor | None) -> dict[str, Any]:
    """Return the arguments that both directions share."""
    streams, stride, apart = _placed(c.streams)
    kept, kept_stride, kept_apart = (streams, stride, apart) if made is None else _placed(made)
    return {
        "streams": streams,
        "stride": stride,
        "apart": apart,
        "kept": kept,
        "kept_stride": kept_stride,
        "kept_apart": kept_apart,
        "earlier": _vector(c.earlier),
        "output": _vector(c.output),
        "table": _vector(c.table),
        "weight": None if c.norm is None else _vector(c.norm.weight),
    }


def plan_connect(c: Connect, empty: Empty = new_empty) -> tuple[list[Launch], tuple[Tensor | None, ...]]:
    """Return the launch, and the results of `connect` that it fills."""
    streams, norm, form = c.streams, c.norm, c.form
    sizes, shape = _sizes(c), (*streams.shape[:-2], streams.shape[-1])
    tokens = streams.numel() // (sizes["N"] * sizes["D"])
    new_streams = None if c.output is None else empty(streams, streams.shape)
    x = empty(streams, shape, (norm and norm.out_dtype) or streams.dtype)
    coefficients = products = sums = None
    if sizes["M"]:
        coefficients = empty(streams, (*streams.shape[:-2], sizes["C"]), torch.float32)
        products = empty(streams, (tokens, form.groups(sizes["N"]), sizes["M"] + 1), torch.float32)
    if form.kind == "sinkhorn":
        sums = empty(streams, (tokens, 2 * form.steps, sizes["NP"]), torch.float32)
    arguments = _shared(c, new_streams) | {
        "bias": None if norm is None else _vector(norm.bias),
        "x": x,
        "coefficients": coefficients,
        "products": products,
        "sums": sums,
        "tokens": tokens,
        "eps": float(form.eps),
        "read_eps": float(form.read_eps),
        "sinkhorn_eps": float(form.sinkhorn_eps),
        "norm_eps": 0.0 if norm is None else float(norm.eps),
    }
    launch = Launch(connect_tokens, cdiv(tokens, TOKENS), arguments, sizes, {"num_warps": 4, "num_stages": 1})
    return [launch], (new_streams, x, coefficients, products)


def connect(c: Connect) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return the streams after the write (None without a write), the read, and the coefficients and products of
    `ConnectGradInputs` (None without a table)."""
    weight, bias, *of_norm = c.norm or (None, None)
    return planned(plan_connect, c, [*c[:4], weight, bias], c.form, *of_norm)


def plan_backward(c: ConnectGradInputs, empty: Empty = new_empty) -> tuple[list[Launch], tuple[Tensor | None, ...]]:
    """Return the launches, and the results of `connect_backward` that they fill."""
    inputs, new_streams, coefficients, products, dx, dmade, dcoefficients = c
    streams, earlier, output, table, norm, form = inputs
    sizes = _sizes(inputs)
    n, width, columns, count = sizes["N"], sizes["D"], sizes["M"], sizes["C"]
    tokens, groups = streams.numel() // (n * width), form.groups(n)
    programs, fp32 = cdiv(tokens, TOKENS), torch.float32
    dstreams = empty(streams, streams.shape)
    dearlier = None if earlier is None else empty(earlier, earlier.shape)
    doutput = None if output is None else empty(output, output.shape)
    dtable = None if table is None else empty(table, table.shape)
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    dweight, dbias = (None if v is None else empty(v, v.shape, fp32) for v in (weight, bias))
    shares = empty(streams, (programs, (groups + 1) * columns + (0 if norm is None else 2 * width)), fp32)
    dproducts = empty(streams, (tokens, groups, columns), fp32) if columns else None
    arguments = _shared(inputs, new_streams) | {
        "coefficients": coefficients,
        "products": products,
        "dx": rows(dx, torch.Size((*streams.shape[:-2], width))).contiguous(),
        "dmade": None if dmade is None else settled(dmade).contiguous(),
        "dcoefficients": _vector(dcoefficients),
        "dstreams": dstreams,
        "dearlier": dearlier,
        "doutput": doutput,
        "dproducts": dproducts,
        "along": empty(streams, (tokens, groups), fp32) if columns else None,
        "work": empty(streams, (tokens, count), fp32) if columns else None,
        "sums": empty(streams, (tokens, 2 * form.steps, sizes["NP"]), fp32) if form.kind == "sinkhorn" else None,
        "shares": shares,
        "tokens": tokens,
        "sinkhorn_eps": float(form.sinkhorn_eps),
        "norm_eps": 0.0 if norm is None else float(norm.eps),
    }
    options = {"num_warps": 4, "num_stages": 1}
    launches = [Launch(connect_tokens_backward, programs, arguments, sizes, options)]
    if columns or dweight is not None or dbias is not None:
        block, same = 64, ("kept", "kept_stride", "kept_apart", "dproducts", "shares", "tokens")
        sums = {"dtable": dtable, "dweight": dweight, "dbias": dbias, "programs": programs}
        summed = {name: arguments[name] for name in same} | sums
        constants = {name: sizes[name] for name in ("N", "D", "M", "MP", "NORM")} | {
            "G": groups,
            "TOKENS": 64,
            "BLOCK": block,
        }
        number = (cdiv(n * width // groups, block) if columns else 0) + cdiv(shares.shape[1], block)
        launches.append(Launch(connect_sums, number, summed, constants, options))
    return launches, (dstreams, dearlier, doutput, dtable, dweight, dbias)


def connect_backward(c: ConnectGradInputs) -> tuple[Tensor | None, ...]:
    """Return the gradients of streams, earlier coefficients, output, table and the norm's weight and bias."""
    weight, bias, *of_norm = c.inputs.norm or (None, None)
    inputs = [*c.inputs[:4], weight, bias, *c[1:]]
    return planned(plan_backward, c, inputs, c.inputs.form, *of_norm)
