"""Parallel streams: Sinkhorn's normalisation against its definition, kernels against plain torch in fp64."""

import pytest
import torch
from formula import on_logarithms
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres import Norm, UserError
from attnres.ops import cpu
from attnres.ops.backend import MAX_STEPS, MAX_STREAMS, Connect, ConnectGradInputs, Connection
from attnres.ops.dispatch import connection_backend
from attnres.ops.streams import _Connect, _connect, connect, sinkhorn, write

FP32, BF16 = torch.float32, torch.bfloat16
KINDS = ("sum", "gate", "identity", "sinkhorn", "tanh")
try:
    from attnres.ops.gpu import kernels as gpu
    from attnres.ops.gpu.launch import Launch
except ImportError:
    gpu = Launch = None
triton = pytest.mark.skipif(gpu is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
compiled = pytest.mark.skipif(cpu.load() is None, reason="no C compiler: the CPU kernels cannot be built")


def drawn(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("shape", [(3, 3), (5, 4, 4), (2, 3, 2, 2), (4, 1, 1), (0, 3, 3)])
def test_it_and_its_gradient_are_those_of_steps_on_logarithms(shape, steps):
    logits, upstream = drawn(*shape).requires_grad_(), drawn(*shape).flip(0)
    actual, expected = sinkhorn(logits, steps), on_logarithms(logits, steps)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    (ours,), (theirs,) = (torch.autograd.grad((x * upstream).sum(), logits) for x in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_rows_sum_to_one_and_columns_after_enough_steps():
    matrix = sinkhorn(drawn(50, 4, 4))
    ones = torch.ones(50, 4, dtype=torch.float64)
    torch.testing.assert_close(matrix.sum(-1), ones, rtol=1e-12, atol=0)
    torch.testing.assert_close(matrix.sum(-2), ones, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [1.0, 60.0, 1000.0])
def test_logits_of_any_size_give_in_fp32_what_they_give_in_fp64(scale):
    logits = drawn(200, 4, 4, scale=scale)
    torch.testing.assert_close(sinkhorn(logits.float()).double(), sinkhorn(logits.float().double()), rtol=0, atol=1e-4)
    torch.testing.assert_close(sinkhorn(logits), on_logarithms(logits, 20), rtol=0, atol=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
def test_either_order_and_eps_are_those_of_steps_one_by_one(eps):
    """Softmax of the first axis plus eps, then every sum plus eps: DeepSeek-V4's code, and with 0 Sinkhorn's own."""
    logits = drawn(7, 3, 3, scale=3.0)
    for over_in in (False, True):
        first, second = (-1, -2) if over_in else (-2, -1)
        matrix = logits.softmax(first) + eps
        matrix = matrix / (matrix.sum(second, keepdim=True) + eps)
        for _ in range(4):
            matrix = matrix / (matrix.sum(first, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(second, keepdim=True) + eps)
        torch.testing.assert_close(sinkhorn(logits, 5, over_in=over_in, eps=eps), matrix, rtol=1e-12, atol=1e-14)


# -- kernels ----------------------------------------------------------------------------------------------------------


def make_norm(kind, width):
    weight, bias = 1 + drawn(width) / 4, drawn(width).flip(0)
    return {
        "none": None,
        "plain": Norm(),
        "rms": Norm(weight, eps=1e-3),
        "biased": Norm(weight, bias, 1e-3),
        "layer": Norm(weight, bias, 1e-3, center=True),
    }[kind]


def make_inputs(form, n, width, tokens, norm="rms", *, pending=True, carried=True, sharp=1.0):
    """Random inputs in fp64 that are exact in bf16."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().double()

    generator = torch.Generator().manual_seed(n * width)
    columns = {"sum": 0, "gate": n, "identity": 2 * n, "sinkhorn": 2 * n + n * n, "tanh": n + 2}[form.kind]
    groups, rows = (n, width) if form.kind == "tanh" else (1, n * width)
    table = None
    if columns:
        table = draw(groups + 1 + rows, columns)
        table[groups + 1 :] /= rows**0.5
        table[:groups] *= sharp
    streams, output = draw(*tokens, n, width), draw(*tokens, width)
    earlier = draw(*tokens, 2 * n + carried * n * n).abs()
    if not pending:
        output, earlier = None, earlier if form.late else None
    return Connect(streams, earlier, output, table, make_norm(norm, width), form)


def outcome(compute, inputs, cast):
    """Results and gradients of `compute` for inputs that `cast` has cast."""

    def leaf(tensor):
        return None if tensor is None else cast(tensor).detach().requires_grad_()

    norm = inputs.norm
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    leaves = [leaf(tensor) for tensor in (*inputs[:4], weight, bias)]
    made, x, coefficients = compute(inputs, norm, *leaves)
    results = [x, *((made,) if inputs.form.kind != "sum" else ()), *(() if inputs.table is None else (coefficients,))]
    probes = [drawn(*result.shape).flip(0).to(result) for result in results]
    total = sum((result * probe).sum() for result, probe in zip(results, probes, strict=True))
    given = [tensor for tensor in leaves if tensor is not None]
    return results, torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True)


def plainly(inputs, norm, streams, earlier, output, table, weight, bias):
    norm = None if norm is None else norm._replace(weight=weight, bias=bias)
    return _connect(Connect(streams, earlier, output, table, norm, inputs.form))


def by(backend):
    def compute(inputs, norm, *leaves):
        given = None if norm is None else norm._replace(weight=None, bias=None)
        return _Connect.apply(backend, inputs.form, given, None, None, *leaves)

    return compute


def check(backend, inputs, dtype=FP32, tolerance=2e-5):
    """Hold a backend's results and gradients against plain torch's in fp64."""

    def cast(tensor):
        vector = tensor is inputs.streams or tensor is inputs.output
        return tensor.to(DEVICE if backend is gpu else "cpu", dtype if vector else FP32)

    ours, theirs = outcome(by(backend), inputs, cast), outcome(plainly, inputs, torch.Tensor.double)
    for a, e in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert a.shape == e.shape and a.is_contiguous()
        unit = 2**-6 if dtype == BF16 else 0.0
        assert (a.cpu().double() - e).abs().le((tolerance + unit) * (1 + e.abs().amax())).all()
    return ours


@compiled
@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, MAX_STREAMS),
    tokens=st.sampled_from([(0,), (1,), (37,), (2, 3, 5), (4, 9)]),
    width=st.sampled_from([16, 48, 128]),
    norm=st.sampled_from(["none", "plain", "rms", "biased", "layer"]),
    pending=st.booleans(),
    carried=st.booleans(),
    late=st.booleans(),
    dtype=st.sampled_from([FP32, BF16]),
)
def test_c_kernels_connect_streams_as_plain_torch_does(kind, n, tokens, width, norm, pending, carried, late, dtype):
    form = Connection(kind, eps=1e-5, steps=5, late=late and kind != "gate")
    inputs = make_inputs(form, n, width, tokens, norm, pending=pending, carried=carried)
    if tokens != (0,):
        check(cpu, inputs, dtype)
    else:
        results, grads = outcome(by(cpu), inputs, torch.Tensor.float)
        assert all(result.numel() == 0 for result in results) and not any(grad.any() for grad in grads)


@compiled
@pytest.mark.parametrize("over_in", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("sharp", [1.0, 8.0])
def test_c_kernels_balance_matrices_in_either_order(over_in, eps, sharp):
    form = Connection("sinkhorn", read_eps=eps, over_in=over_in, sinkhorn_eps=eps)
    check(cpu, make_inputs(form, 4, 32, (33,), sharp=sharp), tolerance=2e-5 * sharp**2)


@compiled
def test_matrices_of_logits_far_apart_are_those_of_plain_torch():
    inputs = make_inputs(Connection("sinkhorn"), 4, 16, (33,), sharp=60.0)
    coefficients = outcome(by(cpu), inputs, torch.Tensor.float)[0][2]
    torch.testing.assert_close(
        coefficients.double(), outcome(plainly, inputs, torch.Tensor.double)[0][2], rtol=0, atol=1e-3
    )
    assert coefficients[:, 8:].unflatten(-1, (4, 4)).sum(-1).sub(1).abs().max() < 1e-5


@compiled
def test_streams_that_are_copies_and_gradients_that_are_views_are_read_where_they_are():
    inputs = make_inputs(Connection("sinkhorn", steps=3), 4, 32, (19,), pending=False)
    once = inputs.streams[:, :1].clone()
    apart = inputs._replace(streams=once.expand(-1, 4, -1)), inputs._replace(streams=once.repeat(1, 4, 1))
    results = [outcome(by(cpu), each, torch.Tensor.float) for each in apart]
    for a, e in zip((*results[0][0], *results[0][1]), (*results[1][0], *results[1][1]), strict=True):
        assert torch.equal(a, e)


@compiled
def test_results_of_two_threads_repeat_bit_for_bit():
    inputs, before = make_inputs(Connection("sinkhorn"), 4, 64, (260,)), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first, second = (outcome(by(cpu), inputs, torch.Tensor.float) for _ in range(2))
        check(cpu, inputs)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True))


@compiled
def test_what_no_kernel_connects_is_made_in_plain_torch():
    inputs = make_inputs(Connection("sinkhorn"), 2, 16, (3,))
    fp32 = Connect(*(None if v is None else v.float() for v in inputs[:4]), None, inputs.form)
    assert connection_backend(fp32) is cpu
    assert connection_backend(Connect(*inputs[:4], None, inputs.form)) is None, "fp64"
    assert connection_backend(fp32._replace(form=Connection("permutations"))) is None
    assert connection_backend(fp32._replace(form=Connection("sinkhorn", steps=MAX_STEPS + 1))) is None
    assert connection_backend(fp32._replace(streams=torch.zeros(3, MAX_STREAMS + 1, 16))) is None


@compiled
def test_a_second_derivative_is_refused_and_not_wrong():
    inputs = make_inputs(Connection("sinkhorn"), 2, 16, (3,))
    streams, earlier, output, table = (v.float().requires_grad_() for v in inputs[:4])
    _, x, _ = connect(streams, table, inputs.form, earlier=earlier, output=output)
    with pytest.raises(UserError, match="plain_torch"):
        torch.autograd.grad(x.square().sum(), table, create_graph=True)


def test_a_write_alone_is_that_of_the_next_read():
    inputs = make_inputs(Connection("sinkhorn"), 3, 16, (2, 5))
    torch.testing.assert_close(write(*inputs[:3]), _connect(inputs)[0])


# In Triton's interpreter, or on a GPU if there is one.
@triton
@pytest.mark.quick("sinkhorn-False")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_kernels_connect_streams_as_plain_torch_does(kind, late):
    """And from the plan that is remembered, bit for bit."""
    form = Connection(kind, eps=1e-5, steps=2, late=late and kind != "gate")
    for n, width, tokens, norm, carried in ((4, 32, (17,), "rms", True), (3, 80, (2, 5), "layer", False)):
        for pending in (True, False) if late else (True,):
            inputs = make_inputs(form, n, width, tokens, norm, pending=pending, carried=carried)
            first = check(gpu, inputs)
    second = check(gpu, inputs)
    assert all(torch.equal(a, b) for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True))


@triton
@pytest.mark.long
@pytest.mark.parametrize("norm", ["none", "plain", "biased"])
def test_triton_kernels_have_every_norm(norm):
    check(gpu, make_inputs(Connection("identity"), 2, 24, (17,), norm))


@triton
@pytest.mark.long
@pytest.mark.parametrize("over_in", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_triton_kernels_balance_matrices_in_either_order(over_in, eps):
    form = Connection("sinkhorn", read_eps=eps, steps=20, over_in=over_in, sinkhorn_eps=eps)
    check(gpu, make_inputs(form, 4, 16, (5,), sharp=4.0), tolerance=1e-4)


@triton
def test_triton_kernels_on_bf16(bf16_of_a_gpu):
    check(gpu, make_inputs(Connection("sinkhorn", steps=3), 4, 32, (9,)), BF16)


@triton
@pytest.mark.parametrize("kind", ["sinkhorn", "tanh", "identity"])
def test_launches_of_a_sublayer(kind, monkeypatch):
    """One forward and two backward: at most three each way."""
    count, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, device: (count.append(self.kernel), run(self, device)))
    inputs = make_inputs(Connection(kind, steps=2), 2, 16, (3,))
    vectors = [v.to(DEVICE, FP32) for v in inputs[:4]]
    norm = inputs.norm._replace(weight=inputs.norm.weight.to(DEVICE, FP32))
    given = inputs._replace(streams=vectors[0], earlier=vectors[1], output=vectors[2], table=vectors[3], norm=norm)
    made, x, coefficients, products = gpu.connect(given)
    assert len(count) == 1
    gpu.connect_backward(ConnectGradInputs(given, made, coefficients, products, x, made, coefficients))
    assert len(count) == 3
