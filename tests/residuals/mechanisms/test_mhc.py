"""mHC, mHC-lite and identity-HC against the formulas of arXiv 2512.24880 and 2601.05732, with the start values of
github.com/FFTYYY/mhc-lite."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from formula import SHAPES, Network, check_formula, on_logarithms
from torch.nn import functional as F

from attnres import Norm, UserError, make_residual
from attnres.ops import cpu
from attnres.ops.streams import coefficients, split
from attnres.residuals.check.subject import stir
from attnres.residuals.mechanisms.mhc import STARTS


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


# -- starts and orders of public implementations ---------------------------------------------------------------------
# Liger, Megatron, TransformerEngine, hyper-connection-factory and lucidrains are not installed here: what they compute
# is written out from their code. DeepSeek-V4's own modules run.
def softmax_plus_eps(logits, order, eps, steps=20):
    matrix = logits.softmax(order[0]) + eps
    for axis in [order[1], *order * (steps - 1)]:
        matrix = matrix / (matrix.sum(axis, keepdim=True) + eps)
    return matrix


def exponentials(logits, order, steps=20):
    matrix = (logits - logits.amax(order[0], keepdim=True)).exp()
    for axis in order * steps:
        matrix = matrix / matrix.sum(axis, keepdim=True)
    return matrix


ORDERS = {
    "liger": (0.0, lambda z: softmax_plus_eps(z.mT, (-1, -2), 1e-6).mT),  # its h_res is [out, in]
    "megatron": (1e-6, lambda z: softmax_plus_eps(z, (-1, -2), 1e-6)),
    "hyper_connection_factory": (1e-6, lambda z: softmax_plus_eps(z, (-1, -2), 1e-6)),
    "deepseek_v4": (1e-6, lambda z: softmax_plus_eps(z, (-1, -2), 1e-6)),
    "transformer_engine": (0.0, lambda z: exponentials(z, (-1, -2))),
    "lucidrains": (0.0, lambda z: exponentials(z, (-2, -1))),
    "mhc_lite": (0.0, lambda z: exponentials(z, (-2, -1))),
}


@pytest.mark.parametrize("init", STARTS)
def test_coefficients_are_made_in_the_order_of_the_implementation(init):
    """On sharp logits, where twenty steps have not converged and order and eps decide."""
    residual = make_residual("mhc", 2, 8, num_streams=3, init=init).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
        residual.static_carry.mul_(6.0)
    streams, read_eps, carry = torch.randn(5, 3, 8, dtype=torch.float64), *ORDERS[init]
    vector = F.rms_norm(streams.flatten(-2), (24,), residual.gain[1], 1e-6) @ residual.weight[1]
    read, write, mix = (
        part * scale + static[1]
        for part, scale, static in zip(
            vector.split((3, 3, 9), -1),
            residual.scale[1],
            (residual.static_read, residual.static_write, residual.static_carry),
            strict=True,
        )
    )
    p, b, matrix = at_start(residual, streams, 1)
    torch.testing.assert_close(p, read.sigmoid() + read_eps)
    torch.testing.assert_close(b, 2 * write.sigmoid())
    torch.testing.assert_close(matrix, carry(mix.unflatten(-1, (3, 3))), rtol=1e-9, atol=1e-12)


def test_a_network_of_deepseeks_own_modules_is_ours():
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=8)
    network, residual = Network(4, 8, (2, 3)), make_residual("mhc", 4, 8, init="deepseek_v4")
    stir(residual)
    with torch.no_grad():  # without a gain; in fp32, as their modules compute
        residual.gain.fill_(1.0)
        residual.static_carry.mul_(6.0)
        streams = network.embedding.float().unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        for index in range(4):
            theirs = deepseek.DeepseekV4HyperConnection(config)
            theirs.fn.copy_(residual.weight[index].t())
            statics = residual.static_read, residual.static_write, residual.static_carry
            theirs.base.copy_(torch.cat([static[index] for static in statics]))
            theirs.scale.copy_(residual.scale[index])
            post, comb, h = theirs(streams)
            output = network.f(index, network.norm(index, h.double())).float()
            streams = post.unsqueeze(-1) * output.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
        head = deepseek.DeepseekV4HyperHead(config)
        head.hc_fn.copy_(residual.head_weight.t())
        head.hc_base.copy_(residual.head_static)
        head.hc_scale.copy_(residual.head_scale)
        expected = network.norm(4, head(streams).double())
        torch.testing.assert_close(network.run(residual.double()), expected, rtol=1e-4, atol=1e-4)


def test_starts_are_those_of_the_table():
    torch.manual_seed(0)
    for init, start in STARTS.items():
        residual = make_residual("mhc", 4, 64, init=init)
        assert (residual.scale == start.scale).all()
        assert (residual.head_weight is not None) == (init in ("deepseek_v4", "hyper_connection_factory"))
        spread = {"zero": 0.0, "normal": 0.02, "xavier": math.sqrt(2 / (256 + 24))}[start.weight]
        assert float(residual.weight.detach().std()) == pytest.approx(spread, rel=0.05)
        if start.statics == "zero":
            assert not any(s.any() for s in (residual.static_read, residual.static_write, residual.static_carry))
    residual = make_residual("mhc", 4, 8, init="lucidrains")
    assert residual.static_carry[1].view(4, 4).equal(torch.eye(4)) and residual.static_read.equal(torch.eye(4))
    assert (residual.static_write == 1).all()
    diagonal = at_start(residual, torch.randn(4, 8), 0)[2].diagonal()
    torch.testing.assert_close(diagonal, torch.full((4,), 0.475), rtol=0, atol=1e-3)


@pytest.mark.parametrize("single_pass", [False, True])
@pytest.mark.parametrize("init", STARTS)
def test_streams_do_not_stay_copies_of_one_another(init, single_pass):
    """With W = 0 and equal statics they would for good: all have the same gradient (arXiv 2606.03483)."""
    torch.manual_seed(0)
    network = Network(4, 8, (6,))
    residual = make_residual("mhc", 4, 8, init=init, single_pass=single_pass).double()
    optimizer = torch.optim.Adam(residual.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        network.run(residual).square().mul(network.probe).sum().backward()
        optimizer.step()
    with torch.no_grad():
        state = residual.start(network.embedding)
        for index in range(4):
            _, state = residual.read(state, index, Norm())
            state = residual.write(state, index, network.f(index, network.embedding))
        assert float(state.written.std(-2).mean()) > 1e-7, "of copies 0, or rounding in fp64"


def test_stream_scale_starts_copies_apart_and_of_one_without_spread_changes_nothing():
    torch.manual_seed(0)
    residual = make_residual("mhc", 4, 16, stream_scale=0.6).double()
    reach = math.sqrt(6 / 20)
    assert (residual.stream_scale - 0.6).abs().max() <= reach
    network, plain = Network(4, 16, (3,)), make_residual("mhc", 4, 16).double()
    state = residual.start(network.embedding)
    torch.testing.assert_close(state.streams, network.embedding.unsqueeze(-2) * residual.stream_scale)
    with torch.no_grad():
        residual.stream_scale.fill_(1.0)
    assert torch.equal(network.run(residual), network.run(plain))
    for init in ("deepseek_v4", "liger", "megatron"):
        with pytest.raises(UserError, match=rf"stream_scale is 0.6 and init is '{init}'"):
            make_residual("mhc", 4, 16, stream_scale=0.6, init=init)
    with pytest.raises(UserError, match="init"):
        make_residual("mhc", 4, 16, init="zeros")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_pass_reads_with_the_shares_of_the_sublayer_before(shape):
    """X' = B^T X + C f(A_before . X), of the first sublayer stream 0; the head reads with the last sublayer's."""

    def compute(network, p):
        streams = network.embedding.unsqueeze(-2).expand(*shape[2], 3, shape[1])
        shares = torch.eye(3, dtype=torch.float64)[0]
        for index in range(network.sublayers):
            normed = F.rms_norm(streams.flatten(-2), (3 * shape[1],), p["gain"][index], 1e-6)
            own, write, carry = (normed @ p["weight"][index]).split((3, 3, 9), -1)
            scale = p["scale"][index]
            out = network.f(index, network.norm(index, (shares.unsqueeze(-1) * streams).sum(-2)))
            shares = torch.sigmoid(scale[0] * own + p["static_read"][index])
            b = 2 * torch.sigmoid(scale[1] * write + p["static_write"][index])
            matrix = on_logarithms((scale[2] * carry + p["static_carry"][index]).unflatten(-1, (3, 3)))
            streams = matrix.mT @ streams + b.unsqueeze(-1) * out.unsqueeze(-2)
        return network.norm(network.sublayers, (shares.unsqueeze(-1) * streams).sum(-2))

    check_formula("mhc", compute, shape, num_streams=3, single_pass=True)


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


# -- recomputation ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "settings", "kernels"),
    [
        ("mhc", {}, "C"),
        ("mhc", {}, "none"),
        pytest.param("mhc", {}, "Triton", marks=pytest.mark.long),
        ("mhc", {"single_pass": True}, "C"),
        ("hyper_connections", {}, "C"),
        ("mhc_lite", {}, "none"),
    ],
)
def test_gradients_of_recomputed_streams_are_the_same_and_few_streams_are_stored(name, settings, kernels, monkeypatch):
    sublayers, width = 9, 32
    if kernels == "Triton":
        triton = pytest.importorskip("attnres.ops.gpu.streams")
        monkeypatch.setattr("attnres.ops.streams.connection_backend", lambda inputs: triton)
        sublayers = 4  # the interpreter is slow
    residual = make_residual(name, sublayers, width, **settings)
    stir(residual)
    embedding, norm = torch.randn(2, 5, width).requires_grad_(), torch.randn(width).requires_grad_()
    weights = [torch.randn(width, width) / 6 for _ in range(sublayers)]
    stored: dict[int, torch.Tensor] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() == 4 * 2 * 5 * 4 * width
        ):  # of one stream a token, which the first ones are, it is a quarter
            stored[storage.data_ptr()] = tensor
        return tensor

    def run(recompute):
        stored.clear()
        residual.recompute_reads = recompute
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cpu.switched(kernels == "C"):
            state = residual.start(embedding)
            for index, weight in enumerate(weights):
                x, state = residual("read", state, index, Norm(norm))
                state = residual("write", state, index, torch.tanh(x @ weight))
            out = residual("finish", state, Norm(norm))
            count, loss = len(stored), out.pow(3).sum()
            gradients = torch.autograd.grad(
                loss, [embedding, norm, *residual.parameters()], allow_unused=True, retain_graph=True
            )
        assert torch.equal(torch.autograd.grad(loss, [embedding])[0], gradients[0])
        return count, out, *gradients

    before, *expected = run(False)
    after, *actual = run(True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs) if theirs is not None else ours is None
    if kernels == "none":
        assert after < before  # checkpointing hands none of its own inputs to the hook
    else:
        assert (before, after) == {"C": (8, 2), "Triton": (4, 2)}[kernels]
