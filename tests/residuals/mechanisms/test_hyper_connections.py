"""Hyper-Connections against the formula of arXiv 2409.19606."""

import pytest
import torch
from formula import SHAPES, check_formula
from torch.nn import functional as F

from attnres import make_residual


def formula(count, dynamic):
    def compute(network, p):
        streams = network.embedding.unsqueeze(-2).repeat_interleave(count, -2)
        for index in range(network.sublayers):
            alpha, beta = p["static_alpha"][index], p["static_beta"][index]
            if dynamic:
                keys = F.rms_norm(streams, (network.width,), p["gain"][index], 1e-6)
                alpha = alpha + p["alpha_scale"][index] * torch.tanh(keys @ p["alpha_weight"][index])
                beta = beta + p["beta_scale"][index] * torch.tanh(keys @ p["beta_weight"][index]).squeeze(-1)
            out = network.f(index, network.norm(index, (alpha[..., :1] * streams).sum(-2)))
            carry = alpha[..., 1:].expand(*streams.shape[:-1], count)
            streams = torch.einsum("...nm,...nd->...md", carry, streams) + beta.unsqueeze(-1) * out.unsqueeze(-2)
        return network.norm(network.sublayers, streams.sum(-2))

    return compute


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_mixed_read_and_written_as_published(shape, dynamic):
    check_formula("hyper_connections", formula(3, dynamic), shape, num_streams=3, dynamic=dynamic)


def test_start_values_are_the_published_ones():
    residual = make_residual("hyper_connections", 5, 8, num_streams=2)
    for index in range(5):
        first = [[1.0], [0.0]] if index % 2 == 0 else [[0.0], [1.0]]
        assert torch.equal(residual.static_alpha[index], torch.cat([torch.tensor(first), torch.eye(2)], -1))
    assert (residual.static_beta == 1).all() and (residual.gain == 1).all()
    assert not residual.alpha_weight.any() and not residual.beta_weight.any()
    assert (residual.alpha_scale == 0.01).all() and (residual.beta_scale == 0.01).all()
