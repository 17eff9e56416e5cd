"""The Triton kernels of phase 1 for few reads of few sources: all sources of a token are held in registers.

A program takes one token at a time, and its tile is (source, d): each source is read from memory once, where the tiles
of sealed_kernels.py read it twice. With a thread holding the same columns of every source, sums over sources stay in
the thread, and only those over d are exchanged between warps. Products are fp32's own, not those of tensor cores.

The offset of a row is computed from the token, not as a program's offset plus zero: the compiler would fold such a sum,
lose the alignment hint, and load element by element.

Constants: as in sealed_kernels.py, except that ROWS >= N and BLOCK >= D are powers of two for one token; TOGETHER is
the number of sums over d in one exchange.
"""

import triton
import triton.language as tl

from attnres.ops.gpu.merge_kernels import _load, _start, _sums
from attnres.ops.gpu.sealed_kernels import _among, _load_mixed, _starts, _store_tile


@triton.jit(do_not_specialize=["tokens"])
def read_token(
    queries,
    sources,
    strides,
    outputs,
    top,
    total,
    logits,
    inv_rms,
    tokens,
    eps,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    OTHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    live = r < N
    here = tl.zeros([ROWS], tl.int64) + t
    rows, others = _starts(sources, strides, r, 0, here, N, D, OTHER, ALIGNED)
    v = _load_mixed(rows, others, _among(r, N, WIDE), live, at, D, BLOCK, WIDE != 0).to(tl.float32)
    inverse = tl.zeros([ROWS], tl.float32)
    for first in tl.static_range(0, S + 1, TOGETHER):  # sum 0 is the sum of squares, sum 1 + s the logit of read s
        products = ()
        for i in tl.static_range(first, first + TOGETHER):
            if i == 0:
                products = products + (v * v,)
            elif i <= S:
                products = products + (v * _load(queries, (i - 1) * D, D, BLOCK, True).to(tl.float32)[None, :],)
        sums = _sums(products, 1, TOGETHER)
        for i in tl.static_range(first, first + TOGETHER):
            if i == 0:
                inverse = tl.rsqrt(sums[0] / D + eps)
                if inv_rms is not None:
                    tl.store(inv_rms + t * N + r, inverse, mask=live)
            elif i <= S:
                x = sums[i - first] * inverse
                if logits is not None:
                    tl.store(logits + (t * N + r) * S + i - 1, x, mask=live)
                x = tl.where(live, x, float("-inf"))
                highest = tl.max(x, 0)
                p = tl.where(live, tl.exp(x - highest), 0.0)
                mass = tl.sum(p, 0)
                place = t + (i - 1) * tl.cast(tokens, tl.int64)
                tl.store(top + place, highest)
                tl.store(total + place, mass)
                o = tl.sum((p / mass)[:, None] * v, 0)
                tl.store(outputs[i - 1] + t * D + at, o.to(outputs[i - 1].dtype.element_ty), mask=at < D)


@triton.jit(do_not_specialize=["tokens"])
def read_token_backward(
    queries,
    sources,
    strides,
    inv_rms,
    logits,
    grads,
    grad_strides,
    dtop,
    carried,
    carried_strides,
    dsources,
    partials,
    tokens,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    OTHER: tl.constexpr,
    CARRIED: tl.constexpr,
    CARRIED_WIDE: tl.constexpr,
    CARRIED_OTHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute the gradients of the sources, and those of the queries as one partial sum a program."""
    r = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    live = r < N
    wide = _among(r, N, WIDE)
    dq = ()
    for _ in tl.static_range(S):
        dq = dq + (tl.zeros([BLOCK], tl.float32),)
    for turn in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        t = tl.cast(turn, tl.int64)
        here = tl.zeros([ROWS], tl.int64) + t
        rows, others = _starts(sources, strides, r, 0, here, N, D, OTHER, ALIGNED)
        v = _load_mixed(rows, others, wide, live, at, D, BLOCK, WIDE != 0).to(tl.float32)
        if CARRIED != 0:
            early, early_others = _starts(carried, carried_strides, r, 0, here, N, D, CARRIED_OTHER, ALIGNED)
            has = live & _among(r, N, CARRIED)
            early_wide = _among(r, N, CARRIED_WIDE)
            dv = _load_mixed(early, early_others, early_wide, has, at, D, BLOCK, CARRIED_WIDE != 0).to(tl.float32)
        else:
            dv = tl.zeros([ROWS, BLOCK], tl.float32)
        inverse = tl.load(inv_rms + t * N + r, mask=live, other=0.0)
        back = tl.zeros([ROWS], tl.float32)
        summed = ()
        for first in tl.static_range(0, S, TOGETHER):
            rows_of_grads = ()
            products = ()
            for s in tl.static_range(first, first + TOGETHER):
                if s < S:
                    g = _load(grads[s], _start(grad_strides, s, t, D), D, BLOCK, False).to(tl.float32)
                    rows_of_grads = rows_of_grads + (g,)
                    products = products + (v * g[None, :],)
            along = _sums(products, 1, TOGETHER)
            for s in tl.static_range(first, first + TOGETHER):
                if s < S:
                    g = rows_of_grads[s - first]
                    q = _load(queries, s * D, D, BLOCK, True).to(tl.float32)
                    x = tl.load(logits + (t * N + r) * S + s, mask=live, other=0.0)
                    p = tl.where(live, tl.exp(x - tl.max(tl.where(live, x, float("-inf")), 0)), 0.0)
                    p /= tl.sum(p, 0)
                    ds = p * (along[s - first] + tl.load(dtop[s] + t))
                    a = ds * inverse
                    back += ds * x
                    dv += p[:, None] * g[None, :] + a[:, None] * q[None, :]
                    summed = summed + (dq[s] + tl.sum(a[:, None] * v, 0),)
        dq = summed
        dv -= (back * inverse * inverse / D)[:, None] * v
        to, to_others = _starts(dsources, None, r, 0, here, N, D, OTHER, ALIGNED)
        _store_tile(to, dv, live & ~wide, at, D, BLOCK)
        if WIDE != 0:
            _store_tile(to_others, dv, live & wide, at, D, BLOCK)
    for s in tl.static_range(S):
        tl.store(partials + (tl.program_id(0).to(tl.int64) * S + s) * D + at, dq[s], mask=at < D)
