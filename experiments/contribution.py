"""Which number of an edge says what cutting it costs: its weight, its size, its contribution, or how far it turns the
read?

    python experiments/contribution.py runs/demo/block-seed0 runs/demo/full-seed0 --source stdlib \
        --out docs/data/contribution

Of each document every edge of reads with a choice is cut at all tokens (`Ablate`), one after the other, and the
change of the document's mean loss is ranked against four numbers of the edge, means over the document's tokens:

    weight        p_i
    size          |p_i| rms(v_i)
    contribution  |<p_i v_i, h>| / |h|^2, by projection on the read
    turned        1 - cos(h, h'), h' the read without the edge, its other weights renormalised

A document gives one Spearman rank correlation for each; the mean over documents has its standard error over them.
Documents of held-out text are for the user to choose: a run folder's own corpus was trained on, its last files were
not."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from attnres.cli import carry_out
from attnres.data import open_source
from attnres.head import evaluating, next_token_losses
from attnres.inspect import Ablate, find_residual, intervene, read_vectors
from attnres.inspect.attribution import spearman
from attnres.inspect.contribution import to_one
from attnres.inspect.survey import encode
from attnres.models.encoding import token_in_front
from attnres.models.open import open_checkpoint
from attnres.stats import standard_error

MEASURES = ("weight", "size", "contribution", "turned")


def measures_of(model: Any, ids: torch.Tensor) -> list[dict[str, np.ndarray]]:
    """For each read the numbers of its sources, means over the text's tokens."""
    vectors = read_vectors(model, ids)
    sums_to_one = find_residual(model).traits.sums_to_one
    rows = []
    for weights, sources, h in zip(vectors.weights, vectors.sources, vectors.reads, strict=True):
        p, v, h = weights.double(), torch.stack(list(sources), 1).double(), h.double()
        terms = p.unsqueeze(-1) * v  # (T, n, d)
        whole = terms.sum(1, keepdim=True)
        left = whole - terms
        if sums_to_one:
            left = left / (1 - p).clamp_min(1e-12).unsqueeze(-1)
        turned = 1 - torch.cosine_similarity(left, whole, dim=-1)
        rows.append(
            {
                "weight": p.abs().mean(0).numpy(),
                "size": (p.abs() * v.square().mean(-1).sqrt()).mean(0).numpy(),
                "contribution": to_one((terms * h.unsqueeze(1)).sum(-1)).abs().mean(0).numpy(),
                "turned": turned.mean(0).numpy(),
            }
        )
    return rows


def cuts_of(model: Any, ids: torch.Tensor, batch: int) -> list[list[float]]:
    """For each read the change of the text's mean loss when each of its sources is cut, `batch` cuts in a pass."""
    layout = find_residual(model).layout()
    edges = [(index, source.name) for index, read in enumerate(layout) for source in read.sources]
    changes: list[float] = []
    with evaluating(model), torch.no_grad():
        before = next_token_losses(model, ids[None]).mean().item()
        for start in range(0, len(edges), batch):
            part = edges[start : start + batch]
            edits = []
            for row, (index, source) in enumerate(part):
                mask = torch.zeros(len(part), len(ids), dtype=torch.bool)
                mask[row] = True
                edits.append(Ablate(source, reads=index, tokens=mask))
            with intervene(model, *edits):
                after = next_token_losses(model, ids.expand(len(part), -1)).mean(1)
            changes += (after - before).tolist()
    rest = iter(changes)
    return [[next(rest) for _ in read.sources] for read in layout]


def correlate(numbers: Sequence[dict[str, np.ndarray]], cuts: Sequence[Sequence[float]]) -> dict[str, float]:
    """Spearman's rank correlation of |change of the loss| with each number, over edges of reads with a choice; NaN for
    one that is constant."""
    choice = [index for index, row in enumerate(cuts) if len(row) > 1]
    cost = np.abs(np.concatenate([cuts[index] for index in choice]))
    values = {name: np.concatenate([numbers[index][name] for index in choice]) for name in MEASURES}
    ranks = {name: spearman(value, cost) for name, value in values.items()}
    return {name: math.nan if value is None else value for name, value in ranks.items()}


def main(
    models: tyro.conf.Positional[tuple[str, ...]],
    out: Path,
    source: str = "stdlib",
    documents: int = 24,
    tokens: int = 200,
    skip: int = 0,
    batch: int = 16,
) -> None:
    """Measure models on the first `tokens` tokens of so many documents of a source and write OUT/contribution.json.

    Args:
        models: run or model folders.
        out: folder.
        source: stdlib, a file or folder, hub:NAME.
        documents: of at least `tokens` tokens each, after the first `skip` of them.
        tokens: of a document.
        skip: documents left out, such as those that a run was trained on.
        batch: cuts in a forward pass.
    """
    results = []
    for name in models:
        checkpoint = open_checkpoint(name)
        model, tokenizer = checkpoint.load("fp32"), checkpoint.tokenizer
        before, rows, left = token_in_front(tokenizer), list[dict[str, float]](), skip
        for text in open_source(source).read():
            ids = encode(tokenizer, text[: 40 * tokens]).ids[: tokens - len(before)]
            if len(ids) + len(before) < tokens:
                continue
            if left:
                left -= 1
                continue
            whole = torch.tensor([*before, *ids.tolist()])
            rows.append(correlate(measures_of(model, whole), cuts_of(model, whole, batch)))
            print(name, len(rows), {key: round(value, 3) for key, value in rows[-1].items()}, flush=True)
            if len(rows) == documents:
                break
        table = {key: np.array([row[key] for row in rows]) for key in MEASURES}
        best = table["contribution"][:, None] - np.stack([table[key] for key in MEASURES], 1)
        results.append(
            {
                "model": checkpoint.title(),
                "residual": checkpoint.residual,
                "documents": len(rows),
                "tokens": tokens,
                "spearman": {key: [float(np.nanmean(value)), standard_error(value)] for key, value in table.items()},
                "contribution_less": {
                    key: [float(np.nanmean(best[:, i])), standard_error(best[:, i])] for i, key in enumerate(MEASURES)
                },
                "by_document": rows,
            }
        )
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"source": source, "skip": skip, "models": results}, indent=1)
    (out / "contribution.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))
