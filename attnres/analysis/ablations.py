"""What a model is without some of its sources, as tables and records: knock-outs, attribution, pruning."""

import re
from collections.abc import Callable
from typing import Any

from rich.console import Console

from attnres.analysis.config import InspectConfig
from attnres.errors import UserError
from attnres.inspect.attribution import Attribution, attribute
from attnres.inspect.edits import KnockOut
from attnres.inspect.effects import effect
from attnres.inspect.intervene import intervene, source_names
from attnres.inspect.pieces import piece, spelled
from attnres.inspect.places import choose_reads, with_choice
from attnres.inspect.prune import PruneReport
from attnres.inspect.record import find_residual
from attnres.inspect.survey import Survey, encode, loss_change
from attnres.models.encoding import token_in_front
from attnres.models.open import Checkpoint
from attnres.progress import counting
from attnres.stats import or_none
from attnres.terminal import grid, say
from attnres.text import short, with_error

EDGES = 12
"""Edges that an attribution names."""


def source_and_read(text: str) -> tuple[str, str | None]:
    """What SOURCE or SOURCE@READ names. Raises UserError."""
    source, at, where = text.partition("@")
    if not source.strip() or (at and not where.strip()):
        raise UserError(f"'{text}' names no edge: expected SOURCE or SOURCE@READ, such as embedding@mlp3")
    return _spaced(source), _spaced(where) if at else None


def find_knock_out(source: str, where: str | None, model: Any) -> KnockOut:
    """At one read; or, of all reads, of those of a sublayer or of a kind of sublayer, at those with a choice.

    Raises:
        UserError: no such read, or none of them has the source.
    """
    residual = find_residual(model)
    names = [read.name for read in residual.layout()]
    reads = choose_reads(where, names)
    if where not in names:  # a read without its only source has no input at all
        reads = with_choice((source,), reads, residual)
    edit = KnockOut(source, reads=reads)
    with intervene(model, edit):  # says what is wrong with it
        return edit


def _spaced(name: str) -> str:
    """ "mlp3", "mlp_3", "mlp-3" and "MLP 3" as "mlp 3"; "attention2key" as "attention 2 key"."""
    return re.sub(r"^([a-z]+)[ _-]*(\d+)[ _-]*([a-z]*)$", r"\1 \2 \3", name.strip().lower()).strip()


def knock_out_table(
    knock_outs: list[tuple[str, KnockOut]], plain: Survey, survey_again: Callable[..., Survey], console: Console
) -> list[dict[str, Any]]:
    """Table and record of what the loss is without each source."""
    table = grid("without", right=("loss", "change"))
    table.add_row("–", short(plain.loss.mean, 3), "")
    rows = []
    for text, edit in knock_outs:
        record, change = _change(plain, survey_again(f"without {text}", edit))
        rows.append({"knock_out": text, **record})
        table.add_row(text, short(record["loss_after"], 3), change)
    console.print()
    console.print(table)
    say(console, "each alone, in nats per token" + ("" if plain.documents < 2 else "; ± standard error over documents"))
    return rows


def _change(plain: Survey, after: Survey) -> tuple[dict[str, Any], str]:
    """Record and text of how the loss changed, with its error where there are several documents."""
    change = loss_change(plain, after)
    error = or_none(change.error)
    record = {
        "loss_before": plain.loss.mean,
        "loss_after": after.loss.mean,
        "difference": change.mean,
        "error": error,
        "documents": change.items,
        "tokens": int(change.total),
    }
    return record, with_error(change.mean, error, signed=True, form=short, digits=4)


def next_token_table(
    checkpoint: Checkpoint,
    model: Any,
    text: str,
    context: int,
    knock_outs: list[tuple[str, KnockOut]],
    console: Console,
) -> list[list[dict[str, Any]]]:
    """Table and records of what comes next after the text, with and without each source."""
    ids = last_window(checkpoint, text, context)
    table = grid("without", "likeliest after the text", right=("p before", "p after"))
    before, records = None, []
    for request, edit in knock_outs:
        change = effect(model, ids, edit, top=5, before=before)
        before = change.before
        records.append([{"token": piece(checkpoint.tokenizer, part["id"]), **part} for part in change.top])
        for place, part in enumerate(change.top):
            cells = (_word(checkpoint, part["id"]), short(part["before"], 3), short(part["after"], 3))
            table.add_row("" if place else request, *cells)
    console.print()
    console.print(table)
    return records


def attribution_table(
    checkpoint: Checkpoint, model: Any, ids: list[int], config: InspectConfig, console: Console
) -> Attribution:
    """Table of the edges that the prediction after a text depends on most, and all of them as they were found."""
    edges = sum(map(len, source_names(model)))
    with counting("without each edge", edges, "edges", shown=config.progress) as on_edges:
        attribution = attribute(model, ids, batch_size=max(1, config.batch_tokens // len(ids)), progress=on_edges)
    table = grid("edge", right=("without it", "by gradient"))
    for edge in attribution.top(EDGES):
        cells = [short(edge.knockout, 3, signed=True), short(edge.gradient, 3, signed=True)]
        table.add_row(f"{edge.read} ← {edge.source}", *cells)
    console.print()
    say(
        console,
        f"after the text: {_word(checkpoint, attribution.target)}, ln p = {short(attribution.log_probability, 3)}",
    )
    console.print(table)
    agreement = attribution.agreement
    say(
        console,
        f"change of ln p in nats, of {agreement.edges} edges; the two ways agree: rank correlation "
        f"{short(agreement.spearman)}, {agreement.overlap:.0%} of the {agreement.top} largest in common",
    )
    return attribution


def last_window(checkpoint: Checkpoint, text: str, context: int) -> list[int]:
    """The text's end, as much as the model takes."""
    before = token_in_front(checkpoint.tokenizer)
    return [*before, *encode(checkpoint.tokenizer, text).ids[-(context - len(before)) :].tolist()]


def _word(checkpoint: Checkpoint, token: int) -> str:
    return f"'{spelled(piece(checkpoint.tokenizer, token))}'"


def prune_table(
    report: PruneReport, plain: Survey, survey_again: Callable[..., Survey], console: Console
) -> dict[str, Any]:
    """Table and record of what hardly any weight goes through, and the loss without it."""
    record = report.record()
    titles = ("edges", "of the\ntraffic", "of the\nweight", "loss\nwithout", "change")
    table = grid(f"share of the read\nbelow {report.threshold:g}", right=titles)
    for column in table.columns:
        column.no_wrap = True
    for which, title in (
        ("mean", "weight, on average"),
        ("high", "weight, for 99% of tokens"),
        ("part", "weight × rms of the source"),
    ):
        edges = report.below(which)
        cells = [f"{len(edges)} of {len(report.edges)}", f"{report.traffic(which):.1%}", f"{report.weight(which):.1%}"]
        if edges:
            of_loss, change = _change(plain, survey_again(f"without what is below by {title}", *report.edits(which)))
            record[which] |= of_loss
            cells += [short(of_loss["loss_after"], 3), change]
        else:
            cells += ["", ""]
        table.add_row(title, *cells)
    console.print()
    console.print(table)
    edges = [f"{edge.read} ← {edge.source} {short(edge.part, 3)}" for edge in report.below("part")]
    if edges:
        more = f", {len(edges) - EDGES} more" if len(edges) > EDGES else ""
        say(console, f"least of a read by weight × rms: {', '.join(edges[:EDGES])}{more}")
    titles = ("weight", "weight × rms", "below by weight", "for 99% of tokens", "by weight × rms")
    sources = grid("source", right=("reads that have it", *titles))
    for use in report.sources:
        counts = (use.below_mean, use.below_high, use.below_part)
        sources.add_row(use.source, str(use.reads), short(use.mean, 3), short(use.part, 3), *map(str, counts))
    console.print()
    console.print(sources)
    say(console, "traffic: the vectors that reads with a choice load, one a token and edge; the model is unchanged")
    return record
