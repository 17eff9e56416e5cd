"""What an edit does to one text: to the loss of each token, and to the next-token distribution."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.head import evaluating, log_probs
from attnres.inspect import notebook
from attnres.inspect.edits import Edit, intervene
from attnres.inspect.subject import Model, Text, as_model, prompt_ids
from attnres.stats import or_none, ratio
from attnres.text import short, with_error

Edits = Edit | Sequence[Edit]


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(notebook.Result):
    """What a model says of one text: `ids` (T,) and the log-probabilities (T, V) of each next token, fp32, CPU."""

    ids: Tensor
    log_probs: Tensor

    def _about(self) -> str:
        best = int(self.log_probs[-1].argmax())
        return f"{len(self.ids)} tokens, then {best} with {short(self.log_probs[-1, best].exp().item(), 3)}"

    def _records(self) -> Iterator[dict[str, Any]]:
        return ({"id": i, "loss": loss} for i, loss in zip(self.ids[1:].tolist(), self.losses.tolist()))

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

    HIDDEN = ("before",)

    def _about(self) -> str:
        change = with_error(self.difference, self.error, signed=True)
        return f"{change} nats per token over {len(self.loss_before)} predictions"

    def _records(self) -> Iterator[dict[str, Any]]:
        rows = zip(self.before.ids[1:].tolist(), self.loss_before, self.loss_after, self.kl)
        return ({"id": i, "before": a, "after": b, "kl": kl} for i, a, b, kl in rows)

    def _repr_html_(self) -> str:
        rows = [(part["id"], short(part["before"], 3), short(part["after"], 3)) for part in self.top]
        return notebook.table(f"{self!r}; likeliest after the text:", ("token id", "before", "after"), rows)


def predict(model: Model, input_ids: Text) -> Prediction:
    """The model's predictions for one text (T,) or (1, T).

    Raises:
        UserError: an empty text, several at once, one longer than the model's context, or ids outside its vocabulary.
    """
    model = as_model(model)
    ids = prompt_ids(model, input_ids)
    with evaluating(model), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return Prediction(ids[0].cpu(), log_probs(logits[0]).cpu())


def effect(
    model: Model,
    input_ids: Text,
    edits: Edits,
    *,
    top: int = 10,
    before: Prediction | None = None,
) -> Effect:
    """What `edits` do to the predictions for one text.

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
    )


def several(edits: Edits) -> Sequence[Edit]:
    """One edit, or several, as a sequence; what is none is refused where it is made."""
    many = isinstance(edits, Sequence) and not isinstance(edits, str)
    return edits if many else (cast(Edit, edits),)
