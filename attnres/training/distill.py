"""Knowledge distillation: beside the next token, the whole distribution of the model that training started from.

    loss = (1 - w) CE(y, z) + w T^2 KL( softmax(t / T) || softmax(z / T) )

for each token, in nats: logits z of the model, t of the teacher, y the next token; w is `distill_weight` and T
`distill_temperature`. T^2 keeps the gradient's size as T grows (Hinton et al., arXiv 1503.02531). The teacher sees the
same batches, is frozen, and makes its logits in evaluation mode and in the run's own precision.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.errors import UserError
from attnres.training.config import TrainConfig
from attnres.training.start import find_start, weights_crc32


@dataclass(frozen=True)
class Teacher:
    """The model that training started from, frozen."""

    model: nn.Module
    weight: float
    temperature: float


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL( softmax(teacher / T) || softmax(logits / T) ) in nats: (..., vocabulary) twice -> (...), fp32."""
    ours = F.log_softmax(logits.float() / temperature, dim=-1)
    theirs = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def load_teacher(config: TrainConfig, record: dict[str, Any], device: torch.device) -> Teacher | None:
    """The teacher of a run, None where it has none; `record` is the run's start.json.

    Raises:
        UserError: the model is no longer the one that the run started from.
    """
    settings = config.finetune
    if settings.init_from is None or not settings.distill_weight:
        return None
    from attnres.training.device import tune

    model = find_start(settings.init_from).load("fp32")
    if weights_crc32(model) != record.get("crc32"):
        raise UserError(
            f"{settings.init_from} has changed since the run started from it, and it is the teacher: restore it, or "
            "start a new run in another folder"
        )
    model.requires_grad_(False)
    tune(model, device, config.data.seq_len)
    return Teacher(model.to(device).eval(), settings.distill_weight, settings.distill_temperature)
