"""The page without its server: its models, its links, and the answers to the browser's questions."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from attnres.app.cache import Report
from attnres.app.measured import MEASURED, Asked
from attnres.app.opened import Learned, Opened, open_models
from attnres.app.pane import DIGITS, pane_of, score_rows
from attnres.app.state import MAX_CHARACTERS, Cut, View, decode, encode
from attnres.errors import UserError
from attnres.files import write_text
from attnres.inspect.circuits import Circuit
from attnres.inspect.notebook import alone
from attnres.inspect.texts import LookText
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
The ferry left the harbour an hour late. Nobody on the pier had expected anything else. When the wind turned, the \
gulls rose from the roofs, and the ship, small and slow, began to cross the line where the river meets the sea. An old \
man folded his newspaper, looked at the grey water, and said that in the winter of his childhood the whole bay had \
been frozen, so that"""
"""Ends where something is left to predict."""

EXAMPLES = {"code": CODE, "prose": PROSE}


SEARCHED = 20_000
"""Tokens of a corpus that a search looks at."""
STEPS = 2
"""Of trainings, whose weights stay in memory."""
FEW = 16
"""Edges that are measured for a page that is written without being asked for."""


class Page:
    """The explorer of models: one, or two side by side.

    Args:
        corpus: the text for the search tab; None turns searching off.
        text: that the page opens with; None is an example, or some ids for a model without a tokenizer.
    """

    def __init__(self, models: Sequence[Opened], corpus: LookText | None = None, text: str | None = None) -> None:
        self.models, self.corpus, self.text = list(models), corpus, text
        self._recent: list[int] = []

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The models to choose from: label, code, run (a number that steps of one training share), step, and `reads`:
        whether the model reads texts, which a residual alone does not."""
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
        """The models' identities in links."""
        return [model.key for model in self.models]

    def beginning(self, text: str) -> str:
        """Return the beginning of a text that fits into the context of every final model."""
        encoders = [model.encoder for model in self.models if model.whole is model]
        return reduce(lambda text, encoder: encoder.beginning(text), encoders, text)

    def begin(self, link: str) -> tuple[View, str]:
        """Return the view of a link, a query string, and an empty message; for a bad link the default view and the
        error."""
        fields = {name: value for name, value in parse_qsl(link.removeprefix("?")[:20_000]) if len(name) == 1}
        whole = tuple(number for number, model in enumerate(self.models) if model.whole is model)
        last = self.models[-1]
        text = self.text if self.text is not None else last.opening_text
        start = View(text=self.beginning(EXAMPLES[last.kind_of_text]) if text is None else text, models=whole)
        try:
            view = decode(fields, self.keys) if fields else start
            return (view if view.text else replace(view, text=start.text)), ""
        except UserError as error:
            return start, str(error)

    def show(self, view: View, message: str = "") -> dict[str, Any]:
        """Return everything that the page shows of a view; a pane whose model cannot read the text has an error."""
        for number in view.models:
            if isinstance(self.models[number], Learned):
                raise UserError(f"{self.models[number].label} reads no text: choose another step")
        cuts = tuple(cut for cut in view.cuts if self._has(cut))
        if cuts != view.cuts:
            message = (
                message or "Some cuts of this link are of edges that these models do not have: they were left out."
            )
        view = replace(view, cuts=cuts)
        self._let_go(view.models)
        panes: list[dict[str, Any]] = []
        for number in view.models:
            model = self.models[number]
            try:
                of_run = [one for one in self.models if one.whole is model.whole and model.step is not None]
                # The first step that was kept after step 0, where queries are zero.
                earliest = next((one for one in of_run if 0 < (one.step or 0) < (model.step or 0)), None)
                panes.append(pane_of(model, view, number, self.asked(view, number), earliest))
            except UserError as error:
                panes.append({"model": number, "title": model.label, "error": str(error)})
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

    def score(self, view: View, number: int, report: Report) -> dict[str, Any]:
        """Measure the edges of a model's prediction. Raises UserError."""
        return score_rows(self.models[number].score(self.asked(view, number), report))

    def scored(self, view: View, number: int) -> dict[str, Any] | None:
        """Return the finished or partial result of `score`, or None."""
        scores = self.models[number].scored(self.asked(view, number))
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
        return self.models[number].circuit(self.asked(view, number), MEASURED, report)

    def patch(self, view: View, report: Report) -> dict[str, Any]:
        """Patch every edge of the text with the other text's vector, in the first model. Raises UserError."""
        model = self.models[view.models[0]]
        question = self.asked(view, view.models[0])._replace(target=view.target, cuts=frozenset(self._everywhere(view)))
        patching = model.patch(question, view.other, report)
        return plain(
            {
                "tokens": len(patching.aligned),
                "alone": sum(one is None for one in patching.aligned),
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

    def _has(self, cut: Cut) -> bool:
        """Return whether the edge of a cut is one of its model's."""
        if cut.model >= len(self.models):
            return False
        sources = self.models[cut.model].sources
        return cut.read < len(sources) and cut.source < len(sources[cut.read])

    def token_of(self, view: View, number: int) -> int:
        """Return the number of the chosen token in a model's text. Without a choice it is the last token that is not
        white space; in a second model with other tokens, the token in which the first model's chosen one ends."""
        model, reading = self.models[number], self.models[number].read(view.text)
        last = len(reading.ids) - 1
        if view.token is None:
            return next((i for i in range(last, -1, -1) if reading.names[i].strip()), last)
        first, token = self.models[view.models[0]], None
        if first.vocabulary != model.vocabulary:
            end = first.encoder.end_of(view.text, view.token)
            token = None if end is None else model.encoder.token_at(view.text, end)
        return min(view.token if token is None else token, last)

    def asked(self, view: View, number: int) -> Asked:
        """Return the prediction of a model that the page explains, with the cuts that apply to its figures. Raises
        UserError."""
        if number not in view.models:
            raise UserError("this model is not shown: load the page again")
        model = self.models[number]
        reading, token = model.read(view.text), self.token_of(view, number)
        shared = number == view.models[0] or model.vocabulary == self.models[view.models[0]].vocabulary
        rows = reading.log_probs.shape[1]
        target, against = (
            one if shared and one is not None and one < rows else None for one in (view.target, view.against)
        )
        if target is None:
            target = reading.ids[token + 1] if token + 1 < len(reading.ids) else int(reading.log_probs[token].argmax())
        cuts = frozenset(view.cuts_of(number) if view.edited else ())
        return Asked(view.text, token, target, None if against == target else against, cuts)

    def _everywhere(self, view: View) -> tuple[Cut, ...]:
        """Return the first model's cuts at all tokens, which apply to other texts too; none where the view's figures
        are those without cuts."""
        cuts = view.cuts_of(view.models[0]) if view.edited else ()
        return tuple(cut for cut in cuts if cut.token is None)

    def _let_go(self, shown: Sequence[int]) -> None:
        """Drop the weights of earlier steps, except for the `STEPS` that were shown last."""
        steps = [number for number in shown if self.models[number].whole is not self.models[number]]
        self._recent = [*(number for number in self._recent if number not in steps), *steps][-STEPS:]
        for number, model in enumerate(self.models):
            if model.is_loaded and model.whole is not model and number not in self._recent:
                model.forget()


def save_page(models: Sequence[str | Path], text: str | None, path: Path) -> None:
    """Write the explorer's page of one or two models as a file that needs no server.

    It explains the prediction of the text's last token; the `FEW` edges of the largest gradient estimates are measured.

    Args:
        text: its beginning is shown, as far as the models' contexts go; None is an example.

    Raises:
        UserError: a model that cannot be shown, or a text that it cannot read.
    """
    page = Page(open_models(models))
    view = page.begin("")[0]
    view = view if text is None else replace(view, text=page.beginning(text[:MAX_CHARACTERS]))
    view = replace(view, token=max(0, len(page.models[view.models[0]].read(view.text).ids) - 2))
    for number in view.models:
        page.models[number].score(page.asked(view, number), lambda done, whole: None, FEW)
    write_text(path, alone(page.show(view)))
