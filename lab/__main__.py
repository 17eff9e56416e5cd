"""`python -m lab`: run studies, list them, draw their figures, or write the page of all."""

import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from attnres.cli import carry_out, without_debug
from attnres.errors import UserError, unknown
from attnres.files import user_path
from attnres.flags import Settings, parse
from attnres.folders import kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from lab.conduct import ExecutionOptions
    from lab.design import Design, ResultTable, Setting


MOST_SEEDS = 1000
"""Largest number of runs in a group."""
FORMATS = ("pdf", "png")
SEEN_AT_PICO = ("noise", "growth", "structured-vs-memorised")
"""Studies that ask pico for no difference between trained decoders, ResNets or models of steps in depth."""


@dataclass
class StudyOptions:
    """Carry out studies: each a grid of runs, an analysis, figures and a page. The same command continues them."""

    name: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME")] = ()
    """Studies to run, in this order; --list names them. `all` is all of them."""
    preset: str = "nano"
    """The size: seconds, pico, micro, demo, nano or 100m; pico-fp32 to nano-fp32 for a processor that emulates bf16."""
    seeds: int | None = None
    """Runs of a group; none is the preset's number. The noise study takes more."""
    source: str | None = None
    """The text: a file, a folder or hub:NAME; none is the preset's."""
    column: str | None = None
    """Field or column of --source that holds the text, of rows; none is `text`."""
    images: str | None = None
    """CIFAR-10 for the study resnet: a folder or an archive with train/CLASS/*.jpg and test/CLASS/*.jpg."""
    out: str = "runs/studies"
    """OUT/PRESET/NAME is the study's folder."""
    jobs: int | None = None
    """Runs at once; none is one a core, at most four, or one a GPU."""
    budget: float | None = None
    """Hours after which no further run begins; the same command continues."""
    executor: Literal["local", "slurm"] = "local"
    """Where runs are executed: processes on this machine, or jobs of a Slurm cluster (needs submitit)."""
    slurm: Settings = field(default_factory=dict)
    """Settings of the jobs, by submitit's names, e.g. slurm_partition=gpu timeout_min=600 gpus_per_node=1."""
    adopt: tuple[str, ...] = ()
    """Folders, and files runs.jsonl, whose runs are reused, finished or with a checkpoint, if one of the study has
    their configuration and data. Finished runs of the other studies in OUT/PRESET are reused without being named."""
    allow_different: bool = False
    """Continue runs that were begun with other arithmetic (another torch, CPU or build of the C kernels); their results
    then differ in the last bits."""
    dry_run: bool = False
    """Print what would be run and what it costs, and run nothing."""
    list: bool = False
    """Print the studies and what they ask."""
    report: bool = False
    """Write OUT/report.html of all studies in OUT, analysed again, from their runs.jsonl if their run folders are
    missing; nothing is run."""
    figures: str | None = None
    """Draw the figures of the named studies into this folder, from their present state in OUT; nothing is run."""
    formats: tuple[str, ...] = FORMATS
    """Of --figures: pdf, png and svg."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after `python -m lab` and run the command. Raises UserError."""
    options = parse("lab", StudyOptions, arguments, program="python -m")
    if options.figures is not None and (options.dry_run or options.list or options.report):
        raise UserError("--figures is given with --dry-run, --list or --report, which draw nothing: give one of them")
    if options.dry_run:  # before torch is imported, which takes longer than a user waits for a first word
        from rich.console import Console

        from attnres.progress import say

        what = "the runs that are left, then the time of a few steps of each model"
        say(Console(stderr=True), f"estimating {' '.join(options.name)}: {what}")

    from lab.studies import STUDIES

    if options.name and (options.list or options.report):
        flag = "--list" if options.list else "--report"
        raise UserError(f"{flag} applies to all studies: leave out '{options.name[0]}'")
    if options.list:
        return _list(list(STUDIES.values()))
    out = user_path(options.out)
    if (kind := kind_of(out)) not in (None, "report", "other"):
        raise UserError(f"{out} holds something else ({kind}): expected the folder of all studies, OUT/PRESET/NAME")
    if options.report:
        from lab.outcome import report

        return print(report(out))
    designs = _designs(options)
    if options.figures is None and options.formats != FORMATS:
        raise UserError(f"formats is {' '.join(options.formats)}, which needs --figures: give both, or neither")
    if options.figures is not None:
        return _draw(designs, options, out)
    _carry_out(designs, _setting(options, out), options)


def _designs(options: StudyOptions) -> "list[Design]":
    """Return the named studies. Raises UserError."""
    from lab.studies import STUDIES

    if not options.name:
        raise UserError("no study given: expected python -m lab NAME...; --list names them")
    for name in options.name:
        if name not in (*STUDIES, "all"):
            raise unknown("study", name, STUDIES)
    return [STUDIES[name] for name in (STUDIES if "all" in options.name else dict.fromkeys(options.name))]


def _setting(options: StudyOptions, out: Path) -> "Setting":
    """Return the size, text and folder of the studies. Raises UserError for options out of range or incompatible
    ones."""
    from lab.design import Setting
    from lab.presets import PRESETS

    if options.preset not in PRESETS:
        raise unknown("preset", options.preset, PRESETS)
    if options.slurm and options.executor != "slurm":
        raise UserError("--slurm has settings of jobs, but runs are local processes: add --executor slurm")
    preset = PRESETS[options.preset]
    if options.seeds is not None and not 1 <= options.seeds <= MOST_SEEDS:
        raise UserError(f"seeds is {options.seeds}: expected from 1 to {MOST_SEEDS}, how many runs a group has")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"jobs is {options.jobs}: expected 1 or more runs at a time")
    if options.budget is not None and not 0 < options.budget < math.inf:
        raise UserError(f"budget is {options.budget}: expected hours, a number above 0")
    images = None if options.images is None else str(user_path(options.images).resolve())
    if images is not None and not Path(images).exists():
        raise UserError(f"images '{options.images}' does not exist: give a folder or an archive with train/CLASS/*.jpg")
    if options.column is not None and options.source is None:
        raise UserError(f"column is '{options.column}' and the text the preset's own: give --source too")
    if "resnet" in options.name and images is None:
        raise UserError("the study resnet needs --images: a folder or an archive with train/CLASS/*.jpg and test/...")
    return Setting(
        options.preset,
        preset,
        options.seeds or preset.seeds,
        options.source,
        out,
        images,
        options.column,
        options.allow_different,
    )


def _draw(designs: "list[Design]", options: StudyOptions, out: Path) -> None:
    """Draw the figures of those studies that OUT/PRESET has. Raises UserError if a named one is missing."""
    from lab.outcome import draw
    from lab.store import RECORD

    folders = [out / options.preset / design.name for design in designs]
    if "all" in options.name:
        folders = [folder for folder in folders if (folder / RECORD).is_file()]
    if not folders:
        raise UserError(f"{out / options.preset} holds no study: expected {out / options.preset}/NAME/{RECORD}")
    draw(folders, str(options.figures), options.formats)


def _carry_out(designs: "list[Design]", setting: "Setting", options: StudyOptions) -> None:
    """Print what the studies would cost, or run them, with the adopted runs available."""
    from rich.console import Console

    from attnres.progress import say
    from lab.conduct import ExecutionOptions
    from lab.slurm import Slurm
    from lab.store import unpacked

    until = math.inf if options.budget is None else time.monotonic() + 3600 * options.budget
    executor = Slurm(setting.out, options.slurm) if options.executor == "slurm" and not options.dry_run else None
    execution = ExecutionOptions(
        say=Console(stderr=True),
        jobs=options.jobs,
        until=until,
        run=executor,
        here=options.executor == "local",
    )
    names = [design.name for design in designs if design.name not in SEEN_AT_PICO]
    if options.preset.startswith("pico") and names:
        gap = "Block's gap is about one standard deviation of a run (5 at micro, 10 at nano: docs/results/noise.md)"
        say(execution.say, f"{' '.join(names)}: at {options.preset} {gap}")
    with unpacked(user_path(path) for path in options.adopt) as adopted:
        if options.dry_run:
            from attnres.data.sources import open_source
            from lab.conduct import print_estimate

            if options.source is not None and "hub:" not in options.source:
                open_source(options.source)  # refuses a wrong name here, as the study itself would
            return print_estimate(designs, setting, execution, adopted=adopted)
        if setting.images is not None and any(design.name == "resnet" for design in designs):
            from lab.studies.resnet import load_images

            load_images(setting.images)  # errors of the images are raised before anything is written
        _conduct(designs, setting, execution, adopted)


def _conduct(designs: "list[Design]", setting: "Setting", execution: "ExecutionOptions", adopted: list[Path]) -> None:
    from rich.console import Console

    from attnres.progress import say, wide
    from lab.conduct import conduct

    out = wide(Console(highlight=False))
    for design in designs:
        outcome = conduct(design, setting, execution, adopted=adopted)
        _print(outcome.result.tables, out)
        done, planned = outcome.counts
        say(out, outcome.result.answer)
        if done < planned:
            say(out, f"{done} of {planned} runs are finished: the same command continues")
        say(out, str(outcome.folder / "study.html"))


def _print(tables: "Sequence[ResultTable]", out: "Console") -> None:
    from attnres.progress import grid

    for table in tables:
        shown = grid(table.head[0], right=tuple(table.head[1:]))
        for row in table.rows:
            shown.add_row(*row)
        out.print(f"\n{table.title}", style="bold")
        out.print(shown)


def _list(designs: "list[Design]") -> None:
    from rich.console import Console

    from attnres.progress import grid, wide
    from lab.presets import PRESETS

    table, sizes = grid("study", "what it asks"), grid("preset", "what it is")
    for design in designs:
        table.add_row(design.name, design.title)
    for name, preset in PRESETS.items():
        sizes.add_row(name, preset.about)
    for one in (table, sizes):
        wide(Console()).print(one)


def main(arguments: "Sequence[str] | None" = None) -> None:
    """Run a command line (by default this process's); raises SystemExit when it fails."""
    words = without_debug(sys.argv[1:] if arguments is None else arguments)
    carry_out(lambda: run(words), words)


if __name__ == "__main__":
    main()
