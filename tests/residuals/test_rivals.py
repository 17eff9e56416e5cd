"""Standard, its control, and the rivals that stretch the interface, each against its published formula."""

import pytest
import torch
from torch.nn import functional as F

from attnres import RESIDUALS, Norm, make_residual

WIDTH, SUBLAYERS = 16, 8


@pytest.fixture
def network():
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64) / 4 for _ in range(SUBLAYERS)]
    gains = [torch.rand(WIDTH, generator=g, dtype=torch.float64) + 0.5 for _ in range(SUBLAYERS + 1)]
    embedding = torch.randn(2, 3, WIDTH, generator=g, dtype=torch.float64)
    return embedding, lambda index, x: torch.tanh(x @ weights[index]), gains


def run(residual, network):
    embedding, sublayer, gains = network
    state = residual.start(embedding)
    for index in range(SUBLAYERS):
        x, state = residual.read(state, index, Norm(gains[index], eps=1e-9))
        state = residual.write(state, index, sublayer(index, x))
    return residual.finish(state, Norm(gains[-1], eps=1e-9))


def normed(h, gain):
    return F.rms_norm(h, (WIDTH,), gain, 1e-9)


def test_rescaled_is_standard_where_every_read_is_normed(network):
    torch.testing.assert_close(
        run(make_residual("rescaled", SUBLAYERS, WIDTH), network),
        run(make_residual("standard", SUBLAYERS, WIDTH), network),
        rtol=1e-6,
        atol=1e-6,
    )


def test_deepnorm_norms_the_scaled_stream_after_each_sublayer(network):
    embedding, f, gains = network
    layers = SUBLAYERS // 2
    x = normed(embedding, gains[0])
    for index in range(SUBLAYERS):
        x = normed((2 * layers) ** 0.25 * x + f(index, x), gains[index + 1])
    residual = make_residual("deepnorm", SUBLAYERS, WIDTH)
    torch.testing.assert_close(run(residual, network), x)
    assert residual.branch_scale() == pytest.approx((8 * layers) ** -0.25)


def test_denseformer_sums_layer_outputs_with_its_matrix(network):
    embedding, f, gains = network
    residual = make_residual("denseformer", SUBLAYERS, WIDTH).double()
    torch.testing.assert_close(
        run(residual, network), run(make_residual("standard", SUBLAYERS, WIDTH), network), rtol=0, atol=0
    )
    with torch.no_grad():
        residual.mix.copy_(torch.randn(SUBLAYERS // 2, SUBLAYERS // 2 + 1, dtype=torch.float64))
    past, y = [embedding], embedding
    for layer in range(SUBLAYERS // 2):
        for index in (2 * layer, 2 * layer + 1):
            y = y + f(index, normed(y, gains[index]))
        past.append(y)
        y = sum(residual.mix[layer, j] * past[j] for j in range(layer + 2))
    torch.testing.assert_close(run(residual, network), normed(y, gains[-1]))


@pytest.mark.parametrize("dynamic", [True, False])
def test_hyper_connections_mix_streams(network, dynamic):
    embedding, f, gains = network
    n = 3
    residual = make_residual("hyper_connections", SUBLAYERS, WIDTH, num_streams=n, dynamic=dynamic).double()
    # At the start every stream is the standard residual stream, up to the sum at the end.
    torch.testing.assert_close(
        run(residual, network), run(make_residual("standard", SUBLAYERS, WIDTH), network), rtol=1e-6, atol=1e-6
    )
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
    streams = embedding.unsqueeze(-2).repeat(1, 1, n, 1)
    for index in range(SUBLAYERS):
        alpha, beta = residual.static_alpha[index], residual.static_beta[index]
        if dynamic:
            keys = F.rms_norm(streams, (WIDTH,), residual.gain[index], 1e-6)
            alpha = alpha + residual.alpha_scale[index] * torch.tanh(keys @ residual.alpha_weight[index])
            beta = beta + residual.beta_scale[index] * torch.tanh(keys @ residual.beta_weight[index]).squeeze(-1)
        out = f(index, normed((alpha[..., 0:1] * streams).sum(-2), gains[index]))
        mixed = torch.einsum("...nm,...nd->...md", alpha[..., 1:].expand(*streams.shape[:-1], n), streams)
        streams = mixed + beta.unsqueeze(-1) * out.unsqueeze(-2)
    torch.testing.assert_close(run(residual, network), normed(streams.sum(-2), gains[-1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(RESIDUALS))
def test_a_state_is_never_changed_in_place(network, name):
    embedding, f, gains = network
    residual = make_residual(name, SUBLAYERS, WIDTH).double()
    state = residual.start(embedding)
    for index in range(3):
        x, state = residual.read(state, index, Norm(gains[index]))
        state = residual.write(state, index, f(index, x))
    leaves = torch.utils._pytree.tree_leaves(state)
    before = [leaf.clone() for leaf in leaves]
    x, after = residual.read(state, 3, Norm(gains[3]))
    residual.write(after, 3, f(3, x))
    assert all(torch.equal(a, b) for a, b in zip(leaves, before))
