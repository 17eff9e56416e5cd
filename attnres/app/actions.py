"""What is done to a view: each click, choice and typed text as an action, which makes another view of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attnres.app.examples import EXAMPLES
from attnres.app.halves import Halves
from attnres.app.state import LARGEST, LARGEST_NUMBER, MAX_CUTS, Cut, View, from_json
from attnres.errors import UserError
from attnres.text import whole_characters
from attnres.typed import Count, Misfit, fit

_NOTHING_HIT = "this click hit neither a token nor an edge: load the page again"


class Actions:
    """The actions on views of some halves; values come from a browser and may be anything."""

    def __init__(self, halves: Halves) -> None:
        self.halves = halves

    def act(self, view: View, action: Any) -> View:
        """The view after an action, a name and a value: ["token", 3].

        Raises:
            UserError: no such action, or one on what is not there.
        """
        match action:
            case [str(name), value] if name in _ACTIONS:
                return _ACTIONS[name](self, view, value)
        raise UserError(_NOTHING_HIT)

    def type(self, view: View, text: Any) -> View:
        """Another text: the last token is chosen, knocked-out edges stay out."""
        return replace(view, text=_words(text), token=None, half=0)

    def compare(self, view: View, text: Any) -> View:
        """A second text for the first of the models, or none."""
        if text is None:
            return replace(view, other=None)
        return replace(view, other=_words(text), models=view.models[:1])

    def example(self, view: View, name: Any) -> View:
        """One of the examples."""
        if not isinstance(name, str) or name not in EXAMPLES:
            raise UserError("there is no such example: load the page again")
        return self.type(view, self.halves.example(name, view.models))

    def choose(self, view: View, models: Any) -> View:
        """Other models, by their numbers: one, or two."""
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
        """Contributions or weights."""
        if by not in ("contribution", "weight"):
            raise UserError("sources are shown by contribution or by weight: load the page again")
        return replace(view, by=by)

    def colour(self, view: View, what: Any) -> View:
        """Tokens coloured by another [read, source]; a read of -1 is the output's."""
        if not (isinstance(what, list) and len(what) == 2 and type(what[0]) is int and isinstance(what[1], str)):
            raise UserError("there is no such read or source: load the page again")
        read, source = what
        return replace(view, read=read if 0 <= read <= LARGEST_NUMBER else None, source=source or LARGEST)

    def choose_token(self, view: View, at: Any) -> View:
        """Another token of a half, {"place": p, "token": t}.

        Raises:
            UserError: a click on what is not there.
        """
        numbers = _numbers(at)
        place, token = numbers.get("place"), numbers.get("token")
        if place is None or token is None or place >= self.halves.count(view):
            raise UserError(_NOTHING_HIT)
        return replace(view, token=token, half=place)

    def click(self, view: View, edge: Any) -> View:
        """A click on an edge of a half, {"place": p, "model": m, "read": r, "source": s}: it is knocked out, where the
        view says, or brought back. With "token" it is that token's, or (None) that of all tokens.

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
        """Whether the next cut holds at all tokens or at one."""
        if span not in ("all", "one"):
            raise UserError("a cut holds at all tokens or at one: load the page again")
        return replace(view, span=span)

    def undo(self, view: View, _: Any = None) -> View:
        """The last cut is brought back."""
        return replace(view, cuts=view.cuts[:-1])

    def reset(self, view: View, _: Any = None) -> View:
        """Nothing is knocked out."""
        return replace(view, cuts=())

    def restore(self, view: View, earlier: Any) -> View:
        """An earlier view."""
        return from_json(earlier, len(self.halves.models))

    def visit(self, view: View, hit: Any) -> View:
        """A hit of a search, {"text": ..., "at": character}: its text, with the token there chosen."""
        if not isinstance(hit, dict) or not isinstance(hit.get("text"), str) or type(hit.get("at")) is not int:
            raise UserError("this hit is none: search again")
        view = self.type(view, hit["text"])
        encoder = self.halves.models[view.models[0]].encoder
        return replace(view, other=None, token=encoder.token_at(view.text, hit["at"]))

    def _token(self, view: View, place: int) -> int | None:
        """Where a cut that is chosen in this half holds."""
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
    """The numbers that a click came with. Raises UserError."""
    try:
        return fit(value, dict[str, Count | None])
    except Misfit:
        raise UserError("this click came with numbers that mean nothing here: load the page again") from None


def _words(text: Any) -> str:
    """A text from the browser, half a character made none. Raises UserError."""
    if not isinstance(text, str):
        raise UserError("the text is none: type some")
    return whole_characters(text)
