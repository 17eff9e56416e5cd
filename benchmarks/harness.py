"""What the benchmarks share: candidates timed in turn, peak memory, the device's copy speed, the head of a result file,
progress with the time left, and one look for the plots."""

import argparse
import gc
import importlib.metadata
import importlib.util
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from attnres.device import in_turn, spread
from attnres.files import write_json
from attnres.ops.dispatch import KERNELS
from attnres.progress import Bar, Bars
from attnres.training.environment import describe, keep_freed_memory, peak_memory, reset_peak_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
RESULTS = Path("benchmarks/results")

FLUSH = 256 << 20
"""Bytes written before each timed call on a GPU: more than any of its caches."""

DRAWN = 1 << 22
"""Random numbers drawn for one tensor."""

# Okabe & Ito's palette (2008), fixed to who is measured; several variants of one peer share a colour.
COLOURS = {
    "standard": "#4a5260",
    "ours": "#0072b2",
    "full": "#56b4e9",
    "naive": "#e69f00",
    "fla": "#d55e00",
    "liger": "#009e73",
    "flash-attn-res": "#cc79a7",
    "fast-attnres": "#f0e442",
    "attn_res": "#999999",
}


class Timer:
    """Seconds of one call. On a GPU those between two events, after a write that empties the caches and lets the host
    run ahead, so that launching the call is not counted unless it takes longer than the call itself."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = torch.empty(FLUSH, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def __call__(self, call: Callable[[], Any]) -> float:
        if self.flush is None:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        self.flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    seconds: float = 3.0,
    rounds: int = 200,
    before: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, taken in turn: see `attnres.device.in_turn`. `before(label)` is called,
    untimed, before each call."""
    timer = Timer(device)

    def measured(label: str) -> float:
        if before is not None:
            before(label)
        return timer(candidates[label])

    measures = {label: partial(measured, label) for label in candidates}
    return in_turn(measures, rounds=rounds, seconds=seconds)


def summary(times: Sequence[float], base: Sequence[float] | None = None) -> dict[str, Any]:
    """Median and quartiles in seconds; of the rounds' ratios to `base`, timed in turn with it."""
    median, quartiles, ratio, ratio_quartiles = spread(times, base)
    row = {"median_s": median, "quartiles_s": quartiles, "rounds": len(times)}
    return row if base is None else row | {"ratio": ratio, "ratio_quartiles": ratio_quartiles}


def attempt(call: Callable[[], Any]) -> str | None:
    """Call once; None, or in one line why it cannot be done here. For code of others, and for memory that runs out."""
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:200]
    gc.collect()  # only now that the error is gone, which held on to what its frames had made
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return reason


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that one call takes beyond what was taken before it: of tensors on CUDA, else of the process."""
    reset_peak_memory(device)
    before = peak_memory(device)
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(0, peak_memory(device) - before)


def measure(
    candidates: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    seconds: float,
    nbytes: Mapping[str, float] | float | None = None,
    copy: float | None = None,
    before: Callable[[str], None] | None = None,
    second: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Time candidates in turn; each gets a row, also the one that fails.

    Args:
        second: another candidate that ratios are taken to, as "second_ratio".
        nbytes: what each candidate has to move; then bandwidths are given, and their shares of `copy`, bytes a second.

    Returns:
        label -> {"reason": why it failed}, or the `summary` (ratios to the first that works) with "peak_bytes" and,
        with `nbytes`, "bytes", "bytes_per_s" and "share_of_copy".
    """
    rows: dict[str, dict[str, Any]] = {}
    for label, call in candidates.items():
        if before is not None:
            before(label)
        reason = attempt(call)
        rows[label] = {} if reason is None else {"reason": reason}
    ready = {label: call for label, call in candidates.items() if "reason" not in rows[label]}
    times = interleaved(ready, device, seconds=seconds, before=before)
    base = next(iter(times.values()), None)
    for label, call in ready.items():
        row = rows[label] = summary(times[label], base)
        if second in times:
            row["second_ratio"] = spread(times[label], times[second]).ratio
        if before is not None:
            before(label)
        row["peak_bytes"] = peak_bytes(call, device)
        moved = nbytes.get(label) if isinstance(nbytes, Mapping) else nbytes
        if moved is not None:
            row |= {"bytes": moved, "bytes_per_s": moved / row["median_s"]}
            if copy is not None:
                row["share_of_copy"] = row["bytes_per_s"] / copy
    return rows


def lines(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """What `measure` found, as text."""
    text = [["", "ms", "quartiles", "ratio", "quartiles", "second", "GB/s", "of a copy", "peak MB", "max error", ""]]
    for label, row in rows.items():
        error = f"{row['max_error']:.1e}" if "max_error" in row else "-"
        if "median_s" not in row:
            text.append([label, *["-"] * 8, error, row["reason"]])
            continue
        low, high = row["quartiles_s"]
        speed = f"{row['bytes_per_s'] / 1e9:.4g}" if "bytes_per_s" in row else "-"
        share = f"{row['share_of_copy']:.0%}" if "share_of_copy" in row else "-"
        spread = f"{low * 1e3:.4g}-{high * 1e3:.4g}"
        peak = f"{row['peak_bytes'] / 1e6:.4g}"
        middle, ratio = f"{row['median_s'] * 1e3:.4g}", f"{row['ratio']:.3f}"
        ratios = "{:.3f}-{:.3f}".format(*row["ratio_quartiles"])
        second = f"{row['second_ratio']:.3f}" if "second_ratio" in row else "-"
        text.append([label, middle, spread, ratio, ratios, second, speed, share, peak, error, ""])
    return table(text)


def copy_bandwidth(device: torch.device, nbytes: int | None = None, seconds: float = 0.5) -> float:
    """Bytes a second that a copy moves, its read and its write both counted: the bar for memory-bound code."""
    nbytes = nbytes or (1 << 30 if device.type == "cuda" else 64 << 20)
    source = torch.zeros(nbytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, device, seconds=seconds, rounds=50)["copy"]
    return 2 * nbytes / statistics.median(times)


def randn(shape: Sequence[int], generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal values that are the same on every device: at most `DRAWN` are drawn, on the CPU, and then repeated."""
    count = math.prod(shape)
    values = torch.randn(min(count, DRAWN), generator=generator).to(device, dtype)
    return values.repeat(-(-count // DRAWN))[:count].view(*shape)


def head(script: str, device: torch.device, dtype: str, seed: int, arguments: Sequence[str] | None = None) -> dict:
    """What stands at the top of each result file: the command, where it ran, versions, seed."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return {
        "command": shlex.join(["python", f"benchmarks/{script}.py", *arguments]),
        "environment": {
            **describe(device, dtype),
            "triton": version("triton"),
            "cuda": torch.version.cuda,
        },
        "seed": seed,
    }


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def add_device(parser: argparse.ArgumentParser, dtypes: Sequence[str] = ("fp32", "bf16", "fp16")) -> None:
    """The arguments that every benchmark takes: --device, --dtype, --seconds, --seed, --out."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=dtypes, help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each table row group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None, help="JSON file; the plot is written beside it")


def settle(options: argparse.Namespace, script: str) -> torch.device:
    """Fill in the defaults that depend on the device, which is returned."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda was given, but torch sees no GPU here: pass --device cpu")
    if device.type == "cpu":
        keep_freed_memory()
    options.dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    options.out = Path(options.out or RESULTS / f"{script}_{device.type}.json")
    return device


def compile_many() -> None:
    """Let one process compile more variants of the same code than eight; past a limit fail, instead of running some of
    them uncompiled without a word."""
    torch._dynamo.config.recompile_limit = 256  # ty: ignore[invalid-assignment]
    torch._dynamo.config.accumulated_recompile_limit = 4096  # ty: ignore[invalid-assignment]
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # ty: ignore[invalid-assignment]


def need_cuda(parser: argparse.ArgumentParser, what: str) -> None:
    """End with a sentence where there is no CUDA device, on which alone `what` happens, e.g. "tiles are timed"."""
    if not torch.cuda.is_available():
        parser.error(f"{what} on a CUDA device, and this machine has none")


def add_compile(parser: argparse.ArgumentParser, what: str) -> None:
    """The arguments of a benchmark of whole models that can be compiled: --compile, --torch-reads."""
    parser.add_argument("--compile", action="store_true", help=f"compile {what}")
    help = "with --compile: reads of sources of up to so many values are torch operations, others our operators"
    parser.add_argument("--torch-reads", type=int, default=None, metavar="VALUES", help=help)


def settle_compile(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Do what these arguments ask for."""
    if options.torch_reads is not None:
        if not options.compile:
            parser.error("--torch-reads says what a compiler is shown: give --compile too")
        for kernels in KERNELS.values():
            kernels.few_compiled.update({1: options.torch_reads, 2: options.torch_reads})
    if options.compile:
        compile_many()


def progress(name: str, total: int) -> Bar:
    """Lines with the time left on stderr; no bar, for tables are printed meanwhile."""
    return Bars("{task.completed:.0f}/{task.total:.0f}", console=Console(stderr=True, force_terminal=False)).add(
        name, total
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as columns; the first row is the head. The first column is flush left, and one without a heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = [i == 0 or not heading for i, heading in enumerate(rows[0])]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in zip(row, widths, left)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def finish(
    path: Path, result: dict[str, Any], groups: Mapping[str, Mapping[str, float]], unit: str, title: str
) -> None:
    """Write the result and its bar chart beside it; no chart on a machine without matplotlib."""
    write_json(path, result)
    if importlib.util.find_spec("matplotlib") is None:
        print(f"wrote {path}; matplotlib, which draws its chart, is not installed")
        return
    plot = path.with_suffix(".svg")
    bar_chart(plot, groups, unit, title)
    print(f"wrote {path} and {plot}")


def colour(label: str) -> str:
    """The colour of a candidate, by the name that its label starts with."""
    return next((value for name, value in COLOURS.items() if label.startswith(name)), "#7f7f00")


def bar_chart(path: Path, groups: Mapping[str, Mapping[str, float]], unit: str, title: str) -> None:
    """Horizontal bars with their values, one panel a group, in the order given."""
    from matplotlib.figure import Figure

    from attnres.figures.style import MUTED, save, style

    groups = {name: values for name, values in groups.items() if values}
    if not groups:
        return
    heights = [len(values) for values in groups.values()]
    with style():
        figure = Figure(figsize=(7.2, 0.5 + 0.75 * len(heights) + 0.26 * sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": [h + 1 for h in heights]})
        for axis, (name, values) in zip(axes[:, 0], groups.items(), strict=True):
            labels, numbers = list(values), list(values.values())
            bars = axis.barh(labels, numbers, color=[colour(label) for label in labels], height=0.7)
            axis.bar_label(bars, [f"{number:.3g}" for number in numbers], padding=3, color=MUTED, fontsize=8.5)
            axis.set_title(name)
            axis.invert_yaxis()
            axis.grid(False, axis="y")
            axis.margins(x=0.12)
        axes[-1, 0].set_xlabel(unit)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        save(figure, path)
