"""The block schedule: two phases are one pass, forward and backward, whatever the shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from attnres import Norm, UserError, depth_read_reference
from attnres.ops import apply_norm, cpu, merge, read_sealed


def both_ways(n, k, reads, tokens, width, kind, seed, dtype=torch.float64, recompute=False):
    """Outputs and gradients of `reads` reads over n sealed and k open sources: (two-phase, one pass)."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=g).to(dtype).requires_grad_()

    sources, queries = [draw(tokens, width) for _ in range(n + k)], draw(reads, width)
    weight, bias = draw(width), draw(width)
    upstream = torch.randn(reads, tokens, width, dtype=torch.float64, generator=g).to(dtype)
    norm = {"none": None, "rms": Norm(weight, eps=1e-3), "layer": Norm(weight, bias, 1e-3, center=True)}[kind]
    leaves = [*sources, queries, *{"none": [], "rms": [weight], "layer": [weight, bias]}[kind]]

    sealed = read_sealed(sources[:n], queries) if n else None
    opens, ours = sources[n:], []
    for i in range(reads):  # sources are handed on from read to read
        read = merge(sealed and sealed.read(i), opens, None, queries[i], norm, recompute=recompute)
        opens = read.opens
        ours.append(read.x)

    def one_pass(query):
        h, _ = depth_read_reference(sources, query)
        if kind == "rms":
            return F.rms_norm(h, (width,), weight, 1e-3)
        return F.layer_norm(h, (width,), weight, bias, 1e-3) if kind == "layer" else h

    expected = [one_pass(query) for query in queries]
    return [[*outs, *torch.autograd.grad(outs, leaves, list(upstream), retain_graph=True)] for outs in (ours, expected)]


@settings(max_examples=60)
@given(
    n=st.integers(0, 5),
    k=st.integers(0, 3),
    reads=st.integers(1, 6),
    tokens=st.integers(1, 9),
    width=st.sampled_from([4, 16, 24]),
    kind=st.sampled_from(["none", "rms", "layer"]),
    recompute=st.booleans(),
    seed=st.integers(0, 100),
)
def test_two_phases_are_one_pass_in_fp64(n, k, reads, tokens, width, kind, recompute, seed):
    k = k or n == 0
    for a, b in zip(*both_ways(n, k, reads, tokens, width, kind, seed, recompute=recompute)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@settings(max_examples=60)
@given(
    n=st.integers(0, 9),
    k=st.integers(1, 5),
    reads=st.integers(1, 9),
    tokens=st.integers(1, 70),
    width=st.sampled_from([16, 48, 128]),
    kind=st.sampled_from(["none", "rms", "layer"]),
    seed=st.integers(0, 100),
)
def test_fp32_kernels_are_as_exact_as_one_pass(n, k, reads, tokens, width, kind, seed):
    if cpu.load() is None:
        pytest.skip("no C compiler: the CPU kernels cannot be built")
    exact = both_ways(n, k, reads, tokens, width, kind, seed)[1]
    ours, eager = both_ways(n, k, reads, tokens, width, kind, seed, torch.float32)
    for a, b, e in zip(ours, eager, exact):
        error, eager_error = (a.double() - e).norm(), (b.double() - e).norm()
        assert error <= 3 * eager_error + 4e-6 * (e.norm() + tokens * reads * width**0.5)  # summands cancel in some


def test_weights_seen_are_the_weights_used(backend):
    sources = [torch.randn(7, 16) for _ in range(4)]
    queries = torch.randn(2, 16)
    sealed = read_sealed(sources[:2], queries)
    merged = merge(sealed.read(1), sources[2:], None, queries[1])
    weights = torch.cat([sealed.logits[:, :, 1].softmax(1) * merged.sealed.unsqueeze(1), merged.weights], 1)
    torch.testing.assert_close(weights.sum(1), torch.ones(7))
    torch.testing.assert_close(torch.einsum("tn,ntd->td", weights, torch.stack(sources)), merged.x)
    torch.testing.assert_close(weights.t(), depth_read_reference(sources, queries[1])[1])


def test_the_norm_alone_is_the_norm(backend):
    h = torch.randn(3, 5, 32, requires_grad=True)
    weight = torch.rand(32).requires_grad_()
    ours = torch.autograd.grad(apply_norm(h, Norm(weight)).pow(3).sum(), (h, weight))
    expected = torch.autograd.grad(F.rms_norm(h, (32,), weight, 1e-6).pow(3).sum(), (h, weight))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_retained_graphs_and_accumulation_give_the_same_gradient_twice(backend):
    source, query = torch.randn(4, 16, requires_grad=True), torch.randn(1, 16, requires_grad=True)
    other = torch.randn(4, 16, requires_grad=True)
    sealed = read_sealed([source], query)
    out = merge(sealed.read(0), [other], None, query[0], Norm()).x.pow(3).sum()
    out.backward(retain_graph=True)
    first = source.grad.clone()
    out.backward()
    torch.testing.assert_close(source.grad, 2 * first)


def test_a_pending_output_is_added_scored_and_handed_on(backend):
    sealed_source, partial, output = (torch.randn(5, 32, requires_grad=True) for _ in range(3))
    queries = torch.randn(2, 32, requires_grad=True)
    leaves = (sealed_source, partial, output, queries)

    def chain(fused):
        sealed = read_sealed([sealed_source], queries)
        if fused:
            first = merge(sealed.read(0), [partial], None, queries[0], Norm())
            second = merge(sealed.read(1), first.opens, output, queries[1], Norm())
            return first.x, second.x, second.opens[0]
        total = partial + output
        reads = ([sealed_source, partial], queries[0]), ([sealed_source, total], queries[1])
        return *(F.rms_norm(depth_read_reference(*read)[0], (32,), eps=1e-6) for read in reads), total

    upstream = [torch.randn(5, 32) for _ in range(3)]
    ours, expected = ([*outs, *torch.autograd.grad(outs, leaves, upstream)] for outs in map(chain, (True, False)))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_a_read_that_nothing_uses_leaves_the_others_alone(backend):
    sources, queries = [torch.randn(4, 16, requires_grad=True) for _ in range(3)], torch.randn(3, 16)
    sealed = read_sealed(sources, queries)
    gradients = torch.autograd.grad(merge(sealed.read(1), (), None, None, Norm()).x.pow(3).sum(), sources)
    alone = read_sealed(sources, queries[1:2])
    expected = torch.autograd.grad(merge(alone.read(0), (), None, None, Norm()).x.pow(3).sum(), sources)
    for a, b in zip(gradients, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_tensors_of_another_shape_are_refused_by_every_backend(backend):
    sources, query = [torch.ones(4, 32) for _ in range(2)], torch.ones(1, 32)
    sealed = read_sealed(sources, query)
    for call in (
        lambda: read_sealed([sources[0], torch.ones(3, 32)], query),
        lambda: read_sealed(sources, torch.ones(1, 16)),
        lambda: merge(sealed.read(0), [torch.ones(3, 32)], None, query[0]),
        lambda: merge(sealed.read(0), sources[:1], torch.ones(1, 32), query[0]),
        lambda: merge(sealed.read(0), sources[:1], None, torch.ones(16)),
    ):
        with pytest.raises(UserError, match=r"a depth read got a tensor of shape .*: expected \("):
            call()
    with pytest.raises(UserError, match="1 open sources and no query"):
        merge(sealed.read(0), sources[:1], None, None)


@pytest.mark.parametrize("opens", [0, 1])
def test_what_is_read_may_be_changed_in_place(opens, backend):
    leaves = [torch.randn(2, 3, 32, requires_grad=True) for _ in range(3)]
    query, upstream = torch.randn(32), torch.randn(2, 3, 32)

    def read():
        sealed = read_sealed(leaves[: 3 - opens], query.view(1, -1))
        return merge(sealed.read(0), leaves[3 - opens :], None, query if opens else None, Norm())

    changed = read().x.mul_(2)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (changed, 2 * read().x)), strict=True):
        torch.testing.assert_close(a, b)
