"""A network cut anywhere, its state taken apart and put together again, is the network that was not cut."""

import pytest
import torch

from attnres.residuals import RESIDUALS, make_residual, settings_of

WIDTH = 8


def variants():
    for name in sorted(RESIDUALS):
        yield name, {}
        if "block_size" in settings_of(name):
            yield name, {"block_size": 2}
    yield "full", {"group": 3}
    yield "block", {"block_size": 4, "gate": "scalar", "null_source": True}
    yield "cumulative", {"block_size": 4, "alpha": "learnable"}
    yield "hyper_connections", {"num_streams": 2, "dynamic": False}


def normed(h):
    return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("sublayers", [1, 2, 5, 8])
@pytest.mark.parametrize(("name", "settings"), list(variants()))
def test_cut_anywhere_the_result_and_all_gradients_are_the_same(name, settings, sublayers):
    if settings.get("block_size", 1) > sublayers:
        pytest.skip("the blocks are longer than the network")
    draw = torch.Generator().manual_seed(0)
    residual = make_residual(name, sublayers, WIDTH, **settings).double()
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=draw))
    embedding = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=draw, requires_grad=True)
    matrices = torch.randn(sublayers, WIDTH, WIDTH, dtype=torch.float64, generator=draw)
    leaves = [embedding, *residual.parameters()]

    def run(cut=None):
        state = residual.start(embedding)
        for index in range(sublayers + 1):
            if index == cut:
                tensors, slots = residual.pack(state, index), residual.slots(index)
                assert [tuple(tensor.shape) for tensor in tensors] == [(2, 3, *slot.axes, WIDTH) for slot in slots]
                assert len({slot.name for slot in slots}) == len(slots)
                state = residual.unpack(tensors, index)
            if index < sublayers:
                x, state = residual.read(state, index, normed)
                state = residual.write(state, index, torch.tanh(x @ matrices[index]))
        out = residual.finish(state, normed)
        return out, torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True, materialize_grads=True)

    expected, grads = run()
    for cut in range(sublayers + 1):
        out, again = run(cut)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(again, grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", sorted(RESIDUALS))
def test_kept_slots_are_the_same_tensor_at_every_later_cut(name):
    residual, width = make_residual(name, 8, WIDTH), WIDTH
    draw = torch.Generator().manual_seed(1)
    state, held = residual.start(torch.randn(3, width, generator=draw)), {}
    for index in range(9):
        for slot, tensor in zip(residual.slots(index), residual.pack(state, index), strict=True):
            if slot.kept:
                assert torch.equal(held.setdefault(slot.name, tensor), tensor), (index, slot)
        if index < 8:
            _, state = residual.read(state, index, normed)
            state = residual.write(state, index, torch.randn(3, width, generator=draw))
