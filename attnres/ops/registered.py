"""The five functions of a backend as `torch.library` operators `attnres::*`, which torch.compile sees as one call each.

An operator is made from the record that the function takes: its arguments are the record's fields, those of a record
within it in its place. It picks its backend when it runs. What it returns of fake tensors is what plain torch returns,
with which every backend agrees in shapes and dtypes. Autograd stays in two_phase.py, whose Functions call these while a
graph is traced. An operator whose backend launches Triton kernels is taken apart before the graph comes to a compiler's
backend, as `torch.library.triton_op` does: Inductor then launches the kernels as its own, with no call of Python.
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
"""Where a value is in a record: the place of its field, and for one of a record within it the place in there."""


class MixInputs(NamedTuple):
    """Inputs of `Backend.mix`."""

    sources: Sequence[Tensor]
    weights: Tensor
    dtype: torch.dtype


def _arguments(record: Any, path: Path = (), prefix: str = "", *, optional: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield the path and the schema of each argument. Of a record that may be absent every field may be None."""
    for place, (name, kind) in enumerate(get_type_hints(record).items()):
        absent = optional or type(None) in get_args(kind)
        inner = next((part for part in (kind, *get_args(kind)) if hasattr(part, "_fields")), None)
        if inner is not None:
            yield from _arguments(inner, (*path, place), f"{prefix}{name}_", optional=absent)
            continue
        value = _SCHEMA.get(kind) or _SCHEMA.get(get_args(kind)[0], "str")  # of a Literal its strings
        yield (*path, place), f"{value}{'?' if absent else ''} {prefix}{name}"


def _nested(record: Any, values: Iterator[Any]) -> Any:
    """Return the record of an operator's arguments; None of one within it whose fields are all None."""
    fields = list[Any]()
    for kind in get_type_hints(record).values():
        inner = next((part for part in (kind, *get_args(kind)) if hasattr(part, "_fields")), None)
        fields.append(next(values) if inner is None else _nested(inner, values))
    return record(*fields) if any(field is not None for field in fields) else None


def _leaves(nest: Any) -> list[Tensor | None]:
    """Return the tensors of a nest, and None where it has that; what is neither is left out."""
    if nest is None or isinstance(nest, Tensor):
        return [nest]
    return [leaf for part in nest for leaf in _leaves(part)] if isinstance(nest, (list, tuple)) else []


class _Operator:
    """A function of a backend as an operator. It returns tensors: one without numbers where the function has None, and
    a copy where it has one that shares memory with an argument or another result, which no operator may return.

    Args:
        name: after `attnres::`.
        record: of the function's inputs.
        call: calls the function on a backend.
        choose: returns the backend.
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
        if not any(row.traced and row.load() is backend for row in KERNELS.values()):
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
        values: list[Any] = []  # list[Any]() is no call that dynamo traces
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
    if saved.h is not None and saved.h is m.output:  # an input, which `merge` puts there if h has its dtype
        saved = saved._replace(h=None if m.output.dtype == m.dtype else m.output.to(m.dtype))
    return x, saved, partial


def _merged_back(backend: Backend, m: MergeGradInputs) -> MergeGrads:
    grads = backend.merge_backward(m._replace(last_dtype=None, added_dtype=None))
    output = grads.output
    return grads if output is None or m.output_dtype is None else grads._replace(output=output.to(m.output_dtype))


def _backend_of_merge(m: MergeInputs) -> Backend:
    vectors = [tensor for tensor in (m.output, m.added, *m.opens) if tensor is not None]
    out_dtype = (m.norm and m.norm.out_dtype) or m.dtype
    return backend_for(vectors, compute_dtype(m.dtype), m.dtype, out_dtype, opens=len(m.opens))


def _backend_of_merge_backward(m: MergeGradInputs) -> Backend:
    assert m.saved.h is not None
    return backend_for([m.saved.h, m.grad, *m.opens], compute_dtype(m.saved.h.dtype), opens=len(m.opens))


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
    x, h, scalars, partial = _merge(m._replace(saves="h"))
    saved = MergeSaved(_or_none(h) if m.opens or h.numel() else m.output, scalars)
    return x, saved, None if m.added is None else partial


def merge_backward(m: MergeGradInputs) -> MergeGrads:
    output, top, *out = _merge_backward(m)
    k = len(m.opens)
    query, weight, bias, _ = out[k:]
    return MergeGrads(_or_none(output), _or_none(top), out[:k], _or_none(query), _or_none(weight), _or_none(bias))


def mix(sources: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    return _mix(MixInputs(sources, weights, dtype))[0]
