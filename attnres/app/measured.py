"""Analyses of a text in an open model, with cuts or without: readings, scores, patches and searches."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from attnres.app.cache import Cache, Report
from attnres.app.state import Cut
from attnres.inspect import notebook
from attnres.inspect.attention import TokenAttention, token_attention
from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.circuits import Circuit, circuit
from attnres.inspect.corpus import Search, search
from attnres.inspect.edits import Ablate, intervene
from attnres.inspect.effects import predict
from attnres.inspect.inspection import By
from attnres.inspect.lens import Lens, lens_of
from attnres.inspect.patching import Patching, patch
from attnres.inspect.recording import Trace, recorded_by
from attnres.inspect.subject import prompt_ids
from attnres.models.encoding import characters
from attnres.residuals import Read, Residual

if TYPE_CHECKING:
    from attnres.app.opened import Encoder

CANDIDATES = 7
"""Next tokens that are shown."""
MEASURED = 200
"""Edges that are measured: those of the largest gradient estimates."""
LINKS = 2000
"""Links of an attribution graph."""
SCORED = 2048
"""Tokens in one pass, where many texts go through the model."""
WINDOW = 256
"""Tokens in a window of a corpus."""


@dataclass(frozen=True)
class Reading(notebook.Named):
    """One forward pass of a text of T tokens through a model with R reads of width d.

    Attributes:
        ids: of the tokens. pieces: the characters of each, joined they are the text. names: a label of each
            (`attnres.models.encoding.characters`).
        layout: the reads and their sources; `reads` and `sources` are their names.
        weights: of each read, (T, sources). contributions: the same shape, <p_i v_i, h> / <h, h> of source i.
        vectors: the result of each read before its norm, (T, d).
        log_probs: (T, V), of the token after each.
        losses: (T-1,) nats, of each token but the first.
        outputs: (R, L+1) mean contribution over the tokens of every sublayer's output; None where a read is no sum of
            outputs.
        notes: warnings about this text for the reader, one sentence each.
    """

    ids: tuple[int, ...]
    pieces: list[str]
    names: list[str]
    layout: tuple[Read, ...]
    weights: list[np.ndarray]
    contributions: list[np.ndarray]
    vectors: list[Tensor]
    log_probs: Tensor
    losses: np.ndarray
    outputs: np.ndarray | None
    notes: list[str]

    @property
    def loss(self) -> float | None:
        """Mean loss in nats per token; None for a single token."""
        return float(self.losses.mean()) if len(self.losses) else None

    @property
    def underlined(self) -> int:
        """The number of the read whose largest source underlines each token on the page: the last read before the
        output's that has several sources."""
        several = [read for read, one in enumerate(self.layout[:-1]) if len(one.sources) > 1]
        return several[-1] if several else len(self.layout) - 1


class Asked(NamedTuple):
    """The prediction that is explained: of the id `target`, rather than of `against`, after a token of a text, with
    cuts in place."""

    text: str
    token: int
    target: int | None
    against: int | None = None
    cuts: frozenset[Cut] = frozenset()


class Measured:
    """The analyses of an open model (`attnres.app.opened.Opened`), each kept in its cache.

    Methods raise UserError for a text that the model cannot encode (`Encoder.encode`) and for edges or tokens that are
    not there.
    """

    if TYPE_CHECKING:
        cache: Cache
        context: int

        @property
        def model(self) -> Any: ...

        @property
        def tokenizer(self) -> Any: ...

        @property
        def encoder(self) -> "Encoder": ...

        @property
        def residual(self) -> Residual: ...

        @property
        def sources(self) -> list[list[str]]: ...

    def read(self, text: str, cuts: Iterable[Cut] = ()) -> Reading:
        """Run the model on `text`, with edges cut."""

        def read() -> Reading:
            ids, offsets = self.encoder.encode(text)
            with self.edited(cuts, len(ids)):
                reading = self.read_ids(ids, *characters(self.tokenizer, ids, text, offsets))
            reading.notes.extend(self.encoder.notes(text, ids))
            return reading

        return self.cache.make(("read", text, frozenset(cuts)), read)

    def attend(self, text: str, cuts: Iterable[Cut] = (), token: int | None = None) -> TokenAttention:
        """Return the attention weights of the text, with those of each head where a `token` is given. Raises UserError
        too where the model returns no attention weights."""
        ids = self.encoder.encode(text)[0][: None if token is None else token + 1]

        def attend() -> TokenAttention:
            with self.edited(cuts, len(ids)):
                return token_attention(self.model, ids, position=token)

        return self.cache.make(("attention", text, token, frozenset(cuts)), attend)

    def lens(self, asked: Asked) -> Lens:
        """Return the logit lens of the chosen token's reads. Raises UserError too where no head is found."""
        reading = self.read(asked.text, asked.cuts)

        def look() -> Lens:
            ids = prompt_ids(self.model, reading.ids)[0]
            at = {"top": 1, "position": asked.token, "target": asked.target}
            return lens_of(self.model, ids, reading.layout, reading.vectors, **at)

        return self.cache.make(("lens", asked), look)

    def scored(self, asked: Asked) -> Attribution | None:
        """Return the finished or partial result of `score`; None where it was never called."""
        return self.cache.partial.get(("score", asked)) or self.cache.get(("score", asked))

    def score(self, asked: Asked, report: Report, most: int | None = None) -> Attribution:
        """Measure the change of the prediction when an edge is ablated at all tokens, for each of the `most` edges with
        the largest gradients (None: `MEASURED`).

        `report` is called with the number of edges done and of all; other threads may use the model during that call,
        and a thread that asks for the same scores waits for them. Until the end `scored` returns the gradients and the
        edges measured so far.
        """
        most = min(most or MEASURED, sum(len(row) for row in self.sources if len(row) > 1))

        def measure(progress: Callable[[int], None]) -> Attribution:
            done = 0

            def so_far(one: Attribution) -> None:
                nonlocal done
                self.cache.partial["score", asked] = one
                measured = sum(not math.isnan(value) for row in one.knockout for value in row)
                progress(measured - done)
                done = measured

            return attribute(self.model, **self._options(asked), most=most, so_far=so_far)

        return self.cache.work(("score", asked), measure, most, report)

    def circuit(self, asked: Asked, most: int, report: Report = lambda done, whole: None) -> Circuit:
        """Return the prediction's attribution graph, its `most` largest links measured; `report` as for `score`."""

        def measure(progress: Callable[[int], None]) -> Circuit:
            return circuit(self.model, **self._options(asked), most=most, limit=LINKS, progress=progress)

        return self.cache.work(("circuit", asked, most), measure, max(1, most), report)

    def patch(self, asked: Asked, other: str, report: Report) -> Patching:
        """Patch every edge of the text with the vectors of `other`; `report` as for `score`. Cuts are in place in both
        texts. Raises UserError too as `attnres.inspect.patch`."""
        clean = self.encoder.encode(other)[0]

        def measure(progress: Callable[[int], None]) -> Patching:
            options = self._options(asked)
            return patch(self.model, clean, options.pop("input_ids"), progress=progress, **options)

        return self.cache.work(("patch", asked, other), measure, sum(map(len, self.sources)), report)

    def search(
        self,
        documents: Iterable[str],
        read: int,
        source: str,
        by: By,
        least: bool,
        limit: int,
        cuts: Iterable[Cut],
        report: Report,
    ) -> Search:
        """Find the tokens of documents at which `source` is most, or least, of a read, with cuts in place. `report` as
        for `score`."""
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

    def read_ids(self, ids: tuple[int, ...], pieces: list[str], names: list[str]) -> Reading:
        """Run the model on tokens; the cache does not keep the result."""
        with recorded_by(_Watching(self.residual, tokens=True), self.residual) as trace:
            prediction = predict(self.model, ids)
        return Reading(
            ids,
            pieces,
            names,
            trace.layout,
            [weights[0].numpy() for weights in trace.token_weights],
            [contributions[0].numpy() for contributions in trace.token_contributions],
            [trace.vectors[index] for index in sorted(trace.vectors)],
            prediction.log_probs,
            prediction.losses.double().numpy(),
            trace.mixing_contribution,
            [],
        )

    def edited(self, cuts: Iterable[Cut], tokens: int) -> contextlib.AbstractContextManager[None]:
        """Cut edges while a block runs. Without cuts nothing is edited: reads keep their own kernels."""
        edits = self.edits(cuts, tokens)
        return intervene(self.model, *edits) if edits else contextlib.nullcontext()

    def edits(self, cuts: Iterable[Cut], tokens: int) -> list[Ablate]:
        """Return cuts as ablations in a text of `tokens` tokens; cuts at later tokens are left out."""
        by_read: dict[tuple[int, int | None], set[str]] = {}
        for cut in cuts:
            if cut.token is None or cut.token < tokens:
                by_read.setdefault((cut.read, cut.token), set()).add(self.sources[cut.read][cut.source])
        order = sorted(by_read.items(), key=lambda part: (part[0][0], -1 if part[0][1] is None else part[0][1]))
        return [Ablate(sorted(sources), reads=read, tokens=token) for (read, token), sources in order]

    def _options(self, asked: Asked) -> dict[str, Any]:
        """Return the arguments of a prediction that the functions of `attnres.inspect` share."""
        ids = self.encoder.encode(asked.text)[0]
        return {
            "input_ids": ids,
            "position": asked.token,
            "target": asked.target,
            "against": asked.against,
            "edits": self.edits(asked.cuts, asked.token + 1),
            "batch_size": max(1, SCORED // (asked.token + 1)),
        }


class _Watching(Trace):
    """A recording that also keeps the results of the last pass's reads."""

    def __init__(self, residual: Residual, *, tokens: bool) -> None:
        super().__init__(residual, tokens=tokens)
        self.vectors: dict[int, Tensor] = {}

    def on_read(self, read: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        super().on_read(read, h, weights, values)
        self.vectors[read] = h.detach()[0]
