"""`attnres compare`: train variants side by side."""

import dataclasses
from dataclasses import dataclass, field

from attnres.commands.train import Model, plain_config
from attnres.errors import UserError, left_when_stopped
from attnres.flags import Hidden, Settings, config_file, fields_of, parse
from attnres.training.config import ModelConfig, OptimConfig, TrainConfig, from_dict
from attnres.training.prepare import refuse_idle
from attnres.typed import overlay


@dataclass
class SharedModel(Model):
    """Which model is trained, besides its residual."""

    residual: Hidden[str] = "standard"  # ty: ignore[incompatible-mutable-override]
    block_size: Hidden[int | None] = None
    num_blocks: Hidden[int | None] = None
    settings: Hidden[Settings] = field(default_factory=dict)


@dataclass
class ComparisonOptions:
    """Options that a comparison has and a single run does not; a base class, so that --help lists them first."""

    variants: tuple[str, ...] = ("standard", "block", "full", "rescaled")
    """RESIDUAL[:SETTING=VALUE,...][@NAME=VALUE,...], e.g. standard block:num_blocks=6 full@lr=0.003; the names after @
    are lr and those of fine-tuning (train_only, residual_lr, distill_weight, ...)."""
    seeds: tuple[int, ...] = (0,)
    """Seeds; every variant is trained with each. With two or more, standard errors are over seeds."""
    lrs: tuple[float, ...] = ()
    """Train every variant at each of these learning rates."""
    jobs: int | None = None
    """Runs trained at the same time, which share the processor's threads; none is one a core, at most four. The
    number of threads of a run is set when the comparison begins and is the same when it is continued."""
    timing_s: float = 10.0
    """Seconds for timing the variants, interleaved, at the end; 0 leaves it out."""


@dataclass
class Compare(TrainConfig, ComparisonOptions):
    """Train variants side by side: same data, initial shared weights, batches and held-out windows.

    Finished runs are skipped and interrupted ones resumed, so the same command continues a stopped comparison.
    """

    out: str | None = "runs/compare"
    """Folder of the comparison."""
    steps: int = 200
    """Optimizer steps."""
    val_every: int = 40
    """Steps between validations (there is always one at the end)."""
    depth_every: int = 40
    """Steps between measurements of magnitudes and gradients by depth; 0 turns them off."""
    model: SharedModel = field(default_factory=SharedModel)  # ty: ignore[incompatible-mutable-override]
    """Which model is trained, besides its residual."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(optimizer="muon", muon_lr=1e-2, lr=4e-3))
    """How it is optimised."""
    config: str | None = None
    """YAML, TOML or JSON file with the same names; flags override it."""
    name: Hidden[str | None] = None
    seed: Hidden[int] = 0
    resume: Hidden[bool] = False


def run(arguments: list[str]) -> None:
    """Parse the arguments after the command's name and carry them out."""
    values, arguments = config_file(arguments)
    of_comparison = {name: values.pop(name) for name in fields_of(ComparisonOptions()) if name in values}
    demo = TrainConfig(**fields_of(Compare(), only=TrainConfig, model=ModelConfig(residual="standard")))
    base = from_dict(values, demo)
    _refuse_variant(base, demo)
    comparison = fields_of(overlay(ComparisonOptions(), of_comparison))
    defaults = fields_of(base, model=SharedModel(**fields_of(base.model)), **comparison)
    options = parse("compare", Compare, arguments, Compare(**defaults), doing="preparing data and variants")
    config = plain_config(options)
    refuse_idle(dataclasses.replace(config, finetune=demo.finetune), demo)  # variants may set options of fine-tuning

    from attnres.comparison.compare import compare
    from attnres.comparison.plan import CompareConfig

    with left_when_stopped(lambda: "stopped, what is finished stays: give the same command to continue"):
        compare(
            CompareConfig(
                variants=list(options.variants),
                seeds=list(options.seeds),
                lrs=list(options.lrs),
                base=config,
                out=options.out or "runs/compare",
                jobs=options.jobs,
                timing_s=options.timing_s,
            )
        )


def _refuse_variant(base: TrainConfig, demo: TrainConfig) -> None:
    """Refuse options for the whole comparison that each run sets itself: residual, seed, name and resuming."""
    model, default = base.model, demo.model
    for name in ("residual", "residual_file", "residual_sha256", "block_size", "num_blocks", "settings"):
        if getattr(model, name) != getattr(default, name):
            raise UserError(
                f"model.{name} in a comparison belongs to a variant: give variants, e.g. block:num_blocks=6 or "
                "FILE.py:CLASS"
            )
    if base.name != demo.name:
        raise UserError(f"name '{base.name}' in a comparison: each run has that of its variant and seed, leave it out")
    if base.resume != demo.resume:
        raise UserError("resume in a comparison: the same command continues what was stopped, leave it out")
    if base.seed != demo.seed:
        raise UserError(f"seed {base.seed} in a comparison: give seeds, a list, e.g. [{base.seed}]")
