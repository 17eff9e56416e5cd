"""Which sources a trained model hardly reads. A report: nothing is taken out of the model.

report = prune_report(inspection, threshold=0.01)
with intervene(model, *report.edits("mean")): ...    # the model without those edges
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attnres.errors import UserError
from attnres.inspect import notebook
from attnres.inspect.edits import Ablate
from attnres.inspect.inspection import Inspection, amounts
from attnres.residuals import Traits

Which = Literal["mean", "high", "part"]
"""What is below the threshold: an edge's mean weight, its weight for 99% of tokens, or its part of the read's length.
Sources are not normed, so that a small weight on a large one may be much of what is read."""


@dataclass(frozen=True)
class EdgeWeight:
    """A source of a read, and its share of it.

    Attributes:
        mean, high, largest: its share in the read, |weight| / sum |weights|: of the mean weights, what 99% of tokens
            are below, and the largest that any token had.
        part: its share by length, mean * rms(v_i) / sum_j mean_j * rms(v_j); `mean` where lengths were not recorded.
    """

    read: str
    source: str
    mean: float
    high: float
    largest: float
    part: float


@dataclass(frozen=True)
class SourceUse:
    """A source over all the reads that have it beside others.

    Attributes:
        reads: how many these are. mean, part: its mean shares over them.
        below_mean, below_high, below_part: in how many of them a share is below the threshold.
    """

    source: str
    reads: int
    mean: float
    part: float
    below_mean: int
    below_high: int
    below_part: int


@dataclass(frozen=True, repr=False)
class PruneReport(notebook.Result):
    """Edges through which hardly any weight goes.

    Attributes:
        threshold: of a weight. edges: of reads with two sources or more; a read of one source has no choice.
        sources: in order of depth.
    """

    threshold: float
    edges: list[EdgeWeight]
    sources: list[SourceUse]

    def below(self, which: Which) -> list[EdgeWeight]:
        """Return the edges that could go, lightest first."""
        edges = [edge for edge in self.edges if getattr(edge, which) < self.threshold]
        return sorted(edges, key=lambda edge: getattr(edge, which))

    def traffic(self, which: Which) -> float:
        """Return the fraction of the vectors that reads with a choice load (one a token and edge) that would no longer
        be."""
        return len(self.below(which)) / len(self.edges) if self.edges else 0.0

    def weight(self, which: Which) -> float:
        """Return fraction of the reads' weight that goes through these edges."""
        reads = len({edge.read for edge in self.edges})
        return sum(edge.mean for edge in self.below(which)) / reads if reads else 0.0

    def edits(self, which: Which) -> list[Ablate]:
        """Return the ablation of these edges, all at once; the weights that a read keeps are renormalised."""
        by_read: dict[str, list[str]] = {}
        for edge in self.below(which):
            by_read.setdefault(edge.read, []).append(edge.source)
        return [Ablate(tuple(sources), reads=read) for read, sources in by_read.items()]

    def _about(self) -> str:
        return f"{len(self.below('mean'))} of {len(self.edges)} edges below {self.threshold:g}"

    def _records(self) -> Iterator[dict[str, Any]]:
        return map(vars, self.edges)

    def to_dict(self) -> dict[str, Any]:
        parts = {
            which: {
                "edges": [vars(edge) for edge in self.below(which)],
                "traffic": self.traffic(which),
                "weight": self.weight(which),
            }
            for which in get_args(Which)
        }
        return {
            "threshold": self.threshold,
            "edges": len(self.edges),
            **parts,
            "sources": [vars(source) for source in self.sources],
        }


def prune_report(inspection: Inspection, threshold: float = 0.01) -> PruneReport:
    """Look for sources below a threshold, in the weights that an inspection saw.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> prune_report(attnres.inspect_model(model, None, [range(50)], context=32))
    PruneReport(...)

    These are weights on the inspected text: another text may read what this one hardly does.

    Raises:
        UserError: as `check_prunable`.
    """
    check_prunable(inspection.model["residual"], inspection.traits, threshold)
    routing = inspection.routing
    assert routing is not None
    if "high" not in routing or "largest" not in routing:
        raise UserError("this inspection holds means alone: one of `inspect_model` says how weights spread over tokens")
    edges, uses = [], dict[str, list[EdgeWeight]]()
    for index, read in enumerate(inspection.layout):
        if len(read.sources) < 2:
            continue
        mean = amounts(routing["weights"][index], "weight")
        rms = inspection.source_rms[index] if inspection.source_rms else []
        part = (amounts(mean * rms, "weight") if rms else mean).tolist()
        rows = (read.sources, mean.tolist(), routing["high"][index], routing["largest"][index], part)
        for source, *values in zip(*rows, strict=True):
            if source.kind == "null":  # no vector is loaded for it
                continue
            edge = EdgeWeight(read.name, source.name, *values)
            edges.append(edge)
            uses.setdefault(source.name, []).append(edge)
    sources = []
    for source, those in uses.items():
        below = {f"below_{which}": sum(getattr(edge, which) < threshold for edge in those) for which in get_args(Which)}
        mean, part = (sum(getattr(edge, name) for edge in those) / len(those) for name in ("mean", "part"))
        sources.append(SourceUse(source, len(those), mean, part, **below))
    return PruneReport(threshold, edges, sources)


def check_prunable(residual: str, traits: Traits, threshold: float) -> None:
    """Raise a UserError for a threshold that is no weight, or a residual whose reads all tokens share."""
    if not 0 < threshold < 1:
        raise UserError(f"threshold is {threshold}: expected a weight between 0 and 1, such as 0.01")
    if not traits.by_token:
        raise UserError(f"residual '{residual}' learns no weights of its sources: there is nothing to prune")
