"""What a pipeline's messages lie under, by torch's profiler: stages of two gloo processes, 1F1B and interleaved.

    OMP_NUM_THREADS=1 python benchmarks/overlap.py        # a minute; JSON into benchmarks/results/

Of every message (`gloo:send`, `gloo:recv`) the profiler says when it was begun and when the process had it behind it.
A process either works or waits for a message, so the part of that span in which it does not wait is time in which the
message cost nothing; the rest is waiting, for bytes or for the other stage to make them, which a trace of one process
cannot tell apart. Whether a step got any faster is not measured here.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile, record_function

from attnres.files import write_json
from attnres.head import called_losses
from attnres.models import build
from attnres.scale.pipeline import Pipeline, plan_cut, schedule_named
from attnres.training.parallel import join_processes

RANKS, STEPS, WARM_UP = 2, 5, 2
WORDS, LAYERS, BLOCK_SIZE, MICROBATCHES = 512, 8, 4, 8
SCHEDULES = ("1f1b", "interleaved")
WAIT, STEP = "waiting", "step"

Span = tuple[float, float]
"""Begin and end, in seconds."""


def union(spans: list[Span]) -> list[Span]:
    """The same times, none twice, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def shared(spans: list[Span], others: list[Span]) -> float:
    """Seconds of `spans`, each by itself, that lie in the union of the others."""
    apart = union(others)
    return sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in spans for start, stop in apart)


def seconds(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def figures(profiled: profile) -> dict[str, float]:
    """Of one step of this process: seconds in all, of them waiting; messages, seconds of their spans, and the share of
    these in which the process did not wait."""
    of: dict[str, list[Span]] = {STEP: [], WAIT: [], "gloo:send": [], "gloo:recv": []}
    for event in profiled.events() or ():
        if event.name in of:
            of[event.name].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    waiting = union(of[WAIT])
    row = {"step_s": seconds(of[STEP]), "waiting_s": seconds(waiting)}
    for name in ("send", "recv"):
        spans = of[f"gloo:{name}"]
        row |= {f"{name}s": len(spans), f"{name}s_s": seconds(spans)}
        row[f"{name}s_under_work"] = 1 - shared(spans, waiting) / seconds(spans)
    return row


def note_waits() -> None:
    """Make every wait for a message an event of the profiler."""
    wait = dist.Work.wait

    def noted(work: Any, *args: Any, **options: Any) -> Any:
        with record_function(WAIT):
            return wait(work, *args, **options)

    dist.Work.wait = noted


def note_sends() -> list[int]:
    """Return a list to which every message between stages adds its bytes from now on."""
    sent: list[int] = []

    def noted(way: str) -> None:
        operations = getattr(PipelineStage, way)

        def counted(stage: PipelineStage, chunk: int) -> list[dist.P2POp]:
            made = operations(stage, chunk)
            sent.extend(each.tensor.numel() * each.tensor.element_size() for each in made)
            return made

        setattr(PipelineStage, way, counted)

    noted("get_fwd_send_ops")
    noted("get_bwd_send_ops")
    return sent


def work(options: argparse.Namespace) -> None:
    """Run and profile the steps in one of the processes; the first one writes what all of them measured."""
    torch.set_num_threads(1)
    who, rows = join_processes("cpu"), {}
    group = dist.new_group(list(range(who.world_size)))
    note_waits()
    sent = note_sends()
    for name in SCHEDULES:
        torch.manual_seed(options.seed)
        size = {"family": "qwen3", "hidden_size": options.width, "num_hidden_layers": LAYERS, "head_dim": 32}
        size |= {"num_attention_heads": options.width // 32, "num_key_value_heads": options.width // 64}
        size["intermediate_size"] = 3 * options.width
        model = build(
            size, "block", vocab_size=WORDS, max_positions=options.tokens, settings={"block_size": BLOCK_SIZE}
        )
        pipe = Pipeline(
            model.train(),
            plan_cut(model, RANKS, name, 2 if schedule_named(name).several else 1),
            schedule=name,
            microbatches=MICROBATCHES,
            batch=options.batch,
            tokens=options.tokens,
            group=group,
            device=torch.device("cpu"),
            losses=lambda model, call, y: called_losses(model, call, y, "whole"),
        )
        x, y = (torch.randint(WORDS, (MICROBATCHES * options.batch, options.tokens)) for _ in "xy")
        steps: list[dict[str, float]] = []
        for number in range(WARM_UP + STEPS):
            sent.clear()
            who.wait()
            with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(STEP):
                pipe.step(x, y, 1 / y.numel())
            if number >= WARM_UP:
                steps.append({**figures(profiled), "sent_bytes": sum(sent)})
        middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        spread = {key: [min(step[key] for step in steps), max(step[key] for step in steps)] for key in steps[0]}
        rows[name] = who.gather({**middle, "ranges": spread})
    if who.first:
        write_json(options.work, rows)


def main() -> None:
    """Start the two processes, and write their figures with where they come from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "overlap_cpu.json")
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options)
        return
    began = time.monotonic()
    shape = {name: getattr(options, name) for name in ("width", "batch", "tokens")}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        flags = [
            word
            for name, value in {**shape, "seed": options.seed, "work": rows}.items()
            for word in (f"--{name}", str(value))
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*torchrun, __file__, *flags], check=True)
        measured = json.loads(rows.read_text())
    shape |= {"layers": LAYERS, "block_size": BLOCK_SIZE, "words": WORDS, "microbatches": MICROBATCHES, "steps": STEPS}
    result = {**harness.head("overlap", torch.device("cpu"), "fp32", options.seed), "backend": "gloo", "shape": shape}
    write_json(options.out, {**result, "ranks": measured})
    text = [["", "rank", "step ms", "waiting", "messages", "sends under work", "receives under work", "MB sent"]]
    for name, ranks in measured.items():
        for rank, row in enumerate(ranks):
            text.append(
                [
                    name,
                    str(rank),
                    f"{1e3 * row['step_s']:.0f}",
                    f"{row['waiting_s'] / row['step_s']:.0%}",
                    f"{row['sends'] + row['recvs']:.0f}",
                    f"{row['sends_under_work']:.0%}",
                    f"{row['recvs_under_work']:.0%}",
                    f"{row['sent_bytes'] / 1e6:.1f}",
                ]
            )
    print(f"{harness.table(text)}\n\nwrote {options.out} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
