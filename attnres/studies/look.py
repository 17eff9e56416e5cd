"""One model looked at: what the command `attnres inspect` does."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..data.sources import open_source
from ..errors import UserError, unknown
from ..evals.scoring import LOGIT_BYTES
from ..evals.subject import Subject, find_subject, pick_device
from ..files import read_json, write_json
from ..inspect.attribution import Attribution, attribute
from ..inspect.config import InspectConfig
from ..inspect.edits import KnockOut
from ..inspect.effects import effect
from ..inspect.inspection import Inspection, inspect_model
from ..inspect.intervene import intervene, source_names
from ..inspect.measures import dynamics
from ..inspect.prune import PruneReport, check_prunable, prune_report
from ..inspect.record import read_names
from ..inspect.survey import Survey, encode, front, loss_change, survey
from ..inspect.tables import number, say, show, wide
from ..train.metrics import read as read_metrics

LARGEST_WINDOW = 2048
"""Tokens in a window where none is given: attention over more costs more than it shows."""
EDGES = 12
"""Edges that an attribution names."""


@dataclass(frozen=True)
class _Text:
    """What is looked at: documents that can be read several times, and their name; a text of the user's is `alone`."""

    name: str
    read: Callable[[], Iterator[str]]
    alone: str | None = None


def look(config: InspectConfig, console: Console | None = None) -> Inspection:
    """Inspect a model and print what is found; the options of `InspectConfig` say what else is done.

    Raises:
        UserError: no model with a residual of this package, no text, or options that do not fit.
    """
    console = wide(console)
    subject = find_subject(config.model, trust_remote_code=config.trust_remote_code)
    if not str(subject.config.model_type).startswith("attnres_"):
        raise UserError(
            f"{config.model} is a plain {subject.config.model_type} model without depth reads: give one of attnres, or "
            "make it one with attnres convert"
        )
    text = _text(config, _run_folder(config.model))
    context = _context(config, subject)
    wanted = [(given, *_source_and_read(given)) for given in config.knock_out]
    if config.attribute and text.alone is None:
        raise UserError("--attribute looks at the prediction after one text: give it with --text or --file")
    if config.prune:
        check_prunable(subject.config.residual, config.threshold)
    model = subject.load(config.dtype, str(pick_device(config.device)))

    knock_outs = [(given, _knock_out(source, read, model)) for given, source, read in wanted]

    options: dict[str, Any] = {"context": context, "batch_size": _batch_size(config, subject, context)}
    first = text.alone or next(text.read(), "")
    inspection = inspect_model(
        model,
        subject.tokenizer,
        text.read(),
        kind=config.kind,
        limit=config.limit,
        example=first,
        name=_short(config.model),
        source=text.name,
        progress=config.progress,
        **options,
    )
    run = _run_folder(config.model)
    if run is not None:
        inspection.dynamics = dynamics(read_metrics(run / "metrics.jsonl"))
    show(inspection, console, example=text.alone is not None)
    for remark in _remarks(config, subject, text, inspection):
        say(console, remark)
    out = None if config.out is None else Path(config.out)
    files = []
    if out is not None:
        inspection.save(out / "inspection.json")
        files.append(out / "inspection.json")

    def survey_again(*edits: KnockOut) -> Survey:
        documents = _encoded(subject, text, config.limit)
        before = front(subject.tokenizer)
        if not edits:
            return survey(model, documents, before=before, **options)
        with intervene(model, *edits):
            return survey(model, documents, before=before, **options)

    plain = survey_again() if config.prune or knock_outs else None
    if config.prune and plain is not None:
        report = prune_report(inspection, config.threshold)
        record = _prune(report, plain, survey_again, console)
        if out is not None:
            write_json(out / "prune.json", record)
            files.append(out / "prune.json")
    if knock_outs and plain is not None:
        rows = _knock(knock_outs, plain, survey_again, console)
        if text.alone is not None:
            _next_tokens(subject, model, text.alone, context, knock_outs, console)
        if out is not None:
            write_json(out / "knock_out.json", rows)
            files.append(out / "knock_out.json")
    if config.attribute and text.alone is not None:
        attribution = _attribute(subject, model, text.alone, context, console)
        if out is not None:
            attribution.save(out / "attribution.json")
            files.append(out / "attribution.json")
    if out is not None:
        from ..figures import write_figures

        figures = write_figures(inspection, out)
        say(console, f"\n{out}: {', '.join(file.name for file in files)}; figures: {len(figures)}")
    return inspection


# ------------------------------------------------------------------ which text


def _text(config: InspectConfig, run: Path | None) -> _Text:
    given = [name for name in ("text", "file", "corpus") if getattr(config, name) is not None]
    if len(given) > 1:
        raise UserError(f"both --{given[0]} and --{given[1]} are given: give one of them")
    if config.limit < 2:
        raise UserError(f"limit is {config.limit} tokens: expected at least 2, one to predict another")
    if config.text is not None:
        return _alone("the text", config.text)
    if config.file is not None:
        return _alone(config.file, _read(Path(config.file).expanduser()))
    spec, column = config.corpus, config.column
    if spec is None and run is not None:
        data = read_json(run / "config.json").get("data", {})
        spec, column = data.get("source"), data.get("column", column)
    if spec is None:
        raise UserError("there is no text to look at: give --text TEXT, --file FILE or --corpus SOURCE")
    source = open_source(spec, column=column)
    return _Text(source.name, source.read)


def _alone(name: str, text: str) -> _Text:
    # Arguments that are no UTF-8 come with lone surrogates in them.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not text or text.isspace():
        raise UserError(f"{name} is empty: expected some text, at least two tokens")
    return _Text(name, lambda: iter([text]), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): give a text file") from error
    except OSError as error:
        hint = "; a folder of texts is a --corpus" if path.is_dir() else ""
        raise UserError(f"{path} cannot be read: {error.strerror or error}{hint}") from error


def _remarks(config: InspectConfig, subject: Subject, text: _Text, inspection: Inspection) -> list[str]:
    """What was done to the text that the user may not expect."""
    data, remarks = inspection.data, []
    if text.alone is not None and data["windows"] > 1:
        remarks.append(
            f"the text is longer than the {data['context']:,} tokens of a window: it was read in {data['windows']:,} "
            "windows, each without what stands before it; the tokens shown are those of the first"
        )
    if data["tokens"] - len(front(subject.tokenizer)) * data["windows"] == config.limit:
        remarks.append(f"stopped after {config.limit:,} tokens, see --limit")
    unknown_id = subject.tokenizer.unk_token_id
    if text.alone is not None and unknown_id is not None:
        ids = encode(subject.tokenizer, text.alone).ids
        if count := int((ids == unknown_id).sum()):
            remarks.append(f"{count} of {len(ids)} tokens are what the tokenizer has for characters it does not know")
    return remarks


def _encoded(subject: Subject, text: _Text, limit: int) -> Iterator[Any]:
    """The documents as the inspection read them, without labels."""
    for document in text.read():
        encoded = encode(subject.tokenizer, document)
        if len(encoded.ids):
            yield encoded._replace(ids=encoded.ids[:limit], labels=encoded.labels[:limit])
        limit -= len(encoded.ids)
        if limit <= 0:
            return


def _run_folder(model: str) -> Path | None:
    path = Path(model).expanduser()
    return path if (path / "metrics.jsonl").is_file() and (path / "model").is_dir() else None


def _short(model: str) -> str:
    """A run's or model's name without the folders that hold it; a hub name as it is."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    name = path.resolve().name
    return path.resolve().parent.name if name == "model" else name


def _context(config: InspectConfig, subject: Subject) -> int:
    if config.context is None:
        return min(subject.context, LARGEST_WINDOW)
    if not 2 <= config.context <= subject.context:
        raise UserError(f"context is {config.context} tokens: expected 2 to {subject.context:,}, the model's own")
    return config.context


def _batch_size(config: InspectConfig, subject: Subject, context: int) -> int:
    if config.batch_tokens < 1:
        raise UserError(f"batch_tokens is {config.batch_tokens}: expected at least 1")
    return max(1, min(config.batch_tokens // context, LOGIT_BYTES // (context * (subject.rows or 1) * 4)))


# ------------------------------------------------------------------ changes


def _source_and_read(given: str) -> tuple[str, str | None]:
    source, at, where = given.partition("@")
    if not source.strip() or (at and not where.strip()):
        raise UserError(f"--knock-out is '{given}': expected SOURCE or SOURCE@READ, such as embedding@mlp3")
    return _spaced(source), _spaced(where) if at else None


def _knock_out(source: str, where: str | None, model: Any) -> KnockOut:
    """At one read, at all before attention or before the MLP, or at all that have another source, too.

    Raises:
        UserError: no such read, or none of them has the source.
    """
    rows = source_names(model)
    names = read_names(len(rows) - 1)
    reads = [name for name in names if where in (name, name.split()[0])]
    if where is None:
        reads = [name for name, row in zip(names, rows, strict=True) if source in row and len(row) > 1] or names
    elif not reads:
        raise unknown("read", where, names)
    edit = KnockOut(source, reads=reads)
    with intervene(model, edit):  # says what is wrong with it
        return edit


def _spaced(name: str) -> str:
    """ "mlp3", "mlp_3" and "mlp-3" as "mlp 3"."""
    return re.sub(r"^([a-z]+)[ _-]*(\d+)$", r"\1 \2", name.strip())


def _knock(
    knock_outs: list[tuple[str, KnockOut]], plain: Survey, again: Callable[..., Survey], console: Console
) -> list[dict[str, Any]]:
    """Table and record of what the loss is without each source."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("without")
    for title in ("loss", "change"):
        table.add_column(title, justify="right")
    table.add_row("–", number(float(plain.loss.mean[0]), 3), "")
    rows = []
    for given, edit in knock_outs:
        after = again(edit)
        change = loss_change(plain, after)
        value, error = float(change.mean[0]), float(change.error[0])
        known = error == error
        rows.append(
            {
                "knock_out": given,
                "loss_before": float(plain.loss.mean[0]),
                "loss_after": float(after.loss.mean[0]),
                "difference": value,
                "error": error if known else None,
                "documents": change.documents,
                "tokens": change.tokens,
            }
        )
        text = number(value, 4, sign=True) + (f" ± {number(error, 4)}" if known else "")
        table.add_row(given, number(float(after.loss.mean[0]), 3), text)
    console.print()
    console.print(table)
    say(console, "each alone, in nats per token" + ("" if plain.documents < 2 else "; ± standard error over documents"))
    return rows


def _next_tokens(
    subject: Subject, model: Any, text: str, context: int, knock_outs: list[tuple[str, KnockOut]], console: Console
) -> None:
    """What comes next after the text, with and without each source."""
    ids = _last_window(subject, text, context)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("without")
    table.add_column("likeliest tokens after the text: probability before → after")
    before = None
    for given, edit in knock_outs:
        found = effect(model, ids, edit, top=5, before=before)
        before = found.before
        words = [
            f"{_word(subject, part['id'])} {number(part['before'])} → {number(part['after'])}" for part in found.top
        ]
        table.add_row(given, "   ".join(words))
    console.print()
    console.print(table)


def _attribute(subject: Subject, model: Any, text: str, context: int, console: Console) -> Attribution:
    found = attribute(model, _last_window(subject, text, context))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("edge")
    for title in ("without it", "by gradient"):
        table.add_column(title, justify="right")
    for edge in found.top(EDGES):
        cells = [number(edge.knockout, 3, sign=True), number(edge.gradient, 3, sign=True)]
        table.add_row(f"{edge.read} ← {edge.source}", *cells)
    console.print()
    say(console, f"after the text: {_word(subject, found.target)}, ln p = {number(found.log_probability, 3)}")
    console.print(table)
    agreement = found.agreement
    say(
        console,
        f"change of ln p in nats, of {agreement.edges} edges; the two ways agree: rank correlation "
        f"{number(agreement.spearman)}, {agreement.overlap:.0%} of the {agreement.top} largest in common",
    )
    return found


def _last_window(subject: Subject, text: str, context: int) -> list[int]:
    """The text's end, as much as the model takes."""
    before = front(subject.tokenizer)
    return [*before, *encode(subject.tokenizer, text).ids[-(context - len(before)) :].tolist()]


def _word(subject: Subject, token: int) -> str:
    return repr(str(subject.tokenizer.decode([token])))


# ------------------------------------------------------------------ pruning


def _prune(report: PruneReport, plain: Survey, again: Callable[..., Survey], console: Console) -> dict[str, Any]:
    """Table and record of what hardly any weight goes through, and the loss without it."""
    record = report.record()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"share of the read below {report.threshold:g}")
    for title in ("edges", "of the traffic", "of the weight", "loss without them", "change"):
        table.add_column(title, justify="right")
    for which, title in (
        ("mean", "weight, on average"),
        ("high", "weight, for 99% of tokens"),
        ("part", "weight × rms of the source"),
    ):
        edges = report.below(which)
        cells = [f"{len(edges)} of {len(report.edges)}", f"{report.traffic(which):.1%}", f"{report.weight(which):.1%}"]
        if edges:
            after = again(*report.edits(which))
            change = loss_change(plain, after)
            value, error = float(change.mean[0]), float(change.error[0])
            known = error == error
            record[which] |= {
                "loss_before": float(plain.loss.mean[0]),
                "loss_after": float(after.loss.mean[0]),
                "difference": value,
                "error": error if known else None,
            }
            cells.append(number(float(after.loss.mean[0]), 3))
            cells.append(number(value, 4, sign=True) + (f" ± {number(error, 4)}" if known else ""))
        else:
            cells += ["", ""]
        table.add_row(title, *cells)
    console.print()
    console.print(table)
    edges = [f"{edge.read} ← {edge.source} {number(edge.part, 3)}" for edge in report.below("part")]
    if edges:
        more = f", {len(edges) - EDGES} more" if len(edges) > EDGES else ""
        say(console, f"least of a read by weight × rms: {', '.join(edges[:EDGES])}{more}")
    sources = Table(box=None, pad_edge=False, header_style="bold")
    sources.add_column("source")
    titles = ("weight", "weight × rms", "below by weight", "for 99% of tokens", "by weight × rms")
    for title in ("reads that have it", *titles):
        sources.add_column(title, justify="right")
    for use in report.sources:
        counts = (use.below_mean, use.below_high, use.below_part)
        sources.add_row(use.source, str(use.reads), number(use.mean, 3), number(use.part, 3), *map(str, counts))
    console.print()
    console.print(sources)
    say(console, "traffic: the vectors that reads with a choice load, one a token and edge; the model is unchanged")
    return record
