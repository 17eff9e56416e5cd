"""Train variants under equal conditions: the same data, initial shared weights, batches and held-out windows.

Every variant and seed has a run folder in the comparison's folder and is trained in a child process. Finished runs are
skipped and interrupted ones resumed. At the end the variants are timed, interleaved, and the table and the report are
written.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attnres.comparison.children import Child
from attnres.comparison.plan import CompareConfig, ComparisonPlan, make_plan
from attnres.comparison.speed import StepOptions, step_times
from attnres.comparison.watch import Ended, RunStatus, train_all
from attnres.device import cores
from attnres.errors import UserError
from attnres.files import locked, write_json
from attnres.folders import refuse_other
from attnres.ops import cpu
from attnres.ops.devices import KERNELS, is_host
from attnres.progress import say as print_line
from attnres.reading import read_json
from attnres.report.page import EXPLORER, explored, show, write_report
from attnres.report.runs import Study, load_study
from attnres.report.table import ROUNDS
from attnres.text import duration
from attnres.training.config import size_or_default, to_dict
from attnres.training.data import data_record, held_out, prepare_from
from attnres.training.environment import emulated
from attnres.training.records import TIMES, Compared
from attnres.training.run_folder import claim, same_data
from attnres.typed import checked

VERSION = 1
EARLY_S = 20.0
"""Seconds of training after which the report is first written, even if no run has ended."""


@dataclass(frozen=True)
class OpenComparison:
    """A comparison whose folder this process has locked: its unfinished runs, and the time of the finished ones.

    Attributes:
        children: unfinished runs, in order.
        walls: wall-clock seconds of the finished runs, by name.
        jobs: number of runs to train at once.
    """

    out: Path
    plan: ComparisonPlan
    children: list[Child]
    walls: dict[str, float]
    jobs: int
    vocabulary: int


@contextmanager
def opened(
    config: CompareConfig,
    say: Console,
    fill: Callable[[ComparisonPlan, dict[str, Any]], None] | None = None,
    here: bool = True,
    runs: int | None = None,
) -> Generator[OpenComparison]:
    """Lock a comparison's folder, prepare its data and write its plan; other processes cannot use the folder meanwhile.

    The number of parallel runs and the threads of each are stored in compare.json and reused until `config.jobs`
    changes them, because sums round differently with another number of threads.

    Args:
        fill: called with the plan and the content of data.json before the finished runs are listed; it may copy run
            folders trained on the same data into the folder.
        here: whether the runs are trained on this machine; otherwise their devices are not checked.
        runs: total number of runs that share the machine, if more than the comparison's are trained.

    Raises:
        UserError: something cannot run, or the folder holds something else.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("compare was started by torchrun, but it starts its runs itself: give attnres compare alone")
    plan = make_plan(config, here)
    out = refuse_other(config.out, "comparison")
    with locked(out):
        finished = _claim(out, plan)
        vocabulary, record = _prepare(out, plan, say)
        path = out / "compare.json"
        before: Compared = checked(read_json(path), Compared, path, "choose another --out") if path.is_file() else {}
        jobs, threads = _share(before, config.jobs, plan, vocabulary, runs or len(plan.runs))
        kernels = _kernels(before, plan)
        # Before anything else, so that the folder is recognised as a comparison however early it is stopped.
        write_json(
            path,
            {
                "version": VERSION,
                "labels": list(plan.variants),
                "seeds": config.seeds,
                "baseline": plan.baseline,
                "variants": {label: dataclasses.asdict(variant) for label, variant in plan.variants.items()},
                "jobs": jobs,
                "threads": threads,
                "kernels": kernels,
            },
        )
        for stale in (out / "configs").glob("*.error"):
            stale.unlink()
        for name, run in plan.runs.items():
            write_json(out / "configs" / f"{name}.json", to_dict(run))
        if fill is not None:
            fill(plan, record)
            finished = _claim(out, plan)
        children = [
            Child(
                name,
                out / name,
                out / "configs" / f"{name}.json",
                run.steps,
                threads=threads,
                kernels=kernels is not None,
                names_gpu=":" in plan.first.device,
            )
            for name, run in plan.runs.items()
            if name not in finished
        ]
        if children and here and (warning := emulated(torch.device(plan.first.device), plan.first.dtype)):
            print_line(say, warning)
        walls = {name: float(summary.get("wall_s") or 0) for name, summary in finished.items()}
        yield OpenComparison(out, plan, children, walls, jobs, vocabulary)


def compare(config: CompareConfig, *, console: Console | None = None) -> Study:
    """Train the missing runs, time the variants, and write the table and the report from the run folders.

    >>> compare(CompareConfig(["standard", "block"], seeds=[0, 1], base=TrainConfig(steps=200)))  # doctest: +SKIP

    Writes OUT/LABEL-seedK/, OUT/compare.json, OUT/speed.json, OUT/table.csv, OUT/curves.csv, OUT/explorer.html (the
    explorer's page of two finished models) and OUT/report.html. The report is written as soon as a held-out loss can be
    compared with the baseline's. Progress goes to stderr, the table to stdout.

    Raises:
        UserError: something cannot run, or a folder holds something else; what is finished stays.
        Interrupted: SIGTERM, or Ctrl-C during a run; the same command continues.
    """
    say = console or Console(stderr=True)
    with opened(config, say) as work:
        for note in work.plan.notes:
            say.print(note, highlight=False, soft_wrap=True)
        status = RunStatus(work.out, work.plan)

        def report(what: str) -> None:
            page = write_report(load_study(work.out), work.out)[0]
            say.print(f"{page} has {what}", highlight=False)

        began = time.monotonic()

        def early() -> None:
            late = time.monotonic() - began > EARLY_S
            if late and not (work.out / "report.html").exists() and status.measured():
                report("the first held-out losses: look at it now, it is written again as runs end")

        def ended(child: Child) -> None:
            finished = len(status.finished())
            # otherwise the last report is written soon anyway
            others_begin = finished + work.jobs <= len(work.plan.runs)
            if others_begin and status.comparable():
                report(f"the {finished} runs that are finished")

        done = [Ended(name, 1.0, wall) for name, wall in work.walls.items()]
        train_all(work.children, done, jobs=work.jobs, say=say, status=status.table, on_end=ended, on_poll=early)
        if config.timing_s > 0 and config.base.finetune.init_from is not None:
            say.print("no interleaved timing for a pretrained model: the table has each run's own step time")
        elif config.timing_s > 0:
            time_steps(work, config.timing_s, say)
        study = load_study(work.out)
        _save_explorer(study, work.out, say)
        show(study, work.out)
        return study


def _save_explorer(study: Study, out: Path, say: Console) -> None:
    """Write the explorer's page of the finished models, with the held-out text of their inspections; if that is
    impossible, print the reason."""
    from attnres.app.page import save_page

    runs = explored(study)
    if not runs:  # placebo controls alone
        return
    examples = [run.inspection.example for run in runs if run.inspection is not None and run.inspection.example]
    text = "".join(examples[0]["tokens"]) if examples else None
    try:
        save_page([run.folder for run in runs], text, out / EXPLORER)
    except UserError as error:
        (out / EXPLORER).unlink(missing_ok=True)
        print_line(say, f"no page of the explorer beside the report: {error}")


def _claim(out: Path, plan: ComparisonPlan) -> dict[str, dict[str, Any]]:
    """Return the summaries of the finished runs. Raises UserError if a run folder has another configuration."""
    summaries = {name: claim(out / name, to_dict(run), resume=True) for name, run in plan.runs.items()}
    return {name: summary for name, summary in summaries.items() if summary is not None}


def _prepare(out: Path, plan: ComparisonPlan, say: Console) -> tuple[int, dict[str, Any]]:
    """Tokenise the source once, so that the runs find it in the cache; return the vocabulary size and the content of
    data.json.

    Raises UserError where a run in `out` was trained on other data.
    """
    data = plan.first.data
    prepared = prepare_from(data)
    record = data_record(prepared, held_out(prepared, data))
    for name in plan.runs:
        same_data(out / name, record)
    splits = prepared.header["splits"]
    counts = ", ".join(f"{split} {splits[split]['tokens']:,} tokens" for split in ("train", "val"))
    say.print(f"data {data.source}: {counts}", highlight=False, soft_wrap=True)
    return prepared.vocab_size, record


# ------------------------------------------------------------------ training


def _kernels(before: Compared, plan: ComparisonPlan) -> str | None:
    """Return the build of the C kernels that all runs use, None for plain torch; a continued comparison keeps its
    build.

    Raises:
        UserError: that build is not available, and the configuration does not allow another one.
    """
    if "kernels" not in before:
        return cpu.version()
    with cpu.switched(before["kernels"] is not None):
        version = cpu.version()
    if before["kernels"] != version and not plan.first.allow_different:
        raise UserError(
            f"the comparison was begun with build {before['kernels']} of the C kernels, and here is {version}: runs "
            "would differ by more than their variants; continue it where it was begun, choose another --out, or "
            "give --allow-different"
        )
    return version


def _share(
    before: Compared, jobs_option: int | None, plan: ComparisonPlan, vocabulary: int, runs: int
) -> tuple[int, int]:
    """Return how many runs train at once, and the threads of each. A continued comparison keeps both. If the number of
    jobs changed, new runs divide the threads anew and begun runs keep theirs: more threads than cores would wait for
    one another."""
    jobs = jobs_option or before.get("jobs") or _jobs(plan, vocabulary, runs)
    threads = before.get("threads") if jobs == before.get("jobs") else None
    return jobs, threads or max(1, torch.get_num_threads() // jobs)


def _jobs(plan: ComparisonPlan, vocabulary: int, runs: int) -> int:
    """Return the default number of parallel runs. On a CPU: one a core (two small models on a thread each train faster
    than one on two threads), as many as fit in memory, at most four. On GPUs: one each; one if the device names a
    GPU."""
    device = torch.device(plan.first.device)
    if not is_host(device):
        return max(1, len(KERNELS[device.type].devices())) if device.index is None else 1
    jobs = min(cores(), 4, runs)
    while jobs > 1 and not _fits(jobs, plan, vocabulary):
        jobs -= 1
    return max(1, jobs)


# ------------------------------------------------------------------ timing


PLAIN = "plain"
"""Label, in timings, of the family's unmodified Transformers model."""


def time_steps(work: OpenComparison, seconds: float, say: Console) -> None:
    """Time the variants and write OUT/speed.json, unless it exists for the same variants, shape and machine
    settings."""
    out, plan, vocabulary = work.out, work.plan, work.vocabulary
    run = plan.first
    models = {label: (variant.residual, variant.settings) for label, variant in plan.variants.items()}
    # A learning rate changes no time: variants that differ only in it are timed once, under the first label.
    kinds = {label: next(one for one in models if models[one] == models[label]) for label in models}
    names = ("batch_size", "accumulation", "dtype", "device", "compile", "loss", "gradient_checkpointing")
    shape: dict[str, Any] = {"vocab_size": vocabulary, "seq_len": run.data.seq_len}
    shape |= {name: getattr(run, name) for name in names}
    settings = {"size": run.model.size, "optimizer": run.optim.optimizer, **shape}
    if run.cuda_graphs:  # timings of earlier versions lack this key
        settings["cuda_graphs"] = True
    key = {"variants": {label: list(model) for label, model in models.items()}, "settings": settings}
    path = out / TIMES
    before = read_json(path) if path.is_file() else None
    if isinstance(before, dict) and before.get("key") == key:
        return
    labels = list(dict.fromkeys(kinds.values()))
    if not _fits(len(labels) + 1, plan, vocabulary):
        say.print("the models do not fit in memory together: no interleaved timing", highlight=False)
        return
    say.print(
        f"timing {len(labels)} variants and the plain model, interleaved, about {duration(seconds)}",
        style="bold",
        highlight=False,
    )
    options = StepOptions(size_or_default(run.model), optim=run.optim, cuda_graphs=run.cuda_graphs, **shape)
    timed = {PLAIN: (None, {}), **{label: models[label] for label in labels}}
    # A ratio from fewer than ROUNDS rounds is not shown.
    speed = step_times(timed, options, baseline=PLAIN, seconds=seconds, least=ROUNDS)
    times = speed.pop("variants")
    speed["variants"] = {label: times[kinds[label]] for label in plan.variants}
    write_json(path, {"key": key, **speed, "plain": times[PLAIN]})


def _fits(models: int, plan: ComparisonPlan, vocabulary: int) -> bool:
    """Return whether this many models, with gradients and AdamW's state (16 bytes a parameter), take at most half of
    the free memory."""
    from attnres.models import build

    run = plan.first
    if plan.start is not None:
        parameters = plan.start.weights.parameters
    else:
        with torch.device("meta"):
            model = build(
                size=size_or_default(run.model),
                residual="standard",
                vocab_size=vocabulary,
                max_positions=run.data.seq_len,
                seed=0,
            )
        parameters = sum(parameter.numel() for parameter in model.parameters())
    needed = 16 * parameters * models
    if not is_host(device := torch.device(run.device)):
        return needed < torch.get_device_module(device).mem_get_info()[0] / 2
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return True
    return needed < free / 2
