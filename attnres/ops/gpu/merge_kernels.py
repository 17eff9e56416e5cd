"""The kernels of merge.py: a program holds a whole row, one token of one vector, in registers."""

import triton
import triton.language as tl

WIDE = tl.constexpr(4096)  # columns beyond which rows of query or weight are loaded again: registers are scarce


@triton.jit
def _load(base, start, D: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    """Load the row at base[start], zero beyond its end. KEEP: other programs will read the row too, so it stays in
    cache."""
    columns = tl.arange(0, BLOCK)
    if D == BLOCK:
        values = tl.load(base + (start + columns), eviction_policy="evict_last" if KEEP else "")
    else:
        values = tl.load(
            base + (start + columns), mask=columns < D, other=0.0, eviction_policy="evict_last" if KEEP else ""
        )
    return values


@triton.jit
def _store(base, start, values, D: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    if D == BLOCK:
        tl.store(base + (start + columns), values.to(base.dtype.element_ty))
    else:
        tl.store(base + (start + columns), values.to(base.dtype.element_ty), mask=columns < D)


@triton.jit
def _start(strides, j: tl.constexpr, t, D: tl.constexpr):
    """Return the start of row t of tensor j. One stride stands for all tensors, None for contiguous ones: one product
    then serves all."""
    if strides is None:
        start = t * D
    elif len(strides) == 1:
        start = t * strides[0]
    else:
        start = t * strides[j]
    return start


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_fours(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _sums(tiles, AXIS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the sums of tiles over an axis, TOGETHER (one or four) of them in one exchange between warps."""
    sums = ()
    for first in tl.static_range(0, len(tiles), TOGETHER):
        if TOGETHER == 1 or len(tiles) - first == 1:
            sums = sums + (tl.sum(tiles[first], AXIS),)
        elif len(tiles) - first == 2:
            sums = sums + tl.reduce(tiles[first : first + 2], AXIS, _add_pairs)
        elif len(tiles) - first == 3:
            sums = sums + tl.reduce(tiles[first : first + 3], AXIS, _add_triples)
        else:
            sums = sums + tl.reduce(tiles[first : first + 4], AXIS, _add_fours)
    return sums


@triton.jit
def _rows(
    tensors, strides, t, first: tl.constexpr, N: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Load row t of each tensor from number `first` on, of N tensors, at most MOST of them."""
    rows = ()
    for j in tl.static_range(first, min(first + MOST, N)):
        rows = rows + (_load(tensors[j], _start(strides, j, t, D), D, BLOCK, False),)
    return rows


@triton.jit
def merge_row(
    opens,
    open_strides,
    added,
    added_stride,
    query,
    output,
    output_stride,
    top,
    top_stride,
    total,
    total_stride,
    weight,
    bias,
    partial_out,
    h_out,
    x_out,
    scalars_out,
    eps,
    norm_eps,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORM: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute x of one token, and the values that the backward needs (`MergeSaved`). SLOTS: the power of two that holds
    K. TOGETHER: open sources whose sums are exchanged between warps at once. Absent tensors are None."""
    t = tl.program_id(0).to(tl.int64)
    tokens = tl.num_programs(0).to(tl.int64)
    if K > 0:
        following = _rows(opens, open_strides, t, 0, K, TOGETHER, D, BLOCK)
    if added is not None:
        addend = _load(added, _start(added_stride, 0, t, D), D, BLOCK, False)
    if output is not None:
        acc = _load(output, _start(output_stride, 0, t, D), D, BLOCK, False).to(tl.float32)
    if K > 0:
        if BLOCK <= WIDE:
            q = _load(query, 0, D, BLOCK, True).to(tl.float32)
        slots = tl.arange(0, SLOTS)
        scores = tl.full([SLOTS], float("-inf"), tl.float32)
        inv_rms = tl.zeros([SLOTS], tl.float32)
        if output is not None:
            first_top = tl.load(top + t * top_stride).to(tl.float32)
            first_total = tl.load(total + t * total_stride).to(tl.float32)
            highest = first_top
            mass = first_total
            acc *= mass
        for first in tl.static_range(0, K, TOGETHER):
            current = following
            following = _rows(opens, open_strides, t, first + TOGETHER, K, TOGETHER, D, BLOCK)
            # loaded again for each source; without the barrier the compiler would hold it in registers
            if BLOCK > WIDE:
                tl.debug_barrier()
                q = _load(query, 0, D, BLOCK, True).to(tl.float32)
            vectors = ()
            products = ()
            for j in tl.static_range(first, min(first + TOGETHER, K)):
                row = current[j - first]
                if (j + 1 == K) and (added is not None):
                    row = (row.to(tl.float32) + addend.to(tl.float32)).to(DTYPE)
                    _store(partial_out, t * D, row, D, BLOCK)
                v = row.to(tl.float32)
                vectors = vectors + (v,)
                products = products + (v * v, v * q)
            sums = _sums(products, 0, 4)
            for j in tl.static_range(first, min(first + TOGETHER, K)):
                v = vectors[j - first]
                r = tl.rsqrt(sums[2 * (j - first)] / D + eps)
                s = sums[2 * (j - first) + 1] * r
                scores = tl.where(slots == j, s, scores)
                inv_rms = tl.where(slots == j, r, inv_rms)
                if (j == 0) and (output is None):
                    acc = v
                    highest = s
                    mass = 1.0
                else:
                    higher = tl.maximum(highest, s)
                    shrink = tl.exp(highest - higher)
                    p = tl.exp(s - higher)
                    acc = acc * shrink + v * p
                    mass = mass * shrink + p
                    highest = higher
        acc = acc / mass
        if scalars_out is not None:
            at = scalars_out + tokens + t * K + slots
            tl.store(at, tl.exp(scores - highest) / mass, mask=slots < K)
            tl.store(at + tokens * K, scores, mask=slots < K)
            tl.store(at + 2 * tokens * K, inv_rms, mask=slots < K)
            if output is not None:
                tl.store(scalars_out + tokens * (1 + 3 * K) + t, tl.exp(first_top - highest) * first_total / mass)
    if not NORM:
        if h_out is not None:
            _store(h_out, t * D, acc, D, BLOCK)
        if x_out is not None:
            _store(x_out, t * D, acc, D, BLOCK)
    else:
        rounded = acc.to(DTYPE)
        if h_out is not None:
            _store(h_out, t * D, rounded, D, BLOCK)
        h = rounded.to(tl.float32)
        if CENTER:
            h = h - tl.sum(h) / D
            if D != BLOCK:
                h = tl.where(tl.arange(0, BLOCK) < D, h, 0.0)
        rstd = tl.rsqrt(tl.sum(h * h) / D + norm_eps)
        if scalars_out is not None:
            tl.store(scalars_out + t, rstd)
        x = h * rstd
        if weight is not None:
            x *= _load(weight, 0, D, BLOCK, True).to(tl.float32)
        if bias is not None:
            x += _load(bias, 0, D, BLOCK, True).to(tl.float32)
        _store(x_out, t * D, x, D, BLOCK)


@triton.jit
def merge_rows_backward(
    grad,
    grad_stride,
    opens,
    open_strides,
    carried,
    carried_strides,
    query,
    weight,
    h,
    h_stride,
    output,
    output_stride,
    scalars,
    dopens,
    dadded,
    doutput,
    dtop,
    shares,
    tokens,
    last,
    norm_eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    CENTER: tl.constexpr,
    BIASED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    SEALED: tl.constexpr,
    ROUNDED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute the gradients of this program's tokens, and its rows of `shares`: one for each gradient of query, weight
    and bias that exists, programs * D elements apart. Absent tensors are None; an absent h is recomputed, rounded to
    DTYPE before a norm. SEALED: there are sealed sources beside open ones. BIASED: there is a bias. ROUNDED: doutput is
    narrower than fp32. TOGETHER: as in `merge_row`.

    ds_j = p_j (<dh, v_j> - delta),  dv_j = p_j dh + ds_j r_j (q - s_j r_j v_j / d),  delta = <dh, h>
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if K > 0:
        span = tl.cast(tokens, tl.int64) * K  # elements of each of weights, scores and inv_rms
        if STAGES > 1:
            q = _load(query, 0, D, BLOCK, True).to(tl.float32)
        dq = tl.zeros([BLOCK], tl.float32)
    if weight is not None and STAGES > 1 and BLOCK <= WIDE:
        w = _load(weight, 0, D, BLOCK, True).to(tl.float32)
    if weight is not None:
        dw = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        db = tl.zeros([BLOCK], tl.float32)
    for turn in tl.range(program, tokens, programs, num_stages=STAGES):
        # Never more than `last`, which the compiler cannot know: it would otherwise hold an address for every row in
        # registers.
        t = tl.minimum(turn, last).to(tl.int64)
        if K > 0:
            at_weights = scalars + tokens + t * K
        dh = _load(grad, _start(grad_stride, 0, t, D), D, BLOCK, False).to(tl.float32)
        if h is not None:
            hat = _load(h, _start(h_stride, 0, t, D), D, BLOCK, False).to(tl.float32)
            if K > 0 and STAGES == 1:
                following = _rows(opens, open_strides, t, 0, K, TOGETHER, D, BLOCK)
        else:
            held = _rows(opens, open_strides, t, 0, K, K, D, BLOCK)
            if output is not None:
                hat = _load(output, _start(output_stride, 0, t, D), D, BLOCK, False).to(tl.float32)
                hat *= tl.load(scalars + tokens + 3 * span + t)
            else:
                hat = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(K):
                hat += held[j].to(tl.float32) * tl.load(at_weights + j)
            if NORM:
                hat = hat.to(DTYPE).to(tl.float32)
        if NORM:
            scale = tl.load(scalars + t)
            if CENTER:
                mean_h = tl.sum(hat) / D
                hat -= mean_h  # beyond the end of the row dh is zero
            hat *= scale
            if BIASED:
                db += dh
            product = dh * hat
            if weight is not None:
                dw += product
                if STAGES == 1:
                    w = _load(weight, 0, D, BLOCK, True).to(tl.float32)
                elif BLOCK > WIDE:  # inside a condition the load would not be pipelined, which would take shared memory
                    w = tl.zeros([BLOCK], tl.float32)
                    if tokens > 0:
                        w = _load(weight, 0, D, BLOCK, True).to(tl.float32)
                product *= w
                dh *= w
            if CENTER:
                along, mean = _sums((product, dh), 0, 4)
                dh = (dh - hat * (along / D) - mean / D) * scale
            else:
                along = tl.sum(product)
                dh = (dh - hat * (along / D)) * scale
            delta = along * scale * scale * norm_eps
        else:
            delta = tl.sum(dh * hat)
        if dtop is not None:
            share = 1.0
            if SEALED:
                share = tl.load(scalars + tokens + 3 * span + t)
        if ROUNDED:  # phase 1 subtracts <do, h> from <do, v>: both use the rounded do
            do = (dh * share).to(doutput.dtype.element_ty)
            _store(doutput, t * D, do, D, BLOCK)
            if NORM:
                hat /= scale
            if CENTER:
                hat += mean_h
            handed = do.to(tl.float32) * hat
            if K == 0 or BLOCK > WIDE:
                at_top = tl.sum(handed)
        if K > 0 and STAGES == 1:
            q = _load(query, 0, D, BLOCK, True).to(tl.float32)
        for first in tl.static_range(0, K, TOGETHER):
            if h is None:
                current = held[first : first + TOGETHER]
            elif STAGES == 1:
                current = following
                following = _rows(opens, open_strides, t, first + TOGETHER, K, TOGETHER, D, BLOCK)
            else:  # the rows are in shared memory by now: loaded earlier they would fill registers
                current = _rows(opens, open_strides, t, first, K, TOGETHER, D, BLOCK)
            products = ()
            for j in tl.static_range(first, min(first + TOGETHER, K)):
                products = products + (dh * current[j - first].to(tl.float32),)
            if ROUNDED and first == 0 and BLOCK <= WIDE:  # in one exchange; a wider row has no registers for it
                products = products + (handed,)
            sums = _sums(products, 0, 4)
            if ROUNDED and first == 0 and BLOCK <= WIDE:
                at_top = sums[len(products) - 1]
            for j in tl.static_range(first, min(first + TOGETHER, K)):
                v = current[j - first].to(tl.float32)
                p = tl.load(at_weights + j)
                r = tl.load(at_weights + 2 * span + j)
                s = tl.load(at_weights + span + j)
                along_query = (sums[j - first] - delta) * p * r
                dv = dh * p + q * along_query - v * (along_query * r * s / D)
                dq += v * along_query
                if carried[j] is not None:
                    dv += _load(carried[j], _start(carried_strides, j, t, D), D, BLOCK, False).to(tl.float32)
                _store(dopens[j], t * D, dv, D, BLOCK)
                if (j + 1 == K) and (dadded is not None):
                    _store(dadded, t * D, dv, D, BLOCK)
        if dtop is not None:
            if not ROUNDED:
                at_top = share * delta
            tl.store(dtop + t, -at_top)
            if doutput is not None and not ROUNDED:
                _store(doutput, t * D, dh * share, D, BLOCK)
    at = program.to(tl.int64) * D
    if K > 0:
        _store(shares, at, dq, D, BLOCK)
        at += programs.to(tl.int64) * D
    if weight is not None:
        _store(shares, at, dw, D, BLOCK)
        at += programs.to(tl.int64) * D
    if BIASED:
        _store(shares, at, db, D, BLOCK)


@triton.jit
def mix_row(
    sources, strides, weights, weights_stride, earlier, out, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute sum_j weights[:, j] v_j of one token, added to `earlier` (fp32) if it is given."""
    t = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.float32)
    if earlier is not None:
        acc = _load(earlier, t * D, D, BLOCK, False)
    for j in tl.static_range(N):
        v = _load(sources[j], _start(strides, j, t, D), D, BLOCK, False).to(tl.float32)
        acc += tl.load(weights + t * weights_stride + j) * v
    _store(out, t * D, acc, D, BLOCK)
