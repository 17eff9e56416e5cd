"""What a text does in a model, as it is and with cuts: readings, scores, patches and searches, kept."""

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attnres.app.reading import Cache, Encoder, Reading, Report
from attnres.app.state import Cut
from attnres.inspect.attention import TokenAttention, token_attention
from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.circuits import Circuit, circuit
from attnres.inspect.corpus import Search, search
from attnres.inspect.edits import Ablate, intervene
from attnres.inspect.effects import predict
from attnres.inspect.inspection import By
from attnres.inspect.lens import Lens, logit_lens
from attnres.inspect.patching import Patching, patch
from attnres.inspect.recording import record
from attnres.models.encoding import characters

CANDIDATES = 7
"""Next tokens that are shown."""
MEASURED = 200
"""Edges that are measured: those of the largest gradient estimates."""
LINKS = 2000
"""Links of an attribution graph."""
SCORED = 4096
"""Tokens in one pass, where many texts go through the model."""
WINDOW = 256
"""Tokens in a window of a corpus."""


class Measured:
    """What is computed of a model that is open; `attnres.app.opened.Opened` says which that is."""

    if TYPE_CHECKING:
        cache: Cache
        context: int

        @property
        def model(self) -> Any: ...

        @property
        def tokenizer(self) -> Any: ...

        @property
        def encoder(self) -> Encoder: ...

        @property
        def sources(self) -> list[list[str]]: ...

    def read(self, text: str, cuts: Sequence[Cut] = ()) -> Reading:
        """Run the model on `text`, with edges cut; kept.

        Raises:
            UserError: no text, too long a text, one of which the tokenizer reads nothing, or edges that the model does
                not have.
        """
        return self.cache.make(("read", text, frozenset(cuts)), lambda: self._read(text, cuts))

    def attend(self, text: str, cuts: Sequence[Cut] = ()) -> TokenAttention:
        """Return what the text's tokens attend to; kept.

        Raises:
            UserError: as for `read`, or a model that shows no weights of its attention.
        """
        ids = self.encoder.encode(text)[0]

        def attend() -> TokenAttention:
            with self.edited(cuts, len(ids)):
                return token_attention(self.model, ids)

        return self.cache.make(("attention", text, frozenset(cuts)), attend)

    def heads(self, text: str, token: int, cuts: Sequence[Cut] = ()) -> TokenAttention:
        """Return what each head attends to at a token of a text; kept. Raises UserError as `attend`."""
        ids = self.encoder.encode(text)[0][: token + 1]

        def attend() -> TokenAttention:
            with self.edited(cuts, len(ids)):
                return token_attention(self.model, ids, position=token)

        return self.cache.make(("heads", text, token, frozenset(cuts)), attend)

    def lens(self, text: str, token: int, target: int, cuts: Sequence[Cut] = ()) -> Lens:
        """Return what each read of a token says, by the logit lens; kept.

        Raises:
            UserError: as for `read`, or a head that is not found.
        """
        ids = self.encoder.encode(text)[0][: token + 1]

        def look() -> Lens:
            with self.edited(cuts, len(ids)):
                return logit_lens(self.model, ids, top=1, position=token, target=target)

        return self.cache.make(("lens", text, token, target, frozenset(cuts)), look)

    def score_key(self, text: str, token: int, target: int, against: int | None, cuts: Sequence[Cut]) -> Hashable:
        """Return the name of scores among what is kept."""
        return ("score", text, token, target, against, frozenset(cuts))

    def scored(self, *of: Any) -> Attribution | None:
        """Return scores (`score`), where they have been made or are being made."""
        key = self.score_key(*of)
        return self.cache.partial.get(key) or self.cache.get(key)

    def score(
        self, text: str, token: int, target: int, against: int | None, cuts: Sequence[Cut], report: Report
    ) -> Attribution:
        """Measure what each of the `MEASURED` edges of the largest gradients, cut alone at all tokens, does to ln p of
        `target` after `token`, less that of `against`; kept. `report` is called with edges done and edges in all, and
        others may use the model then; who asks for what another is measuring waits for that. Meanwhile `scored` has
        the gradients, and what was measured so far.

        Raises:
            UserError: as for `read`, or tokens that are not there.
        """
        key, ids = self.score_key(text, token, target, against, cuts), self.encoder.encode(text)[0]
        edits = self.edits(cuts, token + 1)
        edges = min(MEASURED, sum(len(row) for row in self.sources if len(row) > 1))
        size = max(1, SCORED // (token + 1))

        def measure(progress: Callable[[int], None]) -> Attribution:
            done = 0

            def so_far(one: Attribution) -> None:
                nonlocal done
                self.cache.partial[key] = one
                there = sum(not math.isnan(value) for row in one.knockout for value in row)
                progress(there - done)
                done = there

            options: dict[str, Any] = {"target": target, "against": against, "edits": edits, "most": edges}
            return attribute(self.model, ids, position=token, batch_size=size, so_far=so_far, **options)

        return self.cache.work(key, measure, edges, report)

    def circuit(
        self,
        text: str,
        token: int,
        target: int,
        against: int | None,
        cuts: Sequence[Cut],
        most: int,
        report: Report = lambda done, whole: None,
    ) -> Circuit:
        """Return the attribution graph of a prediction, its `most` largest links measured; kept. `report` as for
        `score`. Raises UserError as `attnres.inspect.circuit`."""
        ids = self.encoder.encode(text)[0][: token + 1]
        options: dict[str, Any] = {"target": target, "against": against, "edits": self.edits(cuts, len(ids))}
        return self.cache.work(
            ("circuit", text, token, target, against, frozenset(cuts), most),
            lambda progress: circuit(
                self.model,
                ids,
                most=most,
                limit=LINKS,
                batch_size=max(1, SCORED // len(ids)),
                progress=progress,
                **options,
            ),
            max(1, most),
            report,
        )

    def patch(
        self,
        text: str,
        other: str,
        token: int,
        target: int | None,
        against: int | None,
        cuts: Sequence[Cut],
        report: Report,
    ) -> Patching:
        """Patch every edge of `text` with the vectors of `other`, to predict what follows `token`; kept. `report` as
        for `score`; cuts are in place in both texts.

        Raises:
            UserError: as `attnres.inspect.patch`.
        """
        ids, clean = (self.encoder.encode(one)[0] for one in (text, other))
        edges, size = sum(map(len, self.sources)), max(1, SCORED // (token + 1))
        options: dict[str, Any] = {"target": target, "against": against, "batch_size": size}
        edits = self.edits(cuts, len(ids))
        return self.cache.work(
            ("patch", text, other, token, target, against, frozenset(cuts)),
            lambda progress: patch(self.model, clean, ids, position=token, edits=edits, progress=progress, **options),
            edges,
            report,
        )

    def search(
        self,
        documents: Iterable[str],
        read: int,
        source: str,
        by: By,
        least: bool,
        limit: int,
        cuts: Sequence[Cut],
        report: Report,
    ) -> Search:
        """Find the tokens of documents at which `source` is most, or least, of a read, with cuts in place. `report` as
        for `score`.

        Raises:
            UserError: no such edge, or no text.
        """
        context, on_tokens = min(self.context, WINDOW), self.cache.progress(report, limit)
        options: dict[str, Any] = {"by": by, "least": least, "limit": limit, "batch_size": max(1, SCORED // context)}
        with self.cache.lock, self.edited(cuts, context):
            return search(
                self.model, self.tokenizer, documents, source, read, context=context, on_tokens=on_tokens, **options
            )

    def likeliest(self, before: Reading, after: Reading | None, token: int) -> list[int]:
        """Return ids of the likeliest tokens after `token`; with cuts half of them those before, half after."""
        row = before.log_probs[token]
        count = min(CANDIDATES, len(row))
        ids = row.topk(count).indices.tolist()
        if after is not None:
            ids = ids[: count - count // 2]
            ids += [i for i in after.log_probs[token].topk(count).indices.tolist() if i not in ids][: count // 2]
        return ids

    def _read(self, text: str, cuts: Sequence[Cut]) -> Reading:
        ids, offsets = self.encoder.encode(text)
        with self.edited(cuts, len(ids)):
            reading = self.read_ids(ids, *characters(self.tokenizer, ids, text, offsets))
        reading.notes.extend(self.encoder.notes(text, ids))
        return reading

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
            trace.mixing_contribution,
            [],
        )

    def edited(self, cuts: Sequence[Cut], tokens: int) -> contextlib.AbstractContextManager[None]:
        """Cut edges while a block runs. Without cuts nothing is edited: reads keep their own kernels."""
        edits = self.edits(cuts, tokens)
        return intervene(self.model, *edits) if edits else contextlib.nullcontext()

    def edits(self, cuts: Sequence[Cut], tokens: int) -> list[Ablate]:
        """Return cuts as edits of a text of so many tokens."""
        places = sorted({(cut.read, -1 if cut.token is None else cut.token) for cut in cuts})
        return [
            Ablate(
                sorted({self.sources[read][cut.source] for cut in cuts if (cut.read, cut.token) == (read, at)}),
                reads=read,
                tokens=at,
            )
            for read, at in ((read, None if token < 0 else token) for read, token in places)
            if at is None or at < tokens
        ]
