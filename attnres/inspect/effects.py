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
from attnres.models.encoding import check_ids, check_length, encode_prompt, rows_of, stated_context, tokenise
from attnres.stats import or_none, ratio
from attnres.text import short, with_error

Edits = Edit | Sequence[Edit]
Text = str | Tensor | Sequence[int]
"""One text: in letters, for a model that was loaded with its tokenizer, or its token ids, (T,) or (1, T)."""
Token = int | str
"""A token: its id, or its letters."""


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


def predict(model: nn.Module, input_ids: Text) -> Prediction:
    """The model's predictions for one text (T,) or (1, T).

    Raises:
        UserError: an empty text, several at once, one longer than the model's context, or ids outside its vocabulary.
    """
    ids = prompt_ids(model, input_ids)
    with evaluating(model), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return Prediction(ids[0].cpu(), log_probs(logits[0]).cpu())


def effect(
    model: nn.Module,
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


def tokenizer_of(model: Any) -> Any:
    """The tokenizer that lies with the model's files (`Checkpoint.load` notes where), read once.

    Raises:
        UserError: the model comes from no folder or name that has one.
    """
    if getattr(model, "read_tokenizer", None) is None:
        from transformers import AutoTokenizer

        folder = getattr(model, "tokenizer_folder", None) or getattr(model, "name_or_path", "")
        try:
            model.read_tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # Transformers raises many kinds
            raise UserError(
                "text was given in letters, and the model has no tokenizer beside it: give token ids, or load the "
                "model from its folder"
            ) from error
    return model.read_tokenizer


def token_id(model: nn.Module, token: Token) -> int:
    """The id of a token, given by it or by its letters.

    Raises:
        UserError: letters that are not one token, or that the tokenizer does not know; an id outside the vocabulary.
    """
    if isinstance(token, str):
        ids = tokenise(tokenizer_of(model), token)[0]
        if len(ids) != 1:
            raise UserError(f"'{token}' is {len(ids)} tokens: give one, with the space before it if there is one")
        return int(ids[0])
    if not 0 <= token < rows_of(model):
        raise UserError(f"target is {token}: expected a token id from 0 to {rows_of(model) - 1}")
    return int(token)


def prompt_ids(model: nn.Module, input_ids: Text) -> Tensor:
    """(1, T): one text's ids on the model's device.

    Raises:
        UserError: an empty text, several at once, one longer than the model's context, ids outside its vocabulary;
            letters for a model without a tokenizer, or that its tokenizer does not know.
    """
    rows, context = rows_of(model), stated_context(getattr(model, "config", None))
    if isinstance(input_ids, str):
        input_ids = encode_prompt(tokenizer_of(model), input_ids, rows=rows, context=context)[0]
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"a text is {type(input_ids).__name__}: expected letters or token ids ({error})") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise UserError(f"ids of shape {tuple(ids.shape)}: expected those of one text, (T,) or (1, T)")
    if not ids.numel():
        raise UserError("the text is empty: give at least one token")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"ids are {ids.dtype}: expected whole numbers")
    check_length(ids.numel(), context, "the model")
    check_ids(ids, rows)
    table: Any = model.get_input_embeddings()  # ty: ignore[not-callable]
    return ids.long().unsqueeze(0).to(table.weight.device)
