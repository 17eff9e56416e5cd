"""A pipeline stage that allocates the receive buffers of a microbatch when needed and frees them after use.

torch's stage allocates a buffer for every tensor of every microbatch when training starts and keeps them all, which
with several depth sources takes more memory than caching saves. This is the only file that uses private names of torch:
`OVERRIDDEN` lists them, and `stage_class` returns torch's stage if one is missing.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as torch_utils

OVERRIDDEN = {
    "_setup_forward_recv_info": ("num_microbatches", "has_backward"),
    "_setup_backward_recv_info": ("num_microbatches",),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "set_local_bwd_input": ("next_stage_bwd_outputs", "mb_index"),
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs", "save_forward_output"),
    "backward_one_chunk": ("bwd_chunk_id", "loss", "full_backward", "last_backward"),
}
"""Methods of torch's stage that are overridden, with the parameters that are relied upon."""

_log = logging.getLogger("attnres")


def missing() -> list[str]:
    """Return the private names that the installed torch lacks, or has with other parameters."""
    names = []
    for name, parameters in OVERRIDDEN.items():
        method = getattr(PipelineStage, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != parameters:
            names.append(f"PipelineStage.{name}")
    if not hasattr(torch_utils, "_make_tensor_from_meta"):
        names.append("_make_tensor_from_meta")
    return names


def stage_class() -> type[PipelineStage]:
    """Return `LeanStage`; if the installed torch lacks a name that it needs, torch's stage, with a warning."""
    if names := missing():
        _log.warning(
            "attnres: this torch's pipeline stage lacks %s: receive buffers of all microbatches stay allocated",
            ", ".join(names),
        )
        return PipelineStage
    return LeanStage


class LeanStage(PipelineStage):
    """torch's stage, with receive buffers that exist from the receive until their use."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> Any:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._drop(self.args_recv_info, range(num_microbatches))

    def _setup_backward_recv_info(self, num_microbatches: int) -> Any:
        super()._setup_backward_recv_info(num_microbatches)
        self._drop(self.grad_recv_info, range(num_microbatches))

    def _drop(self, infos: Mapping[int, Any], chunks: Iterable[int]) -> None:
        for chunk in chunks:
            for info in infos.get(chunk, ()):
                if not info.is_root_arg:
                    info.buffer = None

    def _make(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None and info.buffer is None:
                info.buffer = torch_utils._make_tensor_from_meta(info.tensor_meta, self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self._make(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if self.has_backward and not self.is_last:
            self._make(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._make(self.grad_recv_info[mb_index])  # which it fills with zeros
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._drop(self.args_recv_info, [fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._drop(self.grad_recv_info, [bwd_chunk_id])
        if loss is not None and full_backward:
            loss.detach_()  # the schedule keeps losses until the end of the step, and their graphs hold all leaves
