"""MRLA-light against the formula of arXiv 2302.03985 on one token's channels."""

import math

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


def along_channels(x, kernel):
    """A convolution as networks have it, written out: y_c = sum_k kernel_k x_{c + k - K // 2}, zeros outside."""
    reach = len(kernel) // 2
    padded = torch.nn.functional.pad(x, (reach, reach))
    return sum(kernel[k] * padded[..., k : k + x.shape[-1]] for k in range(len(kernel)))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_layer_is_gated_by_its_own_query_and_key(shape):
    heads = shape[1] // 4

    def formula(network, p):
        def rms(x, gain):
            return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        x = before = network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x))
            if index % 2:
                layer = index // 2
                y = rms(x, p["gain"][layer, 0])
                query, key = (along_channels(y, kernel).chunk(heads, -1) for kernel in p["conv"][layer])
                u = p["value"][layer] * y
                value = (0.5 * u * (1 + torch.erf(u / math.sqrt(2)))).chunk(heads, -1)
                shares = [torch.sigmoid((q * k).sum(-1, keepdim=True) / 2) for q, k in zip(query, key, strict=True)]
                attended = torch.cat([share * v for share, v in zip(shares, value, strict=True)], -1)
                x = before = x + attended + p["decay"][layer] * rms(before, p["gain"][layer, 1])
        return network.norm(network.sublayers, x)

    check_formula("mrla_light", formula, shape, head_width=4)


def test_start_values_are_drawn_as_published():
    torch.manual_seed(0)
    residual = make_residual("mrla_light", 40, 1024)
    assert residual.conv.shape == (20, 2, 5) and (residual.gain == 1).all()
    assert residual.conv.abs().max().item() == pytest.approx(5**-0.5, rel=0.05)
    assert residual.value.abs().max().item() == pytest.approx(1.0, rel=0.01)
    assert residual.decay.std().item() == pytest.approx(1.0, rel=0.05)


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(UserError, match="head_width is 5: expected a number that divides the width 16"):
        make_residual("mrla_light", 4, 16, head_width=5)
