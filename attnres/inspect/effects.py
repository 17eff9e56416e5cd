"""Predictions of a model for one text, the effect of an edit on them, and all vectors that it reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.head import evaluating, log_probs
from attnres.inspect import notebook
from attnres.inspect.edits import Edit, intervene
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import Model, Speller, Text, as_model, prompt_ids
from attnres.residuals import Read, watched_by
from attnres.stats import or_none, ratio
from attnres.text import chance, with_error

Edits = Edit | Sequence[Edit]


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(notebook.Result):
    """A model's predictions for one text: `ids` (T,) and log-probabilities (T, V) of each next token, fp32, CPU."""

    ids: Tensor
    log_probs: Tensor
    words: Speller = field(default_factory=Speller, repr=False)

    def _about(self) -> str:
        best = int(self.log_probs[-1].argmax())
        return f"{len(self.ids)} tokens, then “{self.words(best)}” with {chance(self.log_probs[-1, best].exp().item())}"

    def _records(self) -> Iterator[dict[str, Any]]:
        return (
            {"token": self.words(i), "id": i, "loss": loss}
            for i, loss in zip(self.ids[1:].tolist(), self.losses.tolist())
        )

    @property
    def losses(self) -> Tensor:
        """(T - 1,) nats: -ln p of token t + 1 after tokens 0 .. t."""
        return -self.log_probs[:-1].gather(1, self.ids[1:, None])[:, 0]


@dataclass(frozen=True, repr=False)
class Effect(notebook.Result):
    """One text with and without an edit; losses and differences in nats, differences are after - before.

    Attributes:
        loss_before, loss_after: (T - 1) of the tokens after the first.
        difference, error: mean difference per token, and its standard error over this text's tokens (they are not
            independent: it says how uneven the effect is). None where there are too few tokens.
        kl: (T) sum_x p(x) ln(p(x) / p'(x)) of the next-token distributions before (p) and after (p') the edit.
        top: the likeliest next tokens after the text, by the larger of both probabilities:
            {"id": ..., "before": p, "after": p'}.
        before: the unedited prediction, for `effect(..., before=)`; not in `to_dict`.

    The data frame has a row a prediction: the token's id, its losses before and after, and the KL before it.
    """

    loss_before: list[float]
    loss_after: list[float]
    difference: float | None
    error: float | None
    kl: list[float]
    top: list[dict[str, Any]]
    before: Prediction = field(repr=False, compare=False)
    words: Speller = field(default_factory=Speller, repr=False, compare=False)

    HIDDEN = ("before", "words")

    def _about(self) -> str:
        change = with_error(self.difference, self.error, signed=True)
        return f"{change} nats per token over {len(self.loss_before)} predictions"

    def _records(self) -> Iterator[dict[str, Any]]:
        rows = zip(self.before.ids[1:].tolist(), self.loss_before, self.loss_after, self.kl)
        return ({"token": self.words(i), "id": i, "before": a, "after": b, "kl": kl} for i, a, b, kl in rows)

    def as_table(self) -> notebook.Table:
        rows = [(self.words(part["id"]), chance(part["before"]), chance(part["after"])) for part in self.top]
        return notebook.Table(f"{self!r}; likeliest after the text:", ("token", "p before", "p after"), rows)


def predict(model: Model, input_ids: Text) -> Prediction:
    """Return the model's predictions for one text (T,) or (1, T).

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> predict(model, range(9)).losses.shape
    torch.Size([8])

    Raises:
        UserError: an empty text, several at once, one longer than the model's context, or ids outside its vocabulary.
    """
    model = as_model(model)
    ids = prompt_ids(model, input_ids)
    with evaluating(model), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return Prediction(ids[0].cpu(), log_probs(logits[0]).cpu(), Speller(model))


def effect(
    model: Model,
    input_ids: Text,
    edits: Edits,
    *,
    top: int = 10,
    before: Prediction | None = None,
) -> Effect:
    """Return the effect of `edits` on the predictions for one text.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> effect(model, range(9), attnres.inspect.Ablate("embedding", reads="output"))
    Effect(... nats per token over 8 predictions)

    Args:
        input_ids: the text, in letters or as ids.
        top: how many likely next tokens to list.
        before: the prediction without edits (`predict`, or an earlier `Effect.before`) for the same text and model; it
            is made where it is not given.

    Raises:
        UserError: as `predict` and `intervene`; or `before` belongs to another text.
    """
    model = as_model(model)
    ids = prompt_ids(model, input_ids)
    if before is None:
        before = predict(model, ids)
    elif not torch.equal(before.ids, ids[0].cpu()):
        raise UserError("the prediction given as `before` is of another text: leave it out, or pass that of this text")
    with intervene(model, *several(edits)):
        after = predict(model, ids)
    losses = before.losses, after.losses
    change = ratio((losses[1] - losses[0]).double().numpy())
    last, edited = before.log_probs[-1].exp(), after.log_probs[-1].exp()
    likeliest = torch.maximum(last, edited).topk(min(top, len(last))).indices.tolist()
    return Effect(
        loss_before=losses[0].tolist(),
        loss_after=losses[1].tolist(),
        difference=or_none(change.mean),
        error=or_none(change.error),
        kl=nn.functional.kl_div(after.log_probs, before.log_probs, reduction="none", log_target=True).sum(-1).tolist(),
        top=[{"id": i, "before": last[i].item(), "after": edited[i].item()} for i in likeliest],
        before=before,
        words=Speller(model),
    )


def several(edits: Edits) -> Sequence[Edit]:
    """Return one edit, or several, as a sequence; anything else is refused by `intervene`."""
    many = isinstance(edits, Sequence) and not isinstance(edits, str)
    return edits if many else (cast(Edit, edits),)


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
        for read, vectors in zip(self.layout, self.reads, strict=True):
            for position, norm in enumerate(vectors.float().square().mean(-1).sqrt().tolist()):
                yield {"read": read.name, "position": position, "rms": norm}

    def source(self, read: str, source: str) -> Tensor:
        """Return (T, d): the vector of a source as a read mixes it, for `Patch`.

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

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        vectors = [value.reshape(h.shape)[0] for value in values] or list(self.outputs)
        self.reads[read] = h[0], weights, vectors

    def on_write(self, index: int, output: Tensor) -> None:
        self.outputs.append(output[0])


def read_vectors(model: Model, text: Text) -> Vectors:
    """Run the model on one text and keep all that is read: in memory as much as the text's activations.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> read_vectors(model, range(9))
    Vectors(...)

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
