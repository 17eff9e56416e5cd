"""The Triton merge is the plain one, forward and backward: in Triton's interpreter, or on a GPU if there is one."""

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.ops import eager
from attnres.ops.backend import MergeGradInputs, MergeInputs
from attnres.ops.gpu import kernels as gpu
from attnres.ops.gpu import merge, replay
from attnres.ops.gpu.launch import shared_memory
from attnres.ops.gpu.merge import _residents
from attnres.ops.norms import Norm

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("bf16_of_a_gpu")


@pytest.fixture(autouse=True)
def plain_torch_as_on_a_gpu(monkeypatch):
    """Where it rounds a read in fp16 before its norm, as the kernels do; on a CPU it does not."""
    monkeypatch.setattr(eager, "is_read_rounded", lambda like, dtype: True)


class Case:
    """Arguments of a merge, drawn in the dtypes it will be called with."""

    def __init__(
        self, k, tokens, width, *, sealed=True, added=True, norm="rms", dtype=torch.float32, mixed=False, seed=0
    ):
        g = torch.Generator().manual_seed(seed)
        self.dtype, self.width, self.tokens = dtype, width, tokens

        def draw(*shape, to=torch.float32):
            return torch.randn(*shape, generator=g).to(DEVICE, to)

        def vector(i=0):
            return draw(tokens, width, to=torch.float32 if mixed and i % 2 else dtype)

        self.opens = [vector(i) for i in range(k)]
        self.added = vector() if added and k else None
        self.query = draw(width) if k else None
        with_output = sealed or not k
        self.output = vector() if with_output else None
        self.top = draw(tokens) if with_output and k else None
        self.total = draw(tokens).abs() + 1 if with_output and k else None
        weight, bias = draw(width, to=dtype if mixed else torch.float32), draw(width)
        self.norm = {
            "none": None,
            "bare": Norm(out_dtype=dtype),
            "rms": Norm(weight, eps=1e-3, out_dtype=dtype),
            "rms_bias": Norm(weight, bias, 1e-3),
            "layer": Norm(weight, bias, 1e-3, True, dtype),
            "layer_bare": Norm(eps=1e-3, center=True, out_dtype=dtype),
        }[norm]
        self.grad = draw(tokens, width, to=dtype)
        self.carried = [vector() if i % 3 != 1 else None for i in range(k)]

    def arguments(self, dtype=None):
        """Of `merge`: as drawn, or all in one dtype."""

        def to(v):
            return v if v is None or dtype is None else v.to(dtype)

        norm = self.norm
        if norm is not None and dtype is not None:
            norm = norm._replace(weight=to(norm.weight), bias=to(norm.bias), out_dtype=dtype)
        opens = [to(v) for v in self.opens]
        scalars = (to(self.output), to(self.top), to(self.total))
        return MergeInputs(opens, to(self.added), to(self.query), EPS, *scalars, norm, dtype or self.dtype)

    def backward_arguments(self, saved, partial, dtype=None):
        def to(v):
            return v if v is None or dtype is None else v.to(dtype)

        inputs = self.arguments(dtype)
        opens, query, norm = inputs.opens, inputs.query, inputs.norm
        opens = opens if partial is None else [*opens[:-1], to(partial)]
        saved = eager.MergeSaved(*(to(v) for v in saved))
        return MergeGradInputs(to(self.grad), [to(v) for v in self.carried], opens, query, norm, saved)


def flat(results):
    """Every tensor of a nest, in order."""
    if results is None or isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results for tensor in flat(part)]


def assert_as_exact(ours, plain, exact, dtype):
    """The rms error of each tensor is that of plain torch in the same dtypes, up to a fifth."""
    ours, plain, exact = flat(ours), flat(plain), flat(exact)
    assert len(ours) == len(plain) == len(exact)
    for a, b, e in zip(ours, plain, exact):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.shape == b.shape and a.isfinite().all()
        error, allowed = (a.double() - e).norm(), (b.to(a.dtype).double() - e).norm()
        few_bits = 1e-5 if a.dtype == torch.float32 else 1e-4
        assert error <= 1.2 * allowed + few_bits * (e.norm() + (e.numel() ** 0.5)), (error, allowed, e.norm())


def parts(saved, case):
    return saved.h, *saved.named(len(case.opens), normed=case.norm is not None)


def check(case):
    x, saved, partial = gpu.merge(case.arguments())
    plain = eager.merge(case.arguments())
    if partial is not None:
        assert torch.equal(partial, plain[2])
        case.opens[-1], case.added = partial, None  # which is rounded: the exact results start from it
    exact = eager.merge(case.arguments(torch.float64))
    assert x.dtype == plain[0].dtype and saved.h.dtype == plain[1].h.dtype
    ours, plains, exacts = ((x, parts(saved, case)) for x, saved, _ in ((x, saved, partial), plain, exact))
    assert_as_exact(ours, plains, exacts, case.dtype)

    ours = gpu.merge_backward(case.backward_arguments(plain[1], None))
    expected = eager.merge_backward(case.backward_arguments(plain[1], None))
    exact = eager.merge_backward(case.backward_arguments(plain[1], None, torch.float64))
    assert [v.dtype for v in ours.opens] == [v.dtype for v in case.opens]
    if ours.output is not None:
        assert ours.output.dtype == case.dtype
        if case.dtype != torch.float32:  # top goes with the rounded gradient: the test of it is below
            ours, expected, exact = (grads._replace(top=None) for grads in (ours, expected, exact))
    assert_as_exact(ours, expected, exact, case.dtype)


NORMS = ("none", "bare", "rms", "rms_bias", "layer", "layer_bare")


@pytest.mark.long
@settings(max_examples=40)
@given(
    k=st.integers(0, 4),
    tokens=st.integers(1, 5),
    width=st.sampled_from([1, 8, 24, 40, 64, 96]),
    sealed=st.booleans(),
    added=st.booleans(),
    norm=st.sampled_from(NORMS),
    dtype=st.sampled_from(DTYPES),
    mixed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_merge_is_as_exact_as_plain_torch(k, tokens, width, sealed, added, norm, dtype, mixed, seed):
    check(Case(k, tokens, width, sealed=sealed, added=added, norm=norm, dtype=dtype, mixed=mixed, seed=seed))


@pytest.mark.quick("3-True-*-dtype0", "1-False-none-dtype1", "1-False-layer-dtype1", "2-False-none-dtype2")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("k,sealed", [(0, True), (1, True), (3, True), (1, False), (2, False)])
def test_each_combination(k, sealed, norm, dtype):
    check(Case(k, 3, 24, sealed=sealed, norm=norm, dtype=dtype))


@pytest.mark.quick("1-rms", "2-layer")
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("k", [1, 2])
def test_what_phase_1_subtracts_has_the_rounding_of_what_it_is_handed(k, norm):
    """<do, v> and <do, h> of one rounded do: of an exact one their difference, the query's gradient, is noise."""
    case = Case(k, 5, 40, norm=norm, dtype=torch.bfloat16)
    _, saved, partial = gpu.merge(case.arguments())
    grads = gpu.merge_backward(case.backward_arguments(saved, partial))
    assert grads.output.dtype == torch.bfloat16
    expected = -(grads.output.double() * saved.h.double()).sum(-1)
    torch.testing.assert_close(grads.top.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("dtype0-1-True-rms", "dtype0-2-False-layer")
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("k,sealed", [(1, True), (3, True), (2, False), (9, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_makes_h_again_from_what_was_read(k, sealed, norm, dtype):
    case = Case(k, 5, 40, sealed=sealed, norm=norm, dtype=dtype)
    inputs = case.arguments()
    x, whole, partial = gpu.merge(inputs)
    least_x, least, _ = gpu.merge(inputs._replace(saves="least"))
    only_x, nothing, _ = gpu.merge(inputs._replace(saves="nothing"))
    assert torch.equal(x, least_x) and torch.equal(x, only_x)
    assert (least.h is None) == (k <= 8) and not any(v is not None for v in nothing)
    expected = case.backward_arguments(whole, partial)
    output_dtype = None if case.output is None else dtype
    ours = gpu.merge_backward(
        expected._replace(saved=least, output=case.output, dtype=dtype, output_dtype=output_dtype)
    )
    for a, b in zip(flat(ours), flat(gpu.merge_backward(expected)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            few = 1e-4 if dtype == torch.float32 or a.dtype == torch.float32 else 2e-2
            assert (a.double() - b.double()).norm() <= few * (1 + b.double().norm())


@pytest.fixture
def of_several_warps(monkeypatch):
    """Programs of two warps, which sum several open sources in one exchange: in the interpreter rows are narrow."""
    replay._REPLAYS.clear()
    monkeypatch.setattr(merge, "warps_for", lambda block, per_thread=16: 2)
    yield
    replay._REPLAYS.clear()


@pytest.mark.quick("5-True-dtype1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,sealed", [(2, True), (5, True), (9, False)])
def test_sources_summed_in_one_exchange(k, sealed, dtype, of_several_warps):
    (launch,), _ = merge.plan_merge(Case(k, 3, 24, sealed=sealed, dtype=dtype).arguments())
    assert launch.constants["TOGETHER"] == 2
    check(Case(k, 3, 24, sealed=sealed, dtype=dtype))
    test_backward_makes_h_again_from_what_was_read(k, sealed, "rms", dtype)


def test_gradients_come_in_the_dtypes_of_what_was_added_up():
    case = Case(2, 3, 24, dtype=torch.float32)
    inputs = case.arguments()
    _, saved, partial = gpu.merge(inputs)
    whole = gpu.merge_backward(case.backward_arguments(saved, partial))
    backward = case.backward_arguments(saved, partial)
    ours = gpu.merge_backward(backward._replace(last_dtype=torch.float32, added_dtype=torch.bfloat16))
    assert torch.equal(ours.opens[-1], whole.opens[-1]) and torch.equal(ours.added, whole.opens[-1].bfloat16())
    ours = gpu.merge_backward(backward._replace(last_dtype=torch.bfloat16, added_dtype=torch.bfloat16))
    assert ours.added is None and torch.equal(ours.opens[-1], whole.opens[-1].bfloat16())


@pytest.mark.quick("9")
@pytest.mark.parametrize("k", [9, 32])
def test_one_pass_over_many_sources(k):
    check(Case(k, 2, 40, sealed=False, added=False))


@pytest.mark.quick("1-rms")
@pytest.mark.parametrize("k,norm", [(1, "rms"), (2, "none")])  # the interpreter adds a LayerNorm's two sums one by one
def test_rows_too_wide_for_query_and_weight_to_stay_in_registers(k, norm):
    check(Case(k, 2, 4104, norm=norm))


def test_too_many_open_sources_are_refused():
    with pytest.raises(ValueError, match=r"33 open sources .* at most 32"):
        gpu.merge(Case(33, 2, 8, sealed=False, added=False).arguments())


@pytest.mark.parametrize("k", [0, 2])
def test_no_tokens(k):
    case = Case(k, 0, 24)
    x, saved, _ = gpu.merge(case.arguments())
    assert x.shape == (0, 24)
    grads = gpu.merge_backward(case.backward_arguments(saved, None))
    assert grads.top.shape == (0,) and grads.output.shape == (0, 24) and len(grads.opens) == k
    assert not grads.weight.any() and (not k or not grads.query.any())


@pytest.mark.parametrize("k", [1, 3])
def test_rows_may_lie_apart_or_be_turned(k):
    case = Case(k, 5, 24)
    expected = gpu.merge(case.arguments())

    def apart(v):
        return torch.cat([v, v.new_full((len(v), 7), torch.nan)], 1)[:, : v.shape[1]]

    def turned(v):
        return v.t().contiguous().t()

    for change in (apart, turned):
        other = Case(k, 5, 24)
        other.opens, other.added, other.output = (
            [change(v) for v in case.opens],
            change(case.added),
            change(case.output),
        )
        other.top, other.total = (torch.stack([v, v], 1)[:, 0] for v in (case.top, case.total))
        actual = gpu.merge(other.arguments())
        assert all(torch.equal(a, b) for a, b in zip(flat(actual), flat(expected)) if b is not None)

        wanted = gpu.merge_backward(case.backward_arguments(expected[1], expected[2]))
        other.grad, other.carried = change(case.grad), [None if v is None else change(v) for v in case.carried]
        saved = expected[1]._replace(h=change(expected[1].h))
        actual = gpu.merge_backward(other.backward_arguments(saved, change(expected[2])))
        assert all(torch.equal(a, b) for a, b in zip(flat(actual), flat(wanted)) if b is not None)


def test_an_expanded_gradient_is_copied():
    case = Case(1, 3, 24)
    _, saved, partial = gpu.merge(case.arguments())
    case.grad = case.grad[:1, :1].expand(3, 24)
    actual = gpu.merge_backward(case.backward_arguments(saved, partial))
    case.grad = case.grad.contiguous()
    wanted = gpu.merge_backward(case.backward_arguments(saved, partial))
    assert all(torch.equal(a, b) for a, b in zip(flat(actual), flat(wanted)) if b is not None)


@pytest.mark.quick("rms")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_results_repeat_bit_for_bit(norm):
    case = Case(2, 1000 if ON_GPU else 11, 40, norm=norm, dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        _, saved, partial = results = gpu.merge(case.arguments())
        runs.append(flat([results, gpu.merge_backward(case.backward_arguments(saved, partial))]))
    assert all(torch.equal(a, b) for a, b in zip(*runs) if a is not None)


def test_a_read_of_one_source_returns_it_and_tells_the_query_nothing():
    case = Case(1, 4, 24, sealed=False, added=False, norm="none")
    x, saved, _ = gpu.merge(case.arguments())
    assert torch.equal(x, case.opens[0])
    grads = gpu.merge_backward(case.backward_arguments(saved, None))
    assert grads.query.abs().max() < 1e-4  # delta and <dh, v> are summed in one order
    torch.testing.assert_close(grads.opens[0], case.grad + case.carried[0])


@pytest.mark.parametrize("level", [-80.0, 80.0])
def test_large_logits_and_sources_of_very_different_size(level):
    case = Case(3, 4, 24)
    case.opens = [v * scale for v, scale in zip(case.opens, (1e4, 1.0, 1e-3))]
    case.query = case.query * 20
    case.top = case.top + level
    check(case)


@pytest.mark.parametrize("n", [1, 5, 32, 33, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_is_the_weighted_sum(n, dtype):
    case = Case(n, 3, 24, sealed=False, added=False, dtype=dtype, mixed=n == 5)
    weights = torch.rand(3, n, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = eager.mix([v.double() for v in case.opens], weights.double(), torch.float64)
    actual = gpu.mix(case.opens, weights, dtype)
    assert actual.dtype == dtype
    assert_as_exact(actual, eager.mix(case.opens, weights, dtype), exact, dtype)
    assert gpu.mix([v[:0] for v in case.opens], weights[:0], dtype).shape == (0, 24)


@pytest.mark.parametrize("row_bytes", [1024, 2**14, 2**16, 2**17, 2**20])
@pytest.mark.parametrize("warps", [1, 4, 8, 16])
def test_rows_that_wait_fit_in_shared_memory(warps, row_bytes):
    resident, stages = _residents(warps, row_bytes, shared_memory(DEVICE))
    assert resident >= 1 and stages != 2
    assert stages == 1 or resident * (stages - 1) * row_bytes < shared_memory(DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("width", [768, 896, 960, 1168, 1264, 1536, 2048, 2304, 4096, 7168, 16384])
@pytest.mark.parametrize("k,sealed,norm", [(0, True, "rms"), (1, True, "rms"), (1, True, "layer"), (9, False, "rms")])
def test_widths_of_real_models(k, sealed, norm, width, dtype):
    check(Case(k, 1031, width, sealed=sealed, added=sealed, norm=norm, dtype=dtype))
