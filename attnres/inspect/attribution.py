"""Which (read, source) edges a prediction depends on: by taking each away, and by gradient."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.head import evaluating
from attnres.inspect import notebook
from attnres.inspect.edits import Ablate, ActiveEdits, Edit, intervene, position_of
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import Model, Text, Token, as_model, last_log_probs, prompt_ids, token_id
from attnres.models.replay import Replay
from attnres.ops import compute_dtype
from attnres.residuals import Read, Residual, Source, watched_by

ALONG = 0.02
"""Part of a gradient along a read above which what follows sees the read's length; a norm leaves rounding and eps."""
TOP = 10
"""Edges whose overlap between both methods is reported."""


@dataclass(frozen=True)
class Edge:
    """One source of one read, and what its removal does to ln p of the prediction: measured, and to first order."""

    read: str
    source: str
    knockout: float
    gradient: float


@dataclass(frozen=True)
class Agreement:
    """How far the two methods agree, over edges of reads with a choice (more than one source).

    Attributes:
        edges: how many.
        spearman: rank correlation of the changes; None where one method gives a constant.
        overlap: share of the `top` edges largest in absolute value that are among both methods' (of all edges, where
            there are fewer).
    """

    edges: int
    spearman: float | None
    overlap: float
    top: int


@dataclass(frozen=True, repr=False)
class Attribution(notebook.Named, notebook.Result):
    """Changes of ln p(target) when edges are removed, in nats: negative where the prediction relied on the edge.

    Attributes:
        position, target: p is that of token `target` after tokens 0 .. position. log_probability: ln p, with no edge
            removed.
        against: with it all changes are those of ln p(target) - ln p(against). before: what the changes are of, with
            no edge removed.
        everywhere: edges were removed at all tokens, else at `position` alone.
        layout: the reads and their sources; reads, sources: their names.
        knockout: measured changes, rows parallel to `sources`; NaN of those that were not measured.
        gradient: the same to first order.
        agreement: of the two.

    The data frame has a row an edge: read, source, knockout, gradient.
    """

    position: int
    target: int
    log_probability: float
    everywhere: bool
    layout: Sequence[Read]
    knockout: list[list[float]]
    gradient: list[list[float]]
    agreement: Agreement
    against: int | None = None
    before: float = math.nan

    def top(self, k: int = TOP, *, by: str = "knockout") -> list[Edge]:
        """Return the k edges with the largest changes, `by` "knockout" or "gradient". Reads with one source are left
        out: without it they have no input at all."""
        if by not in ("knockout", "gradient"):
            raise UserError(f"by is '{by}': expected 'knockout' or 'gradient'")
        edges = [
            Edge(read, *edge)
            for read, *rows in zip(self.reads, self.sources, self.knockout, self.gradient)
            if len(rows[0]) > 1
            for edge in zip(*rows)
            if not math.isnan(edge[1])
        ]
        return sorted(edges, key=lambda edge: -abs(getattr(edge, by)))[:k]

    def _about(self) -> str:
        return f"token {self.target} after position {self.position}: {sum(map(len, self.knockout))} edges"

    def _records(self) -> Iterator[dict[str, Any]]:
        return notebook.edges(self.reads, self.sources, knockout=self.knockout, gradient=self.gradient)

    def _repr_html_(self) -> str:
        return notebook.heat(f"{self!r}: change of ln p without it, nats", self.layout, self.knockout)


def attribute(
    model: Model,
    input_ids: Text,
    *,
    position: int = -1,
    target: Token | None = None,
    against: Token | None = None,
    edits: Sequence[Edit] = (),
    everywhere: bool = True,
    most: int | None = None,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    so_far: Callable[[Attribution], None] | None = None,
) -> Attribution:
    """Measure how ln p(target | tokens 0 .. position) changes when source i is removed from read l, for every edge (l,
    i).

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> attribute(model, range(9), most=8).top(1)
    [Edge(read='output', source='embedding', knockout=-0.2..., gradient=-0.1...)]

    Removing is `Ablate`: the other weights of a softmax are renormalised. *Knock-out* runs copies of the text, each
    with its own edge removed, from the layer on that makes the read (`Replay`). *Gradient* is the first-order estimate
    of the same,

        d(l, i) = sum_t < dL/dh_l,t , s_t h'_l,t - h_l,t > = sum_t sum_j (s_t p'_j - p_j) dL/dp_l,j,t,
        L = ln p(target),    s_t = rms(h_l,t) / rms(h'_l,t)

    for all edges from one backward pass, h' and p' the edited read and weights. A norm after the read hides its length,
    so h' is first brought to the length of h; s_t is one where the gradient has a part along h, as without such a norm
    (the boundary layout, gates). The estimate cannot see what saturates, nor the removal of a read's only source, and
    says little of a source that has nearly all the weight: without it the read is another vector altogether.

    Args:
        input_ids: the text, in letters or as ids; tokens after `position` play no part.
        target: a token, its letters or its id. None is the token that follows `position` in the text; after the last
            one, the model's likeliest.
        against: measure ln p(target) - ln p(against), the difference of logits, instead of ln p(target).
        edits: made all the time, edges are removed besides them; their tokens, if any, are at most `position`.
        everywhere: remove edges at all tokens 0 .. position; else at `position` alone.
        most: measure only so many edges, those of the largest gradient estimates; None is all.
        batch_size: copies in one forward pass.
        progress: called with the number of edges after each pass.
        so_far: called with what there is, first with the gradients alone, then after each pass, the reads nearest to
            the output first.

    Raises:
        UserError: as `effect`; a position or a target that is not there; a residual that mixes by no weights.
    """
    model = as_model(model)
    ids, position, target_id, rival = prediction_of(model, input_ids, position, target, against)
    residual = find_residual(model)
    with evaluating(model):
        probe, known, row = _backward(model, residual, ids, target_id, rival, edits)
        edges = [(index, source) for index, names in enumerate(probe.sources) for source in names]
        gradient = [value for index in range(len(probe.sources)) for value in probe.estimates(index, everywhere)]
        knockout = [math.nan] * len(edges)
        choice = [len(probe.sources[index]) > 1 for index, _ in edges]
        before = margin(row, known, rival).item()

        def result() -> Attribution:
            is_measured = np.array(choice) & ~np.isnan(knockout)
            return Attribution(
                position=position,
                target=known,
                log_probability=row[known].item(),
                everywhere=everywhere,
                layout=probe.layout,
                knockout=as_rows(knockout, probe.sources),
                gradient=as_rows(gradient, probe.sources),
                agreement=agreement(np.array(knockout)[is_measured], np.array(gradient)[is_measured]),
                against=rival,
                before=before,
            )

        if so_far is not None:
            so_far(result())
        order = sorted(range(len(edges)), key=lambda i: (-choice[i], -abs(gradient[i])))[:most]
        anywhere = torch.zeros(ids.shape[1], dtype=torch.bool)
        anywhere[0 if everywhere else -1 :] = True
        changes = [Change(edges[i][0], anywhere, partial(Ablate, edges[i][1], edges[i][0])) for i in order]
        for part, values in each_alone(model, ids, edits, changes, (known, rival), batch_size, progress):
            for i, value in zip(part, values, strict=True):
                knockout[order[i]] = value - before
            if so_far is not None:
                so_far(result())
        return result()


def prediction_of(
    model: Any, text: Text, position: int, target: Token | None, against: Token | None
) -> tuple[Tensor, int, int | None, int | None]:
    """Return a text's ids (1, position + 1), the position, the target's id and that of the token it is compared with.
    The target is by default the token after the position, None at the end of the text. Raises UserError."""
    ids = prompt_ids(model, text)
    position = position_of(position, ids.shape[1])
    if target is not None:
        target_id: int | None = token_id(model, target)
    else:
        target_id = int(ids[0, position + 1]) if position + 1 < ids.shape[1] else None
    return ids[:, : position + 1], position, target_id, None if against is None else token_id(model, against)


class Change(NamedTuple):
    """An edit of one read: the read's number, the tokens (T,) bool at which it is made, and a function that makes the
    edit of a mask of tokens; None changes nothing."""

    read: int
    tokens: Tensor
    make: Callable[..., Edit] | None


def each_alone(
    model: Any,
    ids: Tensor,
    edits: Sequence[Edit],
    changes: Sequence[Change],
    asked: tuple[int, int | None],
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[list[int], list[float]]]:
    """Make each change in a copy of its own of a text (1, T), besides `edits`; yield pass by pass, of the last reads
    first, the numbers of the changes and the `margin` of the tokens that are `asked` for after the text.

    A pass begins at the first layer that is changed (`Replay`). Raises UserError.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: expected at least 1")

    def passed(copies: Tensor, *more: Edit) -> Tensor:
        with torch.no_grad(), intervene(model, *edits, *more):
            return last_log_probs(model, copies)

    order = sorted(range(len(changes)), key=lambda i: -changes[i].read)
    replay = Replay(model, find_residual(model), lambda: passed(ids))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        shape = (len(part), ids.shape[1])
        of_copies = []
        for row, change in enumerate(changes[i] for i in part):
            mask = torch.zeros(shape, dtype=torch.bool)
            mask[row] = change.tokens
            if change.make is not None:
                of_copies.append(change.make(tokens=mask))
        with replay.begun(changes[part[-1]].read, len(part)):
            after = passed(ids.expand(shape), *of_copies)
        if progress is not None:
            progress(len(part))
        yield part, margin(after, *asked).tolist()


def margin(log_probs: Tensor, target: int, against: int | None) -> Tensor:
    """Return ln p(target), less ln p(against) where that is given, of (..., V)."""
    return log_probs[..., target] - (0.0 if against is None else log_probs[..., against])


def agreement(first: np.ndarray, second: np.ndarray, top: int = TOP) -> Agreement:
    """Return how far two lists of changes of the same edges agree."""
    k = min(top, len(first))
    best = [set(np.argsort(-np.abs(values), kind="stable")[:k].tolist()) for values in (first, second)]
    return Agreement(len(first), spearman(first, second), len(best[0] & best[1]) / k if k else 0.0, k)


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, ties sharing their mean rank; None for a constant."""
    if len(first) < 2:
        return None
    a, b = _ranks(first), _ranks(second)
    if not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[place]


def as_rows(values: Sequence[float], sources: Sequence[Sequence[Any]]) -> list[list[float]]:
    """Return numbers of edges as a row a read, of its sources."""
    rest = iter(values)
    return [[next(rest) for _ in names] for names in sources]


class _Probe(ActiveEdits):
    """Applies edits, and adds a zero to every weight, whose gradient is that of the weight: dL/dp_i = <dL/dh, v_i>. As
    an observer it stores the inner products of each read's sources, from which the lengths of edited reads follow."""

    def __init__(self, residual: Residual, edits: Sequence[Edit]) -> None:
        super().__init__(residual, edits)
        self.weights: list[Tensor] = []
        self.zeros: list[Tensor] = []
        self.products: list[Tensor] = []
        self.grads: Sequence[Tensor] = ()

    def edits(self, read: int) -> bool:
        return True

    def edit(self, read: int, weights: Tensor) -> Tensor:
        weights = super().edit(read, weights)
        zeros = torch.zeros_like(weights, requires_grad=True)
        self.weights.append(weights.detach().clone())
        self.zeros.append(zeros)
        return weights + zeros

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        dtype = compute_dtype(h.dtype)
        stacked = torch.stack([value.detach().to(dtype).flatten(0, -2) for value in values or self.outputs], 1)
        self.products.append(stacked @ stacked.mT)

    def lengthless(self, index: int) -> bool:
        """Return whether the gradient has no part along the read: what follows does not see its length."""
        weights, grad, products = self.weights[index], self.grads[index], self.products[index]
        lengths = products.diagonal(dim1=1, dim2=2).sqrt()
        steepest = (grad.abs() / lengths.clamp_min(1e-30)).amax(-1)  # at most |dL/dh|
        along = (grad * weights).sum(-1).abs()
        return bool(along.sum() <= ALONG * (steepest * _lengths(weights, products)).sum())

    def estimates(self, index: int, everywhere: bool) -> list[float]:
        """Return d(l, i) of a read's edges, from one text's weights and their gradients (T, n)."""
        weights, grad, names = self.weights[index], self.grads[index], self.sources[index]
        sums_to_one = self.residual.traits.sums_to_one
        edited = torch.stack([Ablate(name).reweigh(weights, names, sums_to_one) for name in names])
        if self.lengthless(index):
            products = self.products[index]
            lengths = _lengths(weights, products), _lengths(edited, products)
            edited = edited * (lengths[0] / lengths[1].clamp_min(1e-30))[..., None]
        change = ((edited - weights) * grad).sum(-1, dtype=torch.float64)
        return (change.sum(-1) if everywhere else change[:, -1]).tolist()


def _lengths(weights: Tensor, products: Tensor) -> Tensor:
    """Return (..., T) |sum_i p_i v_i| from weights (..., T, n) and inner products (T, n, n)."""
    return torch.einsum("...ti,tij,...tj->...t", weights, products.to(weights), weights).clamp_min(0).sqrt()


def _backward(
    model: nn.Module,
    residual: Residual,
    ids: Tensor,
    target: int | None,
    against: int | None,
    edits: Sequence[Edit],
) -> tuple[_Probe, int, Tensor]:
    """Return the gradients of ln p(target), less ln p(against), the target, and (V,) log-probabilities."""
    if residual.editor is not None:
        raise UserError("this model is being edited: leave the `intervene` block, and give attribute the edits")
    probe = _Probe(residual, edits)
    with watched_by(residual, observer=probe, editor=probe), torch.enable_grad():
        row = last_log_probs(model, ids)[0]
        if target is None:
            target = int(row.argmax())
        value = margin(row, target, against)
        probe.grads = torch.autograd.grad(value, probe.zeros, allow_unused=True, materialize_grads=True)
    return probe, target, row.detach()


def by_size(layout: Sequence[Read], rows: Sequence[Sequence[float]]) -> list[tuple[Read, Source, float]]:
    """Return (read, source, value) of reads with a choice, the largest in absolute value first."""
    pairs = [(read, row) for read, row in zip(layout, rows, strict=True) if len(read.sources) > 1]
    edges = [(read, *edge) for read, row in pairs for edge in zip(read.sources, row, strict=True)]
    return sorted(edges, key=lambda edge: -abs(edge[2]))
