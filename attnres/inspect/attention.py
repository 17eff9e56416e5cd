"""Which tokens each token attends to, layer by layer: the other direction, beside depth, in which a model moves
information.

Of H heads' weights a_h (rows sum to one) there is the mean, which says what the layer reads on the whole, and the
maximum, which says whether any head looks there. Neither says how much of the output it makes: values differ in length.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.head import evaluating
from attnres.inspect import notebook
from attnres.inspect.edits import position_of
from attnres.inspect.subject import Speller, Text, TextModel, as_model, prompt_ids

ATTENDING = ("attention", "full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, as a config names them, whose attention has weights."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenAttention(notebook.Result):
    """One text's attention.

    Attributes:
        layers: numbers of the layers that attend with weights; others (linear attention) are left out.
        tokens: ids (T).
        mean, largest: (layers, T, T) over a layer's heads: row t is what token t attends to, zero after t.
        heads: of each layer (H, T), what each head of it attends to at the position that was asked for; else none.
    """

    layers: list[int]
    tokens: list[int]
    mean: Tensor
    largest: Tensor
    words: Speller = field(default_factory=Speller, repr=False)
    heads: list[Tensor] = field(default_factory=list)

    def _about(self) -> str:
        return f"{len(self.layers)} layers, {len(self.tokens)} tokens"

    def _records(self, position: int = -1) -> Iterator[dict[str, Any]]:
        at = position_of(position, len(self.tokens))
        for i, layer in enumerate(self.layers):
            for t in range(at + 1):
                weights = {"mean": self.mean[i, at, t].item(), "largest": self.largest[i, at, t].item()}
                yield {
                    "layer": layer,
                    "position": t,
                    "token": self.words(self.tokens[t]),
                    "id": self.tokens[t],
                    **weights,
                }

    def frame(self, position: int = -1) -> Any:
        """Return a data frame with a row for each layer and token that the one at `position` can attend to.

        Raises:
            UserError: no such position, or no pandas.
        """
        return notebook.frame(self._records(position))

    def as_table(self) -> notebook.Table:
        best = self.mean[:, -1].argmax(-1).tolist()
        rows = [
            (f"L{layer}", t, self.words(self.tokens[t]), self.mean[i, -1, t].item())
            for i, (layer, t) in enumerate(zip(self.layers, best, strict=True))
        ]
        head = ("layer", "position", "token", "mean over heads")
        return notebook.Table(f"{self!r}: what the last token attends to most", head, rows)


def token_attention(model: Any, text: Text, *, position: int | None = None) -> TokenAttention:
    """Run a text through the model's own attention, in plain arithmetic instead of fused kernels, and keep its weights.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> token_attention(model, range(9)).mean.shape
    torch.Size([12, 9, 9])

    Args:
        position: of the token of which the heads' weights are kept apart; None is none.

    Raises:
        UserError: as `predict`; a model whose attention has no weights to show, or does not say of which layers they
            are.
    """
    model = as_model(model)
    if isinstance(model, TextModel):
        raise UserError(f"{model.name} is no model of Transformers, which alone shows the weights of its attention")
    ids = prompt_ids(model, text)
    at = None if position is None else position_of(position, ids.shape[1])
    with evaluating(model), torch.no_grad(), weights_shown(model), _summed_up(model, at) as (summaries, heads):
        out = model(input_ids=ids, use_cache=False, output_attentions=True)
    attentions = out.attentions or ()
    if all(one is None for one in attentions):
        raise UserError(f"{type(model).__name__} shows no weights of its attention over tokens")
    layers = attending_layers(model.config, len(attentions))
    shown, apart = {}, []
    for layer, one in zip(layers, attentions, strict=True):
        if one is None:
            continue
        place = next((i for i, summary in enumerate(summaries) if one is summary), None)
        shown[layer] = (_summary(one) if place is None else one)[0]
        if at is not None:
            apart.append(_heads(one, at) if place is None else heads[place])
    mean, largest = torch.stack(list(shown.values()), 1)
    return TokenAttention(list(shown), ids[0].tolist(), mean, largest, Speller(model), apart)


def _heads(weights: Tensor, position: int) -> Tensor:
    """Return (H, T): each head's weights (1, H, T, T) at a position."""
    return weights[0, :, position].float().cpu()


def _summary(weights: Tensor) -> Tensor:
    """Return mean and maximum (1, 2, T, T) of the heads' weights (1, H, T, T)."""
    return torch.stack([weights.mean(1, dtype=torch.float32), weights.amax(1).float()], 1).cpu()


@contextmanager
def _summed_up(model: Any, position: int | None) -> Generator[tuple[list[Tensor], list[Tensor]]]:
    """Attentions give a summary in the place of their heads' weights, which of all layers would fill the memory; yields
    these summaries, and beside each the heads' weights at `position`."""
    summaries: list[Tensor] = []
    heads: list[Tensor] = []

    def sum_up(module: Any, args: Any, output: Any) -> Any:
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor) or weights.ndim != 4 or any(weights is one for one in summaries):
            return None
        summaries.append(_summary(weights))
        if position is not None:
            heads.append(_heads(weights, position))
        return (output[0], summaries[-1], *output[2:])

    attentions = [one for one in model.modules() if type(one).__name__.lower().endswith(("attention", "attn"))]
    # In front of Transformers' own hooks, which keep what comes out of them.
    handles = [one.register_forward_hook(sum_up, prepend=True) for one in attentions]
    try:
        yield summaries, heads
    finally:
        for handle in handles:
            handle.remove()


def attending_layers(config: Any, count: int) -> list[int]:
    """Return the numbers of the layers that `count` attention weights are of: Transformers leaves out those without
    any.

    Raises:
        UserError: the config does not say.
    """
    from attnres.models.families import layer_count  # which loads Transformers; pictures import this file without

    every = list(range(layer_count(config) or count))
    kinds: Any = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    attending = [layer for layer, kind in enumerate(kinds) if kind in ATTENDING]
    for layers in (every, attending):
        if len(layers) == count:
            return layers
    raise UserError(
        f"the model shows attention weights of {count} of its {len(every)} layers, and its config names "
        f"{len(attending)} that have such: there is no telling which layers they are of"
    )


@contextmanager
def weights_shown(model: Any) -> Generator[None]:
    """The model attends in plain arithmetic for a while: fused kernels make no weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
