"""A CUDA graph's stand-in on a CPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnres.ops.devices import KERNELS
from attnres.training import graphs

ASKING = ("local_scalar", "nonzero", "is_all", "equal.default", "masked_select", "unique")
"""In names of operators that a device has to answer before the host goes on."""
TO_HOST, FROM_HOST = ("cpu", "tolist", "numpy"), ("tensor", "as_tensor")
"""Calls that copy between a device and the host, for which there is no operator on a CPU."""


class _Copies(TorchFunctionMode):
    """Refuses copies between a device and the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if name in TO_HOST or (name in FROM_HOST and kwargs.get("device") is not None and result.numel()):
            raise RuntimeError(f"{name} copies between the device and the host")
        return result


def _asks(func: Any, args: Any) -> bool:
    """Return whether the device has to answer before the host goes on."""
    name = func._schema.name
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):  # a mask: how many values does it choose?
        masked = any(index is not None and index.dtype == torch.bool for index in args[1])
        return masked and (name == "aten::index" or args[2].numel() > 1)
    return any(word in str(func) for word in ASKING)


class Tape(TorchDispatchMode):
    """`attnres.training.graphs.Graph` as a tape of operators. Like a graph it runs what was recorded on the same
    addresses, with the numbers that the host had then, refuses what asks the device for a number, and changes nothing
    while it records."""

    made: "list[Tape]" = []  # noqa: RUF012 (of a test)

    def __init__(self, function: Callable[[], Any], pool: "Tape | None" = None) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.storages: dict[int, tuple[Any, Any]] = {}  # that were there before, and what they held
        self.own: set[int] = set()
        self.replays = 0
        numbers = torch.get_rng_state()
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True), self, _Copies():
            self.output = function()
        for storage, content in self.storages.values():
            storage.copy_(content)
        torch.set_rng_state(numbers)
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _asks(func, args):
            raise RuntimeError(f"{func} asks the device for a number")
        named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(named.get(argument.name)):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        taken = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        fresh = [value for value in tree_leaves(result) if isinstance(value, Tensor) and _address(value) not in taken]
        self.own.update(map(_address, fresh))
        views = [each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns]
        if fresh or not any(views):  # of inference, `to` and `reshape` come whole: views of what they take, or copies
            self.calls.append((func, args, kwargs, [value.detach() for value in fresh]))
        return result

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.storages.setdefault(storage.data_ptr(), (storage, storage.clone()))

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, fresh in self.calls:
            result = [value for value in tree_leaves(func(*args, **kwargs)) if isinstance(value, Tensor)]
            for ours, new in zip(fresh, result if fresh else ()):
                ours.copy_(new)


def in_place_of_graphs(monkeypatch: pytest.MonkeyPatch) -> "list[Tape]":
    """Let steps be captured on this CPU, with the attention of a GPU; return the tapes that are made. The older of the
    Transformers that are allowed copy a number to the device for masks of whole score matrices."""
    monkeypatch.setattr(graphs, "Graph", Tape)
    monkeypatch.setattr(graphs, "why_not", lambda *_, **how: None)
    monkeypatch.setitem(KERNELS, "cpu", KERNELS["cpu"]._replace(whole_scores=0))
    monkeypatch.setattr(Tape, "made", [])
    return Tape.made


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
