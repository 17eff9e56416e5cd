"""What one text does in one model: where every token's reads came from, and what changes when edges are knocked out."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnres.app.reading import Candidate, Effect, Reading
from attnres.app.state import MAX_CHARACTERS, Cut
from attnres.app.works import Report, Works
from attnres.device import pick_device
from attnres.errors import UserError
from attnres.inspect.attention import TokenAttention, token_attention
from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.corpus import Search, search
from attnres.inspect.edits import KnockOut
from attnres.inspect.effects import predict
from attnres.inspect.encoding import tokenised
from attnres.inspect.geometry import query_cosine
from attnres.inspect.intervene import intervene, source_names
from attnres.inspect.pieces import characters, piece
from attnres.inspect.record import find_residual, record
from attnres.inspect.routing import By
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.residuals import Read, Residual

MAX_TOKENS = 512
"""Tokens of a text: what a page draws and a processor computes while one waits."""
KEPT = 16
"""Analyses kept for each model: going back to an earlier edit is then free."""
KEPT_BYTES = 256e6
"""Of their numbers, beyond which all but two go: vocabularies of 150,000 make 300 MB of one long text."""
CANDIDATES = 8
"""Next tokens that are shown."""

TRIAL = 128
"""Tokens of the passes that settle the number of threads."""
SCORED = 4096
"""Tokens in one pass, where many texts go through the model."""
WINDOW = 256
"""Tokens in a window of a corpus."""

T = TypeVar("T")
_DRAWING = threading.Lock()
"""Matplotlib's settings are the process's own."""


class Opened:
    """A model to look into, with its tokenizer; its weights are read when they are first needed.

    Args:
        name: a run folder, a checkpoint folder in one, a model folder or a name on the hub.
        trust_remote_code: run code that comes with the model.

    Attributes:
        whole: of a step of a run the model that it became; else itself.

    Raises:
        UserError: no model there.
    """

    def __init__(self, name: str | Path, *, trust_remote_code: bool = False) -> None:
        checkpoint = open_checkpoint(name, trust_remote_code=trust_remote_code)
        self._share(checkpoint, min(checkpoint.context, MAX_TOKENS))
        self.name, self.step = checkpoint.title(), checkpoint.step

    def _share(self, checkpoint: Checkpoint, context: int) -> None:
        self.checkpoint, self.context, self.check = checkpoint, context, checkpoint.check_ids
        self.whole: Opened = self
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        # An observer sits on the model: one pass at a time.
        self._lock = threading.Lock()
        self._works = Works()

    @cached_property
    def model(self) -> Any:
        """The model. Raises UserError."""
        return self.checkpoint.load("auto", str(pick_device("auto")))

    @property
    def is_loaded(self) -> bool:
        """Whether its weights have been read."""
        return "model" in vars(self)

    def forget(self) -> None:
        """Let go of the weights and of what they made; both are there again when they are needed."""
        with self._lock:
            self._kept.clear()
            for name in ("model", "residual"):
                vars(self).pop(name, None)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer. Raises UserError."""
        return self.checkpoint.tokenizer

    @cached_property
    def residual(self) -> Residual:
        """Its residual. Raises UserError: it has none."""
        return find_residual(self.model)

    @cached_property
    def sources(self) -> list[list[str]]:
        """What each read mixes, of any text. Raises UserError: it mixes by no weights."""
        return source_names(self.model)

    @cached_property
    def layout(self) -> tuple[Read, ...]:
        """The reads."""
        return self.residual.layout()

    @cached_property
    def reads(self) -> list[str]:
        """Their names."""
        return [read.name for read in self.layout]

    @property
    def label(self) -> str:
        """Name, residual and, where the run says, training step."""
        step = f", step {self.step:,}" if self.step is not None else ""
        return f"{self.name} ({self.checkpoint.residual}{step})"

    @cached_property
    def details(self) -> str:
        """What the model is, in a few words."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        sublayers = self.residual.num_sublayers
        implied = "" if self.residual.traits.by_token else "; weights are the same for every token"
        return f"{parameters:.1f}M parameters, {sublayers} sublayers, up to {self.context:,} tokens{implied}"

    @cached_property
    def vocabulary(self) -> int:
        """Hash of the tokenizer's vocabulary, to tell whether two models speak of the same tokens."""
        return hash(frozenset(self.tokenizer.get_vocab().items()))

    def read(self, text: str) -> Reading:
        """Run the model on `text`; kept.

        Raises:
            UserError: no text, too long a text, or one of which the tokenizer reads nothing.
        """
        return self._keep(("read", text), lambda: self._read(text))

    def most_varied(self, text: str) -> int | None:
        """The read that shows most of a text when its tokens are coloured; None for the output's, or a text that the
        model cannot read."""
        try:
            read = self.read(text).most_varied()
        except UserError:
            return None
        return read if read < len(self.reads) - 1 else None

    def knock_out(self, text: str, cuts: Sequence[Cut]) -> Effect:
        """Run the model on `text` without some edges; kept.

        Raises:
            UserError: as for `read`, edges that the model does not have, or a read that is left without a source.
        """
        return self._keep(("edit", text, frozenset(cuts)), lambda: self._knock_out(text, cuts))

    def attend(self, text: str) -> TokenAttention:
        """What the text's tokens attend to; kept.

        Raises:
            UserError: as for `read`, or a model that shows no weights of its attention.
        """
        return self._keep(("attention", text), lambda: token_attention(self.model, self._encode(text)[0]))

    def scored(self, text: str, token: int) -> Attribution | None:
        """The scores of the edges of the prediction after `token`, where `score` has kept them."""
        key = ("score", text, token)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def score(self, text: str, token: int, report: Report) -> Attribution:
        """What each edge, cut alone at all tokens, does to ln p of the token that follows `token` (of the last: of the
        likeliest one); kept. `report` is called with edges done and edges in all, and others may use the model then;
        who asks for what another is measuring waits for that.

        Raises:
            UserError: as for `read`.
        """
        ids, key = self._encode(text)[0], ("score", text, token)
        batch = max(1, SCORED // (token + 1))
        with self._works.alone(key, report) as note:
            progress = self._progress(note, sum(map(len, self.sources)))
            return self._keep(
                key, lambda: attribute(self.model, ids, position=token, batch_size=batch, progress=progress)
            )

    def _progress(self, report: Report, total: int) -> Callable[[int], None]:
        """What long work calls with how much more of `total` it has done, the model locked: it reports the sum, and
        others may use the model meanwhile."""
        done = 0

        def progress(more: int) -> None:
            nonlocal done
            done = min(done + more, total)
            self._lock.release()
            try:
                report(done, total)
                time.sleep(0.005)  # long enough for who waits
            finally:
                self._lock.acquire()

        return progress

    def graph(self, text: str, token: int, scores: Attribution) -> str:
        """The scored edges that lead to a prediction as a picture, SVG; empty where none changes it much; kept."""

        def draw() -> str:
            from attnres.figures import NotShown, style
            from attnres.figures.edges import graph
            from attnres.report.theme import to_svg

            title = f"{self.name}: how the prediction after token {token} is made"
            try:
                with _DRAWING, style.style():
                    return to_svg(graph(scores, title).figure, "graph", title, 1.2)
            except NotShown:
                return ""

        return self._keep(("graph", text, token), draw)

    def search(
        self, documents: Iterable[str], read: int, source: str, by: By, least: bool, limit: int, report: Report
    ) -> Search:
        """The tokens of documents at which `source` is most, or least, of a read. `report` as for `score`.

        Raises:
            UserError: no such edge, or no text.
        """
        context, on_tokens = min(self.context, WINDOW), self._progress(report, limit)
        options: dict[str, Any] = {"by": by, "least": least, "limit": limit, "batch_size": max(1, SCORED // context)}
        with self._lock:
            return search(
                self.model, self.tokenizer, documents, source, read, context=context, on_tokens=on_tokens, **options
            )

    def top(self, reading: Reading, effect: Effect | None, token: int) -> list[Candidate]:
        """The likeliest tokens after `token`; with a knock-out half of them those before it, half after."""
        before = reading.log_probs[token]
        after = effect.log_probs[token] if effect is not None else None
        count = min(CANDIDATES, len(before))
        likeliest = before.topk(count).indices.tolist()
        if after is not None:
            likeliest = likeliest[: count // 2]
            likeliest += [i for i in after.topk(count).indices.tolist() if i not in likeliest][: count - len(likeliest)]
        return [
            Candidate(self.piece(i), float(before[i].exp()), float(after[i].exp()) if after is not None else None)
            for i in likeliest
        ]

    @cached_property
    def similarity(self) -> tuple[list[Read], np.ndarray] | None:
        """The reads that have a pseudo-query, and the cosines between these queries (times their key gains);
        None with fewer than two. Reads of one source learn none."""
        cosines = query_cosine(self.residual)
        if cosines is None:
            return None
        there = [i for i, row in enumerate(cosines) if row[i] is not None]
        matrix = np.array([[cosines[i][j] for j in there] for i in there], dtype=float)
        return [self.layout[i] for i in there], matrix

    def piece(self, token: int) -> str:
        """What a token says."""
        return piece(self.tokenizer, token)

    # ------------------------------------------------------------------ runs of the model

    def _keep(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            else:
                self._kept[key] = make()
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
                sizes = [(old, _bytes(one)) for old, one in self._kept.items()]
                total = sum(size for _, size in sizes)
                for old, size in sizes[:-2]:  # what has no arrays, as scores that took long, may stay
                    if size and total >= KEPT_BYTES:
                        del self._kept[old]
                        total -= size
            return self._kept[key]

    def _read(self, text: str) -> Reading:
        ids, offsets = self._encode(text)
        reading = self.read_ids(ids, *characters(self.tokenizer, ids, text, offsets))
        reading.notes.extend(self._notes(text, ids))
        return reading

    def _encode(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a text's tokens, and where in it each lies (nothing for a tokenizer that does not say)."""
        if not text.strip():
            raise UserError("there is no text: type some, or take an example")
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the text has {len(text):,} characters and this page takes {MAX_CHARACTERS:,}: shorten it")
        ids, offsets = tokenised(self.tokenizer, text)
        if not ids:
            raise UserError(f"the tokenizer of {self.name} knows no character of this text: type another")
        self.check(max(ids))
        if len(ids) > self.context:
            raise UserError(f"the text has {len(ids):,} tokens and {self.name} takes {self.context:,} here: shorten it")
        return tuple(ids), offsets

    def beginning(self, text: str) -> str:
        """As much of a text as the model takes here, to the end of a line or word where one ends; all of one that its
        tokenizer cannot encode, of which `read` says so."""
        try:
            spans = tokenised(self.tokenizer, text)[1]
        except UserError:
            return text
        if len(spans) <= self.context:
            return text
        cut = text[: spans[self.context - 1][1]]
        return next((cut[:place] for mark in "\n " if (place := cut.rfind(mark)) > 0), cut)

    def token_at(self, text: str, character: int) -> int | None:
        """The number of the token of a text in which a character lies; None where the tokenizer does not say."""
        spans = self._encode(text)[1]
        return next((i for i, (start, end) in enumerate(spans) if start <= character < end), None)

    def end_of(self, text: str, token: int) -> int | None:
        """The last character of a token of a text; None where the tokenizer does not say, or the token has none."""
        start, end = next(iter(self._encode(text)[1][token : token + 1]), (0, 0))
        return end - 1 if end > start else None

    def _notes(self, text: str, ids: Sequence[int]) -> list[str]:
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

    def read_ids(self, ids: tuple[int, ...], pieces: list[str], names: list[str]) -> Reading:
        """Run the model on tokens; not kept."""
        with record(self.model, tokens=True) as trace:
            prediction = predict(self.model, ids)
        return Reading(
            ids,
            pieces,
            names,
            trace.layout,
            [weights[0].numpy() for weights in trace.token_weights],
            [contributions[0].numpy() for contributions in trace.token_contributions],
            prediction.log_probs,
            prediction.losses.double().numpy(),
            [],
        )

    def _knock_out(self, text: str, cuts: Sequence[Cut]) -> Effect:
        ids = self._encode(text)[0]
        places = sorted({(cut.read, -1 if cut.token is None else cut.token) for cut in cuts})
        edits = [
            KnockOut(
                sorted({self.sources[read][cut.source] for cut in cuts if (cut.read, cut.token) == (read, at)}),
                reads=read,
                tokens=at,
            )
            for read, at in ((read, None if token < 0 else token) for read, token in places)
            if at is None or at < len(ids)
        ]
        with intervene(self.model, *edits):
            prediction = predict(self.model, ids)
        return Effect(prediction.log_probs, prediction.losses.double().numpy())


def _bytes(kept: Any) -> int:
    """How large the tensors and arrays of what is kept of a text are."""
    values = getattr(kept, "__dict__", {}).values()
    arrays = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sum(one.nbytes for one in arrays if isinstance(one, Tensor | np.ndarray))


def choose_threads(models: Sequence[Opened]) -> None:
    """One thread instead of torch's own number where a pass is faster so: a small model's steps are short, and on a
    machine with other work threads wait for one another longer than that. Measured here, kept while the process runs.
    """
    most = torch.get_num_threads()
    if most == 1 or any(model.model.device.type != "cpu" for model in models):
        return
    times = {}
    for threads in (1, most):
        torch.set_num_threads(threads)
        for _ in range(2):  # the first pass builds kernels and fills caches
            start = time.perf_counter()
            for model in models:
                model.read_ids((0,) * min(TRIAL, model.context), [], [])
            times[threads] = time.perf_counter() - start
    torch.set_num_threads(min(times, key=lambda threads: times[threads]))


def find_demo(folder: Path) -> list[Path]:
    """The finished runs of `make demo` with depth reads: Block's and Full's.

    Raises:
        UserError: there is none.
    """
    runs = [run for label in ("block", "full") for run in sorted(folder.glob(f"{label}-seed*"))[:1]]
    finished = [run for run in runs if (run / "summary.json").is_file()]
    if not finished:
        raise UserError(
            f"no model was given, and the demo has left none in {folder}: run `make demo`, or give attnres app MODEL"
        )
    return finished
