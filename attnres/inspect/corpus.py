"""The tokens of a corpus at which one source is most, or least, of one read."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from attnres.device import pick_device
from attnres.errors import UserError, unknown
from attnres.files import write_json
from attnres.folders import refuse_other_file
from attnres.head import evaluating
from attnres.inspect import notebook
from attnres.inspect.config import SearchConfig
from attnres.inspect.edits import choose_reads, source_and_read
from attnres.inspect.inspection import FIELD, By
from attnres.inspect.recording import find_residual, record
from attnres.inspect.subject import Model, Text, as_model, as_tokenizer, device_of, vocab_size
from attnres.inspect.survey import batches, check_documents, encode
from attnres.inspect.texts import batch_size_of, context_of, open_residual, text_of
from attnres.models.encoding import check_ids, pieces, spelled, token_in_front
from attnres.progress import counting, grid, say, wide
from attnres.text import counted, short

if TYPE_CHECKING:
    pass


CONTEXT = 60
"""Characters of text on either side of a token that is shown."""


@dataclass(frozen=True)
class Hit:
    """One token.

    Attributes:
        token: what it says; before, after: the text around it.
        contribution, weight: of the source in the read at this token.
        document: its number, from 0; position: of the token in it.
        window: the text that the model was given; the token begins at its character `at`.
    """

    token: str
    before: str
    after: str
    contribution: float
    weight: float
    document: int
    position: int
    window: str
    at: int


@dataclass(frozen=True, repr=False)
class Search(notebook.Result):
    """The tokens at which `source` is most (or `least`) of `read`, the first the most extreme.

    Attributes:
        by: the number that they are ordered by. mean: of that number, over all `tokens` looked at.
    """

    read: str
    source: str
    by: By
    least: bool
    mean: float
    tokens: int
    documents: int
    hits: list[Hit]

    def _about(self) -> str:
        which = "least" if self.least else "most"
        return f"{self.source} in {self.read}: {which} by {self.by} of {self.tokens:,} tokens, mean {short(self.mean)}"

    def _records(self) -> Iterator[dict[str, Any]]:
        return map(asdict, self.hits)

    def _repr_html_(self) -> str:
        rows = [(short(getattr(hit, self.by)), hit.before, hit.token, hit.after) for hit in self.hits]
        return notebook.table(repr(self), (self.by, "before", "token", "after"), rows)


def search(
    model: Model,
    tokenizer: Any,
    documents: Iterable[Text],
    source: str,
    read: str | int,
    *,
    context: int,
    by: By = "contribution",
    least: bool = False,
    top: int = 20,
    limit: int | None = None,
    batch_size: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> Search:
    """Look at every token of documents, in windows of `context` tokens that are seen alone, and keep the `top` at which
    `source` is most of `read`.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> search(model, None, [range(50)], "embedding", "mlp 0", context=32, top=3)
    Search(...)

    Args:
        tokenizer: None where documents are token ids, which then stand for what tokens say.
        source, read: one of each, as `source_names` has them; a read may be its number.
        by: the number that tokens are ordered by; least: the smallest instead of the largest.
        limit: stop after so many tokens. batch_size: windows in a forward pass.
        on_tokens: called with the number of tokens of each pass.

    Raises:
        UserError: no such read, or it lacks the source; no text, or one alone; ids past the embedding; a number,
            context or count that is none.
    """
    check_documents(documents)
    model = as_model(model)
    tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
    if by not in FIELD:
        raise unknown("number to search by", str(by), FIELD)
    index, place = find_edge(model, source, read)
    layout = find_residual(model).layout()
    before = () if tokenizer is None else token_in_front(tokenizer)
    for name, value, fewest in (("context", context, len(before) + 1), ("top", top, 1), ("batch_size", batch_size, 1)):
        if value < fewest:
            raise UserError(f"{name} is {value}: expected {fewest} or more")
    best = _Best(top)
    total, tokens, numbers = 0.0, 0, set[int]()
    device, known = device_of(model), vocab_size(model)
    for batch in batches(_windows(tokenizer, documents, context - len(before), limit), batch_size):
        ids = torch.tensor([[*before, *window.ids] for window in batch])
        check_ids(ids, known)
        weights, contributions = _of_edge(model, ids.to(device), index, place)
        for window, *rows in zip(batch, weights[:, len(before) :], contributions[:, len(before) :], strict=True):
            numbers.add(window.document)
            values = rows[1] if by == "contribution" else rows[0]
            total, tokens = total + float(values.sum()), tokens + len(values)
            best.add(window, -values if least else values, *rows)
        if on_tokens is not None:
            on_tokens(ids.numel())
    if not tokens:
        raise UserError("there is no text to search: the documents are empty")
    source_name = layout[index].sources[place].name
    hits = [_hit(tokenizer, *entry) for entry in best.sorted()]
    return Search(layout[index].name, source_name, by, least, total / tokens, tokens, len(numbers), hits)


def find_edge(model: nn.Module, source: str, read: str | int) -> tuple[int, int]:
    """Return the numbers of one read and of one of its sources.

    Raises:
        UserError: no such read, several of them, or none of its sources is called so.
    """
    layout = find_residual(model).layout()
    numbers = choose_reads(read, [one.name for one in layout])
    if len(numbers) > 1:
        raise UserError(f"'{read}' names {len(numbers)} reads: name one, such as '{layout[numbers[0]].name}'")
    names = [one.name for one in layout[numbers[0]].sources]
    if source not in names:
        raise unknown(f"source of {layout[numbers[0]].name}", source, names)
    return numbers[0], names.index(source)


class _Window(NamedTuple):
    """Tokens `start` .. of a document: their ids and offsets in its text."""

    document: int
    text: str
    start: int
    ids: list[int]
    offsets: list[tuple[int, int]]


class _Best:
    """The largest `count` values so far, each with where it stands."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._heap: list[tuple[float, int, int, _Window, float, float]] = []
        self._order = 0

    def add(self, window: _Window, values: torch.Tensor, weights: torch.Tensor, contributions: torch.Tensor) -> None:
        for t in values.topk(min(self.count, len(values))).indices.tolist():
            self._order -= 1  # among equals the first stays
            entry = (float(values[t]), self._order, t, window, float(weights[t]), float(contributions[t]))
            if len(self._heap) < self.count:
                heapq.heappush(self._heap, entry)
            elif entry > self._heap[0]:
                heapq.heapreplace(self._heap, entry)
            else:
                return

    def sorted(self) -> Iterator[tuple[_Window, int, float, float]]:
        for _, _, t, window, weight, contribution in sorted(self._heap, reverse=True):
            yield window, t, weight, contribution


def _windows(tokenizer: Any, documents: Iterable[Text], room: int, limit: int | None) -> Iterator[_Window]:
    left = limit
    for number, text in enumerate(documents):
        encoded = encode(tokenizer, text)
        ids = encoded.ids.tolist()[:left]
        for start in range(0, len(ids), room):
            part = slice(start, start + room)
            yield _Window(
                number, text if isinstance(text, str) else "", start, ids[part], encoded.offsets[: len(ids)][part]
            )
        if left is not None and not (left := left - len(ids)):
            return


def _of_edge(model: Any, ids: torch.Tensor, index: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and contributions (B, T) of one edge."""
    with evaluating(model), torch.no_grad(), record(model, tokens=True) as trace:
        getattr(model, "base_model", model)(input_ids=ids, use_cache=False)  # nobody looks at the logits
    if not trace.token_weights:
        raise UserError(f"residual '{trace.residual}' mixes its sources by no weights: there is nothing to search by")
    return trace.token_weights[index][..., place], trace.token_contributions[index][..., place]


def _hit(tokenizer: Any, window: _Window, place: int, weight: float, contribution: float) -> Hit:
    if tokenizer is None:
        words = [f" {token}" for token in window.ids]
    else:
        words = pieces(tokenizer, window.ids, window.text, window.offsets)
    if window.offsets:
        first, last = window.offsets[0][0], window.offsets[-1][1]
        text, (start, end) = window.text[first:last], window.offsets[place]
        at, token, rest = start - first, window.text[start:end], window.text[end:last]
    else:
        text, at, token, rest = "".join(words), len("".join(words[:place])), words[place], "".join(words[place + 1 :])
    before, after = text[:at][-CONTEXT:], rest[:CONTEXT]
    return Hit(token, before, after, contribution, weight, window.document, window.start + place, text, at)


SHOWN = 30
"""Characters of the text on either side of a token."""


def find_tokens(config: SearchConfig, console: Console | None = None) -> Search:
    """Search and print what is found.

    Raises:
        UserError: no model with a residual of this package, no such edge, no text, options that do not fit, or `out`
            is the place of something else.
    """
    console = wide(console)
    out = None if config.out is None else refuse_other_file(config.out, {"model", "text", "read", "hits"})
    checkpoint, _ = open_residual(config, config.model)
    text = text_of(config, checkpoint.run)
    context = context_of(config, checkpoint)
    source, read = source_and_read(config.edge)
    if read is None:
        raise UserError(f"'{config.edge}' names a source and no read: expected SOURCE@READ, such as embedding@mlp3")
    batch_size = batch_size_of(config.batch_tokens, checkpoint, context)
    model = checkpoint.load(config.dtype, str(pick_device(config.device)))
    find_edge(model, source, read)  # says what is wrong before the text is read
    with counting("searching", config.limit, "tokens", shown=config.progress) as on_tokens:
        result = search(
            model,
            checkpoint.tokenizer,
            text.read(),
            source,
            read,
            context=context,
            by=config.by,
            least=config.least,
            top=config.top,
            limit=config.limit,
            batch_size=batch_size,
            on_tokens=on_tokens,
        )
    say(
        console,
        f"{checkpoint.title()}: where {result.source} is {'least' if result.least else 'most'} of the read of "
        f"{result.read}, by {result.by}; {text.name}, {counted(result.tokens, 'token')} of "
        f"{counted(result.documents, 'document')}, mean {short(result.mean)}",
    )
    table = grid(right=("contribution", "weight", "document", "token", "before"))
    for title in ("it", "after"):
        table.add_column(title)
    for hit in result.hits:
        before, after = spelled(hit.before)[-SHOWN:], spelled(hit.after)[:SHOWN]
        numbers = (short(hit.contribution), short(hit.weight), str(hit.document), str(hit.position))
        table.add_row(*numbers, before, f"[{spelled(hit.token)}]", after)
    console.print(table)
    if out is not None:
        write_json(out, {"format": 1, "model": checkpoint.title(), "text": text.name} | result.to_dict())
        say(console, f"wrote {config.out}")
    return result
