"""Hyper-Connections and Frac-Connections against the formulas of arXiv 2409.19606 and 2503.14125."""

import pytest
import torch
from formula import SHAPES, Network, check_formula
from torch.nn import functional as F

from attnres import UserError, make_residual
from attnres.residuals.check.subject import stir


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


def slices_formula(count, dynamic):
    def compute(network, p):
        slices = list(network.embedding.chunk(count, -1))
        for index in range(network.sublayers):
            alpha, beta = [], []
            for i, piece in enumerate(slices):  # row i: what slice i gives to reads (n) and to new slices (n)
                row, share = p["static_alpha"][index, i], p["static_beta"][index, i]
                if dynamic:
                    key = F.rms_norm(piece, piece.shape[-1:], p["gain"][index], 1e-6)
                    row = row + p["alpha_scale"][index] * torch.tanh(key @ p["alpha_weight"][index])
                    share = share + p["beta_scale"][index] * torch.tanh(key @ p["beta_weight"][index])
                alpha.append(row)
                beta.append(share)

            def mix(column, alpha=alpha, slices=slices):
                return sum(alpha[i][..., column, None] * slices[i] for i in range(count))

            h = torch.cat([mix(j) for j in range(count)], -1)
            out = network.f(index, network.norm(index, h)).chunk(count, -1)
            slices = [mix(count + j) + beta[j] * out[j] for j in range(count)]
        return network.norm(network.sublayers, torch.cat(slices, -1))

    return compute


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_are_connected_as_streams_are(shape, dynamic):
    check_formula("frac_connections", slices_formula(2, dynamic), shape, num_slices=2, dynamic=dynamic)


def test_one_slice_is_hyper_connections_with_one_stream():
    network, results = Network(*SHAPES[0]), []
    for name, settings in (("frac_connections", {"num_slices": 1}), ("hyper_connections", {"num_streams": 1})):
        residual = make_residual(name, network.sublayers, network.width, **settings).double()
        stir(residual)
        results.append(network.run(residual))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_slices_that_do_not_divide_the_width():
    with pytest.raises(UserError, match="num_slices is 3: expected a number that divides the width 16"):
        make_residual("frac_connections", 4, 16, num_slices=3)
