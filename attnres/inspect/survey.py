"""Documents streamed through a model, with sums over their tokens, in the memory of a few batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.head import evaluating, next_token_losses
from attnres.inspect import notebook
from attnres.inspect.edits import intervene
from attnres.inspect.effects import Edits, several
from attnres.inspect.recording import Trace, record
from attnres.inspect.subject import Model, Text, as_model, as_tokenizer, device_of, prompt_ids, vocab_size
from attnres.models.encoding import check_ids, encode_document
from attnres.stats import Ratio, RatioSums, ratio
from attnres.text import with_error

BINS = 500
"""Of the histogram of each source's shares: quantiles are right to 1 / BINS."""
HIGH = 0.99
"""The quantile over tokens that is kept beside the mean and the largest."""
WAITING = 16
"""Batches of windows that wait for others of their length: what is kept of a corpus of short documents."""


class _WithIds(Protocol):
    @property
    def ids(self) -> Any: ...


_Some = TypeVar("_Some", bound=_WithIds)


class Encoded(NamedTuple):
    """A text as tokens: ids (T,), where in the text each lies, and a label each (-1 is none)."""

    ids: np.ndarray
    offsets: list[tuple[int, int]]
    labels: np.ndarray


class _Window(NamedTuple):
    document: int
    ids: np.ndarray
    labels: np.ndarray


class _Open:
    """Sums over the windows of a document that has not been run to its end."""

    def __init__(self, labels: int) -> None:
        self.windows, self.ended = 0, False
        self.losses = np.zeros((1 + labels, 2))
        self.tokens: Any = 0.0
        self.sums: Any = 0.0


@dataclass
class Survey:
    """Sums over documents that ran through a model.

    Attributes:
        trace: the recording.
        documents, windows: how many were run.
        loss: mean over predicted tokens in nats, and its standard error over documents; NaN without.
        by_document: (documents, 1 + labels, 2) predicted tokens and the sum of their losses, in the order of the
            documents: of all tokens, then of those that follow a token of each label.
        high, largest: for each read and source the share |weight| / sum |weights| that a fraction `HIGH` of tokens are
            below, and the largest that any token had.
        by_label: for each label the mean weights of all reads, one after the other, with errors over documents.
        contributions_by_label: the same of what sources are of reads (`Trace.contribution`).
    """

    trace: Trace
    documents: int
    windows: int
    loss: Ratio
    by_document: np.ndarray
    high: list[list[float]]
    largest: list[list[float]]
    by_label: list[Ratio]
    contributions_by_label: list[Ratio]

    def rows(self, values: np.ndarray) -> list[list[float]]:
        """Numbers of all reads, cut into one row a read."""
        ends = np.cumsum([len(names) for names in self.trace.sources])
        return [part.tolist() for part in np.split(values, ends[:-1])]


def check_documents(documents: object) -> None:
    """Refuse with a UserError one text for documents: its characters would be them."""
    if isinstance(documents, str):
        raise UserError("documents is one text: expected several, or [text]")


def encode(tokenizer: Any, text: Text) -> Encoded:
    """Return the tokens of a text without those in front, labelled -1; token ids are taken as they are.

    Raises:
        UserError: as `encode_document`; letters without a tokenizer.
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise UserError("text was given in letters without a tokenizer: give one, or token ids")
        ids, offsets = encode_document(as_tokenizer(tokenizer), text)
    else:
        ids, offsets = torch.as_tensor(text).flatten().tolist(), []
    return Encoded(np.asarray(ids, dtype=np.int64), offsets, np.full(len(ids), -1))


def read_documents(
    tokenizer: Any, documents: Iterable[Text], limit: int | None = None
) -> Iterator[tuple[Text, Encoded]]:
    """Yield documents and their tokens, until `limit` tokens are read. Raises UserError as `encode`."""
    left = limit
    for text in documents:
        encoded = encode(tokenizer, text)
        yield text, encoded._replace(ids=encoded.ids[:left], labels=encoded.labels[:left])
        if left is not None and (left := left - len(encoded.ids)) <= 0:
            return


def survey(
    model: Model,
    documents: Iterable[Encoded],
    *,
    context: int,
    batch_size: int = 8,
    labels: int = 0,
    before: Sequence[int] = (),
    on_tokens: Callable[[int], None] | None = None,
) -> Survey:
    """Run documents through the model in windows of `context` tokens, each window seen alone.

    Windows of one length share a batch, so that there is no padding, which would be recorded as tokens.

    Args:
        labels: how many labels the documents' tokens have.
        before: tokens in front of every window, without label.
        on_tokens: called with the number of tokens of each finished batch.

    Raises:
        UserError: no residual of this package; ids past the embedding; logits that are NaN or infinite; no batch size.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}: expected at least 1")
    model, sums = as_model(model), _Sums(labels)
    device, rows = device_of(model), vocab_size(model)
    with evaluating(model), torch.no_grad(), record(model, tokens=True) as trace:
        for batch in batches(sums.opened(_windows(documents, context - len(before))), batch_size):
            ids = np.stack([np.concatenate([before, window.ids]) for window in batch]).astype(np.int64)
            check_ids(ids, rows)
            losses = next_token_losses(model, torch.from_numpy(ids).to(device)).double().cpu().numpy()
            if not np.isfinite(losses).all():
                raise UserError(
                    "the model's logits are NaN or infinite: its weights are broken or its dtype too narrow"
                )
            sums.add(batch, trace, losses, len(before))
            if on_tokens is not None:
                on_tokens(ids.size)
    return sums.survey(trace)


def loss_change(before: Survey, after: Survey, place: int = 0) -> Ratio:
    """Return how much higher the mean loss of the same documents is in `after`, in nats per token, document by
    document.

    `place`: of `by_document`, 0 for all tokens and k + 1 for those that follow a token of label k.
    """
    tokens, losses = after.by_document[:, place].T
    return ratio(losses - before.by_document[:, place, 1], tokens)


@dataclass(frozen=True, repr=False)
class CorpusEffect(notebook.Result):
    """The effect of edits on the loss over documents, in nats per token.

    Attributes:
        before, after: mean losses.
        change: after - before, with its standard error over documents.
        labels: the same after tokens of each label, by its name.
    """

    before: float
    after: float
    change: Ratio
    labels: dict[str, Ratio]

    def _about(self) -> str:
        return f"{with_error(self.change.mean, self.change.error, signed=True)} nats per token"

    def _records(self) -> Iterator[dict[str, Any]]:
        for name, one in {"all": self.change, **self.labels}.items():
            yield {"label": name, "change": one.mean, "error": one.error, "tokens": int(one.total)}

    def to_dict(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "change": list(self._records())}


def corpus_effect(
    model: Model,
    documents: Iterable[Tensor | Sequence[int]],
    edits: Edits,
    *,
    batch_size: int = 8,
    labels: Callable[[Tensor], Sequence[int] | Tensor] | None = None,
    label_names: Sequence[str] = (),
) -> CorpusEffect:
    """Survey documents (T,) of token ids with and without `edits`.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> corpus_effect(model, [torch.arange(9)], attnres.inspect.Ablate("embedding", reads="output"))
    CorpusEffect(... nats per token)

    Args:
        labels: a function of a document's ids (T,) that gives each token a label: an index of `label_names`, or -1 for
            none. The loss of token t + 1 counts for the label of token t.

    Raises:
        UserError: no document has two tokens; one is longer than the context or has ids outside the vocabulary; a label
            that has no name; as `intervene` and `survey`.
    """
    model, encoded = as_model(model), []
    for document in documents:
        ids = prompt_ids(model, document)[0].cpu()
        marks = np.full(len(ids), -1) if labels is None else np.asarray(labels(ids))
        if len(marks) != len(ids) or marks.max() >= len(label_names):
            raise UserError(
                f"{len(marks)} labels up to {marks.max()} for {len(ids)} tokens and {len(label_names)} names: give one "
                "label a token, below the number of label_names"
            )
        encoded.append(Encoded(ids.numpy(), [], marks))
    context = max((len(document.ids) for document in encoded), default=0)
    if context < 2:
        raise UserError("no document has two tokens: an edit's effect on the loss needs at least one prediction")
    options: dict[str, Any] = {"context": context, "batch_size": batch_size, "labels": len(label_names)}
    plain = survey(model, encoded, **options)
    with intervene(model, *several(edits)):
        edited = survey(model, encoded, **options)
    return CorpusEffect(
        before=plain.loss.mean,
        after=edited.loss.mean,
        change=loss_change(plain, edited),
        labels={name: loss_change(plain, edited, 1 + k) for k, name in enumerate(label_names)},
    )


def _windows(documents: Iterable[Encoded], room: int) -> Iterator[_Window | None]:
    """Yield windows of every document, and None where one ends."""
    for number, document in enumerate(documents):
        for start in range(0, len(document.ids), room):
            end = start + room
            yield _Window(number, document.ids[start:end], document.labels[start:end])
        yield None


def batches(windows: Iterable[_Some], size: int) -> Iterator[list[_Some]]:
    """Yield windows of equal length together, in memory bounded by `WAITING` batches."""
    waiting: dict[int, list[_Some]] = {}
    for window in windows:
        group = waiting.setdefault(len(window.ids), [])
        group.append(window)
        if len(group) == size:
            yield waiting.pop(len(window.ids))
        elif sum(map(len, waiting.values())) >= WAITING * size:
            yield waiting.pop(max(waiting, key=lambda length: len(waiting[length])))
    yield from waiting.values()


def _shares(weights: Tensor) -> Tensor:
    """Return |weights| over their sum; zero where all weights are zero."""
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)


class _Sums:
    """Sums by document while it runs, then by label over documents."""

    def __init__(self, labels: int) -> None:
        self.labels = labels
        self.open: dict[int, _Open] = {}
        self.documents = self.windows = 0
        self.losses: dict[int, np.ndarray] = {}  # (1 + labels, 2) of each document
        self.largest: Tensor | None = None
        self.histogram: Tensor | None = None  # (sources of all reads, BINS)
        self.sums: RatioSums | None = None  # of weights, then of contributions

    def opened(self, windows: Iterable[_Window | None]) -> Iterator[_Window]:
        """Hands windows on, and notes which documents they belong to and where these end."""
        last = None
        for window in windows:
            if window is None:
                if last is not None:
                    self.open[last].ended = True
                    self._close(last)
                last = None
                continue
            last = window.document
            self.open.setdefault(last, _Open(self.labels)).windows += 1
            yield window

    def add(self, batch: list[_Window], trace: Trace, losses: np.ndarray, skip: int) -> None:
        """The pass over `batch`, of whose tokens the first `skip` have no label."""
        self.windows += len(batch)
        for window, row in zip(batch, losses, strict=True):
            document = self.open[window.document]
            document.windows -= 1
            document.losses[0] += len(row), row.sum()
            marks, row = window.labels[:-1], row[skip:]
            for label in range(self.labels):
                document.losses[1 + label] += (marks == label).sum(), row[marks == label].sum()
        if trace.token_weights:
            shares = [_shares(row) for row in trace.token_weights]
            self._spread(torch.cat(shares, -1).flatten(0, 1))
            if self.labels:  # (B, T, twice the sources of all reads)
                self._by_label(batch, torch.cat([*trace.token_weights, *trace.token_contributions], -1)[:, skip:])
        for number in {window.document for window in batch}:
            self._close(number)

    def _spread(self, shares: Tensor) -> None:
        """shares (tokens, sources of all reads)."""
        if self.largest is None or self.histogram is None:
            self.largest = shares.new_zeros(shares.shape[1])
            self.histogram = torch.zeros(shares.shape[1], BINS, dtype=torch.long)
        self.largest = torch.maximum(self.largest, shares.amax(0))
        bins = (shares * BINS).long().clamp_(max=BINS - 1) + torch.arange(shares.shape[1]) * BINS
        self.histogram += torch.bincount(bins.flatten(), minlength=self.histogram.numel()).view_as(self.histogram)

    def _by_label(self, batch: list[_Window], values: Tensor) -> None:
        if self.sums is None:
            self.sums = RatioSums(self.labels, values.shape[-1])
        for window, row in zip(batch, values, strict=True):
            labels = torch.from_numpy(window.labels)
            known = labels >= 0
            tokens = torch.bincount(labels[known], minlength=self.labels)
            sums = torch.zeros(self.labels, row.shape[1], dtype=torch.float64)
            sums.index_add_(0, labels[known], row[known].double())
            document = self.open[window.document]
            document.tokens = document.tokens + tokens.numpy().astype(float)
            document.sums = document.sums + sums.numpy()

    def _close(self, number: int) -> None:
        """Count a document whose last window has run."""
        document = self.open.get(number)
        if document is None or not document.ended or document.windows:
            return
        del self.open[number]
        self.documents += 1
        self.losses[number] = document.losses
        if self.sums is not None and not np.isscalar(document.tokens):
            self.sums.add(document.tokens, document.sums)

    def survey(self, trace: Trace) -> Survey:
        empty: list[list[float]] = [[] for _ in trace.sources]
        ratios = [] if self.sums is None else [self.sums.ratio(label) for label in range(self.labels)]
        parts = [(one, np.split(one.mean, 2), np.split(one.error, 2)) for one in ratios]  # weights, contributions
        halves = [[one._replace(mean=means[i], error=errors[i]) for one, means, errors in parts] for i in (0, 1)]
        losses = np.array([self.losses[number] for number in sorted(self.losses)]).reshape(-1, 1 + self.labels, 2)
        loss = ratio(losses[:, 0, 1], losses[:, 0, 0])
        result = Survey(trace, self.documents, self.windows, loss, losses, empty, empty, *halves)
        if self.largest is not None and self.histogram is not None:
            below = self.histogram.cumsum(1) / self.histogram.sum(1, keepdim=True)
            high = ((below < HIGH).sum(1) + 1) / BINS  # the upper end of the bin that holds it
            result.high = result.rows(torch.minimum(high.double(), self.largest.double()).numpy())
            result.largest = result.rows(self.largest.double().numpy())
        return result
