"""Tokens a second of `attnres prepare` in one process and in several, in turn; the tokenizer is trained once, before.

    python benchmarks/prepare.py                         # Python's library, one worker and as many as there are cores
    python benchmarks/prepare.py --source my_text/ --workers 1 8 --rounds 5

Every call makes a folder of its own, whose files must be equal bit for bit. What is timed is the whole call: reading,
tokenising, writing, checksums, and starting the workers.
"""

import argparse
import itertools
import os
import tempfile
from functools import partial
from pathlib import Path

import harness
import torch

from attnres.data import prepare
from attnres.device import in_turn, seconds_of, spread
from attnres.files import write_json

CPU = torch.device("cpu")


def ids_of(folder: Path) -> dict[str, bytes]:
    """The ids in a prepared folder, by file."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, os.cpu_count() or 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "prepare_cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root, number = Path(temporary), itertools.count()
        first = prepare(options.source, out=root / "tokenizer", progress=False)
        tokens, ids = sum(split["tokens"] for split in first.header["splits"].values()), ids_of(first.path)

        def speed(workers: int) -> float:
            """Tokens a second of one call."""
            out = root / str(next(number))
            call = partial(prepare, options.source, str(first.path), out=out, workers=workers, progress=False)
            seconds = seconds_of(call, CPU)
            if ids_of(out) != ids:
                parser.exit(1, f"{workers} workers made other tokens than one\n")
            return tokens / seconds

        calls = {str(workers): partial(speed, workers) for workers in options.workers}
        speeds = in_turn(calls, rounds=options.rounds, warm_up=1)
    rows = {}
    for workers, values in speeds.items():
        row = spread(values, speeds[str(options.workers[0])])
        low, high = row.ratio_quartiles
        rows[workers] = {"tokens_per_s": row.median, "speedup": row.ratio, "speedup_quartiles": [low, high]}
        print(f"{workers} workers  {row.median:,.0f} tokens/s  {row.ratio:.2f} [{low:.2f}, {high:.2f}]")
    write_json(options.out, {**harness.head("prepare", CPU, "none", 0), "tokens": tokens, "workers": rows})


if __name__ == "__main__":
    main()
