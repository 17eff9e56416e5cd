"""One model looked at: what the command `attnres inspect` does."""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.device import pick_device
from attnres.errors import UserError
from attnres.files import write_json
from attnres.folders import refuse_other
from attnres.inspect.attribution import Attribution
from attnres.inspect.edits import KnockOut
from attnres.inspect.inspection import Inspection
from attnres.inspect.inspector import inspect_model
from attnres.inspect.intervene import intervene
from attnres.inspect.measures import dynamics
from attnres.inspect.prune import check_prunable, prune_report
from attnres.inspect.survey import Survey, encode, front, survey
from attnres.inspect.tables import show
from attnres.models.open import Checkpoint
from attnres.progress import counting
from attnres.residuals import traits_of
from attnres.studies.look_config import InspectConfig
from attnres.studies.removals import (
    attribution_table,
    find_knock_out,
    knock_out_table,
    last_window,
    next_token_table,
    prune_table,
    source_and_read,
)
from attnres.studies.since import change_since, since_table
from attnres.studies.texts import LookText, batch_size_of, context_of, open_residual, text_of
from attnres.terminal import say, wide
from attnres.training.metrics import read as read_metrics


def look(config: InspectConfig, console: Console | None = None) -> Inspection:
    """Inspect a model and print what is found; the options of `InspectConfig` say what else is done.

    Raises:
        UserError: no model with a residual of this package, no text, or options that do not fit.
    """
    console = wide(console)
    checkpoint, residual = open_residual(config, config.model)
    run = checkpoint.run
    text = text_of(config, run)
    context = context_of(config, checkpoint)
    wanted = [(request, *source_and_read(request)) for request in config.knock_out]
    if config.attribute and text.alone is None:
        raise UserError("--attribute looks at the prediction after one text: give it with --text or --file")
    if config.graph and (config.out is None or not config.attribute):
        raise UserError("--graph draws what --attribute measured into the folder --out: give both")
    if config.prune:
        check_prunable(residual, traits_of(residual), config.threshold)
    elif config.threshold != InspectConfig.threshold:
        raise UserError(f"threshold is {config.threshold}, which is of --prune alone: give both, or neither")
    change = None if config.since is None else change_since(checkpoint, config.since)
    out = None if config.out is None else refuse_other(config.out, "inspection")
    model = checkpoint.load(config.dtype, str(pick_device(config.device)))

    knock_outs = [(request, find_knock_out(source, read, model)) for request, source, read in wanted]

    options: dict[str, Any] = {
        "context": context,
        "batch_size": batch_size_of(config.batch_tokens, checkpoint, context),
    }
    first = text.alone or next(text.read(), "")

    def inspected(model: Any, name: str) -> Inspection:
        return inspect_model(
            model,
            checkpoint.tokenizer,
            text.read(),
            kind=config.kind,
            limit=config.limit,
            example=first,
            name=name,
            source=text.name,
            progress=config.progress,
            **options,
        )

    inspection = inspected(model, checkpoint.title())
    if run is not None:
        inspection.dynamics = dynamics(read_metrics(run / "metrics.jsonl"))
    show(inspection, console, example=text.alone is not None, by=config.by)
    for remark in _remarks(config, checkpoint, text, inspection):
        say(console, remark)
    files = []
    if out is not None:
        inspection.save(out / "inspection.json")
        files.append(out / "inspection.json")

    if change is not None:
        record = since_table(change, checkpoint, inspection, inspected, config.by, console)
        if out is not None:
            write_json(out / "since.json", record)
            files.append(out / "since.json")

    def survey_again(what: str, *edits: KnockOut) -> Survey:
        documents = _encoded(checkpoint, text, config.limit)
        edited = intervene(model, *edits) if edits else nullcontext()
        with edited, counting(what, inspection.data["tokens"], "tokens", shown=config.progress) as on_tokens:
            return survey(model, documents, before=front(checkpoint.tokenizer), on_tokens=on_tokens, **options)

    plain = survey_again("nothing removed") if config.prune or knock_outs else None
    if config.prune and plain is not None:
        report = prune_report(inspection, config.threshold)
        record = prune_table(report, plain, survey_again, console)
        if out is not None:
            write_json(out / "prune.json", record)
            files.append(out / "prune.json")
    if knock_outs and plain is not None:
        rows = knock_out_table(knock_outs, plain, survey_again, console)
        if text.alone is not None:
            following = next_token_table(checkpoint, model, text.alone, context, knock_outs, console)
            rows = [row | {"next_tokens": tokens} for row, tokens in zip(rows, following, strict=True)]
        if out is not None:
            write_json(out / "knock_out.json", rows)
            files.append(out / "knock_out.json")
    if config.attribute and text.alone is not None:
        attribution = attribution_table(
            checkpoint, model, last_window(checkpoint, text.alone, context), config, console
        )
        if out is not None:
            attribution.save(out / "attribution.json")
            files.append(out / "attribution.json")
        if config.graph and out is not None:
            files += _pictures(attribution, checkpoint.title(), out)
    if out is not None:
        from attnres.figures import write_figures

        figures = write_figures(inspection, out, by=config.by)
        say(console, f"\n{out}: {', '.join(file.name for file in files)}; figures: {len(figures)}")
        earlier = [out / f"{name}.json" for name in ("prune", "knock_out", "attribution", "since")]
        if left := [file.name for file in earlier if file.exists() and file not in files]:
            say(console, f"from an earlier inspection: {', '.join(left)}")
    return inspection


def _pictures(attribution: Attribution, name: str, out: Path) -> list[Path]:
    """Write the edges of a prediction as a graph and as a heatmap."""
    from attnres.figures import NotShown, save_all, style
    from attnres.figures.edges import edge_map, graph

    plots = []
    with style.style():
        plots.append(edge_map(attribution, f"{name}: which edges the prediction depends on"))
        with suppress(NotShown):
            plots.append(graph(attribution, f"{name}: how the prediction is made"))
    return save_all(plots, out, ("svg",))


def _remarks(config: InspectConfig, checkpoint: Checkpoint, text: LookText, inspection: Inspection) -> list[str]:
    """What was done to the text that the user may not expect."""
    data, remarks = inspection.data, []
    if text.alone is not None and data["windows"] > 1:
        remarks.append(
            f"the text is longer than the {data['context']:,} tokens of a window: it was read in {data['windows']:,} "
            "windows, each without what stands before it; the tokens shown are those of the first"
        )
    if data["tokens"] - len(front(checkpoint.tokenizer)) * data["windows"] == config.limit:
        remarks.append(f"stopped after {config.limit:,} tokens, see --limit")
    unknown_id = checkpoint.tokenizer.unk_token_id
    if text.alone is not None and unknown_id is not None:
        ids = encode(checkpoint.tokenizer, text.alone).ids
        if count := int((ids == unknown_id).sum()):
            remarks.append(f"{count} of {len(ids)} tokens are what the tokenizer has for characters it does not know")
    return remarks


def _encoded(checkpoint: Checkpoint, text: LookText, limit: int) -> Iterator[Any]:
    """The documents as the inspection read them, without labels."""
    for document in text.read():
        encoded = encode(checkpoint.tokenizer, document)
        if len(encoded.ids):
            yield encoded._replace(ids=encoded.ids[:limit], labels=encoded.labels[:limit])
        limit -= len(encoded.ids)
        if limit <= 0:
            return
