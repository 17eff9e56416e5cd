"""Training: the configuration of a run (`config`, without torch) and the training loop."""

from typing import TYPE_CHECKING

from attnres.imports import lazy_names
from attnres.training.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, from_dict, to_dict

if TYPE_CHECKING:
    from attnres.training.loop import train
else:
    __getattr__, __dir__ = lazy_names(__name__, {"train": "attnres.training.loop"})

__all__ = ["DataConfig", "ModelConfig", "OptimConfig", "TrainConfig", "from_dict", "to_dict", "train"]
