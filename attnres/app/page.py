"""The page without its server: a view in, the numbers of everything that it shows out."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from torch import nn

from attnres.app.measured import MEASURED
from attnres.app.opened import Learned, Opened
from attnres.app.reading import Reading, Report
from attnres.app.state import MAX_CHARACTERS, Cut, View, decode, encode
from attnres.errors import UserError
from attnres.inspect.attribution import Attribution
from attnres.inspect.circuits import Circuit
from attnres.inspect.geometry import sharpness
from attnres.inspect.notebook import sheet
from attnres.inspect.steps import step_change
from attnres.inspect.texts import LookText
from attnres.residuals import Read, columns, depths, labels, outputs
from attnres.stats import plain
from attnres.text import visible

CODE = '''\
def mean_weight(rows, name):
    """Average weight of one source."""
    total, count = 0.0, 0
    for row in rows:
        if name not in row:
            continue
        total += row[name]
        count += 1
    return total / count if count else None


class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, step=1):
        self.value += step
        return self.value
'''

PROSE = """\
The ferry left the harbour an hour late. Nobody on the pier had expected anything else. An old man folded his \
newspaper, looked at the grey water, and said that in the winter of his childhood the whole bay had frozen, so that \
people walked to the island with lanterns. The children did not believe him. When the wind turned, the gulls rose \
from the roofs, and the ship, small and slow, began to cross the line where the river meets the sea.
"""

EXAMPLES = {"code": CODE, "prose": PROSE}


ATTENDED = 3
"""Tokens that are named of those which one attends to."""
SEARCHED = 20_000
"""Tokens of a corpus that a search looks at."""
STEPS = 2
"""Of trainings, whose weights stay in memory."""
DIGITS = 5
"""Significant, of the numbers that are sent."""


class Page:
    """The explorer of models: one, or two side by side.

    Args:
        corpus: what can be searched; None is nothing.
        text: that the page opens with; None is an example, or some ids for a model without a tokenizer.
    """

    def __init__(self, models: Sequence[Opened], corpus: LookText | None = None, text: str | None = None) -> None:
        self.models, self.corpus, self.text = list(models), corpus, text
        self._recent: list[int] = []

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The models to choose from: label, run (a number that steps of one training share), step, and whether
        they read texts, as a residual alone does not."""
        runs = {id(model.whole): number for number, model in enumerate(self.models)}
        return [
            {
                "label": model.label,
                "code": model.code,
                "run": runs[id(model.whole)],
                "step": model.step,
                "reads": not isinstance(model, Learned),
            }
            for model in self.models
        ]

    @cached_property
    def keys(self) -> list[str]:
        """What links call the models."""
        return [model.key for model in self.models]

    def example(self, name: str) -> str:
        """Return an example, as far as the shortest context of the finished models goes."""
        encoders = [model.encoder for model in self.models if model.whole is model]
        return reduce(lambda text, encoder: encoder.beginning(text), encoders, EXAMPLES[name])

    def begin(self, link: str) -> tuple[View, str]:
        """Return the view that the page opens with, and what is wrong with its link, a query string."""
        fields = {name: value for name, value in parse_qsl(link.removeprefix("?")[:20_000]) if len(name) == 1}
        whole = tuple(number for number, model in enumerate(self.models) if model.whole is model)
        text = self.text if self.text is not None else self.models[-1].opening_text
        start = View(text=self.example(self.models[-1].kind_of_text) if text is None else text, models=whole)
        try:
            view = decode(fields, self.keys) if fields else start
            return (view if view.text else replace(view, text=start.text)), ""
        except UserError as error:
            return start, str(error)

    def show(self, view: View, message: str = "") -> dict[str, Any]:
        """Return everything the page shows; what is wrong with the text stands in the place of a pane."""
        for number in view.models:
            if isinstance(self.models[number], Learned):
                raise UserError(f"{self.models[number].label} reads no text: choose another step")
        known = tuple(cut for cut in view.cuts if self._has(cut))
        if known != view.cuts:
            message = (
                message or "Some cuts of this link are of edges that these models do not have: they were left out."
            )
        view = replace(view, cuts=known)
        self._let_go(view.models)
        panes: list[dict[str, Any]] = []
        for number in view.models:
            try:
                panes.append(self.pane(view, number))
            except UserError as error:
                panes.append({"model": number, "title": self.models[number].label, "error": str(error)})
        if len({self.models[number].vocabulary for number in view.models}) > 1:
            message = message or (
                "These two models have different tokenizers: each shows its own tokens, and losses per token cannot be "
                "compared."
            )
        query = encode(view, self.keys)
        if not query and len(view.text) <= MAX_CHARACTERS:
            message = message or "The text is too long for a link to this view: save the page instead."
        shown = {"view": view.to_json(), "query": query, "message": message, "panes": panes}
        return plain(shown, DIGITS)

    def pane(self, view: View, number: int) -> dict[str, Any]:
        """Return what the page shows of one model. Raises UserError for a text that it cannot read."""
        model, text = self.models[number], view.text
        plain_reading, token, target, against, cuts = self._asked(view, number)
        cut_reading = model.read(text, cuts) if cuts else None
        used = cuts if view.edited else ()
        reading = cut_reading if cut_reading is not None and view.edited else plain_reading
        place = {source.name: i for i, source in enumerate(columns(read.sources for read in reading.layout))}
        marked = reading.underlined()
        follows = plain_reading.ids[token + 1] if token + 1 < len(plain_reading.ids) else None
        candidates = model.likeliest(plain_reading, cut_reading, token)
        wanted = [one for one in (follows, target, against) if one is not None and one not in candidates]
        candidates += dict.fromkeys(wanted)
        scores = model.scored(text, token, target, against, used)
        return {
            "model": number,
            "title": model.label,
            "details": model.details,
            "notes": reading.notes,
            "tokens": reading.pieces,
            "names": [visible(name) for name in reading.names],
            "token": token,
            "loss": plain_reading.loss,
            "loss_cut": None if cut_reading is None else cut_reading.loss,
            "losses": plain_reading.losses,
            "losses_cut": None if cut_reading is None else cut_reading.losses,
            **sheet(reading.layout),
            "contributions": [row[token] for row in reading.contributions],
            "weights": [row[token] for row in reading.weights],
            "marked": marked,
            "largest": [
                place[reading.layout[marked].sources[i].name] for i in np.abs(reading.contributions[marked]).argmax(1)
            ],
            "next": [self._candidate(model, one, plain_reading, cut_reading, token) for one in candidates],
            "target": target,
            "against": against,
            "follows": follows,
            "divergence": _divergence(plain_reading, cut_reading, token),
            "lens": self._lens(model, view, token, target, used),
            "attends": self._attends(model, reading, view, token, used),
            "scores": None if scores is None else score_rows(scores),
            "training": self._training(model) if view.tab == "training" else None,
            "outputs": self._outputs(model, reading, view, token, target, against, used),
            "over": self._over_tokens(model, reading, view, token, used),
        }

    def score(self, view: View, number: int, report: Report) -> dict[str, Any]:
        """Measure the edges of a model's prediction. Raises UserError."""
        of = self._scoring(view, number)
        return score_rows(self.models[number].score(*of, report))

    def scored(self, view: View, number: int) -> dict[str, Any] | None:
        """Return what `score` has so far."""
        scores = self.models[number].scored(*self._scoring(view, number))
        return None if scores is None else score_rows(scores)

    def circuit(self, view: View, report: Report) -> dict[str, Any]:
        """Return the attribution graph of the first model's prediction. Raises UserError."""
        graph = self._circuit(view, report)
        return plain(
            {
                "places": graph.places,
                "position": graph.position,
                "attends": graph.attends,
                "links": [[*one.source, *one.target, one.effect, one.measured is not None] for one in graph.links],
            },
            DIGITS,
        )

    def neuronpedia(self, view: View, threshold: float) -> dict[str, Any]:
        """Return the same graph, pruned, as Neuronpedia reads it. Raises UserError."""
        model = self.models[view.models[0]]
        slug = re.sub("[^a-z0-9]+", "-", model.name.lower()).strip("-") or "attnres"
        return self._circuit(view).neuronpedia(threshold, model=model.name, slug=slug)

    def _circuit(self, view: View, report: Report = lambda done, whole: None) -> Circuit:
        number = view.models[0]
        return self.models[number].circuit(*self._scoring(view, number), MEASURED, report)

    def patch(self, view: View, report: Report) -> dict[str, Any]:
        """Patch every edge of the text with the other text's vector, in the first model. Raises UserError."""
        model = self.models[view.models[0]]
        text, token, _, against, _ = self._scoring(view, view.models[0])
        patching = model.patch(text, view.other, token, view.target, against, self._everywhere(view), report)
        alone = sum(one is None for one in patching.aligned)
        return plain(
            {
                "tokens": len(patching.aligned),
                "alone": alone,
                "restored": patching.restored,
                "patched": patching.patched,
                "clean": patching.clean,
                "corrupted": patching.corrupted,
                "target": visible(model.piece(patching.target)),
                "against": None if patching.against is None else visible(model.piece(patching.against)),
            },
            DIGITS,
        )

    def search(self, view: View, least: bool, report: Report) -> dict[str, Any]:
        """Find the tokens of the corpus at which the edge that the view names is most, or least, of its read.

        Raises:
            UserError: no corpus, or no such edge.
        """
        if self.corpus is None:
            raise UserError("no corpus is open: start the app with --corpus")
        number = view.models[0]
        if not self._has(Cut(number, view.read, view.source)):
            raise UserError("there is no such edge: choose a layer's input and one of its sources")
        model = self.models[number]
        name = model.sources[view.read][view.source]
        cuts = self._everywhere(view)
        result = model.search(self.corpus.read(), view.read, name, view.by, least, SEARCHED, cuts, report)
        hits = [
            {
                "value": getattr(hit, view.by),
                "before": hit.before,
                "token": visible(hit.token),
                "after": hit.after,
                "document": hit.name,
                "text": hit.window,
                "at": model.encoder.token_at(hit.window, hit.at),
            }
            for hit in result.hits
        ]
        return plain(
            {
                "hits": hits,
                "cuts": len(cuts),
                "mean": result.mean,
                "tokens": result.tokens,
                "documents": result.documents,
            },
            DIGITS,
        )

    # ------------------------------------------------------------------ parts of a pane

    def _has(self, cut: Cut) -> bool:
        """Return whether the edge of a cut is one of its model's."""
        if cut.model >= len(self.models):
            return False
        sources = self.models[cut.model].sources
        return cut.read < len(sources) and cut.source < len(sources[cut.read])

    def token_of(self, view: View, number: int) -> int:
        """Return the number of the chosen token in a model's text: where the first model has other tokens, of the one
        in which its chosen one ends; without a choice the last that says something."""
        model, reading = self.models[number], self.models[number].read(view.text)
        last = len(reading.ids) - 1
        if view.token is None:
            return next((i for i in range(last, -1, -1) if reading.names[i].strip()), last)
        first, token = self.models[view.models[0]], None
        if first.vocabulary != model.vocabulary:
            end = first.encoder.end_of(view.text, view.token)
            token = None if end is None else model.encoder.token_at(view.text, end)
        return min(view.token if token is None else token, last)

    def _asked(self, view: View, number: int) -> tuple[Reading, int, int, int | None, tuple[Cut, ...]]:
        """Return a model's reading of the text without cuts, the chosen token, the ids of the token that is explained
        and of the one that it is compared with, and the model's cuts."""
        model = self.models[number]
        reading, token = model.read(view.text), self.token_of(view, number)
        shared = number == view.models[0] or model.vocabulary == self.models[view.models[0]].vocabulary
        rows = reading.log_probs.shape[1]
        target = view.target if shared and view.target is not None and view.target < rows else None
        against = view.against if shared and view.against is not None and view.against < rows else None
        if target is None:
            target = reading.ids[token + 1] if token + 1 < len(reading.ids) else int(reading.log_probs[token].argmax())
        against = None if against == target else against
        return reading, token, target, against, view.cuts_of(number)

    def _scoring(self, view: View, number: int) -> tuple[str, int, int, int | None, tuple[Cut, ...]]:
        """Return what scores are of. Raises UserError."""
        if number not in view.models:
            raise UserError("this model is not shown: load the page again")
        _, token, target, against, cuts = self._asked(view, number)
        return view.text, token, target, against, cuts if view.edited else ()

    def _everywhere(self, view: View) -> tuple[Cut, ...]:
        """Return the first model's cuts at all tokens, which hold in other texts too; none where figures are as it
        is."""
        cuts = view.cuts_of(view.models[0]) if view.edited else ()
        return tuple(cut for cut in cuts if cut.token is None)

    def _candidate(
        self, model: Opened, token_id: int, before: Reading, after: Reading | None, token: int
    ) -> dict[str, Any]:
        chances = [None if one is None else float(one.log_probs[token, token_id]) for one in (before, after)]
        return {"id": token_id, "word": visible(model.piece(token_id)), "before": chances[0], "after": chances[1]}

    def _lens(
        self, model: Opened, view: View, token: int, target: int, cuts: Sequence[Cut]
    ) -> list[dict[str, Any]] | None:
        """Return what each read says: the likeliest token, its p, the target's, and KL; None where no head is found."""
        try:
            lens = model.lens(view.text, token, target, cuts)
        except UserError:
            return None
        rows = zip(lens.top, lens.probability, lens.target, lens.divergence, strict=True)
        return [
            {"word": visible(model.piece(ids[0][0])), "p": p[0][0], "target": float(np.exp(goal[0])), "kl": kl[0]}
            for ids, p, goal, kl in rows
        ]

    def _attends(
        self, model: Opened, reading: Reading, view: View, token: int, cuts: Sequence[Cut]
    ) -> list[list[Any] | None] | None:
        """Return of each read of an attention the tokens that it attends to most, [number, weight]; None where the
        model shows no weights."""
        try:
            attention = model.attend(view.text, cuts)
        except UserError:
            return None
        rows = dict(zip(attention.layers, attention.mean[:, token, : token + 1], strict=True))

        def most(read: Read) -> list[Any] | None:
            if read.kind != "attention" or read.number not in rows:
                return None
            top = rows[read.number].topk(min(ATTENDED, token + 1))
            return [list(pair) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]

        return [most(read) for read in reading.layout]

    def _over_tokens(
        self, model: Opened, reading: Reading, view: View, token: int, cuts: Sequence[Cut]
    ) -> dict[str, Any] | None:
        """Return of the read that is looked at what each source is of it at each token, and of an attention's what each
        head attends to at the chosen token; None where none is looked at."""
        if view.layer is None or view.layer >= len(reading.layout):
            return None
        read, heads = reading.layout[view.layer], None
        values = reading.weights if view.by == "weight" else reading.contributions
        if read.kind == "attention":
            with contextlib.suppress(UserError):
                shown = model.heads(view.text, token, cuts)
                place = shown.layers.index(read.number) if read.number in shown.layers else None
                heads = None if place is None else shown.heads[place].numpy()
        return {"read": view.layer, "values": values[view.layer].T, "heads": heads}

    def _outputs(
        self,
        model: Opened,
        reading: Reading,
        view: View,
        token: int,
        target: int,
        against: int | None,
        cuts: Sequence[Cut],
    ) -> dict[str, Any] | None:
        """Return the mean contribution of every sublayer's output to every read, and what taking it out does to first
        order, which all mechanisms share; None of one model alone, or where reads are no such sums."""
        if reading.outputs is None or len(view.models) < 2:
            return None
        kinds = tuple(dict.fromkeys(read.kind for read in reading.layout[:-1]))
        written = outputs(max(depths(reading.layout)) + 1, kinds)
        words = labels([*reading.layout, Read("", None, written)])
        effects = model.circuit(view.text, token, target, against, cuts, 0).effects
        return {
            "reads": [words[read] for read in reading.layout],
            "columns": [words[source] for source in written],
            "values": reading.outputs,
            "effects": [row + [0.0] * (len(written) - len(row)) for row in effects],
        }

    def _training(self, model: Opened) -> dict[str, Any]:
        """Return how sharply a model's reads choose, how alike their queries are, and how far these turned since the
        first step of its run that was kept, but for the start, where queries are zero."""
        words = labels(model.layout)
        similar = model.similarity
        earliest = next(
            (
                one
                for one in self.models
                if one.whole is model.whole and model.step is not None and 0 < (one.step or 0) < model.step
            ),
            None,
        )
        change = None
        if earliest is not None:
            change = step_change(earliest.residual, model.residual, (earliest.step or 0, model.step or 0))
        return {
            "reads": [words[read] for read in model.layout],
            "sharpness": sharpness(model.residual),
            "first": None if change is None else change.first,
            "before": None if change is None else change.before,
            "turned": None if change is None else change.turned,
            "similar": None
            if similar is None
            else {"reads": [words[read] for read in similar[0]], "cosine": similar[1]},
        }

    def _let_go(self, shown: Sequence[int]) -> None:
        """Of the steps of trainings those that were shown last stay loaded."""
        steps = [number for number in shown if self.models[number].whole is not self.models[number]]
        self._recent = [*(number for number in self._recent if number not in steps), *steps][-STEPS:]
        for number, model in enumerate(self.models):
            if model.is_loaded and model.whole is not model and number not in self._recent:
                model.forget()


def score_rows(scores: Attribution) -> dict[str, Any]:
    """Return scores as the page has them: of reads with a choice, rows of first-order estimates and of measured
    changes, None where an edge was not measured."""
    with_choice = [len(row) > 1 for row in scores.gradient]
    knockout = [row if some else [None] * len(row) for row, some in zip(scores.knockout, with_choice, strict=True)]
    gradient = [row if some else [None] * len(row) for row, some in zip(scores.gradient, with_choice, strict=True)]
    edges = sum(len(row) for row, some in zip(scores.gradient, with_choice, strict=True) if some)
    return plain({"gradient": gradient, "measured": knockout, "edges": edges}, DIGITS)


def _divergence(before: Reading, after: Reading | None, token: int) -> float | None:
    """Return sum p ln(p/q) in nats at a token, p the distribution without cuts, q the one with them."""
    if after is None:
        return None
    p, q = before.log_probs[token].double(), after.log_probs[token].double()
    return float(nn.functional.kl_div(q, p, reduction="sum", log_target=True).clamp_min(0.0))
