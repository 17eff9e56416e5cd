"""Deep Delta Learning against its formula: a rank-one change of the stream along each output."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import make_residual

EPS = 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_the_part_along_an_output_is_replaced(shape):
    def formula(network, parameters):
        p, x = parameters, network.embedding
        identity = torch.eye(network.width, dtype=torch.float64)
        for index in range(network.sublayers):
            context = network.norm(index, x)
            output = network.f(index, context)
            k = (output / torch.sqrt(output.square().sum(-1, keepdim=True) + EPS**2)).unsqueeze(-1)
            beta = 2 * torch.sigmoid(context @ p["step_weight"][index] + p["step_bias"][index])[..., None, None]
            value = 4 * torch.sigmoid(x @ p["value_weight"][index] + p["value_bias"][index])[..., None, None]
            x = ((identity - beta * k @ k.mT) @ x.unsqueeze(-1) + beta * k * value).squeeze(-1)
        return network.norm(network.sublayers, x)

    check_formula("ddl", formula, shape, eps=EPS)


def test_it_starts_by_replacing_that_part_by_two():
    residual = make_residual("ddl", 2, 8)
    x, f = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    _, state = residual.read(x, 0, lambda h: h)
    assert torch.equal(state.step, torch.ones(5, 1))
    k = f / f.norm(dim=-1, keepdim=True)
    torch.testing.assert_close((residual.write(state, 0, f) * k).sum(-1), torch.full((5,), 2.0))
