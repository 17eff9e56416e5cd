"""Count the bytes of activations that a forward pass saves for its backward, layer by layer, without allocating them.

The model's own code runs on fake tensors, with an attention that saves queries, keys, values and its output, as fused
ones do. Of attentions and MLPs that differ only in their place one is run, and the others keep as much as it does.
`Activations` gives from this count the bytes of a micro-batch on a stage of a pipeline.
"""

import copy
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import AttentionInterface, AttentionMaskInterface

from attnres.errors import UserError
from attnres.head import called_losses, is_small
from attnres.models import DepthMixin
from attnres.models.bases import checkpoint_activations, mixers
from attnres.ops import cpu, eager
from attnres.ops.backend import Backend
from attnres.ops.devices import KERNELS
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
    """Count the bytes that a pass of `batch` x `tokens` stores for its backward, without parameters.

    Args:
        model: on any device; of it only shapes are taken.
        itemsize: bytes of a number in matrix products: 2 is bf16 autocast, with the layers' matrices in bf16; 4 fp32.
        losses: (model, its arguments, targets (B, T)) -> the loss.
        checkpointing: as in `checkpoint_activations`.

    Raises:
        UserError: the layers do not run on shapes alone.
    """
    model = copy.deepcopy(model).to("meta").train()
    place, dtype = _Place(), torch.bfloat16
    with quiet_transformers():
        _run_one_of_each_kind(model, place)
        checkpoint_activations(model, checkpointing)
        model.set_attn_implementation(FUSED)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("grouped_mm")
    for index, layer in enumerate(model.depth_layers):
        layer.register_forward_pre_hook(lambda *_, index=index: place.move(index), prepend=True)
    model.depth_layers[-1].register_forward_hook(lambda *_: place.move(len(model.depth_layers)))
    in_layers = {id(parameter) for parameter in model.depth_layers.parameters()} if itemsize == 2 else set()
    called = _Called(model, losses)
    kept: Kept = Counter()
    autocast = torch.autocast("cpu", dtype, enabled=itemsize == 2)
    with FakeTensorMode(), cpu.switched(on=False), _remembering_reads(), _new_garbage_alone(), autocast:
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
        try:
            with place, torch.autograd.graph.saved_tensors_hooks(place.pack, lambda tensor: tensor):
                result = functional_call(called, state, (ids, ids))
        except Exception as error:  # whatever a layer does with numbers
            raise UserError(f"layers of {type(model).__name__} do not run on shapes alone: {error}") from error
        gc.collect()
        for key, (made, nbytes) in place.alive().items():
            kept[made, place.first.get(key, made)] += nbytes
        del result  # of which everything was alive
    return kept


@contextmanager
def _new_garbage_alone() -> Generator[None]:
    """Let `gc.collect` look only at objects created inside the block."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
    """Notes in which layer each storage is made, and how large it is.

    Attributes:
        first: storage -> the first layer whose operations saved it for backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self._made = -1, dict[int, tuple[StorageWeakRef, int, int]]()
        self.first, self._saved = dict[int, int](), set[int]()

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved for backward, and return it."""
        self.first.setdefault(_storage(tensor), self.now)
        self._saved.add(_storage(tensor))
        return tensor

    def move(self, index: int) -> None:
        """Say which layer comes now."""
        self.now = index

    def alive(self) -> dict[int, tuple[int, int]]:
        """Return the layer in which it was made and the bytes of each storage that something still holds."""
        return {key: (made, nbytes) for key, (one, made, nbytes) in self._made.items() if not one.expired()}

    def begin(self) -> int:
        """Forget what was saved so far, and return how many storages were made."""
        self._saved.clear()
        return len(self._made)

    def left(self, before: int, given: list[Tensor], result: Any) -> "_Left | None":
        """Return the tensors that were created and saved since `begin` returned `before`; None if a result is no tensor
        of its own."""
        leaves, structure = tree_flatten(result)
        tensors = [leaf for leaf in leaves if leaf is not None]
        gc.collect()
        new_storages = {
            key: nbytes
            for key, (one, _, nbytes) in itertools.islice(self._made.items(), before, None)
            if not one.expired()
        }
        if not all(isinstance(t, Tensor) and new_storages.pop(_storage(t), None) == t.nbytes for t in tensors):
            return None
        saved = [place for place, tensor in enumerate(given) if _storage(tensor) in self._saved]
        results = [(t.shape, t.dtype, t.requires_grad, _storage(t) in self._saved) for t in tensors]
        return _Left(sum(new_storages.values()), saved, results, [leaf is None for leaf in leaves], structure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = {_storage(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        new = {key for key in outputs if key not in self._made}  # a difference of keys walks over all that was made
        if new:  # the rest, over half of the operations of a large model, is not looked at
            new -= {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for key in new:
            storage = outputs[key].untyped_storage()
            self._made[key] = StorageWeakRef(storage), self.now, storage.nbytes()
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ------------------------------------------------------------------ one sublayer of each kind


_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def _run_one_of_each_kind(model: DepthMixin, place: _Place) -> None:
    """Run only the first attention and MLP of each kind; the others are taken to store the same bytes."""
    if model.residual.itself().value_mix is not None:  # the first layer hands its values to the others
        return
    types, kinds = getattr(model.config, "layer_types", None), dict[Any, dict[Any, Any]]()
    for index, layer in enumerate(model.depth_layers):
        for mixer in mixers(layer, model.family.reads):
            parts = list(mixer.modules())
            if not any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:]):
                kind = (types and types[index], *map(_description, parts))
                mixer.forward = partial(_run_first, place, kinds.setdefault(kind, {}), mixer.forward)


def _description(part: nn.Module) -> tuple[Any, ...]:
    """Return what a module computes, apart from its submodules and its place."""
    numbers = ((name, value) for name, value in vars(part).items() if isinstance(value, _PLAIN) and name != "layer_idx")
    tensors = itertools.chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
    return type(part), *numbers, *((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


class _Left(NamedTuple):
    """What a sublayer left behind.

    Attributes:
        nbytes: bytes of the tensors that it made and that are still there, but for its results.
        given: places of the tensors that it was given and saved for backward.
        results: (shape, dtype, whether it has a gradient, whether it was saved for backward) of each tensor returned.
        nones, structure: of what it returned, the leaves that are None and the tree of all.
    """

    nbytes: int
    given: list[int]
    results: list[tuple[Any, ...]]
    nones: list[bool]
    structure: Any


def _run_first(
    place: _Place, known: dict[Any, _Left | None], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `forward` for the first call with these shapes, and note what it stored; later calls store the same without
    running."""
    leaves = tree_leaves((args, kwargs))
    lists = any(isinstance(value, dict | list) for value in (*args, *kwargs.values()))  # which a layer may change
    if lists or not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return forward(*args, **kwargs)
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    key = len(args), *kwargs, *((t.shape, t.dtype, t.requires_grad) if isinstance(t, Tensor) else t for t in leaves)
    if key not in known:
        before = place.begin()
        result = forward(*args, **kwargs)
        known[key] = place.left(before, given, result)
        return result
    left = known[key]
    if left is None:
        return forward(*args, **kwargs)
    results = iter(_Leave.apply(left, torch.empty(0, requires_grad=True), *given))
    return tree_unflatten([None if none else next(results) for none in left.nones], left.structure)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: _Left, _: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        results = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, *_ in left.results)
        saved = [result for result, (*_, kept) in zip(results, left.results, strict=True) if kept]
        ctx.save_for_backward(torch.empty(left.nbytes, dtype=torch.uint8), *(given[i] for i in left.given), *saved)
        ctx.mark_non_differentiable(*(r for r, (_, _, grad, _) in zip(results, left.results, strict=True) if not grad))
        return results


# ------------------------------------------------------------------ one read of each kind


@contextmanager
def _remembering_reads() -> Generator[None]:
    """Let depth reads on a CPU be computed once for the same shapes."""
    row = KERNELS["cpu"]
    KERNELS["cpu"] = row._replace(load=lambda: _REMEMBERING, why_not=lambda call: None)
    try:
        yield
    finally:
        KERNELS["cpu"] = row


class _Remembering:
    """Plain torch's functions of a `Backend`. For shapes that it was given before it makes results of the same layout,
    and shares memory with its arguments as those did."""

    def __init__(self) -> None:
        self._known = dict[Any, tuple[list[Any], Any]]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(eager, name))

    def _call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        leaves, structure = tree_flatten(inputs)
        key = function, str(structure), *map(_layout, leaves)
        given = {_storage(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        if key not in self._known:
            result = function(*inputs)
            results, structure = tree_flatten(result)
            places = [None if leaf is None else given.get(_storage(leaf), _storage(leaf)) for leaf in results]
            self._known[key] = [(place, _layout(leaf)) for place, leaf in zip(places, results)], structure
            return result
        results, structure = self._known[key]
        memory = dict[Any, Tensor](enumerate(leaves))
        for place, layout in results:
            if place not in memory and place is not None:
                nbytes, dtype = layout[-1], layout[-2]
                memory[place] = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
        return tree_unflatten(
            [None if place is None else memory[place].as_strided(*layout[:3]) for place, layout in results], structure
        )


_REMEMBERING = cast(Backend, _Remembering())


def _layout(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.untyped_storage().nbytes()


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
