"""The kernels of streams.py: a program has TOKENS tokens, and processes their streams BLOCK columns at a time.

It reads its own results again from the cache: streams for the products with the table, coefficients to lay them out as
matrices. Kinds are numbered as in streams.py. `kept` streams are those after the write, or the inputs if there is no
write.
"""

import triton
import triton.language as tl

GATE = tl.constexpr(1)
IDENTITY = tl.constexpr(2)
SINKHORN = tl.constexpr(3)
TANH = tl.constexpr(4)


@triton.jit
def _tile(base, start, columns, live, D: tl.constexpr):
    """Load columns of the rows that begin at base[start], (TOKENS, BLOCK) in fp32, zero outside."""
    inside = live[:, None] & (columns < D)[None, :]
    return tl.load(base + start[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(base, start, columns, live, values, D: tl.constexpr):
    inside = live[:, None] & (columns < D)[None, :]
    tl.store(base + start[:, None] + columns[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _stream(streams, t, i, columns, live, D: tl.constexpr):
    """Load columns of stream i; `streams`: their start, and the elements from token to token and stream to stream."""
    base, stride, apart = streams
    return _tile(base, t * stride + i * apart, columns, live, D)


@triton.jit
def _shares(earlier, coefficients, t, live, N: tl.constexpr, E: tl.constexpr, C: tl.constexpr, LATE: tl.constexpr):
    """Return the share of each stream in a read, (TOKENS,) each: see `Connection.late`."""
    shares = ()
    for i in tl.static_range(N):
        if LATE and earlier is not None:
            p = tl.load(earlier + t * E + i, mask=live, other=0.0)
        elif LATE:
            p = tl.zeros_like(t).to(tl.float32) + (1.0 if i == 0 else 0.0)
        elif C == 0:
            p = tl.zeros_like(t).to(tl.float32) + 1.0
        else:
            p = tl.load(coefficients + t * C + i, mask=live, other=0.0)
        shares = shares + (p,)
    return shares


@triton.jit
def _mixture(kept, shares, t, live, columns, N: tl.constexpr, D: tl.constexpr):
    """Return columns of the read before its norm."""
    h = shares[0][:, None] * _stream(kept, t, 0, columns, live, D)
    for i in tl.static_range(1, N):
        h += shares[i][:, None] * _stream(kept, t, i, columns, live, D)
    return h


@triton.jit
def _moments(
    kept, shares, t, live, norm_eps, N: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the centre (TOKENS,) that the norm subtracts, and the factor that it multiplies by."""
    centre = tl.zeros_like(t).to(tl.float32)
    scale = centre + 1.0
    if NORM != 0:
        power = tl.zeros_like(centre)
        for start in range(0, D, BLOCK):
            h = _mixture(kept, shares, t, live, start + tl.arange(0, BLOCK), N, D)
            power += tl.sum(h * h, 1)
            centre += tl.sum(h, 1)
        centre = centre / D if NORM == 2 else tl.zeros_like(power)
        if NORM == 2:
            power = tl.zeros_like(centre)
            for start in range(0, D, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                h = _mixture(kept, shares, t, live, columns, N, D)
                h = tl.where((columns < D)[None, :], h - centre[:, None], 0.0)
                power += tl.sum(h * h, 1)
        scale = tl.rsqrt(power / D + norm_eps)
    return centre, scale


@triton.jit
def _read_gradient(
    kept, shares, weight, dx, moments, t, live, columns, N: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr
):
    """Return columns of the gradient of the read before its norm. moments: centre and scale of the norm, and the means
    of its gradient times its result and of its gradient."""
    y = _tile(dx, t * D, columns, live, D)
    if NORM != 0:
        centre, scale, product, mean = moments
        hat = (_mixture(kept, shares, t, live, columns, N, D) - centre[:, None]) * scale[:, None]
        if weight is not None:
            y *= tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        y = (y - hat * product[:, None] - mean[:, None]) * scale[:, None]
        y = tl.where((columns < D)[None, :], y, 0.0)
    return y


@triton.jit
def _along(s, AXIS: tl.constexpr):
    """Return sums over an axis of (TOKENS, n, n), broadcast along it; sums of groups beyond n are one."""
    s = tl.where(s > 0.0, s, 1.0)
    return s[:, None, :] if AXIS == 1 else s[:, :, None]


@triton.jit
def _softmax(z, inside, AXIS: tl.constexpr):
    """Return the softmax over an axis, and the logarithms of its divisors."""
    z = tl.where(inside, z, -1e30)
    top = tl.max(z, AXIS)
    top = top[:, None, :] if AXIS == 1 else top[:, :, None]
    p = tl.where(inside, tl.exp(z - top), 0.0)
    total = _along(tl.sum(p, AXIS), AXIS)
    return p / total, top + tl.log(total)


@triton.jit
def _softmax_backward(p, dp, AXIS: tl.constexpr):
    along = tl.sum(p * dp, AXIS)
    return p * (dp - (along[:, None, :] if AXIS == 1 else along[:, :, None]))


@triton.jit
def _half_step(m, eps, sums, live, AXIS: tl.constexpr):
    """Divide by the sums over an axis, and store the sums."""
    s = tl.sum(m, AXIS) + eps
    tl.store(sums, s, mask=live[:, None])
    return m / _along(s, AXIS)


@triton.jit
def _half_step_backward(m, dm, sums, live, AXIS: tl.constexpr):
    """Return m and dm before a half step, given those after it."""
    s = _along(tl.load(sums, mask=live[:, None], other=1.0), AXIS)
    along = tl.sum(m * dm, AXIS)
    dm = (dm - (along[:, None, :] if AXIS == 1 else along[:, :, None])) / s
    return m * s, dm


@triton.jit
def _sinkhorn(
    z, inside, eps, sums, live, NP: tl.constexpr, STEPS: tl.constexpr, FIRST: tl.constexpr, EPS: tl.constexpr
):
    """Return the balanced matrices (TOKENS, n, n) and the first softmax. sums (TOKENS, NP): where the sums of half step
    0 are stored."""
    first, logs = _softmax(z, inside, FIRST)
    if EPS:
        m = _half_step(tl.where(inside, first + eps, 0.0), eps, sums + NP, live, 3 - FIRST)
    else:  # in logarithms: a group's largest logit may be a hundred below another's
        m, _ = _softmax(z - logs, inside, 3 - FIRST)
    for step in range(1, STEPS):
        m = _half_step(m, eps, sums + 2 * step * NP, live, FIRST)
        m = _half_step(m, eps, sums + (2 * step + 1) * NP, live, 3 - FIRST)
    return m, first


@triton.jit
def _sinkhorn_backward(
    m, dm, first, sums, live, NP: tl.constexpr, STEPS: tl.constexpr, FIRST: tl.constexpr, EPS: tl.constexpr
):
    """Return the gradient of the logits."""
    for back in range(1, STEPS):
        step = STEPS - back
        m, dm = _half_step_backward(m, dm, sums + (2 * step + 1) * NP, live, 3 - FIRST)
        m, dm = _half_step_backward(m, dm, sums + 2 * step * NP, live, FIRST)
    if EPS:
        m, dm = _half_step_backward(m, dm, sums + NP, live, 3 - FIRST)
        dm = _softmax_backward(first, dm, FIRST)
    else:
        dm = _softmax_backward(m, dm, 3 - FIRST)
        along = tl.sum(dm, FIRST)
        dm -= first * (along[:, None, :] if FIRST == 1 else along[:, :, None])
    return dm


@triton.jit
def _carry(
    coefficients,
    sums,
    eps,
    t,
    live,
    N: tl.constexpr,
    NP: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    EPS: tl.constexpr,
):
    """Balance the logits of A in place, among the coefficients (T, C)."""
    i = tl.arange(0, NP)
    matrix = 2 * N + i[:, None] * N + i[None, :]
    inside = live[:, None, None] & ((i < N)[:, None] & (i < N)[None, :])[None, :, :]
    places = coefficients + t[:, None, None] * C + matrix[None, :, :]
    z = tl.load(places, mask=inside, other=0.0)
    half_steps = sums + t[:, None] * (2 * STEPS * NP) + i[None, :]
    m, _ = _sinkhorn(z, inside, eps, half_steps, live, NP, STEPS, FIRST, EPS)
    tl.store(places, m, mask=inside)
    tl.debug_barrier()


@triton.jit
def _carry_backward(
    table,
    products,
    work,
    sums,
    eps,
    t,
    live,
    N: tl.constexpr,
    NP: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    EPS: tl.constexpr,
):
    """Replace the gradient of A by that of its logits, in work (T, C), recomputing Sinkhorn's steps."""
    i = tl.arange(0, NP)
    ours = (i < N)[:, None] & (i < N)[None, :]
    inside = live[:, None, None] & ours[None, :, :]
    matrix = 2 * N + i[:, None] * N + i[None, :]
    u = tl.load(products + t[:, None, None] * (M + 1) + matrix[None, :, :], mask=inside, other=0.0)
    z = tl.load(table + M + matrix, mask=ours, other=0.0)[None, :, :] * u
    z += tl.load(table + matrix, mask=ours, other=0.0)[None, :, :]
    half_steps = sums + t[:, None] * (2 * STEPS * NP) + i[None, :]
    m, first = _sinkhorn(z, inside, eps, half_steps, live, NP, STEPS, FIRST, EPS)
    tl.debug_barrier()
    places = work + t[:, None, None] * C + matrix[None, :, :]
    dm = tl.load(places, mask=inside, other=0.0)
    dm = _sinkhorn_backward(m, dm, first, half_steps, live, NP, STEPS, FIRST, EPS)
    tl.store(places, dm, mask=inside)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["tokens"])
def connect_tokens(
    streams,
    stride,
    apart,
    kept,
    kept_stride,
    kept_apart,
    earlier,
    output,
    table,
    weight,
    bias,
    x,
    coefficients,
    products,
    sums,
    tokens,
    eps,
    read_eps,
    sinkhorn_eps,
    norm_eps,
    KIND: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
    LATE: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the pending write, if there is an output; the coefficients; the read and its norm."""
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    live = t < tokens
    before, after = (streams, stride, apart), (kept, kept_stride, kept_apart)
    if output is not None:
        for start in range(0, D, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            f = _tile(output, t * D, columns, live, D)
            old = ()
            for i in tl.static_range(N):
                old = old + (_stream(before, t, i, columns, live, D),)
            for j in tl.static_range(N):
                new = tl.load(earlier + t * E + N + j, mask=live, other=0.0)[:, None] * f
                if E == 2 * N:
                    new += old[j]
                else:
                    for i in tl.static_range(N):
                        new += tl.load(earlier + t * E + 2 * N + i * N + j, mask=live, other=0.0)[:, None] * old[i]
                _put(kept, t * kept_stride + j * kept_apart, columns, live, new, D)
        tl.debug_barrier()
    at = tl.arange(0, MP)
    G: tl.constexpr = N if KIND == TANH else 1  # ty: ignore[invalid-assignment]
    if M > 0:
        scales = tl.load(table + G * M + at, mask=at < M, other=0.0)
        for g in tl.static_range(G):
            u = tl.zeros([TOKENS, MP], tl.float32)
            power = tl.zeros([TOKENS], tl.float32)
            for i in tl.static_range(N // G):
                for start in range(0, D, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    h = _stream(after, t, g + i, columns, live, D)
                    rows = table + (G + 1 + i * D + columns)[:, None] * M + at[None, :]
                    w = tl.load(rows, mask=(columns < D)[:, None] & (at < M)[None, :], other=0.0)
                    u = tl.dot(h, w, u, input_precision="tf32x3")
                    power += tl.sum(h * h, 1)
            inverse = tl.rsqrt(power / (N // G * D) + eps)
            u *= inverse[:, None]
            place = products + (t * G + g) * (M + 1)
            tl.store(place[:, None] + at[None, :], u, mask=live[:, None] & (at < M)[None, :])
            tl.store(place + M, inverse, mask=live)
            statics = tl.load(table + g * M + at, mask=at < M, other=0.0)
            if KIND == TANH:
                connections = statics[None, :] + scales[None, :] * (2.0 * tl.sigmoid(2.0 * u) - 1.0)
                to = tl.where(at == 0, g, tl.where(at == N + 1, N + g, 2 * N + g * N + at - 1))
            else:
                connections = statics[None, :] + scales[None, :] * u
                share = tl.sigmoid(connections)
                share = tl.where((at < N)[None, :], share + read_eps, 2.0 * share)
                connections = tl.where((at < 2 * N)[None, :], share, connections)
                to = at
            tl.store(coefficients + t[:, None] * C + to[None, :], connections, mask=live[:, None] & (at < M)[None, :])
        tl.debug_barrier()
        if KIND == SINKHORN:
            _carry(coefficients, sums, sinkhorn_eps, t, live, N, NP, C, STEPS, FIRST, EPS)
    read_shares = _shares(earlier, coefficients, t, live, N, E, C, LATE)
    centre, scale = _moments(after, read_shares, t, live, norm_eps, N, D, NORM, BLOCK)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        h = (_mixture(after, read_shares, t, live, columns, N, D) - centre[:, None]) * scale[:, None]
        if weight is not None:
            h *= tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        if bias is not None:
            h += tl.load(bias + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        _put(x, t * D, columns, live, h, D)


@triton.jit(do_not_specialize=["tokens"])
def connect_tokens_backward(
    streams,
    stride,
    apart,
    kept,
    kept_stride,
    kept_apart,
    earlier,
    output,
    table,
    weight,
    coefficients,
    products,
    dx,
    dmade,
    dcoefficients,
    dstreams,
    dearlier,
    doutput,
    dproducts,
    along,
    work,
    sums,
    shares,
    tokens,
    sinkhorn_eps,
    norm_eps,
    KIND: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    NORM: tl.constexpr,
    LATE: tl.constexpr,
    STEPS: tl.constexpr,
    FIRST: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute all gradients of a tile of tokens, except those of the table and the norm, of which this program writes
    partial sums.

    dproducts (T, G, M): gradients of H W. along (T, G): factor of the row itself in its gradient, from its norm. work
    (T, C): the gradients of the coefficients, then of their logits. shares (programs, (G + 1) M + 2 D): partial sums
    for statics, scales, the norm's weight and bias.
    """
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    live = t < tokens
    G: tl.constexpr = N if KIND == TANH else 1  # ty: ignore[invalid-assignment]
    mine = shares + tl.program_id(0).to(tl.int64) * ((G + 1) * M + (2 * D if NORM != 0 else 0))
    before, after = (streams, stride, apart), (kept, kept_stride, kept_apart)
    read_shares = _shares(earlier, coefficients, t, live, N, E, C, LATE)
    i = tl.arange(0, NP)
    at = tl.arange(0, MP)
    centre, scale = _moments(after, read_shares, t, live, norm_eps, N, D, NORM, BLOCK)
    product = tl.zeros([TOKENS], tl.float32)
    mean = tl.zeros([TOKENS], tl.float32)
    if NORM != 0:
        for start in range(0, D, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            hat = (_mixture(after, read_shares, t, live, columns, N, D) - centre[:, None]) * scale[:, None]
            y = _tile(dx, t * D, columns, live, D)
            tl.store(mine + (G + 1) * M + columns, tl.sum(y * hat, 0), mask=columns < D)
            tl.store(mine + (G + 1) * M + D + columns, tl.sum(y, 0), mask=columns < D)
            if weight is not None:
                y *= tl.load(weight + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
            product += tl.sum(y * hat, 1) / D
            if NORM == 2:
                mean += tl.sum(y, 1) / D
    moments = (centre, scale, product, mean)
    dp = tl.zeros([TOKENS, NP], tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        read = _read_gradient(after, read_shares, weight, dx, moments, t, live, columns, N, D, NORM)
        for j in tl.static_range(N):
            one = tl.sum(read * _stream(after, t, j, columns, live, D), 1)
            dp += tl.where((i == j)[None, :], one[:, None], 0.0)
    of_streams = live[:, None] & (i < N)[None, :]
    if earlier is not None:
        gradient = dp if LATE else tl.zeros_like(dp)
        tl.store(dearlier + t[:, None] * E + i[None, :], gradient, mask=of_streams)
        if output is None:
            for start in tl.static_range(N, E, NP):
                nothing = live[:, None] & (start + i < E)[None, :]
                tl.store(dearlier + t[:, None] * E + start + i[None, :], tl.zeros_like(dp), mask=nothing)
    if M > 0:
        for first in tl.static_range(0, C, MP):
            above = tl.zeros([TOKENS, MP], tl.float32)
            here = live[:, None] & (first + at < C)[None, :]
            if dcoefficients is not None:
                above = tl.load(dcoefficients + t[:, None] * C + first + at[None, :], mask=here, other=0.0)
            tl.store(work + t[:, None] * C + first + at[None, :], above, mask=here)
        tl.debug_barrier()
        if not LATE:
            gradient = tl.load(work + t[:, None] * C + i[None, :], mask=of_streams, other=0.0)
            tl.debug_barrier()
            tl.store(work + t[:, None] * C + i[None, :], gradient + dp, mask=of_streams)
            tl.debug_barrier()
        if KIND == SINKHORN:
            _carry_backward(table, products, work, sums, sinkhorn_eps, t, live, N, NP, M, C, STEPS, FIRST, EPS)
        scales = tl.load(table + G * M + at, mask=at < M, other=0.0)[None, :]
        of_scales = tl.zeros([MP], tl.float32)
        here = live[:, None] & (at < M)[None, :]
        for g in tl.static_range(G):
            u = tl.load(products + ((t * G + g) * (M + 1))[:, None] + at[None, :], mask=here, other=0.0)
            inverse = tl.load(products + (t * G + g) * (M + 1) + M, mask=live, other=0.0)
            statics = tl.load(table + g * M + at, mask=at < M, other=0.0)[None, :]
            if KIND == TANH:
                place = tl.where(at == 0, g, tl.where(at == N + 1, N + g, 2 * N + g * N + at - 1))
            else:
                place = at
            dz = tl.load(work + t[:, None] * C + place[None, :], mask=here, other=0.0)
            if KIND == TANH:
                y = 2.0 * tl.sigmoid(2.0 * u) - 1.0
                slope = 1.0 - y * y
            else:
                y = u
                slope = tl.zeros_like(u) + 1.0
                share = tl.sigmoid(statics + scales * u)
                curve = share * (1.0 - share) * tl.where(at < N, 1.0, 2.0)[None, :]
                dz *= tl.where((at < 2 * N)[None, :], curve, 1.0)
            tl.store(mine + g * M + at, tl.sum(dz, 0), mask=at < M)
            of_scales += tl.sum(dz * y, 0)
            du = dz * scales * slope
            tl.store(dproducts + ((t * G + g) * M)[:, None] + at[None, :], du * inverse[:, None], mask=here)
            pull = tl.sum(du * u, 1) * inverse * inverse / (N // G * D)
            tl.store(along + t * G + g, -pull, mask=live)
        tl.store(mine + G * M + at, of_scales, mask=at < M)
        tl.debug_barrier()
    pair = tl.arange(0, NP * NP)
    da = tl.zeros([TOKENS, NP * NP], tl.float32)
    db = tl.zeros([TOKENS, NP], tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        read = _read_gradient(after, read_shares, weight, dx, moments, t, live, columns, N, D, NORM)
        grads = ()
        for j in tl.static_range(N):
            grad = read_shares[j][:, None] * read
            if dmade is not None:
                grad += _tile(dmade, t * (N * D) + j * D, columns, live, D)
            if M > 0:
                group = t * G + (j if KIND == TANH else 0)
                of_norm = tl.load(along + group, mask=live, other=0.0)
                grad += of_norm[:, None] * _stream(after, t, j, columns, live, D)
                here = live[:, None] & (at < M)[None, :]
                du = tl.load(dproducts + (group * M)[:, None] + at[None, :], mask=here, other=0.0)
                rows = table + (G + 1 + (0 if KIND == TANH else j * D) + columns)[None, :] * M + at[:, None]
                w = tl.load(rows, mask=(at < M)[:, None] & (columns < D)[None, :], other=0.0)
                grad = tl.dot(du, w, grad, input_precision="tf32x3")
            grads = grads + (grad,)
        if output is not None:
            f = _tile(output, t * D, columns, live, D)
            df = tl.zeros_like(f)
            for j in tl.static_range(N):
                df += tl.load(earlier + t * E + N + j, mask=live, other=0.0)[:, None] * grads[j]
                db += tl.where((i == j)[None, :], tl.sum(f * grads[j], 1)[:, None], 0.0)
            _put(doutput, t * D, columns, live, df, D)
        for k in tl.static_range(N):
            if output is None or E == 2 * N:
                dold = grads[k]
            else:
                old = _stream(before, t, k, columns, live, D)
                dold = tl.zeros_like(old)
                for j in tl.static_range(N):
                    dold += tl.load(earlier + t * E + 2 * N + k * N + j, mask=live, other=0.0)[:, None] * grads[j]
                    da += tl.where((pair == k * NP + j)[None, :], tl.sum(old * grads[j], 1)[:, None], 0.0)
            _put(dstreams, t * (N * D) + k * D, columns, live, dold, D)
    if output is not None:
        tl.store(dearlier + t[:, None] * E + N + i[None, :], db, mask=of_streams)
        if E > 2 * N:
            to = 2 * N + pair // NP * N + pair % NP
            ours = (pair // NP < N) & (pair % NP < N)
            tl.store(dearlier + t[:, None] * E + to[None, :], da, mask=live[:, None] & ours[None, :])


@triton.jit(do_not_specialize=["tokens", "programs"])
def connect_sums(
    kept,
    kept_stride,
    kept_apart,
    dproducts,
    shares,
    dtable,
    dweight,
    dbias,
    tokens,
    programs,
    N: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over tokens: BLOCK rows of the weights' gradient, or, in the last programs, BLOCK columns of the shares."""
    K: tl.constexpr = N * D // G if M > 0 else 0  # ty: ignore[invalid-assignment]
    blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    if program < blocks:
        row = program * BLOCK + tl.arange(0, BLOCK)
        at = tl.arange(0, MP)
        dw = tl.zeros([BLOCK, MP], tl.float32)
        for g in tl.static_range(G if M > 0 else 0):
            column = (row // D + g).to(tl.int64) * kept_apart + row % D
            for start in range(0, tokens, TOKENS):
                t = (start + tl.arange(0, TOKENS)).to(tl.int64)
                inside = (row < K)[:, None] & (t < tokens)[None, :]
                h = tl.load(kept + column[:, None] + (t * kept_stride)[None, :], mask=inside, other=0.0).to(tl.float32)
                here = (t < tokens)[:, None] & (at < M)[None, :]
                du = tl.load(dproducts + ((t * G + g) * M)[:, None] + at[None, :], mask=here, other=0.0)
                dw = tl.dot(h, du, dw, input_precision="tf32x3")
        if M > 0:
            to = dtable + (G + 1 + row)[:, None] * M + at[None, :]
            tl.store(to, dw, mask=(row < K)[:, None] & (at < M)[None, :])
    else:
        width: tl.constexpr = (G + 1) * M + (2 * D if NORM != 0 else 0)
        place = (program - blocks) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for each in range(programs):
            total += tl.load(shares + tl.cast(each, tl.int64) * width + place, mask=place < width, other=0.0)
        if M > 0:
            tl.store(dtable + place, total, mask=place < (G + 1) * M)
        place -= (G + 1) * M
        if dweight is not None:
            tl.store(dweight + place, total, mask=(place >= 0) & (place < D))
        if dbias is not None:
            tl.store(dbias + place - D, total, mask=(place >= D) & (place < 2 * D))
