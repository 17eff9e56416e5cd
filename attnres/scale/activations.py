"""Bytes that the backward of a micro-batch needs on a stage of a pipeline, from the count of one pass."""

from collections import Counter
from functools import partial

import torch

from attnres.head import called_losses, is_small
from attnres.models import DepthMixin
from attnres.scale.crossings import Cut
from attnres.scale.cut import layers_of
from attnres.scale.kept import kept_bytes, kept_of

COUNTED = 128
"""Tokens of the passes whose bytes are counted, and twice as many: what is kept grows by so much with each token."""


class Activations:
    """Bytes that the backward of a micro-batch needs, by the layers in which they are made.

    Attributes:
        made_again: whether what is inside of layers is not kept.
        remade: bytes of the layer that takes most where layers are made again: its inside is there while it is.
    """

    def __init__(self, model: DepthMixin, batch: int, context: int, *, itemsize: int, checkpointing: str) -> None:
        """Count those of `batch` sequences of `context` tokens; `itemsize` and `checkpointing` as in `kept_bytes`."""
        self.model, self.tokens, self.itemsize = model, batch * context, itemsize
        self.made_again = checkpointing in ("layer", "sublayer")
        small = is_small(model, self.tokens, torch.device("cuda"))
        losses = partial(called_losses, kind="whole" if small else "chunked")
        count = partial(kept_bytes, model, 1, itemsize=itemsize, losses=losses)
        few, more = (count(tokens=n, checkpointing=checkpointing) for n in (COUNTED, 2 * COUNTED))
        times = self.tokens / COUNTED
        self.kept = Counter({key: round(few[key] + (more[key] - few[key]) * (times - 1)) for key in more})
        self.remade = 0.0
        if self.made_again:
            inside = count(tokens=COUNTED)
            self.remade = max(kept_of(inside, layer, layer + 1) for layer in range(len(model.depth_layers))) * times

    def of(self, cut: Cut, stage: int, tp: int, copies: bool) -> float:
        """Return the bytes of one micro-batch in a stage, and of bf16 copies of its matrices.

        In slices what goes into a layer's attention and MLP is of all tokens, everything else of a share.
        """
        sublayers, layers = len(self.model.residual.itself().sublayers), list(self.model.depth_layers)
        entering = self.tokens * self.model.config.hidden_size * self.itemsize * (1 - 1 / tp)
        ours = layers_of(cut, sublayers)[stage]
        first, last = stage == 0, stage == cut.stages - 1
        total = kept_of(self.kept, -1 if first else ours.start, len(layers) + 1 if last else ours.stop) / tp
        if not self.made_again:
            total += len(ours) * sublayers * entering
        if copies and not self.made_again:
            matrices = (p for layer in ours for p in layers[layer].parameters() if p.ndim > 1)
            total += sum(2 * p.numel() / tp for p in matrices)
        return total
