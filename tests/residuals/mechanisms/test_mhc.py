"""mHC, mHC-lite and identity-HC against the formulas of arXiv 2512.24880 and 2601.05732, with the start values of
github.com/FFTYYY/mhc-lite."""

import itertools
import math

import pytest
import torch
from formula import SHAPES, check_formula, on_logarithms
from torch.nn import functional as F

from attnres import UserError, make_residual
from attnres.ops.streams import coefficients, split


def of_permutations(logits):
    weights = logits.softmax(-1)
    matrix = torch.zeros(*logits.shape[:-1], 3, 3, dtype=logits.dtype)
    for k, order in enumerate(itertools.permutations(range(3))):
        permutation = torch.zeros(3, 3, dtype=logits.dtype)
        permutation[range(3), order] = 1.0
        matrix = matrix + weights[..., k, None, None] * permutation
    return matrix


def at_start(residual, streams, index):
    """p, b and A of sublayer `index` for these streams."""
    return split(coefficients(streams, residual.connection_tables()[index], residual.connection), streams.shape[-2])


def formula(count, carry):
    """The network with `carry`, which makes A (..., n, n) of its logits, or None where A = I."""

    def compute(network, p):
        streams = [network.embedding] * count
        for index in range(network.sublayers):
            normed = F.rms_norm(torch.cat(streams, -1), (count * network.width,), p["gain"][index], 1e-6)
            dynamic, scale = normed @ p["weight"][index], p["scale"][index]
            pre = torch.sigmoid(scale[0] * dynamic[..., :count] + p["static_read"][index])
            post = 2 * torch.sigmoid(scale[1] * dynamic[..., count : 2 * count] + p["static_write"][index])
            h = sum(pre[..., i, None] * streams[i] for i in range(count))
            out = network.f(index, network.norm(index, h))
            if carry is not None:
                matrix = carry(scale[2] * dynamic[..., 2 * count :] + p["static_carry"][index])
                streams = [sum(matrix[..., i, j, None] * streams[i] for i in range(count)) for j in range(count)]
            streams = [stream + post[..., j, None] * out for j, stream in enumerate(streams)]
        return network.norm(network.sublayers, sum(streams))

    return compute


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_mixed_by_what_sinkhorn_makes_of_their_logits(shape):
    check_formula("mhc", formula(3, lambda z: on_logarithms(z.unflatten(-1, (3, 3)))), shape, num_streams=3)


@pytest.mark.parametrize("name", ["mhc", "mhc_lite", "identity_hc"])
def test_start_values_are_the_published_ones(name):
    residual = make_residual(name, 6, 8, num_streams=4)
    for index in range(6):
        preferred = [1.0 if stream == index % 4 else -1.0 for stream in range(4)]
        assert residual.static_read[index].tolist() == residual.static_write[index].tolist() == preferred
    assert not residual.weight.any() and (residual.gain == 1).all() and (residual.scale == 0.01).all()
    p, b, _ = at_start(residual, torch.randn(2, 4, 8), 5)
    strong, weak = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    reads = torch.tensor([weak, strong, weak, weak])
    torch.testing.assert_close(p, reads.expand(2, 4))
    torch.testing.assert_close(b, 2 * reads.expand(2, 4))


def test_the_matrix_starts_nearly_as_the_identity():
    residual = make_residual("mhc", 2, 8)
    carry = at_start(residual, torch.randn(3, 4, 8), 0)[2]
    assert carry.diagonal(dim1=-2, dim2=-1).tolist() == [[pytest.approx(0.99899, abs=1e-5)] * 4] * 3
    torch.testing.assert_close(carry.sum(-1), torch.ones(3, 4))


def test_settings_that_are_impossible():
    with pytest.raises(UserError, match="num_streams is 0: expected a whole number, at least 1"):
        make_residual("mhc", 4, 8, num_streams=0)
    with pytest.raises(UserError, match="eps is 0: expected a positive number"):
        make_residual("mhc", 4, 8, eps=0)


# -- mHC-lite and identity-HC -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", SHAPES)
def test_streams_are_mixed_by_permutations_that_a_softmax_weighs(shape):
    check_formula("mhc_lite", formula(3, of_permutations), shape, num_streams=3)


def test_the_matrix_starts_nearly_as_the_identity_and_is_doubly_stochastic_wherever_it_is():
    residual = make_residual("mhc_lite", 2, 8)
    assert residual.static_carry[0].tolist() == [0.0] + [-8.0] * 23
    carry = at_start(residual, torch.randn(4, 8), 0)[2]
    torch.testing.assert_close(carry.diagonal(), torch.full((4,), 0.9923 + 0.0019), rtol=0, atol=2e-4)
    with torch.no_grad():
        residual.static_carry[0] += 10 * torch.randn(24)
        residual.weight[0, :, 8:] += 10 * torch.randn(32, 24)
    carry = at_start(residual, torch.randn(5, 4, 8), 0)[2]
    for axis in (-1, -2):
        torch.testing.assert_close(carry.sum(axis), torch.ones(5, 4))


def test_too_many_permutations_are_refused():
    assert make_residual("mhc_lite", 2, 8, num_streams=5).static_carry.shape == (2, 120)
    with pytest.raises(UserError, match=r"num_streams is 6: .* too many; expected at most 5, or choose mhc"):
        make_residual("mhc_lite", 2, 8, num_streams=6)
    with pytest.raises(UserError, match="num_streams is 0"):
        make_residual("mhc_lite", 2, 8, num_streams=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_stay_apart_but_for_reads(shape):
    check_formula("identity_hc", formula(3, None), shape, num_streams=3)


def test_it_has_no_parameter_of_a_matrix():
    residual = make_residual("identity_hc", 2, 8)
    assert sorted(name for name, _ in residual.named_parameters()) == [
        "gain",
        "scale",
        "static_read",
        "static_write",
        "weight",
    ]
    assert at_start(residual, torch.randn(4, 8), 0)[2] is None
