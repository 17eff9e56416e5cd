"""Count the bytes of activations that a forward pass saves for its backward, layer by layer, without allocating them.

The model's own code runs on fake tensors, with an attention that saves queries, keys, values and its output, as fused
ones do. `Activations` gives from this count the bytes of a micro-batch on a stage of a pipeline.
"""

import copy
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface

from attnres.errors import UserError
from attnres.head import called_losses, is_small
from attnres.models import DepthMixin
from attnres.models.bases import checkpoint_activations
from attnres.ops import cpu
from attnres.progress import quiet_transformers
from attnres.scale.cut import PipelineCut, layers_of

FUSED = "attnres_counted"

Kept = Counter[tuple[int, int]]
"""Bytes by (layer in which a tensor was made, first layer whose operations keep it); -1 is the embedding, the number of
layers what follows the last one."""


def kept_bytes(
    model: DepthMixin,
    batch: int,
    tokens: int,
    itemsize: int,
    losses: Callable[..., Tensor],
    checkpointing: str = "none",
) -> Kept:
    """Count what a pass of `batch` x `tokens` keeps, but for parameters.

    Args:
        model: on any device; of it only shapes are taken.
        itemsize: bytes of a number in matrix products: 2 is bf16 autocast, with the layers' matrices in bf16; 4 fp32.
        losses: (model, its arguments, targets (B, T)) -> the loss.
        checkpointing: as in `checkpoint_activations`.

    Raises:
        UserError: the layers do not run on shapes alone.
    """
    model = copy.deepcopy(model).to("meta").train()
    with quiet_transformers():
        checkpoint_activations(model, checkpointing)
        model.set_attn_implementation(FUSED)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("grouped_mm")
    place, dtype = _Place(), torch.bfloat16
    for index, layer in enumerate(model.depth_layers):
        layer.register_forward_pre_hook(lambda *_, index=index: place.move(index), prepend=True)
    model.depth_layers[-1].register_forward_hook(lambda *_: place.move(len(model.depth_layers)))
    in_layers = {id(parameter) for parameter in model.depth_layers.parameters()} if itemsize == 2 else set()
    called = _Called(model, losses)
    kept: Kept = Counter()
    with FakeTensorMode(), cpu.switched(on=False), torch.autocast("cpu", dtype, enabled=itemsize == 2):
        state = {
            name: torch.empty(
                tensor.shape,
                dtype=dtype if id(tensor) in in_layers else tensor.dtype,
                device="cpu",
                requires_grad=tensor.requires_grad,
            )
            for name, tensor in itertools.chain(called.named_parameters(), called.named_buffers())
        }
        ids = torch.zeros(batch, tokens, dtype=torch.long)
        first: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            first.setdefault(_storage(tensor), place.now)
            return tensor

        try:
            with place, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = functional_call(called, state, (ids, ids))
        except Exception as error:  # whatever a layer does with numbers
            raise UserError(f"layers of {type(model).__name__} do not run on shapes alone: {error}") from error
        gc.collect()
        for key, (made, nbytes) in place.alive().items():
            kept[made, first.get(key, made)] += nbytes
        del result  # of which everything was alive
    return kept


def kept_of(kept: Kept, start: int, stop: int) -> int:
    """Return the bytes that a stage of the layers from `start` to `stop` has made itself and keeps."""
    return sum(count for (made, first), count in kept.items() if start <= made < stop and first < stop)


class _Called(nn.Module):
    def __init__(self, model: Any, losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.losses(self.model, {"input_ids": ids}, targets)


class _Place(TorchDispatchMode):
    """Notes in which layer each storage is made, and how large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._made = -1, dict[int, tuple[StorageWeakRef, int, int]]()

    def move(self, index: int) -> None:
        """Say which layer comes now."""
        self.now = index

    def alive(self) -> dict[int, tuple[int, int]]:
        """Return the layer in which it was made and the bytes of each storage that something still holds."""
        return {key: (made, nbytes) for key, (one, made, nbytes) in self._made.items() if not one.expired()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = {_storage(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        new = outputs.keys() - self._made.keys()
        if new:  # the rest, over half of the operations of a large model, is not looked at
            new -= {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for key in new:
            storage = outputs[key].untyped_storage()
            self._made[key] = StorageWeakRef(storage), self.now, storage.nbytes()
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None


AttentionInterface.register(FUSED, _attention)
AttentionMaskInterface.register(FUSED, lambda *_, **__: None)


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
        small = is_small(model, self.tokens, torch.device("cuda"))  # a plan is for GPUs, wherever it is made
        losses = partial(called_losses, kind="whole" if small else "chunked")
        count = partial(kept_bytes, model, 1, itemsize=itemsize, losses=losses)
        few, more = (count(tokens=n, checkpointing=checkpointing) for n in (COUNTED, 2 * COUNTED))
        times = self.tokens / COUNTED
        self.kept = Counter({key: round(few[key] + (more[key] - few[key]) * (times - 1)) for key in more})
        self.remade = 0.0
        if self.made_again:
            inside = count(tokens=COUNTED)
            self.remade = max(kept_of(inside, layer, layer + 1) for layer in range(len(model.depth_layers))) * times

    def of(self, cut: PipelineCut, stage: int, tp: int, copies: bool) -> float:
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
