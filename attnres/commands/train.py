"""`attnres train`: train one model."""

import os
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from attnres.errors import left_when_stopped
from attnres.flags import NAMED_SIZES, Hidden, Settings, Size, config_file, fields_of, parse
from attnres.training.config import ModelConfig, TrainConfig, from_dict
from attnres.training.interrupt import end_with_parent


@dataclass
class Model(ModelConfig):
    """Which model is trained."""

    size: Annotated[
        Size, tyro.conf.arg(help=f"{NAMED_SIZES}; none is nano, or with init_from the size of that model.")
    ] = None
    residual: str | None = None  # ty: ignore[incompatible-attribute-override]
    """How sublayers read earlier outputs: a mechanism's name, or FILE.py:CLASS for one of your own file; none is block,
    or with init_from that of a model which has depth reads."""
    residual_file: Hidden[str | None] = None
    residual_sha256: Hidden[str | None] = None
    settings: Settings = field(default_factory=dict)
    """Further settings of the residual, e.g. num_streams=4 for hyper_connections."""


@dataclass
class Train(TrainConfig):
    """Train one model. The run goes to a folder; Ctrl-C saves it and --resume continues it."""

    model: Model = field(default_factory=Model)  # ty: ignore[incompatible-mutable-override]
    """Which model is trained."""
    config: str | None = None
    """YAML, TOML or JSON file with the same names; flags override it."""
    progress: bool = True
    """Show a progress bar."""


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    end_with_parent()  # before anything else: a process whose torchrun dies during the import of torch would not notice
    values, arguments = config_file(arguments)
    base = from_dict(values)
    model = Model(**fields_of(base.model))
    if "residual" not in values.get("model", {}):
        model.residual = None
    default = Train(**fields_of(base, model=model))
    options = parse("train", Train, arguments, default, doing="preparing data and model")
    if options.model.residual is None:
        options.model.residual = _residual_of(options.finetune.init_from)
    config = plain_config(options)

    from attnres.training import train

    going_on = "stopped: --resume goes on from the run's last checkpoint, or from the start where there is none"
    with left_when_stopped(lambda: going_on):
        summary = train(config, progress=options.progress)
    if options.progress and os.environ.get("RANK", "0") == "0":  # under torchrun one process prints it
        print(
            f"held-out loss {summary['val_loss']:.3f} nats per token (perplexity {summary['perplexity']:.2f}) after "
            f"{summary['step']:,} steps, {summary['tokens']:,} tokens"
        )


def _residual_of(init_from: str | None) -> str:
    """Return the residual of a run that names none: block, or that of the model in --init-from, which is printed on
    stderr."""
    usual = ModelConfig().residual
    if init_from is None:
        return usual
    from attnres.models import open_checkpoint
    from attnres.training.start import has_reads

    start = open_checkpoint(init_from)
    if not has_reads(start) or start.residual in (None, usual):
        return usual
    if os.environ.get("RANK", "0") == "0":
        print(f"attnres: model.residual is {start.residual}: that of {init_from}", file=sys.stderr)
    return start.residual


def plain_config(options: TrainConfig) -> TrainConfig:
    """Return the `TrainConfig` fields of the options of a command that extends it."""
    model = ModelConfig(**fields_of(options.model, only=ModelConfig))
    return TrainConfig(**fields_of(options, only=TrainConfig, model=model))
