"""Commands that need one function call: the flags of each, and the call. Longer commands have files of their own.

Heavy libraries are imported after the flags are parsed.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from attnres.errors import UserError, unknown
from attnres.evals.config import EvalConfig, GenerateConfig
from attnres.files import user_path
from attnres.flags import Settings, fields_of, parse
from attnres.folders import refuse_other
from attnres.inspect.config import CorpusConfig, InspectConfig, LookConfig, SearchConfig


@dataclass
class Figures(LookConfig):
    """Write the figures of models, runs or saved inspections: attnres figures MODEL [MORE ...] OUT/.

    Several are also compared side by side, each in a folder of its own. A model is inspected first (attnres inspect).
    """

    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ... OUT")]
    """Run folders, folders of runs, model folders, hub names, files of attnres inspect; last the folder to write."""
    formats: tuple[str, ...] = ("pdf", "png")
    """File formats: pdf, png, svg. PDF and SVG are vectors, with their text as text."""
    only: tuple[str, ...] = ()
    """Draw these figures alone, e.g. patterns mixing; none is all that apply. A wrong name prints the list."""
    width: str | None = None
    """Width of every figure, such as 3.3in, 8.4cm or 240pt; none is 3.3in or 6.9in, a column or the page of a paper."""
    font: float | None = None
    """Points of tick labels and legends (names of axes have half a point more, titles one); none is 7 or less."""


def _figures(options: Figures) -> None:
    if len(options.paths) < 2:
        raise UserError("expected attnres figures MODEL [MORE ...] OUT: a model, run or inspection, then a folder")

    from attnres.figures.draw import draw

    *sources, out = options.paths
    look = fields_of(options, only=LookConfig)
    draw(sources, out, options.formats, look, options.by, options.only, options.width, options.font)


@dataclass
class Eval(EvalConfig):
    """Score models on text and tasks; several models are compared with the first, paired by item."""

    out: str | None = None
    """JSON file for the results; scores of single items go to NAME.items.jsonl in the same folder."""
    progress: bool = True
    """Show a progress bar."""


def _eval(options: Eval) -> None:
    if options.out is not None and Path(options.out).suffix != ".json":
        raise UserError(f"--out is '{options.out}': expected the name of a .json file")

    from attnres.evals.run import evaluate, refuse_out, show

    if options.out is not None:
        refuse_out(options.out)
    results = evaluate(EvalConfig(**fields_of(options, only=EvalConfig)), progress=options.progress)
    show(results.record)
    if options.out is not None:
        items = results.save(options.out)
        print(f"{options.out}, item by item in {items}")


@dataclass
class App(CorpusConfig):
    """Look into one or two models in the browser: what every token reads, and the prediction after an ablation.

    With --corpus the page can search that text.
    """

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL [MODEL2]]")] = ()
    """Run folders, model folders or hub names, at most two; none opens the demo's Block and Full in runs/demo, or,
    without these, `example`, the small model that comes with the package. The checkpoints that a run kept (--keep-at)
    can be chosen too."""
    host: str = "127.0.0.1"
    """Address to serve on; 127.0.0.1 is this machine alone. Anyone who can reach another address can use the models."""
    port: int = 7860
    """Port to serve on; 0 is any that is free."""
    names: tuple[str, ...] = ()
    """With --host: other host names that requests may have, such as a proxy's or a container's."""
    open: bool = False
    """Open the page in a browser."""


def _app(options: App) -> None:
    from attnres.app import serve

    values = fields_of(options)
    serve(values.pop("models"), browser=values.pop("open"), **values)


@dataclass
class Report:
    """Make table.csv, curves.csv and report.html from run folders, finished or not."""

    dirs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUNS ...")]
    """Run folders, or folders of runs as `attnres compare` makes them."""
    out: str | None = None
    """Folder to write them into; none is the folder of runs itself, or report/ here for several."""
    images: str | None = None
    """png or svg: also write every figure as a file of its own."""


def _report(options: Report) -> None:
    if not options.dirs:
        raise UserError("no folder given: expected attnres report DIR..., run folders or folders of runs")
    if options.images not in (None, "png", "svg"):
        raise unknown("image format", options.images, ("png", "svg"))
    folders = tuple(user_path(folder) for folder in options.dirs)
    out = user_path(options.out) if options.out else folders[0] if len(folders) == 1 else Path("report")

    from attnres.report.page import show
    from attnres.report.runs import load_study

    study = load_study(*folders)
    if not any(folder.resolve() == out.resolve() for folder in folders):
        refuse_other(out, "report")
    show(study, out, options.images)


@dataclass
class Prepare:
    """Tokenise a corpus into shards. Training does this by itself; use it to prepare data ahead or in a folder of
    yours."""

    source: str = "stdlib"
    """stdlib (Python's own sources), a file or folder (.txt, .md, .jsonl, .json, .csv, .parquet, .arrow, .py and other
    code; text also as .gz or .zst; what datasets.save_to_disk wrote), a pattern ('data/**/*.txt'),
    hub:NAME[:CONFIG[:SPLIT]] or task:NAME. Of a folder the split train is read; a line says what is left out."""
    tokenizer: str = "bpe:4096"
    """bpe:VOCAB trains a byte-level BPE on the training text; else a local tokenizer folder or a hub name."""
    column: str = "text"
    """Field or column that holds the text, of rows."""
    held_out: float = 0.05
    """Fraction of the documents held out for validation."""
    limit: int | None = None
    """Read at most this many characters of the source; none reads all."""
    out: str | None = None
    """Folder for the shards; none is one in the cache. What was read of the hub under a limit is stored beside it, and
    not read again by an interrupted command that is given again."""


def _prepare(options: Prepare) -> None:
    from attnres.data import prepare

    prepared = prepare(**fields_of(options))
    for name, split in prepared.header["splits"].items():
        print(f"{name}: {split['tokens']:,} tokens in {split['documents']:,} documents")
    print(f"{prepared.path} (vocabulary {prepared.vocab_size:,})")


@dataclass
class Export:
    """Write a model as a graph for other runtimes, its logits compared with the model's; or its weights."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run folder, model folder or hub name."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write, new or empty."""
    onnx: bool = False
    """Write ONNX, checked in onnxruntime (extra `export`); otherwise a file for torch.export.load."""
    weights: bool = False
    """Write Hugging Face safetensors, also of a sharded checkpoint."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


def _export(options: Export) -> None:
    remote = options.trust_remote_code
    if options.weights:
        if options.onnx:
            raise UserError("both --weights and --onnx are given: give one of them")
        from attnres.training.checkpoint import export_weights

        print(export_weights(options.model, options.out, trust_remote_code=remote))
        return

    from attnres.models.export import export_graph

    print(export_graph(options.model, options.out, onnx=options.onnx, trust_remote_code=remote))


@dataclass
class Families:
    """Print which families of decoders convert, how exactly, and what is refused and why."""


def _families(options: Families) -> None:
    from rich.table import Table

    from attnres.models import families_table
    from attnres.progress import wide

    table = Table("family", "model types", "converts", "", title="Decoders that depth reads go into")
    for row in families_table():
        table.add_row(row.family, ", ".join(row.model_types), row.kind, row.note)
    wide().print(table)
    print("Others are probed: what follows a pre-norm decoder's pattern converts, verified by its logits.")


@dataclass
class Check:
    """Check a residual mechanism: one line a check, exit status 1 if one fails.

    Shapes, dtypes, gradients against finite differences, states, pipeline cuts, activation checkpointing, compilation,
    described against actual reads, and training, cached decoding, saving and loading in a small model.
    """

    residual: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME|FILE.py:CLASS")]
    """A mechanism's name, or the file and class of one of your own."""
    settings: Settings = field(default_factory=dict)
    """Settings of the residual, e.g. num_streams=2; none are its defaults."""


def _check(options: Check) -> None:
    from attnres.models.check import checks

    failures = 0
    for outcome in checks(options.residual, options.settings):
        failures += not outcome.passed
        print(f"{outcome.name:<14} {'ok' if outcome.passed else 'FAILED':<7} {outcome.detail}", flush=True)
    if failures:
        print(f"{failures} {'check' if failures == 1 else 'checks'} failed")
        sys.exit(1)


CALLS: dict[str, tuple[type, str, Callable[[Any], None] | str]] = {
    "inspect": (InspectConfig, "loading the model and reading text", "attnres.inspect.look:look"),
    "search": (SearchConfig, "loading the model and reading text", "attnres.inspect.corpus:find_tokens"),
    "figures": (Figures, "inspecting models, then drawing", _figures),
    "generate": (GenerateConfig, "loading the model", "attnres.evals.generate:speak"),
    "eval": (Eval, "reading tasks, then loading the models", _eval),
    "app": (App, "loading the models, then serving the page", _app),
    "report": (Report, "reading runs", _report),
    "prepare": (Prepare, "reading and tokenising text", _prepare),
    "export": (Export, "loading the model, to compare the graph's logits with its own", _export),
    "families": (Families, "importing Transformers", _families),
    "check": (Check, "checking in a small model", _check),
}
"""Command -> the dataclass of its flags, what it does first (see `parse`), and the function that takes the flags;
MODULE:FUNCTION is imported after parsing."""


def run(command: str, arguments: list[str]) -> None:
    """Parse the arguments after the command's name and run the command."""
    kind, doing, call = CALLS[command]
    options = parse(command, kind, arguments, doing=doing)
    if isinstance(call, str):
        module, _, name = call.partition(":")
        call = getattr(importlib.import_module(module), name)
    call(options)
