"""The `attnres::` operators: what torch.library checks of them, and that they are the backends they stand for."""

import pytest
import torch

from attnres import Norm
from attnres.ops import eager, registered
from attnres.ops.backend import MergeGradInputs, MergeInputs, ReadGradInputs, ReadInputs

CHECKS = ("test_schema", "test_faketensor")
TOKENS, WIDTH = 6, 32


def check(operator, inputs):
    """Let torch.library check an operator on the values of a record."""
    values = [reach(inputs, path) for path in operator.paths]
    torch.library.opcheck(operator.operator, tuple(values), test_utils=CHECKS)


def reach(value, path):
    for place in path:
        value = None if value is None else value[place]
    return value


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_phase_1(backend, dtype):
    queries, sources = draw(3, WIDTH), [draw(TOKENS, WIDTH, dtype=dtype) + i for i in range(4)]
    check(registered._read_sealed, ReadInputs(queries, sources, 1e-6, torch.float32))
    ours = registered.read_sealed(ReadInputs(queries, sources, 1e-6, torch.float32))
    expected = eager.read_sealed(ReadInputs(queries, sources, 1e-6, torch.float32))
    for a, b in zip([*ours.outputs, *ours[1:]], [*expected.outputs, *expected[1:]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    grads, dtop = [draw(TOKENS, WIDTH) * i for i in range(3)], [draw(TOKENS)] * 3
    carried = [None, sources[1], None, sources[0]]
    arguments = (queries, sources, ours.inv_rms, ours.logits, grads, dtop)
    check(registered._read_sealed_backward, ReadGradInputs(*arguments, carried))
    (dq, dsources), (dq_expected, expected) = (
        module.read_sealed_backward(ReadGradInputs(*arguments, carried)) for module in (registered, eager)
    )
    torch.testing.assert_close(dq, dq_expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(dsources, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
@pytest.mark.parametrize("opens, pending, sealed", [(0, 0, 1), (1, 0, 1), (1, 1, 1), (2, 1, 0), (3, 0, 0)])
def test_merge(backend, dtype, kind, opens, pending, sealed):
    weight, bias = draw(WIDTH), draw(WIDTH)
    norm = {"none": None, "rms": Norm(weight), "layer": Norm(weight, bias, 1e-5, True)}[kind]
    values = [draw(TOKENS, WIDTH, dtype=dtype) - i for i in range(opens)]
    added = draw(TOKENS, WIDTH, dtype=dtype) * 2 if pending else None
    query = draw(WIDTH) if opens else None
    phase1 = (draw(TOKENS, WIDTH), draw(TOKENS), draw(TOKENS).abs() + 1) if sealed else (None, None, None)
    arguments = MergeInputs(values, added, query, 1e-6, *phase1, norm and norm._replace(out_dtype=dtype), dtype)
    if norm or opens:
        check(registered._merge, arguments)
    (x, saved, partial), expected = registered.merge(arguments), eager.merge(arguments)
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    parts = [(one.h, *one.named(opens, normed=norm is not None)) for one in (saved, expected[1])]
    for a, e in zip((x, *parts[0], partial), (expected[0], *parts[1], expected[2]), strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, **tolerance)
    scored = values if partial is None else [*values[:-1], partial]
    carried = [None if j else torch.ones(TOKENS, WIDTH, dtype=dtype) for j in range(opens)]
    inputs = MergeGradInputs(draw(TOKENS, WIDTH, dtype=dtype), carried, scored, query, norm, saved)
    check(registered._merge_backward, inputs)
    back = [m.merge_backward(inputs) for m in (registered, eager)]
    for a, e in zip(*([g.output, g.top, *g.opens, g.query, g.weight, g.bias] for g in back), strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_mix(backend):
    sources, weights = [draw(TOKENS, WIDTH) * i for i in range(3)], draw(TOKENS, 3)
    check(registered._mix, registered.MixInputs(sources, weights, torch.float32))
    expected = torch.einsum("tn,ntd->td", weights, torch.stack(sources))
    torch.testing.assert_close(registered.mix(sources, weights, torch.float32), expected)
