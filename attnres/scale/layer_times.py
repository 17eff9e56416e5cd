"""What each layer of a model takes, measured: for stages that are balanced by time instead of by multiplications."""

import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnres.models import DepthMixin
from attnres.timing import now

ROUNDS = 7
"""Timed forward passes, after one that is not."""


class _Clock:
    """Seconds between the hooks before and after each of some modules, in the last pass."""

    def __init__(self, modules: list[torch.nn.Module], device: torch.device) -> None:
        self.seconds = [0.0] * len(modules)
        self._device = device
        self._hooks: list[Any] = []
        for i, module in enumerate(modules):
            self._hooks.append(module.register_forward_pre_hook(lambda *_, i=i: self._begin(i)))
            self._hooks.append(module.register_forward_hook(lambda *_, i=i: self._end(i)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, i: int) -> None:
        self.seconds[i] = -now(self._device)

    def _end(self, i: int) -> None:
        self.seconds[i] += now(self._device)


def layer_times(model: DepthMixin, *, batch: int, tokens: int, rounds: int = ROUNDS) -> tuple[list[float], float]:
    """Measure the seconds of each layer's forward pass with its reads, and of the head with the loss: medians.

    A backward pass takes about twice its forward everywhere, so that the shares are those of a step.

    Args:
        model: on the device that is meant, whose parameters are not changed.
        batch, tokens: sequences of a micro-batch, tokens of a sequence; the words are drawn.
    """
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    device = next(model.parameters()).device
    words = table.weight.shape[0]
    ids = torch.randint(words, (batch, tokens + 1), device=device)
    clock = _Clock([*model.depth_layers, *([] if head is None else [head])], device)
    passes = []
    try:
        for _ in range(rounds + 1):
            logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False)[0]
            seconds = list(clock.seconds) if head is not None else [*clock.seconds, 0.0]
            if head is not None:
                began = now(device)
                cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                seconds[-1] += now(device) - began
            passes.append(seconds)
    finally:
        clock.remove()
    *layers, last = (statistics.median(each) for each in zip(*passes[1:], strict=True))
    return layers, last
