"""Adapt other libraries to models with depth reads, once they are imported."""

import functools
import warnings
from typing import Any

from torch import nn

from attnres.errors import UserError
from attnres.imports import when_imported
from attnres.residuals import Residual
from attnres.residuals.queries import Queried


def _spare_residuals(trainer: Any) -> None:
    """Let Transformers' `Trainer` and its subclasses apply no weight decay to a residual: decay would pull queries back
    to the mean and gains to zero. An optimizer that a user passes is unchanged."""
    plain = trainer.Trainer.get_decay_parameter_names

    @functools.wraps(plain)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        inside = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, Residual)
            for name, _ in module.named_parameters()
        }
        return [name for name in plain(self, model) if name not in inside]

    trainer.Trainer.get_decay_parameter_names = get_decay_parameter_names


def _fit_fsdp1(fsdp: Any) -> None:
    """Let FSDP 1 treat fp32 reads in a 16-bit model as a separate unit, or raise an error that says so."""
    plain = fsdp.FullyShardedDataParallel.__init__

    @functools.wraps(plain)
    def __init__(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        if isinstance(module, Residual):
            # A residual is called for every read and write. If FSDP changed a dtype between two calls, autograd would
            # make another accumulator, on which FSDP has no hook: the gradient would be lost silently.
            options["mixed_precision"] = None
        try:
            plain(self, module, *args, **options)
        except ValueError as error:  # "Must flatten tensors with uniform dtype"
            reads = [part for part in module.modules() if isinstance(part, Residual)]
            if "uniform dtype" not in str(error) or not reads:
                raise
            raise UserError(
                "FSDP 1 keeps the parameters of a unit in one dtype, and those of depth reads are fp32 whatever the "
                "layers' are: name attnres.residuals.Residual in the auto_wrap_policy too, with the layer's class, or "
                "use FSDP2"
            ) from error

    fsdp.FullyShardedDataParallel.__init__ = __init__


def _tell_of_frozen_reads(peft: Any) -> None:
    """Let PEFT warn if a new adapter freezes depth reads that were to be trained: with zero queries the model then is
    the plain one, and slower."""
    plain = peft.PeftModel.__init__

    @functools.wraps(plain)
    def __init__(self: Any, model: nn.Module, peft_config: Any, *args: Any, **options: Any) -> None:
        reads = {path: part for path, part in model.named_modules() if isinstance(part, Queried)}
        trained = {path.rpartition(".")[2] for path, part in reads.items() if part.query.requires_grad}
        plain(self, model, peft_config, *args, **options)
        inner = [part for part in self.modules() if isinstance(part, Queried)]
        if trained and not peft_config.inference_mode and not any(part.query.requires_grad for part in inner):
            warnings.warn(
                f"{type(peft_config).__name__} freezes the queries of the depth reads: to train them, give it "
                f"modules_to_save={sorted(trained)}",
                stacklevel=3,
            )

    peft.PeftModel.__init__ = __init__


_PATCHES = {
    "transformers.trainer": _spare_residuals,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _fit_fsdp1,
    "peft.peft_model": _tell_of_frozen_reads,
}


def tell_neighbours() -> None:
    """Change each of these modules once it is imported, or now if it already is."""
    for name, patch in _PATCHES.items():
        when_imported(name, patch)


def share_defaults(model_type: str, plain: str) -> None:
    """Give PEFT the default targets of the plain model type for a type of this package.

    Args:
        model_type: this package's. plain: the plain model's.
    """

    def share(constants: Any) -> None:
        for name, table in vars(constants).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and plain in table:
                table.setdefault(model_type, table[plain])

    when_imported("peft.utils.constants", share)
