"""The description of reads and mechanisms as data, so that no other code has to parse names."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

_SHORT = {"embedding": "emb", "attention": "a", "mlp": "m", "block": "b", "state": "s", "partial": "part"}
_SHORT |= {"stream": "str", "null": "0", "layer": "l", "middle": "mid"}
_MEANING = {"partial": "the block in progress", "stream": "the running sum", "null": "nothing: a source of zeros"}
_MEANING |= {"middle": "the sum of the layers between"}
_WORDS = {"mlp": "MLP", "partial": "partial sum"}
_OPEN = ("partial", "stream", "null")
"""Kinds whose sources are unfinished or zero, for files of earlier versions, which only name sources."""


class Source(NamedTuple):
    """One source of a read.

    Attributes:
        kind: embedding, the kind of a sublayer (attention, mlp), block, state (a stream's snapshot), partial (the block
            in progress), stream (the running sum), null (zeros), or a kind that the mechanism defines.
        number: its number among sources of the kind; None if there is only one.
        span: the outputs that it sums, numbered as columns of the mixing matrix: 0 is the embedding, i the output of
            sublayer i-1. A step above 1 selects sublayers of one kind. None if it is no such sum.
        open: whether it still changes between reads (partial, stream), or is zero (null).
        after: number of an earlier read that it starts from: the source is that read's result plus the outputs of
            `span`.
    """

    kind: str
    number: int | None = None
    span: range | None = None
    open: bool = False
    after: int | None = None

    @property
    def name(self) -> str:
        """Return the name that users type: "block 3", "embedding"."""
        return self.kind if self.number is None else f"{self.kind} {self.number}"

    @property
    def label(self) -> str:
        """Return the name in texts: "L3 MLP", "block 3", "embedding"."""
        if self.number is None:
            return _WORDS.get(self.kind, self.kind)
        sums = self.kind == "block" or self.kind.endswith("_sum")
        single = self.kind in ("attention", "mlp") or (self.span is not None and len(self.span) == 1 and not sums)
        return f"L{self.number} {_WORDS.get(self.kind, self.kind)}" if single else self.name

    @property
    def meaning(self) -> str:
        """Return the kind in words: "the block in progress"."""
        return _MEANING.get(self.kind, self.kind)

    @property
    def short_kind(self) -> str:
        """Return the abbreviated kind for cells and axes: "b", "emb"."""
        return _SHORT.get(self.kind, self.kind[:4])

    @property
    def short(self) -> str:
        """Return the abbreviated name for cells and axes: "b3", "emb"."""
        return self.short_kind + ("" if self.number is None else str(self.number))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the inverse of `from_json`."""
        values: dict[str, Any] = {"kind": self.kind, "number": self.number, "open": self.open}
        step = [] if self.span is None or self.span.step == 1 else [self.span.step]
        values["span"] = None if self.span is None else [self.span.start, self.span.stop, *step]
        return values | ({} if self.after is None else {"after": self.after})

    @classmethod
    def from_json(cls, value: Any) -> "Source":
        """Make a source from the values of `to_json`; a bare name, as earlier versions wrote, gives a source without a
        span.

        >>> Source.from_json("block 3").short
        'b3'

        Raises:
            ValueError, TypeError, KeyError, AttributeError: another value.
        """
        if isinstance(value, str):
            kind, _, number = value.partition(" ")
            return cls(kind, int(number) if number else None, None, kind in _OPEN)
        span = value.get("span")
        number, after = value.get("number"), value.get("after")
        return cls(
            str(value["kind"]),
            None if number is None else int(number),
            None if span is None else range(*map(int, span)),
            bool(value["open"]),
            None if after is None else int(after),
        )


EMBEDDING = Source("embedding", None, range(1))


class Read(NamedTuple):
    """One read of a network, and what it mixes.

    Attributes:
        kind: kind of the sublayer it feeds (attention, mlp), or output.
        number: number of the layer; None for the output's read.
        sources: in the order of its weights; empty if the read is no weighted sum of sources.
        into: its purpose if the sublayer has several reads: a projection (query, key, value), or the stream that the
            sublayer's output is added to.
    """

    kind: str
    number: int | None
    sources: tuple[Source, ...]
    into: str | None = None

    @property
    def name(self) -> str:
        """Return the name that users type: "mlp 3", "output", "attention 2 key"."""
        parts = (self.kind, self.number, self.into)
        return " ".join(str(part) for part in parts if part is not None)

    @property
    def label(self) -> str:
        """Return the name in texts: "L3 MLP", "output", "L2 attention key"."""
        parts = (None if self.number is None else f"L{self.number}", _WORDS.get(self.kind, self.kind), self.into)
        return " ".join(part for part in parts if part is not None)

    @property
    def sublayer(self) -> str:
        """Return the sublayer's name, which several reads may share: "mlp 3", "output", "attention 2"."""
        return self._replace(into=None).name

    @classmethod
    def named(cls, name: str) -> "Read":
        """Return the read of that name, without sources.

        >>> Read.named("attention 2 key")
        Read(kind='attention', number=2, sources=(), into='key')

        Raises:
            ValueError: a name that no read has.
        """
        kind, number, into, *others = [*name.split(" "), None, None]
        if [part for part in others if part is not None]:
            raise ValueError(f"'{name}' is no name of a read")
        return cls(str(kind), None if number is None else int(number), (), into)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the inverse of `from_json`."""
        sources = [source.to_json() for source in self.sources]
        return {"kind": self.kind, "number": self.number, "into": self.into, "sources": sources}

    @classmethod
    def from_json(cls, value: Any) -> "Read":
        """Make a read from the values of `to_json`.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: another value.
        """
        number, into = value["number"], value["into"]
        sources = tuple(Source.from_json(source) for source in value["sources"])
        return cls(
            str(value["kind"]), None if number is None else int(number), sources, None if into is None else str(into)
        )


def layout_of(routing: Mapping[str, Any]) -> tuple[Read, ...]:
    """Return the reads of a recording's `routing`, including one of an earlier version, which has only names.

    >>> layout_of({"reads": ["output"], "sources": [["embedding", "partial"]]})[0].sources[1].open
    True

    Raises:
        ValueError, TypeError, KeyError, AttributeError: another value.
    """
    if "layout" in routing:
        return tuple(Read.from_json(read) for read in routing["layout"])
    pairs = zip(routing["reads"], routing["sources"], strict=True)
    return tuple(Read.named(read)._replace(sources=tuple(map(Source.from_json, names))) for read, names in pairs)


def depths(layout: Sequence[Read]) -> list[int]:
    """Return how many sublayers have written before each read.

    >>> depths([Read.named(name) for name in ("attention 0 query", "attention 0 value", "mlp 0", "output")])
    [0, 0, 1, 2]
    """
    places: dict[str, int] = {}
    return [places.setdefault(read.sublayer, len(places)) for read in layout]


def labels(layout: Sequence[Read]) -> dict[Read | Source, str]:
    """Return the label of each read and source; a sum's label has its layers: "L3 MLP", "block 2 (L1-L2)", "output".

    Layers count from 0, blocks from 1 with the layers that they sum; kinds defined by a mechanism are unchanged.
    """
    per_layer = len({read.kind for read in layout if read.number == 0}) or 1

    def label(one: Read | Source) -> str:
        if isinstance(one, Read) or one.number is None or not one.span or one.label != one.name:
            return one.label
        first, last = ((place - 1) // per_layer for place in (max(1, one.span[0]), max(1, one.span[-1])))
        return f"{one.name} (L{first}{'' if first == last else f'-L{last}'})"

    return {one: label(one) for read in layout for one in (read, *read.sources)}


class Traits(NamedTuple):
    """Properties of a mechanism, by which other code chooses what to show of it.

    Attributes:
        by_token: its weights differ from token to token.
        sums_to_one: the weights of a read sum to one.
        has_query: learned pseudo-queries score the sources.
        starts_standard: with its start values a pre-norm network computes what it computes with the plain running sum
            (up to the eps of its norms).
        linear: a read is a sum of outputs with one number each, so a mixing matrix exists.
        scales_branches: it initialises a layer's branches smaller than the standard residual does.
        is_control: it is a control that learns nothing of the method.
        colour: colour of its curves, "#rrggbb"; None takes the next free one.
    """

    by_token: bool
    sums_to_one: bool
    has_query: bool
    starts_standard: bool
    linear: bool = True
    scales_branches: bool = False
    is_control: bool = False
    colour: str | None = None

    @property
    def is_chance(self) -> bool:
        """Return whether it is mathematically the standard residual, so that differences to it are noise."""
        return self.is_control and self.starts_standard


class About(NamedTuple):
    """A mechanism's row in a table, in words.

    Attributes:
        rule: its formula, x the stream, f a sublayer without its norm, N the norm, h_l the l-th read before its norm.
        start: the start values of its parameters.
        moves: vectors of width d that the residual of one sublayer reads and writes (standard: x, f and the new x, 3),
            in terms of L sublayers, N blocks of S, n streams.
        source: the publication.
        evidence: published claims with their number of seeds, and this project's figure; empty if docs/results has it.
    """

    rule: str
    start: str
    moves: str
    source: str
    evidence: str = ""


class Learned(NamedTuple):
    """A learned table of a mechanism, for figures.

    Attributes:
        values: fp32 on the CPU; NaN for unused entries.
        axes: what each dimension counts: read, sublayer, layer, source, stream.
        title: name of the values, for the axis of a figure.
    """

    values: Tensor
    axes: tuple[str, ...]
    title: str


def sublayer_name(index: int, kinds: Sequence[str] = ("attention", "mlp")) -> str:
    """Return "attention k" or "mlp k" for sublayer 2k or 2k + 1: the name of its read, and of its output as a
    source."""
    return f"{kinds[index % len(kinds)]} {index // len(kinds)}"


def outputs(count: int, kinds: Sequence[str] = ("attention", "mlp")) -> tuple[Source, ...]:
    """Return the embedding and the first `count - 1` sublayers' outputs as separate sources."""
    return (
        EMBEDDING,
        *(Source(kinds[i % len(kinds)], i // len(kinds), range(i + 1, i + 2)) for i in range(count - 1)),
    )


def block_sources(bounds: Sequence[int], index: int) -> tuple[Source, ...]:
    """Return the embedding, the sums of the blocks that have ended before sublayer `index` (L: the head), and that of
    the block in progress.

    Args:
        bounds: number of sublayers before each block boundary, starting with 0.

    >>> [source.name for source in block_sources((0, 2, 4), 3)]
    ['embedding', 'block 1', 'partial']
    """
    passed = [bound for bound in bounds if bound <= index]
    spans = (range(start + 1, stop + 1) for start, stop in pairwise(passed))
    blocks = (Source("block", number, span) for number, span in enumerate(spans, 1))
    begun = range(passed[-1] + 1, index + 1)
    return (EMBEDDING, *blocks, *([Source("partial", None, begun, open=True)] if begun else []))


def columns(rows: Iterable[Sequence[Source]]) -> list[Source]:
    """Return every source of several reads once: finished sources in order of depth, then open ones.

    Sources with the same name share a column, for example the partial sums of all blocks in progress.
    """
    distinct = list({source.name: source for row in rows for source in row}.values())
    return sorted(distinct, key=lambda source: source.open)
