"""The common base of Full and Block Attention Residuals: pseudo-queries, the two-phase schedule, the state."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnres.ops import (
    Norm,
    Plan,
    SealedRead,
    compute_dtype,
    explain,
    in_two_phases,
    merge,
    read_sealed,
    scaled_query,
    sealed_sum,
    stored_dtype,
)
from attnres.residuals.layout import Learned, Source, Traits
from attnres.residuals.mechanisms.gates import Gates
from attnres.residuals.mechanisms.weighting import Weighting, settings_among
from attnres.residuals.program import BankReads
from attnres.residuals.queries import Queried
from attnres.residuals.settings import mean_or_sum, positive, whole
from attnres.residuals.state import Slot, slots_of
from attnres.residuals.watch import NormLike, with_norm

SMALLEST_SCALE = 0.9
"""Smallest size of a normed vector at the start, relative to the standard residual's, without a warning: below it the
model starts as a different one. It is 0.99 in models that `build` makes, and 0.2 in nanoGPT with 24 layers of Full,
whose embeddings have a size of 0.02."""
NULL = Source("null", None, range(0), open=True)


class Shared(NamedTuple):
    """What the reads of a group share; the later groups are included.

    Attributes:
        queries: scaled queries of the current group, (d,) each.
        groups: scaled queries (reads, d) of each group from the current one on, computed once a pass.
        logits: empty, or phase 1's logits of all reads of the group, as in `SealedReads`.
    """

    queries: tuple[Tensor, ...] = ()
    groups: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()


class DepthState(NamedTuple):
    """The sources of one forward pass, and phase 1 of the remaining reads of the current group.

    Attributes:
        sealed: finished sources (..., d), in the dtype of `stored_dtype`.
        open: the current group's sources: its partial sum (Block) or its outputs so far (Full).
        added: empty, or the output that the next read adds to the last open source.
        reads: output, top and total, as in `SealedRead`, of the remaining reads, the next one first. Empty if the
            group's reads take one pass each.
        scaled: empty, or the sum that replaces the partial sum at the end of a block (`block_sum`).
    """

    sealed: tuple[Tensor, ...]
    open: tuple[Tensor, ...] = ()
    added: tuple[Tensor, ...] = ()
    reads: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    scaled: tuple[Tensor, ...] = ()
    shared: Shared = Shared()


class DepthAttention(Queried):
    """Each sublayer reads a learned softmax over earlier outputs, h_l = sum_i a_{i->l} v_i.

        a_{.->l} = softmax_i( w_l . (g_l * v_i / rms(v_i)) )

    Pseudo-queries `query` and key gains `gain` are (L+1, d), one row per sublayer and one for the output. Queries start
    at zero, unless `query_std` is set: every weight is then uniform, and a pre-norm network computes what it computed
    without depth reads.

    Args:
        groups: number of sublayers in each group, whose reads share one pass over the sealed sources; they add up to L.
        key_norm_eps: eps of the key norm.
        read_scale: "mean" is the formula above. "sum" multiplies the read by its number of sources, as if the following
            norm's eps were divided by its square: with zero queries logits are then those of the standard residual
            exactly, with no change of eps. For training the two differ by eps alone.
        window: a read has only the embedding and its last `window` other sources; None has all. All sources are stored
            nevertheless, because the plain stream is their sum.
        options: settings of `Weighting` (how sources are scored) and `Gates` (interpolation between a read and the
            running sum of all sources).

    Source: arXiv 2603.15031.
    """

    traits = Traits(True, sums_to_one=True, has_query=True, starts_standard=True)
    parts = (Weighting, Gates)
    hands_on_sum = True
    slow = ("query", "gain", "weighting.query_weight")
    output_read: ClassVar[bool] = True
    """Whether the output has a read of its own."""
    carries: ClassVar[bool] = False
    """Whether the last open source stays open after it was sealed."""

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        groups: Sequence[int],
        key_norm_eps: float = 1e-6,
        read_scale: Literal["mean", "sum"] = "mean",
        window: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_sublayers, width)
        self.bounds, self.read_scale = (0, *accumulate(groups)), mean_or_sum(read_scale)
        shared = [*pairwise(self.bounds[:-1]), (self.bounds[-2], num_sublayers + self.output_read)]
        self._groups = [bounds for bounds in shared for _ in range(*bounds)]
        """The first read of the group of each read, and the one after its last; the output's read is in the last."""
        self._sealing = frozenset(self.bounds[1:-1])
        """The reads before which a group is sealed: not the output's, which is in the last group."""
        self.max_open = self._most_open()
        self.window = None if window is None else whole("window", window)
        self.key_norm_eps = positive("key_norm_eps", key_norm_eps)
        reads = num_sublayers + self.output_read
        self.weighting = Weighting(reads, width, **settings_among(options, Weighting))
        self.add_queries(reads, self.weighting.rank)
        self.gates = Gates(reads, width, **options)
        self.special = self.weighting.special or (None if self.gates.idle else "gates")
        """What makes every read be made in plain torch, in words; None where the kernels and the schedule serve."""
        self.heeds_recompute = self.special is None
        self.traits = self._traits_with_settings()
        if self.weighting.read_temperature >= math.sqrt(width):
            self.slow = ()
        self.init_parameters()

    def init_parameters(self) -> None:
        self.init_queries(self.weighting.query_std)
        self.weighting.init_parameters()
        self.gates.init_parameters()

    def _traits_with_settings(self) -> Traits:
        """Return the class's traits, changed by the settings."""
        traits, weighting, gates = self.traits, self.weighting, self.gates
        # A biased softmax is not uniform at the start, a window omits sources; alpha starts at the plain stream.
        uniform = traits.starts_standard and not (gates.recency_bias or weighting.normed_values or weighting.query_std)
        uniform = uniform and (self.window is None or self.window >= len(self._all_sources(self.num_sublayers)) - 1)
        return traits._replace(
            sums_to_one=traits.sums_to_one and not weighting.sigmoid,
            has_query=weighting.bounded,
            starts_standard=uniform or gates.alpha is not None,
            # A vector gate, several heads and normed values have a number for each channel.
            linear=traits.linear and gates.gate_weight is None and weighting.heads == 1 and not weighting.normed_values,
        )

    def general_plan(self, embedding: Tensor, *, training: bool) -> Plan:
        if self.special is not None:
            return Plan("eager", "one pass", (f"no kernel has {self.special}",))
        start, stop = self._groups[-1]
        if self.window is not None:
            count = len(self.sources(self.num_sublayers))
            plan = explain([embedding] * count, training=training)
            why = f"with window={self.window} reads share no sealed sources"
            return dataclasses.replace(plan, schedule="one pass", reasons=(*plan.reasons, why))
        return explain(
            [embedding] * len(self.sealed(start)), reads=stop - start, opens=self.max_open, training=training
        )

    def opened(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        """Return the state with the output of sublayer `index` among the group's open sources, or pending to be added
        to one."""
        raise NotImplementedError

    def _most_open(self) -> int:
        """Return the most open sources of a read."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    def sealed(self, read: int) -> tuple[Source, ...]:
        """Return the finished sources of read number `read`."""
        raise NotImplementedError

    def opens(self, read: int) -> tuple[Source, ...]:
        """Return the open sources of read number `read`."""
        raise NotImplementedError

    def _all_sources(self, read: int) -> tuple[Source, ...]:
        return self.sealed(read) + self.opens(read)

    def _places(self, count: int) -> list[int]:
        """Return the indices of the sources, out of `count`, that a read uses: the embedding and the last ones, or
        all."""
        if self.window is None or self.window >= count - 1:
            return list(range(count))
        return [0, *range(count - self.window, count)]

    def sources(self, read: int) -> tuple[Source, ...]:
        every = self._all_sources(read)
        sources = tuple(every[place] for place in self._places(len(every)))
        return (*sources, NULL) if self.weighting.null_source and len(sources) > 1 else sources

    def group_start(self, read: int) -> int:
        """Return how many outputs are finished sources of a read: all for the output's read, although it shares the
        pass over sealed sources with the last group."""
        return read if read == self.num_sublayers else self._groups[read][0]

    def _begin(
        self,
        sealed: tuple[Tensor, ...],
        opens: tuple[Tensor, ...],
        index: int,
        groups: tuple[Tensor, ...],
    ) -> DepthState:
        """Return the state before read `index`, with phase 1 of its group's remaining reads computed if that saves
        time."""
        start, stop = self._groups[min(index, len(self._groups) - 1)]
        queries = groups[0].unbind(0) if groups else ()
        # A read of the embedding alone is the embedding.
        first = index + (len(sealed) + len(opens) == 1)
        # Edited reads are made in plain torch, of all sources: a group with one among them shares no pass.
        edited = self.editor is not None and any(map(self.editor.edits, range(index, stop)))
        two = stop > first and self.special is None and self.window is None and not edited
        if not (
            two and in_two_phases(len(sealed), stop - first, training=torch.is_grad_enabled(), opens=self.max_open)
        ):
            return DepthState(sealed, opens, shared=Shared(queries, groups))
        group = groups[0] if first == start else groups[0][first - start :]
        sealed, outputs, top, total, logits = read_sealed(sealed, group, eps=self.key_norm_eps)
        if index == start:
            opens = self._reopened(sealed)
        reads = tuple(zip(outputs, top, total, strict=True))
        return DepthState(sealed, opens, (), reads, (), Shared(queries, groups, (logits,)))

    def _reopened(self, sealed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the open sources at the start of a group. A sealed one that continues is passed as a view, because the
        compiler takes no tensor twice."""
        return (sealed[-1].view_as(sealed[-1]),) if self.carries else ()

    def start(self, embedding: Tensor) -> DepthState:
        sealed = (embedding.to(self._stored(embedding.device, embedding.dtype)),)
        return self._begin(sealed, self._reopened(sealed), 0, self._queries_by_group())

    def _stored(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of finished sources. A stream that continues the last of them is not rounded."""
        return dtype if self.carries or self.special is not None else stored_dtype(device.type, dtype)

    def _stream_dtype(self, sealed: tuple[Tensor, ...]) -> torch.dtype:
        """Return the dtype of the partial sum and of reads before their norm: `stream_dtype` if it is set, else the
        dtype of finished sources, or fp32 if an fp32 stream stores these in bf16."""
        if self.stream_dtype is not None:
            return self.stream_dtype
        first = sealed[0]
        if first.dtype != torch.bfloat16:
            return first.dtype
        return torch.float32 if self._stored(first.device, torch.float32) == first.dtype else first.dtype

    def _queries_by_group(self) -> tuple[Tensor, ...]:
        """Return the rows of `bank_queries` by group; empty if plain torch computes the reads."""
        if self.special is not None:
            return ()
        return self.bank_queries().split([stop - start for start, stop in dict.fromkeys(self._groups)])

    def read(self, state: DepthState, index: int, norm: NormLike) -> tuple[Tensor, DepthState]:
        sealed, opens, added, reads, scaled, shared = state
        stream, count = self._stream_dtype(sealed), len(sealed) + len(opens)
        places = None if self.window is None else self._places(count)
        count = count if places is None else len(places)
        if count == 1:  # one source: the read is the source itself, and the query's gradient is exactly zero
            h = sealed[0] if isinstance(norm, Norm) else sealed[0].to(stream)
            return self.normed(h, index, norm, values=[h]), state
        if self.special is not None or (self.editor is not None and self.editor.edits(index)):
            return self._read_plainly(state, index, norm)
        fused = phase1 = None
        if isinstance(norm, Norm):
            weight, bias, eps, center, out_dtype = norm
            eps = eps / count**2 if self.read_scale == "sum" else eps
            fused = Norm(weight, bias, eps, center, out_dtype or stream)
        mixed = opens
        if reads:
            (logits,) = shared.logits
            phase1 = SealedRead(*reads[0], sealed, logits, logits.shape[-1] - len(reads))
        else:
            every = sealed + opens
            mixed = every if places is None else tuple(every[place] for place in places)
        merged = merge(
            phase1,
            mixed,
            added[0] if added else None,
            shared.queries[index - self._groups[index][0]] if mixed else None,
            fused,
            eps=self.key_norm_eps,
            dtype=stream,
            recompute=self.recompute_reads,
            watched=self.observer is not None,
        )
        values = merged.opens
        if reads:
            rest = DepthState(sealed, values, (), reads[1:], scaled, shared)
        else:
            if places is not None:
                handed_on = dict(zip(places, values, strict=True))
                every = tuple(handed_on.get(place, source) for place, source in enumerate(every))
            else:
                every = values
            rest = DepthState(every[: len(sealed)], every[len(sealed) :], (), (), scaled, shared)
        if self.observer is not None:
            weights = merged.weights
            assert weights is not None and merged.h is not None
            if phase1 is not None:
                assert merged.sealed is not None
                sealed = phase1.logits[:, :, phase1.index].softmax(1) * merged.sealed.unsqueeze(1)
                weights, values = torch.cat([sealed, weights], 1), state.sealed + values
            h = merged.h.view_as(state.sealed[0])
            h = h * count if self.read_scale == "sum" else h  # a fused norm accounts for the factor in its eps
            self.observer.on_read(index, h, weights, values)
        x = merged.x
        if fused is None:
            assert not isinstance(norm, Norm)
            x = norm(x * count if self.read_scale == "sum" else x)
        return x, rest

    def bank_reads(self) -> BankReads | str:
        if self.special is not None:
            return f"no kernel has {self.special}"
        sources = [self.sources(index) for index in range(self.num_sublayers + 1)]
        queries = [index if len(mixed) > 1 else None for index, mixed in enumerate(sources)]
        sealed = () if self.carries else [self.sealed(start) for start, _ in self._groups]
        groups = list(dict.fromkeys(self._groups))
        return BankReads(sources, queries, self.key_norm_eps, groups, self.read_scale == "sum", sealed)

    def bank_queries(self) -> Tensor:
        query, temperature = scaled_query(self.queries, self.gains), self.weighting.read_temperature
        return query if temperature == 1.0 else query / temperature

    def _read_plainly(self, state: DepthState, index: int, norm: NormLike) -> tuple[Tensor, DepthState]:
        """Compute a read for which there is no kernel: with other weights, gates or edits."""
        state = state._replace(open=self._finished(state), added=())
        every, editor, bias = state.sealed + state.open, self.editor, self.gates.bias
        sources = [every[place] for place in self._places(len(every))]
        biases = self.prior_logits(index)
        if bias is not None:
            *others, last = biases or [0.0] * len(sources)
            biases = [*others, last + bias[index]]
        mixed = self.weighting.read(
            sources,
            self.queries[index],
            self.gains[index],
            index,
            biases=biases,
            stream=lambda: self._plain_stream(state),
            query_lr=self.query_lr,
            scale=self.total(index) if self.read_scale == "sum" else 1.0,
            eps=self.key_norm_eps,
            edit=None if editor is None else lambda weights: editor.edit(index, weights),
            exchange=None if editor is None else lambda values: editor.exchange(index, values),
        )
        h = self.gates.hold(mixed.h, lambda: self._plain_stream(state), index).to(self._stream_dtype(state.sealed))
        if editor is not None:
            h = editor.steer(index, h)
        if self.observer is not None:
            self.observer.on_read(index, h, mixed.weights, mixed.values)
        return with_norm(h, norm), state

    def prior_logits(self, read: int) -> list[Tensor | float]:
        """Return the terms added to the logits of read number `read`, one for each source except a null one; empty for
        none."""
        return []

    def total(self, read: int) -> float:
        """Return the factor with which read number `read`, at zero queries, is the sum of its sources."""
        return self.weighting.total(len(self.sources(read)) - self.weighting.null_source)

    def _plain_stream(self, state: DepthState) -> Tensor:
        """Return the sum of all outputs so far in the compute dtype; `state` has no pending output."""
        dtype = compute_dtype(state.sealed[0].dtype)
        if self.carries:
            return self.hidden_state(state).to(dtype)
        total = state.sealed[0].to(dtype)
        for source in state.sealed[1:] + state.open:
            total = total + source
        return total

    def write(self, state: DepthState, index: int, output: Tensor) -> DepthState:
        state = self.opened(state, index, output)
        if index + 1 not in self._sealing:
            return state
        stored = state.sealed[0].dtype
        finished = self.closed(state, stored)
        if stored != self._stream_dtype(state.sealed):
            finished = tuple(source.to(stored) for source in finished)
        sealed = state.sealed + finished
        return self._begin(sealed, self._reopened(sealed), index + 1, state.shared.groups[1:])

    def closed(self, state: DepthState, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the open sources as they are after the end of their group; sums are rounded to `dtype`."""
        return self._finished(state, dtype)

    def _finished(self, state: DepthState, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the open sources with pending outputs added; sums are rounded to `dtype`, by default the stream's."""
        if not state.added:
            return state.open
        return (*state.open[:-1], sealed_sum(state.open[-1], state.added[0], dtype or self._stream_dtype(state.sealed)))

    @torch.no_grad()
    def direction(self, read: int) -> Tensor | None:
        if read >= len(self.query) or not self.weighting.bounded:
            return None
        direction = self.queries[read] * self.gains[read]
        return nn.functional.pad(direction, (self.width - len(direction), 0))  # a sliced key uses the last coordinates

    def sharpness(self, read: int) -> float | None:
        largest, rank = super().sharpness(read), self.query.shape[1]
        if largest is None:
            return None
        return largest * math.sqrt(rank / self.width) / self.weighting.read_temperature

    def learned(self) -> dict[str, Learned]:
        return self.gates.learned()

    def mixing_row(self, read: int, weights: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
        row = super().mixing_row(read, weights, rows)
        count = len(self.sources(read))
        if row is None or count == 1 or read >= len(self.query):  # a read of one source has neither scale nor gate
            return row
        if self.read_scale == "sum":
            row = row * self.total(read)
        return self.gates.held_back(row, self.spanned(range(read + 1)).to(row), read)

    def slots(self, index: int) -> tuple[Slot, ...]:
        return slots_of(self.sealed(index) + self._crossing(index), index)

    def _crossing(self, index: int) -> tuple[Source, ...]:
        """Return the open sources that a cut before sublayer `index` must carry in addition to the sealed ones."""
        return () if index == self.group_start(index) else self.opens(index)

    def pack(self, state: DepthState, index: int) -> tuple[Tensor, ...]:
        whole = self._crossing(index) or index == self.num_sublayers
        return state.sealed + (self._finished(state) if whole else ())

    def unpack(self, tensors: Sequence[Tensor], index: int) -> DepthState:
        count = len(self.sealed(self.bounds[-2] if index == self.num_sublayers else index))
        sealed, opens = tuple(tensors[:count]), tuple(tensors[count:])
        finished = sum(stop <= index for stop in self.bounds[1:-1])
        stored = self._stored(sealed[0].device, self._stream_dtype(sealed))
        if stored != sealed[0].dtype:
            sealed = tuple(source.to(stored) for source in sealed)
        groups = self._queries_by_group()[finished:]
        return self._begin(sealed, opens or self._reopened(sealed), index, groups)

    def hidden_state(self, state: DepthState) -> Tensor:
        total = state.sealed[0].to(self._stream_dtype(state.sealed))
        for source in state.sealed[1:] + state.open + state.added:
            total = total + source
        return total

    def finish(self, state: DepthState, norm: NormLike) -> Tensor:
        if self.scale_is_default and not torch.compiler.is_compiling():
            self.scale_is_default = False  # once only, because it copies numbers from the device
            self._warn_of_scale(state, norm)
        return self.read(state, self.num_sublayers, norm)[0]

    @torch.no_grad()
    def _warn_of_scale(self, state: DepthState, norm: NormLike) -> None:
        """Warn if the norm after the last read, at its start the mean of n sources, gives another vector than for their
        sum: a mean of size s gives s / sqrt(s^2 + eps), the sum s / sqrt(s^2 + eps / n^2)."""
        eps, total = getattr(norm, "eps", None), self.hidden_state(state)
        by_input = self.weighting.query_weight
        zero_at_start = [self.query, *([] if by_input is None else [by_input]), *self.gates.parameters()]
        if not eps or not self.traits.starts_standard or total.is_meta or any(bool(p.any()) for p in zero_at_start):
            return
        count = len(self.sources(self.num_sublayers))
        square = float(total.double().square().mean()) / count**2
        if not square or math.sqrt((square + eps / count**2) / (square + eps)) > SMALLEST_SCALE:
            return
        warnings.warn(
            f"reads of residual '{self.name}' are means of size {math.sqrt(square):.2g}, which a norm with eps={eps:g} "
            "does not bring back to 1: the model does not start as the standard residual. Give "
            "read_scale='sum', which is the standard residual exactly, or 'mean', the paper's formula",
            stacklevel=3,
        )


def sizes_of_groups(num_sublayers: int, size: int) -> list[int]:
    """Return the sizes of groups of `size` sublayers, the last one the remainder."""
    return [min(size, num_sublayers - start) for start in range(0, num_sublayers, size)]
