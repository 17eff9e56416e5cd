"""Arithmetic that several mechanisms share, among it Sinkhorn's normalisation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnres.ops import plain


def normed_product(vectors: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return N(vectors) W for an RMSNorm N without gain, and keep no normed copy of the vectors.

    Args:
        vectors: (..., k). weight: (k, m), in the vectors' dtype as the result (..., m) is.
    """
    squares = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square()
    return (vectors @ weight) * (squares / vectors.shape[-1] + eps).rsqrt()


def weighted_sum(values: Sequence[Tensor], weights: Sequence[Tensor] | Tensor) -> Tensor:
    """Return sum_j weights[j] values[j] for n >= 1 values (..., d), and weights of shapes that fit them."""
    total = values[0] * weights[0]
    for j in range(1, len(values)):
        total = torch.addcmul(total, values[j], weights[j])
    return total


def sinkhorn(logits: Tensor, steps: int = 20) -> Tensor:
    """Normalise the columns of exp(logits), then its rows, `steps` times.

    The first step is made on logarithms, for logits of any size; after it every row and column holds an entry of at
    least 1/n^2, and the other steps are made on vectors, with the same result to rounding and in less time than on
    matrices of logarithms. An entry of all matrices lies together, (n, n, B), so that a step is a few long operations
    and no product of small matrices: half of the time on a CPU. Backward goes through all steps.

    Args:
        logits: (..., n, n), columns last.
        steps: at least 1; each is one normalisation of the columns and one of the rows.

    Returns:
        (..., n, n) in the dtype of `logits`: rows sum to one, columns nearly.

    Source: Sinkhorn and Knopp 1967, as Xie et al., arXiv 2512.24880, use it.

    >>> matrix = sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    >>> matrix.sum(0), matrix.sum(1)
    (tensor([1., 1.]), tensor([1., 1.]))
    """
    n = logits.shape[-1]
    apart = logits.reshape(-1, n, n).permute(1, 2, 0).contiguous()
    apart = apart - apart.logsumexp(0, keepdim=True)
    matrix = (apart - apart.logsumexp(1, keepdim=True)).exp()
    if steps > 1:
        matrix = _balanced(matrix, steps - 1)[0] if plain.is_needed() else _Steps.apply(matrix, steps - 1)
    return matrix.permute(2, 0, 1).reshape(logits.shape)


def _balanced(matrix: Tensor, steps: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return diag(u) K diag(v) of matrices K (n, n, B), and all u and v (n, B) on the way; see `_Steps`."""
    us, vs = [torch.ones_like(matrix[0])], []
    for _ in range(steps):
        vs.append((matrix * us[-1].unsqueeze(1)).sum(0).reciprocal())
        us.append((matrix * vs[-1]).sum(1).reciprocal())
    return matrix * us[-1].unsqueeze(1) * vs[-1], us, vs


class _Steps(torch.autograd.Function):
    """diag(u) K diag(v) of matrices K (n, n, B) after `steps` times v = 1 / K^T u, u = 1 / K v, from u = 1."""

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
    """Sum over steps the outer products of (steps, n, B): (n, n, B)."""
    return (rows.unsqueeze(2) * columns.unsqueeze(1)).sum(0)


class Precise(nn.Module):
    """A module whose parameters stay in fp32 where a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Precise":
        """Move or cast as asked, but keep parameters in fp32 where 16 bits are asked for (`.to(torch.bfloat16)`,
        Lightning's bf16-true): steps of a small rate would round to nothing there."""

        def precise(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            narrows = tensor.is_floating_point() and new.element_size() < 4 <= tensor.element_size()
            return tensor.to(new.device) if narrows else new

        return super()._apply(precise, recurse)
