"""Forward passes of language models: evaluation mode for a while, and the losses of tokens."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

POSITIONS = 256
"""Of which an fp32 copy is made at a time, where no gradient is wanted: a large vocabulary makes logits the largest
tensor there is."""


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode for a while; each module is then in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def whole_sequences() -> Generator[None]:
    """Let Transformers take a batch without a mask for whole sequences, and not look for packed ones in it.

    It asks the device whether there are any. Where it may not ask, in a captured or compiled pass, it makes a mask of
    all pairs in case there are, and attention takes a kernel that reads it.
    """
    from transformers import masking_utils  # here: `attnres` is imported without Transformers

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _none_packed  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _none_packed(position_ids: Tensor) -> None:
    return None


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities in nats over the last axis, in fp32 or, of fp64 logits, fp64."""
    return logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p of every target in nats: logits (B, T, V), targets (B, T) int64 -> (B, T) fp32, fp64 of fp64 logits."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    size = targets.shape[1] if logits.requires_grad else max(1, POSITIONS // len(targets))
    losses = [
        F.cross_entropy(part.to(dtype).flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        for part, target in zip(logits.split(size, 1), targets.split(size, 1), strict=True)
    ]
    return torch.cat(losses, 1)


def next_token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """-ln p in nats of every token after the first: ids (B, T) -> (B, T - 1), without a cache."""
    logits = model(input_ids=ids, use_cache=False).logits
    return token_losses(logits[:, :-1], ids[:, 1:].to(logits.device))
