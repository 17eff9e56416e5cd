"""The Triton kernels of phase 1 and its backward; sealed.py launches them.

A program takes a few tokens, and the rows of its tile are the (token, source) pairs. Source j of n lies at its own
address, so a program first works out, once, where each row starts relative to the first source; a tile is then one
load whose rows come from n tensors, which the compiler can keep in flight while it computes. The S outputs, their
gradients and the gradients of the sources are reached in the same way.

Two passes over d: one for the logits (V Q^T) and 1/rms, one for the outputs (P V), whose second read of V comes from
the cache. P is (token, read) by (token, source) and zero between tokens, so that one matrix product serves the tile.

Precision: a product with bf16 values is exact in fp32 if the fp32 factor is cut into three bf16 pieces; two are enough
where the result is rounded to bf16. Other dtypes are multiplied in three TF32 products.

Constants of the kernels: N sources, S reads, D width; WIDE, the bits of the sources of a second dtype, and OTHER, one
of them; TOKENS, ROWS, COLS, READS and BLOCK, the tile: ROWS >= TOKENS * N, READS >= S, COLS >= TOKENS * READS, and
BLOCK columns of D at a time, all but TOKENS powers of two; PIECES and OUT_PIECES, as above, 0 for TF32; ALIGNED, rows
start at multiples of 16 bytes; STAGES, tiles in flight and in use.
"""

import triton
import triton.language as tl


@triton.jit
def _row_starts(
    tensors,
    strides,
    which,
    first,
    token,
    N: tl.constexpr,
    D: tl.constexpr,
    OTHER: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return pointers to row first + token[i] of tensors[which[i]], of the dtype of tensors[OTHER].

    They are computed from addresses, not as offsets from one tensor: differences of addresses do not change in a loop,
    so that the compiler would hold one for every row in registers.
    """
    dtype: tl.constexpr = tensors[OTHER].dtype
    address = tl.zeros(which.shape, tl.int64) + tensors[OTHER].to(tl.int64)
    for j in tl.static_range(N):
        address = tl.where(which == j, tensors[j].to(tl.int64), address)
    if strides is None:
        step = first * D + token * D
    elif len(strides) == 1:
        step = (first + token) * strides[0]
    else:
        step = tl.zeros(which.shape, tl.int64)
        for j in tl.static_range(N):
            step = tl.where(which == j, (first + token) * strides[j], step)
    rows = address.to(dtype) + step
    return tl.multiple_of(rows, 16) if ALIGNED else rows


@triton.jit
def _starts(
    tensors, strides, which, first, token, N: tl.constexpr, D: tl.constexpr, OTHER: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return pointers to row first + token[i] of tensors[which[i]], of the first dtype and of the other."""
    rows = _row_starts(tensors, strides, which, first, token, N, D, 0, ALIGNED)
    return rows, _row_starts(tensors, strides, which, first, token, N, D, OTHER, ALIGNED)


@triton.jit
def _among(which, N: tl.constexpr, BITS: tl.constexpr):
    """Return whether bit which[i] of BITS is set."""
    inside = which < 0
    for j in tl.static_range(N):
        if (BITS >> j) & 1:
            inside = inside | (which == j)
    return inside


@triton.jit
def _inside(live, at, D: tl.constexpr, BLOCK: tl.constexpr):
    return live[:, None] if D % BLOCK == 0 else live[:, None] & (at < D)[None, :]


@triton.jit
def _load_tile(start, live, at, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of rows, zero for absent rows."""
    return tl.load(start[:, None] + at[None, :], mask=_inside(live, at, D, BLOCK), other=0.0)


@triton.jit
def _load_mixed(start, other, wide, live, at, D: tl.constexpr, BLOCK: tl.constexpr, MIXED: tl.constexpr):
    """Load a tile whose rows have one dtype, or two; with two it is fp32."""
    if MIXED:
        values = _load_tile(start, live & ~wide, at, D, BLOCK).to(tl.float32)
        values += _load_tile(other, live & wide, at, D, BLOCK).to(tl.float32)
    else:
        values = _load_tile(start, live, at, D, BLOCK)
    return values


@triton.jit
def _store_tile(start, values, live, at, D: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(start[:, None] + at[None, :], values.to(start.dtype.element_ty), mask=_inside(live, at, D, BLOCK))


@triton.jit
def _plus_product(acc, x, v, PIECES: tl.constexpr):
    """Return acc + x @ v, x fp32; v exact in bf16 if PIECES."""
    if PIECES == 0:
        acc = tl.dot(x, v.to(tl.float32), acc, input_precision="tf32x3")
    else:
        for _ in tl.static_range(PIECES):
            piece = x.to(tl.bfloat16)
            x -= piece.to(tl.float32)
            acc = tl.dot(piece, v, acc)
    return acc


@triton.jit
def _plus_logits(acc, v, x, PIECES: tl.constexpr):
    """Return acc + v @ x^T, x fp32; v exact in bf16 if PIECES."""
    if PIECES == 0:
        acc = tl.dot(v.to(tl.float32), tl.trans(x), acc, input_precision="tf32x3")
    else:
        for _ in tl.static_range(PIECES):
            piece = x.to(tl.bfloat16)
            x -= piece.to(tl.float32)
            acc = tl.dot(v, tl.trans(piece), acc)
    return acc


@triton.jit
def _any_not_finite(x):
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


@triton.jit(do_not_specialize=["tokens"])
def read(
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    READS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OUT_PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    s = tl.arange(0, READS)
    columns = tl.arange(0, BLOCK)
    left = tl.minimum(tokens - first, TOKENS).to(tl.int32)
    token_r = r // N
    token_c = c // READS
    read_c = c % READS
    live_r = r < left * N
    live_c = (c < left * READS) & (read_c < S)
    rows, others = _starts(sources, strides, r % N, first, token_r, N, D, OTHER, ALIGNED)
    wide = _among(r % N, N, WIDE)

    scores = tl.zeros([ROWS, READS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, D, BLOCK, num_stages=STAGES):
        at = start + columns
        v = _load_mixed(rows, others, wide, live_r, at, D, BLOCK, WIDE != 0)
        q = _load_tile(queries + s * D, s < S, at, D, BLOCK)
        squares += tl.sum(v.to(tl.float32) * v.to(tl.float32), 1)
        scores = _plus_logits(scores, v, q, PIECES)
    inverse = tl.rsqrt(squares / D + eps)
    scores *= inverse[:, None]
    if inv_rms is not None:
        tl.store(inv_rms + first * N + r, inverse, mask=live_r)
    if logits is not None:
        to = logits + first * N * S
        tl.store(to + r[:, None] * S + s[None, :], scores, mask=live_r[:, None] & (s < S)[None, :])

    same = live_r[:, None] & (token_r[:, None] == token_c[None, :])
    x = tl.reshape(tl.broadcast_to(scores[:, None, :], (ROWS, COLS // READS, READS)), (ROWS, COLS))
    x = tl.where(same, x, float("-inf"))
    highest = tl.where(live_c, tl.max(x, 0), 0.0)
    p = tl.where(same, tl.exp(x - highest[None, :]), 0.0)
    mass = tl.sum(p, 0)
    place = read_c.to(tl.int64) * tokens + first + token_c
    tl.store(top + place, highest, mask=live_c)
    tl.store(total + place, mass, mask=live_c)
    p = tl.trans(p / tl.where(live_c, mass, 1.0)[None, :])

    out = _row_starts(outputs, None, read_c, first, token_c, S, D, 0, ALIGNED)
    # 0 * inf between tokens would spoil the neighbours of a non-finite token: the tile is then computed token by token.
    rounds = tl.where(_any_not_finite(squares[:, None]) != 0, TOKENS, 1)
    for turn in range(rounds):
        now_r = live_r & ((rounds == 1) | (token_r == turn))
        now_c = live_c & ((rounds == 1) | (token_c == turn))
        for start in tl.range(0, D, BLOCK, num_stages=STAGES):
            at = start + columns
            v = _load_mixed(rows, others, wide, now_r, at, D, BLOCK, WIDE != 0)
            o = _plus_product(tl.zeros([COLS, BLOCK], tl.float32), p, v, OUT_PIECES)
            _store_tile(out, o, now_c, at, D, BLOCK)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def read_backward(
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
    along,
    partials,
    tokens,
    tiles,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    OTHER: tl.constexpr,
    CARRIED: tl.constexpr,
    CARRIED_WIDE: tl.constexpr,
    CARRIED_OTHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    READS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    OUT_PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradients of the sources; those of the queries as one partial sum a program, or leave `along` for the
    kernel dqueries."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    s = tl.arange(0, READS)
    k = tl.arange(0, GROUP)
    columns = tl.arange(0, BLOCK)
    token_r = r // N
    token_c = c // READS
    read_c = c % READS
    wide = _among(r % N, N, WIDE)
    has = _among(r % N, N, CARRIED)
    carried_wide = _among(r % N, N, CARRIED_WIDE)
    partial = s * D
    if partials is not None:
        partial += tl.program_id(0).to(tl.int64) * S * D
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * TOKENS
        left = tl.minimum(tokens - first, TOKENS).to(tl.int32)
        live_r = r < left * N
        live_c = (c < left * READS) & (read_c < S)
        same = live_r[:, None] & live_c[None, :] & (token_r[:, None] == token_c[None, :])
        rows, others = _starts(sources, strides, r % N, first, token_r, N, D, OTHER, ALIGNED)
        dout = _row_starts(grads, grad_strides, read_c, first, token_c, S, D, 0, ALIGNED)

        slope = tl.zeros([ROWS, COLS], tl.float32)
        for start in tl.range(0, D, BLOCK, num_stages=STAGES):
            at = start + columns
            v = _load_mixed(rows, others, wide, live_r, at, D, BLOCK, WIDE != 0)
            g = _load_tile(dout, live_c, at, D, BLOCK)
            if PIECES == 0:
                slope = tl.dot(v.to(tl.float32), tl.trans(g.to(tl.float32)), slope, input_precision="tf32x3")
            else:
                slope = tl.dot(v, tl.trans(g), slope)
        slope = tl.where(same, slope, 0.0)
        x = tl.load(logits + first * N * S + r[:, None] * S + read_c[None, :], mask=same, other=0.0)
        highest = tl.max(tl.where(same, x, float("-inf")), 0)
        p = tl.where(same, tl.exp(x - tl.where(live_c, highest, 0.0)[None, :]), 0.0)
        p = tl.where(same, p / tl.where(live_c, tl.sum(p, 0), 1.0)[None, :], 0.0)
        dt = tl.load(_row_starts(dtop, None, read_c, first, token_c, S, 1, 0, False), mask=live_c, other=0.0)
        ds = tl.where(same, p * (slope + dt[None, :]), 0.0)
        inverse = tl.load(inv_rms + first * N + r, mask=live_r, other=0.0)
        back = tl.sum(ds * x, 1) * inverse * inverse / D
        # (token, source) by read, from (token, source) by (token, read)
        a = ds * inverse[:, None]
        twice = tl.sum(tl.reshape(a, (ROWS, COLS // GROUP, GROUP)), 1)
        a = tl.sum(tl.reshape(a, (ROWS, COLS // READS, READS)), 1)
        if partials is None:
            tl.store(along + first * N * S + r[:, None] * S + s[None, :], a, mask=live_r[:, None] & (s < S)[None, :])

        to, to_others = _starts(dsources, None, r % N, first, token_r, N, D, OTHER, ALIGNED)
        if CARRIED != 0:
            early, early_others = _starts(carried, carried_strides, r % N, first, token_r, N, D, CARRIED_OTHER, ALIGNED)
        unsound = _any_not_finite(slope) + _any_not_finite(inverse[:, None])
        rounds = tl.where(unsound != 0, TOKENS, 1)
        for turn in range(rounds):
            now_r = live_r & ((rounds == 1) | (token_r == turn))
            now_c = live_c & ((rounds == 1) | (token_c == turn))
            for start in tl.range(0, D, BLOCK, num_stages=STAGES):
                at = start + columns
                v = _load_mixed(rows, others, wide, now_r, at, D, BLOCK, WIDE != 0)
                g = _load_tile(dout, now_c, at, D, BLOCK)
                q = _load_tile(queries + (k % READS) * D, (k % READS) < S, at, D, BLOCK)
                dv = -back[:, None] * v.to(tl.float32)
                if CARRIED != 0:
                    dv += _load_mixed(
                        early, early_others, carried_wide, now_r & has, at, D, BLOCK, CARRIED_WIDE != 0
                    ).to(tl.float32)
                dv = _plus_product(dv, p, g, OUT_PIECES)
                if PIECES == 0:
                    dv = tl.dot(twice, q, dv, input_precision="tf32x3")
                else:
                    high = q.to(tl.bfloat16)
                    dv = _plus_product(dv, twice, high, OUT_PIECES)
                    dv = _plus_product(dv, twice, (q - high.to(tl.float32)).to(tl.bfloat16), OUT_PIECES - 1)
                _store_tile(to, dv, now_r & ~wide, at, D, BLOCK)
                if WIDE != 0:
                    _store_tile(to_others, dv, now_r & wide, at, D, BLOCK)
                if partials is not None:
                    old = (s < S) & ((tile != tl.program_id(0)) | (turn != 0))
                    dq = _load_tile(partials + partial, old, at, D, BLOCK)
                    dq = _plus_product(dq, tl.trans(a), v, PIECES)
                    _store_tile(partials + partial, dq, s < S, at, D, BLOCK)
            if partials is not None:
                tl.debug_barrier()  # other threads read this round's sum in the next round


@triton.jit(do_not_specialize=["tokens", "tiles"])
def dqueries(
    sources,
    strides,
    along,
    partials,
    tokens,
    tiles,
    N: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    OTHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    READS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute partial sums over tokens and sources of along^T V: a program takes one slice of d of every SPLITS-th
    tile."""
    r = tl.arange(0, ROWS)
    s = tl.arange(0, READS)
    split = tl.program_id(0) % SPLITS
    at = tl.program_id(0) // SPLITS * BLOCK + tl.arange(0, BLOCK)
    wide = _among(r % N, N, WIDE)
    zero = tl.zeros([ROWS], tl.int64)
    token = r // N
    rows, others = _starts(sources, strides, r % N, 0, token, N, D, OTHER, ALIGNED)
    step = zero + D
    if strides is not None:
        for j in tl.static_range(N):
            step = tl.where(r % N == j, zero + strides[j if len(strides) > 1 else 0], step)
    if ALIGNED:
        step = tl.multiple_of(step, 8)
    dq = tl.zeros([READS, BLOCK], tl.float32)
    for tile in tl.range(split, tiles, SPLITS, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * TOKENS
        live = token < tl.minimum(tokens - first, TOKENS).to(tl.int32)
        v = _load_mixed(rows + first * step, others + first * step, wide, live, at, D, BLOCK, WIDE != 0)
        a = tl.load(
            along + first * N * S + r[None, :] * S + s[:, None], mask=(s < S)[:, None] & live[None, :], other=0.0
        )
        dq = _plus_product(dq, a, v, PIECES)
    _store_tile(partials + (split * S + s) * D, dq, s < S, at, D, BLOCK)
