"""The command `attnres`: train, compare, report, prepare, convert, families, eval, generate, inspect, figures, app.

Flags are the fields of the configuration dataclasses (tyro reads their docstrings for the help). `--config FILE` gives
a YAML, TOML or JSON file whose values the flags override. A user's mistake is one sentence on stderr and exit status 2.
Heavy libraries are imported by the command that needs them.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from attnres.errors import UserError, unknown
from attnres.evals.config import EvalConfig, GenerateConfig
from attnres.flags import Hidden, Settings, Size, config_file, parse
from attnres.inspect.config import InspectConfig, LookConfig
from attnres.training.config import ModelConfig, OptimConfig, TrainConfig, from_dict

HELP = """\
usage: attnres [-h] [--version] COMMAND [OPTIONS]

Transformers whose sublayers read a learned softmax over earlier outputs.

commands:
  train     train one model
  compare   train variants side by side under equal conditions; without options: the demo
  report    make the table and report.html again from run folders on disk
  prepare   tokenise a corpus
  convert   give a pretrained model depth reads, its logits unchanged
  families  which families of decoders convert
  eval      perplexity and tasks, of one model or of several side by side
  generate  text from a model
  inspect   where every read of a model comes from, and what it does without
  figures   the figures of models and runs, for a paper
  app       look into one or two models in the browser

attnres COMMAND --help shows a command's options.

examples:
  attnres compare
  attnres compare --variants standard block:num_blocks=6 full --seeds 0 1 2 --out runs/blocks
  attnres compare --variants standard block --lrs 5e-4 1e-3 2e-3 --out runs/rates
  attnres train --residual full --source my_text/ --steps 2000 --out runs/mine
  attnres report runs/blocks
  attnres eval runs/blocks/standard-seed0 runs/blocks/block-seed0 --data eval_files/ --tasks wikitext2 lambada
  attnres generate runs/mine --prompt "Once upon a time" --show-depth
  attnres figures runs/demo figures/
  attnres inspect runs/mine --text "Once upon a time" --knock-out embedding@output --attribute
  attnres app runs/demo/block-seed0 runs/demo/full-seed0 --open
"""

# ------------------------------------------------------------------ what each command takes


@dataclass
class _Model(ModelConfig):
    """Which model is trained."""

    size: Size = None
    """nano, 100m, 0.6b, gpt2-124m, or a mapping {family: qwen3, hidden_size: 64, ...}; none is nano."""
    settings: Settings = field(default_factory=dict)
    """Further settings of the residual, e.g. num_streams=4 for hyper_connections."""


@dataclass
class Train(TrainConfig):
    """Train one model. The run goes to a folder; Ctrl-C saves it and --resume continues it."""

    model: _Model = field(default_factory=_Model)  # ty: ignore[incompatible-mutable-override]
    """Which model is trained."""
    config: str | None = None
    """YAML, TOML or JSON file with the same names; flags override it."""
    progress: bool = True
    """Show a progress bar."""


@dataclass
class _SharedModel(ModelConfig):
    """Which model is trained, besides its residual."""

    size: Size = None
    """nano, 100m, 0.6b, gpt2-124m, or a mapping {family: qwen3, hidden_size: 64, ...}; none is nano."""
    residual: Hidden[str] = "standard"
    block_size: Hidden[int | None] = None
    num_blocks: Hidden[int | None] = None
    settings: Hidden[Settings] = field(default_factory=dict)


@dataclass
class _Comparison:
    """What a comparison has and a run has not; a base class, so that the help begins with it."""

    variants: tuple[str, ...] = ("standard", "rescaled", "block", "full")
    """RESIDUAL[:SETTING=VALUE,...][@NAME=VALUE,...], e.g. standard block:num_blocks=6 full@lr=0.003; the names after @
    are lr and those of fine-tuning (train_only, residual_lr, distill_weight, ...)."""
    seeds: tuple[int, ...] = (0,)
    """Every variant is trained with each; from three on the errors are over seeds."""
    lrs: tuple[float, ...] = ()
    """Train every variant at each of these learning rates."""
    jobs: int | None = None
    """Runs trained at once, the processor's threads shared between them; none is one a core, at most four. Their
    threads are settled when the comparison is begun and stay the same when it is continued."""
    timing_s: float = 20.0
    """Seconds for timing the variants in turn at the end; 0 leaves it out."""


@dataclass
class Compare(TrainConfig, _Comparison):
    """Train variants side by side: same data, initial shared weights, batches and held-out windows.

    Finished runs are skipped and interrupted ones resumed, so the same command continues a stopped comparison.
    """

    out: str | None = "runs/compare"
    """Folder of the comparison."""
    steps: int = 800
    """Optimizer steps."""
    val_every: int = 100
    """Steps between validations (there is always one at the end)."""
    model: _SharedModel = field(default_factory=_SharedModel)  # ty: ignore[incompatible-mutable-override]
    """Which model is trained, besides its residual."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(optimizer="muon", muon_lr=1e-2, lr=4e-3))
    """How it is optimised."""
    config: str | None = None
    """YAML, TOML or JSON file with the same names; flags override it."""
    name: Hidden[str | None] = None
    seed: Hidden[int] = 0
    resume: Hidden[bool] = False


@dataclass
class Report:
    """Make table.csv and report.html from run folders, finished or not."""

    dirs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUNS ...")]
    """Run folders, or folders of runs as `attnres compare` makes them."""
    out: str | None = None
    """Folder for table.csv and report.html; none is the given folder, or the current one if several are given."""
    images: str | None = None
    """png or svg: also write every figure as a file of its own."""


@dataclass
class Prepare:
    """Tokenise a corpus into shards. Training does it by itself; this is for doing it ahead or keeping the result."""

    source: str = "stdlib"
    """stdlib (Python's own sources), a file or folder (.txt, .jsonl, .parquet), or hub:NAME[:CONFIG[:SPLIT]]."""
    tokenizer: str = "bpe:4096"
    """bpe:VOCAB trains a byte-level BPE on the training text; else a local tokenizer folder or a hub name."""
    column: str = "text"
    """Field of .jsonl, column of .parquet and hub data sets that holds the text."""
    held_out: float = 0.05
    """Fraction of the documents held out for validation."""
    limit: int | None = None
    """Read at most this many characters of the source; none reads all."""
    out: str | None = None
    """Folder for the shards; none is one in the cache."""


@dataclass
class Eval(EvalConfig):
    """Score models on text and tasks; the differences of several are taken item by item, to the first."""

    out: str | None = None
    """JSON file for the results; the items go beside it, to NAME.items.jsonl."""
    progress: bool = True
    """Show a progress bar."""


@dataclass
class Families:
    """Print which families of decoders convert, how exactly, and what is refused and why."""


@dataclass
class Figures(LookConfig):
    """Write the figures of models, runs or saved inspections: attnres figures MODEL [MORE ...] OUT/.

    Several are also set side by side, each in a folder of its own. A model is looked at first, as attnres inspect does.
    """

    given: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ... OUT")]
    """Run folders, folders of runs, model folders, hub names or files of attnres inspect; last the folder to write."""
    formats: tuple[str, ...] = ("pdf", "png")
    """Of pdf, png and svg."""


@dataclass
class Convert:
    """Give a pretrained model depth reads without changing its logits, and write it.

    A checkpoint of another project's depth reads (open-attention-residuals, FLA, Kimi K3's names, the nanoGPT study's)
    is recognised and becomes one of attnres as it is; --to writes a model of attnres in one of those formats.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder or hub name of a Hugging Face causal language model, or of another project's depth reads."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Folder to write, new or empty."""
    residual: str | None = None
    """How sublayers read earlier outputs: block, full or rescaled; none is block."""
    block_size: int | None = None
    """Sublayers (attention and MLP count apart) in a block; give this or num_blocks."""
    num_blocks: int | None = None
    """Number of blocks; give this or block_size."""
    read_scale: str | None = None
    """sum is exact, and taken if none is given; mean, the paper's, only up to the eps of the norms that follow."""
    dtype: str | None = None
    """Weights in bf16, fp16, fp32 or fp64; none keeps the model's own."""
    to: str | None = None
    """Write a model of attnres in another project's format: open-attnres, fla, kimi or nanogpt."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


@dataclass
class App:
    """Look into one or two models in the browser: what every token reads, and what a prediction is without it."""

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL [MODEL2]]")] = ()
    """Run folders, model folders or hub names, at most two; none opens the demo's Block and Full in runs/demo."""
    host: str = "127.0.0.1"
    """Address to serve on: this machine alone; anyone who reaches another one can use the models."""
    port: int = 7860
    """Port to serve on."""
    open: bool = False
    """Open the page in a browser."""


# ------------------------------------------------------------------ the commands


def train_command(arguments: list[str]) -> None:
    values, arguments = config_file(arguments)
    base = from_dict(values)
    chosen = parse("train", Train, arguments, Train(**_fields(base, model=_Model(**_fields(base.model)))))
    config = TrainConfig(**_fields(chosen, only=TrainConfig, model=_plain_model(chosen.model)))

    from attnres.training import train

    summary = train(config, progress=chosen.progress)
    if chosen.progress:
        print(
            f"held-out loss {summary['val_loss']:.3f} nats per token (perplexity {summary['perplexity']:.2f}) after "
            f"{summary['step']:,} steps, {summary['tokens']:,} tokens"
        )


def compare_command(arguments: list[str]) -> None:
    values, arguments = config_file(arguments)
    own = {name: values.pop(name) for name in _fields(_Comparison()) if name in values}
    demo = TrainConfig(**_fields(Compare(), only=TrainConfig, model=ModelConfig(residual="standard")))
    base = from_dict(values, demo)
    _refuse_own(base, demo)
    model = _SharedModel(**_fields(base.model))
    chosen = parse("compare", Compare, arguments, Compare(**_fields(base, model=model), **_own_values(own)))

    from attnres.studies.compare import CompareConfig, compare

    compare(
        CompareConfig(
            variants=list(chosen.variants),
            seeds=list(chosen.seeds),
            lrs=list(chosen.lrs),
            base=TrainConfig(**_fields(chosen, only=TrainConfig, model=_plain_model(chosen.model))),
            out=chosen.out or "runs/compare",
            jobs=chosen.jobs,
            timing_s=chosen.timing_s,
        )
    )


def report_command(arguments: list[str]) -> None:
    chosen = parse("report", Report, arguments)
    if not chosen.dirs:
        raise UserError("no folder given: expected attnres report DIR..., run folders or folders of runs")
    if chosen.images not in (None, "png", "svg"):
        raise unknown("image format", chosen.images, ("png", "svg"))
    folders = tuple(Path(folder) for folder in chosen.dirs)
    out = Path(chosen.out) if chosen.out else folders[0] if len(folders) == 1 else Path()

    from attnres.report.show import show

    show(*folders, out=out, images=chosen.images)


def prepare_command(arguments: list[str]) -> None:
    chosen = parse("prepare", Prepare, arguments)

    from attnres.data import prepare

    prepared = prepare(
        chosen.source,
        chosen.tokenizer,
        out=chosen.out,
        held_out=chosen.held_out,
        limit=chosen.limit,
        column=chosen.column,
    )
    for name, split in prepared.header["splits"].items():
        print(f"{name}: {split['tokens']:,} tokens in {split['documents']:,} documents")
    print(f"{prepared.path} (vocabulary {prepared.vocab_size:,})")


def eval_command(arguments: list[str]) -> None:
    chosen = parse("eval", Eval, arguments)
    if chosen.out is not None and Path(chosen.out).suffix != ".json":
        raise UserError(f"--out is '{chosen.out}': expected the name of a .json file")

    from attnres.evals.run import evaluate
    from attnres.evals.table import show

    results = evaluate(EvalConfig(**_fields(chosen, only=EvalConfig)), progress=chosen.progress)
    show(results.record)
    if chosen.out is not None:
        items = results.save(chosen.out)
        print(f"{chosen.out}, item by item in {items}")


def generate_command(arguments: list[str]) -> None:
    chosen = parse("generate", GenerateConfig, arguments)

    from attnres.evals.generate import speak

    speak(chosen)


def inspect_command(arguments: list[str]) -> None:
    chosen = parse("inspect", InspectConfig, arguments)

    from attnres.studies.look import look

    look(chosen)


def figures_command(arguments: list[str]) -> None:
    chosen = parse("figures", Figures, arguments)
    if len(chosen.given) < 2:
        raise UserError("expected attnres figures MODEL [MORE ...] OUT: a model, run or inspection, then a folder")
    options = {name: value for name, value in _fields(chosen).items() if name not in ("given", "formats")}

    from attnres.studies.draw import draw

    draw(chosen.given[:-1], chosen.given[-1], chosen.formats, options)


def convert_command(arguments: list[str]) -> None:
    chosen = parse("convert", Convert, arguments)

    from attnres.models import convert, export_foreign, import_foreign
    from attnres.models.foreign_kinds import kinds_of
    from attnres.models.source import locate

    settings = {name: getattr(chosen, name) for name in ("block_size", "num_blocks", "read_scale")}
    settings = {name: value for name, value in settings.items() if value is not None}
    own = [name for name in ("residual", "dtype") if getattr(chosen, name) is not None]
    if chosen.to is not None:
        _as_it_is(f"--to {chosen.to}", [*own, *settings])
        print(export_foreign(chosen.model, chosen.out, chosen.to))
        return
    if kinds := kinds_of(locate(chosen.model).config):
        _as_it_is(f"{chosen.model}, which has the depth reads of '{kinds[0].name}',", [*own, *settings])
        print(import_foreign(chosen.model, chosen.out))
        return
    remote = chosen.trust_remote_code
    residual = chosen.residual or "block"
    print(convert(chosen.model, residual, out=chosen.out, dtype=chosen.dtype, trust_remote_code=remote, **settings))


def _as_it_is(what: str, given: list[str]) -> None:
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{what} is written with the depth reads and the weights that it has: leave out {flags}")


def app_command(arguments: list[str]) -> None:
    chosen = parse("app", App, arguments)

    from attnres.app import explore

    explore(chosen.models, host=chosen.host, port=chosen.port, browser=chosen.open)


def families_command(arguments: list[str]) -> None:
    parse("families", Families, arguments)

    from rich.console import Console
    from rich.table import Table

    from attnres.models import families_table

    table = Table("family", "model types", "converts", "", title="Decoders that depth reads go into")
    for row in families_table():
        table.add_row(row.family, ", ".join(row.model_types), row.kind, row.note)
    Console().print(table)
    print("Others are probed: what follows a pre-norm decoder's pattern converts, verified by its logits.")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train_command,
    "compare": compare_command,
    "report": report_command,
    "prepare": prepare_command,
    "convert": convert_command,
    "families": families_command,
    "eval": eval_command,
    "generate": generate_command,
    "inspect": inspect_command,
    "figures": figures_command,
    "app": app_command,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (by default this process's); leaves with SystemExit when it fails."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(given)
    except UserError as error:
        _fail(str(error), 2)
    except BrokenPipeError:  # the reader of a pipe went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        _fail("stopped", 130)
    except Exception as error:
        # Raised by training only; its class is not imported before training is.
        code = getattr(error, "code", None)
        if type(error).__name__ != "Interrupted" or not isinstance(code, int):
            raise
        _fail(str(error), code, kind="")


def _dispatch(given: list[str]) -> None:
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP, end="")
    elif given[0] == "--version":
        import attnres

        print(f"attnres {attnres.__version__}")
    elif given[0] not in COMMANDS:
        if given[0].startswith("-"):
            raise UserError(
                f"the command comes first, found '{given[0]}': attnres COMMAND [OPTIONS], see attnres --help"
            )
        raise unknown("command", given[0], COMMANDS)
    else:
        COMMANDS[given[0]](given[1:])


def _fail(message: str, code: int, kind: str = "error: ") -> None:
    """Say it on stderr, or to the comparison that started this run (see studies/children.py)."""
    where = os.environ.get("ATTNRES_ERROR_FILE")
    if where:
        with contextlib.suppress(OSError):
            Path(where).write_text(message, encoding="utf-8")
            sys.exit(code)
    print(f"attnres: {kind}{message}", file=sys.stderr)
    sys.exit(code)


# ------------------------------------------------------------------ from files and flags to configurations


def _fields(config: Any, only: Any = None, **changes: Any) -> dict[str, Any]:
    """The fields of a dataclass (those that `only` has) by name, not copied, with changes."""
    names = [item.name for item in dataclasses.fields(only or config)]
    return {name: getattr(config, name) for name in names} | changes


def _plain_model(model: ModelConfig) -> ModelConfig:
    return ModelConfig(**_fields(model, only=ModelConfig))


def _own_values(values: dict[str, Any]) -> dict[str, Any]:
    """A comparison's own keys from a file, as the types of their flags."""
    kinds: dict[str, type] = {"variants": str, "seeds": int, "lrs": float}
    for name, kind in kinds.items():
        if name not in values:
            continue
        value = values[name]
        try:
            if not isinstance(value, list) or (kind is not float and any(type(part) is not kind for part in value)):
                raise TypeError
            values[name] = tuple(kind(part) for part in value)
        except (TypeError, ValueError):
            raise UserError(
                f"{name} is {value!r} in the configuration file: expected a list of {kind.__name__}"
            ) from None
    jobs, seconds = values.get("jobs"), values.get("timing_s", 0)
    if jobs is not None and type(jobs) is not int:
        raise UserError(f"jobs is {jobs!r} in the configuration file: expected a whole number")
    if type(seconds) not in (int, float):
        raise UserError(f"timing_s is {seconds!r} in the configuration file: expected a number")
    return values


def _refuse_own(base: TrainConfig, demo: TrainConfig) -> None:
    """A file for one run names its residual, seed and folder; in a comparison those are the variants' and seeds'."""
    model, default = base.model, demo.model
    for name in ("residual", "block_size", "num_blocks", "settings"):
        if getattr(model, name) != getattr(default, name):
            raise UserError(
                f"model.{name} in a comparison belongs to a variant: give variants, e.g. block:num_blocks=6"
            )
    if base.seed != demo.seed:
        raise UserError(f"seed {base.seed} in a comparison: give seeds, a list, e.g. [{base.seed}]")
