"""The tokens of a corpus at which one source is most, or least, of one read."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText
from torch import nn

from attnres.errors import UserError, unknown
from attnres.files import write_json
from attnres.folders import refuse_other_file
from attnres.head import evaluating
from attnres.inspect import notebook
from attnres.inspect.colours import ink_on, place_of_size, signed_colour
from attnres.inspect.config import SearchConfig
from attnres.inspect.edits import choose_reads, source_and_read
from attnres.inspect.inspection import FIELD, By
from attnres.inspect.recording import find_residual, record
from attnres.inspect.subject import Model, Text, as_model, as_tokenizer, device_of, vocab_size
from attnres.inspect.survey import batches, check_documents, read_documents
from attnres.inspect.texts import batch_size_of, context_of, open_residual, text_of
from attnres.models.encoding import check_ids, pieces, token_in_front
from attnres.ops.devices import pick_device
from attnres.progress import counting, grid, say, wide
from attnres.text import counted, number, visible

CONTEXT = 60
"""Characters of text on either side of a token that is shown."""


APART = 12
"""Tokens between two that are shown, at least, and on either side of one whose numbers are shown."""
DRAWN = 512
"""Tokens drawn at random, of which those at the quantiles are shown."""
SAMPLED = (0.99, 0.9, 0.75, 0.5, 0.25, 0.1)
"""Quantiles at which a token is shown."""


@dataclass(frozen=True)
class Hit:
    """One token.

    Attributes:
        token: what it says; before, after: the text around it.
        contribution, weight: of the source in the read at this token.
        quantile: the share of the tokens looked at that have no larger number.
        name: the file that it is from, or "document 3". document: its number, from 0; position: of the token in it.
        around: (text, number) of the tokens next to it and itself, in order; `here` is its own place.
        window: the text that the model was given; the token begins at its character `at`.
    """

    token: str
    before: str
    after: str
    contribution: float
    weight: float
    quantile: float
    name: str
    document: int
    position: int
    around: list[tuple[str, float]]
    here: int
    window: str
    at: int


@dataclass(frozen=True, repr=False)
class Search(notebook.Result):
    """The tokens at which `source` is most (or `least`) of `read`, the first the most extreme, one of each context.

    Attributes:
        by: the number that they are ordered by. mean: of that number, over all `tokens` looked at.
        quantiles: the number below which a share of the tokens lies, by that share.
        samples: tokens at some of the quantiles, the largest first: what the number looks like where it is usual.
    """

    read: str
    source: str
    by: By
    least: bool
    mean: float
    tokens: int
    documents: int
    quantiles: dict[str, float]
    hits: list[Hit]
    samples: list[Hit]

    def _about(self) -> str:
        which = "least" if self.least else "most"
        return (
            f"{self.source} in {self.read}: {which} by {self.by} of {self.tokens:,} tokens, mean {number(self.mean, 2)}"
        )

    def _records(self) -> Iterator[dict[str, Any]]:
        return map(asdict, self.hits)

    def shade(self, value: float) -> str:
        """Return the colour of a number, on one scale for all that is shown."""
        every = [number for hit in (*self.hits, *self.samples) for _, number in hit.around]
        return signed_colour(place_of_size(value, notebook.end_of_scale(every)))

    def spread(self) -> str:
        """Return the quantiles as a sentence."""
        parts = [f"{float(share):.0%} {number(value, 2)}" for share, value in self.quantiles.items()]
        return f"{self.by} below which a share of tokens lies: {', '.join(parts)}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{number(getattr(hit, self.by), 2)}</td><td>{hit.quantile:.1%}</td><td>{escape(hit.name)}</td>"
            f'<td style="text-align:left;font-family:monospace;overflow-wrap:anywhere">{self._coloured(hit)}</td></tr>'
            for hit in (*self.hits, *self.samples)
        )
        head = "".join(f"<th>{title}</th>" for title in (self.by, "above", "where", "in its text, coloured by it"))
        about = f"{escape(repr(self))}; {escape(self.spread())}"
        return f"<table><caption>{about}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _coloured(self, hit: Hit) -> str:
        parts = []
        for place, (text, value) in enumerate(hit.around):
            colour, border = self.shade(value), "outline:1px solid;" * (place == hit.here)
            look = f"{border}background:{colour};color:{ink_on(colour)}"
            parts.append(f'<span style="{look}" title="{number(value, 2)}">{escape(visible(text))}</span>')
        return "".join(parts)


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
    `source` is most of `read`, one of those that stand close together or in the same words.

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
    device, known = device_of(model), vocab_size(model)
    seen: list[_Seen] = []
    for batch in batches(_windows(tokenizer, documents, context - len(before), limit), batch_size):
        ids = torch.tensor(np.stack([np.concatenate([before, window.ids]) for window in batch]), dtype=torch.long)
        check_ids(ids, known)
        rows = (row[:, len(before) :].float().cpu() for row in _of_edge(model, ids.to(device), index, place))
        seen += map(_Seen, batch, *rows)
        if on_tokens is not None:
            on_tokens(ids.numel())
    if not seen:
        raise UserError("there is no text to search: the documents are empty")
    every = torch.cat([one.contributions if by == "contribution" else one.weights for one in seen])
    ends = np.cumsum([len(one.weights) for one in seen])

    def place_of(number: int) -> tuple[_Seen, int]:
        """Return the window of a token, counted over all, and its place in it."""
        which = int(np.searchsorted(ends, number, side="right"))
        return seen[which], int(number - ends[which] + len(seen[which].weights))

    ordered = every.sort().values
    shares = {f"{share:g}": _below(ordered, share) for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)}
    best = _apart(map(place_of, every.argsort(descending=not least, stable=True).tolist()), top)
    drawn = random.Random(0).sample(range(len(every)), min(DRAWN, len(every)))
    quantiles = (_below(ordered, share) for share in SAMPLED)
    sample = [place_of(min(drawn, key=lambda i: abs(float(every[i]) - value))) for value in quantiles]
    hits, samples = ([_hit(tokenizer, by, ordered, *one) for one in chosen] for chosen in (best, sample))
    return Search(
        layout[index].name,
        layout[index].sources[place].name,
        by,
        least,
        float(ordered.double().mean()),
        len(ordered),
        len({one.window.document for one in seen}),
        shares,
        hits,
        samples,
    )


def _below(ordered: torch.Tensor, share: float) -> float:
    """Return the number that a share of the ordered ones does not exceed."""
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


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
    name: str
    text: str
    start: int
    ids: np.ndarray
    offsets: np.ndarray

    def words(self, place: int) -> tuple[int, ...]:
        """Return the ids of a token and of its neighbours, its context."""
        return tuple(self.ids[max(0, place - 2) : place + 3].tolist())


class _Seen(NamedTuple):
    """A window with the weights and contributions of its tokens."""

    window: _Window
    weights: torch.Tensor
    contributions: torch.Tensor


def _apart(places: Iterable[tuple[_Seen, int]], count: int) -> list[tuple[_Seen, int]]:
    """Return the first `count` tokens that are more than `APART` tokens from one another in their window, and stand in
    different words."""
    best: list[tuple[_Seen, int]] = []
    taken: dict[tuple[int, int], list[int]] = {}
    words = set[tuple[int, ...]]()
    for one, t in places:
        window = one.window
        beside = taken.setdefault((window.document, window.start), [])
        if window.words(t) not in words and all(abs(t - other) > APART for other in beside):
            best.append((one, t))
            beside.append(t)
            words.add(window.words(t))
            if len(best) == count:
                break
    return best


def _windows(tokenizer: Any, documents: Iterable[Text], room: int, limit: int | None) -> Iterator[_Window]:
    for place, (text, encoded) in enumerate(read_documents(tokenizer, documents, limit)):
        ids, offsets = encoded.ids, np.array(encoded.offsets, dtype=np.int32).reshape(-1, 2)
        for start in range(0, len(ids), room):
            part = slice(start, start + room)
            words, name = text if isinstance(text, str) else "", getattr(text, "name", f"document {place}")
            yield _Window(place, name, words, start, ids[part], offsets[: len(ids)][part])


def _of_edge(model: Any, ids: torch.Tensor, index: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and contributions (B, T) of one edge."""
    with evaluating(model), torch.no_grad(), record(model, tokens=True) as trace:
        getattr(model, "base_model", model)(input_ids=ids, use_cache=False)  # nobody looks at the logits
    if not trace.token_weights:
        raise UserError(f"residual '{trace.residual}' mixes its sources by no weights: there is nothing to search by")
    return trace.token_weights[index][..., place], trace.token_contributions[index][..., place]


def _hit(tokenizer: Any, by: By, ordered: torch.Tensor, seen: _Seen, place: int) -> Hit:
    """Return a token with its text around it; `ordered`: the numbers of all tokens."""
    window, weights, contributions = seen
    ids, offsets = window.ids.tolist(), window.offsets.tolist()
    words = [f" {token}" for token in ids] if tokenizer is None else pieces(tokenizer, ids, window.text, offsets)
    if offsets:
        first, last = offsets[0][0], offsets[-1][1]
        text, (start, end) = window.text[first:last], offsets[place]
        at, token, rest = start - first, window.text[start:end], window.text[end:last]
    else:
        text, at, token, rest = "".join(words), len("".join(words[:place])), words[place], "".join(words[place + 1 :])
    values = contributions if by == "contribution" else weights
    near = slice(max(0, place - APART), place + APART + 1)
    return Hit(
        token,
        text[:at][-CONTEXT:],
        rest[:CONTEXT],
        float(contributions[place]),
        float(weights[place]),
        float(torch.searchsorted(ordered, values[place], right=True)) / len(ordered),
        window.name,
        window.document,
        window.start + place,
        list(zip(words[near], values[near].tolist(), strict=True)),
        place - near.start,
        text,
        at,
    )


def find_tokens(config: SearchConfig, console: Console | None = None) -> Search:
    """Search for tokens and print the hits.

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
        f"{counted(result.documents, 'document')}, mean {number(result.mean, 2)}",
    )
    say(console, result.spread())
    console.print(_listing(result, result.hits))
    say(console, f"Tokens at the quantiles {', '.join(f'{share:.0%}' for share in SAMPLED)}, drawn at random:")
    console.print(_listing(result, result.samples))
    if out is not None:
        write_json(out, {"format": 1, "model": checkpoint.title(), "text": text.name} | result.to_dict())
        say(console, f"wrote {config.out}")
    return result


def _listing(result: Search, hits: Iterable[Hit]) -> Table:
    """Return a row a token: its numbers, where it is, and its text with each token on the colour of its number."""
    table = grid(right=("contribution", "weight", "above"))
    table.add_column("where")
    table.add_column("in its text", no_wrap=True)
    for hit in hits:
        line = RichText()
        for place, (text, value) in enumerate(hit.around):
            colour, word = result.shade(value), visible(text)
            look = f"{ink_on(colour)} on {colour}"
            line.append(f"[{word}]" if place == hit.here else word, f"bold {look}" if place == hit.here else look)
        table.add_row(
            number(hit.contribution, 2),
            number(hit.weight, 2),
            f"{hit.quantile:.1%}",
            f"{hit.name}:{hit.position}",
            line,
        )
    return table
