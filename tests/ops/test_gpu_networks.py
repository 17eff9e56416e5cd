"""Whole networks of depth reads on the Triton kernels: what plain torch makes of them, forward and backward."""

import re
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from attnres import Norm, depth_read, make_residual
from attnres.ops import apply_norm, dispatch, eager, explain, plain_torch
from attnres.ops.bank import Bank, Banks
from attnres.ops.gpu import kernels as gpu
from attnres.ops.gpu import launch, merge, replay, sealed
from attnres.ops.gpu.launch import Launch
from attnres.streams.banked import BankStream, start_stream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on(monkeypatch):
    """Choose a backend by module."""

    def choose(module):
        monkeypatch.setattr(dispatch, "_choose", lambda *a: (module.__name__, module, "in the test", False))

    return choose


def gradients(name, settings, recompute):
    g = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    residual = make_residual(name, 6, 32, **settings).to(DEVICE)
    residual.recompute_reads = recompute
    with torch.no_grad():
        residual.query.copy_(draw(7, 32))
    embedding, weights = draw(2, 3, 32).requires_grad_(), [draw(32, 32).requires_grad_() for _ in range(6)]
    norm = draw(32).requires_grad_()
    state = residual.start(embedding)
    for i, weight in enumerate(weights):
        x, state = residual.read(state, i, Norm(norm))
        state = residual.write(state, i, torch.tanh(x @ weight / 6))
    out = residual.finish(state, Norm(norm))
    leaves = [embedding, norm, *weights, residual.query, residual.gain]
    return [out, *torch.autograd.grad(out.pow(3).sum(), leaves)]


@pytest.mark.quick("block-settings0-*")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("name", "settings"), [("block", {"block_size": 3}), ("block", {"block_size": 1}), ("full", {"group": 2})]
)
def test_a_network_is_that_of_plain_torch(on, name, settings, recompute):
    on(gpu)
    ours = gradients(name, settings, recompute)
    on(eager)
    for a, b in zip(ours, gradients(name, settings, recompute), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="wrap_triton launches in the interpreter alone")
@pytest.mark.parametrize(("name", "settings"), [("block", {"block_size": 3}), ("full", {"group": 2})])
def test_kernels_of_pointers_alone_are_those_of_tuples(on, name, settings, monkeypatch):
    """What a compiler's graph holds, launched as it is: bit for bit."""
    on(gpu)
    expected = gradients(name, settings, False)
    for module in (launch, replay):
        monkeypatch.setattr(module, "is_traced", lambda: True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(name, settings, False), expected, strict=True))


@pytest.mark.parametrize("n", [2, 9, 33])
def test_a_single_read_is_that_of_plain_torch(on, n):
    sources = [torch.randn(5, 24, device=DEVICE, requires_grad=True) for _ in range(n)]
    query, gain = torch.randn(24, device=DEVICE, requires_grad=True), torch.rand(24, device=DEVICE, requires_grad=True)

    def made(module):
        on(module)
        h, weights = depth_read(sources, query, gain, return_weights=True)
        return [h, weights, *torch.autograd.grad(h.pow(2).sum(), [*sources, query, gain])]

    for a, b in zip(made(gpu), made(eager), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.quick("False")
@pytest.mark.parametrize("normed", [False, True])
def test_a_read_of_wide_vectors_takes_two_phases(normed, triton_on_a_cpu, monkeypatch):
    row = dispatch.KERNELS[DEVICE.type]
    launches, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, device: launches.append(self) or run(self, device))
    sources = [torch.randn(5, 24, device=DEVICE, requires_grad=True) for _ in range(9)]
    query, gain = torch.randn(24, device=DEVICE, requires_grad=True), torch.rand(24, device=DEVICE, requires_grad=True)
    norm = Norm(torch.rand(24, device=DEVICE)) if normed else None

    def read(width):
        monkeypatch.setitem(dispatch.KERNELS, DEVICE.type, row._replace(one_pass_width=width))
        launches.clear()
        h, weights = depth_read(sources, query, gain, norm=norm, return_weights=True)
        names = {launch.kernel.fn.__name__ for launch in launches}
        assert (explain(sources).schedule == "two phases") == any("read" in name for name in names) == (width < 24)
        return [h, weights, *torch.autograd.grad(h.pow(2).sum(), [*sources, query, gain])]

    for a, b in zip(read(23), read(24), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


class Moved(TorchDispatchMode):
    """Bytes of vectors that are read or written, by our launches and by torch's operations, and how many of each."""

    def __init__(self, tokens, width, sublayers):
        self.numel, self.bytes, self.counts, self.launches = tokens * width, 0, Counter(), []
        self.unit, self.operations = tokens * width * sublayers, 0

    def take(self, tensors):
        places = {(t.data_ptr(), t.dtype): t for t in tensors if torch.is_tensor(t) and t.numel() == self.numel}
        self.bytes += sum(t.nbytes for t in places.values())
        return len(places)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations += 1
        out = operation(*args, **(kwargs or {}))
        if operation.is_view or operation._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::_unsafe")):
            return out
        if operation._schema.name in ("aten::detach", "aten::is_same_size", "aten::ones_like", "aten::expand"):
            return out
        if self.take([*flat(args), *flat(out)]):
            self.counts[operation._schema.name] += 1
        return out

    def launch(self, launch, device):
        self.launches.append(launch)
        self.counts["launch"] += 1
        self.take(flat(list(launch.arguments.values())))


def flat(nest):
    return [leaf for part in nest for leaf in flat(part)] if isinstance(nest, (list, tuple)) else [nest]


@pytest.fixture
def triton_on_a_cpu(monkeypatch):
    """The row of CUDA's kernels for a CPU: what depends on the device is as there."""
    if not torch.cuda.is_available():
        monkeypatch.setitem(dispatch.KERNELS, "cpu", dispatch.KERNELS["cuda"])


def moved(name, settings, sublayers, monkeypatch):
    """Plan a step of identity sublayers under autocast, and do not run it: what forward and backward move."""
    tokens, width = 512, 64
    residual = make_residual(name, sublayers, width, read_scale="sum", **settings).to(DEVICE)  # "mean" looks at h once
    embedding = torch.zeros(tokens, width, device=DEVICE, requires_grad=True)
    norm = Norm(torch.ones(width, device=DEVICE, requires_grad=True), out_dtype=torch.bfloat16)
    ways = [Moved(tokens, width, sublayers) for _ in range(2)]
    monkeypatch.setattr(replay, "alike", lambda *_: None)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        monkeypatch.setattr(Launch, "run", lambda self, device: ways[0].launch(self, device))
        with ways[0]:
            state = residual.start(embedding)
            for i in range(sublayers):
                x, state = residual.read(state, i, norm)
                state = residual.write(state, i, x)
            out = residual.finish(state, norm)
    grad = torch.ones_like(out)
    monkeypatch.setattr(Launch, "run", lambda self, device: ways[1].launch(self, device))
    with ways[1]:
        out.backward(grad)
    return ways


MOVED = [
    ("block", {"block_size": 3}, (15.3, 32, 8, 224), (24.1, 34, 9, 255)),
    ("full", {}, (14.8, 29, 1, 215), (32.7, 29, 2, 280)),
]
"""A mechanism and its settings; forward's and backward's bytes, launches, torch's passes and operations at most."""


def test_the_pages_have_these_bytes_and_launches():
    folder = Path(__file__).parents[2] / "docs" / "explanation"
    for _, _, *ways in MOVED:
        bytes_, launches, passes, _ = (f"{forward} + {backward}" for forward, backward in zip(*ways, strict=True))
        rows = [line.split(" | ") for line in (folder / "kernels.md").read_text("utf-8").splitlines()]
        assert [bytes_, launches, f"{passes} |"] in [row[2::2] for row in rows]
        checked = (folder / "kernels_checked.md").read_text("utf-8")
        assert f"| {bytes_} |" in checked and re.search(rf"[|;] {re.escape(launches)}[ ;]", checked)


@pytest.mark.parametrize(("name", "settings", "forward", "backward"), MOVED)
def test_bytes_a_sublayer(name, settings, forward, backward, triton_on_a_cpu, monkeypatch):
    """For each element of a vector, at 24 sublayers under bf16 autocast: reads, norms and additions; our launches,
    torch's passes beside them, and all operations that the host makes. A norm and an addition alone, as of the standard
    residual, are 12 and 16."""
    for way, (most, launches, others, operations) in zip(
        moved(name, settings, 24, monkeypatch), (forward, backward), strict=True
    ):
        assert way.bytes / way.unit <= most + 0.05 and way.operations <= operations
        assert way.counts.pop("launch") <= launches and way.counts.total() <= others
        for made in way.launches:
            if "queries" in made.arguments:  # phase 1: bf16 alone, whose products are bf16's
                assert not made.constants["WIDE"] and not made.constants.get("CARRIED_WIDE")
                assert {source.dtype for source in made.arguments["sources"]} == {torch.bfloat16}


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "settings"), [("block", {"block_size": 3}), ("full", {"group": 3}), ("standard", {})])
def test_a_stream_in_bf16_has_no_vector_in_fp32(name, settings, stream, triton_on_a_cpu, monkeypatch):
    """From the embedding on, under autocast, where a bf16 source may also be one of an fp32 stream."""
    monkeypatch.setattr(Launch, "run", lambda self, device: None)
    monkeypatch.setattr(replay, "alike", lambda *_: None)
    residual = make_residual(name, 6, 32, read_scale="sum", **settings) if settings else make_residual(name, 6, 32)
    residual, norm = residual.to(DEVICE), torch.nn.RMSNorm(32).to(DEVICE)
    residual.stream_dtype = stream
    embedding, seen = torch.zeros(5, 32, device=DEVICE, requires_grad=True), set()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        made = start_stream(residual, embedding)
        for _ in range(6):
            seen.add(made.hidden_state().dtype)
            read = made.read(None)
            seen.add(read.dtype)
            made = made + read.bfloat16()
        seen.add(made.hidden_state().dtype)
        made.read(norm)
    assert seen == {stream}


@pytest.mark.parametrize(
    ("name", "settings", "most"), [("block", {"block_size": 3}, (104, 52)), ("full", {}, (94, 50))]
)
def test_the_host_s_work_a_sublayer(name, settings, most, triton_on_a_cpu, monkeypatch):
    """Calls of functions, Python's and C's, of a step whose plans are made: `benchmarks/host.py` has their time."""
    sublayers, width = 24, 64
    monkeypatch.setattr(Launch, "run", lambda self, device: None)
    monkeypatch.setattr(Launch, "started", lambda self, device: lambda *arguments: None)
    residual = make_residual(name, sublayers, width, read_scale="sum", **settings)
    embedding = torch.zeros(8, width, requires_grad=True)
    norms = [Norm(torch.ones(width, requires_grad=True), out_dtype=torch.bfloat16) for _ in range(sublayers + 1)]
    made = []

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            state = residual.start(embedding)
            for i in range(sublayers):
                x, state = residual.read(state, i, norms[i])
                state = residual.write(state, i, 2 * x)  # of x itself two gradients would be one tensor, planned anew
            made.append(residual.finish(state, norms[-1]))

    def backward():
        made.pop().sum().backward()

    for _ in range(2):
        forward()
        backward()
    counts = [calls(forward) / sublayers, calls(backward) / sublayers]
    assert counts[0] <= most[0] and counts[1] <= most[1], counts


def calls(function):
    """The calls that a function makes."""
    count = Counter()
    sys.setprofile(lambda frame, event, _: count.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return count["call"] + count["c_call"]


class Kernel:
    """Stands for a kernel of Triton's, and for what it compiles to."""

    arg_names = ("x", "y", "count", "D")

    def __init__(self):
        self.compiled, self.launched = 0, []

    def __getitem__(self, grid):
        def launch(*values, **named):
            self.launched.append((grid[0], *(values or [named[name] for name in self.arg_names])))
            self.compiled += bool(named)
            return self

        return launch


def test_a_kernel_is_looked_up_once_for_all_launches_alike(monkeypatch):
    """And anew where Triton compiles another one: for a dtype, an alignment, a number of another kind, a constant."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    kernel, vector = Kernel(), torch.zeros(64)

    def run(x, count=7, width=16, y=None, programs=3):
        Launch(kernel, programs, {"y": y, "x": x, "count": count}, {"D": width}, {"num_warps": 4}).run(vector.device)
        assert kernel.launched[-1] == (programs, x, y, count, width)

    for others in (
        [{"x": vector[16:]}, {"count": 9}, {"programs": 4}],
        [{"x": vector[1:]}, {"x": vector.bfloat16()}, {"x": (vector,)}, {"x": (vector, None)}, {"y": vector}],
        [{"count": 16}, {"count": 1}, {"count": 1 << 33}, {"width": 32}],
    ):
        before = kernel.compiled
        run(vector)
        assert kernel.compiled == max(before, 1)
        for change in others:
            run(**{"x": vector, **change})
        assert kernel.compiled - max(before, 1) == (0 if "programs" in others[-1] else len(others))


def test_a_norm_alone_is_torch_s_own_where_it_fits(triton_on_a_cpu, monkeypatch):
    """Rounded to a narrower dtype, of so few values that the host takes longer than one more pass."""
    kernels, own, made = dispatch.KERNELS[DEVICE.type], torch.rms_norm, []
    monkeypatch.setattr(torch, "rms_norm", lambda *args: made.append(args) or own(*args))
    h, weight = (draw.to(DEVICE).requires_grad_() for draw in (torch.randn(3, 32), torch.rand(32)))
    narrow = Norm(weight, out_dtype=torch.bfloat16)
    for norm, most, fits in (
        (Norm(weight), 1, True),
        (narrow, 96, True),
        (narrow, 95, False),
        (Norm(weight, center=True), 96, False),
        (Norm(), 96, False),
    ):
        monkeypatch.setitem(dispatch.KERNELS, DEVICE.type, kernels._replace(torch_norm=most))
        made.clear()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            x = apply_norm(h, norm)
        assert bool(made) == fits and x.dtype == (norm.out_dtype or h.dtype)
        with plain_torch():
            expected = apply_norm(h, norm)
        torch.testing.assert_close(x, expected, rtol=1e-2 if norm.out_dtype else 1e-5, atol=1e-5)
        for ours, exact in zip(*(torch.autograd.grad(y.square().sum(), h) for y in (x, expected)), strict=True):
            torch.testing.assert_close(
                ours, exact, rtol=2e-2 if norm.out_dtype else 1e-4, atol=2e-2 if norm.out_dtype else 1e-4
            )


def ours(net, embedding, weights, norm):
    state = net.start(embedding)
    for i, weight in enumerate(weights):
        x, state = net.read(state, i, norm)
        state = net.write(state, i, torch.tanh(x @ weight / 6))
    return net.finish(state, norm)


def eagerly(net, embedding, weights, norm):
    """The network as one writes it first in PyTorch, all vectors in bf16."""
    sources, partial = [embedding.bfloat16()], None

    def read(index):
        values = torch.stack(sources if partial is None else [*sources, partial])
        keys = F.rms_norm(values.float(), values.shape[-1:], net.gain[index], net.key_norm_eps)
        shares = (keys @ net.query[index]).softmax(0).to(values.dtype)
        h = torch.einsum("nt,ntd->td", shares, values)
        return F.rms_norm(h.float(), h.shape[-1:], norm.weight, norm.eps).to(h.dtype)

    for i, weight in enumerate(weights):
        output = torch.tanh(read(i) @ weight / 6)
        partial = output if partial is None else partial + output
        if i + 1 in net.bounds or net.name == "full":
            sources.append(partial)
            partial = None
    return read(len(weights))


def errors(residual, network=ours, reads=nullcontext, seeds=3):
    """Return the relative distances from fp64 of a network's output and gradients, a row for each draw."""
    distances, (count, width) = [], residual.query.shape
    for seed in range(seeds):
        g = torch.Generator().manual_seed(seed)
        shapes = (4, width), (width,), *[(width, width)] * (count - 1), (4, width)
        draws = [torch.randn(*shape, generator=g) for shape in shapes]
        made = []
        for exact in (True, False):
            dtype = torch.float64 if exact else torch.float32
            embedding, gain, *weights, upstream = (draw.to(DEVICE, dtype).requires_grad_() for draw in draws)
            net = residual.to(DEVICE, dtype)
            norm = Norm(gain, out_dtype=None if exact else torch.bfloat16)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not exact), nullcontext() if exact else reads():
                out = (ours if exact else network)(net, embedding, weights, norm)
            leaves = [embedding, gain, *weights, net.query, net.gain]
            made.append([out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))])
        distances.append([((a - e).norm() / e.norm()).item() for e, a in zip(*made, strict=True)])
    return torch.tensor(distances)


@pytest.mark.long
@pytest.mark.usefixtures("bf16_of_a_gpu")
@pytest.mark.parametrize(("name", "settings"), [("block", {"block_size": 3}), ("full", {"group": 3})])
def test_gradients_under_autocast_are_as_near_fp64_as_plain_torch_s(name, settings, triton_on_a_cpu):
    """As the same formulas of the same sources; and, in the mean of twelve draws, as an eager network's in bf16."""
    residual = make_residual(name, 6, 32, **settings)
    with torch.no_grad():
        residual.query.copy_(torch.randn(7, 32, generator=torch.Generator().manual_seed(9)) / 2)
    made, plainly = errors(residual), errors(residual, reads=plain_torch)
    assert (made.square().mean(0) / plainly.square().mean(0)).sqrt().max() < 1.1
    many = {network: errors(residual, network, plain_torch, seeds=12) for network in (ours, eagerly)}
    assert (many[ours] / many[eagerly]).log().mean().exp() < 1


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are counted in the interpreter")
def test_a_plan_is_made_once_for_inputs_alike(on, monkeypatch):
    """And anew for another shape; the results are those of plans made each time, bit for bit."""
    on(gpu)
    planned, plans = [], (merge.plan_merge, merge.plan_backward, sealed.plan_read, sealed.plan_backward)
    for module, plan in zip((merge, merge, sealed, sealed), plans, strict=True):
        monkeypatch.setattr(module, plan.__name__, lambda *a, plan=plan: planned.append(plan) or plan(*a))
    replay._REPLAYS.clear()
    first = gradients("block", {"block_size": 3}, False)
    count = len(planned)
    again = gradients("block", {"block_size": 3}, False)
    assert 0 < count < 16 and len(planned) == count  # of seven reads and their backward
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(replay, "alike", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(gradients("block", {"block_size": 3}, False), first, strict=True))
    assert len(planned) > 2 * count


def run_in_bank(residual, embedding, outputs, norm):
    """The reads of a pass without gradients, whose sublayers write these outputs."""
    reads, stream = [], start_stream(residual, embedding)
    assert isinstance(stream, BankStream)
    for output in outputs:
        reads.append(stream.read(norm))
        stream = stream + output
    return [*reads, stream.read(norm)]


def general(residual, embedding, outputs, norm):
    reads, state = [], residual.start(embedding)
    for i, output in enumerate(outputs):
        x, state = residual.read(state, i, Norm(norm.weight))
        reads.append(x)
        state = residual.write(state, i, output)
    return [*reads, residual.finish(state, Norm(norm.weight))]


@pytest.mark.quick("block-*")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are counted in the interpreter")
@pytest.mark.parametrize(
    ("name", "settings", "phases"),
    [
        ("block", {"block_size": "2+2+4"}, 1),
        ("standard", {}, 0),
        ("full", {"group": 4}, 1),
        ("cumulative", {"block_size": 3}, 0),
        ("boundary", {"block_size": 2}, 0),
    ],
)
@torch.no_grad()
def test_a_bank_takes_memory_for_its_reads_alone(name, settings, phases, triton_on_a_cpu, monkeypatch):
    """A pass whose plans are made takes memory for each read, twice where that is a source itself, and for nothing
    else; its sums and phase 1's outputs are where those of the pass before were. No launch writes what only a backward
    needs. What no later read needs is poisoned before each read."""
    sublayers, width, generator = 8, 16, torch.Generator().manual_seed(0)
    residual = make_residual(name, sublayers, width, **settings)
    for parameter in residual.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) / 2)
    norm = torch.nn.RMSNorm(width)
    norm.weight.copy_(torch.rand(width, generator=generator))
    embedding, *outputs = torch.randn(1 + sublayers, 1, 2, width, generator=generator)
    with plain_torch():
        expected = general(residual, embedding, outputs, norm)
    read, taken, places = Bank.read, [], []

    def poisoned(bank):
        program, index = bank.program, bank.index
        needed = {row for step in program.steps[index:] for row in (*step.rows, step.before)}
        for row, (memory, _) in bank._sums.items():
            if index == 0 or row not in needed:
                memory.fill_(torch.nan)
        for memory in bank._phase1_of.values() if index in bank._groups else ():
            for output in memory.outputs:
                output.fill_(torch.nan)
        places.append({memory.data_ptr() for memory, _ in bank._sums.values()})
        with Taken() as mode:
            x = read(bank)
        taken.append(mode.count)
        assert x.data_ptr() not in places[-1]
        return x

    monkeypatch.setattr(Bank, "read", poisoned)
    dispatched = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setitem(replay.ALLOCATORS, "cpu", dispatched)
    for ours, theirs in zip(run_in_bank(residual, embedding, outputs, norm), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    replay._REPLAYS.clear()
    launches, replayed = [], []
    monkeypatch.setattr(Launch, "run", lambda self, device: launches.append(self))
    monkeypatch.setattr(Launch, "started", lambda self, device: lambda *arguments: replayed.append(self.kernel))
    for _ in range(2):
        before = len(replayed)
        run_in_bank(residual, embedding, outputs, norm)
    (bank,) = residual.banks._waiting
    kept = [step.keeps is not None for step in bank.program.steps]
    assert taken[-len(kept) :] == [1 + keeps for keeps in kept]
    assert any(kept) == (name == "boundary") and len(bank._groups) == phases
    assert all(one == places[0] for one in places)
    twice = 4 if name == "cumulative" else 0  # merges of one row as two sources, which are planned each time
    assert len(replayed) - before == len(kept) + phases - twice
    for made in launches:
        assert all(made.arguments.get(name) is None for name in ("scalars_out", "logits", "inv_rms"))
        assert any(kept) or made.arguments.get("h_out") is None


class Taken(TorchDispatchMode):
    """How often memory for a vector is taken."""

    def __init__(self):
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if not operation.is_view and torch.is_tensor(out) and "out" not in (kwargs or {}):
            self.count += not any(torch.is_tensor(arg) and arg.data_ptr() == out.data_ptr() for arg in args)
        return out


def test_memory_of_a_bank_is_used_again_on_its_stream_alone(monkeypatch):
    """And a pass that a graph records keeps its own: replays write there as long as the graph is there."""
    where = {"stream": 7, "capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: where["capturing"])
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": where["stream"]})
    )
    residual = make_residual("standard", 2, 32)
    residual.explain(torch.zeros(1, 32), training=False)
    banks, program, embedding = Banks(), residual.program, OnCuda()

    def passed(**change):
        where.update(change)
        bank = banks.take(Bank, eager, program, embedding, torch.float32)
        bank.embedding = embedding
        banks.put(bank)
        return bank

    first = passed()
    assert passed() is first and passed(stream=8) is not first and passed(stream=7) is first
    captured = [passed(capturing=True) for _ in range(2)]
    assert captured[0] is not captured[1] and first not in captured and passed(capturing=False) is first


class OnCuda:
    """What a bank asks an embedding on CUDA."""

    is_cuda, device, dtype, shape = True, torch.device("cuda", 0), torch.float32, torch.Size([1, 32])

    def numel(self):
        return 32
