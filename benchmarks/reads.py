"""Depth reads on their own: one read, and one block call by call, beside naive torch, peers and a copy of the device.

    python benchmarks/reads.py                  # the device's own shapes; about a minute on a CPU, five on a GPU
    python benchmarks/reads.py --only block

*Read*: `depth_read` of n sources, forward and backward, beside the same read by stack and einsum, that compiled, and
the peers. All are credited with what a read must move (each source and the result once), so that GB/s compare.
*Block*: the five functions of a backend for S reads over n sealed sources (phase 1, S merges with their norm, both
backwards), with the bytes that each of them moves (traffic.py). *Block of reads*: the whole of it with identity
sublayers, forward alone and forward + backward, beside the peers.

Times are medians of calls taken in turn, with the caches emptied before each on a GPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import harness
import torch
import traffic
from equality import Inputs, compare
from harness import DTYPES
from naive import EPS, naive_read
from peers import able
from torch import Tensor

from attnres.files import write_json
from attnres.models import step_cost as counts
from attnres.ops import Norm, depth_read, eager, explain, merge, read_sealed
from attnres.ops.backend import Backend, MergeGradInputs, MergeInputs, ReadGradInputs, ReadInputs
from attnres.ops.dispatch import backend_for


@dataclass(frozen=True)
class Shape:
    """n sealed sources of `tokens` vectors, `reads` reads."""

    tokens: int
    width: int
    sources: int
    reads: int = 1

    def __str__(self) -> str:
        reads = f", S={self.reads}" if self.reads > 1 else ""
        return f"d={self.width}, n={self.sources}{reads}, {self.tokens:,} tokens"


READS = {
    "cuda": (Shape(8192, 7168, 9), Shape(8192, 4096, 9), Shape(32768, 2048, 9), Shape(32768, 1024, 5)),
    "cpu": (Shape(2048, 256, 9), Shape(2048, 256, 3)),
}
BLOCKS = {
    "cuda": (
        Shape(32768, 2048, 4, 4),
        Shape(32768, 2048, 4, 8),
        Shape(32768, 2304, 5, 6),
        Shape(16384, 4096, 4, 6),
        Shape(8192, 7168, 5, 24),
    ),
    "cpu": (Shape(2048, 256, 5, 3), Shape(2048, 256, 4, 8)),
}


class Block:
    """The five functions of one backend on one shape, stage by stage, on inputs that all backends get alike."""

    def __init__(self, backend: Backend, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int):
        self.backend, self.shape, self.dtype = backend, shape, dtype
        generator = torch.Generator().manual_seed(seed)
        vector = partial(harness.randn, (shape.tokens, shape.width), generator, device, dtype)
        n, reads = shape.sources, shape.reads
        self.sources = [vector() for _ in range(n)]
        self.outputs = [vector() for _ in range(reads)]
        self.grads = [vector() for _ in range(reads)]
        self.carried = [vector() for _ in range(n + 1)]
        self.queries = harness.randn((reads, shape.width), generator, device, torch.float32) / shape.width**0.5
        self.norm = Norm(torch.ones(shape.width, device=device), None, EPS, out_dtype=dtype)
        self.sealed = self.phase_1()
        self.saved = self.merges()
        self.output_grads, self.tops = self.merges_backward()

    def phase_1(self) -> eager.Sealed:
        return self.backend.read_sealed(ReadInputs(self.queries, self.sources, EPS, self.dtype))

    def merges(self) -> list[tuple[list[Tensor], Tensor | None, eager.MergeSaved]]:
        """The S merges: what each scored, with which query, and what it keeps."""
        opens: list[Tensor] = []
        added, saved = None, []
        for j, output in enumerate(self.outputs):
            query = self.queries[j] if opens else None
            phase_1 = (self.sealed.outputs[j], self.sealed.top[j], self.sealed.total[j])
            _, kept, total = self.backend.merge(MergeInputs(opens, added, query, EPS, *phase_1, self.norm, self.dtype))
            opens = opens if total is None else [total]
            saved.append((opens, query, kept))
            opens, added = (opens, output) if opens else ([output], None)
        return saved

    def merges_backward(self) -> tuple[list[Tensor], list[Tensor]]:
        """The S merges' backwards, last first: gradients of the phase-1 outputs and of their tops."""
        carried, results = [self.carried[-1]], []
        for (opens, query, kept), grad in zip(reversed(self.saved), reversed(self.grads), strict=True):
            grads = self.backend.merge_backward(
                MergeGradInputs(grad, carried[: len(opens)], opens, query, self.norm, kept)
            )
            carried = grads.opens
            results.append((grads.output, grads.top))
        return [output for output, _ in reversed(results)], [top for _, top in reversed(results)]

    def phase_1_backward(self) -> tuple[Tensor, list[Tensor]]:
        sealed = self.sealed
        grads, carried = (self.output_grads, self.tops), self.carried[:-1]
        return self.backend.read_sealed_backward(
            ReadGradInputs(self.queries, self.sources, sealed.inv_rms, sealed.logits, *grads, carried)
        )


def stage_bytes(shape: Shape, itemsize: int) -> dict[str, float]:
    """Bytes that each stage moves."""
    n, later = shape.sources, shape.reads - 1
    merges = counts.merge(0, added=False)
    if later:
        merges += counts.merge(1, added=False) + (later - 1) * counts.merge(1, added=True)
    vectors = {
        "phase 1": counts.read_sealed(n, shape.reads),
        "merges": merges,
        "merges backward": counts.merge_backward(0, carried=0) + later * counts.merge_backward(1, carried=1),
        "phase 1 backward": counts.read_sealed_backward(n, shape.reads, n),
    }
    return {stage: count * shape.tokens * shape.width * itemsize for stage, count in vectors.items()}


STAGES: dict[str, Callable[[Block], Any]] = {
    "phase 1": Block.phase_1,
    "merges": Block.merges,
    "merges backward": Block.merges_backward,
    "phase 1 backward": Block.phase_1_backward,
}


def time_stages(shape: Shape, device: torch.device, dtype: torch.dtype, how: dict[str, Any], seed: int) -> dict:
    """Each stage of a block on the backend that dispatch takes, and on plain torch."""
    backend = backend_for([torch.empty(1, shape.width, device=device, dtype=dtype)], torch.float32, dtype)
    name = explain([torch.empty(1, shape.width, device=device, dtype=dtype)]).backend
    modules: dict[str, Backend] = {name: backend, "eager": eager}
    blocks: dict[str, Block] = {}
    failed = {}
    for name, module in modules.items():
        reason = harness.attempt(lambda n=name, m=module: blocks.update({n: Block(m, shape, device, dtype, seed)}))
        if reason is not None:
            failed[f"ours ({name})"] = {"reason": reason}
    moved = stage_bytes(shape, dtype.itemsize)
    rows_of = {}
    for stage, call in STAGES.items():
        candidates = {f"ours ({name})": partial(call, block) for name, block in blocks.items()}
        rows_of[stage] = failed | harness.measure(candidates, device, nbytes=moved[stage], **how)
    return rows_of


def our_read(sources: list[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`depth_read`."""
    h = depth_read(sources, query, gain, eps=eps)
    assert isinstance(h, Tensor)
    return h


def our_block(sources: list[Tensor], queries: Tensor, gains: Tensor, eps: float) -> Tensor:
    """The sum of S identity sublayers over n sealed sources, in two phases."""
    scaled, dtype = queries * gains, sources[0].dtype
    sealed = read_sealed(sources, scaled, eps=eps)
    total = merge(sealed.read(0), (), None, None, eps=eps, dtype=dtype).x
    added = None
    for j in range(1, len(scaled)):
        merged = merge(sealed.read(j), (total,), added, scaled[j], eps=eps, dtype=dtype)
        total, added = merged.opens[0], merged.x
    return total if added is None else total + added


def naive_block(sources: list[Tensor], queries: Tensor, gains: Tensor, eps: float) -> Tensor:
    """The same, read by read."""
    total = None
    for query, gain in zip(queries, gains, strict=True):
        output = naive_read(sources if total is None else [*sources, total], query, gain, eps)
        total = output if total is None else total + output
    assert total is not None
    return total


def time_block(
    shape: Shape, device: torch.device, dtype: torch.dtype, how: dict[str, Any], seed: int, others: bool
) -> dict:
    """A block of reads with identity sublayers, beside the peers: forward, and forward + backward."""
    ready, peers = able(shape.sources, 64, shape.width, device, dtype) if others else ([], {})
    inputs = Inputs(shape.sources, shape.tokens, shape.width, device, dtype, seed)
    leaves = inputs.leaves()
    queries = leaves[0].detach().repeat(shape.reads, 1).requires_grad_()
    gains, sources = leaves[1].detach().repeat(shape.reads, 1), leaves[2:]
    calls: dict[str, Callable[..., Tensor]] = {"ours": our_block, "naive": naive_block}
    calls |= {peer.name: partial(peer.block, layer=lambda x: x) for peer in ready}

    def forward(call: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            call(sources, queries, gains, EPS)

    def both(call: Callable[..., Tensor]) -> None:
        torch.autograd.grad(call(sources, queries, gains, EPS), [queries, *sources], inputs.grad)

    measured = {}
    for stage, action in (("forward", forward), ("forward + backward", both)):
        rows = harness.measure({label: partial(action, call) for label, call in calls.items()}, device, **how)
        measured[stage] = with_peers(rows, peers)
    return {"checked": peers, "stages": measured}


def with_peers(rows: dict[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
    """The measured rows with the error of each read, and a row for each peer that was not measured."""
    measured = {}
    for label, row in rows.items():
        entry = checked.get(label, {})
        measured[label] = row | ({"max_error": entry["max_error"]} if "max_error" in entry else {})
    left = {name: entry for name, entry in checked.items() if name not in rows}
    return measured | {name: {key: e[key] for key in ("reason", "max_error") if key in e} for name, e in left.items()}


def time_read(
    shape: Shape, device: torch.device, dtype: torch.dtype, how: dict[str, Any], seed: int, compiled: bool, others: bool
) -> dict:
    """One read: forward without a graph, and backward alone."""
    ready, peers = able(shape.sources, 64, shape.width, device, dtype) if others else ([], {})
    inputs = Inputs(shape.sources, shape.tokens, shape.width, device, dtype, seed)
    leaves = inputs.leaves()
    calls: dict[str, Callable[..., Tensor]] = {
        "ours": our_read,
        "naive": naive_read,
    }
    if compiled:
        calls["naive, compiled"] = torch.compile(naive_read, dynamic=False)
    ours = dict(calls)
    calls |= {peer.name: peer.read for peer in ready}
    vector = shape.tokens * shape.width * dtype.itemsize

    def forward(call: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            call(leaves[2:], leaves[0], leaves[1], EPS)

    def backward(h: Tensor) -> None:
        torch.autograd.grad(h, leaves, inputs.grad, retain_graph=True)

    checked = {
        name: compare(call, Inputs(shape.sources, 64, shape.width, device, dtype)) for name, call in ours.items()
    }
    checked |= peers
    candidates = {label: partial(forward, call) for label, call in calls.items()}
    rows = harness.measure(candidates, device, nbytes=traffic.read(shape.sources) * vector, **how)
    measured = {"forward": with_peers(rows, checked)}
    graphs: dict[str, Tensor] = {}
    for label, call in calls.items():  # a failure has its row already
        harness.attempt(lambda n=label, c=call: graphs.update({n: c(leaves[2:], leaves[0], leaves[1], EPS)}))
    moved = traffic.read_backward(shape.sources) * vector
    candidates = {label: partial(backward, h) for label, h in graphs.items()}
    measured["backward"] = with_peers(harness.measure(candidates, device, nbytes=moved, **how), checked)
    plan = str(explain(leaves[2:], training=True))
    return {"plan": plan, "checked": checked, "stages": measured}


def run(
    device: torch.device,
    dtype: torch.dtype,
    reads: tuple[Shape, ...],
    blocks: tuple[Shape, ...],
    *,
    seconds: float,
    seed: int,
    compiled: bool,
    others: bool = True,
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """All shapes, beside the peers if `others`; `say` is given each table as it is finished, `keep` all that is."""
    copy = harness.copy_bandwidth(device)
    say(f"a copy on this device: {copy / 1e9:.4g} GB/s\n")
    how = {"seconds": seconds, "copy": copy}
    bar = harness.progress("kernels", len(reads) + 2 * len(blocks))
    result: dict[str, Any] = {"copy_bytes_per_s": copy, "read": [], "block": [], "block of reads": []}

    def add(kind: str, shape: Shape, measured: dict[str, Any]) -> None:
        result[kind].append({"shape": asdict(shape), **measured})
        keep(result)
        for stage, rows in measured["stages"].items():
            say(f"{kind}, {stage}: {shape}\n{harness.lines(rows)}\n")
        bar.advance(1, f"{kind} {shape}")

    for shape in reads:
        add("read", shape, time_read(shape, device, dtype, how, seed, compiled, others))
    for shape in blocks:
        add("block", shape, {"stages": time_stages(shape, device, dtype, how, seed)})
    for shape in blocks:
        add("block of reads", shape, time_block(shape, device, dtype, {"seconds": seconds}, seed, others))
    return result


def shares(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Share of the copy's bandwidth in percent, by panel, for the plot."""
    panels: dict[str, dict[str, float]] = {}
    for kind in ("read", "block"):
        for entry in result[kind]:
            for stage, rows in entry["stages"].items():
                values = {name: 100 * row["share_of_copy"] for name, row in rows.items() if "share_of_copy" in row}
                panels[f"{kind}, {stage}: {Shape(**entry['shape'])}"] = values
    return panels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser)
    parser.add_argument("--only", choices=["read", "block"], default=None)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="naive compiled as well")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="which tune themselves")
    options = parser.parse_args()
    device = harness.settle(options, "kernels")
    compiled = device.type == "cuda" if options.compile is None else options.compile
    if compiled:
        harness.compile_many()
    head = harness.head("kernels", device, options.dtype, options.seed)
    result = head | run(
        device,
        DTYPES[options.dtype],
        () if options.only == "block" else READS[device.type],
        () if options.only == "read" else BLOCKS[device.type],
        seconds=options.seconds,
        seed=options.seed,
        compiled=compiled,
        others=options.peers,
        keep=lambda parts: write_json(options.out, head | parts),
    )
    title = f"Depth reads on {result['environment']['device']}, {options.dtype}"
    harness.finish(options.out, result, shares(result), "% of a copy's bandwidth (longer is better)", title)


if __name__ == "__main__":
    main()
