"""Choose the implementation of a read, with the reasons: no other module decides this.

There are two decisions. The *schedule* is one pass over all sources of a read, or two phases that share the pass over
the sealed sources among a block's reads, whichever moves less memory. The *backend* is the kernels of the device, or
plain torch for calls that the kernels cannot take; the fallback is logged once.
"""

import functools
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attnres.device import autocast_dtype
from attnres.ops import eager
from attnres.ops.backend import (
    MAX_ONE_PASS,
    Backend,
    Call,
    Connect,
    ConnectingBackend,
    Connection,
    in_two_phases,
    vectors_moved,
    why_not_connected,
)
from attnres.ops.devices import KERNELS
from attnres.ops.precision import compute_dtype
from attnres.ops.sharded import refuse_sharded, settled

_log = logging.getLogger("attnres")


@dataclass(frozen=True)
class Plan:
    """How a call is executed. `str(plan)` is a sentence.

    Attributes:
        backend: the name of a row of KERNELS, or "eager" (plain torch).
        schedule: "one pass" or "two phases".
        reasons: why this backend and why this schedule.
        path: "bank" if the pass has its sources in a bank (bank.py), else "general".
    """

    backend: str
    schedule: str
    reasons: tuple[str, ...]
    path: str = "general"

    def __str__(self) -> str:
        title = next((row.title for row in KERNELS.values() if row.name == self.backend), "plain torch")
        where = " in a bank" if self.path == "bank" else ""
        return f"{self.schedule}{where} on {title}: {'; '.join(self.reasons)}"


def _choose(call: Call) -> tuple[str, Backend, str, bool]:
    """Return the backend's name, the backend, the reason, and whether to log the fallback (if it is one)."""
    device = call.tensors[0].device.type
    kernels = KERNELS.get(device)
    if call.compute != torch.float32:
        return "eager", eager, f"the kernels compute in fp32, this call in {call.compute}", False
    if kernels is None:
        return "eager", eager, f"there are no kernels for device {device}", device != "meta"
    if (none := why_not_connected(call)) is not None:
        return "eager", eager, none, False
    reason, backend = kernels.why_not(call), kernels.load()
    if reason is None and not isinstance(backend, str):
        return kernels.name, backend, kernels.found, False
    return "eager", eager, str(reason or backend), not kernels.turned_off()


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("attnres: depth reads fall back to plain torch, which is slower: %s", reason)


def backend_for(
    tensors: Sequence[Tensor],
    compute: torch.dtype,
    *outputs: torch.dtype,
    reads: int = 1,
    opens: int = 0,
    parameters: tuple[Tensor | None, ...] = (),
    streams: int = 0,
    form: Connection | None = None,
) -> Backend:
    """Return the backend for vectors `tensors` (..., d), results of dtypes `outputs`, and `parameters` of queries and
    norms.

    Either `reads` reads share the vectors in phase 1, or `opens` of them are the open sources of one merge, or they are
    parallel streams (`streams`, `form`).

    Raises:
        UserError: a tensor or a parameter is sharded.
    """
    kernels, width = KERNELS.get(tensors[0].device.type), tensors[0].shape[-1]  # of all vectors: kernels refuse others
    kinds = *map(type, tensors), *map(type, parameters), *map(_KIND, tensors)
    key = _choose, kernels and kernels.load(), compute, outputs, width, reads, opens, streams, form, kinds
    module = _CHOSEN.get(key)
    if module is None:
        tensors = [settled(tensor) for tensor in tensors]
        refuse_sharded((*tensors, *parameters))
        _, module, reason, loud = _choose(Call(tensors, compute, outputs, reads, opens, streams, form))
        if loud:
            _say_once(reason)
        else:
            _CHOSEN[key] = module
    return module


_KIND = operator.attrgetter("device", "dtype")

_CHOSEN: dict[Any, Backend] = {}
"""Choices of `backend_for` by device, dtypes, widths and types, of which a program has a few. A fallback that is logged
is not stored, so that every call can log."""


def connection_backend(c: Connect) -> ConnectingBackend | None:
    """Return the backend whose kernel connects these parallel streams, or None for plain torch.

    Raises:
        UserError: a tensor or a parameter is sharded.
    """
    vectors = (c.streams,) if c.output is None else (c.streams, c.output)
    parameters = (c.table,) if c.norm is None else (c.table, c.norm.weight, c.norm.bias)
    out = (c.norm and c.norm.out_dtype) or c.streams.dtype
    backend = backend_for(
        vectors,
        compute_dtype(c.streams.dtype),
        c.streams.dtype,
        out,
        parameters=parameters,
        streams=c.streams.shape[-2],
        form=c.form,
    )
    return cast(ConnectingBackend, backend) if hasattr(backend, "connect") else None


def explain_connection(stream: Tensor, form: Connection, streams: int) -> Plan:
    """Explain how reads of parallel streams with the embedding `stream` (..., d) are executed."""
    name, _, reason, _ = _choose(Call([stream], compute_dtype(stream.dtype), (), streams=streams, form=form))
    return Plan(name, "one pass", (reason,))


def bank_plan(device: str, *, in_common: bool) -> Plan:
    """Return how the reads of a pass in a bank (bank.py) are executed; `in_common`: groups share sources in two
    phases."""
    schedule = "two phases" if in_common else "one pass"
    why = "a group's sources are more than a cache holds" if in_common else "its sources are few, or stay in a cache"
    return Plan(KERNELS[device].name, schedule, ("no gradients are needed and nobody watches", why), "bank")


def stored_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which finished sources of a stream of this dtype are stored: bf16 for an fp32 stream if the
    model computes in bf16 and the device's kernels are `narrow`, else the stream's dtype."""
    kernels = KERNELS.get(device)
    if dtype != torch.float32 or kernels is None or not kernels.narrow or autocast_dtype(device) != torch.bfloat16:
        return dtype
    return torch.bfloat16


def is_wide(source: Tensor) -> bool:
    """Return whether a read of its own over such sources takes two phases, because vectors this wide leave a program of
    one pass no registers to load the next source ahead."""
    row = KERNELS.get(source.device.type)
    return row is not None and row.one_pass_width is not None and source.shape[-1] > row.one_pass_width


def explain(sources: Sequence[Tensor], *, reads: int = 1, opens: int = 0, training: bool | None = None) -> Plan:
    """Explain how `reads` reads over these sources are executed, and why.

    Args:
        sources: the sealed sources, (..., d).
        reads: number of reads that share them (`block_size`); 1 for `depth_read`.
        opens: most open sources of each read (1 in a block, up to the group size in Full).
        training: whether a backward follows; None takes `torch.is_grad_enabled()`.

    Example:
        >>> import torch
        >>> explain([torch.zeros(4, 32, dtype=torch.float64)] * 9).schedule
        'one pass'
    """
    training = torch.is_grad_enabled() if training is None else training
    name, _, reason, _ = _choose(Call(list(sources), compute_dtype(sources[0].dtype), (), reads, opens))
    n = len(sources)
    shared = in_two_phases(n, reads, training=training, opens=opens)
    two = shared or (n > 1 and reads == 1 and not opens and is_wide(sources[0]))
    moved = vectors_moved(n, reads, training=training)
    kind = "training" if training else "inference"
    if two and not shared:
        why = f"vectors of {sources[0].shape[-1]} leave one pass no registers to load a source ahead"
    elif not two or moved[1] < moved[0]:
        why = f"{n} sources and {reads} reads move {moved[0]} vectors a token in one pass, {moved[1]} in two phases"
    else:
        why = f"one pass takes at most {MAX_ONE_PASS} sources, here are {n + opens}"
    return Plan(name, "two phases" if two else "one pass", (reason, f"{why} ({kind})"))
