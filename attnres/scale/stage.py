"""One stage of a pipeline: some layers of a Hugging Face decoder, from the tensors it receives to those it sends.

The decoder's forward runs. Layers of other stages are replaced in place by `Skipped`, so that indices, layer types, the
choice of masks and the names of parameters are those of the whole model. A hook before the first layer inserts the
received stream. On all stages except the last an `Exit` replaces the final norm and takes the stream out.

Stages of one rank share slots that never change, by three autograd nodes and no private name of torch: a later stage
`Borrow`s a slot that the rank holds and leaves its gradient with the rank; the stage that received or computed the slot
`Collect`s that gradient in its backward, which is later in every schedule, and sends one gradient. `Lend` makes the
residual's parameters tensors of a stage's graph.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.models import DepthMixin
from attnres.residuals import Residual
from attnres.scale.cut import Crossing, PipelineCut
from attnres.streams.passes import FINISHED, note_progress
from attnres.streams.stream import Stream


class RankCache:
    """Slots held by (microbatch, name), and gradients owed to the stage that received or computed them.

    Attributes:
        held: aliases of tensors that autograd stores anyway.
        unwanted: slots that need no gradient.
    """

    def __init__(self) -> None:
        self.held: dict[int, dict[str, Tensor]] = {}
        self.owed: dict[int, dict[str, Tensor]] = {}
        self.unwanted: set[tuple[int, str]] = set()

    def keep(self, microbatch: int, name: str, tensor: Tensor) -> None:
        """Hold a slot until `drop`, unless one of its name is held."""
        self.held.setdefault(microbatch, {}).setdefault(name, tensor.detach())

    def drop(self, microbatch: int) -> None:
        """Release the slots of a microbatch."""
        self.held.pop(microbatch, None)

    def owe(self, microbatch: int, name: str, gradient: Tensor | None) -> None:
        """Leave a gradient for the stage that received or computed the slot, if it needs one."""
        if gradient is not None and (microbatch, name) not in self.unwanted:
            owed = self.owed.setdefault(microbatch, {})
            owed[name] = owed[name] + gradient if name in owed else gradient

    def collect(self, microbatch: int, name: str, gradient: Tensor | None) -> Tensor | None:
        """Return `gradient` plus the gradients owed to the slot, which are removed."""
        owed = self.owed.get(microbatch, {})
        left = owed.pop(name, None)
        if not owed:
            self.owed.pop(microbatch, None)
        if left is None or gradient is None:
            return left if gradient is None else gradient
        return gradient + left

    def want_none(self, microbatch: int, names: Sequence[str]) -> None:
        """Accept no gradients for these slots until the step ends: all layers before them are frozen."""
        self.unwanted.update((microbatch, name) for name in names)

    def check(self) -> None:
        """Raise RuntimeError if slots are held or gradients owed after a step."""
        self.unwanted.clear()
        if self.held or self.owed:
            held, owed = ({key: sorted(names) for key, names in part.items()} for part in (self.held, self.owed))
            self.held.clear()
            self.owed.clear()
            raise RuntimeError(f"a pipeline step ended with slots held {held} and gradients owed {owed}")


class Borrow(torch.autograd.Function):
    """Slots that the rank holds, for a later stage; their gradients are left with the rank.

    `anchor` is a tensor that the stage received: it puts the node on a path to the stage's inputs, so that schedules
    that ask only for their gradients reach it.
    """

    @staticmethod
    def forward(
        ctx: Any, cache: RankCache, microbatch: int, names: Sequence[str], anchor: Tensor, *held: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.place = cache, microbatch, names
        return tuple(tensor.detach() for tensor in held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        cache, microbatch, names = ctx.place
        for name, gradient in zip(names, gradients, strict=True):
            cache.owe(microbatch, name, gradient)
        return (None,) * (4 + len(gradients))


class Collect(torch.autograd.Function):
    """The identity on slots; backward adds the gradients that later stages of the rank left.

    The results are no views, and their gradients are contiguous, as sending requires.
    """

    @staticmethod
    def forward(ctx: Any, cache: RankCache, microbatch: int, names: Sequence[str], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.place = cache, microbatch, names
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        cache, microbatch, names = ctx.place
        sums = (cache.collect(microbatch, name, gradient) for name, gradient in zip(names, gradients, strict=True))
        return (None, None, None, *(None if total is None else total.contiguous() for total in sums))


class Lend(torch.autograd.Function):
    """Parameters as tensors of a microbatch's graph; their gradients are added to the parameters in the pass that
    computes the gradients of the stage's inputs.

    As parameters they would join all reads of a stage into one group for the weight pass of zero-bubble schedules,
    which would then run through a freed graph.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Sequence[nn.Parameter], anchor: Tensor, *values: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for parameter, gradient in zip(ctx.parameters, gradients, strict=True):
            if gradient is not None and parameter.requires_grad:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return (None,) * (2 + len(gradients))


def lent(residual: Residual, anchor: Tensor) -> Residual:
    """Return a view of the residual with lent parameters; the residual itself if no gradient is needed."""
    named = dict(residual.named_parameters())
    if not named or not anchor.requires_grad:
        return residual
    tensors = Lend.apply(tuple(named.values()), anchor, *(parameter.detach() for parameter in named.values()))
    values = dict(zip(named, tensors, strict=True))

    def view(module: nn.Module, prefix: str) -> Any:
        twin = copy.copy(module)
        twin.__dict__ = dict(module.__dict__)
        inner = {name: child and view(child, f"{prefix}{name}.") for name, child in module._modules.items()}
        twin.__dict__["_modules"] = inner
        twin.__dict__["_parameters"] = {name: values.get(prefix + name) for name in module._parameters}
        return twin

    return view(residual, "")


class Skipped(nn.Module):
    """Stands for a layer of another stage: returns its input, and has the layer's plain attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training" and isinstance(value, plain):
                setattr(self, name, value)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class Entry:
    """A hook before the first layer, or its `Skipped`: inserts the received stream in place of the decoder's hidden
    state; on the first stage a new stream that begins with it."""

    stream: Stream | None = None

    def __init__(self, begins: Residual | None) -> None:
        self.begins = begins

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream, self.stream = self.stream, None
        if self.begins is not None:
            stream = Stream.plain(self.begins, args[0] if args else kwargs["hidden_states"])
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})


class Exit(nn.Module):
    """Stands for the final norm: stores the stream for the stage, and returns a tensor for the rest of the decoder."""

    stream: Stream | None = None

    def forward(self, stream: Stream) -> Tensor:
        self.stream = stream
        note_progress(FINISHED)  # as far as this stage goes
        return stream.like


def refuse_stages(model: DepthMixin) -> None:
    """Raise UserError for a model that cannot be cut into stages."""
    residual = model.residual.itself()
    if residual.watched:
        raise UserError("the reads of the model are recorded or edited: a pipeline's stages cannot be watched")
    if residual.value_mix is not None:
        raise UserError(
            "the first layer's values go to every later layer (value_residual), which stages do not send: train it "
            "with dp and shard"
        )
    gate = getattr(getattr(residual, "gates", None), "gate_weight", None)
    if gate is not None and gate.dim() > 2:
        raise UserError(
            f"the residual's vector gate has {gate.numel():,} values on every rank of a pipeline: train it with dp and "
            "shard, or with a scalar gate"
        )


def shell(model: DepthMixin) -> DepthMixin:
    """Return a copy of the model's modules with the same parameters and the same residual."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    memo[id(model.residual)] = model.residual
    return copy.deepcopy(model, memo)


class StageModule(nn.Module):
    """Stage `stage` of a cut of `model`, a `shell`, which is taken apart.

    `forward(*received, microbatch, targets)` takes the tensors of the crossing before the stage (the first stage: ids)
    and the number of the microbatch, and returns the tensors of the crossing after it; the last stage returns
    `losses(model, call, targets)`.

    Args:
        table: the crossings of the cut.
        cache: the rank's.
        losses: (model, keyword arguments of its forward, targets) -> (B, T).
        cast: returns the context of a forward pass.
    """

    def __init__(
        self,
        model: DepthMixin,
        stage: int,
        cut: PipelineCut,
        table: tuple[Crossing, ...],
        cache: RankCache,
        losses: Callable[[Any, dict[str, Any], Tensor], Tensor],
        cast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.residual: Residual = model.residual  # first: zero-bubble schedules join parameters in this order
        self.model, self.stage, self.cache, self.losses, self.cast = model, stage, cache, losses, cast
        self.index_in, self.index_out = cut.bounds[stage : stage + 2]
        self.first, self.last = stage == 0, stage == cut.stages - 1
        self.came = None if self.first else table[stage - 1]
        self.goes = None if self.last else table[stage]
        self.last_here = stage == cut.last_of(cut.ranks[stage])
        self.caching = any(not crossing.local and crossing.held for crossing in table)
        self._take_apart(model, cut)

    def _take_apart(self, model: DepthMixin, cut: PipelineCut) -> None:
        base, layers, sublayers = model.depth_base, model.depth_layers, len(self.residual.itself().sublayers)
        own_layers = range(self.index_in // sublayers, self.index_out // sublayers)
        self.entry = Entry(self.residual if self.first else None)
        self.exit = [Exit()]  # a list: the exit is registered where the norm was
        layers[0]._forward_pre_hooks.clear()
        layers[0]._forward_pre_hooks_with_kwargs.clear()
        for index, layer in enumerate(layers):
            if index not in own_layers:
                layers[index] = Skipped(layer)
        layers[0].register_forward_pre_hook(self.entry, with_kwargs=True)
        if not self.first:
            base.set_input_embeddings(None)  # ty: ignore[not-callable]
        if not self.last:
            parent, _, name = model.family.final_norm.rpartition(".")
            setattr(base.get_submodule(parent), name, self.exit[0])
            head = model.get_output_embeddings()
            for path, module in list(model.named_modules()):
                if module is head:
                    parent, _, name = path.rpartition(".")
                    setattr(model.get_submodule(parent), name, None)

    def _ours(self) -> Iterator[nn.Parameter]:
        yield from self.residual.parameters()
        yield from self.model.depth_layers.parameters()
        if self.last:
            yield from self.model.depth_base.get_submodule(self.model.family.final_norm).parameters()
            yield from self.model.get_output_embeddings().parameters()

    def named_owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this stage trains, alone or with others, by their names in the whole model: for
        example no position embeddings on a later stage, which looks them up without effect."""
        if self.first:
            yield from self.model.named_parameters()
            return
        own_ids = {id(parameter) for parameter in self._ours()}
        yield from ((name, p) for name, p in self.model.named_parameters() if id(p) in own_ids)

    def forward(self, *received: Tensor, microbatch: Any = 0, targets: Tensor | None = None) -> Any:
        number = int(microbatch)
        with self.cast():
            call = {"input_ids": received[0]} if self.first else self._entered(received, number)
            if self.last:
                assert targets is not None
                return self.losses(self.model, call, targets)
            self.model.depth_base(**call, use_cache=False)
            stream, self.exit[0].stream = self.exit[0].stream, None
            assert stream is not None
            return self._left(stream, number)

    def _entered(self, received: tuple[Tensor, ...], number: int) -> dict[str, Any]:
        """Put the received stream where the first layer takes it; return the decoder's arguments."""
        assert self.came is not None
        slots, anchor = self.came.slots, received[0]
        names = [slots[place].name for place in self.came.sent]
        tensors = dict(zip(names, Collect.apply(self.cache, number, names, *received), strict=True))
        if self.caching and not self.last_here:
            for place in self.came.sent:
                if slots[place].kept:
                    self.cache.keep(number, slots[place].name, tensors[slots[place].name])
        if self.came.held:
            names_held = [slots[place].name for place in self.came.held]
            held_slots = self.cache.held[number]
            borrowed = Borrow.apply(self.cache, number, names_held, anchor, *(held_slots[name] for name in names_held))
            tensors |= dict(zip(names_held, borrowed, strict=True))
        if self.last_here:
            self.cache.drop(number)
        residual = lent(self.residual, anchor)
        like = anchor.detach()
        for _ in slots[self.came.sent[0]].axes:
            like = like.select(2, 0)
        state = residual("unpack", [tensors[slot.name] for slot in slots], self.index_in)
        self.entry.stream = Stream(residual, state, self.index_in, like)
        return {"inputs_embeds": like}

    def _left(self, stream: Stream, number: int) -> tuple[Tensor, ...]:
        """Return the tensors for the next stage."""
        assert self.goes is not None
        slots, dtype = self.goes.slots, stream.like.dtype
        packed = stream.residual("pack", stream.written(), self.index_out)
        names = [slot.name for slot in slots]
        tensors = Collect.apply(self.cache, number, names, *(tensor.to(dtype) for tensor in packed))
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
            self.cache.want_none(number, names)
        if self.caching and not self.last_here:
            for slot, tensor in zip(slots, tensors, strict=True):
                if slot.kept:
                    self.cache.keep(number, slot.name, tensor)
        return tuple(tensors[place] for place in self.goes.sent)


def shapes(crossing: Crossing, batch: int, tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the tensors sent for one micro-batch, on the meta device, with gradients."""
    axes = (crossing.slots[place].axes for place in crossing.sent)
    return tuple(
        torch.empty(batch, tokens, *inner, width, dtype=dtype, device="meta", requires_grad=True) for inner in axes
    )
