"""Doubly stochastic matrices by Sinkhorn's normalisation, with a backward of its own."""

from typing import Any

import torch
from torch import Tensor

from attnres.ops import plain


def sinkhorn(logits: Tensor, steps: int = 20) -> Tensor:
    """Normalise the columns of exp(logits), then its rows, `steps` times.

    The first step is made on logarithms, for logits of any size; after it every row and column holds an entry of at
    least 1/n^2, and the other steps are made on vectors, with the same result to rounding: steps on matrices of
    logarithms take two to seven times as long, forward and backward together. Backward goes through all steps.

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
    logits = logits - logits.logsumexp(-2, keepdim=True)
    first = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    if steps == 1:
        return first
    matrix = first.reshape(-1, *first.shape[-2:])
    balanced = _balanced(matrix, steps - 1)[0] if plain.is_needed() else _Steps.apply(matrix, steps - 1)
    return balanced.view_as(first)


def _balanced(matrix: Tensor, steps: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return diag(u) K diag(v) of matrices K (B, n, n), and all u and v (B, n, 1) on the way; see `_Steps`."""
    transposed = matrix.transpose(1, 2)
    us, vs = [torch.ones_like(matrix[:, :, :1])], []
    for _ in range(steps):
        vs.append(torch.bmm(transposed, us[-1]).reciprocal())
        us.append(torch.bmm(matrix, vs[-1]).reciprocal())
    return matrix * us[-1] * vs[-1].transpose(1, 2), us, vs


class _Steps(torch.autograd.Function):
    """diag(u) K diag(v) of matrices K (B, n, n) after `steps` times v = 1 / K^T u, u = 1 / K v, from u = 1."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, steps: int) -> Tensor:
        balanced, us, vs = _balanced(matrix, steps)
        ctx.save_for_backward(matrix, torch.cat(us, -1), torch.cat(vs, -1))
        return balanced

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        plain.refuse_second_derivative()
        matrix, us, vs = ctx.saved_tensors  # (B, n, n), (B, n, steps + 1), (B, n, steps)
        transposed, steps = matrix.transpose(1, 2), vs.shape[-1]
        last_u, last_v = us[..., -1:], vs[..., -1:]
        product = grads[0] * matrix
        du, dv = torch.bmm(product, last_v), torch.bmm(product.transpose(1, 2), last_u)
        squares_u, squares_v = us.square().neg(), vs.square().neg()  # d(1/x) = -1/x^2 dx
        of_rows, of_columns = [], []
        for step in reversed(range(steps)):
            of_rows.append(squares_u[..., step + 1 : step + 2] * du)
            back = torch.bmm(transposed, of_rows[-1])
            of_columns.append(squares_v[..., step : step + 1] * (back + dv if step == steps - 1 else back))
            du = torch.bmm(matrix, of_columns[-1])
        rows, columns = torch.cat(of_rows[::-1], -1), torch.cat(of_columns[::-1], -1)
        grad = grads[0] * last_u * last_v.transpose(1, 2)
        grad = grad + torch.bmm(rows, vs.transpose(1, 2)) + torch.bmm(us[..., :-1], columns.transpose(1, 2))
        return grad, None
