"""The `attnres::` operators: what torch.library checks of them, and that they are the backends they stand for."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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
    if opens and (norm or not sealed or dtype == torch.float32):
        least = registered._merge(arguments._replace(saves="least"))
        assert not least[1].numel()  # h, which is made again for a backend that wants it
        check(registered._merge, arguments._replace(saves="least"))
        again = inputs._replace(saved=saved._replace(h=None), dtype=dtype, output=phase1[0])
        check(registered._merge_backward, again)
        for a, e in zip(registered._merge_backward(again), registered._merge_backward(inputs), strict=True):
            torch.testing.assert_close(a, e, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    if pending:
        narrow = registered.merge_backward(inputs._replace(last_dtype=torch.float32, added_dtype=torch.bfloat16))
        assert narrow.opens[-1].dtype == torch.float32 and narrow.added.dtype == torch.bfloat16
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


# A training step as a compiler's backend is handed it: forward and backward, the kernels as they are launched on CUDA.
GRAPHS = """
import sys

sys.path.insert(0, sys.argv[1])
import contextlib
import json
import warnings
from collections import Counter
from unittest import mock

import torch
from host import on_a_stub
from torch._dynamo.backends.common import aot_autograd

from attnres import Norm, make_residual
from attnres.ops import gpu
from attnres.ops.dispatch import KERNELS

warnings.simplefilter("ignore")


def run(residual, embedding, layers, gain):
    norm = Norm(gain, out_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        state = residual.start(embedding)
        for index, layer in enumerate(layers):
            x, state = residual.read(state, index, norm)
            state = residual.write(state, index, x @ layer)
        return residual.finish(state, norm).float().sum()


counts, given, ways = {}, set(), contextlib.ExitStack()
driver = ways.enter_context(on_a_stub())  # one for all cases: a compiled kernel keeps its own
of_block = {"num_blocks": 2}
for case, name, settings, few in (
    ("block, few", "block", of_block, gpu.KERNELS.few_compiled),
    ("block", "block", of_block, {}),
    ("full", "full", {}, {}),
):
    found = []

    def keep(graph, example):
        given.update(name for node in graph.graph.nodes for name in node.kwargs.get("kwargs", ()))
        found.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    torch._dynamo.reset()
    residual = make_residual(name, 6, 64, read_scale="sum", **settings)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in [(1, 8, 64), *[(64, 64)] * 6, (64,)]]
    compiled = torch.compile(run, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    made = driver.launches
    with mock.patch.dict(KERNELS, {"cpu": gpu.KERNELS._replace(few_compiled=few)}):
        compiled(residual, leaves[0], leaves[1:-1], leaves[-1]).backward()
    counts[case] = [*found, driver.launches - made]
print(json.dumps([counts, sorted(given)]))
"""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_compiler_is_given_triton_kernels_and_no_operator_of_ours(tmp_path):
    """A process of its own: interpreted kernels are in no graph."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    folder = Path(__file__).parents[2] / "benchmarks"
    command = [sys.executable, "-c", GRAPHS, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    counts, given = json.loads(done.stdout.splitlines()[-1])
    # As in eager steps, a backward makes h again, and writes the gradient of an output in the output's own dtype.
    assert "h_out" not in given and {"doutput", "dadded"} <= set(given)
    for name, (*graphs, launches) in counts.items():
        assert len(graphs) == 2, name  # forward and backward
        assert not [target for graph in graphs for target in graph if "attnres" in target], name
        kernels = [graph["triton_kernel_wrapper_functional"] for graph in graphs]
        assert min(kernels) > 0 and launches == sum(kernels), name


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_what_a_kernel_calls_has_a_name_of_its_own():
    """Inductor copies a kernel and all functions that it calls into one module, by their names."""
    from attnres.ops.gpu import merge_kernels, sealed_kernels, streams_kernels, token_kernels

    def called(function, names):
        for name in function.fn.__code__.co_names:
            value = function.fn.__globals__.get(name)
            if hasattr(value, "fn") and names.setdefault(name, value) is not value:
                raise AssertionError(f"{name} of {value.fn.__module__} and of {names[name].fn.__module__}")
            if hasattr(value, "fn"):
                called(value, names)
        return names

    kernels = {
        name: value
        for module in (merge_kernels, sealed_kernels, streams_kernels, token_kernels)
        for name, value in vars(module).items()
        if hasattr(value, "fn") and not name.startswith("_")
    }
    assert {"read_token", "merge_row", "read_backward"} <= kernels.keys()
    assert {"_load", "_load_tile"} <= called(kernels["read_token"], {}).keys()
    for kernel in kernels.values():
        called(kernel, {})
