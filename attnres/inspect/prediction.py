"""What `attnres inspect` says of one prediction of a text: what an ablation changes, which edges it rests on, what
another text's vectors restore, and what each read says."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.circuits import circuit
from attnres.inspect.config import InspectConfig
from attnres.inspect.edits import Ablate, position_of, source_names
from attnres.inspect.effects import effect
from attnres.inspect.lens import Lens, logit_lens
from attnres.inspect.patching import Patching, patch
from attnres.inspect.survey import encode
from attnres.inspect.tables import EDGES
from attnres.models.encoding import piece, spelled, token_in_front
from attnres.models.open import Checkpoint
from attnres.progress import counting, grid, say
from attnres.text import counted, short

MOST = 200
"""Links of a graph that are measured."""
LEAST = 0.01
"""Nats of an effect from which a link is one of the graph that is written."""


@dataclass(frozen=True)
class Prediction:
    """The prediction that the options name.

    Attributes:
        ids: of the text, with the tokens that the tokenizer puts in front; of a longer text than the model takes a part
            that holds the position and the token that follows.
        position: in `ids`.
    """

    checkpoint: Checkpoint
    model: Any
    ids: list[int]
    position: int
    config: InspectConfig
    console: Console

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, model: Any, text: str, context: int, config: InspectConfig, console: Console
    ) -> "Prediction":
        """Find it. Raises UserError for a position that the text does not have."""
        front, ids = token_in_front(checkpoint.tokenizer), encode(checkpoint.tokenizer, text).ids.tolist()
        place = position_of(config.position, len(ids))
        room = context - len(front)
        start = max(0, min(place + 2, len(ids)) - room)
        return cls(checkpoint, model, [*front, *ids[start : start + room]], len(front) + place - start, config, console)

    @property
    def batch_size(self) -> int:
        """Copies of the text in one forward pass."""
        return max(1, self.config.batch_tokens // len(self.ids))

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments by which `attribute`, `patch` and `circuit` are asked for it."""
        options = self.config
        asked = {"position": self.position, "target": options.target, "against": options.against}
        return asked | {"batch_size": self.batch_size}

    def word(self, token: int) -> str:
        """Return a token in quotation marks."""
        return f"'{spelled(piece(self.checkpoint.tokenizer, token))}'"

    def what(self, target: int, against: int | None) -> str:
        """Return the name of the number that is measured."""
        less = "" if against is None else f" less that of {self.word(against)}"
        return f"ln p of {self.word(target)}{less} after {self.word(self.ids[self.position])}"


def next_tokens(prediction: Prediction, knock_outs: list[tuple[str, Ablate]]) -> list[list[dict[str, Any]]]:
    """Print what comes next, with and without each source."""
    table = grid("without", "likeliest after the text", right=("p before", "p after"))
    before, records = None, []
    for request, edit in knock_outs:
        ids = prediction.ids[: prediction.position + 1]
        change = effect(prediction.model, ids, edit, top=5, before=before)
        before = change.before
        tokenizer = prediction.checkpoint.tokenizer
        records.append([{"token": piece(tokenizer, part["id"]), **part} for part in change.top])
        for place, part in enumerate(change.top):
            cells = (prediction.word(part["id"]), short(part["before"], 3), short(part["after"], 3))
            table.add_row("" if place else request, *cells)
    prediction.console.print()
    prediction.console.print(table)
    return records


def attribution_table(prediction: Prediction) -> Attribution:
    """Print the edges that the prediction depends on most; return all of them."""
    config, console, model = prediction.config, prediction.console, prediction.model
    edges = sum(map(len, source_names(model)))
    with counting("without each edge", edges, "edges", shown=config.progress) as on_edges:
        attribution = attribute(
            model,
            prediction.ids,
            **prediction.asked,
            progress=on_edges,
        )
    table = grid("edge", right=("without it", "by gradient"))
    for edge in attribution.top(EDGES):
        cells = [short(edge.knockout, 3, signed=True), short(edge.gradient, 3, signed=True)]
        table.add_row(f"{edge.read} ← {edge.source}", *cells)
    console.print()
    what = prediction.what(attribution.target, attribution.against)
    say(console, f"{what}: {short(attribution.before, 3)}")
    console.print(table)
    agreement = attribution.agreement
    say(
        console,
        f"change of it in nats, of {agreement.edges} edges; the two ways agree: rank correlation "
        f"{short(agreement.spearman)}, {agreement.overlap:.0%} of the {agreement.top} largest in common",
    )
    return attribution


def neuronpedia_graph(prediction: Prediction) -> dict[str, Any]:
    """Return the attribution graph of the prediction as Neuronpedia reads it, from `LEAST` nats on; print its size."""
    config, name = prediction.config, prediction.checkpoint.title()
    with counting("links", MOST, "links", shown=config.progress) as on_links:
        graph = circuit(
            prediction.model,
            prediction.ids,
            most=MOST,
            **prediction.asked,
            progress=on_links,
        )
    record = graph.neuronpedia(LEAST, model=name)
    say(
        prediction.console,
        f"graph of tokens and layers: {len(record['links'])} links of at least {LEAST:g} nats that lead to the output",
    )
    return record


def patching_table(prediction: Prediction, other: str) -> Patching:
    """Print the edges whose vectors, taken from another text, restore most of what that predicts; return all."""
    config, console, model = prediction.config, prediction.console, prediction.model
    tokenizer = prediction.checkpoint.tokenizer
    clean = [*token_in_front(tokenizer), *encode(tokenizer, other).ids.tolist()]
    edges = sum(map(len, source_names(model)))
    with counting("each edge from the other text", edges, "edges", shown=config.progress) as on_edges:
        patching = patch(
            model,
            clean,
            prediction.ids,
            **prediction.asked,
            progress=on_edges,
        )
    table = grid("edge", right=("restored",))
    for read, source, value in patching.top(EDGES):
        table.add_row(f"{read} ← {source}", short(value, 3, signed=True))
    console.print()
    what = prediction.what(patching.target, patching.against)
    say(console, f"{what}: {short(patching.corrupted, 3)}; in the other text {short(patching.clean, 3)}")
    console.print(table)
    alone = sum(one is None for one in patching.aligned)
    how = "token by token" if len(clean) == len(prediction.ids) else "by what both have, from the last token on"
    if alone:
        how += f"; {counted(alone, 'token')} of this text without a partner keep their own vectors"
    say(console, f"restored: 0 changes nothing, 1 gives the other text's number; the texts are aligned {how}")
    return patching


def lens_table(prediction: Prediction) -> Lens:
    """Print what each read says through the final norm and the head."""
    lens = logit_lens(
        prediction.model, prediction.ids, top=1, position=prediction.position, target=prediction.config.target
    )
    table = grid("read", "likeliest", right=("p", "ln p of the target", "KL to the output"))
    for read, ids, chances, target, apart in zip(
        lens.reads, lens.top, lens.probability, lens.target, lens.divergence, strict=True
    ):
        cells = (short(chances[0][0], 3), short(target[0], 3), short(apart[0], 3))
        table.add_row(read, prediction.word(ids[0][0]), *cells)
    prediction.console.print()
    prediction.console.print(table)
    following = prediction.position + 1 < len(prediction.ids)
    target = (
        f"'{spelled(prediction.config.target)}'"
        if prediction.config.target is not None
        else prediction.word(prediction.ids[prediction.position + 1])
        if following
        else "the output's likeliest token"
    )
    at = prediction.word(prediction.ids[prediction.position])
    say(prediction.console, f"each read after {at} as if it were the last (logit lens); the target is {target}")
    return lens
