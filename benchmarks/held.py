"""Phase 1 with all sources of a token in registers beside tiles of several tokens, on one GPU.

    python benchmarks/held.py                              # fifteen shapes, forward and backward, two minutes
    python benchmarks/held.py --shapes 16384x512x8x3:fp32  # tokens x width x sources x reads : dtype

A call is timed by `triton.testing.do_bench`, which empties the caches before each; its results are held against plain
torch. `attnres.ops.gpu.sealed` holds sources where that is faster here; `chosen` says whether it does.
"""

import argparse
from pathlib import Path
from typing import Any

import harness
import torch
from tiles import directions, held_up_to, timed

from attnres.files import write_json
from attnres.ops import eager

SHAPES = (
    *("32768x2048x4x4:bf16", "16384x512x8x3:bf16", "8192x1024x4x7:bf16"),  # the dtype of training, first
    *(f"16384x512x{n}x3:fp32" for n in (1, 2, 4, 8)),
    *("8192x1024x4x7:fp32", "8192x1024x8x7:fp32", "8192x2048x4x4:fp32", "8192x2048x8x6:fp32", "8192x4096x8x4:fp32"),
    *("16384x512x16x6:fp32", "16384x512x20x6:fp32", "16384x256x8x6:fp32"),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(shape: str, copy: float) -> list[dict[str, Any]]:
    """Milliseconds and share of a copy's bandwidth of either way, and its relative error beside plain torch."""
    from attnres.ops.gpu import kernels, sealed

    size, _, name = shape.partition(":")
    _, width, sources, reads = map(int, size.split("x"))
    dtype = DTYPES[name]
    rows: list[dict[str, Any]] = []
    in_torch = directions(size, eager, dtype)
    for way, (call, moved) in directions(size, kernels, dtype).items():
        expected = in_torch[way][0]()
        held = sealed._held(sources, reads, width, dtype.itemsize, backward=way == "backward")
        for kind, most in (("tiles", 0), ("held", 1 << 20)):
            row = {"shape": shape, "way": way, "kind": kind, "chosen": (held is not None) == (kind == "held")}
            with held_up_to(most):
                rows.append(row | timed(call, expected, moved, copy))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "held_cuda.json")
    options = parser.parse_args()
    harness.need_cuda(parser, "kernels are timed")
    device = torch.device("cuda")
    copy = harness.copy_bandwidth(device)
    result = harness.head("held", device, "fp32,bf16", 0) | {"copy_bytes_per_s": copy}
    every: list[dict[str, Any]] = []
    bar = harness.progress("held", len(options.shapes))
    for shape in options.shapes:
        every += measure(shape, copy)
        write_json(options.out, result | {"rows": every})
        bar.advance(1, shape)
    table = [["shape", "", "tiles, ms", "held, ms", "taken"]]
    for tiled, held in zip(every[::2], every[1::2], strict=True):
        times = [f"{row['ms']:.4g}" if "ms" in row else row["reason"] for row in (tiled, held)]
        table.append([tiled["shape"], tiled["way"], *times, "held" if held["chosen"] else "tiles"])
    print(harness.table(table))


if __name__ == "__main__":
    main()
