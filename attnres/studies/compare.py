"""Variants side by side under equal conditions: the same data, initial shared weights, batches and held-out windows.

Every variant and seed is a run folder in one folder, trained in a process of its own. What is finished is skipped, what
was interrupted is resumed. At the end the variants are timed in turn, and the table and the report are made.
"""

import dataclasses
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from attnres.errors import UserError
from attnres.files import read_json, write_json
from attnres.report.runs import Study
from attnres.report.show import show
from attnres.studies.children import Child, available_cores, run_children
from attnres.studies.speed import step_times
from attnres.studies.variants import Variant, parse_variants
from attnres.train.config import TrainConfig, check, resolve, to_dict
from attnres.train.environment import has_bf16
from attnres.train.interrupt import Interrupted
from attnres.train.run_folder import claim

VERSION = 1


@dataclass
class CompareConfig:
    """What is compared: every variant with every seed, everything else as in `base`."""

    variants: list[str] = field(default_factory=lambda: ["standard", "rescaled", "block", "full"])
    seeds: list[int] = field(default_factory=lambda: [0])
    lrs: list[float] = field(default_factory=list)
    base: TrainConfig = field(default_factory=TrainConfig)
    out: str = "runs/compare"
    jobs: int | None = None
    timing_s: float = 20.0


@dataclass(frozen=True)
class Plan:
    """The runs that a configuration asks for, by name (`LABEL-seedK`), and the label the others are held against."""

    variants: dict[str, Variant]
    runs: dict[str, TrainConfig]
    baseline: str


def compare(config: CompareConfig, *, console: Console | None = None) -> Study:
    """Train what is not trained yet, time it, and make table and report from what is then on disk.

    Writes OUT/LABEL-seedK/, OUT/compare.json, OUT/speed.json, OUT/table.csv and OUT/report.html. Progress goes to
    stderr, the table to stdout.

    Raises:
        UserError: something cannot run, or a folder holds something else; what is finished stays.
        Interrupted: Ctrl-C or SIGTERM; the same command continues.
    """
    say = console or Console(stderr=True)
    plan = make_plan(config)
    out = Path(config.out)
    finished = _claim(out, plan)
    vocabulary = _prepare(config.base, say)
    for name, run in plan.runs.items():
        write_json(out / "configs" / f"{name}.json", to_dict(run))
    write_json(
        out / "compare.json",
        {
            "version": VERSION,
            "labels": list(plan.variants),
            "seeds": config.seeds,
            "baseline": plan.baseline,
            "variants": {label: dataclasses.asdict(variant) for label, variant in plan.variants.items()},
        },
    )
    children = [
        Child(name, out / name, out / "configs" / f"{name}.json", run.steps)
        for name, run in plan.runs.items()
        if name not in finished
    ]
    if finished:
        say.print(f"{len(finished)} of {len(plan.runs)} runs are finished already", highlight=False)
    if children:
        jobs = config.jobs or _jobs(plan, vocabulary, len(children))
        _train(children, out, len(plan.runs), [float(s.get("wall_s") or 0) for s in finished.values()], jobs, say)
    if config.timing_s > 0:
        _time(out, plan, vocabulary, config.timing_s, say)
    return show(out, out=out)


def make_plan(config: CompareConfig) -> Plan:
    """Every run's full configuration, checked: a mistake in the last variant shows before the first is trained."""
    base = config.base
    if not config.seeds or len(set(config.seeds)) < len(config.seeds) or min(config.seeds) < 0:
        raise UserError(f"seeds are {config.seeds}: expected different whole numbers from 0, e.g. 0 1 2")
    if config.jobs is not None and config.jobs < 1:
        raise UserError(f"jobs is {config.jobs}: expected 1 or more runs at a time")
    variants = {variant.label: variant for variant in parse_variants(config.variants, config.lrs)}
    device = ("cuda" if torch.cuda.is_available() else "cpu") if base.device == "auto" else base.device
    dtype = ("bf16" if has_bf16(torch.device(device)) else "fp32") if base.dtype == "auto" else base.dtype
    runs = {}
    for seed in config.seeds:  # seed by seed: what is there first is one whole comparison
        for label, variant in variants.items():
            name = f"{label}-seed{seed}"
            model = dataclasses.replace(
                base.model,
                residual=variant.residual,
                settings={**variant.settings},
                block_size=None,
                num_blocks=None,
            )
            optim = base.optim if variant.lr is None else dataclasses.replace(base.optim, lr=variant.lr)
            run = dataclasses.replace(
                base,
                model=model,
                optim=optim,
                seed=seed,
                name=name,
                out=str(Path(config.out) / name),
                device=device,
                dtype=dtype,
                resume=True,
            )
            runs[name] = resolve(run)
            check(runs[name])
    for variant in variants.values():
        _try_building(base, variant)
    baseline = next(
        (label for label, variant in variants.items() if variant.residual == "standard"), next(iter(variants))
    )
    return Plan(variants, runs, baseline)


def _try_building(base: TrainConfig, variant: Variant) -> None:
    """Refuse settings that the residual or the model refuses; on the meta device, where a model costs no memory."""
    from attnres.models import build

    with torch.device("meta"):
        build(
            size=base.model.size,
            residual=variant.residual,
            vocab_size=256,
            max_positions=base.data.seq_len,
            settings=variant.settings,
        )


def _claim(out: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Summaries of the runs that are finished; refuses a folder that holds something else or other configurations."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / "compare.json").is_file():
        raise UserError(f"{out} is not empty and holds no comparison: choose another --out")
    found = {name: claim(out / name, to_dict(run), resume=True) for name, run in plan.runs.items()}
    return {name: summary for name, summary in found.items() if summary is not None}


def _prepare(base: TrainConfig, say: Console) -> int:
    """Tokenise once, before the runs: they find the result in the cache. Returns the size of the vocabulary."""
    from attnres.data import prepare

    data = base.data
    prepared = prepare(
        data.source,
        data.tokenizer,
        held_out=data.held_out,
        limit=data.limit,
        column=data.column,
        progress=True,
    )
    splits = prepared.header["splits"]
    counts = ", ".join(f"{split} {splits[split]['tokens']:,} tokens" for split in ("train", "val"))
    say.print(f"data {data.source}: {counts}", highlight=False, soft_wrap=True)
    return prepared.vocab_size


# ------------------------------------------------------------------ training


def _jobs(plan: Plan, vocabulary: int, waiting: int) -> int:
    """Runs at once where none are asked for: on a CPU one a core (two small models on a thread each train faster than
    one on two threads), as many as fit in memory and at most four; on a GPU one."""
    if not next(iter(plan.runs.values())).device.startswith("cpu"):
        return 1
    jobs = min(available_cores(), 4, waiting)
    while jobs > 1 and not _fits(jobs, plan, vocabulary):
        jobs -= 1
    return max(1, jobs)


def _train(children: list[Child], out: Path, total: int, walls: list[float], jobs: int, say: Console) -> None:
    """Run the children, one line before each with the time left in all; several at once: one bar each."""
    first, started, left = total - len(children), 0, len(children)
    with _bars(say, enabled=jobs > 1) as bars:

        def on_start(child: Child) -> None:
            nonlocal started
            started += 1
            remaining = f", about {duration(sum(walls) / len(walls) * left / jobs)} left in all" if walls else ""
            say.print(f"run {first + started}/{total} {child.name}{remaining}", style="bold", highlight=False)
            bars.add(child)

        def on_end(child: Child) -> None:
            nonlocal left
            left -= 1
            walls.append(time.monotonic() - child.began)
            bars.remove(child)
            if jobs > 1:
                say.print(f"{child.name} finished in {duration(walls[-1])}", highlight=False)

        run_children(
            children,
            jobs=jobs,
            on_start=on_start,
            on_end=on_end,
            on_poll=bars.update,
            log_of=lambda child: out / "logs" / f"{child.name}.log" if jobs > 1 else None,
        )


class _Bars:
    """A bar for each running child, read from its metrics; nothing where there is no terminal."""

    def __init__(self, progress: Progress | None):
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}
        self.starts: dict[str, tuple[float, int]] = {}

    def add(self, child: Child) -> None:
        if self.progress is not None:
            done = child.step()
            self.tasks[child.name] = self.progress.add_task(child.name, total=child.steps, completed=done, left="")
            self.starts[child.name] = (time.monotonic(), done)

    def update(self, running: list[Child]) -> None:
        for child in running if self.progress is not None else []:
            began, first = self.starts[child.name]
            step = child.step()
            pace = (time.monotonic() - began) / max(1, step - first)
            left = f"left {duration(pace * (child.steps - step))}" if step > first else ""
            if self.progress is not None:
                self.progress.update(self.tasks[child.name], completed=step, left=left)

    def remove(self, child: Child) -> None:
        if self.progress is not None:
            self.progress.remove_task(self.tasks.pop(child.name))


@contextmanager
def _bars(say: Console, *, enabled: bool) -> Generator[_Bars]:
    if not enabled or not say.is_terminal:
        yield _Bars(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=say) as progress:
        yield _Bars(progress)


def duration(seconds: float) -> str:
    """Hours, minutes or seconds, to the precision that an estimate deserves.

    >>> duration(42), duration(310), duration(8000)
    ('42 s', '5 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


# ------------------------------------------------------------------ timing


def _time(out: Path, plan: Plan, vocabulary: int, seconds: float, say: Console) -> None:
    """Write OUT/speed.json unless it is there for the same variants, shape and machine settings."""
    run = next(iter(plan.runs.values()))
    # A learning rate changes no time: variants that differ only in it are timed once.
    kinds: dict[str, str] = {}
    for label, variant in plan.variants.items():
        same = (other for other in kinds.values() if _same_model(plan.variants[other], variant))
        kinds[label] = next(same, label)
    key = {
        "variants": {label: [v.residual, v.settings] for label, v in plan.variants.items()},
        "settings": {
            "size": run.model.size,
            "vocab_size": vocabulary,
            "seq_len": run.data.seq_len,
            "batch_size": run.batch_size,
            "accumulation": run.accumulation,
            "optimizer": run.optim.optimizer,
            "dtype": run.dtype,
            "device": run.device,
            "compile": run.compile,
        },
    }
    path = out / "speed.json"
    if path.is_file() and read_json(path).get("key") == key:
        return
    labels = list(dict.fromkeys(kinds.values()))
    if not _fits(len(labels), plan, vocabulary):
        say.print("the models do not fit in memory together: no interleaved timing", highlight=False)
        return
    say.print(f"timing {len(labels)} variants in turn, about {duration(seconds)}", style="bold", highlight=False)
    try:
        speed = step_times(
            {label: (plan.variants[label].residual, plan.variants[label].settings) for label in labels},
            size=run.model.size,
            vocab_size=vocabulary,
            seq_len=run.data.seq_len,
            batch_size=run.batch_size,
            accumulation=run.accumulation,
            optim=run.optim,
            dtype=run.dtype,
            device=run.device,
            compile=run.compile,
            baseline=kinds[plan.baseline],
            seconds=seconds,
        )
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped while timing, every run is finished: give the same command to continue", 130
        ) from None
    speed["variants"] = {label: speed["variants"][kinds[label]] for label in plan.variants}
    write_json(path, {"key": key, **speed})


def _same_model(a: Variant, b: Variant) -> bool:
    return (a.residual, a.settings) == (b.residual, b.settings)


def _fits(models: int, plan: Plan, vocabulary: int) -> bool:
    """Whether so many models with gradients and AdamW's state (16 bytes a parameter) take half the free memory at most."""
    from attnres.models import build

    run = next(iter(plan.runs.values()))
    with torch.device("meta"):
        model = build(
            size=run.model.size, residual="standard", vocab_size=vocabulary, max_positions=run.data.seq_len, seed=0
        )
    needed = 16 * sum(parameter.numel() for parameter in model.parameters()) * models
    if run.device.startswith("cuda"):
        return needed < torch.cuda.mem_get_info()[0] / 2
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return True
    return needed < free / 2
