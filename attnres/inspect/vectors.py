"""The vectors that a pass reads: what each read made, from which sources, with which weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.head import evaluating, log_probs
from attnres.inspect import notebook
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import Model, Text, as_model, prompt_ids
from attnres.residuals import Read, watched_by


@dataclass(frozen=True, eq=False, repr=False)
class Vectors(notebook.Result):
    """One text's reads.

    Attributes:
        ids: (T,). layout: the R reads.
        reads: what each made before its norm, (T, d).
        weights: (T, sources) of each read. sources: the source vectors of each, (T, d); reads of one source share it.
        outputs: the embedding and what every sublayer wrote, (T, d).
        log_probs: (V,) of what follows the text.
    """

    ids: Tensor
    layout: Sequence[Read]
    reads: Sequence[Tensor]
    weights: Sequence[Tensor]
    sources: Sequence[Sequence[Tensor]]
    outputs: Sequence[Tensor]
    log_probs: Tensor

    def _about(self) -> str:
        return f"{len(self.layout)} reads, {len(self.ids)} tokens"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"layout": [read.to_json() for read in self.layout]}

    def _records(self) -> Iterator[dict[str, Any]]:
        for read, made in zip(self.layout, self.reads, strict=True):
            for position, norm in enumerate(made.float().square().mean(-1).sqrt().tolist()):
                yield {"read": read.name, "position": position, "rms": norm}

    def source(self, read: str, source: str) -> Tensor:
        """(T, d): the vector of a source as a read mixes it, for `Patch`.

        Raises:
            UserError: there is no such read, or it has no such source.
        """
        for one, vectors in zip(self.layout, self.sources, strict=True):
            names = [part.name for part in one.sources]
            if one.name == read and source in names:
                return vectors[names.index(source)]
        raise UserError(f"no read '{read}' with a source '{source}': see attnres.inspect.source_names")


class _Keep:
    """An observer that keeps one pass."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.reads: dict[int, tuple[Tensor, Tensor | None, list[Tensor]]] = {}

    def on_start(self, embedding: Tensor) -> None:
        self.outputs, self.reads = [embedding[0]], {}

    def on_read(self, index: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        vectors = [value.reshape(h.shape)[0] for value in values] or list(self.outputs)
        self.reads[index] = h[0], weights, vectors

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs.append(output[0])


def read_vectors(model: Model, text: Text) -> Vectors:
    """Run the model on one text and keep all that is read: in memory as much as the text's activations.

    Raises:
        UserError: as `predict`; a residual that mixes by no weights; a model that is being recorded.
    """
    model = as_model(model)
    ids, residual, keep = prompt_ids(model, text), find_residual(model), _Keep()
    if residual.observer is not None:
        raise UserError("this model is being recorded: leave the `record` block first")
    with evaluating(model), torch.no_grad(), watched_by(residual, observer=keep):
        logits = model(input_ids=ids, use_cache=False).logits
    kept = [keep.reads[index] for index in sorted(keep.reads)]
    weights = [one[1] for one in kept if one[1] is not None]
    if len(weights) < len(kept):
        raise UserError(f"residual '{residual.name}' mixes its sources by no weights: there are no sources to show")
    last = log_probs(logits[0, -1])
    return Vectors(
        ids[0], residual.layout(), [one[0] for one in kept], weights, [one[2] for one in kept], keep.outputs, last
    )
