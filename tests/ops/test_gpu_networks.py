"""Whole networks of depth reads on the Triton kernels: what plain torch makes of them, forward and backward."""

import pytest
import torch

pytest.importorskip("triton")

from attnres import Norm, depth_read, make_residual
from attnres.ops import dispatch, eager
from attnres.ops.gpu import kernels as gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on(monkeypatch):
    """Choose a backend by module."""

    def choose(module):
        monkeypatch.setattr(dispatch, "_choose", lambda *a: (module.__name__, module, "in the test", False))

    return choose


def gradients(name, settings, recompute):
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    residual = make_residual(name, 6, 32, **settings).to(DEVICE)
    residual.recompute_reads = recompute
    with torch.no_grad():
        residual.query.copy_(draw(7, 32))
    embedding, weights = draw(2, 3, 32).requires_grad_(), [draw(32, 32).requires_grad_() for _ in range(6)]
    norm = draw(32).requires_grad_()
    state = residual.start(embedding)
    for i, weight in enumerate(weights):
        x, state = residual.read(state, i, Norm(norm))
        state = residual.write(state, i, torch.tanh(x @ weight / 6))
    out = residual.finish(state, Norm(norm))
    leaves = [embedding, norm, *weights, residual.query, residual.gain]
    return [out, *torch.autograd.grad(out.pow(3).sum(), leaves)]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("name", "settings"), [("block", {"block_size": 3}), ("block", {"block_size": 1}), ("full", {"group": 2})]
)
def test_a_network_is_that_of_plain_torch(on, name, settings, recompute):
    on(gpu)
    ours = gradients(name, settings, recompute)
    on(eager)
    for a, b in zip(ours, gradients(name, settings, recompute), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("n", [2, 9, 33])
def test_a_single_read_is_that_of_plain_torch(on, n):
    sources = [torch.randn(5, 24, device=DEVICE, requires_grad=True) for _ in range(n)]
    query, gain = torch.randn(24, device=DEVICE, requires_grad=True), torch.rand(24, device=DEVICE, requires_grad=True)

    def made(module):
        on(module)
        h, weights = depth_read(sources, query, gain, return_weights=True)
        return [h, weights, *torch.autograd.grad(h.pow(2).sum(), [*sources, query, gain])]

    for a, b in zip(made(gpu), made(eager), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
