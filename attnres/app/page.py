"""The page without its server: a view and what was done to it in, everything it shows out."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from attnres.app import draw
from attnres.app.explorer import Learned, Opened
from attnres.app.figures import sentence
from attnres.app.pane import Pane, Scales, export
from attnres.app.reading import Report
from attnres.app.state import (
    ATTENDED,
    LARGEST,
    LARGEST_NUMBER,
    LOSS,
    MAX_CHARACTERS,
    MAX_CUTS,
    Cut,
    View,
    decode,
    encode,
    from_json,
)
from attnres.errors import UserError
from attnres.inspect.corpus import Search
from attnres.inspect.look import LookText
from attnres.inspect.steps import step_change
from attnres.text import whole_characters
from attnres.typed import Count, Misfit, fit

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


class Halves:
    """One model or two side by side, or two texts of one; what a view says of them."""

    def __init__(self, models: Sequence[Opened]) -> None:
        self.models = list(models)

    def count(self, view: View) -> int:
        """Return how many panes there are."""
        return 2 if view.other is not None else len(view.models)

    def chosen(self, view: View) -> int:
        """Return the half of which the chosen token is."""
        return min(view.half, self.count(view) - 1)

    def of(self, view: View, place: int) -> tuple[int, str]:
        """Return the number of a half's model, and its text."""
        if view.other is not None:
            return view.models[0], view.other if place else view.text
        return view.models[place], view.text

    def read_of(self, view: View, number: int) -> int:
        """Return the number of the read that colours a model's tokens: of the name of the first half's, or the
        output's."""
        first, reads = self.models[view.models[0]].reads, self.models[number].reads
        name = first[view.read] if view.read is not None and view.read < len(first) else None
        return reads.index(name) if name in reads else len(reads) - 1

    def token_of(self, view: View, place: int) -> int:
        """Return the number of the chosen token in a half's text: where it was chosen among other tokens of the same
        text, of the one in which it ends; without a choice the last that says something."""
        number, text = self.of(view, place)
        model, reading = self.models[number], self.models[number].read(text)
        last = len(reading.ids) - 1
        if view.token is None:
            return next((i for i in range(last, -1, -1) if reading.names[i].strip()), last)
        theirs, their_text = self.of(view, self.chosen(view))
        other, token = self.models[theirs], None
        if their_text == text and other.vocabulary != model.vocabulary:
            end = other.encoder.end_of(text, view.token)
            token = None if end is None else model.encoder.token_at(text, end)
        return min(view.token if token is None else token, last)

    def has(self, cut: Cut) -> bool:
        """Return whether the edge of a cut is one of its model's."""
        if cut.model >= len(self.models):
            return False
        sources = self.models[cut.model].sources
        return cut.read < len(sources) and cut.source < len(sources[cut.read])

    def example(self, name: str, models: Iterable[int]) -> str:
        """Return an example, as far as the shortest context of these models goes."""
        encoders = [self.models[number].encoder for number in models]
        return functools.reduce(lambda text, encoder: encoder.beginning(text), encoders, EXAMPLES[name])


_NOTHING_HIT = "this click hit neither a token nor an edge: load the page again"


class Actions:
    """The actions on views of some halves; values come from a browser and may be anything."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves

    def act(self, view: View, action: Any) -> View:
        """Return the view after an action, a name and a value: ["token", 3].

        Raises:
            UserError: no such action, or one on what is not there.
        """
        match action:
            case [str(name), value] if name in _ACTIONS:
                return _ACTIONS[name](self, view, value)
        raise UserError(_NOTHING_HIT)

    def type(self, view: View, text: Any) -> View:
        """Take another text: the last token is chosen, knocked-out edges stay out."""
        return replace(view, text=_words(text), token=None, half=0)

    def compare(self, view: View, text: Any) -> View:
        """Take a second text for the first of the models, or none."""
        if text is None:
            return replace(view, other=None)
        return replace(view, other=_words(text), models=view.models[:1])

    def example(self, view: View, name: Any) -> View:
        """Take one of the examples."""
        if not isinstance(name, str) or name not in EXAMPLES:
            raise UserError("there is no such example: load the page again")
        return self.type(view, self.halves.example(name, view.models))

    def choose(self, view: View, models: Any) -> View:
        """Show other models, by their numbers: one, or two."""
        try:
            numbers = tuple(dict.fromkeys(fit(models, list[Count])))
        except Misfit:
            numbers = ()
        if not 1 <= len(numbers) <= 2 or max(numbers) >= len(self.halves.models):
            raise UserError("this model is not one of those that are open")
        number, read = self.halves.of(view, self.halves.chosen(view))[0], self.halves.read_of(view, numbers[0])
        return replace(
            view,
            models=numbers,
            other=view.other if len(numbers) == 1 else None,
            read=read if read < len(self.halves.models[numbers[0]].reads) - 1 else None,
            half=numbers.index(number) if number in numbers else 0,
        )

    def show_by(self, view: View, by: Any) -> View:
        """Show contributions or weights."""
        if by not in ("contribution", "weight"):
            raise UserError("sources are shown by contribution or by weight: load the page again")
        return replace(view, by=by)

    def colour(self, view: View, what: Any) -> View:
        """Colour tokens by another [read, source]; a read of -1 is the output's."""
        if not (isinstance(what, list) and len(what) == 2 and type(what[0]) is int and isinstance(what[1], str)):
            raise UserError("there is no such read or source: load the page again")
        read, source = what
        return replace(view, read=read if 0 <= read <= LARGEST_NUMBER else None, source=source or LARGEST)

    def choose_token(self, view: View, at: Any) -> View:
        """Choose another token of a half, {"place": p, "token": t}.

        Raises:
            UserError: a click on what is not there.
        """
        numbers = _numbers(at)
        place, token = numbers.get("place"), numbers.get("token")
        if place is None or token is None or place >= self.halves.count(view):
            raise UserError(_NOTHING_HIT)
        return replace(view, token=token, half=place)

    def click(self, view: View, edge: Any) -> View:
        """Cut an edge of a half, {"place": p, "model": m, "read": r, "source": s}: it is knocked out,
        where the view says, or brought back. With "token" it is that token's, or (None) that of all tokens.

        Raises:
            UserError: a click on what is not there.
        """
        numbers = _numbers(edge)
        place, model, read, source = (numbers.get(name) for name in ("place", "model", "read", "source"))
        if place is None or model is None or read is None or source is None or place >= self.halves.count(view):
            raise UserError(_NOTHING_HIT)
        cut = Cut(model, read, source, numbers["token"] if "token" in numbers else self._token(view, place))
        if not self.halves.has(cut):
            raise UserError("this edge is not one of the model's: load the page again")
        cuts = tuple(one for one in view.cuts if one != cut) if cut in view.cuts else (*view.cuts, cut)
        if len(cuts) > MAX_CUTS:
            raise UserError(f"{len(cuts)} edges are knocked out, {MAX_CUTS} is the most: bring some back first")
        return replace(view, cuts=cuts)

    def span(self, view: View, span: Any) -> View:
        """Choose whether the next cut holds at all tokens or at one."""
        if span not in ("all", "one"):
            raise UserError("a cut holds at all tokens or at one: load the page again")
        return replace(view, span=span)

    def undo(self, view: View, _: Any = None) -> View:
        """Restore the last cut."""
        return replace(view, cuts=view.cuts[:-1])

    def reset(self, view: View, _: Any = None) -> View:
        """Nothing is knocked out."""
        return replace(view, cuts=())

    def restore(self, view: View, earlier: Any) -> View:
        """Go back to an earlier view."""
        return from_json(earlier, len(self.halves.models))

    def visit(self, view: View, hit: Any) -> View:
        """Go to a hit of a search, {"text": ..., "at": character}: its text, with the token there chosen."""
        if not isinstance(hit, dict) or not isinstance(hit.get("text"), str) or type(hit.get("at")) is not int:
            raise UserError("this hit is none: search again")
        view = self.type(view, hit["text"])
        encoder = self.halves.models[view.models[0]].encoder
        return replace(view, other=None, token=encoder.token_at(view.text, hit["at"]))

    def _token(self, view: View, place: int) -> int | None:
        """Return where a cut that is chosen in this half holds."""
        return None if view.span == "all" else self.halves.token_of(view, place)


_ACTIONS: dict[str, Callable[..., View]] = {
    "type": Actions.type,
    "compare": Actions.compare,
    "example": Actions.example,
    "models": Actions.choose,
    "by": Actions.show_by,
    "colour": Actions.colour,
    "token": Actions.choose_token,
    "edge": Actions.click,
    "span": Actions.span,
    "undo": Actions.undo,
    "reset": Actions.reset,
    "restore": Actions.restore,
    "visit": Actions.visit,
}


def _numbers(value: Any) -> dict[str, int | None]:
    """Return the numbers that a click came with. Raises UserError."""
    try:
        return fit(value, dict[str, Count | None])
    except Misfit:
        raise UserError("this click came with numbers that mean nothing here: load the page again") from None


def _words(text: Any) -> str:
    """Return a text from the browser, half a character made none. Raises UserError."""
    if not isinstance(text, str):
        raise UserError("the text is none: type some")
    return whole_characters(text)


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
        text: that the page opens with; None is an example, or some ids for a model without a tokenizer.
    """

    def __init__(self, models: Sequence[Opened], corpus: LookText | None = None, text: str | None = None) -> None:
        self.text = text
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
        """Return the view that the page opens with, and what is wrong with its link, a query string."""
        fields = {name: value for name, value in parse_qsl(link.removeprefix("?")[:20_000]) if len(name) == 1}
        last = len(self.models) - 1  # of each run its last checkpoint, the finished model, is shown
        whole = [i for i in range(last) if self.models[i + 1].whole is not self.models[i].whole] + [last]
        text = self.text if self.text is not None else self.models[-1].opening_text
        start = View(text=self.halves.example("code", whole) if text is None else text, models=tuple(whole))
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
                    panes.append(draw.learned(number, place, model, self.queries(number), f"{error}"))
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
        difference = draw.difference(*drawn) if len(drawn) == 2 else ""
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
        return draw.learned_between(change, first.name)

    def pane(self, view: View, place: int) -> Pane:
        """Return one half of the page. Raises UserError for a text that its model cannot read."""
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
        """Find the tokens of the corpus at which what colours the tokens is most, or least, of its read; and their
        HTML.

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
        """Return what the page shows, as numbers. Raises UserError for a text that a model cannot read."""
        panes = [self.pane(view, place) for place in range(self.halves.count(view))]
        return export(panes) | {"text": view.text, "other": view.other}

    def _let_go(self, shown: Sequence[int]) -> None:
        """Of the steps of trainings those that were shown last stay loaded."""
        steps = [number for number in shown if self.models[number].whole is not self.models[number]]
        self._recent = [*(number for number in self._recent if number not in steps), *steps][-STEPS:]
        for number, model in enumerate(self.models):
            if model.is_loaded and model.whole is not model and number not in self._recent:
                model.forget()
