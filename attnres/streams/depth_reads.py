"""Depth reads for a model's own forward loop: a hidden state that counts its sublayers and refuses misuse."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops.norms import Norm
from attnres.residuals import NormLike, make_residual
from attnres.residuals.mechanisms.standard import OneStream
from attnres.residuals.program import has_hooks
from attnres.residuals.state import as_it_is
from attnres.streams.inputs import Inputs
from attnres.streams.known_norms import describe_norm
from attnres.streams.meta import wait_for_values
from attnres.streams.stream import Stream

FUSED_NORMS = (nn.RMSNorm, nn.LayerNorm)
"""Classes of norms whose arithmetic is known: a read computes the norm in the same pass."""


class HiddenState(Stream):
    """The hidden state of one forward pass before sublayer `index`.

    A sublayer reads it once and adds its output: `x = x + attention(x.read(norm))`.
    """

    def read(self, norm: nn.Module | NormLike | None = None) -> Tensor | Inputs:
        """Return the input of the next sublayer, (..., d).

        Args:
            norm: the norm before the sublayer: a module, a function, a `Norm`, or None. A read computes a `Norm`,
                `nn.RMSNorm` or `nn.LayerNorm` in the same pass.

        Raises:
            UserError: this state was already read and nothing was added, or every sublayer has written.
        """
        # backward runs a checkpointed layer again, whose first run may have ended between read and write
        recomputes = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self._after_read is not None and not recomputes:
            raise UserError(
                f"sublayer {self.index} reads twice and has written nothing between: x = x + f(x.read(norm)) reads once"
            )
        if self.index == self._count():
            raise UserError(f"all {self.index} sublayers have read and written: x.finish(norm) gives the head's input")
        return super().read(norm)

    def write(self, output: Tensor) -> "HiddenState":
        """Return the state after the sublayer that read this one wrote `output`, (..., d); `x + output` is the same.

        Raises:
            UserError: this state was not read.
        """
        if self._after_read is None:
            raise UserError(
                f"sublayer {self.index} writes and has not read: x = x + f(x.read(norm)) reads, and keeps the output"
            )
        return cast(HiddenState, super().__add__(output))

    def __add__(self, output: Any) -> Any:
        return super().__add__(output) if isinstance(output, Stream) else self.write(output)

    __radd__ = __add__

    def finish(self, norm: nn.Module | NormLike | None = None) -> Tensor | Inputs:
        """Return the input of the head, (..., d), with `norm` as in `read`.

        Raises:
            UserError: some sublayer has not read and written.
        """
        if self.index != self._count() or self._after_read is not None:
            raise UserError(
                f"{self.index} of {self._count()} sublayers have read and written: finish comes after the last. "
                "num_sublayers counts attentions and MLPs, not layers"
            )
        return super().read(norm)

    def spec(self, norm: nn.Module | NormLike | None) -> NormLike:
        if norm is None or isinstance(norm, Norm):
            return as_it_is if norm is None else norm
        # a subclass or a module with hooks (adapters, FSDP) may compute something else, so it is called; so is a norm
        # when fusing saves nothing: the standard residual is then x + f(norm(x)) to the bit
        is_known = type(norm) in FUSED_NORMS and not has_hooks(cast(nn.Module, norm))
        is_known = is_known and not isinstance(self.residual("itself"), OneStream)
        return describe_norm(cast(nn.Module, norm), self.like) if is_known else norm

    def _count(self) -> int:
        return self.residual("itself").num_sublayers


class DepthReads(nn.Module):
    """Connect the sublayers of your own model: each reads a mixture of the embedding and earlier outputs.

        self.depth = attnres.DepthReads(2 * layers, width, "block", num_blocks=8)

        x = self.depth.start(self.embed(ids))
        for layer in self.layers:
            x = x + layer.attention(x.read(layer.norm1))
            x = x + layer.mlp(x.read(layer.norm2))
        logits = self.head(x.finish(self.norm))

    `residual` has the parameters, and the same steps as functions on tuples of tensors, for kernels, pipelines and
    compiled checkpoints: `start(embedding)`, `read(state, index, norm)`, `write(state, index, output)`, `finish(state,
    norm)`.

    Args:
        num_sublayers: number of attentions and MLPs. width: d.
        residual: a mechanism's name. None and "standard" are x + f(norm(x)), and ignore settings of "block", so that
            one word turns depth reads off.
        sublayers: kinds of a layer's sublayers, in order; by default attention and MLP.
        query_lr: learning rate of queries and key gains relative to the optimizer's; by default 0.1 if the mechanism
            needs it.
        settings: settings of the mechanism.

    Raises:
        UserError: an unknown name or setting, impossible settings, or a value residual, which needs access to the
            attentions.
    """

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        residual: str | None = "block",
        *,
        sublayers: Sequence[str] | None = None,
        query_lr: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if settings.get("value_residual", "none") != "none":
            raise UserError(
                f"value_residual is '{settings['value_residual']}', and DepthReads does not know where your "
                "attention computes its values: leave it out"
            )
        self.residual = make_residual(
            residual or "standard", num_sublayers, width, sublayers=sublayers, query_lr=query_lr, **settings
        )
        wait_for_values(self.residual)

    def start(self, embedding: Tensor) -> HiddenState:
        """Return the hidden state before the first sublayer, from the token embedding (..., d)."""
        return cast(HiddenState, HiddenState.plain(self.residual, embedding))
