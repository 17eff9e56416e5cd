"""Training: the configuration of a run and the loop that carries it out."""

from attnres.training.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, from_dict, to_dict
from attnres.training.loop import Interrupted, train

__all__ = [
    "DataConfig",
    "Interrupted",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "from_dict",
    "to_dict",
    "train",
]
