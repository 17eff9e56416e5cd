"""`attnres train`: train one model."""

import os
from dataclasses import dataclass, field

from attnres.flags import Hidden, Settings, Size, config_file, fields_of, parse
from attnres.training.config import ModelConfig, TrainConfig, from_dict
from attnres.training.interrupt import end_with_parent


@dataclass
class Model(ModelConfig):
    """Which model is trained."""

    size: Size = None
    """nano, 100m, 0.6b, gpt2-124m, or a mapping {family: qwen3, hidden_size: 64, ...}; none is nano, or with init_from
    the size of that model."""
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
    end_with_parent()  # first of all: a process whose torchrun is lost while it imports torch would not know
    values, arguments = config_file(arguments)
    base = from_dict(values)
    options = parse("train", Train, arguments, Train(**fields_of(base, model=Model(**fields_of(base.model)))))
    config = plain_config(options)

    from attnres.training import train

    summary = train(config, progress=options.progress)
    if options.progress and os.environ.get("RANK", "0") == "0":  # torchrun's; one process says it
        print(
            f"held-out loss {summary['val_loss']:.3f} nats per token (perplexity {summary['perplexity']:.2f}) after "
            f"{summary['step']:,} steps, {summary['tokens']:,} tokens"
        )


def plain_config(options: TrainConfig) -> TrainConfig:
    """The configuration of a run in the options of a command that extends it."""
    model = ModelConfig(**fields_of(options.model, only=ModelConfig))
    return TrainConfig(**fields_of(options, only=TrainConfig, model=model))
