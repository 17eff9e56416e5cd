"""Parallel streams between two sublayers: the write of one and the read of the next, in one operation `connect`.

    H_j <- sum_i A_ij H_i + b_j f                  the write of sublayer l-1, with the A and b that its read chose
    [p, b, A] = coefficients of N(H) W             those of sublayer l
    x = norm(sum_i p_i H_i)                        the read of sublayer l

So each stream is read once: n vectors in, n out, and the output and x. The device's kernels do this in one launch
forward (dispatch.py chooses them); plain torch needs many operations, which autograd differentiates.

The coefficients of a token are one row, [p (n), b (n), A (n, n)], A as [in, out]. Their parameters are one table for
each sublayer, (G + 1 + K, M): G rows of statics, a row of scales, the K rows of W.

| kind | logits of | G, K, M | p, b, A |
|---|---|---|---|
| sum, write | | | p = 1; the head's, which needs no new streams, and the one that recomputes them |
| gate | N(vec H) W | 1, n d, n | p = sigmoid + read_eps |
| identity | N(vec H) W | 1, n d, 2n | b = 2 sigmoid too; A = I |
| sinkhorn | N(vec H) W | 1, n d, 2n + n^2 | A = sinkhorn too |
| permutations | N(vec H) W | 1, n d, 2n + n! | A = sum_k softmax_k P_k over the permutations too |
| tanh | N(H_i) W of each stream | n, d, n + 2 | p_i, A_i., b_i = static_i + scale tanh(N(H_i) W) |
"""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnres.ops import plain
from attnres.ops.backend import Connect, ConnectGradInputs, ConnectingBackend, Connection
from attnres.ops.dispatch import connection_backend
from attnres.ops.norms import Norm, normed_product
from attnres.ops.precision import compute_dtype, full_precision


def connect(
    streams: Tensor,
    table: Tensor | None,
    form: Connection,
    *,
    earlier: Tensor | None = None,
    output: Tensor | None = None,
    norm: Norm | None = None,
    before: "Rewritten | None" = None,
    after: "Rewritten | None" = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write a sublayer's output to the streams, if one is pending, and compute the read of the next sublayer.

    Args:
        streams: (..., n, d), without the pending write.
        table: of this sublayer, see above; None for kind "sum".
        form: how coefficients are computed from it.
        earlier: coefficients (..., C) of the previous sublayer. output: its output (..., d), to be written.
        norm: the norm after the read; None returns the read itself, in the streams' dtype.
        before: how backward recomputes `streams`; None stores them. after: how it recomputes the streams after the
            write. Both are for kernels; plain torch computes all of this connection again if one is given.

    Returns:
        The streams (..., n, d) after the write; the read (..., d); its coefficients (..., C), None for kind "sum".
    """
    inputs = Connect(streams, earlier, output, table, norm, form)
    if not torch.compiler.is_compiling() and not plain.is_needed():
        backend = connection_backend(inputs)
        if backend is not None:
            bare_norm = None if norm is None else norm._replace(weight=None, bias=None)
            weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
            new_streams, x, coefficients = _Connect.apply(
                backend, form, bare_norm, before, after, streams, earlier, output, table, weight, bias
            )
            return new_streams, x, None if table is None else coefficients
        if before or after:
            return checkpoint(_connect, inputs, use_reentrant=False)
    return _connect(inputs)


class Rewritten:
    """Streams after a write, which backward recomputes from the last stored ones, so that most need no memory.

    Xie et al., arXiv 2512.24880, section 4.3.2, store the streams once for several layers in the same way. The outputs
    and coefficients of the writes are those that backward needs anyway.
    """

    def __init__(self, streams: "Tensor | Rewritten", earlier: Tensor, output: Tensor, form: Connection) -> None:
        """Store a write to `streams`: the coefficients (..., C) of its read and its output (..., d)."""
        self.source = streams if isinstance(streams, Rewritten) else streams.detach()
        self.write = earlier.detach(), output.detach()
        self.form = form._replace(kind="write")
        self.value: Tensor | None = None

    def recompute(self, backend: ConnectingBackend) -> Tensor:
        """Return the streams (..., n, d), and store them and all before them: backward needs these next."""
        writes: list[Rewritten] = []
        source: Tensor | Rewritten = self
        while isinstance(source, Rewritten) and source.value is None:
            writes.append(source)
            source = source.source
        streams = source.value if isinstance(source, Rewritten) else source
        for write in reversed(writes):
            assert streams is not None
            streams = write.value = backend.connect(Connect(streams, *write.write, None, None, write.form))[0]
        assert streams is not None  # a connection of kind "write" returns them
        return streams

    def take(self, backend: ConnectingBackend) -> Tensor:
        """Return the streams and store them no longer, after their last use."""
        streams, self.value = self.recompute(backend), None
        return streams


def _connect(c: Connect) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `connect` in operations that autograd differentiates."""
    dtype, n = c.streams.dtype, c.streams.shape[-2]
    with full_precision(c.streams):
        streams = c.streams if c.output is None else write(c.streams, c.earlier, c.output)
        values = streams.to(compute_dtype(dtype))
        weights = None if c.table is None else coefficients(values, c.table, c.form)
        if c.form.late:
            p = torch.eye(1, n, device=values.device)[0] if c.earlier is None else c.earlier
        else:
            p = values.new_ones(n) if weights is None else weights
        h = (p[..., None, :n].to(values.dtype) @ values).squeeze(-2).to(dtype)
        x = h if c.norm is None else plain.apply(h.to(values.dtype), c.norm).to(c.norm.out_dtype or dtype)
        return streams, x, weights


def write(streams: Tensor, earlier: Tensor | None, output: Tensor) -> Tensor:
    """Return A^T H + b (outer) f of streams (..., n, d), rounded once, to their dtype."""
    assert earlier is not None  # every write follows a read
    n, values = streams.shape[-2], streams.to(compute_dtype(streams.dtype))
    _, b, carry = split(earlier, n)
    with full_precision(streams):
        if carry is not None:
            values = carry.transpose(-1, -2) @ values
        return torch.addcmul(values, b.unsqueeze(-1), output.to(values.dtype).unsqueeze(-2)).to(streams.dtype)


def split(coefficients: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split the coefficients of n streams into p (..., n), b (..., n) and A (..., n, n), None if A is I."""
    p, b, carry = coefficients.tensor_split((n, 2 * n), -1)
    return p, b, carry.unflatten(-1, (n, n)) if carry.shape[-1] else None


def coefficients(streams: Tensor, table: Tensor, form: Connection) -> Tensor:
    """Return the coefficients (..., C) of streams (..., n, d); streams and result are in the compute dtype."""
    n, table = streams.shape[-2], table.to(streams.dtype)
    if form.kind == "tanh":
        statics, scale, weight = table[:n], table[n], table[n + 1 :]
        rows = statics + scale * normed_product(streams, weight, form.eps).tanh()  # (..., n, n + 2)
        return torch.cat([rows[..., 0], rows[..., -1], rows[..., 1:-1].flatten(-2)], -1)
    logits = table[0] + table[1] * normed_product(streams.flatten(-2), table[2:], form.eps)
    p = logits[..., :n].sigmoid() + form.read_eps
    if form.kind == "gate":
        return p
    b, rest = 2.0 * logits[..., n : 2 * n].sigmoid(), logits[..., 2 * n :]
    if form.kind == "identity":
        return torch.cat([p, b], -1)
    if form.kind == "permutations":
        carry = rest.softmax(-1) @ permutations(n).to(rest)
    else:
        carry = sinkhorn(rest.unflatten(-1, (n, n)), form.steps, over_in=form.over_in, eps=form.sinkhorn_eps).flatten(
            -2
        )
    return torch.cat([p, b, carry], -1)


@functools.cache
def permutations(n: int) -> Tensor:
    """Return the matrices of all permutations of n, (n!, n^2), the identity first."""
    with torch.inference_mode(False):
        orders = torch.tensor(list(itertools.permutations(range(n))), device="cpu")
        return F.one_hot(orders, n).flatten(1).float()


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: ConnectingBackend,
        form: Connection,
        norm: Norm | None,
        before: Rewritten | None,
        after: Rewritten | None,
        streams: Tensor,
        earlier: Tensor | None,
        output: Tensor | None,
        table: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        norm = None if norm is None else norm._replace(weight=weight, bias=bias)
        new_streams, x, coefficients, products = backend.connect(Connect(streams, earlier, output, table, norm, form))
        stored = None if before else streams, None if after else new_streams
        ctx.save_for_backward(*stored, earlier, output, table, weight, bias, coefficients, products)
        ctx.before, ctx.after = before, after
        ctx.backend, ctx.form, ctx.norm = backend, form, norm and norm._replace(weight=None, bias=None)
        # an input is returned as a new output, so that gradients of its later uses arrive here
        nothing = x.new_empty(0)
        handed_on = new_streams if output is not None else streams.detach()
        return nothing if handed_on is None else handed_on, x, nothing.clone() if coefficients is None else coefficients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plain.refuse_second_derivative()
        streams, new_streams, earlier, output, table, weight, bias, coefficients, products = ctx.saved_tensors
        if ctx.after:
            new_streams = ctx.after.take(ctx.backend)
        if ctx.before:
            streams = ctx.before.recompute(ctx.backend)
        dnew_streams, dx, dcoefficients = grads
        if dx is None:
            dx = streams.new_zeros(streams[..., 0, :].shape)
        norm = None if ctx.norm is None else ctx.norm._replace(weight=weight, bias=bias)
        inputs = Connect(streams, earlier, output, table, norm, ctx.form)
        grad_inputs = ConnectGradInputs(inputs, new_streams, coefficients, products, dx, dnew_streams, dcoefficients)
        return (*[None] * 5, *ctx.backend.connect_backward(grad_inputs))


def sinkhorn(logits: Tensor, steps: int = 20, *, over_in: bool = False, eps: float = 0.0) -> Tensor:
    """Normalise the columns of exp(logits), then its rows, `steps` times.

    The first step works on logarithms, for logits of any size. After it every row and column has an entry of at least
    1/n^2, so the other steps work on scaling vectors, with the same result to rounding and in less time. The layout is
    (n, n, B), so that a step is a few long operations and no product of small matrices, which halves the time on a CPU.
    Backward goes through all steps.

    Args:
        logits: (..., n, n), columns last.
        steps: at least 1; each is one normalisation of the columns and one of the rows.
        over_in: rows first, then columns, so that columns sum to one and rows nearly. For A [in, out] the shares of the
            old streams in each new stream then sum to one exactly.
        eps: added to the first softmax and to every sum after it.

    Returns:
        (..., n, n) in the dtype of `logits`: rows sum to one, columns nearly.

    Source: Sinkhorn and Knopp 1967, as Xie et al., arXiv 2512.24880, use it.

    >>> matrix = sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    >>> matrix.sum(0), matrix.sum(1)
    (tensor([1., 1.]), tensor([1., 1.]))
    """
    if over_in:
        return sinkhorn(logits.transpose(-1, -2), steps, eps=eps).transpose(-1, -2)
    if eps:
        matrix = logits.softmax(-2) + eps
        for axis in [-1, *[-2, -1] * (steps - 1)]:
            matrix = matrix / (matrix.sum(axis, keepdim=True) + eps)
        return matrix
    n = logits.shape[-1]
    apart = logits.reshape(-1, n, n).permute(1, 2, 0).contiguous()
    apart = apart - apart.logsumexp(0, keepdim=True)
    matrix = (apart - apart.logsumexp(1, keepdim=True)).exp()
    if steps > 1:
        matrix = _balanced(matrix, steps - 1)[0] if plain.is_needed() else _Steps.apply(matrix, steps - 1)
    return matrix.permute(2, 0, 1).reshape(logits.shape)


def _balanced(matrix: Tensor, steps: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return diag(u) K diag(v) of matrices K (n, n, B), and u and v (n, B) of every step; see `_Steps`."""
    us, vs = [torch.ones_like(matrix[0])], []
    for _ in range(steps):
        vs.append((matrix * us[-1].unsqueeze(1)).sum(0).reciprocal())
        us.append((matrix * vs[-1]).sum(1).reciprocal())
    return matrix * us[-1].unsqueeze(1) * vs[-1], us, vs


class _Steps(torch.autograd.Function):
    """Computes diag(u) K diag(v) of matrices K (n, n, B) after `steps` times v = 1 / K^T u, u = 1 / K v, from u = 1."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, steps: int) -> Tensor:
        balanced, us, vs = _balanced(matrix, steps)
        ctx.save_for_backward(matrix, torch.stack(us), torch.stack(vs))
        return balanced

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plain.refuse_second_derivative()
        matrix, us, vs = ctx.saved_tensors  # (n, n, B), (steps + 1, n, B), (steps, n, B)
        steps, product = len(vs), grads[0] * matrix
        du, dv = (product * vs[-1]).sum(1), (product * us[-1].unsqueeze(1)).sum(0)
        squares_u, squares_v = us.square().neg(), vs.square().neg()  # d(1/x) = -1/x^2 dx
        of_rows, of_columns = [], []
        for step in reversed(range(steps)):
            of_rows.append(squares_u[step + 1] * du)
            back = (matrix * of_rows[-1].unsqueeze(1)).sum(0)
            of_columns.append(squares_v[step] * (back + dv if step == steps - 1 else back))
            du = (matrix * of_columns[-1]).sum(1)
        last = grads[0] * us[-1].unsqueeze(1) * vs[-1]
        return last + _outer(torch.stack(of_rows[::-1]), vs) + _outer(us[:-1], torch.stack(of_columns[::-1])), None


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the outer products of (steps, n, B), summed over steps: (n, n, B)."""
    return (rows.unsqueeze(2) * columns.unsqueeze(1)).sum(0)
