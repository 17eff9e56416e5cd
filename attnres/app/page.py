"""The page without its server: a view in, everything it shows out, and what each click makes of a view."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnres.app import view as html
from attnres.app.examples import CODE
from attnres.app.explorer import Opened
from attnres.app.state import HEAVIEST, LOSS, MAX_CHARACTERS, MAX_EDGES, Edge, View, decode, encode
from attnres.errors import UserError


@dataclass(frozen=True)
class Shown:
    """What the page shows of a view.

    Attributes:
        view: the view, with what its models do not have left out.
        panes: HTML for each model shown. message: a sentence above them, or nothing.
        reads, sources: (words, value) to choose what colours the tokens from.
        query: of the link that brings this view back; empty where the text is too long for one.
    """

    view: View
    panes: list[str]
    message: str
    reads: list[tuple[str, int]]
    sources: list[tuple[str, str]]
    query: str


class Page:
    """The explorer of one or two models.

    Raises:
        UserError: more models than two.
    """

    def __init__(self, models: Sequence[Opened]) -> None:
        if not 1 <= len(models) <= 2:
            raise UserError(f"{len(models)} models were given: the explorer shows one, or two side by side")
        self.models = list(models)

    @property
    def choices(self) -> list[tuple[str, str]]:
        """(words, value) of the models to choose from: each alone, or both."""
        labels = [(model.label, str(number)) for number, model in enumerate(self.models)]
        return [*labels, ("both", "0.1")] if len(self.models) == 2 else labels

    def begin(self, fields: dict[str, str]) -> tuple[View, str]:
        """The view that the page opens with, and what is wrong with its link."""
        start = View(text=CODE, models=tuple(range(len(self.models))))
        if not fields:
            return replace(start, read=self.models[0].most_varied(start.text)), ""
        try:
            view = decode(fields, len(self.models))
            return (view if view.text else replace(view, text=CODE)), ""
        except UserError as error:
            return start, str(error)

    # ------------------------------------------------------------------ what clicks make of a view

    def type(self, view: View, text: str) -> View:
        """Another text: the last token is chosen, knocked-out edges stay out."""
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a character is none
        return replace(view, text=whole, token=None)

    def choose(self, view: View, models: str) -> View:
        """Other models, by one of the values of `choices`."""
        if models not in [value for _, value in self.choices]:
            raise UserError("this model is not one of those that are open")
        return replace(view, models=tuple(int(number) for number in models.split(".")))

    def colour(self, view: View, read: int | None, source: str) -> View:
        """Tokens coloured by another read or source."""
        return replace(view, read=read, source=source)

    def click(self, view: View, event: Any) -> View:
        """A click on a token, {"token": i}, or on an edge, {"model": m, "read": r, "source": s}.

        Raises:
            UserError: a click on what is not there.
        """
        numbers = (
            {name: event.get(name) for name in ("token", "model", "read", "source")} if isinstance(event, dict) else {}
        )
        if any(value is not None and (type(value) is not int or value < 0) for value in numbers.values()):
            raise UserError("this click came with numbers that mean nothing here: load the page again")
        token, model, read, source = (numbers.get(name) for name in ("token", "model", "read", "source"))
        if token is not None:
            return replace(view, token=token)
        if model is None or read is None or source is None:
            raise UserError("this click hit neither a token nor an edge: load the page again")
        if model >= len(self.models) or not self._has(edge := Edge(model, read, source)):
            raise UserError("this edge is not one of the model's: load the page again")
        edges = view.edges ^ {edge}
        if len(edges) > MAX_EDGES:
            raise UserError(f"{len(edges)} edges are knocked out, {MAX_EDGES} is the most: bring some back first")
        return replace(view, edges=edges)

    def reset(self, view: View) -> View:
        """Nothing is knocked out."""
        return replace(view, edges=frozenset())

    # ------------------------------------------------------------------ what a view shows

    def show(self, view: View, message: str = "") -> Shown:
        """Everything the page shows; what is wrong with the text is said in its place."""
        known = frozenset(edge for edge in view.edges if edge.model < len(self.models) and self._has(edge))
        if known != view.edges:
            message = message or "Some knocked-out edges of this link do not exist in these models: they were left out."
        first = self.models[view.models[0]]
        read = view.read if view.read is not None and view.read < len(first.reads) - 1 else None
        view = replace(view, edges=known, read=read)
        row = first.sources[-1 if read is None else read]
        if view.source not in (HEAVIEST, LOSS, *row):
            view = replace(view, source=HEAVIEST)
        panes: list[str] = []
        for number in view.models:
            try:
                panes.append(html.pane(self.pane(view, number)))
            except UserError as error:
                panes.append(html.message(f"{error}"))
        if len(set(panes)) < len(panes):  # one sentence for both
            panes = panes[:1]
        if len(view.models) == 2 and len({self.models[number].vocabulary for number in view.models}) == 2:
            message = message or (
                "These two models have different tokenizers: each shows its own tokens, and losses per token cannot be "
                "compared."
            )
        reads = [(name, -1 if name == "output" else number) for number, name in enumerate(first.reads)][::-1]
        sources = [("heaviest source", HEAVIEST), *((name, name) for name in row), ("change in loss", LOSS)]
        query = encode(view)
        if not query and len(view.text) <= MAX_CHARACTERS:
            message = message or "The text is too long for a link to this view: export it as JSON instead."
        return Shown(view, panes, message, reads, sources, query)

    def pane(self, view: View, number: int) -> html.Pane:
        """One model's half. Raises UserError for a text that it cannot read."""
        model = self.models[number]
        reading = model.read(view.text)
        last = len(reading.ids) - 1
        if view.token is None:  # the last that says something
            token = next((i for i in range(last, -1, -1) if reading.pieces[i].strip()), last)
        else:
            token = min(view.token, last)
        out = view.edges_of(number)
        effect = model.knock_out(view.text, out) if out else None
        deepest = len(model.reads) - 1
        return html.Pane(
            number=number,
            title=model.label,
            details=model.details,
            reading=reading,
            read=deepest if view.read is None else min(view.read, deepest),
            source=view.source,
            token=token,
            edges=out,
            effect=effect,
            candidates=model.top(reading, effect, token),
            similarity=model.similarity,
        )

    def export(self, view: View) -> dict[str, object]:
        """What the page shows, as numbers. Raises UserError for a text that a model cannot read."""
        return html.export([self.pane(view, number) for number in view.models]) | {"text": view.text}

    def _has(self, edge: Edge) -> bool:
        sources = self.models[edge.model].sources
        return edge.read < len(sources) and edge.source < len(sources[edge.read])
