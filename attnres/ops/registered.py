"""The five functions of a backend as `torch.library` operators `attnres::*`, each of which torch.compile sees as one
call.

An operator is generated from the record that the function takes: its arguments are the record's fields, and those of a
nested record in its place. It picks its backend when it runs. For fake tensors it runs plain torch, with which every
backend agrees in shapes and dtypes. Autograd stays in two_phase.py, whose Functions call the operators while a graph is
traced. An operator whose backend launches Triton kernels is decomposed before the graph reaches the compiler's backend,
as `torch.library.triton_op` does: Inductor then launches the kernels itself, without calling Python.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast, get_args, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from attnres.ops import eager
from attnres.ops.backend import (
    Backend,
    MergeGradInputs,
    MergeGrads,
    MergeInputs,
    MergeSaved,
    ReadGradInputs,
    ReadInputs,
    Sealed,
)
from attnres.ops.devices import KERNELS
from attnres.ops.dispatch import backend_for
from attnres.ops.precision import compute_dtype

_LIBRARY = torch.library.Library("attnres", "DEF")

_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    Sequence[Tensor]: "Tensor[]",
    Sequence[Tensor | None]: "Tensor?[]",
    torch.dtype: "ScalarType",
    float: "float",
    bool: "bool",
}

Path = tuple[int, ...]
"""Where a value is in a record: the index of its field, followed by the index in the nested record if it is in one."""


class MixInputs(NamedTuple):
    """Inputs of `Backend.mix`."""

    sources: Sequence[Tensor]
    weights: Tensor
    dtype: torch.dtype


def _arguments(record: Any, path: Path = (), prefix: str = "", *, optional: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield the path and the schema of each argument. If the record is optional, every field may be None."""
    for place, (name, kind) in enumerate(get_type_hints(record).items()):
        absent = optional or type(None) in get_args(kind)
        inner = next((part for part in (kind, *get_args(kind)) if hasattr(part, "_fields")), None)
        if inner is not None:
            yield from _arguments(inner, (*path, place), f"{prefix}{name}_", optional=absent)
            continue
        value = _SCHEMA.get(kind) or _SCHEMA.get(get_args(kind)[0], "str")  # of a Literal the type of its strings
        yield (*path, place), f"{value}{'?' if absent else ''} {prefix}{name}"


def _nested(record: Any, values: Iterator[Any]) -> Any:
    """Return the record made from an operator's arguments; a nested record whose fields are all None becomes None."""
    fields = list[Any]()
    for kind in get_type_hints(record).values():
        inner = next((part for part in (kind, *get_args(kind)) if hasattr(part, "_fields")), None)
        fields.append(next(values) if inner is None else _nested(inner, values))
    return record(*fields) if any(field is not None for field in fields) else None


def _leaves(nest: Any) -> list[Tensor | None]:
    """Return the tensors of a nest, and its Nones; other values are left out."""
    if nest is None or isinstance(nest, Tensor):
        return [nest]
    return [leaf for part in nest for leaf in _leaves(part)] if isinstance(nest, (list, tuple)) else []


def _is_of(backend: Backend, ability: str) -> bool:
    """Return whether the device type whose backend this is has an ability (a field of `Kernels`)."""
    return any(getattr(row, ability) and row.load() is backend for row in KERNELS.values())


class _Operator:
    """A function of a backend as an operator. It returns only tensors: an empty one in place of None, and a copy of a
    result that shares memory with an argument or another result, which an operator may not return.

    Args:
        name: the name after `attnres::`.
        record: the class of the function's inputs.
        call: calls the function of a backend.
        choose: returns the backend for a record.
    """

    def __init__(
        self, name: str, record: Any, call: Callable[[Backend, Any], Any], choose: Callable[[Any], Backend]
    ) -> None:
        self.record, self.call, self.choose = record, call, choose
        arguments = list(_arguments(record))
        self.paths = tuple(path for path, _ in arguments)
        _LIBRARY.define(f"{name}({', '.join(schema for _, schema in arguments)}) -> Tensor[]")
        _LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"attnres::{name}", self._fake)
        torch.library.register_torch_dispatch(f"attnres::{name}", FunctionalTensorMode, self._taken_apart)
        self.operator = getattr(torch.ops.attnres, name).default

    def _run(self, *values: Any) -> list[Tensor]:
        inputs = _nested(self.record, iter(values))
        arguments = [tensor for tensor in _leaves(values) if tensor is not None]
        places = {tensor.data_ptr() for tensor in arguments}
        results = list[Tensor]()
        for tensor in _leaves(self.call(self.choose(inputs), inputs)):
            if tensor is None:
                tensor = arguments[0].new_empty(0, dtype=torch.float32)
            elif tensor.storage_offset() > 0 or tensor.data_ptr() in places:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            results.append(tensor.contiguous())
            places.add(tensor.data_ptr())
        return results

    def _taken_apart(self, mode: Any, operator: Any, types: Any, values: Any, names: Any) -> Any:
        inputs = _nested(self.record, iter(values))
        backend = self.choose(inputs)
        if not _is_of(backend, "traced"):
            return mode.__torch_dispatch__(operator, types, values, names)
        with mode:
            like = next(tensor for tensor in _leaves(values) if tensor is not None)
            results = _leaves(self.call(backend, inputs))
            return [like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in results]

    def _fake(self, *values: Any) -> list[Tensor]:
        like = next(tensor for tensor in _leaves(values) if tensor is not None)
        results = _leaves(self.call(cast(Backend, eager), _nested(self.record, iter(values))))
        return [
            like.new_empty(0, dtype=torch.float32) if tensor is None else tensor.new_empty(tensor.shape)
            for tensor in results
        ]

    def __call__(self, inputs: Any) -> list[Tensor]:
        values: list[Any] = []  # dynamo cannot trace the call list[Any]()
        for path in self.paths:
            value = inputs
            for place in path:
                value = None if value is None else value[place]
            values.append(list(value) if isinstance(value, (list, tuple)) else value)
        return self.operator(*values)


def _or_none(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _merged(backend: Backend, m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]:
    x, saved, partial = backend.merge(m)
    if saved.h is not None and saved.h is m.output:  # an input, which `merge` returns as h if it has h's dtype
        saved = saved._replace(h=None if m.output.dtype == m.dtype else m.output.to(m.dtype))
    # What a backend returns beyond what was asked for is left out, because results must not depend on the backend.
    h = saved.h if m.saves in ("h", "h alone") else None
    return x, MergeSaved(h, saved.scalars if m.saves in ("h", "least") else None), partial


def _merged_back(backend: Backend, m: MergeGradInputs) -> MergeGrads:
    """Return the gradients in the dtypes that the record names, whatever the backend makes of these."""
    grads = backend.merge_backward(m)
    output, opens, added = grads.output, [*grads.opens], grads.added
    if output is not None and m.output_dtype is not None:
        output = output.to(m.output_dtype)
    if opens:
        last = opens[-1]
        opens[-1] = last.to(m.last_dtype or last.dtype)
        if added is None and m.added_dtype not in (None, opens[-1].dtype):
            added = last.to(m.added_dtype)
    return grads._replace(output=output, opens=opens, added=added)


def _backend_of_merge(m: MergeInputs) -> Backend:
    vectors = [tensor for tensor in (m.output, m.added, *m.opens) if tensor is not None]
    out_dtype = (m.norm and m.norm.out_dtype) or m.dtype
    return backend_for(vectors, compute_dtype(m.dtype), m.dtype, out_dtype, opens=len(m.opens))


def _backend_of_merge_backward(m: MergeGradInputs) -> Backend:
    read = m.output if m.saved.h is None else m.saved.h
    vectors = [*m.opens, m.grad] if read is None else [read, m.grad, *m.opens]
    backend = backend_for(vectors, compute_dtype(vectors[0].dtype), opens=len(m.opens))
    # Plain torch recomputes h too, for what another backend has saved.
    return backend if m.saved.h is not None or _is_of(backend, "most_again") else cast(Backend, eager)


_read_sealed = _Operator(
    "read_sealed",
    ReadInputs,
    lambda backend, r: backend.read_sealed(r),
    lambda r: backend_for(r.sources, r.queries.dtype, r.dtype, reads=len(r.queries)),
)
_read_sealed_backward = _Operator(
    "read_sealed_backward",
    ReadGradInputs,
    lambda backend, r: backend.read_sealed_backward(r),
    lambda r: backend_for(r.sources, r.queries.dtype, reads=len(r.queries)),
)
_merge = _Operator("merge", MergeInputs, _merged, _backend_of_merge)
_merge_backward = _Operator("merge_backward", MergeGradInputs, _merged_back, _backend_of_merge_backward)
_mix = _Operator(
    "mix",
    MixInputs,
    lambda backend, r: [backend.mix(*r)],
    lambda r: backend_for(r.sources, r.weights.dtype, r.dtype),
)


def read_sealed(r: ReadInputs) -> Sealed:
    out = _read_sealed(r)
    return Sealed(out[:-4], *out[-4:])


def read_sealed_backward(r: ReadGradInputs) -> tuple[Tensor, list[Tensor]]:
    out = _read_sealed_backward(r)
    return out[0], out[1:]


def merge(m: MergeInputs) -> tuple[Tensor, MergeSaved, Tensor | None]:
    if not m.opens and m.norm is None:
        assert m.output is not None
        return m.output.to(m.dtype), MergeSaved(m.output), None
    first = m.opens[0] if m.opens else m.output
    assert first is not None
    kernels = KERNELS.get(first.device.type)
    if m.saves == "least" and not 0 < len(m.opens) <= (kernels.most_again if kernels else 0):
        m = m._replace(saves="h")
    x, h, scalars, partial = _merge(m)
    saved = MergeSaved(_or_none(h) if m.opens or h.numel() else m.output, scalars)
    return x, saved, None if m.added is None else partial


def merge_backward(m: MergeGradInputs) -> MergeGrads:
    output, top, *out = _merge_backward(m)
    k = len(m.opens)
    return MergeGrads(_or_none(output), _or_none(top), out[:k], *(_or_none(tensor) for tensor in out[k:]))


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    return _mix(MixInputs(sources, weights, dtype))[0]
