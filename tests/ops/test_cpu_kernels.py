"""The C kernels against the plain arithmetic in fp64, function by function, in every combination of arguments."""

import itertools
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres import Norm
from attnres.ops import cpu, eager
from attnres.ops.backend import Call, MergeGradInputs, MergeInputs, ReadGradInputs, ReadInputs

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="no C compiler: the CPU kernels cannot be built")


class Draw:
    """Random tensors that are exact in bf16 too, so that the oracle sees the same numbers."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=FP32):
        return torch.randn(*shape, generator=self.generator).to(BF16).to(dtype)

    def mixed(self, count, *shape):
        """Alternating dtypes; every third a slice with rows further apart."""
        made = [self(*shape, dtype=(FP32, BF16)[i % 2]) for i in range(count)]
        return [torch.cat([v, v], 1)[:, : shape[1]] if i % 3 == 2 else v for i, v in enumerate(made)]

    def some(self, count, *shape):
        """Gradients so far: none, fp32 or bf16."""
        return [None if i % 3 == 1 else self(*shape, dtype=(FP32, None, BF16)[i % 3]) for i in range(count)]


def doubled(value):
    """The same call in fp64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Norm):
        return value._replace(weight=doubled(value.weight), bias=doubled(value.bias), out_dtype=torch.float64)
    if hasattr(value, "_fields"):
        return type(value)(*map(doubled, value))
    if isinstance(value, (list, tuple)):
        return [doubled(v) for v in value]
    return torch.float64 if isinstance(value, torch.dtype) else value


def flat(value):
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in flat(v)]
    return [value]


def agree(ours, exact, tolerance=3e-6):
    """Every tensor within rounding of the oracle's: that of fp32 sums, and half a unit of its own dtype."""
    ours, exact = flat(ours), flat(exact)
    assert len(ours) == len(exact)
    for a, e in zip(ours, exact):
        assert (a is None) == (e is None)
        if a is not None:
            assert a.shape == e.shape
            unit = 2**-8 if a.dtype == BF16 else 0.0
            assert (a.double() - e).abs().le(tolerance * (1 + e.abs().amax()) + unit * e.abs()).all()


def dtypes(*tensors):
    return [t if t is None else t.dtype for t in tensors]


@settings(max_examples=80)
@given(
    n=st.integers(1, 11),
    reads=st.integers(1, 10),
    tokens=st.integers(0, 70),
    width=st.sampled_from([16, 48, 112, 256]),
    dtype=st.sampled_from([FP32, BF16]),
    seed=st.integers(0, 100),
)
def test_phase_1_and_its_backward(n, reads, tokens, width, dtype, seed):
    draw = Draw(seed)
    sources, queries = draw.mixed(n, tokens, width), draw(reads, width) / width**0.5
    inputs = ReadInputs(queries, sources, EPS, dtype)
    sealed, exact = cpu.read_sealed(inputs), eager.read_sealed(doubled(inputs))
    assert dtypes(*sealed.outputs) == [dtype] * reads
    assert all(output.is_contiguous() for output in sealed.outputs)
    if tokens:
        agree(sealed, exact)
    grads, dtop = draw.mixed(reads, tokens, width), [draw(tokens) for _ in range(reads)]
    carried = draw.some(n, tokens, width)
    inputs = ReadGradInputs(queries, sources, sealed.inv_rms, sealed.logits, grads, dtop, carried)
    dqueries, dsources = cpu.read_sealed_backward(inputs)
    assert dtypes(*dsources) == dtypes(*sources)
    if tokens:
        agree((dqueries, dsources), eager.read_sealed_backward(doubled(inputs)), 4e-5)
    else:
        assert not dqueries.any()


NORMS = ["none", "rms", "plain rms", "layer", "biased rms"]


def make_norm(kind, draw, width, out_dtype):
    weight, bias = draw(width) + 1, draw(width)
    return {
        "none": None,
        "rms": Norm(weight, None, 1e-3, out_dtype=out_dtype),
        "plain rms": Norm(out_dtype=out_dtype),
        "layer": Norm(weight, bias, 1e-3, center=True, out_dtype=out_dtype),
        "biased rms": Norm(weight, bias, 1e-3, out_dtype=out_dtype),
    }[kind]


def check_merge(k, tokens, width, kind, dtype, out_dtype, has_added, has_output, seed):
    draw = Draw(seed)
    opens, query = draw.mixed(k, tokens, width), (draw(width) / width**0.5 if k else None)
    added = draw(tokens, width, dtype=(FP32, BF16)[seed % 2]) if has_added else None
    output = draw(tokens, width, dtype=(FP32, BF16)[seed // 2 % 2]) if has_output else None
    top, total = (draw(tokens), draw(tokens).abs() + 1) if has_output and k else (None, None)
    norm = make_norm(kind, draw, width, out_dtype)
    inputs = MergeInputs(opens, added, query, EPS, output, top, total, norm, dtype)
    x, kept, partial = cpu.merge(inputs)

    def named(saved):
        return saved.h, *saved.named(k, normed=norm is not None)

    # What is rounded on the way is compared by itself, then given to the oracle: it takes it for exact.
    if partial is not None:
        assert partial.dtype == dtype
        agree(partial, opens[-1].double() + added.double())
        opens = [*opens[:-1], partial]
        inputs = inputs._replace(opens=opens, added=None)
    _, exact, _ = eager.merge(doubled(inputs))
    h, rstd, *scalars = named(kept)
    exact_h, _, *exact_scalars = named(exact)
    agree((h, *scalars), (exact_h, *exact_scalars))
    like_x, like, _ = eager.merge(inputs)
    assert dtypes(x, *named(kept)) == dtypes(like_x, *named(like))
    if kind == "none":
        agree(x, h.double())
    else:
        exact_x, merged, _ = eager.merge(
            MergeInputs((), None, None, EPS, h.double(), None, None, doubled(norm), torch.float64)
        )
        agree((x, rstd), (exact_x, merged.named(0, normed=True).rstd))
    grad = draw(tokens, width, dtype=(FP32, BF16)[seed // 4 % 2])
    backward = MergeGradInputs(grad, draw.some(k, tokens, width), opens, query, norm, kept)
    ours = cpu.merge_backward(backward)
    agree(ours, eager.merge_backward(doubled(backward)), 4e-5)
    assert dtypes(*ours.opens) == dtypes(*opens)
    assert ours.output is None or ours.output.dtype == FP32


@settings(max_examples=120)
@given(
    k=st.integers(1, 7),
    tokens=st.integers(1, 70),
    width=st.sampled_from([16, 48, 112]),
    kind=st.sampled_from(NORMS),
    dtype=st.sampled_from([FP32, BF16]),
    out_dtype=st.sampled_from([None, FP32, BF16]),
    has_added=st.booleans(),
    has_output=st.booleans(),
    seed=st.integers(0, 100),
)
def test_a_merge_and_its_backward(k, tokens, width, kind, dtype, out_dtype, has_added, has_output, seed):
    k = k if has_output else max(k, 2)  # a read of one source has no gradient for its query but rounding
    check_merge(k, tokens, width, kind, dtype, out_dtype, has_added, has_output, seed)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_alone_and_its_backward(kind):
    for seed, (dtype, out_dtype) in enumerate(itertools.product((FP32, BF16), (None, FP32, BF16))):
        for output in range(2):
            check_merge(0, 37, 48, kind, dtype, out_dtype, False, True, 2 * output + seed % 2 + 4 * (seed % 3))


def test_one_pass_over_many_sources():
    check_merge(40, 33, 32, "rms", FP32, None, False, False, 0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_mixture_from_weights(dtype):
    draw = Draw(0)
    for n in range(1, 8):
        sources, weights = draw.mixed(n, 19, 48), draw(19, n)
        mixture = cpu.mix(sources, weights, dtype)
        assert mixture.dtype == dtype
        agree(mixture, eager.mix(*doubled((sources, weights)), torch.float64))


def test_a_sum_is_rounded_once():
    """Of an output in fp32, as a norm after a sublayer makes, and one in the stream's bf16."""
    generator = torch.Generator().manual_seed(0)
    before, added = torch.randn(2, 64, 32, generator=generator).unbind()
    partial = cpu.merge(MergeInputs([before], added.to(BF16), torch.ones(32), EPS, None, None, None, None, BF16))[2]
    assert torch.equal(partial, (before.double() + added.to(BF16).double()).to(BF16))


def test_no_tokens():
    empty, query = torch.empty(0, 32), torch.ones(32)
    norm = Norm(torch.ones(32), torch.ones(32))
    inputs = MergeInputs([empty], empty, query, EPS, empty, empty[:, 0], empty[:, 0], norm, FP32)
    x, saved, partial = cpu.merge(inputs)
    assert x.shape == saved.h.shape == partial.shape == (0, 32)
    grads = cpu.merge_backward(MergeGradInputs(empty, [None], [partial], query, norm, saved))
    assert not any(v.any() for v in (grads.query, grads.weight, grads.bias))
    assert cpu.mix([empty], torch.empty(0, 1), FP32).shape == (0, 32)


def test_strided_and_foreign_gradients_are_copied_once():
    draw = Draw(0)
    sources, queries = [draw(8, 32).t().contiguous().t(), draw(8, 32)], draw(2, 32)
    sealed = cpu.read_sealed(ReadInputs(queries, sources, EPS, FP32))
    grads = [torch.ones(()).expand(8, 32), draw(8, 32, dtype=torch.float16)]
    carried = [draw(8, 64)[:, ::2], draw(8, 32, dtype=torch.float16)]
    dtop = [torch.ones(()).expand(8), draw(8, 2)[:, 0]]
    inputs = ReadGradInputs(queries, sources, sealed.inv_rms, sealed.logits, grads, dtop, carried)
    agree(cpu.read_sealed_backward(inputs), eager.read_sealed_backward(doubled(inputs)), 2e-5)


def test_results_repeat_bit_for_bit_and_do_not_depend_on_where_a_row_is():
    draw = Draw(0)
    sources, queries = [draw(257, 48) for _ in range(5)], draw(3, 48)

    def run(sources):
        sealed = cpu.read_sealed(ReadInputs(queries, sources, EPS, FP32))
        dtop = list(sealed.top)
        return flat(
            [
                sealed,
                cpu.read_sealed_backward(
                    ReadGradInputs(queries, sources, sealed.inv_rms, sealed.logits, sealed.outputs, dtop, [None] * 5)
                ),
            ]
        )

    first = run(sources)
    assert all(torch.equal(a, b) for a, b in zip(first, run(sources)))
    assert all(torch.equal(a, b) for a, b in zip(first, run([torch.cat([s, s], 1)[:, 48:] for s in sources])))


def test_extreme_logits_and_nan_are_as_in_plain_torch():
    draw = Draw(0)
    sources, queries = [draw(6, 32) for _ in range(3)], draw(2, 32) * 80
    exact = eager.read_sealed(ReadInputs(*doubled((queries, sources)), EPS, torch.float64))
    sealed = cpu.read_sealed(ReadInputs(queries, sources, EPS, FP32))
    assert all((a - e).abs().max() < 1e-2 for a, e in zip(sealed.outputs, exact.outputs))
    sources[1][2, 5] = float("nan")
    sealed = cpu.read_sealed(ReadInputs(queries, sources, EPS, BF16))
    x, _, _ = cpu.merge(MergeInputs(sources, None, queries[0], EPS, None, None, None, None, BF16))
    for made in (*sealed.outputs, x):
        assert made[2].isnan().all() and made[[0, 1, 3, 4, 5]].isfinite().all()


def test_what_the_kernels_cannot_take_has_a_reason(monkeypatch):
    fits = torch.zeros(2, 32)
    assert cpu.why_not(Call([fits, fits.bfloat16()], FP32, [BF16])) is None
    for reason, call in {
        "this call in float64": ([fits.double()], torch.float64),
        "not float16": ([fits.half()], FP32),
        "make fp32 and bf16 vectors, not float16": ([fits], FP32, [torch.float16]),
        "width 40 is not a multiple of 16": ([fits, torch.zeros(2, 40)], FP32),
        "not on meta": ([fits.to("meta")], FP32),
    }.items():
        assert reason in cpu.why_not(Call(*call))
    monkeypatch.setattr(cpu, "load", lambda: None)
    assert cpu.why_not(Call([fits], FP32))


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize("instructions", ["x86-64-v3", "x86-64"])
def test_processors_with_narrower_vectors(instructions, tmp_path):
    """All of the above with eight and with four elements a vector, in a process with kernels for such a processor."""
    compiler = tmp_path / "compiler"
    replaced = f"s/-march=native/-march={instructions}/"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which(os.environ.get("CC", "cc"))} $(echo "$@" | sed {replaced})\n')
    compiler.chmod(0o700)
    environment = {**os.environ, "CC": str(compiler), "ATTNRES_CACHE": str(tmp_path / "cache")}
    others = ["-k", f"not {test_processors_with_narrower_vectors.__name__}"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", __file__, *others]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0 and "SKIPPED" not in process.stdout, process.stdout
    assert list((tmp_path / "cache" / "kernels").glob("*.so"))
