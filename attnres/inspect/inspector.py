"""A model and some text to an `Inspection`: everything that this package can measure.

inspection = inspect_model(model, tokenizer, documents, context=256)
inspection.save("inspection.json")
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import torch

from attnres.errors import UserError
from attnres.head import evaluating, next_token_losses
from attnres.inspect import geometry
from attnres.inspect.inspection import ByLabel, Example, Inspection, Weights, depth_distance, embedding_persistence
from attnres.inspect.kinds import KINDS, guess_language, kinds_of
from attnres.inspect.recording import Trace, find_residual, record
from attnres.inspect.subject import Model, Text, as_model, as_tokenizer, device_of, vocab_size
from attnres.inspect.survey import Encoded, Survey, check_documents, encode, read_documents, survey
from attnres.models.encoding import check_ids, pieces, token_in_front
from attnres.progress import counting
from attnres.residuals import depths
from attnres.stats import or_none

Kind = Literal["auto", "code", "prose"]

FIRST = 8
"""Documents that are looked at to tell code from prose."""


def inspect_model(
    model: Model,
    tokenizer: Any,
    documents: Iterable[Text],
    *,
    context: int,
    batch_size: int = 8,
    kind: Kind = "auto",
    limit: int | None = None,
    example: Text | None = None,
    name: str | None = None,
    source: str = "documents",
    progress: bool = False,
) -> Inspection:
    """Run documents through a model of this package and measure all that this package can.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> inspect_model(model, None, [list(range(50))], context=32)
    Inspection(AttnResQwen3ForCausalLM: block, 25 reads, 50 tokens, loss 3.9...)

    Args:
        tokenizer: of Transformers or `tokenizers`; None where texts are token ids, which have no kinds.
        documents: texts; each is cut into windows of `context` tokens, which are seen alone.
        batch_size: windows in a forward pass.
        kind: of the text, which decides the kinds of its tokens; "auto" looks at the first documents.
        limit: stop after so many tokens.
        example: a text whose tokens are shown one by one, cut after `context` tokens.
        name: of the model, for titles.
        source: name of the text, for titles.
        progress: show a bar on stderr where that is a terminal.

    Raises:
        UserError: no residual of this package, no text, a single token, or what `survey` and `encode` raise.
    """
    model = as_model(model)
    check_documents(documents)
    tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
    before = () if tokenizer is None else token_in_front(tokenizer)
    if context < len(before) + 2:
        raise UserError(f"context is {context} tokens: expected at least {len(before) + 2}, one to predict another")
    rest = iter(documents)
    first = list(islice(rest, FIRST))
    language = guess_language("\n".join(one for one in first if isinstance(one, str))) if kind == "auto" else kind
    names = KINDS[language] if tokenizer is not None and tokenizer.is_fast else ()

    def labelled() -> Iterator[Encoded]:
        for text, encoded in read_documents(tokenizer, chain(first, rest), limit):
            if names and isinstance(text, str):
                kinds = kinds_of(text, encoded.offsets, language)[: len(encoded.ids)]
                encoded = encoded._replace(labels=np.asarray(kinds))
            yield encoded

    options: dict[str, Any] = {"context": context, "batch_size": batch_size, "before": before}
    with counting("reading", limit, "tokens", shown=progress) as on_tokens:
        measured = survey(model, labelled(), labels=len(names), on_tokens=on_tokens, **options)
    if measured.loss.total == 0:
        raise UserError(
            "the text is empty: expected at least two tokens, one to predict another"
            if measured.trace.tokens - measured.windows * len(before) == 0
            else "the text is a single token: expected at least two, one to predict another"
        )
    inspection = from_survey(model, measured, name=name, source=source, context=context, kind=language, kinds=names)
    if example is None:
        return inspection
    shown = show_example(model, tokenizer, example, context=context, kind=language)
    return dataclasses.replace(inspection, example=shown)


def from_survey(
    model: Any, measured: Survey, *, name: str | None, source: str, context: int, kind: str, kinds: Sequence[str]
) -> Inspection:
    """Return the inspection of a survey, without an example; `kinds` are the names of its labels."""
    inspection = from_trace(model, measured.trace, name=name, source=source)
    routing, loss = inspection.routing, measured.loss
    if routing is not None:
        routing = {**routing, "high": measured.high, "largest": measured.largest}
    about = {"documents": measured.documents, "windows": measured.windows, "context": context, "kind": kind}
    return dataclasses.replace(
        inspection,
        data={**inspection.data, **about},
        routing=routing,
        kinds=_by_label(measured, kinds),
        losses={"mean": loss.mean, "error": loss.error, "tokens": int(loss.total)},
    )


def from_trace(model: Any, trace: Trace, *, name: str | None = None, source: str = "inputs") -> Inspection:
    """Return the inspection of a recording, of a model of any inputs: text, pictures, sound.

    >>> import attnres
    >>> model = attnres.build("pico", "block", vocab_size=50)
    >>> with attnres.record(model) as trace:
    ...     _ = model(input_ids=torch.arange(9)[None])
    >>> from_trace(model, trace)
    Inspection(AttnResQwen3ForCausalLM: block, 25 reads, 9 tokens)

    Args:
        model: it has a residual of this package, of Transformers or by `attnres.attach`.
        trace: of `attnres.record(model)`. name, source: of the model and of what it was given, for titles.

    Raises:
        UserError: no residual of this package, or nothing was recorded.
    """
    if not trace.tokens:
        raise UserError("nothing was recorded: run the model inside `with attnres.record(model) as trace:`")
    residual = find_residual(model)
    mixing = trace.mixing
    nats = [or_none(value) for value in trace.entropy]
    settings = getattr(getattr(model, "config", None), "residual_settings", None)
    routing: Weights | None = None
    if trace.weighs:
        routing = {
            "reads": trace.reads,
            "sources": trace.sources,
            "layout": [read.to_json() for read in trace.layout],
            "weights": trace.weights,
            "contribution": trace.contribution,
            "size": trace.size,
        }
    return Inspection(
        model={
            "name": name or type(model).__name__,
            "residual": residual.name,
            "traits": residual.traits._asdict(),
            "settings": dict(settings or {}),
            "num_sublayers": residual.num_sublayers,
            "width": residual.width,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        data={"source": source, "tokens": trace.tokens},
        reads=trace.reads,
        routing=routing,
        entropy={
            "nats": nats,
            "effective": [None if value is None else math.exp(value) for value in nats],
            "most": [len(names) or None for names in trace.sources],
        },
        mixing=None if mixing is None else mixing.tolist(),
        mixing_contribution=None if trace.mixing_contribution is None else trace.mixing_contribution.tolist(),
        distance=None if mixing is None else depth_distance(mixing, depths(trace.layout)).tolist(),
        persistence=None if mixing is None else embedding_persistence(mixing).tolist(),
        sharpness=geometry.sharpness(residual),
        query_cosine=geometry.query_cosine(residual),
        query_pca=geometry.query_pca(residual),
        learned={
            name: {"values": table.values.tolist(), "axes": list(table.axes), "title": table.title}
            for name, table in residual.tables().items()
        },
        output_rms=trace.output_rms,
        input_rms=trace.input_rms,
        source_rms=trace.source_rms,
        source_cosine=trace.source_cosine,
        key_cosine=trace.key_cosine,
    )


@torch.no_grad()
def show_example(model: Model, tokenizer: Any, text: Text, *, context: int, kind: str) -> Example | None:
    """Return every token of a text, cut after `context` tokens, with its weights in each read; None for a residual that
    weighs nothing. Fields as in `Inspection.example`."""
    model = as_model(model)
    before = () if tokenizer is None else token_in_front(tokenizer)
    encoded = encode(tokenizer, text)
    keep = context - len(before)
    ids = encoded.ids[:keep].tolist()
    inputs = torch.tensor([[*before, *ids]], device=device_of(model))
    check_ids(inputs, vocab_size(model))
    with evaluating(model), record(model, tokens=True) as trace:
        losses = next_token_losses(model, inputs)[0]
    if not trace.weighs:
        return None
    names = (*KINDS[kind], "special")  # -1 is the last
    if isinstance(text, str):
        labels, tokens = kinds_of(text, encoded.offsets, kind)[:keep], pieces(tokenizer, ids, text, encoded.offsets)
        text = text[: encoded.offsets[keep - 1][1]] if len(encoded.offsets) > keep else text
    else:
        labels, tokens, text = [-1] * len(ids), [str(token) for token in ids], " ".join(map(str, ids))
    return {
        "text": text,
        "tokens": tokens,
        "ids": ids,
        "kinds": [names[label] for label in labels],
        "losses": [*losses[len(before) :].tolist(), None],
        "sources": trace.sources,
        "weights": [row[0, len(before) :].tolist() for row in trace.token_weights],
        "contribution": [row[0, len(before) :].tolist() for row in trace.token_contributions],
    }


def _by_label(measured: Survey, names: Sequence[str]) -> ByLabel | None:
    """Return means of the labels that occurred."""
    if not measured.trace.weighs:
        return None
    pairs = zip(names, measured.by_label, measured.contributions_by_label)
    means = [(name, weights, contributions) for name, weights, contributions in pairs if weights.total]
    if not means:
        return None
    return {
        "names": [name for name, _, _ in means],
        "tokens": [int(weights.total) for _, weights, _ in means],
        "documents": [weights.items for _, weights, _ in means],
        "weights": [measured.rows(weights.mean) for _, weights, _ in means],
        "error": [measured.rows(weights.error) for _, weights, _ in means],
        "contribution": [measured.rows(contributions.mean) for _, _, contributions in means],
        "contribution_error": [measured.rows(contributions.error) for _, _, contributions in means],
    }
