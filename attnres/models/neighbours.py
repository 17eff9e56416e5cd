"""What other libraries are told of models with depth reads, once they are imported."""

import functools
from typing import Any

from torch import nn

from attnres.imports import when_imported
from attnres.residuals import Residual


def keep_from_decay() -> None:
    """Let Transformers' `Trainer`, and those made of it, decay nothing of a residual: decay would pull queries back to
    the mean and gains to zero. An optimizer that a user passes is as it was made."""
    when_imported("transformers.trainer", _spare_residuals)


def _spare_residuals(trainer: Any) -> None:
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


def share_defaults(model_type: str, plain: str) -> None:
    """Let PEFT have the same default targets for a type of ours as for the plain one.

    Args:
        model_type: ours. plain: the plain model's.
    """

    def share(constants: Any) -> None:
        for name, table in vars(constants).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and plain in table:
                table.setdefault(model_type, table[plain])

    when_imported("peft.utils.constants", share)
