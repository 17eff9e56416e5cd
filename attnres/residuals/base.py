"""What a residual is: a network's depth as a stream with two verbs, read and write."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from attnres.ops import Norm, Plan, apply_norm, explain
from attnres.ops.bank import Banks, Program
from attnres.ops.dispatch import KERNELS, bank_plan
from attnres.residuals.layout import About, Learned, Read, Source, Traits, outputs
from attnres.residuals.program import BankReads, has_hooks, why_no_bank
from attnres.residuals.values import ValueResidual
from attnres.residuals.watch import Editor, Observer, showing_start, showing_write, unwatched, watched

NormLike = Norm | Callable[[Tensor], Tensor]
"""The norm a read ends with: as a value where its arithmetic is known (then it can be fused), else as a function."""

State = Any
"""A residual's state: an immutable (nested) tuple of tensors, their number a function of depth alone."""


class Slot(NamedTuple):
    """One tensor of a state at a cut, (tokens.., *axes, d).

    Attributes:
        name: the same at every cut that it crosses.
        kept: it never changes again, so that a pipeline rank may hold it for its later stages.
        axes: sizes between the tokens' axes and the width.
    """

    name: str
    kept: bool
    axes: tuple[int, ...] = ()


def slots_of(sources: Sequence[Source], index: int) -> tuple[Slot, ...]:
    """Return the slots of a state before sublayer `index` that holds these sources; finished ones are kept."""
    return tuple(Slot(f"{one.name} {index}" if one.open else one.name, not one.open) for one in sources)


def as_it_is(h: Tensor) -> Tensor:
    """The norm of a read that has none."""
    return h


def with_norm(h: Tensor, norm: NormLike) -> Tensor:
    """Return norm(h)."""
    return apply_norm(h, norm) if isinstance(norm, Norm) else norm(h)


class Ways(NamedTuple):
    """The inputs of an attention's projections, (..., d) each: what `Residual.read` gives in place of one input."""

    query: Tensor
    key: Tensor
    value: Tensor


def verbs(residual: nn.Module) -> Callable[..., Any]:
    """Return what does the verbs of a residual, or of what wraps one, during a pass: itself, or its `forward` alone
    where nothing is hooked on it, which saves a module's call each time."""
    return residual.forward if isinstance(residual, Residual) and not has_hooks(residual) else residual


class Residual(nn.Module):
    """How the sublayers of one network are connected: their reads and writes, and the parameters these have.

    A *sublayer* is what takes from the stream and writes to it once: one attention or one MLP. `num_sublayers` is their
    number L. A *read* is one mixture of sources. Reads are numbered as `layout` lists them, the output's last: where
    every sublayer has one, read l is that of sublayer l, and the output's is L. All parameters of a residual live in
    this one module: it is small, always fp32, and takes no weight decay. `read`, `write` and `finish` never change a
    state in place.

    A mechanism is a subclass with a `name` and `traits`, whose keyword arguments after `width` are its settings. What
    it must say: `start, read, write, finish, hidden_state`; what its reads mix, `sources`, and their weights where they
    are the same for every token, `implied`. A model calls the module itself, `residual("read", state, index, norm)`, so
    that hooks on it (adapters, offloading, sharding) work as on any other module.
    """

    name: ClassVar[str]
    traits: Traits
    about: ClassVar[About | None] = None
    """What `attnres mechanisms` says of it; one of a user's own may say nothing."""
    parts: ClassVar[tuple[type, ...]] = ()
    """Classes whose keyword arguments are settings of the mechanism too, handed on to them."""
    sublayers: Sequence[str] = ("attention", "mlp")
    """The kinds of a layer's sublayers, in order; `make_residual` sets those of a network of other layers before it
    calls the constructor."""
    whole_layers: ClassVar[bool] = False
    """It takes every two sublayers, an attention and an MLP, for one layer."""
    watched_from_start: ClassVar[bool] = False
    """What it shows to those who watch is kept beside the state, from the start of a pass: one that goes on from a cut
    cannot be watched."""
    slow: tuple[str, ...] = ()
    """Names of parameters that train at a tenth of the model's rate unless told otherwise: queries of a softmax over
    depth, and gains of their keys, whose d products add up to a logit that nothing divides."""
    even_start: ClassVar[bool] = False
    """Weights that put out what a layer writes start alike however deep the network is, also in a family that draws
    them smaller with depth (GPT-2)."""
    recompute_reads: bool = False
    """Keep nothing of what reads make for the backward pass, but make it again there: less memory, more time."""

    stream_dtype: torch.dtype | None = None
    """The dtype of the stream from the embedding on; None is that in which the embedding comes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the mechanism's `start` and `write` show what they are given, whoever calls them."""
        super().__init_subclass__(**kwargs)
        if "start" in vars(cls):
            cls.start = showing_start(cls.start)
        if "write" in vars(cls):
            cls.write = showing_write(cls.write)

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__()
        self.num_sublayers, self.width = num_sublayers, width
        self.observer: Observer | None = None
        self.editor: Editor | None = None
        self.value_kind = "none"
        self.scale_is_default = False
        """Nobody chose between means and sums of sources: the first pass warns where the two differ."""
        # not called ..residual: adapters find what they save by how its name ends, and would take this one apart
        self.value_mix: ValueResidual | None = None
        self.banks = Banks()
        self.program: Program | str | None = None
        """Its reads as a program for a bank, or why there is none; made when it is first asked for."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Residual":
        """Move or cast as asked, but keep parameters in fp32 where 16 bits are asked for (`.to(torch.bfloat16)`,
        Lightning's bf16-true): steps of a small rate would round to nothing there."""

        def precise(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            narrows = tensor.is_floating_point() and new.element_size() < 4 <= tensor.element_size()
            return tensor.to(new.device) if narrows else new

        return super()._apply(precise, recurse)

    # -- what a forward pass does ---------------------------------------------------------------------------------
    def forward(self, verb: str, *args: Any) -> Any:
        """Do one of start, read, write, finish, hidden_state, mix_values, set_progress, penalty, or itself, which
        returns this module from under what wraps it."""
        call = getattr(self, verb)
        if not (self.recompute_reads and verb in ("read", "finish") and torch.is_grad_enabled()):
            return call(*args)
        if self.heeds_recompute or self.watched:  # who watches would see a read twice
            return call(*args)
        return checkpoint(call, *args, use_reentrant=False)

    def itself(self) -> "Residual":
        return self

    @property
    def heeds_recompute(self) -> bool:
        """Whether the mechanism's own `read` keeps less where `recompute_reads` is set; else a read is checkpointed."""
        return False

    def init_parameters(self) -> None:
        """Set every parameter of this module to its start value (through `torch.nn.init` or `start_at`)."""

    def reset_parameters(self) -> None:
        """Do what `init_parameters` does, by the name that torch, FSDP and Lightning call after a start on meta."""
        self.init_parameters()

    def branch_scale(self) -> float:
        """Return the factor on the start values of value, output and MLP weights (DeepNorm asks for one)."""
        return 1.0

    def mix_values(self, layer: int, value: Tensor, first: Tensor, x: Tensor) -> Tensor:
        """Return the values of a layer's attention, which take something from the first layer's; see `ValueResidual`,
        which a model puts here."""
        assert self.value_mix is not None
        return self.value_mix(layer, value, first, x)

    def start(self, embedding: Tensor) -> State:
        """Return the state that holds the token embedding (..., d) and nothing else."""
        raise NotImplementedError

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor | Ways, State]:
        """Return the normed input of sublayer `index`, `Ways` where `ways` names projections, and the state that its
        write continues from."""
        raise NotImplementedError

    def write(self, state: State, index: int, output: Tensor) -> State:
        """Return the state after sublayer `index` gave `output`."""
        raise NotImplementedError

    def finish(self, state: State, norm: NormLike) -> Tensor:
        """Return the normed input of the head."""
        raise NotImplementedError

    def hidden_state(self, state: State) -> Tensor:
        """Return the state as a vector (..., d) for `output_hidden_states`: of depth reads, the sum of all sources."""
        raise NotImplementedError

    def normed(
        self, h: Tensor, index: int, norm: NormLike, weights: Tensor | None = None, values: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return norm(h), for mechanisms whose read is not fused with its norm; show it first, as read number `index`,
        to those who watch. `weights` and `values` as in `watched`."""
        if self.watched:
            h = watched(self, h, index, weights, values)
        return with_norm(h, norm)

    def bank_reads(self) -> BankReads | str:
        """Return how a pass without gradients makes the reads in a bank of sources, or why it cannot."""
        return f"residual '{self.name}' is made in plain torch"

    def bank_queries(self) -> Tensor:
        """Return the queries (reads, d) that such a pass scores sources with, in fp32."""
        raise NotImplementedError

    def explain(self, embedding: Tensor, *, training: bool | None = None) -> Plan:
        """Say which path a pass from `embedding` (..., d) takes, and why: what its last group of reads does.

        Args:
            training: whether a backward follows; None asks `torch.is_grad_enabled()`.
        """
        training = torch.is_grad_enabled() if training is None else training
        reason = why_no_bank(self, embedding, training=training)
        if reason is None:
            assert isinstance(self.program, Program)
            device, tokens = embedding.device.type, embedding.numel() // self.width
            shared = self.program.shared(tokens, self.width, embedding.dtype, cached=KERNELS[device].bank.cached)
            return bank_plan(device, in_common=bool(shared))
        plan = self.general_plan(embedding, training=training)
        return dataclasses.replace(plan, reasons=(*plan.reasons, f"no bank of sources: {reason}"))

    def general_plan(self, embedding: Tensor, *, training: bool) -> Plan:
        """Say which path reads take where a pass takes no bank."""
        return explain([embedding], training=training)

    # -- what training owes it ------------------------------------------------------------------------------------
    def set_progress(self, fraction: float) -> None:
        """Take note of how much of training is done with the coming step, above 0 to 1 at the last. What depends on it
        is kept in a buffer, so that a model evaluates, and a run goes on, as it was saved. Here nothing does."""

    def penalty(self) -> Tensor | None:
        """Return a scalar with its gradient that training adds to the loss once a step, and to no loss that it reports;
        None without."""
        return None

    # -- what its reads mix ---------------------------------------------------------------------------------------
    @property
    def watched(self) -> bool:
        """Whether someone sees or edits the reads."""
        return self.observer is not None or self.editor is not None

    def forget(self) -> None:
        """Let go of what was kept beside the state for those who watched; unless a mechanism says otherwise, nothing
        was."""

    def ways(self, index: int) -> tuple[str | None, ...]:
        """Return what the reads of sublayer `index` are for, one read (None) unless a mechanism says otherwise.

        "query", "key", "value" are the projections of an attention, "stream" what its write goes on from.
        """
        return (None,)

    def places(self) -> tuple[tuple[int, str | None], ...]:
        """Return for each read the sublayer that it belongs to (L: the head), and what of it the read is for."""
        inner = ((index, way) for index in range(self.num_sublayers) for way in self.ways(index))
        return (*inner, (self.num_sublayers, None))

    def first_row(self, index: int) -> int:
        """Return the number of the first read of sublayer `index`; of L, the output's."""
        return sum(len(self.ways(earlier)) for earlier in range(index))

    def sources(self, index: int) -> tuple[Source, ...]:
        """Return what read `index` mixes, a function of depth alone; empty where it is no weighted sum. Unless a
        mechanism says otherwise, the embedding and the outputs so far where its traits are linear, else nothing."""
        return outputs(self.places()[index][0] + 1, self.sublayers) if self.traits.linear else ()

    def layout(self) -> tuple[Read, ...]:
        """Return the reads with their sources, in order; the output's is the last."""
        kinds, places = self.sublayers, self.places()
        inner = (
            Read(kinds[sublayer % len(kinds)], sublayer // len(kinds), self.sources(index), way)
            for index, (sublayer, way) in enumerate(places[:-1])
        )
        return (*inner, Read("output", None, self.sources(len(places) - 1)))

    def implied(self, index: int) -> Tensor | None:
        """Return the weights of read `index` (sources,) where they are the same for every token, else None."""
        return None

    def direction(self, index: int) -> Tensor | None:
        """Return the vector (d,) whose angle to a source decides the source's logit in read `index`; None without."""
        return None

    def sharpness(self, index: int) -> float | None:
        """Return the largest logit that read `index` can give, None without a query.

        |w . (g * v / rms(v))| <= |w * g| |v / rms(v)| = |w * g| sqrt(d)    (Cauchy-Schwarz)
        """
        query = self.direction(index)
        return None if query is None else float(query.detach().double().norm()) * math.sqrt(self.width)

    def learned(self) -> dict[str, Learned]:
        """Return what it has learned besides queries and gains, by name."""
        return {}

    def tables(self) -> dict[str, Learned]:
        """Return all that is learned here besides queries and gains, of a value residual too."""
        return self.learned() | ({} if self.value_mix is None else self.value_mix.learned())

    def mixing_row(self, index: int, weights: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
        """Return the row of read `index` in the depth mixing matrix, h_l = sum_i M_{i->l} v_i, of each token.

        Args:
            weights: (tokens, sources) of read `index`. rows: the rows (tokens, L+1) of the reads before it.

        Returns:
            (tokens, L+1), column 0 the embedding; None where h is no sum with one number a source.
        """
        if not self.traits.linear:
            return None
        row = weights.new_zeros(1, self.num_sublayers + 1)
        for place, source in enumerate(self.sources(index)):
            weight = weights[:, place, None]
            if source.span is not None:
                row = row + weight * self.spanned(source.span).to(weights)
            if source.after is not None:
                row = row + weight * rows[source.after].to(weights)
        return row

    def spanned(self, span: range) -> Tensor:
        """Return (1, L+1): one for the outputs of `span`, zero elsewhere."""
        row = torch.zeros(1, self.num_sublayers + 1)
        row[:, span.start : span.stop] = 1.0
        return row

    # -- what crosses a cut ---------------------------------------------------------------------------------------
    def slots(self, index: int) -> tuple[Slot, ...]:
        """Return what the state before sublayer `index` (L: before the output's read) consists of, a function of depth
        alone: the tensors of `pack`, in order."""
        leaves, _ = self._tree(index)
        return tuple(Slot(f"state {index}.{place}", False, axes) for place, axes in enumerate(leaves))

    def pack(self, state: State, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of the state before sublayer `index`, with nothing pending: what a cut there carries."""
        return tuple(_pytree.tree_leaves(state))

    def unpack(self, tensors: Sequence[Tensor], index: int) -> State:
        """Return the state again that `pack` took apart."""
        return _pytree.tree_unflatten(list(tensors), self._tree(index)[1])

    @torch.no_grad()
    def _tree(self, index: int) -> tuple[list[tuple[int, ...]], _pytree.TreeSpec]:
        """Return the axes of each tensor of the state before sublayer `index`, and the state's form, from a pass of one
        token of zeros."""
        parameter = next(self.parameters(), None)
        zeros = torch.zeros(1, self.width) if parameter is None else parameter.new_zeros(1, self.width)
        with unwatched(self):
            state = self.start(zeros)
            for sublayer in range(index):
                _, state = self.read(state, sublayer, as_it_is)
                state = self.write(state, sublayer, zeros)
        leaves, form = _pytree.tree_flatten(state)
        if any(leaf.shape[0] != 1 or leaf.shape[-1] != self.width for leaf in leaves):
            raise TypeError(
                f"the state of residual '{self.name}' has tensors that are not (tokens, ..., {self.width}): it needs "
                "slots, pack and unpack of its own, which say what crosses a cut"
            )
        return [tuple(leaf.shape[1:-1]) for leaf in leaves], form
