"""The logit lens, the head applied to every read; and direct logit attribution, the part of each source in a logit.

A read goes through the final norm and the head as if it were the output's (nostalgebraist's logit lens, 2020). The
output's read is a sum and the head is linear, so that once the norm's scale is held at what it was, a token's logit is
a sum over sources: W_y . N(p_i v_i), and what is left (biases, gates).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from attnres.errors import UserError
from attnres.head import evaluating, log_probs
from attnres.inspect import notebook
from attnres.inspect.edits import position_of
from attnres.inspect.effects import read_vectors
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import Model, Speller, Text, TextModel, Token, as_model, prompt_ids, token_id
from attnres.ops import Norm
from attnres.residuals import Read
from attnres.residuals import outputs as outputs_of
from attnres.residuals.watch import with_norm
from attnres.streams.known_norms import describe_norm
from attnres.streams.passes import FINISHED, note_progress
from attnres.text import chance, number

ROWS = 256
"""Vectors that go through the head at once."""


@dataclass(frozen=True, repr=False)
class Lens(notebook.Named, notebook.Result):
    """Every read as a prediction.

    Attributes:
        layout: the R reads, the output's last: the model's own prediction; reads: their names. tokens: ids (T).
        top: (R, T, k) likeliest ids after each token. probability: theirs.
        target: (R, T) ln p of the text's next token, of the last the model's likeliest.
        divergence: (R, T) sum_x p(x) ln(p(x) / q(x)) in nats, p the model's prediction and q the read's.

    The data frame has a row a read and position: likeliest token, its id and probability, target and divergence.
    """

    layout: Sequence[Read]
    tokens: list[int]
    top: list[list[list[int]]]
    probability: list[list[list[float]]]
    target: list[list[float]]
    divergence: list[list[float]]
    words: Speller = field(default_factory=Speller, repr=False, compare=False)

    def _about(self) -> str:
        return f"{len(self.reads)} reads, {len(self.tokens)} tokens"

    def _records(self) -> Iterator[dict[str, Any]]:
        return (
            {
                "read": read,
                "position": t,
                "token": self.words(self.top[r][t][0]),
                "top": self.top[r][t][0],
                "probability": self.probability[r][t][0],
                "target": self.target[r][t],
                "divergence": self.divergence[r][t],
            }
            for r, read in enumerate(self.reads)
            for t in range(len(self.tokens))
        )

    def as_table(self) -> notebook.Table:
        last = zip(self.layout, self.top, self.probability, self.target, self.divergence, strict=True)
        rows = [
            (read.label, self.words(ids[-1][0]), chance(p[-1][0]), target[-1], apart[-1])
            for read, ids, p, target, apart in last
        ]
        head = ("read", "likeliest token", "p", "ln p of the target", "KL to the output, nats")
        return notebook.Table(f"{self!r}, after the last token", head, rows)


def logit_lens(
    model: Model, text: Text, *, top: int = 5, position: int | None = None, target: Token | None = None
) -> Lens:
    """Put every read of a text through the final norm and the head, whatever the head does besides (scales, caps).

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> logit_lens(model, range(9))
    Lens(25 reads, 9 tokens)

    Args:
        top: tokens of each read.
        position: of the one token whose reads are wanted; T is then 1. None is all.
        target: whose ln p is given, instead of the text's next token.

    Raises:
        UserError: as `predict`; a residual that mixes by no weights; a module whose head is not found.
    """
    if top < 1:
        raise UserError(f"top is {top}: expected at least one token a read")
    model = as_model(model)
    vectors = read_vectors(model, text)
    place = None if position is None else position_of(position, len(vectors.ids))
    goal = None if target is None else token_id(model, target)
    return lens_of(model, vectors.ids, vectors.layout, vectors.reads, top=top, position=place, target=goal)


def lens_of(
    model: Any,
    ids: Tensor,
    layout: Sequence[Read],
    reads: Sequence[Tensor],
    *,
    top: int,
    position: int | None,
    target: int | None,
) -> Lens:
    """Return the lens of a text (T,) whose `reads` (T, d) are known; as `logit_lens`, position and target as
    numbers."""
    at = slice(None) if position is None else slice(position, position + 1)
    norm, predictions, _ = _end(model, ids)
    with evaluating(model), torch.no_grad():
        last = predictions(with_norm(reads[-1][at], norm))
        following = ids.roll(-1)[at].clone()
        if target is not None:
            following = torch.full_like(following, target)
        elif position is None or position == len(ids) - 1:
            following[-1] = last[-1].argmax()
        rows: list[tuple[Any, ...]] = []
        size = max(1, ROWS // len(last))
        for start in range(0, len(reads), size):
            normed = [with_norm(h[at], norm) for h in reads[start : start + size]]
            for read in predictions(torch.cat(normed)).split(len(last)):
                best = read.topk(min(top, read.shape[1]))
                apart = nn.functional.kl_div(read, last, reduction="none", log_target=True).sum(-1)
                goal = read.gather(1, following[:, None])[:, 0]
                rows.append((best.indices.tolist(), best.values.exp().tolist(), goal.tolist(), apart.tolist()))
    likeliest, chances, targets, divergence = (list(column) for column in zip(*rows, strict=True))
    return Lens(layout, ids[at].tolist(), likeliest, chances, targets, divergence, Speller(model))


@dataclass(frozen=True, repr=False)
class Direct(notebook.Result):
    """What the sources of the output's read add to a logit.

    Attributes:
        position, target, against: the logit is that of `target` after token `position`, less that of `against`.
        logit: W_y . N(h) + b, before any scale or cap. rest: what no source adds: biases, gates.
        sources: what each source of the output's read adds, by name; of a gated read the part of it that lies along
            their sum. outputs: of single outputs, blocks taken apart and gates counted; None where the read is no such
            sum.

    The data frame has a row an output, or a source where single outputs are not told apart, and one for what is left of
    the logit.
    """

    position: int
    target: int
    against: int | None
    logit: float
    rest: float
    sources: dict[str, float]
    outputs: dict[str, float] | None
    words: Speller = field(default_factory=Speller, repr=False, compare=False)

    def _about(self) -> str:
        less = "" if self.against is None else f" less that of “{self.words(self.against)}”"
        return f"logit of “{self.words(self.target)}”{less} after position {self.position}: {self.logit:.3f}"

    def _records(self) -> Iterator[dict[str, Any]]:
        parts = self.sources if self.outputs is None else self.outputs
        rows = {**parts, "rest": self.logit - sum(parts.values())}
        return ({"part": name, "logit": value} for name, value in rows.items())

    def as_table(self) -> notebook.Table:
        rows = [(name, number(value, signed=True)) for name, value in {**self.sources, "rest": self.rest}.items()]
        return notebook.Table(f"What sources add to the {self._about()} in all", ("source", "logit"), rows)


def direct(
    model: Model, text: Text, *, position: int = -1, target: Token | None = None, against: Token | None = None
) -> Direct:
    """Return the part of each source of the output's read in a token's logit after `position`; without a target the
    token is the likeliest.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> direct(model, range(9))
    Direct(logit of “...” after position 8: ...)

    Raises:
        UserError: as `predict`; a position or token that is not there; a final norm whose arithmetic is not known.
    """
    model = as_model(model)
    ids = prompt_ids(model, text)
    position = position_of(position, ids.shape[1])
    vectors = read_vectors(model, ids[:, : position + 1])
    residual = find_residual(model)
    norm, _, head = _end(model, vectors.ids)
    spec = describe_norm(norm, vectors.reads[-1]) if isinstance(norm, nn.Module) else norm
    if not isinstance(spec, Norm):
        raise UserError(f"the final norm is {type(norm).__name__}: its arithmetic is not known here")
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise UserError("the head is no linear layer: what sources add to a logit is known of one alone")
    target_id = int(vectors.log_probs.argmax()) if target is None else token_id(model, target)
    rival = None if against is None else token_id(model, against)
    h = vectors.reads[-1][-1].double()
    centred = h - h.mean() if spec.center else h
    scale = (centred.square().mean() + spec.eps).rsqrt()

    def of(weight: Tensor) -> Tensor:
        """Return the target's row, minus the rival's, in fp64."""
        return weight[target_id].double() - (0.0 if rival is None else weight[rival].double())

    row = of(head.weight)
    along = row * scale * (1.0 if spec.weight is None else spec.weight.double())
    along = along - along.mean() if spec.center else along  # of vectors that are not centred
    constant = 0.0 if spec.bias is None else (row @ spec.bias.double()).item()
    constant += 0.0 if getattr(head, "bias", None) is None else of(head.bias).item()
    logit = (along @ h).item() + constant
    weights = vectors.weights[-1][-1].double()
    terms = [weight * vector[-1].double() for weight, vector in zip(weights, vectors.sources[-1], strict=True)]
    whole = torch.stack(terms).sum(0)
    factor = (h @ whole) / (whole @ whole).clamp_min(1e-30)  # of reads that are scaled
    parts = [(factor * (along @ term)).item() for term in terms]
    rows: list[Tensor] = []
    for index, read_weights in enumerate(vectors.weights):
        mixing = residual.mixing_row(index, read_weights.float(), rows)
        if mixing is None:
            break
        rows.append(mixing)
    names = [source.name for source in vectors.layout[-1].sources]
    outputs = None
    if len(rows) == len(vectors.weights):
        shares = rows[-1].expand(len(vectors.reads[-1]), -1)[-1].double()
        of_outputs = [(share * (along @ one[-1].double())).item() for share, one in zip(shares, vectors.outputs)]
        written = outputs_of(residual.num_sublayers + 1, residual.sublayers)
        outputs = dict(zip([one.name for one in written], of_outputs, strict=True))
    return Direct(
        len(vectors.ids) - 1,
        target_id,
        rival,
        logit,
        logit - sum(parts),
        dict(zip(names, parts, strict=True)),
        outputs,
        Speller(model),
    )


def _end(model: Any, ids: Tensor) -> tuple[Any, Callable[[Tensor], Tensor], Any]:
    """Return the final norm, a function from normed vectors (T, d) to log-probabilities (T, V), and the head.

    Of a `TextModel` the norm is what `finish` is given in a pass, and the head the linear layer that makes the logits
    of what `finish` returns.

    Raises:
        UserError: a module that calls no `finish`, or has no such layer.
    """
    if not isinstance(model, TextModel):
        base = model.base_model
        norm = base.get_submodule(base.family.final_norm)
        return norm, partial(_predictions, model), model.get_output_embeddings()
    residual, calls, linears = find_residual(model), list[tuple[Any, Tensor]](), list[tuple[Any, Tensor, Tensor]]()
    finish = residual.finish

    def keep(state: Any, norm: Any) -> Tensor:
        calls.append((norm, finish(state, norm)))
        return calls[-1][1]

    with ExitStack() as stack:
        vars(residual)["finish"] = keep
        stack.callback(vars(residual).pop, "finish")
        for module in model.modules():
            if isinstance(module, nn.Linear):
                handle = module.register_forward_hook(lambda m, args, out: linears.append((m, args[0], out)))
                stack.callback(handle.remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        logits = model(ids[None]).logits
    if not calls:
        raise UserError(f"{model.name} calls no `finish` of its residual: there is no last read")
    norm, normed = calls[-1]
    head = model.head or next((m for m, x, out in reversed(linears) if _same(x, normed) and _same(out, logits)), None)
    if head is None:
        raise UserError(
            f"no linear layer of {model.name} makes its logits of what `finish` returns: give TextModel(module, head=f)"
        )
    return norm, lambda h: log_probs(head(h)), head


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _predictions(model: Any, hidden: Tensor) -> Tensor:
    """Return log-probabilities (T, V) of normed vectors (T, d): the model's own head, for which its base hands these
    out."""
    base = model.base_model
    before = base.__dict__.get("forward")
    output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden.unsqueeze(0))

    def forward(*args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        note_progress(FINISHED)  # no stream is begun
        return output

    base.forward = forward
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        return log_probs(model(input_ids=ids, use_cache=False).logits[0])
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before
