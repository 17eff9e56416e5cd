"""How one prediction is made, token by token: an attribution graph whose nodes are sublayers at tokens.

A sublayer's input is a sum of earlier outputs, so what each adds to it is known exactly; which tokens an attention
takes from is known by its weights. Every link says how ln p of the prediction changes without it, to first order; the
largest links of depth are measured.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import attnres
from attnres.errors import UserError
from attnres.head import evaluating, log_probs
from attnres.inspect import notebook
from attnres.inspect.attention import attending_layers, weights_shown
from attnres.inspect.attribution import ALONG, Change, each_alone, margin, prediction_of
from attnres.inspect.edits import ActiveEdits, Edit, Steer
from attnres.inspect.recording import find_residual
from attnres.inspect.subject import Model, Speller, Text, TextModel, Token, as_model
from attnres.residuals import Read, Residual, depths, labels, outputs, watched_by


class Link(NamedTuple):
    """What goes from one node to another: in depth at one token, or by attention between tokens.

    A node is (token, place); place 0 is the token's embedding, l the l-th sublayer with its input, and the last the
    output.

    Attributes:
        effect: change of ln p without it, in nats: `measured` or, where that is None, `estimate`, of first order.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    estimate: float
    measured: float | None

    @property
    def effect(self) -> float:
        return self.estimate if self.measured is None else self.measured


@dataclass(frozen=True, repr=False)
class Circuit(notebook.Result):
    """The links of a prediction.

    Attributes:
        position, target, against: as of `Attribution`; before: ln p, less that of `against`. probability: the target's.
        tokens: ids up to `position`. places: names of the places of nodes: the embedding, the sublayers, the output.
        layout: the reads.
        links: the largest first, at most as many as were asked for.
        attends: whether links between tokens are known; they are of models of Transformers that show weights.
        effects: (reads, outputs) the estimates of depth, summed over tokens.

    The data frame has a row a link.
    """

    position: int
    target: int
    against: int | None
    before: float
    probability: float
    tokens: list[int]
    places: list[str]
    layout: Sequence[Read]
    links: list[Link]
    attends: bool
    effects: list[list[float]]
    words: Speller = field(default_factory=Speller, repr=False, compare=False)

    def pruned(self, threshold: float) -> list[Link]:
        """Return the links of an effect of at least `threshold` nats that lead to the output along such links."""
        return pruned(self.links, (self.position, len(self.places) - 1), threshold)

    def neuronpedia(self, threshold: float = 0.0, *, model: str = "attnres", slug: str = "attnres") -> dict[str, Any]:
        """Return the pruned graph in the JSON of Neuronpedia's and circuit-tracer's attribution graphs, version 1.0.0.

        A node's `feature` is its place, its `influence` the part of all effects that larger nodes and it make.

        Args:
            model: the name of the model (`scan`). slug: of the graph.
        """
        links = self.pruned(threshold)
        last = len(self.places) - 1
        root = (self.position, last)
        strength: dict[tuple[int, int], float] = defaultdict(float)
        for link in links:
            strength[link.source] += abs(link.effect)
        strength[root] = max([*strength.values(), 0.0])
        order = sorted(strength, key=lambda node: -strength[node])
        shares = np.cumsum([strength[node] for node in order]) / (sum(strength.values()) or 1.0)
        influence = dict(zip(order, shares.tolist(), strict=True))
        words = [self.words(token) for token in self.tokens]
        ids = {node: self._id(node, last) for node in sorted(strength)}
        return {
            "metadata": {
                "slug": slug,
                "scan": model,
                "prompt_tokens": words,
                "prompt": "".join(words),
                "info": {
                    "description": "Links are changes of ln p in nats without what an earlier output adds to an input, "
                    "or without what an attention takes from a token.",
                    "generator": {"name": "attnres", "version": attnres.__version__},
                },
                "pruning_settings": {"threshold_nats": threshold},
            },
            "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
            "nodes": [self._node(node, ids[node], influence[node], last) for node in ids],
            "links": [
                {"source": ids[link.source], "target": ids[link.target], "weight": link.effect} for link in links
            ],
        }

    def _id(self, node: tuple[int, int], last: int) -> str:
        token, place = node
        if place == 0:
            return f"E_{self.tokens[token]}_{token}"
        return f"{self._layer(place, last)}_{self.target if place == last else place}_{token}"

    def _layer(self, place: int, last: int) -> str:
        """Return the layer of a place: "E" of the embedding, one more than the last of the output."""
        kinds = len({read.kind for read in self.layout[:-1]}) or 1
        return "E" if place == 0 else str((place - 1) // kinds + (place == last and (place - 1) % kinds > 0))

    def _node(self, node: tuple[int, int], name: str, influence: float, last: int) -> dict[str, Any]:
        token, place = node
        values: dict[str, Any] = {
            "node_id": name,
            "feature": self.target if place == last else self.tokens[token] if place == 0 else place,
            "layer": self._layer(place, last),
            "ctx_idx": token,
            "feature_type": "embedding" if place == 0 else "logit" if place == last else self.places[place].split()[-1],
            "jsNodeId": name,
            "clerp": self.words(self.tokens[token]) if place == 0 else self.places[place],
            "influence": influence,
            "activation": None,
        }
        if place == last:
            label = f'Output "{self.words(self.target)}" (p={self.probability:.3f})'
            values |= {"clerp": label, "token_prob": self.probability, "is_target_logit": True}
        return values

    def _about(self) -> str:
        return f"“{self.words(self.target)}” after token {self.position}: {len(self.links)} links"

    def _records(self) -> Iterator[dict[str, Any]]:
        for link in self.links:
            (token, place), (into, at) = link.source, link.target
            yield {
                "from_token": token,
                "from": self.places[place],
                "to_token": into,
                "to": self.places[at],
                "effect": link.effect,
                "measured": link.measured is not None,
            }


def pruned(links: Sequence[Link], output: tuple[int, int], threshold: float) -> list[Link]:
    """Return the links of an effect of at least `threshold` that lead to the node `output` along such links, in the
    order in which they were given."""
    into: dict[tuple[int, int], list[Link]] = defaultdict(list)
    for link in links:
        if abs(link.effect) >= threshold:
            into[link.target].append(link)
    reached, open_nodes = {output}, [output]
    while open_nodes:
        for link in into[open_nodes.pop()]:
            if link.source not in reached:
                reached.add(link.source)
                open_nodes.append(link.source)
    return [link for link in links if abs(link.effect) >= threshold and link.target in reached]


class Parts(ActiveEdits):
    """Applies edits, and adds a zero vector to every read, whose gradient is that of the read.

    Attributes:
        h: (T, d) of each read. rows: (T, L+1), the depth mixing matrix. zeros: what was added.
    """

    def __init__(self, residual: Residual, edits: Sequence[Edit]) -> None:
        super().__init__(residual, edits)
        self.h: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.zeros: list[Tensor] = []

    def edits(self, read: int) -> bool:
        return True

    def edit(self, read: int, weights: Tensor) -> Tensor:
        weights = super().edit(read, weights)
        row = self.residual.mixing_row(read, weights.detach().float().reshape(-1, weights.shape[-1]), self.rows)
        if row is None:
            raise UserError(
                f"residual '{self.residual.name}' makes reads that are no sums of single outputs: there are no parts"
            )
        self.rows.append(row)
        return weights

    def steer(self, read: int, h: Tensor) -> Tensor:
        h = super().steer(read, h)
        zeros = torch.zeros_like(h, requires_grad=True)
        self.h.append(h.detach().flatten(0, -2))
        self.zeros.append(zeros)
        return h + zeros

    def part(self, index: int, output: int) -> Tensor:
        """Return (T, d), the part of a read that comes from one output."""
        vector = self.outputs[output].detach().flatten(0, -2)
        return self.rows[index][:, output, None].to(vector) * vector

    def estimates(self, index: int, grad: Tensor) -> Tensor:
        """Return (T, outputs): to first order, the change of a value with gradient `grad` (T, d) when the part that an
        output adds to a read is removed.

        A norm after the read hides its length: where the gradient has no part along it, the read without the part is
        brought to its length first, as in `attribute`.
        """
        h, grad = self.h[index].float(), grad.flatten(0, -2).float()
        written = depths(self.layout)[index] + 1
        vectors = torch.stack([one.detach().flatten(0, -2).float() for one in self.outputs[:written]])
        rows = self.rows[index][:, :written].expand(len(h), -1)
        change = -rows * torch.einsum("td,ntd->tn", grad, vectors)
        along = (grad * h).sum(-1)
        if along.abs().sum() > ALONG * (grad.norm(dim=-1) * h.norm(dim=-1)).sum():
            return change
        square = h.square().sum(-1, keepdim=True)
        rest = square - 2 * rows * torch.einsum("td,ntd->tn", h, vectors) + rows.square() * vectors.square().sum(-1).T
        alone = rest <= 1e-5 * square  # the part is all of the read: there is no direction left
        scale = torch.where(alone, 1.0, (square / rest.clamp_min(1e-30)).sqrt())
        return scale * change + (scale - 1) * along[:, None]


def circuit(
    model: Model,
    input_ids: Text,
    *,
    position: int = -1,
    target: Token | None = None,
    against: Token | None = None,
    edits: Sequence[Edit] = (),
    most: int = 200,
    limit: int = 4000,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> Circuit:
    """Return the attribution graph of ln p(target | tokens 0 .. position): nodes are sublayers, with their inputs, at
    tokens.

    Of input h_l,t and what output i adds to it, p = M_l,i,t o_i,t (blocks taken apart, M the depth mixing matrix), the
    link of depth is the change of ln p when p is taken out of h, to first order

        < dL/dh_l,t , s (h_l,t - p) - h_l,t >,    L = ln p(target),    s as in `attribute`,

    and measured, one at a time, for the `most` largest. The link from token u to token t of an attention is the
    first-order change when t does not attend to u and its other weights are renormalised, summed over heads.

    Args:
        position, target, against, edits: as of `attribute`.
        most: links of depth that are measured. limit: links that are returned, the largest.
        batch_size: copies in one forward pass. progress: called with the number of links after each pass.

    Raises:
        UserError: as `attribute`; a residual whose reads are no sums of single outputs.
    """
    model = as_model(model)
    ids, position, target_id, rival = prediction_of(model, input_ids, position, target, against)
    residual = find_residual(model)
    if residual.editor is not None:
        raise UserError("this model is being edited: leave the `intervene` block, and give circuit the edits")
    parts = Parts(residual, edits)
    with evaluating(model):
        known, row, grads, between = _backward(model, parts, ids, target_id, rival)
        layout = parts.layout
        written = depths(layout)
        value = margin(row, known, rival).item()
        estimates = [parts.estimates(index, grad) for index, grad in enumerate(grads)]
        largest = _largest(dict(enumerate(estimates)), limit)
        measured: dict[int, float] = {}
        changes = []
        for index, token, output, _ in largest[:most]:
            here = torch.arange(ids.shape[1]) == token
            vector = -parts.part(index, output)[token]
            changes.append(Change(index, here, partial(Steer, vector, None, index)))
        for numbers, values in each_alone(model, ids, edits, changes, (known, rival), batch_size, progress):
            measured |= {i: one - value for i, one in zip(numbers, values, strict=True)}
    links = [
        Link((token, output), (token, written[index] + 1), estimate, measured.get(i))
        for i, (index, token, output, estimate) in enumerate(largest)
    ]
    links += [
        Link((u, written[index] + 1), (t, written[index] + 1), estimate, None)
        for index, t, u, estimate in _largest({i: one.tril(-1) for i, one in between.items()}, limit)
    ]
    links = sorted(links, key=lambda link: -abs(link.effect))[:limit]
    single = outputs(residual.num_sublayers + 1, residual.sublayers)
    names = labels([*layout, Read("", None, single)])
    places = [*(names[one] for one in single), "output"]
    return Circuit(
        position,
        known,
        rival,
        value,
        row[known].exp().item(),
        ids[0].tolist(),
        places,
        layout,
        links,
        bool(between),
        [one.sum(0).tolist() for one in estimates],
        Speller(model),
    )


def _largest(tables: dict[int, Tensor], count: int) -> list[tuple[int, int, int, float]]:
    """Return (key, row, column, value) of the numbers of largest size in tables, the largest first; zeros are left
    out."""
    if not tables:
        return []
    flat = torch.cat([one.flatten() for one in tables.values()])
    keys = torch.cat([torch.full((one.numel(),), key) for key, one in tables.items()])
    cells = torch.cat([torch.cartesian_prod(*map(torch.arange, one.shape)).view(-1, 2) for one in tables.values()])
    best = flat.abs().topk(min(count, len(flat))).indices.cpu()
    rows = zip(keys[best].tolist(), cells[best].tolist(), flat.cpu()[best].tolist(), strict=True)
    return [(key, row, column, value) for key, (row, column), value in rows if value]


def _backward(
    model: Any, parts: Parts, ids: Tensor, target: int | None, against: int | None
) -> tuple[int, Tensor, Sequence[Tensor], dict[int, Tensor]]:
    """Return the target, (V,) log-probabilities, the gradients of the reads, and by the numbers of attentions' reads
    (T, T) what happens if a token (row) does not attend to another."""
    residual = parts.residual
    with ExitStack() as stack:
        stack.enter_context(watched_by(residual, editor=parts))
        stack.enter_context(torch.enable_grad())
        options = {}
        if not isinstance(model, TextModel):
            stack.enter_context(weights_shown(model))
            options["output_attentions"] = True
        out = model(input_ids=ids, use_cache=False, **options)
        attentions = [one for one in getattr(out, "attentions", None) or () if one is not None and one.requires_grad]
        row = log_probs(out.logits[0, -1])
        known = int(row.argmax()) if target is None else target
        inputs = [*parts.zeros, *attentions]
        value = margin(row, known, against)
        grads = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
    between = {}
    if attentions:
        first = {read.number: i for i, read in reversed(list(enumerate(parts.layout))) if read.kind == "attention"}
        for layer, weights, grad in zip(
            attending_layers(model.config, len(attentions)), attentions, grads[len(parts.zeros) :], strict=True
        ):
            between[first[layer]] = _without(weights.detach()[0].float(), grad[0].float())
    return known, row.detach(), grads[: len(parts.zeros)], between


def _without(weights: Tensor, grad: Tensor) -> Tensor:
    """Return (T, T): sum over heads of <G_t, a'_t - a_t>, a' the weights (H, T, T) without one token, renormalised."""
    total = (weights * grad).sum(-1, keepdim=True)
    rest = 1 - weights
    one = torch.where(rest > 1e-6, (total - weights * grad) / rest.clamp_min(1e-6), 0.0) - total
    return one.sum(0)
