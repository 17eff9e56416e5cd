"""Products, sums and Sinkhorn's normalisation against their definitions."""

import pytest
import torch
from formula import on_logarithms

from attnres.residuals.arithmetic import sinkhorn


def drawn(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("shape", [(3, 3), (5, 4, 4), (2, 3, 2, 2), (4, 1, 1), (0, 3, 3)])
def test_it_and_its_gradient_are_those_of_steps_on_logarithms(shape, steps):
    logits, upstream = drawn(*shape).requires_grad_(), drawn(*shape).flip(0)
    actual, expected = sinkhorn(logits, steps), on_logarithms(logits, steps)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    (ours,), (theirs,) = (torch.autograd.grad((x * upstream).sum(), logits) for x in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_rows_sum_to_one_and_columns_after_enough_steps():
    matrix = sinkhorn(drawn(50, 4, 4))
    ones = torch.ones(50, 4, dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(-1), ones, rtol=1e-12, atol=0)
    torch.testing.assert_close(matrix.sum(-2), ones, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [1.0, 60.0, 1000.0])
def test_logits_of_any_size_give_in_fp32_what_they_give_in_fp64(scale):
    logits = drawn(200, 4, 4, scale=scale)
    torch.testing.assert_close(sinkhorn(logits.float()).double(), sinkhorn(logits.float().double()), rtol=0, atol=1e-4)
    torch.testing.assert_close(sinkhorn(logits), on_logarithms(logits, 20), rtol=0, atol=1e-9)
