"""Reads of plain torch: transforms, derivatives of derivatives, exports; and their refusal elsewhere."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from attnres import Norm, UserError, depth_read, depth_read_reference
from attnres.ops import cpu, dispatch, merge, plain_torch, read_sealed
from attnres.ops.streams import sinkhorn
from attnres.residuals import make_residual

WIDTH = 16


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=dtype)


def network(stack, query, gain, weight, residual="block"):
    """Three sublayers of a Block network whose sublayers are fixed functions."""
    with torch.device("meta"):
        block = make_residual(residual, 4, WIDTH, **({"block_size": 2} if residual == "block" else {}))
    norm = Norm(weight)

    def run(module_parameters):
        def pass_through(embedding):
            state = block.start(embedding)
            for index in range(4):
                x, state = block.read(state, index, norm)
                state = block.write(state, index, (x + index).sin())
            return block.finish(state, norm)

        return torch.func.functional_call(_Wrapped(block, pass_through), module_parameters, (stack,))

    return run({"block.query": query, "block.gain": gain})


class _Wrapped(torch.nn.Module):
    def __init__(self, block, function):
        super().__init__()
        self.block, self.function = block, function

    def forward(self, x):
        return self.function(x)


ARGUMENTS = draw(3, WIDTH), 0.3 * draw(5, WIDTH), 1 + 0.1 * draw(5, WIDTH, seed=1), 1 + 0.1 * draw(WIDTH)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch's own transforms
@pytest.mark.parametrize("residual", ["block", "full"])
def test_transforms_are_what_autograd_gives(residual):
    def loss(*arguments):
        return network(*arguments, residual=residual).square().sum() / 10

    leaves = [x.clone().requires_grad_() for x in ARGUMENTS]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    ours = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*ARGUMENTS)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    tangents = [draw(*x.shape, seed=9) for x in ARGUMENTS]
    _, along = torch.func.jvp(loss, ARGUMENTS, tuple(tangents))
    torch.testing.assert_close(along, sum((g * t).sum() for g, t in zip(expected, tangents)))
    with forward_ad.dual_level():
        dual = loss(*map(forward_ad.make_dual, ARGUMENTS, tangents))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, along)


def test_per_token_gradients_are_those_of_each_token(backend):
    query = 0.4 * draw(WIDTH, dtype=torch.float32)
    sources = draw(3, 5, WIDTH, dtype=torch.float32)

    def one(query, token):
        return depth_read(list(token), query, norm=Norm(eps=1e-3)).sin().sum()

    ours = torch.func.vmap(torch.func.grad(one), (None, 1))(query, sources)
    for token in range(5):
        leaf = query.clone().requires_grad_()
        (expected,) = torch.autograd.grad(one(leaf, sources[:, token]), leaf)
        torch.testing.assert_close(ours[token], expected, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_right_where_they_are_asked_for():
    def loss(*arguments):
        with plain_torch():
            return network(*arguments).square().sum() / 10

    leaves = [x.clone().requires_grad_() for x in ARGUMENTS]
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)
    matrices = (0.2 * draw(2, 3, 3)).requires_grad_()

    def balanced(x):
        with plain_torch():
            return sinkhorn(x, 4).sin().sum()

    assert torch.autograd.gradgradcheck(balanced, matrices, fast_mode=True)


def test_a_second_derivative_is_refused_and_not_wrong(backend):
    sources, query = list(draw(3, 4, WIDTH, dtype=torch.float32).requires_grad_().unbind()), draw(WIDTH).float()
    says = "run the forward pass inside `with attnres.ops.plain_torch"
    sealed = read_sealed(sources, query.view(1, -1).requires_grad_())
    for loss in (
        depth_read(sources, query, norm=Norm(eps=1e-3)).sum(),
        depth_read(sources, query).square().sum(),
        merge(sealed.read(0), (), None, None, Norm()).x.sum(),
    ):
        with pytest.raises(UserError, match=says):
            torch.autograd.grad(loss, sources, create_graph=True, retain_graph=True)
        with pytest.raises(UserError, match=says):
            loss.backward(create_graph=True)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_needs_no_operator_of_ours(strict):
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query = torch.nn.Parameter(0.3 * draw(WIDTH, dtype=torch.float32))

        def forward(self, stack):
            sealed = read_sealed(list(stack), self.query.view(1, -1))
            return depth_read(list(stack), self.query), merge(sealed.read(0), (), None, None, Norm()).x

    module, stack = Reads(), draw(3, 5, WIDTH, dtype=torch.float32)
    exported = torch.export.export(module, (stack,), strict=strict)
    assert not any("attnres" in str(node.target) for node in exported.graph.nodes)
    for a, b in zip(exported.module()(stack), module(stack), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_query_and_gain_in_16_bits_are_multiplied_in_fp32(dtype, backend):
    sources = list(draw(8, 64, 1024, dtype=torch.float32).to(dtype))
    query, gain = (0.1 * draw(1024)).to(dtype), (1 + 0.3 * draw(1024, seed=5)).to(dtype)
    _, expected = depth_read_reference([v.double() for v in sources], query.double(), gain.double())
    _, weights = depth_read(sources, query, gain, return_weights=True)
    assert ((weights - expected).abs() / expected).max() < 1e-5


def test_sources_may_be_single_vectors(backend):
    sources, query = list(draw(3, WIDTH, dtype=torch.float32)), draw(WIDTH, dtype=torch.float32)
    expected, shares = depth_read_reference(sources, query)
    for norm in (None, Norm(eps=1e-3)):
        for level in (0, 1):
            h, weights = depth_read(sources, query, norm=norm, return_weights=True, checkpoint_level=level)
            assert h.shape == (WIDTH,) and weights.shape == (3,)
            torch.testing.assert_close(weights, shares)
    torch.testing.assert_close(depth_read(sources, query), expected)


@pytest.mark.quick("*-True", "3-*")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by Dynamo itself
@pytest.mark.parametrize(
    ("count", "tokens", "fused"), [(1, 2, True), (3, 2, True), (12, 2, True), (70, 2, False), (3, 9000, False)]
)
def test_a_compiler_on_a_cpu_is_shown_the_operations_of_a_short_read(count, tokens, fused):
    """Of few sources of few tokens; others are operators. Forward and backward."""
    sources, query, weight = (
        draw(count, tokens, WIDTH, dtype=torch.float32),
        draw(WIDTH, dtype=torch.float32),
        torch.ones(WIDTH),
    )
    targets = []

    def backend(graph, inputs):
        targets.extend(
            str(node.target) for module in graph.modules() for node in getattr(module, "graph", graph.graph).nodes
        )
        return graph.forward

    def read(sources, query):
        return depth_read(sources, query, norm=Norm(weight))

    leaves = [x.clone().requires_grad_() for x in (*sources.unbind(0), query)]
    expected = read(leaves[:-1], leaves[-1])
    slope = draw(tokens, WIDTH, seed=5, dtype=torch.float32)
    wanted = torch.autograd.grad(expected, leaves, slope)
    torch.compiler.reset()
    compiled = torch.compile(read, backend=backend, fullgraph=True)
    x = compiled(leaves[:-1], leaves[-1])
    torch.testing.assert_close(x, expected)
    for ours, theirs in zip(torch.autograd.grad(x, leaves, slope), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert targets and fused != any(name.startswith("attnres.") for name in targets)


def gradients(run, leaves):
    out = run(leaves)
    slope = draw(*out.shape, seed=5, dtype=torch.float32)
    return [out, *torch.autograd.grad(out, leaves, slope)]


def one_read(count, opens, norm, recompute):
    """A read of `count` sealed and `opens` open sources, of leaves: sources, then the query."""

    def run(leaves):
        *sources, query = leaves
        sealed = read_sealed(sources[:count], query.view(1, -1))
        return merge(sealed.read(0), sources[count:], None, query if opens else None, norm, recompute=recompute).x

    return run


@pytest.mark.quick("5-0-*")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by Dynamo itself
@pytest.mark.parametrize(
    ("count", "opens", "recompute", "norm", "shape"),
    [
        (45, 0, False, None, (2, 3, WIDTH)),
        (45, 1, False, None, (6, WIDTH)),
        (45, 1, False, Norm(eps=1e-3), (2, 3, WIDTH)),
        (5, 0, True, None, (2, 3, WIDTH)),
        (5, 2, True, None, (6, WIDTH)),
        (5, 2, True, Norm(eps=1e-3), (2, 3, WIDTH)),
        (39, 2, False, None, (2, 3, WIDTH)),
    ],
)
def test_either_phase_may_be_operators_or_operations(count, opens, recompute, norm, shape):
    """A compiler is shown the operations of one phase and an operator for the other, by how many tensors each has."""
    leaves = [x.requires_grad_() for x in draw(count + opens, *shape, dtype=torch.float32).unbind(0)]
    leaves.append((0.5 * draw(WIDTH, dtype=torch.float32)).requires_grad_())
    run = one_read(count, opens, norm, recompute)
    expected = gradients(run, leaves)
    torch.compiler.reset()
    compiled = gradients(torch.compile(run, backend="aot_eager", fullgraph=True), leaves)
    for ours, theirs in zip(compiled, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # by Dynamo itself
@pytest.mark.parametrize(
    ("limits", "operator"),
    [
        ({"few_compiled": {1: 1, 2: 1 << 17}}, "read_sealed"),
        ({"few_compiled": {1: 1 << 17, 2: 1}}, "merge"),
        ({"most_open": 1}, "merge"),
    ],
)
def test_a_compiler_is_shown_one_phase_where_the_other_is_faster_as_an_operator(limits, operator, monkeypatch):
    """As on a GPU, where phase 1 is an operator, a short merge is not, and one of many open sources is."""
    monkeypatch.setitem(dispatch.KERNELS, "cpu", cpu.KERNELS._replace(**limits))
    names = set()

    def backend(graph, inputs):
        for module in graph.modules():
            names.update(str(node.target) for node in getattr(module, "graph", graph.graph).nodes)
        return graph.forward

    leaves = [x.requires_grad_() for x in draw(6, 6, WIDTH, dtype=torch.float32).unbind(0)]
    leaves.append((0.5 * draw(WIDTH, dtype=torch.float32)).requires_grad_())
    run = one_read(4, 2, Norm(eps=1e-3), recompute=False)
    expected = gradients(run, leaves)
    torch.compiler.reset()
    compiled = gradients(torch.compile(run, backend=backend, fullgraph=True), leaves)
    for ours, theirs in zip(compiled, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    operators = {name for name in names if name.startswith("attnres.")}
    assert operators == {f"attnres.{operator}.default", f"attnres.{operator}_backward.default"}


@pytest.mark.parametrize("plain", ["read_sealed", "merge"])
@pytest.mark.parametrize("opens", [0, 2])
def test_a_phase_of_kernels_and_a_phase_of_operations_are_one_read(plain, opens, backend):
    leaves = [x.requires_grad_() for x in draw(5 + opens, 6, WIDTH, dtype=torch.float32).unbind(0)]
    leaves.append((0.5 * draw(WIDTH, dtype=torch.float32)).requires_grad_())

    def run(leaves):
        *sources, query = leaves
        with plain_torch() if plain == "read_sealed" else contextlib.nullcontext():
            sealed = read_sealed(sources[:5], query.view(1, -1)).read(0)
        with plain_torch() if plain == "merge" else contextlib.nullcontext():
            return merge(sealed, sources[5:], None, query if opens else None).x

    expected = gradients(lambda leaves: depth_read_reference(list(leaves[:-1]), leaves[-1])[0], leaves)
    for ours, theirs in zip(gradients(run, leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_recorded_operations_are_the_read(backend):
    """`make_fx` sees no call of a C function."""
    query = 0.4 * draw(WIDTH, dtype=torch.float32)

    def run(stack):
        return depth_read(list(stack), query, norm=Norm(eps=1e-3))

    stack, other = draw(4, 5, WIDTH, dtype=torch.float32), draw(4, 5, WIDTH, seed=3, dtype=torch.float32)
    torch.testing.assert_close(make_fx(run)(stack)(other), run(other))


@pytest.mark.parametrize("plain", [False, True])
def test_weights_that_are_looked_at_carry_no_gradient(plain, backend):
    sources = list(draw(8, 5, WIDTH, dtype=torch.float32).requires_grad_().unbind())
    query = draw(WIDTH, dtype=torch.float32).requires_grad_()
    with plain_torch() if plain else contextlib.nullcontext():
        h, weights = depth_read(sources, query, return_weights=True)
        sealed = read_sealed(sources, query.view(1, -1))
        merged = merge(sealed.read(0), sources[:1], None, query, Norm())
    shown = weights, sealed.logits, *sealed.total, merged.h, merged.sealed, merged.weights
    assert h.requires_grad and not any(one.requires_grad for one in shown)


def test_several_gradients_at_once_are_refused_in_a_sentence():
    leaf = draw(4, 5, WIDTH, dtype=torch.float32).requires_grad_()
    query, slopes = draw(WIDTH, dtype=torch.float32), draw(3, 5, WIDTH, dtype=torch.float32)
    with pytest.raises(UserError, match="is_grads_batched"):
        torch.autograd.grad(depth_read(list(leaf), query), leaf, slopes, is_grads_batched=True)
    with plain_torch():
        h = depth_read(list(leaf), query)
    (ours,) = torch.autograd.grad(h, leaf, slopes, is_grads_batched=True, retain_graph=True)
    for one, slope in zip(ours, slopes, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(h, leaf, slope, retain_graph=True)[0])
