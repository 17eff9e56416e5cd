"""Decide which passes use a bank of sources, and compile a network's layout into a bank's program.

A bank serves forward passes without gradients whose reads nobody watches: see ops/bank.py. Every other pass takes the
general path, the residual's `read` and `write`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from attnres.device import autocast_dtype
from attnres.ops import Plan, explain, plain
from attnres.ops.backend import Call
from attnres.ops.bank import Bank, Banks, Group, Program, Step
from attnres.ops.dispatch import KERNELS, bank_plan, stored_dtype
from attnres.ops.precision import compute_dtype
from attnres.residuals.layout import Source

if TYPE_CHECKING:
    from attnres.residuals.base import Residual

_VERBS = ("start", "read", "write", "finish", "normed", "mix")


class BankReads(NamedTuple):
    """How a bank computes the reads of a residual: each is a softmax over sources, or one source.

    Attributes:
        sources: the stored sources of each read, the head's last; each is a sum of outputs.
        queries: the row of `bank_queries` that scores each read's sources; None for one source.
        eps: eps of the key norm.
        groups: (first read, one past the last read) of reads that may share a pass over their common sources.
        summed: whether reads are multiplied by their number of sources.
        sealed: of each read, the sources that are stored as finished ones (`stored_dtype`); empty if none ever is.
    """

    sources: Sequence[Sequence[Source]]
    queries: Sequence[int | None]
    eps: float = 1e-6
    groups: Sequence[tuple[int, int]] = ()
    summed: bool = False
    sealed: Sequence[Sequence[Source]] = ()


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling this module does more than the class's own `forward`."""
    return bool(
        "forward" in vars(module)
        or module._compiled_call_impl is not None
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._has_any_global_hook()
    )


def why_no_bank(residual: "Residual", embedding: Tensor, *, training: bool) -> str | None:
    """Return the reason why a forward pass from this embedding (..., d) uses no bank; None if it uses one.

    `training`: whether gradients are enabled.
    """
    if training:
        return "gradients are on"
    if residual.watched:
        return "an observer or an editor watches the reads"
    if has_hooks(residual):
        return "the residual has hooks"
    if residual.program is None:
        residual.program = _program(residual)
    if isinstance(residual.program, str):
        return residual.program
    if plain.is_needed():
        return "plain torch is asked for, or a transform or a trace is under way"
    if not embedding.numel():
        return "there are no tokens"
    device, dtype = embedding.device.type, embedding.dtype
    kernels = KERNELS.get(device)
    if kernels is None or kernels.bank is None:
        return f"there is none for device {device}"
    autocast = autocast_dtype(device)
    outputs = () if autocast is None else (autocast,)
    return kernels.why_not(Call((embedding,), compute_dtype(dtype), outputs, opens=residual.program.alone))


def take_bank(residual: "Residual", embedding: Tensor) -> Bank | None:
    """Return a bank in which a pass from this embedding has begun; None if the pass uses no bank."""
    if why_no_bank(residual, embedding, training=torch.is_grad_enabled()) is not None:
        return None
    assert isinstance(residual.program, Program)
    queries = residual.bank_queries()
    if type(queries) is not Tensor or queries.device != embedding.device or queries.dtype is not torch.float32:
        return None  # the general path computes it, or raises the error
    embedding = embedding.detach().contiguous()
    kernels = KERNELS[embedding.device.type]
    program, stored = residual.program, embedding.dtype
    if program.sealed is not None:
        stored = stored_dtype(embedding.device.type, stored)
    bank = residual.banks.take(kernels.bank, kernels.load(), program, embedding, stored)
    bank.begin(embedding, queries.contiguous())
    return bank


def _program(residual: "Residual") -> Program | str:
    """Return a residual's reads as a program, or the reason why there is none."""
    reads = residual.bank_reads()
    if isinstance(reads, str):
        return reads
    mechanism = type(residual)
    saying = next(place for place, cls in enumerate(mechanism.__mro__) if "bank_reads" in vars(cls))
    overridden = [verb for cls in mechanism.__mro__[:saying] for verb in _VERBS if verb in vars(cls)]
    if overridden:  # a subclass that overrides something else
        return f"residual '{residual.name}' has a {overridden[0]} of its own"
    return program_of(reads)


def program_of(reads: BankReads) -> Program | str:
    """Return reads as a program, or the reason why there is none.

    A source is identified by the read that it starts from, if any, and its span of outputs; its row is one output, or a
    sum to which an output was added. A sum that is finished by its last output has a row of its own, because it may be
    stored in another dtype; the row of the sum in progress is then used again.
    """
    keys = [[_key(source) for source in sources] for sources in reads.sources]
    ended = [{_key(source) for source in sources} for sources in reads.sealed] or [set[_Key]() for _ in keys]
    last_use = {key: index for index, mixed in enumerate(keys) for key in mixed}
    row_of: dict[_Key, int] = {(None, 0, 1, 1): 0}
    kept: dict[int | None, int] = {}
    sums, free, sealed = list[int](), list[int](), set[int]()
    stored: set[_Key] = set()
    count, steps = 1, list[Step]()
    for index, mixed in enumerate(keys):
        target = before = keeps = None
        new = set(mixed) - row_of.keys()
        if len(new) != (index > 0) or any(stop != index + 1 for _, _, stop, _ in new):
            return f"read {index} has not one source, new or grown, with the output before it"
        for key in new:
            after, start, stop, step = key
            former = (after, start, stop - step, step)
            if stop - start > step or after is not None:
                before = row_of.get(former) if stop - start > step else kept.get(after)
                if before is None:
                    return f"read {index} has a sum that no earlier read began"
            over, ends = before in sums and last_use.get(former, -1) < index, key in ended[index]
            if before is not None and over and not ends:
                target = before
            elif before is not None and free and not ends:
                target = free.pop()
            else:
                target, count = count, count + 1
                if before is not None:
                    sums.append(target)
                    sealed |= {target} if ends else set()
                    free += [before] if over and ends else []
            row_of[key] = target
        if any(after == index for after, *_ in last_use):
            keeps, count = count, count + 1
            kept[index] = keeps
            sums.append(keeps)
        scale = float(len(mixed)) if reads.summed else 1.0
        rows = tuple(row_of[key] for key in mixed)
        finished = tuple(row_of[key] for key in sorted(ended[index] - stored) if last_use.get(key, -1) >= index)
        stored |= ended[index]
        steps.append(Step(target, before, rows, len(rows), reads.queries[index], keeps, scale, (), finished))
    groups = [group for bounds in reads.groups if (group := _group(steps, *bounds)) is not None]
    for group in groups:
        for index in range(group.start, group.stop):
            steps[index] = steps[index]._replace(opens=len(steps[index].rows) - len(group.rows))
    needed = {row: index for index, step in enumerate(steps) for row in (*step.rows, step.before) if row is not None}
    for row in set(range(count)) - set(sums):
        step = steps[needed[row]]
        steps[needed[row]] = step._replace(done=(*step.done, row))
    grouped = {index for group in groups for index in range(group.start, group.stop)}
    most_rows = max((len(step.rows) for index, step in enumerate(steps) if index not in grouped), default=1)
    return Program(
        tuple(steps), tuple(groups), count, tuple(sums), reads.eps, most_rows, frozenset(sealed) if stored else None
    )


_Key = tuple[int | None, int, int, int]


def _key(source: Source) -> _Key:
    assert source.span is not None
    return source.after, source.span.start, source.span.stop, source.span.step


def _group(steps: Sequence[Step], start: int, stop: int) -> Group | None:
    """Return the reads `start` to `stop` - 1 with the rows that they all begin with; None for fewer than two."""
    if steps[start].query is None:  # a read of the embedding alone
        start += 1
    if stop - start < 2:
        return None
    first, *others = (step.rows for step in steps[start:stop])
    count = 0
    while all(len(rows) > count and rows[count : count + 1] == first[count : count + 1] for rows in (first, *others)):
        count += 1
    query = steps[start].query
    assert query is not None
    return Group(start, stop, first[:count], query) if count else None


class Banked(nn.Module):
    """A residual whose passes without gradients may use a bank of sources. By default `bank_reads` allows none."""

    name: ClassVar[str]
    width: int
    banks: Banks
    program: Program | str | None = None
    """The reads as a program for a bank, or the reason why there is none; computed at first use."""

    def bank_reads(self) -> BankReads | str:
        """Return how a bank computes the reads of a pass without gradients, or the reason why it cannot."""
        return f"residual '{self.name}' is made in plain torch"

    def bank_queries(self) -> Tensor:
        """Return the queries (reads, d) with which such a pass scores sources, in fp32."""
        raise NotImplementedError

    def explain(self, embedding: Tensor, *, training: bool | None = None) -> Plan:
        """Explain which path a pass from `embedding` (..., d) takes, judged by its last group of reads.

        Args:
            training: whether a backward follows; None takes `torch.is_grad_enabled()`.
        """
        training = torch.is_grad_enabled() if training is None else training
        reason = why_no_bank(cast("Residual", self), embedding, training=training)
        if reason is None:
            assert isinstance(self.program, Program)
            device, tokens = embedding.device.type, embedding.numel() // self.width
            shared = self.program.shared(tokens, self.width, embedding.dtype, cached=KERNELS[device].bank.cached)
            return bank_plan(device, in_common=bool(shared))
        plan = self.general_plan(embedding, training=training)
        return dataclasses.replace(plan, reasons=(*plan.reasons, f"no bank of sources: {reason}"))

    def general_plan(self, embedding: Tensor, *, training: bool) -> Plan:
        """Explain which path the reads of a pass without a bank take."""
        return explain([embedding], training=training)
