"""xHC as a sparse mHC: token by token against its formula, and mHC as its limit."""

import pytest
import torch
from formula import SHAPES, Network, check_formula, on_logarithms

from attnres import UserError, make_residual


def formula(active, fixed):
    """One token at a time, with lists: what is active is chosen by sorting."""

    def token(network, p, at):
        def unit(v):
            return v / (v.pow(2).mean() + 1e-6).sqrt()

        count = p["static_read"].shape[1]
        rows = [network.embedding[at]] * count
        for index in range(network.sublayers):
            flat = torch.cat(rows)
            chosen, gate = list(range(fixed)), torch.ones(fixed, dtype=flat.dtype)
            if fixed < active:
                centred = flat - flat.mean()
                scores = torch.sigmoid(centred / (centred.pow(2).mean() + 1e-6).sqrt() @ p["router"][index])
                ranked = sorted(range(fixed, count), key=lambda stream: -scores[stream].item())
                routed = sorted(ranked[: active - fixed])
                chosen, gate = chosen + routed, torch.cat([gate, scores[routed]])
            a_read, a_write, a_carry = p["scale"][index]
            read = torch.sigmoid(p["static_read"][index] + a_read * (unit(flat) @ p["read_weight"][index]))
            h = sum(share * row for share, row in zip(read, rows, strict=True))
            some = torch.stack([rows[stream] for stream in chosen])
            dynamic = unit(some.flatten()) @ p["active_weight"][index]
            write = 2 * torch.sigmoid(p["static_write"][index] + a_write * dynamic[:active])
            logits = p["static_carry"][index] + a_carry * dynamic[active:].view(active, active)
            carry = on_logarithms(logits.T).T  # the columns last
            carry = carry / carry.sum(1, keepdim=True).clamp(min=1.0)
            f = network.f(index, network.norm(index, h))
            new = carry @ some + (gate * write)[:, None] * f
            rows = list(rows)
            for stream, row in zip(chosen, new, strict=True):
                rows[stream] = row
        return network.norm(network.sublayers, sum(rows))

    def compute(network, p):
        shape = network.embedding.shape[:-1]
        tokens = [token(network, p, tuple(at)) for at in torch.ones(shape).nonzero().tolist()]
        return torch.stack(tokens).view(network.embedding.shape)

    return compute


@pytest.mark.parametrize(
    ("shape", "streams", "active", "fixed"),
    [(SHAPES[0], 6, 3, 1), (SHAPES[1], 5, 2, 0), (SHAPES[2], 16, 4, 2), (SHAPES[2], 3, 3, 3), (SHAPES[2], 4, 1, 1)],
)
def test_all_streams_are_read_and_some_are_written(shape, streams, active, fixed):
    settings = {"num_streams": streams, "active": active, "fixed": fixed}
    check_formula("xhc", formula(active, fixed), shape, **settings)


def test_with_every_stream_fixed_it_is_mhc():
    network, ours = Network(*SHAPES[1]), make_residual("xhc", 7, 12, num_streams=3, active=3, fixed=3).double()
    mhc = make_residual("mhc", 7, 12, num_streams=3).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        mhc.static_carry.zero_()  # where 20 steps of Sinkhorn's have converged no row is above one
        for parameter in mhc.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
        read, write, carry = (mhc.gain.unsqueeze(-1) * mhc.weight).split(mhc.sizes, -1)
        turned = carry.unflatten(-1, (3, 3)).mT.flatten(-2)  # H' = A^T H there, A H here
        ours.static_read.copy_(mhc.static_read)
        ours.static_write.copy_(mhc.static_write)
        ours.static_carry.copy_(mhc.static_carry.view(7, 3, 3).mT)
        ours.read_weight.copy_(read)
        ours.active_weight.copy_(torch.cat([write, turned], -1))
        ours.scale.copy_(mhc.scale)
    torch.testing.assert_close(network.run(ours), network.run(mhc), rtol=1e-9, atol=1e-9)


def test_a_write_leaves_the_other_streams_to_the_bit_and_streams_part():
    network, residual = Network(*SHAPES[0]), make_residual("xhc", 8, 16).double()
    state = residual.start(network.embedding)
    for index in range(8):
        before = state.written
        places, _ = residual.route(before, index)
        x, state = residual.read(state, index, lambda h: network.norm(index, h))  # noqa: B023
        state = residual.write(state, index, network.f(index, x))
        same = (state.written == before).all(-1)
        assert same.sum(-1).eq(12).all() and not same.gather(-1, places).any()
    assert state.written.std(-2).max() > 0.1
    assert residual.router.shape == (8, 256, 16) and residual.active_weight.shape == (8, 64, 20)


def test_the_paper_counts_the_same_parameters():
    """(4 N^2 + 2 k^3 + 2 k^2) d a layer of two sublayers without convolutions, whose outputs would be K_r = 4: 1256 d
    with them (k^2 (1 + 4) and 24 taps)."""
    residual = make_residual("xhc", 2, 32)
    matrices = [p for p in residual.parameters() if p.dim() == 3 and p is not residual.static_carry]
    n, k = 16, 4
    assert sum(p.numel() for p in matrices) == (4 * n**2 + 2 * k**3 + 2 * k**2) * 32
    assert 4 * n**2 + 2 * k**3 + k**2 + 4 * k**2 + 4 + 8 + 12 == 1256


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"active": 17}, "active 17, num_streams 16"),
        ({"active": 2, "fixed": 3}, "fixed is 3, active 2"),
        ({"fixed": -1}, "fixed is -1"),
        ({"active": 0}, "active is 0"),
    ],
)
def test_impossible_settings(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_residual("xhc", 4, 8, **settings)
