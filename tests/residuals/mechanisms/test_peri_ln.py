"""Peri-LN against its formula: norms on both sides of a sublayer."""

import pytest
import torch
from formula import SHAPES, check_formula
from torch.nn import functional as F

from attnres import make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_normed_before_they_are_added(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            output = network.f(index, network.norm(index, x))
            x = x + F.rms_norm(output, (network.width,), parameters["gain"][index], 1e-5)
        return network.norm(network.sublayers, x)

    check_formula("peri_ln", formula, shape, eps=1e-5)


def test_gains_start_at_one():
    assert torch.equal(make_residual("peri_ln", 6, 8).gain, torch.ones(6, 8))
