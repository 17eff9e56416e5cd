"""The verbs that count: equal to the functional form, and every misuse told."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnres
from attnres import DepthReads, Norm, UserError

WIDTH, SUBLAYERS = 16, 6
NORMS = {
    "RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "RMSNorm without eps": lambda: nn.RMSNorm(WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "another module": lambda: nn.Linear(WIDTH, WIDTH),
    "none": lambda: None,
}


class Loop(nn.Module):
    """Linear sublayers, connected by depth reads."""

    def __init__(self, residual, norm="RMSNorm", **settings):
        super().__init__()
        torch.manual_seed(0)
        self.sublayers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(SUBLAYERS))
        norms = [NORMS[norm]() for _ in range(SUBLAYERS + 1)]
        self.norms = nn.ModuleList(norms) if norms[0] is not None else norms
        self.depth = DepthReads(SUBLAYERS, WIDTH, residual, **settings)
        with torch.no_grad():
            for parameter in (*self.norms.parameters(),) if norms[0] is not None else ():
                parameter.add_(0.3 * torch.randn(parameter.shape))
            for parameter in self.depth.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
        self.double()

    def forward(self, embedding, recompute=False):
        x = self.depth.start(embedding)
        for layer in range(SUBLAYERS // 2):
            call = self.layer if not recompute else lambda *args: checkpoint(self.layer, *args, use_reentrant=False)
            x = call(x, 2 * layer)
        return x.finish(self.norms[-1])

    def layer(self, x, place):
        x = x + self.sublayers[place](x.read(self.norms[place]))
        return self.sublayers[place + 1](x.read(self.norms[place + 1])) + x

    def functional(self, embedding):
        residual = self.depth.residual
        norms = [norm or (lambda h: h) for norm in self.norms]
        state = residual.start(embedding)
        for place, sublayer in enumerate(self.sublayers):
            x, state = residual.read(state, place, norms[place])
            state = residual.write(state, place, sublayer(x))
        return residual.finish(state, norms[-1])


def results(model, compute):
    """Return the output and every gradient of a pass."""
    embedding = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    embedding.requires_grad_()
    output = compute(embedding)
    inputs = [embedding, *model.parameters()]
    return [output, *torch.autograd.grad(output.square().sum(), inputs, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", ["block", "full", "mhc", "standard"])
def test_they_compute_what_the_functional_form_computes(residual, norm):
    model = Loop(residual, norm)
    torch.testing.assert_close(results(model, model), results(model, model.functional), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [None, "standard"])
def test_the_standard_residual_is_the_sum_to_the_bit_and_ignores_settings_of_block(name):
    model = Loop(name, num_blocks=3, read_scale="sum")

    def plain(x):
        for sublayer, norm in zip(model.sublayers, model.norms, strict=False):
            x = x + sublayer(norm(x))
        return model.norms[-1](x)

    for ours, theirs in zip(results(model, model), results(model, plain), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(UserError, match="num_blockz"):
        DepthReads(4, WIDTH, name, num_blockz=3)


def test_layers_are_checkpointed():
    model = Loop("block", num_blocks=3)
    expected = results(model, model)
    for ours, theirs in zip(results(model, lambda x: model(x, recompute=True)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.long
def test_the_loop_compiles_as_one_graph():
    model = Loop("block", num_blocks=3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(model, compiled), results(model, model), rtol=1e-10, atol=1e-10)


def test_misuse_is_told():
    depth, norm, x0 = DepthReads(2, WIDTH), Norm(), torch.ones(3, WIDTH)
    x = depth.start(x0)
    with pytest.raises(UserError, match="sublayer 0 writes and has not read"):
        x + x0
    x.read(norm)
    with pytest.raises(UserError, match="sublayer 0 reads twice"):
        x.read(norm)
    x = x.write(x0)
    assert x.index == 1 and x.shape == x0.shape
    with pytest.raises(UserError, match="1 of 2 sublayers"):
        x.finish(norm)
    x.read(norm)
    with pytest.raises(UserError, match="1 of 2 sublayers"):  # its output is lost
        x.finish(norm)
    x = x + x0
    with pytest.raises(UserError, match="all 2 sublayers"):
        x.read(norm)
    assert x.finish(norm).shape == x0.shape
    with pytest.raises(UserError, match="value_residual is 'layer'"):
        DepthReads(2, WIDTH, value_residual="layer")


def first_pass(size, residual="full", eps=1e-5, start=DepthReads, **settings):
    """Run a pass from embeddings of a size, and sublayers that put out nothing."""
    model = start(SUBLAYERS, WIDTH, residual, **settings) if start is DepthReads else start(residual, **settings)
    x = model.start(torch.full((2, WIDTH), size))
    for _ in range(SUBLAYERS):
        x.read(Norm(eps=eps))
        x = x + torch.full((2, WIDTH), size)
    return x.finish(nn.RMSNorm(WIDTH, eps=eps))


def test_a_mean_that_is_another_model_at_the_start_is_told_once():
    with pytest.warns(UserWarning, match=r"read_scale='sum'"):
        mean = first_pass(0.002)
    total = first_pass(0.002, read_scale="sum")
    assert mean.mean() < 0.9 * total.mean()
    model = DepthReads(SUBLAYERS, WIDTH, "full", read_scale="mean")  # chosen
    assert not model.residual.scale_is_default


@pytest.mark.parametrize("size, residual", [(1.0, "full"), (0.002, "standard"), (0.002, "boundary"), (0.0, "block")])
def test_a_start_that_is_the_standard_residuals_is_not(size, residual):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first_pass(size, residual)


def test_it_is_a_public_name():
    assert attnres.DepthReads is DepthReads
