"""All measurements of one model on some text, as plain numbers: tables, figures and pages are made from it."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    Self,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from attnres.errors import UserError
from attnres.files import write_text
from attnres.inspect import notebook
from attnres.reading import read_json
from attnres.residuals import Read, Source, Traits, columns, layout_of, traits_of
from attnres.stats import plain


def normalised(mixing: np.ndarray) -> np.ndarray:
    """Return |M[l, i]| / sum_j |M[l, j]|: the share of each output in a read by its coefficient; rows sum to one."""
    size = np.abs(mixing)
    total = size.sum(1, keepdims=True)
    return np.divide(size, total, out=np.zeros_like(size), where=total > 0)


def depth_distance(mixing: np.ndarray, written: Sequence[int] | None = None) -> np.ndarray:
    """Effective depth distance of each read, in sublayers: sum_i p[l, i] (n_l - i) with p = `normalised(M)`.

    0 is a read of the newest output alone, n_l one of the embedding alone; a plain residual has n_l / 2.

    Args:
        written: n_l, how many sublayers have written before each read (`attnres.residuals.depths`); None is l.
    """
    places = np.arange(len(mixing)) if written is None else np.asarray(written)
    return (normalised(mixing) * (places[:, None] - np.arange(mixing.shape[1]))).sum(1)


def embedding_persistence(mixing: np.ndarray) -> np.ndarray:
    """Return the embedding's share in each read: `normalised(M)[:, 0]`; a plain residual has 1 / (n_l + 1)."""
    return normalised(mixing)[:, 0]


def source_spike(source_rms: Sequence[Sequence[float]]) -> np.ndarray:
    """max_i rms(v_i) / median_i rms(v_i) of each read's sources; NaN for a read with fewer than three.

    Keys are normed and values are not, so one large source can fill a read that hardly weighs it. Full depth attention
    is known for such a source (the nanoGPT study, github.com/aupadhyay/attnres-exp).
    """
    rows = [np.asarray(row, dtype=float) for row in source_rms]
    return np.array([row.max() / np.median(row) if len(row) > 2 else np.nan for row in rows])


def _is_row(values: list[Any]) -> bool:
    return not any(isinstance(value, list) for value in values)


def dynamics(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the measurements by depth that a training run recorded, over its steps; None without any.

    Args:
        lines: of metrics.jsonl, as `attnres.training.records.read_metrics` gives them.

    Returns:
        `steps`, and every quantity that all of the `depth` lines have as a row of numbers, one for each sublayer or
        read: `output_rms`, `input_rms`, `grad_rms`, and where the run has them `entropy`, `sharpness`, `gate`,
        `recency_bias`, `alpha`. Coefficients that are a row or a matrix for each read are not curves and left out.
    """
    by_step = {line["step"]: line for line in lines if line["kind"] == "depth"}  # after a resume the later one counts
    if not by_step:
        return None
    steps = sorted(by_step)
    names = [key for key, value in by_step[steps[0]].items() if isinstance(value, list) and _is_row(value)]
    rows = {name: [by_step[step][name] for step in steps] for name in names if all(name in by_step[s] for s in steps)}
    return {"steps": steps, **rows}


FORMAT = 1
"""Raised when what a field means changes; a field more or less is no change: what is missing has its default."""
LARGEST = 1e30
"""No number measured is as large: figures cannot be drawn of it."""
DIGITS = 6
"""Significant digits of the numbers in a file: more than anybody reads, and half of what fp64 would take."""


class Weights(TypedDict):
    """Means over tokens for the sources of every read: their weights, `contribution` and `size`
    (`attnres.inspect.contribution`). Rows are parallel; `layout` holds `Read.to_json`."""

    reads: list[str]
    sources: list[list[str]]
    layout: NotRequired[list[Any]]
    weights: list[list[float]]
    contribution: NotRequired[list[list[float]]]
    size: NotRequired[list[list[float]]]
    high: NotRequired[list[list[float]]]
    largest: NotRequired[list[list[float]]]


class ByLabel(TypedDict):
    """Mean weights and contributions by label, read and source with their standard errors; of how many tokens and
    documents."""

    names: list[str]
    tokens: list[int]
    documents: list[int]
    weights: list[list[list[float]]]
    error: list[list[list[float]]]
    contribution: NotRequired[list[list[list[float]]]]
    contribution_error: NotRequired[list[list[list[float]]]]


class Example(TypedDict):
    """A text token by token: weights and contributions by read, token and source."""

    text: str
    tokens: list[str]
    ids: list[int]
    kinds: list[str]
    losses: list[float | None]
    sources: list[list[str]]
    weights: list[list[list[float]]]
    contribution: NotRequired[list[list[list[float]]]]


class Table(TypedDict):
    """A learned table of a mechanism: a number or nested lists, with names of the axes and of the values."""

    values: float | list[float | list[float | list[float]]]
    axes: list[str]
    title: str


@dataclass(repr=False)
class Inspection(notebook.Result):
    """The measurements of one model on some text, the same in memory as in a file.

    Rows that belong to reads are in the order of `reads`. A number that does not exist (the entropy of a read that
    weighs nothing, an error over one document) is None; what a residual does not have is None as a whole.

    Attributes:
        model: `name`, `residual`, `traits`, `settings`, `num_sublayers` L, `width`, `parameters`.
        data: `source`, `tokens`; of text also `documents`, `windows`, `context`, `kind`.
        reads: names of the L+1 reads.
        routing: `reads`, `sources` (names), `layout` (as data); means over tokens of `weights`, of `contribution`, what
            a source is of its read by projection on it (signed, rows sum to one), and of `size`, |weight| times the
            source's RMS (`attnres.inspect.contribution`; files of earlier versions have the weights alone); and of the
            shares |weight| / sum |weights| `high`, what 99% of tokens are below, and `largest`, the most that any token
            had. A residual without a softmax has the weights that it implies.
        entropy: `nats` (L+1) mean over tokens, `effective` exp of it, `most` how many sources there are.
        mixing: (R, L+1) for R reads of L sublayers, see `measures`. distance, persistence: (R) of it.
        mixing_contribution: (R, L+1) what each single output is of each read, by projection on it.
        sharpness, query_cosine, query_pca: see `geometry`. learned: what `Residual.tables` says, by name.
        output_rms: (L). input_rms: (R).
        source_rms, source_cosine: rows parallel to `routing["sources"]`; key_cosine (n, n) of the output's sources.
        kinds: `names`, `tokens`, `documents`; `weights` and `error`, by kind, read and source: standard errors over
            documents; `contribution` and `contribution_error` likewise.
        example: `text`, `tokens` (strings), `ids`, `kinds`, `losses` (of the next token; the last is None), and
            `weights` and `contribution` by read, token and source.
        losses: `mean` in nats per token, `error` over documents, `tokens` predicted.
        dynamics: of the run that trained the model, see `dynamics`.

    The data frame has a row a (read, source) edge: weight, contribution, size, and shares of the weights (`high`,
    `largest`); none for a residual that weighs nothing.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    reads: list[str]
    routing: Weights | None = None
    entropy: dict[str, list[float | None]] = field(default_factory=dict)
    mixing: list[list[float]] | None = None
    mixing_contribution: list[list[float]] | None = None
    distance: list[float] | None = None
    persistence: list[float] | None = None
    sharpness: list[float | None] | None = None
    query_cosine: list[list[float | None]] | None = None
    query_pca: dict[str, list[Any]] | None = None
    learned: dict[str, Table] | None = None
    output_rms: list[float] = field(default_factory=list)
    input_rms: list[float] = field(default_factory=list)
    source_rms: list[list[float]] = field(default_factory=list)
    source_cosine: list[list[float]] = field(default_factory=list)
    key_cosine: list[list[float]] = field(default_factory=list)
    kinds: ByLabel | None = None
    example: Example | None = None
    losses: dict[str, float | None] = field(default_factory=dict)
    dynamics: dict[str, list[Any]] | None = None

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            setattr(self, item.name, plain(getattr(self, item.name), DIGITS))

    def _about(self) -> str:
        tokens, loss = self.data.get("tokens"), self.losses.get("mean")
        extent = "" if tokens is None else f", {tokens:,} tokens"
        extent += "" if loss is None else f", loss {loss:.3f}"
        return f"{self.model['name']}: {self.model['residual']}, {len(self.reads)} reads{extent}"

    def _records(self) -> Iterator[dict[str, Any]]:
        routing: Any = self.routing or {"reads": [], "sources": [], "weights": []}
        more = {name: routing[name] for name in (*MEASURES, "high", "largest") if name in routing}
        return notebook.edges(routing["reads"], routing["sources"], weight=routing["weights"], **more)

    def _repr_html_(self) -> str:
        by, rows = ("contribution", self.routing.get("contribution")) if self.routing else ("", None)
        if self.routing and rows is None:
            by, rows = "weight", self.routing["weights"]
        return f"<p>{self!r}</p>" if rows is None else notebook.heat(f"{self!r}: {by}", self.layout, rows, least=1.0)

    @property
    def layout(self) -> tuple[Read, ...]:
        """The reads and what they mix, without sources where the residual weighs none."""
        return layout_of(self.routing or {"reads": self.reads, "sources": [[] for _ in self.reads]})

    @property
    def traits(self) -> Traits:
        """What the model's residual is."""
        return traits_of(self.model["residual"], self.model.get("traits"))

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Raises UserError."""
        text = json.dumps({"format": FORMAT, **self.to_dict()}, allow_nan=False, ensure_ascii=False)
        write_text(path, text + "\n")  # on one line: an indented example would be a line a number

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote, in this version or another with the same `FORMAT`.

        Raises:
            UserError: it is not there, is not one of ours, or holds something else than it should.
        """
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise UserError(f"{path} is no inspection of format {FORMAT}: expected a file that attnres inspect wrote")
        kinds = get_type_hints(cls)
        values = {name: value for name, value in values.items() if name in kinds}
        wrong = [name for name in ("model", "data", "reads") if name not in values]
        wrong += [name for name, value in values.items() if not _fits(value, kinds[name])]
        inspection = None if wrong else cls(**values)
        if inspection is None or (wrong := inspection._uneven()):
            raise UserError(f"{path} is damaged at {', '.join(wrong)}: measure the model again with attnres inspect")
        return inspection

    def _uneven(self) -> list[str]:
        """Fields whose rows do not fit the reads and sources that they belong to."""
        by_read = ("distance", "persistence", "sharpness", "input_rms", "query_cosine", "source_rms", "mixing")
        wrong = [name for name in by_read if len(getattr(self, name) or self.reads) != len(self.reads)]
        rows = [len(row) for row in self.routing["sources"]] if self.routing else []
        try:
            _ = self.traits  # raises where the model's say nothing
            described = [len(read.sources) for read in self.layout]
            places = [part.number for read in self.layout for part in (read, *read.sources) if part.number is not None]
            depth = self.model.get("num_sublayers", max(places, default=0) + 1)
            if not all(0 <= place <= depth for place in places):
                described = None
        except (ValueError, TypeError, KeyError, AttributeError, LookupError, OverflowError):
            described = None

        def fit(tables: Sequence[Sequence[Sequence[Any]]]) -> bool:
            return all([len(row) for row in table] == rows for table in tables)

        if not self.reads or not all(len(row) == len(self.reads) for row in self.entropy.values()):
            wrong.append("reads or entropy")
        if self.output_rms and len(self.output_rms) != self.model.get("num_sublayers", len(self.output_rms)):
            wrong.append("output_rms")
        if described is None or not all(isinstance(self.model.get(name), str) for name in ("name", "residual")):
            wrong.append("model or routing")
        elif self.routing and not (
            described == rows
            and len(self.reads) == len(rows)
            and fit([row for row in map(self.routing.get, ("weights", *MEASURES)) if row is not None])
        ):
            wrong.append("routing")
        if (part := self.kinds) is not None:
            even = len({len(part[key]) for key in ("names", "tokens", "documents", "weights")}) == 1
            tables = [part["weights"], part["error"], part.get("contribution"), part.get("contribution_error")]
            wrong += ["kinds"] * (not even or not all(fit(table) for table in tables if table is not None))
        if self.example is not None:
            tokens = len(self.example["tokens"])
            for values in (self.example["weights"], self.example.get("contribution")):
                each = [(len(read), {len(row) for row in read}) for read in values or []]
                if values is not None and each != [(tokens, {row}) for row in rows]:
                    wrong.append("example")
                    break
        return wrong


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of an annotated type; any number may be None."""
    if kind is Any or (value is None and kind in (float, NoneType)):
        return True
    if is_typeddict(kind):
        parts = get_type_hints(kind)
        held = isinstance(value, dict) and kind.__required_keys__ <= value.keys()
        return held and all(_fits(value[name], parts[name]) for name in parts.keys() & value.keys())
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, part) for part in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(part, inner[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(part, inner[1]) for part in value.values())
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        return False
    return not isinstance(value, int | float) or abs(value) < LARGEST


def mean_inspection(inspections: Sequence[Inspection], name: str) -> Inspection:
    """Return the first inspection of several seeds, named `name`, with means over the seeds of its weights, mixing,
    entropy and magnitudes. Texts and queries stay the first seed's."""
    first = inspections[0]
    model = {**first.model, "name": name}
    if len(inspections) == 1:
        return dataclasses.replace(first, model=model)
    means = {name: _mean([getattr(one, name) for one in inspections]) for name in MEANS}
    routings = [one.routing for one in inspections if one.routing is not None]
    if routings and all(one["sources"] == routings[0]["sources"] for one in routings):
        of_all = [name for name in ("weights", *MEASURES) if all(name in one for one in routings)]
        means["routing"] = {**routings[0], **{name: _mean([one.get(name) for one in routings]) for name in of_all}}
    return dataclasses.replace(first, model=model, **means)


MEASURES = ("contribution", "size")
"""What there is of a read's sources beside their weights."""
MEANS = (
    "entropy",
    "mixing",
    "mixing_contribution",
    "distance",
    "persistence",
    "sharpness",
    "input_rms",
    "output_rms",
    "source_rms",
)
MEANS += ("source_cosine", "key_cosine")
"""Fields of which several seeds have a mean."""


def _mean(values: Sequence[Any]) -> Any:
    """Return means of numbers in the same places; the first value where one is none, or the shapes differ."""
    first = values[0]
    if all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        return [_mean(parts) for parts in zip(*values)]
    if all(isinstance(value, dict) for value in values) and all(set(value) == set(first) for value in values):
        return {key: _mean([value[key] for value in values]) for key in first}
    if all(isinstance(value, int | float) for value in values):
        return float(np.mean(values))
    return first


By = Literal["contribution", "weight"]
"""By which number sources are shown: how much of the read they are (`attnres.inspect.contribution`), or the weights
that they are given, |weight| / sum |weights|, which a softmax's are already."""

FIELD: dict[By, Literal["contribution", "weights"]] = {"contribution": "contribution", "weight": "weights"}
"""The field of an `Inspection`'s parts that holds the numbers."""


def by_in(by: By, *parts: Any) -> By:
    """`by`, or "weight" where one of the parts of an inspection (None: it has none) lacks contributions."""
    return by if all(part is None or FIELD[by] in part for part in parts) else "weight"


def amounts(row: Sequence[float | None], by: By) -> np.ndarray:
    """Return one read's numbers: contributions as they are, weights as |weight| / sum |weights|."""
    values = np.array([value or 0.0 for value in row])
    return values if by == "contribution" else np.abs(values) / (np.abs(values).sum() or 1.0)


@dataclass(frozen=True)
class Routing:
    """For every read of one model a number for each of its sources.

    `values[r][i]` belongs to `layout[r].sources[i]`; rows have different lengths. The last read is the output's. `by`
    is what the numbers are.
    """

    layout: Sequence[Read]
    values: Sequence[Sequence[float]]
    by: By = "weight"

    @classmethod
    def of(cls, inspection: "Inspection", by: By) -> "Routing | None":
        """Return means over tokens of the reads that weigh something; None for a residual that weighs nothing. An
        inspection of an earlier version, which has no contributions, gives weights."""
        if inspection.routing is None:
            return None
        by = by_in(by, inspection.routing, inspection.kinds, inspection.example)
        kept = [r for r, row in enumerate(inspection.routing["weights"]) if row]
        rows = inspection.routing[FIELD[by]]
        return cls([inspection.layout[r] for r in kept], [amounts(rows[r], by).tolist() for r in kept], by)

    def columns(self, rows: Sequence[int] | None = None) -> list[Source]:
        """Return every source of these reads (all by default) once, unfinished ones last."""
        return columns(self.layout[row].sources for row in (range(len(self.layout)) if rows is None else rows))

    def matrix(self, rows: Sequence[int], across: Sequence[Source]) -> np.ndarray:
        """Return values (rows, across), placed by source; NaN where a read does not have that source."""
        place = {source.name: i for i, source in enumerate(across)}
        table = np.full((len(rows), len(across)), np.nan)
        for r, row in enumerate(rows):
            for source, weight in zip(self.layout[row].sources, self.values[row], strict=True):
                table[r, place[source.name]] = weight
        return table

    def composites(self, row: int) -> int:
        """Return how many finished sources of a read are made of several outputs: blocks, snapshots of a stream."""
        plain = {"embedding", *(read.kind for read in self.layout)}
        return sum(not source.open and source.kind not in plain for source in self.layout[row].sources)

    def weighs(self, row: int, source: str) -> bool:
        """Return whether a read weighs the source called `source` beside another."""
        names = [one.name for one in self.layout[row].sources]
        return source in names and len(names) > 1

    def place(self, row: int, source: str) -> int:
        """Return the number of the source called `source` in a read that has it."""
        return [one.name for one in self.layout[row].sources].index(source)
