"""Tiles of phase 1's kernels on one GPU: every size that might do, timed. `attnres.ops.gpu.sealed` has its from here.

    python benchmarks/tiles.py                          # four shapes in bf16, forward and backward, ten minutes
    python benchmarks/tiles.py --shapes 32768x2048x4x4  # tokens x width x sources x reads

Kernels are compiled by several processes first, in Triton's cache; a call is timed by `triton.testing.do_bench`, which
empties the caches before each. Each result is held against that of the default tile.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from torch import Tensor

from attnres.files import write_json
from attnres.ops import eager
from attnres.ops.backend import Backend, ReadGradInputs, ReadInputs

SHAPES = ("32768x2048x4x4", "32768x2304x5x6", "16384x4096x4x6", "8192x7168x5x24")
FEWER = 1024
"""Tokens of a call that only compiles."""


def held_up_to(most: int) -> AbstractContextManager[Any]:
    """Inside, phase 1 holds sources of so many reads, and values a thread, in registers, and has tiles of others."""
    from attnres.ops.gpu import sealed

    return mock.patch.dict(sealed.HELD, dict.fromkeys(sealed.HELD, ((most, most, 16),)))


@dataclass(frozen=True)
class Tile:
    """A program's part of a tile's tokens, rows, columns, reads and width, and its warps."""

    tokens: int
    rows: int
    columns: int
    reads: int
    block: int
    warps: int

    def sizes(self, *_: Any, **__: Any) -> tuple[dict[str, int], int]:
        """What `_tile` returns, whatever it is asked."""
        names = ("TOKENS", "ROWS", "COLS", "READS", "BLOCK")
        values = (self.tokens, self.rows, self.columns, self.reads, self.block)
        return dict(zip(names, values, strict=True)), self.warps


def power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


def tiles(sources: int, reads: int, backward: bool) -> Iterator[Tile | None]:
    """The default (None), then every other size that may fit into registers."""
    yield None
    padded = max(8, power_of_two(reads))
    blocks = (32, 64, 128, 256) if backward else (32, 64, 128, 256, 512)
    for tokens, block, warps in itertools.product((1, 2, 3, 4, 6, 8, 12, 16), blocks, (4, 8)):
        rows, columns = max(16, power_of_two(tokens * sources)), max(16, power_of_two(tokens) * padded)
        area = max(rows, columns) * block
        if rows <= 64 and columns <= 128 and 2048 <= area <= 16384 and (warps == 4 or area >= 4096):
            yield Tile(tokens, rows, columns, padded, block, warps)


def directions(
    shape: str, backend: Backend, dtype: torch.dtype = torch.bfloat16, tokens: int | None = None
) -> dict[str, tuple[Callable[[], list[Tensor]], int]]:
    """Phase 1 of a shape, "forward" and "backward": the call, and the bytes of the vectors that it has to move."""
    count, width, sources, reads = map(int, shape.split("x"))
    count = tokens or count
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    vectors, grads, carried = ([draw(count, width).to(dtype) for _ in range(n)] for n in (sources, reads, sources))
    queries, dtop = draw(reads, width) / width**0.5, [draw(count) for _ in range(reads)]
    kept = eager.read_sealed(ReadInputs(queries, vectors, 1e-6, dtype))

    def forward() -> list[Tensor]:
        return list(backend.read_sealed(ReadInputs(queries, vectors, 1e-6, dtype)).outputs)

    def backward() -> list[Tensor]:
        inputs = ReadGradInputs(queries, vectors, kept.inv_rms, kept.logits, grads, dtop, carried)
        results = backend.read_sealed_backward(inputs)
        return [results[0], *results[1]]

    vector = count * width * dtype.itemsize
    return {"forward": (forward, (sources + reads) * vector), "backward": (backward, (3 * sources + reads) * vector)}


def calls(shape: str, tokens: int | None = None) -> Iterator[tuple[dict[str, Any], Callable[[], list[Tensor]]]]:
    """Every tile of a shape, forward then backward: what it is, and the call."""
    from attnres.ops.gpu import kernels, sealed

    _, _, sources, reads = map(int, shape.split("x"))
    for way, (call, moved) in directions(shape, kernels, tokens=tokens).items():
        for tile in tiles(sources, reads, way == "backward"):
            row = {"shape": shape, "backward": way == "backward", "tile": None if tile is None else vars(tile)}
            row["bytes"] = moved
            with held_up_to(0), mock.patch.object(sealed, "_tile", sealed._tile if tile is None else tile.sizes):
                yield row, call


def compile_part(shapes: list[str], part: int, parts: int) -> None:
    """Run every `parts`-th call once, on few tokens."""
    for shape in shapes:
        for index, (_, call) in enumerate(calls(shape, FEWER)):
            if index % parts == part:
                harness.attempt(call)


def timed(call: Callable[[], list[Tensor]], expected: Sequence[Tensor], moved: int, copy: float) -> dict[str, Any]:
    """A call's milliseconds, its share of a copy's bandwidth where it moves `moved` bytes, its relative error beside
    `expected`; or the reason why it fails."""
    from triton.testing import do_bench

    results: list[Tensor] = []
    reason = harness.attempt(lambda: results.extend(call()))
    if reason is not None:
        return {"reason": reason}
    pairs = zip(results, expected, strict=True)
    error = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)
    ms = do_bench(call, warmup=3, rep=25, return_mode="median")
    return {"ms": ms, "share_of_copy": moved / ms * 1e3 / copy, "error": error}


def measure(shape: str, copy: float) -> list[dict[str, Any]]:
    """Milliseconds and share of a copy's bandwidth of every tile, the relative error beside the default's results."""
    rows: list[dict[str, Any]] = []
    expected: list[Tensor] = []
    for row, call in calls(shape):
        if row["tile"] is None:
            expected = call()
        rows.append(row | timed(call, expected, row["bytes"], copy))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "tiles_cuda.json")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    harness.need_cuda(parser, "tiles are timed")
    if options.part is not None:
        compile_part(options.shapes, options.part, options.processes)
        return
    command = [sys.executable, __file__, "--shapes", *options.shapes, "--processes", str(options.processes)]
    parts = [subprocess.Popen([*command, "--part", str(part)]) for part in range(options.processes)]
    for process in parts:
        process.wait()
    device = torch.device("cuda")
    copy = harness.copy_bandwidth(device)
    result = harness.head("tiles", device, "bf16", 0) | {"copy_bytes_per_s": copy}
    every: list[dict[str, Any]] = []
    bar = harness.progress("tiles", len(options.shapes))
    for shape in options.shapes:
        rows = measure(shape, copy)
        every += rows
        write_json(options.out, result | {"rows": every})
        for back in (False, True):
            timed = sorted((r for r in rows if r["backward"] == back and "ms" in r), key=lambda r: r["ms"])
            default = next(r for r in timed if r["tile"] is None)
            best, way = timed[0], "backward" if back else "forward"
            print(f"{shape} {way}: default {default['ms']:.4g} ms, best {best['ms']:.4g} {json.dumps(best['tile'])}")
        bar.advance(1, shape)


if __name__ == "__main__":
    main()
