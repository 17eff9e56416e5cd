"""Run copies of one text from a layer onwards; the layers before it return what one pass of the text computed.

A change to a layer's input does not affect the layers before it. If a text is run many times with one change each, as
when every edge is ablated, at least half of the work is in these layers.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from attnres.models.bases import Depth
from attnres.residuals import Observer, Residual, watched_by
from attnres.streams.stream import Stream


class Replay:
    """One text (1, T) in a model in evaluation mode, without gradients; `begun` starts later passes at a layer.

    Args:
        model: a model of this package, or a wrapper of one. Passes of other models, whose layers are not known, and of
            mechanisms that are watched from the start (`Residual.watched_from_start`) begin at the embedding.
        residual: the model's residual.
        run: makes a forward pass of the text.
    """

    def __init__(self, model: nn.Module, residual: Residual, run: Any) -> None:
        self.residual, self.depth = residual, len(residual.sublayers)
        inside = next((one for one in model.modules() if isinstance(one, Depth)), None)
        whole = inside is None or residual.watched_from_start
        self.layers: Sequence[nn.Module] = () if whole else list(inside.depth_layers)
        self.layer_outputs: list[Any] = []
        """What each layer put out: the stream as the tensors of `Residual.pack`, the rest as it was."""
        self.outputs: list[Tensor] = []
        if not self.layers:
            return
        with watched_by(residual, observer=_Written(self.outputs)), ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(self._keep).remove)
            with torch.no_grad():
                run()

    def _keep(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.layer_outputs.append(
            _pytree.tree_map_only(Stream, self._packed, output, is_leaf=lambda value: isinstance(value, Stream))
        )

    def _packed(self, stream: Stream) -> "_Packed":
        return _Packed(self.residual.pack(stream.written(), stream.index), stream)

    @contextmanager
    def begun(self, read: int, copies: int) -> Generator[None]:
        """Inside the block, a forward pass of `copies` copies of the text begins at the layer of read number `read`; an
        editor receives the earlier outputs first."""
        count = self.residual.places()[read][0] // self.depth if self.layers else 0
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers[:count], 1):
                stack.callback(_restore, layer, vars(layer).get("forward"))
                layer.forward = partial(self._pass_on, number, number == count, copies)
            yield

    def _pass_on(self, number: int, last: bool, copies: int, *args: Any, **kwargs: Any) -> Any:
        """Return the stored output of layer `number` - 1 in place of its forward. Only the last skipped layer's output
        is read."""

        def replayed(value: Any) -> Any:
            if isinstance(value, _Packed):
                return value.stream_of(copies, read=last)
            return _copies(value, copies) if isinstance(value, Tensor) else value

        if last and self.residual.editor is not None:
            embedding, *outputs = [_copies(one, copies) for one in self.outputs[: number * self.depth + 1]]
            self.residual.editor.on_start(embedding)
            for index, output in enumerate(outputs):
                self.residual.editor.on_write(index, output)
        return _pytree.tree_map(replayed, self.layer_outputs[number - 1])


class _Packed:
    """The stream of one text between two layers, as tensors."""

    def __init__(self, tensors: Sequence[Tensor], stream: Stream) -> None:
        self.tensors, self.values = tensors, stream.values
        self.residual, self.index, self.like = stream.residual, stream.index, stream.like

    def stream_of(self, copies: int, *, read: bool) -> Stream:
        """Return the stream of `copies` copies; with `read` False only its position, without a state."""
        like = _copies(self.like, copies)
        if not read:
            return Stream(self.residual, None, self.index, like)
        state = self.residual("itself").unpack([_copies(tensor, copies) for tensor in self.tensors], self.index)
        values = None if self.values is None else _copies(self.values, copies)
        return Stream(self.residual, state, self.index, like, None, values)


class _Written(Observer):
    """An observer that stores the embedding and the outputs of sublayers."""

    def __init__(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs

    def on_start(self, embedding: Tensor) -> None:
        self.outputs.append(embedding)

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs.append(output)


def _copies(tensor: Tensor, copies: int) -> Tensor:
    """Expand a tensor of one text to several copies, without copying memory."""
    return tensor.expand(copies, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == 1 else tensor


def _restore(layer: nn.Module, forward: Any) -> None:
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward
