"""Reads on a device against the fp64 oracle: every width, count and dtype, every gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnres import Norm, depth_read, depth_read_reference
from attnres.ops import apply_norm, explain, merge, read_sealed

EPS, NORM_EPS = 1e-6, 1e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = [896, 960, 1168, 1264, 1536, 2304, 7168]


@dataclass(frozen=True)
class Case:
    """`reads` reads over `sources` sealed sources; from the second read on there are open sources besides.

    Attributes:
        norm: "rms", "layer" or "none", after each read.
        opened: "summed" (Block: one open source, the partial sum) or "apart" (Full: one for each earlier sublayer).
    """

    width: int
    sources: int
    dtype: str = "bf16"
    reads: int = 4
    tokens: int = 131
    norm: str = "rms"
    opened: str = "summed"

    def __str__(self) -> str:
        return f"d{self.width}-n{self.sources}-S{self.reads}-T{self.tokens}-{self.dtype}-{self.norm}-{self.opened}"


def _on_a_gpu() -> list[Case]:
    """Not the whole product, which would take hours to compile: each axis in full, with the others in the middle."""
    cases = [Case(width, 9, dtype) for width in WIDTHS for dtype in DTYPES]
    cases += [Case(width, 3) for width in WIDTHS]
    cases += [Case(1168, n) for n in range(1, 17)]
    cases += [Case(width, 130, dtype, tokens=37) for width in (1168, 7168) for dtype in DTYPES]
    cases += [Case(1264, 5, dtype, norm=norm) for dtype in DTYPES for norm in ("layer", "none")]
    cases += [Case(2304, 5, dtype, reads=6, opened="apart") for dtype in DTYPES]
    cases += [Case(1536, 4, reads=reads) for reads in (1, 2, 3, 5, 8, 16, 24, 32)]
    cases += [Case(1536, 4, tokens=tokens) for tokens in (1, 2, 3, 7, 15, 16, 17, 63, 65, 1000, 8193)]
    cases += [Case(width, 4, dtype) for width in (8, 33, 1001, 4096, 16384) for dtype in ("bf16", "fp32")]
    return list(dict.fromkeys(cases))


def _on_a_cpu() -> list[Case]:
    small = Case(40, 3, "fp32", tokens=64)
    axes = [{"dtype": "bf16"}, {"dtype": "fp16"}, {"norm": "layer"}, {"norm": "none"}, {"sources": 1}, {"sources": 9}]
    axes += [{"opened": "apart"}, {"reads": 1}, {"width": 33}, {"tokens": 300, "sources": 130}]
    return [small, *(replace(small, **axis) for axis in axes)]


CASES = [pytest.param("cpu", case, id=f"cpu-{case}") for case in _on_a_cpu()]
CASES += [pytest.param("cuda", case, id=f"cuda-{case}", marks=pytest.mark.gpu) for case in _on_a_gpu()]
ONE_PASS = [c for c in CASES if c.values[1].reads == 4 and c.values[1].opened == "summed"]


def leaves_of(case: Case, device: str, seed: int = 0) -> dict[str, list[Tensor]]:
    """Inputs by kind. The last read of a block has one output fewer before it than there are reads."""
    g = torch.Generator(device).manual_seed(seed)
    dtype, d = DTYPES[case.dtype], case.width

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, generator=g) * scale

    leaves = {
        "source": [draw(case.tokens, d).to(dtype) for _ in range(case.sources)],
        "output": [draw(case.tokens, d).to(dtype) for _ in range(case.reads - 1)],
        "queries": [draw(case.reads, d, scale=1.5 / d**0.5)],
        "gains": [1 + draw(case.reads, d, scale=0.2)],
        "weight": [] if case.norm == "none" else [1 + draw(d, scale=0.2)],
        "bias": [draw(d)] if case.norm == "layer" else [],
    }
    return {kind: [leaf.requires_grad_() for leaf in group] for kind, group in leaves.items()}


def norm_of(case: Case, leaves: dict[str, list[Tensor]], out_dtype: torch.dtype | None = None) -> Norm | None:
    if case.norm == "none":
        return None
    bias = leaves["bias"][0] if leaves["bias"] else None
    return Norm(leaves["weight"][0], bias, NORM_EPS, case.norm == "layer", out_dtype)


def ours(case: Case, leaves: dict[str, list[Tensor]]) -> list[Tensor]:
    """The reads by the block schedule, as `attnres.residuals` makes them."""
    dtype = leaves["source"][0].dtype
    queries = leaves["queries"][0] * leaves["gains"][0]
    norm = norm_of(case, leaves, dtype)
    sealed = read_sealed(leaves["source"], queries, eps=EPS)
    opens: tuple[Tensor, ...] = ()
    xs = []
    for i in range(case.reads):
        added = None
        if i == 1 or (i and case.opened == "apart"):
            opens = (*opens, leaves["output"][i - 1])
        elif i:
            added = leaves["output"][i - 1]
        merged = merge(sealed.read(i), opens, added, queries[i] if opens else None, norm, eps=EPS, dtype=dtype)
        opens = merged.opens
        xs.append(merged.x)
    return xs


def normed(case: Case, leaves: dict[str, list[Tensor]], h: Tensor) -> Tensor:
    if case.norm == "none":
        return h
    shape, weight = (case.width,), leaves["weight"][0].to(h.dtype)
    if case.norm == "rms":
        return F.rms_norm(h, shape, weight, NORM_EPS)
    return F.layer_norm(h, shape, weight, leaves["bias"][0].to(h.dtype), NORM_EPS)


def naive_read(values: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    """What one writes first: stack, norm, softmax, weighted sum, all through autograd."""
    stacked = torch.stack(list(values))
    keys = F.rms_norm(stacked.to(torch.promote_types(stacked.dtype, torch.float32)), query.shape, gain, EPS)
    weights = torch.einsum("d,ntd->nt", query, keys).softmax(0).to(stacked.dtype)
    return torch.einsum("nt,ntd->td", weights, stacked)


def naive(case: Case, leaves: dict[str, list[Tensor]]) -> list[Tensor]:
    xs, opens = [], []
    for i in range(case.reads):
        if i == 1 or (i and case.opened == "apart"):
            opens = [*opens, leaves["output"][i - 1]]
        elif i:
            opens = [opens[0] + leaves["output"][i - 1]]
        h = naive_read([*leaves["source"], *opens], leaves["queries"][0][i], leaves["gains"][0][i])
        xs.append(normed(case, leaves, h))
    return xs


def one_read(case: Case, leaves: dict[str, list[Tensor]]) -> list[Tensor]:
    query, gain = leaves["queries"][0][0], leaves["gains"][0][0]
    norm = norm_of(case, leaves, leaves["source"][0].dtype)
    level = 1 if case.dtype == "fp16" else 0  # fp16 is the case that also makes the read again
    return [depth_read(leaves["source"], query, gain, norm=norm, eps=EPS, checkpoint_level=level)]


def naive_one_read(case: Case, leaves: dict[str, list[Tensor]]) -> list[Tensor]:
    return [normed(case, leaves, naive_read(leaves["source"], leaves["queries"][0][0], leaves["gains"][0][0]))]


Reads = Callable[[Case, dict[str, list[Tensor]]], list[Tensor]]


def results(reads: Reads, case: Case, leaves: dict[str, list[Tensor]], upstream: list[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by kind, flat and in fp64."""
    outs = reads(case, leaves)
    flat = [leaf for group in leaves.values() for leaf in group]
    grads = iter(
        torch.autograd.grad(
            outs, flat, [u.to(o.dtype) for u, o in zip(upstream, outs)], allow_unused=True, materialize_grads=True
        )
    )
    actual = {"x": list(outs)} | {kind: [next(grads) for _ in group] for kind, group in leaves.items()}
    return {
        kind: torch.cat([t.detach().double().flatten() for t in group]) for kind, group in actual.items() if len(group)
    }


def assert_no_worse_than_eager(reads: Reads, eager: Reads, case: Case, device: str) -> None:
    """Root-mean-square errors against fp64, relative to the exact values of that kind."""
    leaves = leaves_of(case, device)
    doubles = {kind: [t.detach().double().requires_grad_() for t in group] for kind, group in leaves.items()}
    count = len(eager(case, doubles))
    g = torch.Generator(device).manual_seed(1)
    upstream = [
        torch.randn(case.tokens, case.width, device=device, generator=g).to(DTYPES[case.dtype]) for _ in range(count)
    ]
    exact = results(eager, case, doubles, upstream)
    actual, plain = (results(f, case, leaves, upstream) for f in (reads, eager))
    # A read of one source gives its query exactly nothing: then rounding is measured against the upstream.
    sizes = {kind: value.norm().clamp_min(1e-3) for kind, value in exact.items()}
    bars = {kind: ((plain[kind] - value).norm() / sizes[kind]).item() for kind, value in exact.items()}
    # Both gradients are one sum over tokens times the other vector; eager makes the two in different orders.
    bars["gains"] = max(bars["gains"], bars["queries"])
    floor = 1e-6 if case.dtype == "fp32" else 1e-4
    slack = 1.2 if case.tokens > 32 else 1.5  # of few tokens, chance decides who is closer
    bad = []
    for kind, value in exact.items():
        assert actual[kind].isfinite().all(), kind
        error = ((actual[kind] - value).norm() / sizes[kind]).item()
        if error > slack * bars[kind] + floor:
            bad.append(f"{kind}: {error:.2e} against {bars[kind]:.2e}")
    assert not bad, "; ".join(bad)


def assert_kernels(case: Case, device: str, reads: int) -> None:
    """On a GPU these tests mean nothing if plain torch answers."""
    if device == "cuda":
        sources = [torch.empty(case.tokens, case.width, device=device, dtype=DTYPES[case.dtype])] * case.sources
        plan = explain(sources, reads=reads)
        assert plan.backend == "gpu", str(plan)


def _skip_without(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize(("device", "case"), CASES)
def test_a_blocks_reads_are_no_worse_than_eager_pytorchs(device: str, case: Case) -> None:
    _skip_without(device)
    assert_kernels(case, device, case.reads)
    assert_no_worse_than_eager(ours, naive, case, device)


@pytest.mark.parametrize(("device", "case"), ONE_PASS)
def test_a_read_of_its_own_is_no_worse_than_eager_pytorchs(device: str, case: Case) -> None:
    _skip_without(device)
    assert_kernels(case, device, 1)
    assert_no_worse_than_eager(one_read, naive_one_read, case, device)


def middle(device: str, **changes: object) -> Case:
    """A case of an ordinary size for the device."""
    case = Case(1168, 6) if device == "cuda" else Case(40, 6, tokens=19)
    return replace(case, **changes)  # ty: ignore[invalid-argument-type]


def run(case: Case, leaves: dict[str, list[Tensor]], device: str) -> dict[str, Tensor]:
    g = torch.Generator(device).manual_seed(1)
    upstream = [torch.randn(case.tokens, case.width, device=device, generator=g) for _ in range(case.reads)]
    return results(ours, case, leaves, upstream)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_results_repeat_bit_for_bit(device: str, dtype: str) -> None:
    case = middle(device, dtype=dtype, tokens=4099 if device == "cuda" else 333)
    first = run(case, leaves_of(case, device), device)
    for _ in range(4):
        again = run(case, leaves_of(case, device), device)
        assert all(torch.equal(again[kind], first[kind]) for kind in first)


@pytest.mark.parametrize(
    "how", ["transposed", "rows of a wider tensor", "misaligned", "one row for all", "interleaved"]
)
def test_sources_are_read_however_they_lie(device: str, how: str) -> None:
    case = middle(device)
    plain = leaves_of(case, device)
    if how == "one row for all":
        plain["source"] = [s.detach()[:1].repeat(case.tokens, 1).requires_grad_() for s in plain["source"]]

    def laid_out(source: Tensor) -> Tensor:
        t, d = source.shape
        if how == "transposed":
            return source.detach().t().contiguous().t()
        if how == "one row for all":
            return source.detach()[:1].expand(t, d)
        offset, wide = (1, d + 3) if how == "misaligned" else (0, 2 * d)
        room = source.new_zeros(t * wide + offset)
        view = room[offset:].view(t, wide)[:, :d]
        return view.copy_(source.detach())

    if how == "interleaved":  # one storage, several sources in it
        room = torch.stack([s.detach() for s in plain["source"]], 1)
        strange = list(room.unbind(1))
    else:
        strange = [laid_out(source) for source in plain["source"]]
    moved = {**plain, "source": [s.detach().requires_grad_() for s in strange]}
    assert how != "transposed" or moved["source"][0].stride(-1) != 1
    expected, actual = run(case, plain, device), run(case, moved, device)
    for kind, value in expected.items():  # threads hold other columns of rows that are not aligned, and sums round anew
        torch.testing.assert_close(actual[kind], value, rtol=1e-2, atol=1e-2 * value.abs().max().item())


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_any_number_of_tokens_is_taken(device: str, tokens: int) -> None:
    case = middle(device, tokens=tokens)
    actual = run(case, leaves_of(case, device), device)
    assert actual["x"].numel() == case.reads * tokens * case.width
    assert all(value.isfinite().all() for value in actual.values())
    assert tokens or not actual["queries"].any()


@pytest.mark.parametrize("size", [80.0, -80.0])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_extreme_logits_and_norms_stay_finite_and_right(device: str, size: float, dtype: str) -> None:
    case = middle(device, dtype=dtype)
    leaves = leaves_of(case, device)
    with torch.no_grad():
        leaves["source"][1] *= 1e4 if dtype != "fp16" else 1e3  # fp16 ends at 65,504
        leaves["source"][2] *= 1e-2
        direction = F.normalize(leaves["queries"][0][0], dim=0)
        leaves["source"][0].copy_((direction * case.width**0.5).expand(case.tokens, -1))
        leaves["queries"][0].copy_(direction * (size / case.width**0.5))  # logits of +-80 on the first source
        leaves["gains"][0].fill_(1.0)
    doubles = {kind: [t.detach().double().requires_grad_() for t in group] for kind, group in leaves.items()}
    actual, exact = (run(case, inputs, device) for inputs in (leaves, doubles))
    # Where one weight is 1 the query's gradient is a difference of equal dot products: it is right to their rounding.
    # So are those of sources beside one 1e4 as long, in a narrow dtype: eager PyTorch is 0.09 off in bf16, NaN in fp16.
    for kind, value in actual.items():
        assert value.isfinite().all(), kind
        error = (value - exact[kind]).norm() / exact[kind].norm().clamp_min(case.width)
        assert error < {"fp32": 2e-4, "bf16": 9e-2, "fp16": 1e-2}[dtype], f"{kind}: {error:.1e}"


def test_weights_seen_are_the_weights_used(device: str) -> None:
    case = middle(device, dtype="fp32")
    leaves = leaves_of(case, device)
    query, gain = leaves["queries"][0][0], leaves["gains"][0][0]
    h, weights = depth_read(leaves["source"], query, gain, eps=EPS, return_weights=True)
    doubles = [source.detach().double() for source in leaves["source"]]
    expected_h, expected = depth_read_reference(doubles, query.double(), gain.double(), eps=EPS)
    assert weights.shape == (case.sources, case.tokens)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(h.double(), expected_h, rtol=1e-4, atol=1e-5)


def test_frozen_sources_get_no_gradient_and_change_no_other(device: str) -> None:
    case = middle(device)
    leaves, part = leaves_of(case, device), leaves_of(case, device)
    for i in (0, 3):
        part["source"][i] = part["source"][i].detach()

    def gradients(leaves: dict[str, list[Tensor]]) -> list[Tensor | None]:
        sum(x.float().square().sum() for x in ours(case, leaves)).backward()
        return [leaf.grad for group in leaves.values() for leaf in group]

    for i, (a, b) in enumerate(zip(gradients(leaves), gradients(part))):
        if i in (0, 3):
            assert b is None
        else:
            assert torch.equal(a, b)


def test_a_retained_graph_gives_the_same_gradient_twice(device: str) -> None:
    case = middle(device)
    leaves = leaves_of(case, device)
    flat = [leaf for group in leaves.values() for leaf in group]
    loss = sum(x.float().square().sum() for x in ours(case, leaves))
    first, second = (torch.autograd.grad(loss, flat, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_reads_that_nothing_uses_leave_no_trace(device: str) -> None:
    case = middle(device)
    leaves = leaves_of(case, device)
    ours(case, leaves)[0].float().square().sum().backward()
    assert leaves["source"][0].grad.isfinite().all() and leaves["source"][0].grad.any()
    assert not leaves["queries"][0].grad[1:].any()


def test_autocast_changes_nothing_forward_or_backward(device: str) -> None:
    case = middle(device, dtype="fp32")
    plain = run(case, leaves_of(case, device), device)
    with torch.autocast(device, torch.bfloat16):  # the backward too, as many training loops have it
        cast = run(case, leaves_of(case, device), device)
    assert all(torch.equal(plain[kind], cast[kind]) for kind in plain)


@pytest.mark.parametrize("center", [False, True], ids=["rmsnorm", "layernorm"])
def test_the_norm_alone_is_the_norm(device: str, center: bool) -> None:
    width = middle(device).width
    h = torch.randn(3, 7, width, device=device, requires_grad=True)
    weight, bias = torch.rand(width, device=device).requires_grad_(), torch.randn(width, device=device).requires_grad_()
    leaves = (h, weight, bias) if center else (h, weight)
    x = apply_norm(h, Norm(weight, bias if center else None, NORM_EPS, center))
    plain = F.layer_norm(h, (width,), weight, bias, NORM_EPS) if center else F.rms_norm(h, (width,), weight, NORM_EPS)
    for a, b in zip(*(torch.autograd.grad(y.pow(3).sum(), leaves) for y in (x, plain))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_nothing_stack_shaped_is_saved(device: str) -> None:
    """Beyond its inputs a block's reads keep one vector a read, one a partial sum, and scalars."""
    case = middle(device)
    leaves = leaves_of(case, device)
    own = {leaf.untyped_storage().data_ptr() for group in leaves.values() for leaf in group}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        xs = ours(case, leaves)
    vector = case.tokens * case.width
    sizes = [t.untyped_storage().nbytes() // t.element_size() for t in kept.values()]
    assert max(sizes) <= max(vector, case.tokens * case.sources * case.reads)
    vectors = sum(size >= vector for size in sizes)
    assert vectors <= case.reads + (case.reads - 2)
    scalars = sum(size for size in sizes if size < vector)
    assert scalars <= case.tokens * (case.sources * (case.reads + 1) + 8 * case.reads) + 4 * case.reads * case.width
    del xs


@pytest.mark.gpu
@pytest.mark.parametrize("opened", ["summed", "apart"])
def test_a_block_is_captured_and_replayed(cuda: str, opened: str) -> None:
    case = middle(cuda, opened=opened)
    batches = [leaves_of(case, cuda, seed) for seed in range(3)]
    expected = [run(case, leaves, cuda) for leaves in batches]
    static = leaves_of(case, cuda, seed=9)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(case, static, cuda)
    torch.cuda.current_stream().wait_stream(side)
    g = torch.Generator(cuda).manual_seed(1)
    upstream = [torch.randn(case.tokens, case.width, device=cuda, generator=g) for _ in range(case.reads)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = results(ours, case, static, upstream)
    for leaves, value in zip(batches, expected):
        with torch.no_grad():
            for kind, group in leaves.items():
                for mine, theirs in zip(static[kind], group):
                    mine.copy_(theirs)
        graph.replay()
        assert all(torch.equal(actual[kind], value[kind]) for kind in value)


@pytest.mark.gpu
@pytest.mark.parametrize("reads", [1, 2])
def test_vectors_of_more_than_two_to_the_31_elements_are_read_to_their_end(cuda: str, reads: int) -> None:
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GiB of free GPU memory")
    case = Case(7168, 2, "bf16", reads, 2**31 // 7168 + 70)
    leaves = leaves_of(replace(case, tokens=1), cuda)
    leaves["source"] = [torch.empty(case.tokens, case.width, device=cuda, dtype=torch.bfloat16) for _ in range(2)]
    leaves["output"] = [torch.empty_like(leaves["source"][0]) for _ in range(reads - 1)]
    vectors = leaves["source"] + leaves["output"]
    for vector in vectors:
        vector.normal_().requires_grad_()
    end = {**leaves, "source": [v.detach()[-64:].clone().requires_grad_() for v in leaves["source"]]}
    end["output"] = [v.detach()[-64:].clone().requires_grad_() for v in leaves["output"]]
    schedule = one_read if reads == 1 else ours  # in one pass, and in two phases
    # Alone they stand elsewhere in a tile, which may round otherwise; a wrong address gives another token's numbers.
    rounding = {"rtol": 2**-6, "atol": 2**-6}
    whole, part = (schedule(case, inputs)[-1] for inputs in (leaves, end))
    torch.testing.assert_close(whole[-64:], part, **rounding)
    upstream = torch.ones_like(whole)
    grads = torch.autograd.grad(whole, vectors, upstream)
    for a, b in zip(grads, torch.autograd.grad(part, end["source"] + end["output"], upstream[-64:])):
        torch.testing.assert_close(a[-64:], b, **rounding)
