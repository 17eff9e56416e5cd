"""Tokens a second of `attnres prepare` in one process and in several, in turn; the tokenizer is trained once, before.

    python benchmarks/prepare.py                         # Python's library, one worker and as many as there are cores
    python benchmarks/prepare.py --source my_text/ --workers 1 8 --rounds 5

Every call makes a folder of its own, whose files must be equal bit for bit. What is timed is the whole call: reading,
tokenising, writing, checksums, and starting the workers.
"""

import argparse
import os
import shlex
import statistics
import tempfile
import time
from pathlib import Path

import torch

from attnres.data import prepare
from attnres.files import write_json
from attnres.training.environment import describe


def files_of(folder: Path) -> dict[str, bytes]:
    """The ids in a prepared folder, by file."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def main() -> None:
    """Time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, os.cpu_count() or 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prepare_cpu.json"))
    options = parser.parse_args()
    seconds: dict[int, list[float]] = {workers: [] for workers in options.workers}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        first = prepare(options.source, out=root / "tokenizer", progress=False)
        tokens, ids = sum(split["tokens"] for split in first.header["splits"].values()), files_of(first.path)
        for number in range(options.rounds):
            for workers in options.workers:
                began, out = time.perf_counter(), root / f"{workers}-{number}"
                prepare(options.source, str(first.path), out=out, workers=workers, progress=False)
                seconds[workers].append(time.perf_counter() - began)
                if files_of(out) != ids:
                    parser.exit(1, f"{workers} workers made other tokens than one\n")
    base = seconds[options.workers[0]]
    rows = {}
    for workers, times in seconds.items():
        ratios = [before / after for before, after in zip(base, times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[str(workers)] = {
            "median_s": statistics.median(times),
            "tokens_per_s": tokens / statistics.median(times),
            "speedup": middle,
            "speedup_quartiles": [low, high],
        }
        speed = tokens / statistics.median(times)
        print(f"{workers} workers  {speed:,.0f} tokens/s  {middle:.2f} [{low:.2f}, {high:.2f}]")
    command = f"python benchmarks/prepare.py --source {shlex.quote(options.source)} --rounds {options.rounds}"
    described = describe(torch.device("cpu"), "none")
    write_json(options.out, {"command": command, "environment": described, "tokens": tokens, "workers": rows})


if __name__ == "__main__":
    main()
