"""What a training step waits for on a GPU: its time, the host's, the device's, and the kernels that take the most.

    python benchmarks/busy.py --size 100m --compile                       # plain, standard, Block, Full; three minutes
    python benchmarks/busy.py --size 100m --compile --torch-reads 0       # reads and merges as our operators

Times are medians of steps taken in turn in one process, ratios to the plain Transformers model. `host` is how long a
step's calls take to return, before the device has done them: where it is as long as the step, the device waits for it.
`busy` is the sum of all kernels' times in a profile of two steps.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from step import BASES, SIZES, VARIANTS
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from attnres.comparison.speed import training_steps
from attnres.files import write_json
from attnres.timing import in_turn, seconds_of, spread

PROFILED = 2
"""Steps of a profile."""


def host_seconds(step: Callable[[], None]) -> float:
    """Until a step's calls have returned."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken


def kernels_of(step: Callable[[], None]) -> list[dict[str, Any]]:
    """The kernels of a step, those that take the most first: name, milliseconds and calls in a step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    taken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            taken[event.name][0] += event.self_device_time_total / 1e3 / PROFILED
            taken[event.name][1] += 1 / PROFILED
    rows = [{"name": name, "ms": ms, "calls": calls} for name, (ms, calls) in taken.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m", choices=list(SIZES))
    parser.add_argument("--variants", nargs="+", default=["block (8 blocks)", "full"], choices=list(VARIANTS))
    harness.add_compile(parser, "every variant")
    parser.add_argument("--seconds", type=float, default=15.0, help="of timing")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    harness.settle_compile(options, parser)
    harness.need_cuda(parser, "kernels are profiled")
    on, size = torch.device("cuda"), SIZES[options.size]
    steps = training_steps(
        {label: VARIANTS[label] for label in (*BASES, *options.variants)},
        size=size.model,
        vocab_size=size.vocabulary,
        seq_len=size.length,
        batch_size=size.batch,
        dtype="bf16",
        on=on,
        compile=options.compile,
    )
    measures = {label: lambda step=step: seconds_of(step, on) for label, step in steps.items()}
    times = in_turn(measures, rounds=200, seconds=options.seconds)
    rows: dict[str, dict[str, Any]] = {}
    table = [["variant", "ms", "ratio", "host, ms", "busy, ms", "kernels"]]
    for label, step in steps.items():
        timed, host, kernels = spread(times[label], times["plain"]), host_seconds(step), kernels_of(step)
        busy = sum(kernel["ms"] for kernel in kernels)
        rows[label] = {"ms": timed.median * 1e3, "ratio": timed.ratio, "ratio_quartiles": timed.ratio_quartiles}
        rows[label] |= {"host_ms": host * 1e3, "busy_ms": busy, "kernels": kernels[:40]}
        count = f"{sum(kernel['calls'] for kernel in kernels):.0f}"
        table.append(
            [label, f"{timed.median * 1e3:.4g}", f"{timed.ratio:.3f}", f"{host * 1e3:.4g}", f"{busy:.4g}", count]
        )
    parts = ["busy", options.size, *(["compiled"] if options.compile else []), "cuda"]
    out = options.out or harness.RESULTS / f"{'_'.join(parts)}.json"
    result = harness.head("busy", on, "bf16", 0) | {"tokens": size.batch * size.length, "variants": rows}
    write_json(out, result)
    print(harness.table(table))


if __name__ == "__main__":
    main()
