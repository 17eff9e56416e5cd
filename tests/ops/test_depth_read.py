"""The drop-in read: what SPEC-like properties a softmax over depth must have, for every backend."""

import pytest
import torch
from torch.nn import functional as F

from attnres import Norm, depth_read, depth_read_reference
from attnres.ops import merge, read_sealed

WIDTH = 32


def make(n=4, tokens=(2, 5), dtype=torch.float32, seed=0, query_scale=1.0):
    g = torch.Generator().manual_seed(seed)
    sources = [torch.randn(*tokens, WIDTH, generator=g).to(dtype).requires_grad_() for _ in range(n)]
    query = (torch.randn(WIDTH, generator=g) * query_scale).requires_grad_()
    gain = (torch.rand(WIDTH, generator=g) + 0.5).requires_grad_()
    return sources, query, gain


def test_it_is_the_reference(backend):
    sources, query, gain = make()
    h, weights = depth_read(sources, query, gain, return_weights=True)
    expected, expected_weights = depth_read_reference(sources, query, gain)
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(weights, expected_weights.detach())
    assert weights.shape == (4, 2, 5)


def test_zero_queries_give_the_mean(backend):
    sources, query, gain = make()
    h, weights = depth_read(sources, torch.zeros_like(query), gain, return_weights=True)
    torch.testing.assert_close(h, torch.stack(sources).mean(0))
    torch.testing.assert_close(weights, torch.full((4, 2, 5), 0.25))


def test_one_source_is_returned_and_gives_the_query_no_gradient(backend):
    (source,), query, gain = make(n=1)
    h = depth_read([source], query, gain)
    torch.testing.assert_close(h, source, rtol=0, atol=0)
    (h * torch.randn_like(h)).sum().backward()
    assert not query.grad.any()


def test_a_permutation_of_sources_changes_nothing(backend):
    sources, query, gain = make(n=5)
    order = [3, 0, 4, 2, 1]
    h, weights = depth_read(sources, query, gain, return_weights=True)
    h2, weights2 = depth_read([sources[i] for i in order], query, gain, return_weights=True)
    torch.testing.assert_close(h, h2)
    torch.testing.assert_close(weights[order], weights2)


def test_scaling_a_source_scales_its_value_and_not_its_weight(backend):
    sources, query, gain = make()
    h, weights = depth_read(sources, query, gain, eps=1e-12, return_weights=True)
    scaled = [sources[0] * 7.0, *sources[1:]]
    h2, weights2 = depth_read(scaled, query, gain, eps=1e-12, return_weights=True)
    torch.testing.assert_close(weights, weights2)
    torch.testing.assert_close(h2 - h, 6 * weights[0].unsqueeze(-1) * sources[0], rtol=1e-4, atol=1e-5)


def test_keys_are_normed_and_there_is_no_scaling_by_width(backend):
    # Two sources along two axes: keys are sqrt(d) e_0 and sqrt(d) e_1, so the logits are sqrt(d) w_0 and sqrt(d) w_1.
    a, b = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH)
    a[0, 0], b[0, 1] = 3.0, 0.1
    query = torch.zeros(WIDTH)
    query[0] = 0.2
    _, weights = depth_read([a, b], query, eps=0.0, return_weights=True)
    expected = torch.tensor([0.2 * WIDTH**0.5, 0.0]).softmax(0)
    torch.testing.assert_close(weights[:, 0], expected)


def test_adding_one_vector_to_all_logits_changes_nothing(backend):
    # A component that every key shares adds the same number to every logit.
    sources, query, _ = make()
    with torch.no_grad():
        for source in sources:
            source[..., -1] = 0.0
            rest = source[..., :-1]
            source[..., -1] = rest.pow(2).mean(-1).sqrt()  # the last coordinate of every key is then the same number
    shifted = query.detach().clone()
    shifted[-1] += 3.0
    torch.testing.assert_close(depth_read(sources, query, eps=0.0), depth_read(sources, shifted, eps=0.0))


@pytest.mark.parametrize("size", [80.0, -80.0])
def test_extreme_logits_and_norms_stay_finite_and_right(backend, size):
    sources, query, gain = make(n=4)
    with torch.no_grad():
        sources[1] *= 1e4
        query *= abs(size) / (query.norm() * WIDTH**0.5 * 0.3)  # logits of up to about +-80
        sources[0].copy_(torch.sign(torch.tensor(size)) * query.expand_as(sources[0]))
    h, weights = depth_read(sources, query, gain, return_weights=True)
    expected, expected_weights = depth_read_reference([s.double() for s in sources], query.double(), gain.double())
    torch.testing.assert_close(weights.double(), expected_weights.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(h.double(), expected, rtol=1e-4, atol=1e-2)
    h.sum().backward()
    assert all(p.grad.isfinite().all() for p in (*sources, query, gain))


@pytest.mark.parametrize("center", [False, True], ids=["rmsnorm", "layernorm"])
def test_a_fused_norm_is_the_norm_of_the_read(backend, center):
    sources, query, gain = make()
    weight, bias = torch.rand(WIDTH) + 0.5, torch.randn(WIDTH)
    h = depth_read(sources, query, gain)
    if center:
        expected, norm = F.layer_norm(h, (WIDTH,), weight, bias, 1e-5), Norm(weight, bias, 1e-5, center=True)
    else:
        expected, norm = F.rms_norm(h, (WIDTH,), weight, 1e-5), Norm(weight, eps=1e-5)
    torch.testing.assert_close(depth_read(sources, query, gain, norm=norm), expected, rtol=1e-5, atol=1e-5)


def test_a_norm_after_the_read_leaves_no_gradient_along_it(backend):
    sources, query, gain = make()
    read = read_sealed(sources, (query * gain).unsqueeze(0)).read(0)
    h, top = read.output.detach().requires_grad_(), read.top.detach().requires_grad_()
    out = merge(read._replace(output=h, top=top), (), None, None, Norm(torch.rand(WIDTH) + 0.5)).x
    grad, along_top = torch.autograd.grad((out * torch.randn_like(out)).sum(), (h, top))
    assert along_top.abs().max() < 1e-4 * grad.norm(dim=-1).max()  # -<dh, h>, by the convention of two_phase.py
    h, grad = h.detach(), grad.detach()
    along = (grad * h).sum(-1).abs() / (grad.norm(dim=-1) * h.norm(dim=-1))
    assert along.max() < 1e-5


def naive_read(leaves, fused):
    """What one writes first: stack, norm, softmax, weighted sum, all through autograd."""
    values, query, gain = torch.stack(leaves[:6]), leaves[6], leaves[7]
    keys = F.rms_norm(values.to(torch.promote_types(values.dtype, torch.float32)), (WIDTH,), gain, 1e-6)
    weights = torch.einsum("d,ntd->nt", query, keys).softmax(0).to(values.dtype)
    h = torch.einsum("nt,ntd->td", weights, values)
    return F.rms_norm(h, (WIDTH,), leaves[8].to(h.dtype), 1e-6) if fused else h


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True], ids=["read", "read-norm"])
def test_every_gradient_is_no_worse_than_eager_pytorchs(backend, dtype, fused):
    """Relative errors against fp64, root mean square over seeds; half a unit of roundoff decides nothing."""

    def ours(leaves):
        norm = Norm(leaves[8], eps=1e-6) if fused else None
        return depth_read(leaves[:6], leaves[6], leaves[7], norm=norm)

    def errors(read, leaves, exact, upstream):
        out = read(leaves)
        actual = [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]
        return torch.tensor([((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, exact)])

    squares = torch.zeros(2, 9 + fused)
    for seed in range(8):
        sources, query, gain = make(n=6, tokens=(64,), dtype=dtype, seed=seed, query_scale=0.2)
        torch.manual_seed(seed)
        leaves = [*sources, query, gain, *([(torch.rand(WIDTH) + 0.5).requires_grad_()] if fused else [])]
        upstream = torch.randn(64, WIDTH).to(dtype)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        out = naive_read(doubles, fused)
        exact = [out, *torch.autograd.grad(out, doubles, upstream.double())]
        squares[0] += errors(ours, leaves, exact, upstream) ** 2
        squares[1] += errors(lambda x: naive_read(x, fused), leaves, exact, upstream) ** 2
    error, eager_error = (squares / 8).sqrt()
    names = ["h", *(f"source {i}" for i in range(6)), "query", "gain", "norm weight"]
    floor = 6e-7 if dtype is torch.float32 else 0.0
    bad = [f"{n}: {a:.2e} > {b:.2e}" for n, a, b in zip(names, error, eager_error) if a > max(1.02 * b, floor)]
    assert not bad


def test_fp64_gradients_pass_gradcheck():
    sources, query, gain = make(n=3, tokens=(2,), query_scale=0.5)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (*sources, query, gain)]
    assert torch.autograd.gradcheck(lambda *x: depth_read(x[:3], x[3], x[4], norm=Norm(eps=1e-3)), leaves)


def test_frozen_and_detached_sources_are_read_and_get_no_gradient(backend):
    sources, query, gain = make()
    sources[1] = sources[1].detach()
    depth_read(sources, query, gain).square().sum().backward()
    assert sources[1].grad is None
    assert all(s.grad is not None for i, s in enumerate(sources) if i != 1)


def test_sources_of_mixed_dtype_and_strides_are_read_as_they_are(backend):
    sources, query, gain = make(n=3, tokens=(4, 6))
    mixed = [sources[0], sources[1].to(torch.bfloat16), sources[2].transpose(0, 1).contiguous().transpose(0, 1)]
    expected, _ = depth_read_reference([m.float() for m in mixed], query, gain)
    torch.testing.assert_close(depth_read(mixed, query, gain), expected)


@pytest.mark.parametrize("width", [8, 40, 896, 1168])
def test_any_width_works(backend, width):
    g = torch.Generator().manual_seed(0)
    sources = [torch.randn(3, width, generator=g) for _ in range(3)]
    query = torch.randn(width, generator=g) / width**0.5
    torch.testing.assert_close(depth_read(sources, query), depth_read_reference(sources, query)[0])


def test_autocast_does_not_touch_the_softmax(backend):
    sources, query, gain = make()
    expected = depth_read(sources, query, gain)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(depth_read(sources, query, gain), expected, rtol=0, atol=0)


def test_results_repeat_bit_for_bit(backend):
    def run():
        sources, query, gain = make(n=7, tokens=(333,))
        depth_read(sources, query, gain).square().sum().backward()
        return [leaf.grad for leaf in (*sources, query, gain)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run()))


def test_no_source_and_wrong_shapes_are_refused():
    sources, query, _ = make()
    with pytest.raises(ValueError, match="no sources"):
        depth_read([], query)
    with pytest.raises(ValueError, match=r"query of shape \(5,\): expected \(32,\)"):
        depth_read(sources, torch.zeros(5))
    with pytest.raises(ValueError, match="source 1"):
        depth_read([sources[0], sources[1][:1]], query)
    for bad in (torch.tensor(1.0), torch.ones(2, 0)):
        with pytest.raises(ValueError, match=r"source 0 of shape .*: expected \(\.\.\., d\)"):
            depth_read([bad, bad], torch.zeros(0))
    with pytest.raises(ValueError, match=r"source 0 of torch.float8_e4m3fn: expected a floating dtype of 16"):
        depth_read([torch.ones(3, 32).to(torch.float8_e4m3fn)], torch.zeros(32))
    with pytest.raises(ValueError, match=r"query of torch\.complex64"):
        depth_read([torch.ones(3, 32)], torch.zeros(32, dtype=torch.complex64))
    with pytest.raises(ValueError, match="query of type list: expected a tensor"):
        depth_read([torch.ones(3, 32)], [0.0] * 32)
    with pytest.raises(ValueError, match=r"source 0 of torch.int64: expected a floating dtype"):
        depth_read([torch.full((2, 32), 3)], query)
    with pytest.raises(ValueError, match=r"a norm's weight of shape \(1,\): expected \(32,\)"):
        depth_read(sources, query, norm=Norm(torch.ones(1)))
    with pytest.raises(ValueError, match=r"a norm of type LayerNorm: expected an attnres\.Norm or None"):
        depth_read(sources, query, norm=torch.nn.LayerNorm(32))


def test_nan_is_passed_on_and_not_hidden(backend):
    sources, query, gain = make(dtype=torch.bfloat16)
    with torch.no_grad():
        sources[2][0, 0, 3] = float("nan")
    h = depth_read(sources, query, gain)
    assert h[0, 0].isnan().all() and h[0, 1:].isfinite().all()


def test_fp16_gradients_through_a_norm_are_as_exact_as_fp32_arithmetic_rounded_once():
    """The read goes to its norm, and to backward, unrounded: by the formula in fp64, errors in root mean square."""
    torch.manual_seed(0)
    rows = [torch.randn(64, 512) for _ in range(9)]
    vectors = [torch.randn(512), torch.rand(512) + 0.5, torch.rand(512) + 0.5]
    inputs = [tensor.half() for tensor in (*rows, *vectors)]
    upstream = torch.randn(64, 512).half()

    def by_formula(*tensors):
        *values, query, gain, weight = tensors
        values = torch.stack(values)
        keys = gain * values * (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        h = ((keys @ query).softmax(0).unsqueeze(-1) * values).sum(0)
        return weight * h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def by_us(*tensors):
        return depth_read(list(tensors[:-3]), tensors[-3], tensors[-2], norm=Norm(tensors[-1], eps=1e-6))

    def run(function, dtype):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    exact = run(by_formula, torch.float64)
    once = [tensor.half() for tensor in run(by_formula, torch.float32)]
    for ours, rounded, right in zip(run(by_us, torch.float16), once, exact, strict=True):
        far, bound = ((one.double() - right).norm() for one in (ours, rounded))
        assert far <= 1.05 * bound
