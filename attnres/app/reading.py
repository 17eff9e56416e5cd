"""A text in the tokens of a model, what the model makes of it as numbers, and how long these numbers are kept."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from attnres.app.state import MAX_CHARACTERS
from attnres.errors import UserError
from attnres.inspect import notebook
from attnres.models.encoding import check_length, encode_prompt
from attnres.residuals import Read

Report = Callable[[int, int], None]
"""Called with how much is done of how much; what it raises ends the work."""

WAIT = 0.2
"""Seconds between two reports of work that another thread does."""
KEPT = 16
"""Analyses kept for each model: going back to an earlier edit is then free."""
KEPT_BYTES = 256e6
"""Of their numbers, beyond which all but two go: vocabularies of 150,000 make 300 MB of one long text."""

T = TypeVar("T")


class Cache:
    """The latest analyses of a model, by what they are of.

    Attributes:
        lock: held by the thread that runs the model: an observer sits on the model, so there is one pass at a time.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.Lock())
        self._made, self._working = OrderedDict[Hashable, Any](), dict[Hashable, tuple[int, int]]()
        self.partial = dict[Hashable, Any]()
        """What work under way has so far, by what it is of."""

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: Hashable) -> Any:
        """Return what was made under a key, or None."""
        with self.lock:
            return self._made[key] if self._touch(key) else None

    def make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made under a key, or make it now."""
        with self.lock:
            return self._make(key, make)

    def work(self, key: Hashable, make: Callable[[Callable[[int], None]], T], total: int, report: Report) -> T:
        """Return what was made under a key, or make it now, which takes a while.

        `make` is given a function to call with how much more of `total` it has done. Others may use the model during
        that call; who asks for the same waits for it, and is told by `report` how far it is.
        """
        with self.lock:
            while key in self._working:
                done = self._working[key]
                self.lock.release()
                try:
                    report(*done)
                finally:
                    self.lock.acquire()
                self.lock.wait(WAIT)
            self._working[key] = (0, total)
            try:
                return self._make(key, lambda: make(self.progress(report, total, key)))
            finally:
                del self._working[key]
                self.partial.pop(key, None)
                self.lock.notify_all()

    def clear(self) -> None:
        """Forget everything; for the thread that holds the lock."""
        self._made.clear()

    def progress(self, report: Report, total: int, key: Hashable = None) -> Callable[[int], None]:
        """Return what long work, which holds the lock, calls with how much more of `total` it has done: it reports the
        sum, and others may use the model meanwhile."""
        done = 0

        def progress(more: int) -> None:
            nonlocal done
            done = min(done + more, total)
            if key is not None:
                self._working[key] = (done, total)
            self.lock.release()
            try:
                report(done, total)
                time.sleep(0.005)  # long enough for a thread that waits
            finally:
                self.lock.acquire()

        return progress

    def _touch(self, key: Hashable) -> bool:
        """Make it the latest; return whether it is there."""
        if key in self._made:
            self._made.move_to_end(key)
        return key in self._made

    def _make(self, key: Hashable, make: Callable[[], T]) -> T:
        if not self._touch(key):
            self._made[key] = make()
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            sizes = [(old, _bytes(one)) for old, one in self._made.items()]
            total = sum(size for _, size in sizes)
            for old, size in sizes[:-2]:  # what has no arrays, as scores that took long, may stay
                if size and total >= KEPT_BYTES:
                    del self._made[old]
                    total -= size
        return self._made[key]


def _bytes(kept: Any) -> int:
    """Return the bytes of the tensors and arrays of an analysis."""
    values = getattr(kept, "__dict__", {}).values()
    arrays = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in arrays if isinstance(one, Tensor | np.ndarray))


@dataclass(frozen=True)
class Reading(notebook.Named):
    """A text in a model.

    Attributes:
        ids: of the T tokens; `pieces` what each says, in whole characters, and `names` what to call it
            (`attnres.models.encoding.characters`).
        layout: the reads and what they mix; `reads` and `sources` are their names.
        weights, contributions: for each read (T, sources); what each source is of the read, by projection on it.
        log_probs: (T, V): of the token after each.
        losses: (T-1,) nats: of each token but the first.
        outputs: (R, L+1) mean over the tokens of what each single output is of each read; None where a read is no such
            sum.
        notes: what a reader should know of this text, one sentence each.
    """

    ids: tuple[int, ...]
    pieces: list[str]
    names: list[str]
    layout: tuple[Read, ...]
    weights: list[np.ndarray]
    contributions: list[np.ndarray]
    log_probs: Tensor
    losses: np.ndarray
    outputs: np.ndarray | None
    notes: list[str]

    @property
    def loss(self) -> float | None:
        """Mean loss in nats per token; None for a single token."""
        return float(self.losses.mean()) if len(self.losses) else None

    def underlined(self) -> int:
        """Return the read whose largest sources the tokens are marked by: the last one before the output's that has
        several sources."""
        several = [read for read, one in enumerate(self.layout[:-1]) if len(one.sources) > 1]
        return several[-1] if several else len(self.layout) - 1


@dataclass(frozen=True)
class Encoder:
    """A model's tokenizer.

    Attributes:
        name: the model's, for messages.
        context: tokens that a text may have.
        rows: of the model's embedding; None where its config does not say.
    """

    tokenizer: Any
    name: str
    context: int
    rows: int | None

    def encode(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return ids of a text's tokens, and where in it each lies (nothing for a tokenizer that does not say).

        Raises:
            UserError: no text, too long a text, or as `encode_prompt`.
        """
        if not text.strip():
            raise UserError("there is no text: type some, or take an example")
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the text has {len(text):,} characters and this page takes {MAX_CHARACTERS:,}: shorten it")
        ids, offsets = encode_prompt(self.tokenizer, text, rows=self.rows, context=None, name=self.name)
        check_length(len(ids), self.context, f"{self.name} on this page")
        return tuple(ids), offsets

    def beginning(self, text: str) -> str:
        """As much of a text as the model takes here, to the end of a line or word where one ends; all of one that its
        tokenizer cannot encode, of which `encode` says so."""
        try:
            spans = encode_prompt(self.tokenizer, text, rows=None, context=None)[1]
        except UserError:
            return text
        if len(spans) <= self.context:
            return text
        cut = text[: spans[self.context - 1][1]]
        return next((cut[:place] for mark in "\n " if (place := cut.rfind(mark)) > 0), cut)

    def token_at(self, text: str, character: int) -> int | None:
        """Return the number of the token of a text in which a character lies; None where the tokenizer does not say."""
        spans = self.encode(text)[1]
        return next((i for i, (start, end) in enumerate(spans) if start <= character < end), None)

    def end_of(self, text: str, token: int) -> int | None:
        """Return the last character of a token of a text; None where the tokenizer does not say, or the token has
        none."""
        start, end = next(iter(self.encode(text)[1][token : token + 1]), (0, 0))
        return end - 1 if end > start else None

    def notes(self, text: str, ids: Sequence[int]) -> list[str]:
        """Return what a reader of a text's figures has to know of its tokens, in sentences."""
        notes = []
        decoded = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        lost = sorted({character for character in text if not character.isspace()} - set(decoded))
        if self.tokenizer.unk_token_id in ids or (lost and not set(text.lower()) <= set(decoded.lower())):
            some = " ".join(lost[:5])
            which = f" ({some}{' ...' if len(lost) > 5 else ''})" if lost else ""
            notes.append(f"The tokenizer of {self.name} has never seen some characters of this text{which}.")
        if len(ids) == 1:
            notes.append("One token: it has a next-token distribution, but no loss.")
        return notes
