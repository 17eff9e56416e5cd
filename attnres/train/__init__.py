"""Training: the configuration of a run and the loop that carries it out."""

from attnres.train.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, from_dict, to_dict
from attnres.train.loop import Interrupted, train

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
