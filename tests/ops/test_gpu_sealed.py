"""Triton's phase 1 is the plain one, forward and backward: in Triton's interpreter, or on a GPU if there is one."""

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.ops import eager
from attnres.ops.backend import ReadGradInputs, ReadInputs
from attnres.ops.gpu import replay, sealed

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
EPS = 1e-6
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("bf16_of_a_gpu")


def hold(patch, most):
    """Let programs of up to eight reads hold so many values a thread in registers, in every dtype, both ways."""
    replay._REPLAYS.clear()
    for key in sealed.HELD:
        patch.setitem(sealed.HELD, key, ((8, most, 16),))


@pytest.fixture
def tiles(monkeypatch):
    """Tiles of several tokens, for any number of reads."""
    monkeypatch.setattr(sealed, "FEW", 0)
    hold(monkeypatch, 0)


@pytest.fixture(params=["tiles", "held"])
def way(request, monkeypatch):
    """Tiles, or all sources of a token in registers, in every dtype, with one exchange for four sums."""
    if request.param == "tiles":
        request.getfixturevalue("tiles")
    else:
        hold(monkeypatch, 1 << 20)
        held = sealed._held

        def of_several_warps(*shape, **way):
            found = held(*shape, **way)
            return found and (found[0] | {"TOGETHER": 4}, *found[1:])

        monkeypatch.setattr(sealed, "_held", of_several_warps)


class Case:
    """S reads over n sources: source j has dtypes[j], the last of them if there are fewer; so has the stream."""

    def __init__(self, n, reads, tokens, width, dtypes=(FP32,), carried="some", scale=0.3, seed=0):
        g = torch.Generator().manual_seed(seed)

        def draw(*shape, to=FP32):
            return torch.randn(*shape, generator=g).to(DEVICE, to)

        self.dtype = dtypes[-1]
        of = [dtypes[min(j, len(dtypes) - 1)] for j in range(n)]
        self.sources = [draw(tokens, width, to=dtype) for dtype in of]
        self.queries = draw(reads, width) * scale
        self.grads = [draw(tokens, width, to=self.dtype) for _ in range(reads)]
        self.dtop = [draw(tokens) for _ in range(reads)]
        wanted = {"none": lambda j: False, "some": lambda j: j % 3 != 1, "all": lambda j: True, "fp32": lambda j: True}
        self.carried = [
            draw(tokens, width, to=FP32 if carried == "fp32" else dtype) if wanted[carried](j) else None
            for j, dtype in enumerate(of)
        ]

    def run(self, backend, dtype=None):
        """All results of both functions: as they are called, or in one dtype throughout."""

        def to(v):
            return v if v is None or dtype is None else v.to(dtype)

        queries, sources = to(self.queries), [to(v) for v in self.sources]
        result = backend.read_sealed(ReadInputs(queries, sources, EPS, dtype or self.dtype))
        dqueries, dsources = backend.read_sealed_backward(
            ReadGradInputs(
                queries,
                sources,
                result.inv_rms,
                result.logits,
                [to(v) for v in self.grads],
                [to(v) for v in self.dtop],
                [to(v) for v in self.carried],
            )
        )
        named = {f"output {i}": output for i, output in enumerate(result.outputs)}
        named |= result._asdict() | {"dqueries": dqueries}
        del named["outputs"]
        return named | {f"dsource {j}": grad for j, grad in enumerate(dsources)}

    def check(self):
        """The error against fp64 is not above that of plain torch, and shapes and dtypes are the same."""
        exact, plain, ours = self.run(eager, torch.float64), self.run(eager), self.run(sealed)
        assert list(ours) == list(exact)
        for name, value in ours.items():
            assert (value.shape, value.dtype) == (plain[name].shape, plain[name].dtype), name
            error, of_plain = ((v.double() - exact[name]).norm() for v in (value, plain[name]))
            # Differences of order one cancel in some of these: an absolute error of fp32 rounding is allowed.
            tiny = 2e-6 * (1 + exact[name].square().mean().sqrt()) * value.numel() ** 0.5
            assert error <= 1.2 * of_plain + tiny, f"{name}: {error} against {of_plain}"
        return ours


DTYPES = {
    "fp32": (FP32,),
    "bf16": (BF16,),
    "fp16": (FP16,),
    "fp32_embedding": (FP32, BF16),
    "three_dtypes": (BF16, FP16, FP32, BF16),
}


@pytest.mark.long
@settings(max_examples=12 if not ON_GPU else 200)
@given(
    n=st.integers(1, 7),
    reads=st.integers(1, 6),
    tokens=st.integers(1, 14),
    width=st.sampled_from([1, 7, 16, 40, 72]),
    dtypes=st.sampled_from(list(DTYPES.values())),
    carried=st.sampled_from(["none", "some", "all", "fp32"]),
    few=st.booleans(),
    held=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_small_shape(n, reads, tokens, width, dtypes, carried, few, held, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed, "FEW", 256 if few else 0)
        hold(patch, 1 << 20 if held else 0)
        Case(n, reads, tokens, width, dtypes, carried, seed=seed).check()


@pytest.mark.quick("*-1-bf16", "*-2-fp32", "tiles-9-bf16")
@pytest.mark.parametrize("dtypes", [(FP32,), (BF16,)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_any_number_of_sources(n, dtypes, way):
    Case(n, 3, 5, 40, dtypes).check()


@pytest.mark.long
@pytest.mark.parametrize(("n", "dtypes"), [(16, (FP32,)), (17, (BF16,)), (130, (BF16,))], ids=["16", "17", "130"])
def test_many_sources(n, dtypes, way):
    Case(n, 2, 3, 24, dtypes).check()


@pytest.mark.quick("*-1", "*-9")
@pytest.mark.parametrize("reads", [1, 4, 9, 24, 130])
def test_any_number_of_reads(reads, way):
    Case(3, reads, 5, 40).check()


@pytest.mark.quick("tiles-three_dtypes", "held-bf16")
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_dtypes_and_a_ragged_last_tile(dtypes, way):
    Case(4, 3, 19, 40, dtypes).check()


@pytest.mark.long
@pytest.mark.parametrize("reads", [2, 24], ids=["one_kernel", "two_kernels"])
def test_gradients_of_queries_are_summed_over_many_tiles(reads, tiles, monkeypatch):
    """Programs walk over several tiles, and add their sums to what they have, or leave them to a second kernel."""
    monkeypatch.setattr(sealed, "multiprocessors", lambda device: 2)
    case = Case(3, reads, 90 if reads == 2 else 20, 40)
    launches, _ = sealed.plan_backward(
        ReadGradInputs(
            case.queries,
            case.sources,
            torch.ones(len(case.dtop[0]), 3),
            torch.ones(len(case.dtop[0]), 3, reads),
            case.grads,
            case.dtop,
            case.carried,
        )
    )
    assert len(launches) == (1 if reads == 2 else 2)
    assert launches[0].arguments["tiles"] > 4
    case.check()


@pytest.mark.long
def test_gradients_of_queries_are_summed_over_the_tokens_of_a_program(monkeypatch):
    monkeypatch.setattr(sealed, "multiprocessors", lambda device: 1)
    monkeypatch.setitem(sealed.HELD, (True, True), ((8, 80, 4),))
    case = Case(3, 3, 30, 40)
    kept = sealed.read_sealed(ReadInputs(case.queries, case.sources, EPS, FP32))
    launches, _ = sealed.plan_backward(
        ReadGradInputs(case.queries, case.sources, kept.inv_rms, kept.logits, case.grads, case.dtop, case.carried)
    )
    assert [launch.programs for launch in launches] == [4]
    case.check()


def test_rows_of_any_stride(way):
    case = Case(5, 2, 6, 24)

    def spread(v, gap):
        wide = torch.full((v.shape[0], v.shape[1] + gap), torch.nan, device=v.device, dtype=v.dtype)
        wide[:, gap:] = v
        return wide[:, gap:]

    expected = case.run(sealed)
    case.sources = [spread(v, gap) for gap, v in enumerate(case.sources)]
    case.grads = [spread(v, 8) for v in case.grads]
    case.carried = [v if v is None else spread(v, 2 * j) for j, v in enumerate(case.carried)]
    case.sources[2] = case.sources[2].t().contiguous().t()  # no unit stride along d
    for name, value in case.run(sealed).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def test_one_gradient_for_all_tokens(way):
    case = Case(3, 2, 6, 24)
    case.grads = [v[:1].expand(6, 24) for v in case.grads]
    case.dtop = [v[:1].expand(6) for v in case.dtop]
    case.check()


@pytest.mark.quick("tiles-fp32", "held-bf16")
@pytest.mark.parametrize("dtypes", [(FP32,), (BF16,)], ids=["fp32", "bf16"])
def test_large_logits_and_unequal_norms(dtypes, way):
    case = Case(4, 3, 6, 64, dtypes)
    case.sources = [v * 10.0 ** (2 * j - 4) for j, v in enumerate(case.sources)]
    direction = case.sources[1][0].float()
    case.queries[0] = direction / direction.norm() * 10  # against the rms norm, times 8: a logit of 80 and one of -80
    case.sources[2][0] = -case.sources[1][0]
    ours = case.check()
    assert ours["logits"][0, :, 0].amax() > 79 and ours["logits"][0, :, 0].amin() < -79
    assert all(value.isfinite().all() for value in ours.values())


@pytest.mark.quick("tiles-2")
@pytest.mark.parametrize("reads", [2, 24])
def test_results_repeat_bit_for_bit(reads, way):
    case = Case(3, reads, 30 if reads == 2 else 12, 40, (BF16,))
    first, again = case.run(sealed), case.run(sealed)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.quick("tiles-source-nan", "tiles-grad-inf")
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, of which the interpreter is made
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["source", "grad"])
def test_a_token_that_is_not_finite_does_not_spoil_its_neighbours(where, bad, way):
    case = Case(3, 2, 9, 40)
    expected = case.run(sealed)
    (case.sources if where == "source" else case.grads)[1][4, 7] = bad
    for name, value in case.run(sealed).items():
        if name.startswith(("output", "dsource")):
            others = torch.arange(9, device=value.device) != 4
            torch.testing.assert_close(value[others], expected[name][others], msg=name)
            assert value[others].isfinite().all(), name
            if name.startswith("dsource"):
                assert not value[4].isfinite().all(), name


def test_a_read_of_one_source_is_that_source():
    case = Case(1, 2, 3, 40, (BF16,))
    case.dtop = [torch.zeros_like(v) for v in case.dtop]
    case.grads = [torch.zeros_like(v) for v in case.grads]
    ours = case.run(sealed)
    assert torch.equal(ours["output 0"], case.sources[0]) and torch.equal(ours["output 1"], case.sources[0])
    assert not ours["dqueries"].any() and torch.equal(ours["dsource 0"], case.carried[0])


def test_no_tokens():
    for name, value in Case(3, 2, 0, 16).run(sealed).items():
        assert value.shape == Case(3, 2, 0, 16).run(eager)[name].shape
        assert not value.any(), name


def test_too_many_sources_or_reads_are_refused():
    with pytest.raises(ValueError, match="1 to 256 sources, got 257"):
        Case(257, 1, 1, 8).run(sealed)
    with pytest.raises(ValueError, match="1 to 256 reads, got 257"):
        Case(1, 257, 1, 8).run(sealed)


def test_each_output_and_gradient_has_memory_of_its_own():
    case = Case(4, 3, 5, 16)
    ours = case.run(sealed)
    vectors = [value for name, value in ours.items() if name.startswith(("output", "dsource"))]
    assert len({v.untyped_storage().data_ptr() for v in vectors}) == 7
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in vectors)
