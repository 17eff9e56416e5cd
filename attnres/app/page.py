"""The page without its server: a view in, everything it shows out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import parse_qsl

from attnres.app import differences, draw
from attnres.app.actions import Actions
from attnres.app.explorer import Opened
from attnres.app.halves import Halves
from attnres.app.markup import sentence
from attnres.app.pane import Pane, Scales, export
from attnres.app.state import (
    ATTENDED,
    LARGEST,
    LOSS,
    MAX_CHARACTERS,
    View,
    decode,
    encode,
)
from attnres.app.steps import Learned
from attnres.app.works import Report
from attnres.errors import UserError
from attnres.inspect.corpus import Search
from attnres.inspect.steps import step_change
from attnres.inspect.texts import LookText

SEARCHED = 20_000
"""Tokens of a corpus that a search looks at."""
STEPS = 2
"""Of trainings, whose weights stay in memory."""


@dataclass(frozen=True)
class Shown:
    """What the page shows of a view.

    Attributes:
        view: the view, with what its models do not have left out.
        panes: HTML of each. difference: HTML between two. message: a sentence above them, or nothing.
        live: one for those who do not see the page.
        reads, sources: (words, value) to choose what colours the tokens from.
        query: of the link that brings this view back; empty where the text is too long for one.
    """

    view: View
    panes: list[str]
    difference: str
    message: str
    live: str
    reads: list[tuple[str, int]]
    sources: list[tuple[str, str]]
    query: str


class Page:
    """The explorer of models: one, or two side by side.

    Args:
        corpus: what can be searched; None is nothing.
    """

    def __init__(self, models: Sequence[Opened], corpus: LookText | None = None) -> None:
        self.halves = Halves(models)
        self.models, self.actions, self.corpus = self.halves.models, Actions(self.halves), corpus
        self._queries, self._recent = dict[int, str](), list[int]()

    @property
    def choices(self) -> list[tuple[str, int]]:
        """(words, number) of the models to choose from."""
        return [(model.label, number) for number, model in enumerate(self.models)]

    @cached_property
    def keys(self) -> list[str]:
        """What links call the models."""
        return [model.key for model in self.models]

    def begin(self, link: str) -> tuple[View, str]:
        """The view that the page opens with, and what is wrong with its link, a query string."""
        fields = {name: value for name, value in parse_qsl(link.removeprefix("?")[:20_000]) if len(name) == 1}
        last = len(self.models) - 1  # of each run its last checkpoint, the finished model, is shown
        whole = [i for i in range(last) if self.models[i + 1].whole is not self.models[i].whole] + [last]
        start = View(text=self.halves.example("code", whole), models=tuple(whole))
        if not fields:
            return replace(start, read=self.models[whole[0]].most_varied(start.text)), ""
        try:
            view = decode(fields, self.keys)
            return (view if view.text else replace(view, text=start.text)), ""
        except UserError as error:
            return start, str(error)

    def show(self, view: View, message: str = "") -> Shown:
        """Everything the page shows; what is wrong with the text is said in its place."""
        known = tuple(cut for cut in view.cuts if self.halves.has(cut))
        if known != view.cuts:
            message = message or "Some knocked-out edges of this link do not exist in these models: they were left out."
        first = self.models[view.models[0]]
        read = view.read if view.read is not None and view.read < len(first.reads) - 1 else None
        view = replace(view, cuts=known, read=read)
        self._let_go(view.models)
        row = first.sources[-1 if read is None else read]
        if view.source not in (LARGEST, LOSS, ATTENDED, *row):
            view = replace(view, source=LARGEST)
        panes: list[Pane | str] = []
        for place in range(self.halves.count(view)):
            try:
                panes.append(self.pane(view, place))
            except UserError as error:
                number = self.halves.of(view, place)[0]
                model = self.models[number]
                if isinstance(model, Learned) and view.text.strip():
                    panes.append(differences.learned(number, place, model, self.queries(number), f"{error}"))
                else:
                    panes.append(sentence(f"{error}"))
        drawn = [one for one in panes if isinstance(one, Pane)]
        scales = Scales.of(drawn)
        pages = [draw.pane(one, scales) if isinstance(one, Pane) else one for one in panes]
        pages = list(dict.fromkeys(pages))  # one sentence for both
        if len({self.models[number].vocabulary for number in view.models}) > 1:
            message = message or (
                "These two models have different tokenizers: each shows its own tokens, and losses per token cannot be "
                "compared."
            )
        reads = [(name, -1 if name == "output" else number) for number, name in enumerate(first.reads)][::-1]
        sources = [
            ("its largest source", LARGEST),
            *((name, name) for name in row),
            ("change in loss", LOSS),
            ("attention of the chosen token", ATTENDED),
        ]
        query = encode(view, self.keys)
        if not query and len(view.text) <= MAX_CHARACTERS:
            message = message or "The text is too long for a link to this view: export it as JSON instead."
        difference = differences.difference(*drawn) if len(drawn) == 2 else ""
        difference += self._learned_between(view)
        return Shown(view, pages, difference, message, draw.live(drawn), reads, sources, query)

    def _learned_between(self, view: View) -> str:
        """HTML of what the residual learned between two steps of one run; nothing where no such are shown."""
        shown = [self.models[number] for number in view.models]
        if len(shown) < 2 or shown[0].whole is not shown[1].whole:
            return ""
        steps = [model.step for model in shown]
        if steps[0] is None or steps[1] is None or steps[0] == steps[1]:
            return ""
        first, last = sorted(shown, key=lambda model: model.step or 0)
        try:
            change = step_change(first.residual, last.residual, (first.step or 0, last.step or 0))
        except UserError as error:
            return sentence(f"{error}")
        return differences.learned_between(change, first.name)

    def pane(self, view: View, place: int) -> Pane:
        """One half of the page. Raises UserError for a text that its model cannot read."""
        number, text = self.halves.of(view, place)
        model = self.models[number]
        reading, token = model.read(text), self.halves.token_of(view, place)
        cuts = view.cuts_of(number)
        effect = model.knock_out(text, cuts) if cuts else None
        try:
            attention = model.attend(text)
        except UserError:
            attention = None  # not every model has weights over tokens
        scores = model.scored(text, token)
        return Pane(
            number=number,
            place=place,
            title=model.label,
            details=model.details,
            reading=reading,
            by=view.by,
            read=self.halves.read_of(view, number),
            source=view.source,
            token=token,
            cuts=cuts,
            effect=effect,
            candidates=model.top(reading, effect, token),
            similarity=model.similarity,
            queries=self.queries(number),
            attention=attention,
            scores=scores,
            target="" if scores is None else model.piece(scores.target),
            graph="" if scores is None else model.graph(text, token, scores),
        )

    def queries(self, number: int) -> str:
        """HTML of how alike a model's queries are, drawn once: no text changes it."""
        if number not in self._queries:
            self._queries[number] = draw.queries(self.models[number].label, self.models[number].similarity)
        return self._queries[number]

    def score(self, view: View, place: int, report: Report) -> None:
        """Measure every edge of a half's prediction; `show` then has it. Raises UserError."""
        if not 0 <= place < self.halves.count(view):
            raise UserError("there is no such half of the page: load it again")
        number, text = self.halves.of(view, place)
        self.models[number].score(text, self.halves.token_of(view, place), report)

    def search(self, view: View, least: bool, report: Report) -> tuple[Search, str]:
        """The tokens of the corpus at which what colours the tokens is most, or least, of its read; and their HTML.

        Raises:
            UserError: no corpus, or no single source is chosen.
        """
        if self.corpus is None:
            raise UserError("no corpus is open: start the app with --corpus")
        model = self.models[view.models[0]]
        read = self.halves.read_of(view, view.models[0])
        if view.source not in model.sources[read]:
            raise UserError("choose one source in “colour tokens by” first: its tokens are searched for")
        result = model.search(self.corpus.read(), read, view.source, view.by, least, SEARCHED, report)
        return result, draw.results(result, f"{self.corpus.name}, {model.label}")

    def export(self, view: View) -> dict[str, object]:
        """What the page shows, as numbers. Raises UserError for a text that a model cannot read."""
        panes = [self.pane(view, place) for place in range(self.halves.count(view))]
        return export(panes) | {"text": view.text, "other": view.other}

    def _let_go(self, shown: Sequence[int]) -> None:
        """Of the steps of trainings those that were shown last stay loaded."""
        steps = [number for number in shown if self.models[number].whole is not self.models[number]]
        self._recent = [*(number for number in self._recent if number not in steps), *steps][-STEPS:]
        for number, model in enumerate(self.models):
            if model.is_loaded and model.whole is not model and number not in self._recent:
                model.forget()
