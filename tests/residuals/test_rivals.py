"""DeepNorm against its published formula."""

import pytest
import torch
from torch.nn import functional as F

from attnres import Norm, make_residual

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


def test_deepnorm_norms_the_scaled_stream_after_each_sublayer(network):
    embedding, f, gains = network
    layers = SUBLAYERS // 2
    x = normed(embedding, gains[0])
    for index in range(SUBLAYERS):
        x = normed((2 * layers) ** 0.25 * x + f(index, x), gains[index + 1])
    residual = make_residual("deepnorm", SUBLAYERS, WIDTH)
    torch.testing.assert_close(run(residual, network), x)
    assert residual.branch_scale() == pytest.approx((8 * layers) ** -0.25)
