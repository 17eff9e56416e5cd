"""What the command `attnres inspect` does."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from attnres.errors import UserError
from attnres.files import write_json
from attnres.folders import refuse_other
from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.circuits import circuit
from attnres.inspect.config import InspectConfig
from attnres.inspect.edits import Ablate, find_ablation, intervene, source_and_read, source_names
from attnres.inspect.effects import Effect, effect
from attnres.inspect.inspection import Inspection, dynamics
from attnres.inspect.inspector import inspect_model
from attnres.inspect.lens import logit_lens
from attnres.inspect.patching import patch
from attnres.inspect.prune import check_prunable, prune_report
from attnres.inspect.steps import StepChange, between
from attnres.inspect.survey import Survey, encode, read_documents, survey
from attnres.inspect.tables import (
    attribution_table,
    knock_out_table,
    lens_table,
    next_tokens,
    patching_table,
    prune_table,
    show,
    since_table,
)
from attnres.inspect.texts import LookText, PredictionTarget, batch_size_of, context_of, open_residual, text_of
from attnres.models.encoding import check_text, piece, token_in_front
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.ops.devices import pick_device
from attnres.progress import counting, say, wide
from attnres.residuals import traits_of
from attnres.text import listed
from attnres.training.checkpoint import kept
from attnres.training.records import read_metrics

MOST = 200
"""Links of a graph that are measured."""
LEAST = 0.01
"""Nats of an effect from which a link is one of the graph that is written."""


@dataclass(frozen=True)
class _Subject:
    """A model, a text and how they are run, shared by the parts of an inspection.

    Attributes:
        model: of `checkpoint`, loaded. context, batch_size: tokens of a window, windows of a pass.
    """

    config: InspectConfig
    console: Console
    checkpoint: Checkpoint
    model: Any
    text: LookText
    context: int
    batch_size: int

    def inspect(self, model: Any, name: str) -> Inspection:
        """Inspect a model, this one or one of another step, on the text."""
        return inspect_model(
            model,
            self.checkpoint.tokenizer,
            self.text.read(),
            kind=self.config.kind,
            limit=self.config.limit,
            example=self.text.alone or next(self.text.read(), ""),
            name=name,
            source=self.text.name,
            progress=self.config.progress,
            context=self.context,
            batch_size=self.batch_size,
        )

    def prediction(self, text: str) -> PredictionTarget:
        """Return the prediction of a text that the options name. Raises UserError."""
        return PredictionTarget.of(self.checkpoint.tokenizer, text, self.context, self.config)

    def survey(self, tokens: int, what: str, *edits: Ablate) -> Survey:
        """Measure losses on the text with edits of the reads; a bar that is full after `tokens` says `what` is
        measured."""
        edited, limit = intervene(self.model, *edits) if edits else nullcontext(), self.config.limit
        with edited, counting(what, tokens, "tokens", shown=self.config.progress) as on_tokens:
            return survey(
                self.model,
                (encoded for _, encoded in read_documents(self.checkpoint.tokenizer, self.text.read(), limit)),
                before=token_in_front(self.checkpoint.tokenizer),
                on_tokens=on_tokens,
                context=self.context,
                batch_size=self.batch_size,
            )


class _Out:
    """The folder of --out and the files of this inspection in it; without a folder nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.files = folder, list[Path]()

    def write(self, name: str, save: Callable[[Path], object]) -> None:
        """Have `save` write the file of that name."""
        if self.folder is not None:
            save(self.folder / name)
            self.files.append(self.folder / name)

    def write_record(self, name: str, record: Any) -> None:
        """Write a record as JSON."""
        self.write(name, lambda file: write_json(file, record))


def look(config: InspectConfig, console: Console | None = None) -> Inspection:
    """Inspect a model and print its reads, and carry out the other options of `InspectConfig`.

    Raises:
        UserError: no model with a residual of this package, no text, or options that do not fit.
    """
    console = wide(console)
    # What is cheap to find wrong is found before weights are read.
    checkpoint, residual = open_residual(config, config.model)
    text = text_of(config, checkpoint.run)
    context = context_of(config, checkpoint)
    edges = [(request, *source_and_read(request)) for request in config.knock_out]
    _check_options(config, text, residual)
    change = None if config.since is None else between(checkpoint, config.since, checkpoint.step)
    out = _Out(None if config.out is None else refuse_other(config.out, "inspection"))

    model = _load(config, checkpoint)
    knock_outs = [(request, find_ablation(source, read, model)) for request, source, read in edges]
    batch_size = batch_size_of(config.batch_tokens, checkpoint, context)
    subject = _Subject(config, console, checkpoint, model, text, context, batch_size)

    inspection = _inspect(subject, out)
    if change is not None:
        out.write_record("since.json", _since(subject, change, inspection))
    _remove(subject, inspection, knock_outs, out)
    _explain(subject, out)
    _draw(subject, inspection, out)
    return inspection


def _load(config: InspectConfig, checkpoint: Checkpoint) -> Any:
    """Return the model of a checkpoint in the precision and on the device that are asked for."""
    return checkpoint.load(config.dtype, str(pick_device(config.device)))


def _check_options(config: InspectConfig, text: LookText, residual: str) -> None:
    """Refuse with a UserError options of which one needs another, and --prune of a `residual` that it cannot prune."""
    given_by_option = {"--attribute": config.attribute, "--patch": config.patch is not None, "--lens": config.lens}
    named = [option for option, given in given_by_option.items() if given]
    if named and text.alone is None:
        raise UserError(f"{named[0]} looks at a prediction of one text: give it with --text or --file")
    for option, given, used in (
        ("position", config.position != InspectConfig.position, [*given_by_option, "--knock-out"]),
        ("target", config.target is not None, list(given_by_option)),
        ("against", config.against is not None, ["--attribute", "--patch"]),
    ):
        there = [*named, *(["--knock-out"] if config.knock_out and text.alone is not None else [])]
        if given and not set(used) & set(there):
            raise UserError(f"{option} is given, which is of {listed(used)} on one text: give one of these too")
    if config.patch is not None:
        check_text(config.patch, "the text of --patch")
    if config.graph and (config.out is None or not config.attribute):
        raise UserError("--graph draws what --attribute measured into the folder --out: give both")
    if config.prune:
        check_prunable(residual, traits_of(residual), config.threshold)
    elif config.threshold != InspectConfig.threshold:
        raise UserError(f"threshold is {config.threshold}, which is of --prune alone: give both, or neither")


def _inspect(subject: _Subject, out: _Out) -> Inspection:
    """Print and write the model's reads of the text."""
    config, checkpoint, text = subject.config, subject.checkpoint, subject.text
    inspection = subject.inspect(subject.model, checkpoint.title())
    if checkpoint.run is not None:
        inspection.dynamics = dynamics(read_metrics(checkpoint.run / "metrics.jsonl"))
    show(inspection, subject.console, example=text.alone is not None, by=config.by)
    for remark in _remarks(config, checkpoint, text, inspection):
        say(subject.console, remark)
    out.write("inspection.json", inspection.save)
    return inspection


def _since(subject: _Subject, change: StepChange, now: Inspection) -> dict[str, Any]:
    """Print and return what changed since a step; the reads of a step are known of one whose checkpoint was kept."""
    checkpoint, then = subject.checkpoint, None
    assert checkpoint.run is not None
    if (folder := kept(checkpoint.run, change.first)).is_dir():
        earlier = open_checkpoint(folder, trust_remote_code=checkpoint.trusted)
        name = f"{checkpoint.title()} at step {change.first:,}"
        then = subject.inspect(_load(subject.config, earlier), name)
    return since_table(change, then, now, subject.config.by, subject.console)


def _remove(subject: _Subject, inspection: Inspection, knock_outs: list[tuple[str, Ablate]], out: _Out) -> None:
    """Print and write the loss without edges of little weight (--prune), and without each edge that was named."""
    config, text = subject.config, subject.text
    if not (config.prune or knock_outs):
        return
    survey_again = partial(subject.survey, inspection.data["tokens"])
    plain = survey_again("nothing removed")
    if config.prune:
        report = prune_report(inspection, config.threshold)
        out.write_record("prune.json", prune_table(report, plain, survey_again, subject.console))
    if knock_outs:
        rows = knock_out_table(knock_outs, plain, survey_again, subject.console)
        if text.alone is not None:
            prediction, before, effects = subject.prediction(text.alone), None, dict[str, Effect]()
            ids = prediction.ids[: prediction.position + 1]
            for name, edit in knock_outs:
                effects[name] = effect(subject.model, ids, edit, top=5, before=before)
                before = effects[name].before
            next_tokens(effects, subject.console)
            for row, change in zip(rows, effects.values(), strict=True):
                row["next_tokens"] = [{"token": piece(prediction.tokenizer, one["id"]), **one} for one in change.top]
        out.write_record("knock_out.json", rows)


def _explain(subject: _Subject, out: _Out) -> None:
    """Print and write the edges on which one prediction of the text depends, and draw them with --graph."""
    config, model, console, text = subject.config, subject.model, subject.console, subject.text.alone
    if text is None or not (config.attribute or config.lens or config.patch is not None):
        return
    prediction, checkpoint = subject.prediction(text), subject.checkpoint
    ids, asked, shown = prediction.ids, prediction.asked, config.progress
    edges = sum(map(len, source_names(model)))
    if config.attribute:
        with counting("without each edge", edges, "edges", shown=shown) as on_edges:
            attribution = attribute(model, ids, **asked, progress=on_edges)
        attribution_table(attribution, prediction, console)
        out.write("attribution.json", attribution.save)
        if config.graph and out.folder is not None:
            out.files += _pictures(attribution, checkpoint.title(), out.folder)
            with counting("links", MOST, "links", shown=shown) as on_links:
                graph = circuit(model, ids, most=MOST, **asked, progress=on_links)
            record = graph.neuronpedia(LEAST, model=checkpoint.title())
            links = f"{len(record['links'])} links of at least {LEAST:g} nats that lead to the output"
            say(console, f"graph of tokens and layers: {links}")
            out.write_record("graph.json", record)
    if config.patch is not None:
        clean = [*token_in_front(prediction.tokenizer), *encode(prediction.tokenizer, config.patch).ids.tolist()]
        with counting("each edge from the other text", edges, "edges", shown=shown) as on_edges:
            patching = patch(model, clean, ids, **asked, progress=on_edges)
        patching_table(patching, prediction, console)
        out.write("patching.json", patching.save)
    if config.lens:
        lens = logit_lens(model, ids, top=1, position=prediction.position, target=config.target)
        lens_table(lens, prediction, console)
        out.write("lens.json", lens.save)


def _draw(subject: _Subject, inspection: Inspection, out: _Out) -> None:
    """Write the figures of the inspection, and print which files the folder holds."""
    if out.folder is None:
        return
    from attnres.figures import write_figures

    figures = write_figures(inspection, out.folder, by=subject.config.by)
    say(subject.console, f"\n{out.folder}: {', '.join(file.name for file in out.files)}; figures: {len(figures)}")
    earlier = [
        out.folder / f"{name}.json" for name in ("prune", "knock_out", "attribution", "patching", "lens", "since")
    ]
    if left := [file.name for file in earlier if file.exists() and file not in out.files]:
        say(subject.console, f"from an earlier inspection: {', '.join(left)}")


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
    """Return notes about the text that the user may not expect, such as a part left out."""
    data, remarks = inspection.data, []
    if text.alone is not None and data["windows"] > 1:
        remarks.append(
            f"the text is longer than the {data['context']:,} tokens of a window: it was read in {data['windows']:,} "
            "windows, each without what stands before it; the tokens shown are those of the first"
        )
    if data["tokens"] - len(token_in_front(checkpoint.tokenizer)) * data["windows"] == config.limit:
        remarks.append(f"stopped after {config.limit:,} tokens, see --limit")
    unknown_id = checkpoint.tokenizer.unk_token_id
    if text.alone is not None and unknown_id is not None:
        ids = encode(checkpoint.tokenizer, text.alone).ids
        if count := int((ids == unknown_id).sum()):
            remarks.append(f"{count} of {len(ids)} tokens are what the tokenizer has for characters it does not know")
    return remarks
