"""Write the five questions of docs/gallery.md: to a model with depth reads, answered with errors over documents.

python experiments/gallery.py MODEL CORPUS [--name NAME]

The first three are motifs that arXiv 2606.13168 describes. Whether a model agrees is told by intervals over
documents: it may not. `--name` is what the page calls the model in its lines of Python.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnres.files import write_text
from attnres.head import evaluating
from attnres.inspect import Ablate, find_residual, intervene, record
from attnres.inspect.attribution import spearman
from attnres.inspect.survey import encode
from attnres.inspect.texts import corpus_text
from attnres.models import open_checkpoint
from attnres.residuals import Read, labels
from attnres.stats import Effect, standard_error
from attnres.text import with_error

MARK = re.compile(r"(<!-- made: five questions -->\n).*?(<!-- end -->)", flags=re.DOTALL)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "gallery.md"
DOCUMENTS, TOKENS = 12, 192
"""Documents that are looked at, and the tokens of each from its beginning."""
LETTERS = 16
"""Enough for a token: of a book no more than is looked at is tokenised."""
SHOWN = 6
"""Rows of a table of ablations."""


@dataclass(frozen=True)
class Looked:
    """What was measured of documents.

    Attributes:
        layout: the reads. contributions, weights: of each read (documents, sources), means over a document's tokens.
        losses: (documents,) nats per token. without: (read, source) to the losses when that edge is ablated.
        nowhere: source to the losses when no read has it.
    """

    layout: Sequence[Read]
    contributions: list[np.ndarray]
    weights: list[np.ndarray]
    losses: np.ndarray
    without: dict[tuple[int, int], np.ndarray]
    nowhere: dict[str, np.ndarray]

    @property
    def layers(self) -> int:
        return 1 + max(read.number for read in self.layout if read.number is not None)

    def excess(self, read: int, places: Sequence[int]) -> np.ndarray:
        """Return (documents,): what sources contribute to a read beyond an even share of all its sources."""
        values = self.contributions[read]
        return values[:, list(places)].sum(1) - len(places) / values.shape[1]


def look(model: Any, documents: Sequence[Tensor]) -> Looked:
    """Measure contributions, and the losses without each edge of a read with a choice and without each source."""
    layout = find_residual(model).layout()
    contributions, weights = [], []
    with evaluating(model), torch.no_grad():
        for ids in documents:
            with record(model, tokens=True) as trace:
                model(input_ids=ids[None], use_cache=False)
            contributions.append([rows[0].mean(0).double().numpy() for rows in trace.token_contributions])
            weights.append([rows[0].mean(0).double().numpy() for rows in trace.token_weights])
    edges = [(r, s) for r, read in enumerate(layout) if len(read.sources) > 1 for s in range(len(read.sources))]
    names = list(dict.fromkeys(layout[r].sources[s].name for r, s in edges))
    return Looked(
        layout,
        [np.stack(rows) for rows in zip(*contributions, strict=True)],
        [np.stack(rows) for rows in zip(*weights, strict=True)],
        losses(model, documents),
        {(r, s): losses(model, documents, Ablate(layout[r].sources[s].name, reads=r)) for r, s in edges},
        {name: losses(model, documents, Ablate(name, reads=choices(layout, name))) for name in names},
    )


def choices(layout: Sequence[Read], source: str) -> list[int]:
    """Return the reads that have the source and another one too."""
    return [
        r for r, read in enumerate(layout) if len(read.sources) > 1 and source in [one.name for one in read.sources]
    ]


def losses(model: Any, documents: Sequence[Tensor], *edits: Ablate) -> np.ndarray:
    """Return the mean loss of each document, all of one length in one batch."""
    with evaluating(model), torch.no_grad(), intervene(model, *edits):
        logits = model(input_ids=torch.stack(list(documents)), use_cache=False).logits
    wanted = torch.stack(list(documents))[:, 1:, None]
    return -logits[:, :-1].float().log_softmax(-1).gather(2, wanted)[..., 0].mean(1).double().numpy()


# ------------------------------------------------------------------ the questions


def effect_of(values: np.ndarray) -> Effect:
    """Return the mean over documents with its interval."""
    return Effect(float(values.mean()), standard_error(values), len(values) - 1)


def said(values: np.ndarray) -> str:
    """Return a mean over documents with its standard error."""
    return with_error(float(values.mean()), standard_error(values), signed=True)


def motif(looked: Looked, kind: str, early: bool, chosen: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (documents,): the excess of the chosen sources in a kind's reads of one third of the layers, and in those
    of the other two. `chosen`: "embedding", "current" (the newest source) or "older" (all but these two)."""
    third = looked.layers / 3
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for r, read in enumerate(looked.layout):
        count = len(read.sources)
        if read.kind != kind or read.number is None or count < (3 if chosen == "older" else 2):
            continue
        places = {"embedding": [0], "current": [count - 1], "older": list(range(1, count - 1))}[chosen]
        inside = read.number < third if early else read.number >= looked.layers - third
        sides[not inside].append(looked.excess(r, places))
    inside, outside = (np.mean(part, axis=0) if part else np.full(len(looked.losses), np.nan) for part in sides)
    return inside, outside


def answer(looked: Looked, kind: str, early: bool, chosen: str) -> list[str]:
    """Return the answer to a question about a motif, in Markdown."""
    inside, outside = motif(looked, kind, early, chosen)
    if np.isnan(inside + outside).any():
        return ["**Not known:** the model is too shallow."]
    where, what = "early" if early else "late", {"attention": "attention", "mlp": "MLPs"}[kind]
    source = {"embedding": "the embedding", "current": "the current state", "older": "older history"}[chosen]
    more, excess = effect_of(inside - outside), effect_of(inside)
    holds = excess.excludes() and excess.difference > 0 and more.excludes() and more.difference > 0
    fails = (excess.excludes() and excess.difference < 0) or (more.excludes() and more.difference < 0)
    word = "Both intervals exclude 0, as the motif says" if holds else "An interval includes 0"
    word = "An interval excludes 0, against the motif" if fails else word
    return [
        f"**{word}.** Contribution of {source} beyond an even share of the sources: {said(inside)} in {where} {what}, "
        f"{said(outside)} in the others; difference {said(inside - outside)}."
    ]


def mass(looked: Looked) -> list[str]:
    """Return whether what contributes or weighs most is what the loss depends on most."""
    edges = list(looked.without)
    rise = np.stack([looked.without[edge] - looked.losses for edge in edges])
    rows = {
        "contribution": np.stack([looked.contributions[r][:, s] for r, s in edges]),
        "weight": np.stack([looked.weights[r][:, s] for r, s in edges]),
    }
    found = {
        name: np.array([spearman(table[:, d], rise[:, d]) or 0.0 for d in range(table.shape[1])])
        for name, table in rows.items()
    }
    tenth = max(1, len(edges) // 10)
    best = [set(np.argsort(-table.mean(1))[:tenth].tolist()) for table in (rows["contribution"], rise)]
    word = "excludes" if effect_of(found["contribution"]).excludes() else "includes"
    return [
        f"**The interval {word} 0.** Rank correlation over {len(edges)} connections, of the rise of the loss when a "
        f"connection is ablated with its contribution: {said(found['contribution'])}; with its weight: "
        f"{said(found['weight'])}. Of the {tenth} with the largest contribution, {len(best[0] & best[1])} are among "
        f"the {tenth} that cost most. "
        "A correlation of 1 would mean that the share of a sum tells what an ablation costs."
    ]


def costs(looked: Looked) -> list[str]:
    """Return the dearest ablations as tables."""
    words = labels(looked.layout)
    dearest = sorted(looked.without.items(), key=lambda item: -abs(item[1].mean() - looked.losses.mean()))
    lines = [f"Loss with every connection: {looked.losses.mean():.3f} nats per token. Change when one is ablated:", ""]
    lines += ["| connection | change, nats per token |", "|---|---:|"]
    for (r, s), without in dearest[:SHOWN]:
        read = looked.layout[r]
        lines.append(f"| {words[read]} ← {words[read.sources[s]]} | {said(without - looked.losses)} |")
    lines += [
        "",
        "And when a source is ablated everywhere:",
        "",
        "| source | change | its connections' changes, added up |",
    ]
    lines.append("|---|---:|---:|")
    for name, without in looked.nowhere.items():
        alone = [
            one - looked.losses for (r, s), one in looked.without.items() if looked.layout[r].sources[s].name == name
        ]
        lines.append(f"| {name} | {said(without - looked.losses)} | {said(np.sum(alone, axis=0))} |")
    cheap = sum(not effect_of(one - looked.losses).excludes() for one in looked.without.values())
    lines += [
        "",
        f"{cheap} of {len(looked.without)} connections cost nothing that an interval over documents can tell.",
    ]
    return lines


def example(layout: Sequence[Read], kind: str, chosen: str, early: bool) -> tuple[str, str]:
    """Return a (source, read) that a question is about: of the first or last layer whose input has three sources."""
    reads = [read for read in layout if read.kind == kind and len(read.sources) > 2] or [layout[-1]]
    read = reads[0] if early else reads[-1]
    place = {"embedding": 0, "current": -1, "older": min(1, len(read.sources) - 1)}[chosen]
    return read.sources[place].name, read.name


QUESTIONS = (
    ("Do early MLPs read the embedding?", "mlp", True, "embedding"),
    ("Does early attention read the current state?", "attention", True, "current"),
    ("Does late attention read older history?", "attention", False, "older"),
)


def page(looked: Looked, name: str, text: str, tokens: int) -> str:
    """Return the page, in Markdown."""
    words = {one.name: label for one, label in labels(looked.layout).items()}
    parts = [
        "## Five questions to a trained model",
        "",
        f"Answers of the model `{name}` ({looked.layers} layers) from {len(looked.losses)} documents of {text}, the "
        f"first {tokens} tokens of each. ± is the standard error over documents, of one model and one seed, and "
        "intervals of 95 % are made of it. The motifs are those of arXiv 2606.13168.",
        "",
        "Open the explorer once with",
        "",
        f"    attnres app {name} --open",
        "",
        "and the lines of Python below begin with",
        "",
        "```py",
        "from attnres.inspect import Ablate, attribute, effect",
        "from attnres.models import open_checkpoint",
        "",
        f'checkpoint = open_checkpoint("{name}")',
        'model, text = checkpoint.load(), "It was the best of times, it was the"',
        "```",
    ]
    for number, (title, kind, early, chosen) in enumerate(QUESTIONS, start=1):
        source, read = example(looked.layout, kind, chosen, early)
        parts += ["", f"### {number}. {title}", "", *answer(looked, kind, early, chosen), ""]
        parts += _how(
            f"the cell {words[read]} ← {words[source]}", f'effect(model, text, Ablate("{source}", reads="{read}"))'
        )
    costly = max(looked.without.items(), key=lambda item: item[1].mean())[0]
    read = looked.layout[costly[0]]
    source = read.sources[costly[1]]
    parts += ["", "### 4. Is mass cause?", "", *mass(looked), ""]
    parts += _how("a token: the table has contributions and effects side by side", "attribute(model, text).frame()")
    parts += ["", "### 5. What does an ablation cost?", "", *costs(looked), ""]
    line = f'effect(model, text, Ablate("{source.name}", reads="{read.name}"))'
    parts += _how(f"the cell {words[read.name]} ← {words[source.name]}", line)
    return "\n".join(parts) + "\n"


def _how(click: str, line: str) -> list[str]:
    """Return one click and one line of Python."""
    return [f"One click: {click}. One line: `{line}`"]


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("corpus")
    parser.add_argument("--name", help="what the page calls the model; none is MODEL")
    parser.add_argument("--text", help="what the page calls the corpus; none is CORPUS")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    tokens = min(TOKENS, checkpoint.context)
    texts = (text[: LETTERS * tokens] for text in corpus_text(options.corpus, "text").read())
    encoded = (encode(checkpoint.tokenizer, text).ids[:tokens] for text in texts)
    documents = list(islice((torch.from_numpy(ids) for ids in encoded if len(ids) == tokens), DOCUMENTS))
    looked = look(checkpoint.load(), documents)
    made = page(looked, options.name or options.model, options.text or options.corpus, tokens)
    write_text(PAGE, MARK.sub(lambda part: part[1] + made + part[2], PAGE.read_text("utf-8")))
    print(PAGE)


if __name__ == "__main__":
    main()
