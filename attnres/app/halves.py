"""The halves of the page: which model and which text each shows, and which of its reads and tokens are chosen."""

import functools
from collections.abc import Iterable, Sequence

from attnres.app.examples import EXAMPLES
from attnres.app.explorer import Opened
from attnres.app.state import Cut, View


class Halves:
    """One model or two side by side, or two texts of one; what a view says of them."""

    def __init__(self, models: Sequence[Opened]) -> None:
        self.models = list(models)

    def count(self, view: View) -> int:
        """How many there are."""
        return 2 if view.other is not None else len(view.models)

    def chosen(self, view: View) -> int:
        """The half of which the chosen token is."""
        return min(view.half, self.count(view) - 1)

    def of(self, view: View, place: int) -> tuple[int, str]:
        """The number of a half's model, and its text."""
        if view.other is not None:
            return view.models[0], view.other if place else view.text
        return view.models[place], view.text

    def read_of(self, view: View, number: int) -> int:
        """The number of the read that colours a model's tokens: of the name of the first half's, or the output's."""
        first, reads = self.models[view.models[0]].reads, self.models[number].reads
        name = first[view.read] if view.read is not None and view.read < len(first) else None
        return reads.index(name) if name in reads else len(reads) - 1

    def token_of(self, view: View, place: int) -> int:
        """The number of the chosen token in a half's text: where it was chosen among other tokens of the same text, of
        the one in which it ends; without a choice the last that says something."""
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
        """Whether the edge of a cut is one of its model's."""
        if cut.model >= len(self.models):
            return False
        sources = self.models[cut.model].sources
        return cut.read < len(sources) and cut.source < len(sources[cut.read])

    def example(self, name: str, models: Iterable[int]) -> str:
        """An example, as far as the shortest context of these models goes."""
        encoders = [self.models[number].encoder for number in models]
        return functools.reduce(lambda text, encoder: encoder.beginning(text), encoders, EXAMPLES[name])
