"""Frac-Connections against Hyper-Connections' formula on slices of the stream (arXiv 2503.14125)."""

import pytest
import torch
from formula import SHAPES, Network, check_formula
from torch.nn import functional as F

from attnres import UserError, make_residual
from attnres.residuals.check.subject import stir


def formula(count, dynamic):
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
    check_formula("frac_connections", formula(2, dynamic), shape, num_slices=2, dynamic=dynamic)


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
