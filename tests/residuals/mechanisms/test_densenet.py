"""DenseNet's concatenation (arXiv 1608.06993) with a projection for each read."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_a_read_projects_all_outputs_concatenated(shape):
    def formula(network, p):
        outputs, used = [network.embedding], 0
        for index in range(network.sublayers + 1):
            h = torch.cat(outputs, -1)
            if index:
                matrix = p["projection"][used : used + index + 1].reshape(-1, network.width)
                used += index + 1
                h = h @ matrix
            if index == network.sublayers:
                assert used == len(p["projection"])
                return network.norm(index, h)
            outputs.append(network.f(index, network.norm(index, h)))

    check_formula("densenet", formula, shape)


def test_every_matrix_starts_as_the_identity():
    residual = make_residual("densenet", 4, 8)
    assert torch.equal(residual.projection, torch.eye(8).expand(14, 8, 8))
