"""What a study of nanoGPT with depth reads found, asked of trained runs: does the embedding's weight rise where a
statement or a sentence begins, at which read, and does its removal hurt there?

The models read held-out documents of their own data, each cut into windows seen alone. For a read l, a document D and a
set K of kinds of tokens (`attnres.inspect.kinds`)

    w_l(D, K)     = mean over D's tokens of these kinds of a_{embedding -> l}
    spike_l(D)    = w_l(D, starts) - w_l(D, others)
    same_l(D)     = sum_v h_v (w_l(D, starts that are token v) - w_l(D, others that are v)) / sum_v h_v,
                    h_v = n_s n_o / (n_s + n_o) of v's n_s starts and n_o others in D
    change(D, K)  = mean over D's tokens of these kinds of the next token's loss with the edge removed less without

`same` tells a start from the tokens that tend to stand there: a query is constant, so the embedding's score depends on
the token alone, and `return` is hardly ever anything but a start.

Figures are means over documents, then over seeds. `se_documents` is what one seed's documents leave open (the root mean
square over seeds), `se_seeds` what the seeds do, with s over n - 1; None for a single one.

The read with the largest spike is chosen on every other document and measured on the rest: the largest of many on the
same documents would be too large. Reads of one source, whose weight is one whatever they learnt, take no part.

Source: github.com/aupadhyay/attnres-exp ("embedding spikes at statement starts in code at the last boundary").
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from attnres.data.build import Prepared
from attnres.errors import UserError
from attnres.head import next_token_losses
from attnres.inspect.edits import Ablate, intervene
from attnres.inspect.kinds import INSIDE, KINDS, guess_language, kinds_of
from attnres.inspect.recording import record
from attnres.models.open import open_checkpoint
from attnres.ops.devices import pick_device
from attnres.report.runs import Run, load_study
from attnres.stats import plain, standard_error
from attnres.training.config import DataConfig
from attnres.training.data import prepare_from

EMBEDDING = "embedding"
ALIKE = {"code": INSIDE, "prose": ("content word", "function word")}
"""Kinds that a start is also held against: the rest of a statement; other words' beginnings."""
PLACES = ("all tokens", "starts", "other tokens")
"""Where an edge is removed. At starts alone, what changes there is not the loss of what other tokens hand over."""


@dataclass
class FindingsConfig:
    """What is read and how much of it.

    Attributes:
        runs: folders of runs, all on the same data.
        documents: held-out documents, evenly spread over those that there are.
        windows: of each document, evenly spread; a window is as long as in training.
        language: "code", "prose", or "auto": as the documents, taken together, look.
    """

    runs: list[str] = field(default_factory=list)
    documents: int = 128
    windows: int = 16
    language: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Document:
    """Windows of one document: ids (n, T) and the kind of every token (n, T), -1 for none."""

    ids: Tensor
    kinds: Tensor


def findings(config: FindingsConfig) -> dict[str, Any]:
    """Look at every finished run whose residual weighs the embedding; JSON values.

    {"language", "start", "kinds", "alike", "documents", "tokens": of each kind, "skipped": labels of variants that
    weigh nothing, "variants": [{"label", "residual", "seeds", "reads", "boundaries": numbers of reads between blocks,
    "weights": {kind: figures}, "spikes": {"other tokens", "alike", "same token": figures}, "largest": {"any read": ...,
    "boundary": ...}, "knock_outs": [...]}]}; figures are {"mean", "se_documents", "se_seeds"}, a number a read.

    Raises:
        UserError: no such runs, runs on different data, or documents that are too few.
    """
    study = load_study(*config.runs)
    runs = [run for run in study.runs if run.finished]
    if not runs:
        raise UserError(f"no run in {', '.join(config.runs)} is finished: finish them with attnres compare")
    if config.documents < 4 or config.windows < 1:
        raise UserError(
            f"{config.documents} documents of {config.windows} windows: expected at least 4 documents and 1 window"
        )
    language, documents = read_documents(runs, config)
    device = pick_device(config.device)
    kinds = KINDS[language]
    variants, skipped = [], []
    for label in study.labels:
        mine = [run for run in runs if run.label == label]
        variant = _variant(mine, documents, language, device) if mine else None
        if variant is None:
            skipped.append(label)
        else:
            variants.append({"label": label, **variant})
    counts = np.sum([_counts(document, len(kinds)) for document in documents], axis=0)
    return {
        "format": 1,
        "language": language,
        "start": kinds[0],
        "kinds": list(kinds),
        "alike": list(ALIKE[language]),
        "documents": len(documents),
        "tokens": dict(zip(kinds, counts.astype(int).tolist(), strict=True)),
        "skipped": skipped,
        "variants": variants,
    }


# ------------------------------------------------------------------ documents


def read_documents(runs: Sequence[Run], config: FindingsConfig) -> tuple[str, list[Document]]:
    """Held-out documents of the runs' own data with the kinds of their tokens, found in each document as a whole."""
    settings = [{key: run.config["data"].get(key) for key in ("source", "tokenizer", "seq_len")} for run in runs]
    sums = [run.data.get("tokenizer_sha256") for run in runs]
    if any(other != settings[0] for other in settings) or any(other != sums[0] for other in sums):
        raise UserError("the runs were trained on different data: give one comparison at a time")
    prepared = prepare_from(DataConfig(**runs[0].config["data"]), progress=False)
    if sums[0] not in (None, prepared.header["tokenizer_sha256"]):
        raise UserError(
            f"the text {settings[0]['source']} or its tokenizer changed since these runs were trained on it"
        )
    texts = list(_texts(prepared, config.documents))
    if len(texts) < 4:
        raise UserError(
            f"{len(texts)} held-out documents: expected 4 or more, hold out more of {settings[0]['source']}"
        )
    language = config.language
    if language == "auto":
        language = guess_language("\n".join(text for text, _, _ in texts))
    seq_len = int(settings[0]["seq_len"])
    return language, [
        _windows(np.array(ids), kinds_of(text, offsets, language), seq_len, config.windows)
        for text, ids, offsets in texts
    ]


def _texts(prepared: Prepared, count: int) -> Iterator[tuple[str, list[int], list[tuple[int, int]]]]:
    """Text, ids and offsets of documents of two tokens or more; those whose ids their text does not give are left out,
    for nothing says where in it they lie."""
    tokenizer = cast(Any, Tokenizer.from_file(str(prepared.path / "tokenizer.json")))
    tokenizer.encode_special_tokens = True  # as the tokens were made: in a text they are text
    tokens = prepared.tokens("val")
    starts = [int(start) for start in tokens.document_starts()]
    spans = [(a, b - 1) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True) if b - a > 2]
    count = min(count, len(spans))
    for i in range(count):
        start, end = spans[i * len(spans) // count]
        ids = tokens[start:end].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        retokenised = tokenizer.encode(text, add_special_tokens=False)
        if retokenised.ids == ids:
            yield text, ids, retokenised.offsets


def _windows(ids: np.ndarray, kinds: Sequence[int], length: int, count: int) -> Document:
    fit = len(ids) // length
    if not fit:
        return Document(torch.from_numpy(ids)[None], torch.tensor(kinds)[None])
    count = min(count, fit)
    slices = [slice(start, start + length) for start in (i * fit // count * length for i in range(count))]
    return Document(
        torch.from_numpy(np.stack([ids[part] for part in slices])),
        torch.tensor([kinds[part] for part in slices]),
    )


def _counts(document: Document, kinds: int) -> np.ndarray:
    return np.bincount(document.kinds[document.kinds >= 0].numpy(), minlength=kinds).astype(float)


# ------------------------------------------------------------------ one variant


def _variant(
    runs: Sequence[Run], documents: Sequence[Document], language: str, device: torch.device
) -> dict[str, Any] | None:
    """The figures of one variant over its seeds; None where no read weighs the embedding against something."""
    kinds = KINDS[language]
    alike = [kinds.index(name) for name in ALIKE[language]]
    others = list(range(1, len(kinds)))
    counts = np.stack([_counts(document, len(kinds)) for document in documents])
    means, same, reads, sources = [], [], [], []
    for run in runs:
        with _loaded(run, device) as model:
            weights, matched, reads, sources, weighs = embedding_weights(model, documents, len(kinds))
        if not weighs:
            return None
        means.append(weights)
        same.append(matched)
    by_kind = np.stack(means)  # (seeds, documents, reads, kinds)
    spikes = {
        name: by_kind[..., 0] - _mean_of(by_kind, counts, group)
        for name, group in (("other tokens", others), ("alike", alike))
    }
    spikes["same token"] = np.stack(same)
    several = [i for i, names in enumerate(sources) if EMBEDDING in names and len(names) > 1]
    if not several:
        return None
    boundaries = [i for i in several if sources[i][-1].startswith("block ")]
    largest = {
        name: _largest(spikes, chosen, reads)
        for name, chosen in (("any read", several), ("boundary", boundaries))
        if chosen
    }
    at = (largest.get("boundary") or largest["any read"])["index"]
    changes = []
    for run in runs:
        with _loaded(run, device) as model:
            changes.append([_knock_outs(model, document, several, at, others, alike) for document in documents])
    return {
        "residual": runs[0].residual,
        "seeds": [run.seed for run in runs],
        "reads": reads,
        "boundaries": boundaries,
        "weights": {name: figures(by_kind[..., k]) for k, name in enumerate(kinds)},
        "spikes": {name: figures(values) for name, values in spikes.items()},
        "largest": largest,
        "knock_outs": _knock_out_rows(np.array(changes), reads[at]),
    }


class _loaded:
    """A run's model in evaluation mode, let go at the end of the block, without gradients."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device, self.guard = run, device, torch.no_grad()

    def __enter__(self) -> nn.Module:
        model = open_checkpoint(self.run.folder).load("fp32", str(self.device))
        self.guard.__enter__()
        return model

    def __exit__(self, *failed: Any) -> None:
        self.guard.__exit__(*failed)


def embedding_weights(
    model: nn.Module, documents: Sequence[Document], kinds: int
) -> tuple[np.ndarray, np.ndarray, list[str], list[list[str]], bool]:
    """(documents, reads, kinds) mean weight of the embedding, NaN where there is none; (documents, reads) how much
    larger it is where a token is a start than where the same token is none; names of the reads and of their sources;
    whether the reads are softmaxes."""
    device = next(model.parameters()).device
    rows, same, reads, sources, weighs = [], [], [], [], False
    for document in documents:
        labelled = document.kinds >= 0
        pairs, which, counts = np.unique(
            np.stack([document.kinds[labelled].numpy(), document.ids[labelled].numpy()]),
            axis=1,
            return_inverse=True,
            return_counts=True,
        )
        labels = torch.full_like(document.kinds, -1)
        labels[labelled] = torch.from_numpy(which.reshape(-1))
        with record(model, labels=len(counts)) as trace, torch.no_grad():
            trace.label(labels)
            model(input_ids=document.ids.to(device), use_cache=False)
        reads, sources, weighs = trace.reads, trace.sources, trace.routing is not None
        none = np.full(len(counts), np.nan)
        of_pair = np.stack(
            [
                table[:, names.index(EMBEDDING)] if EMBEDDING in names else none
                for table, names in zip(trace.label_weights, sources, strict=True)
            ]
        )
        rows.append(np.stack([_weighted(of_pair, counts * (pairs[0] == kind)) for kind in range(kinds)], 1))
        same.append(same_token(of_pair, counts, pairs[0] == 0, pairs[1]))
    return np.array(rows), np.array(same), reads, sources, weighs


def same_token(weights: np.ndarray, counts: np.ndarray, start: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(reads,) `same` of the formula above, from mean weights (reads, groups) of groups of `counts` tokens, each of one
    id, of starts or of others; NaN where no id is in both."""
    differences, shares = [], []
    for token in np.intersect1d(ids[start], ids[~start]):
        of_starts, of_others = counts * (start & (ids == token)), counts * (~start & (ids == token))
        differences.append(_weighted(weights, of_starts) - _weighted(weights, of_others))
        n_starts, n_others = of_starts.sum(), of_others.sum()
        shares.append(n_starts * n_others / (n_starts + n_others))
    if not shares:
        return np.full(len(weights), np.nan)
    return np.average(np.array(differences), axis=0, weights=shares)


def _weighted(values: np.ndarray, share: np.ndarray) -> np.ndarray:
    """(reads,) the mean of (reads, groups) over groups of `share` (groups,) tokens; NaN where there are none."""
    held = share > 0
    return (values[:, held] @ share[held]) / share[held].sum() if held.any() else np.full(len(values), np.nan)


def _mean_of(by_kind: np.ndarray, counts: np.ndarray, group: Sequence[int]) -> np.ndarray:
    """(seeds, documents, reads): the mean over tokens of several kinds; (documents, kinds) says how many there are."""
    share = counts[:, group]
    total = share.sum(1)[None, :, None]
    sums = (np.where(share[:, None] > 0, by_kind[..., group], 0.0) * share[:, None]).sum(-1)
    return np.where(total > 0, sums / np.maximum(total, 1), np.nan)


def _largest(spikes: dict[str, np.ndarray], among: Sequence[int], reads: Sequence[str]) -> dict[str, Any]:
    """The read with the largest spike over the other tokens, and its figures on the documents it was not chosen on."""
    means = _over(spikes["other tokens"][:, ::2], 1).mean(0)[list(among)]
    index = among[int(np.nanargmax(means))] if not np.isnan(means).all() else among[-1]
    held = {name: {k: v[index] for k, v in figures(values[:, 1::2]).items()} for name, values in spikes.items()}
    per_seed = _over(spikes["other tokens"][:, :, list(among)], 1)
    first = [reads[among[int(np.nanargmax(row))]] for row in per_seed if not np.isnan(row).all()]
    return {"index": index, "read": reads[index], "of": len(among), **held, "largest_of_each_seed": first}


# ------------------------------------------------------------------ knock-outs


def _knock_outs(
    model: nn.Module, document: Document, all_reads: list[int], at: int, others: Sequence[int], alike: Sequence[int]
) -> list[list[float]]:
    """For each edit (reads, then places) the mean loss change after starts, other tokens and tokens alike; NaN where a
    document has none."""
    device = next(model.parameters()).device
    ids, kinds = document.ids.to(device), document.kinds
    before = next_token_losses(model, ids).cpu()
    masks = {"all tokens": None, "starts": (kinds == 0).to(device), "other tokens": (kinds > 0).to(device)}
    groups = [kinds[:, :-1] == 0, torch.isin(kinds, torch.tensor(others))[:, :-1]]
    groups.append(torch.isin(kinds, torch.tensor(alike))[:, :-1])
    rows = []
    for reads in (all_reads, [at]):
        for place in PLACES:
            with intervene(model, Ablate(EMBEDDING, reads=reads, tokens=masks[place])):
                change = (next_token_losses(model, ids).cpu() - before).double()
            rows.append([change[group].mean().item() if group.any() else math.nan for group in groups])
    return rows


def _knock_out_rows(changes: np.ndarray, at: str) -> list[dict[str, Any]]:
    """(seeds, documents, edits, groups) -> one row an edit: the change after starts, other tokens and tokens alike, and
    how much more it is after starts, document by document."""
    rows = []
    for i, (reads, place) in enumerate((reads, place) for reads in ("all reads", at) for place in PLACES):
        starts, others, alike = (changes[:, :, i, group] for group in range(3))
        parts = {"starts": starts, "other tokens": others, "alike": alike}
        more = {"starts - other tokens": starts - others, "starts - alike": starts - alike}
        rows.append({"reads": reads, "at": place, **{k: figures(v) for k, v in {**parts, **more}.items()}})
    # An edit of some tokens is felt by later ones too, so the two edits are compared each at its own tokens.
    for i, reads in enumerate(("all reads", at)):
        at_this_edge = changes[:, :, 3 * i + 1, 0], changes[:, :, 3 * i + 2, 1]
        parts = {
            "starts": at_this_edge[0],
            "other tokens": at_this_edge[1],
            "starts - other tokens": at_this_edge[0] - at_this_edge[1],
        }
        rows.append({"reads": reads, "at": "the token itself", **{k: figures(v) for k, v in parts.items()}})
    return rows


# ------------------------------------------------------------------ means and errors


def figures(values: np.ndarray) -> dict[str, Any]:
    """(seeds, documents, ...) -> mean, se_documents and se_seeds, each (...) as lists; NaN documents are left out, and
    what is then unknown is None."""
    means = _over(values, 1)
    within = np.sqrt((standard_error(values, 1) ** 2).mean(0))
    between = standard_error(means, 0)
    return {"mean": plain(means.mean(0)), "se_documents": plain(within), "se_seeds": plain(between)}


def _over(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean over an axis of what is no NaN; NaN where nothing is."""
    n = (~np.isnan(values)).sum(axis)
    return np.where(n > 0, np.nansum(values, axis) / np.maximum(n, 1), np.nan)
