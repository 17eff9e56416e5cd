"""Tables in the terminal: of an inspection, of losses without edges, and of one prediction of a text."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from attnres.inspect import notebook
from attnres.inspect.attribution import Attribution, by_size
from attnres.inspect.edits import Ablate
from attnres.inspect.effects import Effect
from attnres.inspect.inspection import FIELD, By, ByLabel, Example, Inspection, Routing, by_in, source_spike
from attnres.inspect.lens import Lens
from attnres.inspect.patching import Patching
from attnres.inspect.prune import PruneReport
from attnres.inspect.steps import StepChange
from attnres.inspect.survey import Survey, loss_change
from attnres.inspect.texts import PredictionTarget
from attnres.progress import grid, say, wide
from attnres.residuals import Read, Source, depths
from attnres.stats import or_none
from attnres.text import counted, number, visible, with_error, with_settings

TOP = 3
"""Sources that are named in a row."""
TOKENS = 64
"""Tokens of the example that are listed."""
WIDE = 150
"""Columns of a terminal from which a read's numbers stand in one row."""
NARROW = 110
"""Columns of a terminal below which a token's row names one source."""
FEW = 5
"""Documents from which an error over documents is worth something."""
CLEAR = 3.0
"""Standard errors from which a kind of token counts as unlike the average: about 300 weights are looked through."""


def show(
    inspection: Inspection, console: Console | None = None, *, example: bool = True, by: By = "contribution"
) -> None:
    """Print an inspection: the model, a row a read, a row a kind of token, the example token by token; `by` says which
    numbers of sources are shown."""
    by = by_in(by, inspection.routing, inspection.kinds, inspection.example)
    console = wide(console)
    say(console, _heading(inspection))
    for table in _reads(inspection, console.width, by):
        console.print(table)
    for line in _notes(inspection, by):
        say(console, line)
    if inspection.kinds is not None and inspection.routing is not None and max(inspection.kinds["documents"]) > 1:
        console.print()
        console.print(_labels("kind of token", inspection.kinds, inspection.layout, by))
    if example and inspection.example is not None:
        console.print()
        console.print(_example(inspection.example, inspection.layout, console.width, by))


def top(sources: Sequence[Source], amounts: Sequence[float | None], count: int = TOP) -> str:
    """Return the largest sources and their numbers: "embedding 0.41, block 2 0.30"."""
    pairs = [(source.label, amount) for source, amount in zip(sources, amounts) if amount is not None]
    if len(pairs) > 1 and all(abs(amount - pairs[0][1]) < 1e-6 for _, amount in pairs):
        return f"all {len(pairs)} alike, {number(pairs[0][1], 2)} each"
    pairs.sort(key=lambda pair: -abs(pair[1]))
    return ", ".join(f"{name} {number(amount, 2)}" for name, amount in pairs[:count])


def _heading(inspection: Inspection) -> str:
    model, data, losses = inspection.model, inspection.data, inspection.losses
    windows = f"{counted(data['windows'], 'window')} of up to {data['context']:,}, each seen alone"
    return (
        f"{model['name']}: residual {with_settings(model['residual'], model['settings'])}, "
        f"{model['num_sublayers']} sublayers of width {model['width']}, {model['parameters']:,} parameters\n"
        f"{data['source']}: {counted(data['tokens'], 'token')} of {data['kind']} in "
        f"{counted(data['documents'], 'document')} ({windows}), "
        f"loss {with_error(losses['mean'], losses['error'])} nats per token\n"
    )


def _reads(inspection: Inspection, width: int, by: By) -> list[Table]:
    """Return a row a read, its sources and measurements; two tables where one is wider than the terminal."""

    def column(values: Sequence[float | None], digits: int = 2) -> list[str]:
        return [number(value, digits) for value in values]

    routing, layout = inspection.routing, inspection.layout
    where: dict[str, list[str]] = {}
    what: dict[str, list[str]] = {}
    if routing is not None:
        title = "largest contributions" if by == "contribution" else "largest weights"
        where[title] = [top(read.sources, row) for read, row in zip(layout, routing[FIELD[by]], strict=True)]
        where["entropy"] = column(inspection.entropy["nats"])
        where["effective"] = column(inspection.entropy["effective"], 1)
        where["of"] = [str(len(sources)) for sources in routing["sources"]]
    if inspection.distance is not None and inspection.persistence is not None:
        what["distance"] = column(inspection.distance, 1)
        shares = inspection.mixing_contribution if by == "contribution" else None
        what["embedding"] = column(inspection.persistence if shares is None else [row[0] for row in shares])
    if inspection.sharpness is not None:
        what["sharpness"] = column(inspection.sharpness)
    what["rms read"] = column(inspection.input_rms)
    written = depths(layout)
    lasts = [place != later for place, later in zip(written, [*written[1:], None])]  # of each sublayer's reads
    rms = [*inspection.output_rms, None]
    what["rms written"] = [number(rms[i], 2) if last and rms[i] is not None else "" for i, last in zip(written, lasts)]
    tables = []
    for part in [{**where, **what}] if width >= WIDE else [part for part in (where, what) if part]:
        table = grid()
        table.add_column("read", no_wrap=True)
        for title in part:  # the largest sources may take several lines
            is_long = title.startswith("largest")
            table.add_column(title, justify="left" if is_long else "right", no_wrap=not is_long)
        for read, *cells in zip(layout, *part.values(), strict=True):
            table.add_row(read.label, *cells)
        tables.append(table)
    return tables


def _notes(inspection: Inspection, by: By) -> list[str]:
    """Return lines that explain the columns and name the largest source."""
    lines = [""]
    if inspection.routing is not None:
        numbers = (
            "read: a layer's input; contribution: a source's part of it, by projection, mean over tokens; rows sum to "
            "one, negative points against the read (the weights: --by weight)"
            if by == "contribution"
            else "weight: mean over tokens; not how much of the read a source is, since sources differ in length"
        )
        lines.append(
            f"{numbers}; entropy: of the weights, mean over tokens, in nats; effective: exp of it, the number of "
            "sources that an even read of that entropy has"
        )
    else:
        lines.append(f"residual '{inspection.model['residual']}' weighs no sources: there are magnitudes alone")
    if inspection.distance is not None:
        lines.append(
            "distance: how many sublayers back the weights reach on average (0: the newest output), by the "
            f"coefficients of single outputs, blocks taken apart; embedding: the token embedding's {by}"
        )
    if inspection.sharpness is not None:
        lines.append("sharpness: the largest logit that the pseudo-query can give, |w g| sqrt(d); 0 reads evenly")
    spikes = source_spike(inspection.source_rms)[-1:] if inspection.source_rms else []
    if inspection.routing is not None and len(spikes) and spikes[0] == spikes[0]:
        rms, source = max(zip(inspection.source_rms[-1], inspection.layout[-1].sources), key=lambda pair: pair[0])
        lines.append(
            f"largest source of the output: {source.label}, rms {number(rms, 2)}, "
            f"{number(float(spikes[0]), 1)} times the median of its sources"
        )
    for table in (inspection.learned or {}).values():
        values = np.array(table["values"], dtype=float) if len(table["axes"]) < 2 else np.empty(0)
        if values.size:
            over = "".join(f" to {number(values.max(), 2)} over the {axis}s" for axis in table["axes"])
            lines.append(f"{table['title']}: {number(values.min(), 2)}{over}")
    return lines


def _labels(title: str, part: ByLabel, layout: Sequence[Read], by: By) -> Table:
    """For each label the numbers that are furthest from the average of all labelled tokens, beyond `CLEAR` errors."""
    table = grid(title)
    table.add_column("tokens", justify="right")
    table.add_column(f"reads unlike the average token ({by} ± standard error, average)")
    rows, errors = part["weights"], part["error"]
    if by == "contribution":
        rows, errors = part["contribution"], part["contribution_error"]
    averages = [
        [float(np.average(weights, weights=part["tokens"])) for weights in zip(*of_labels, strict=True)]
        for of_labels in zip(*rows, strict=True)
    ]
    for k, name in enumerate(part["names"]):
        if part["documents"][k] < FEW:
            table.add_row(name, f"{part['tokens'][k]:,}", f"too few texts for errors ({part['documents'][k]})")
            continue
        cells = []
        for r, read in enumerate(layout):
            for s, source in enumerate(read.sources):
                weight, error, average = rows[k][r][s], errors[k][r][s], averages[r][s]
                if weight is None or error is None or abs(weight - average) <= CLEAR * error:
                    continue
                text = f"{edge(read, source)} {with_error(weight, error, digits=2)} ({number(average, 2)})"
                cells.append((abs(weight - average), text))
        cells.sort(reverse=True)
        table.add_row(name, f"{part['tokens'][k]:,}", "; ".join(text for _, text in cells[:2]) or "none clearly")
    return table


def _example(example: Example, layout: Sequence[Read], width: int, by: By) -> Table:
    """For each token its kind, how badly the next was predicted, and where its reads came from."""
    table = grid(right=("",))
    rows = example["contribution"] if by == "contribution" else example["weights"]
    table.add_column("token")
    table.add_column("kind", no_wrap=True)
    for title in ("loss of\nthe next", "embedding in\nattention", "in\nMLPs"):
        table.add_column(title, justify="right")
    table.add_column(f"output, by {by}")
    most = TOP if width >= NARROW else 1
    count = len(example["tokens"])
    of_kind = {
        kind: [i for i, read in enumerate(layout) if read.kind == kind and len(read.sources) > 1]
        for kind in ("attention", "mlp")
    }
    for t in range(min(count, TOKENS)):
        cells = [str(t), visible(example["tokens"][t]), example["kinds"][t] if example["kinds"] else "–"]
        cells.append(number(example["losses"][t], 2))
        for where in of_kind.values():
            weights = [
                rows[i][t][example["sources"][i].index("embedding")]
                for i in where
                if "embedding" in example["sources"][i]
            ]
            cells.append(number(sum(weights) / len(weights) if weights else None, 2))
        cells.append(top(layout[-1].sources, rows[-1][t], most))
        table.add_row(*cells)
    if count > TOKENS:
        table.add_row("…", f"{count - TOKENS} more")
    return table


# ------------------------------------------------------------------ losses without edges


EDGES = 12
"""Edges that are named."""


def knock_out_table(
    knock_outs: list[tuple[str, Ablate]], plain: Survey, survey_again: Callable[..., Survey], console: Console
) -> list[dict[str, Any]]:
    """Print the loss without each source; return the records."""
    table = grid("without", right=("loss", "change"))
    table.add_row("–", number(plain.loss.mean), "")
    rows = []
    for text, edit in knock_outs:
        record, change = _change(plain, survey_again(f"without {text}", edit))
        rows.append({"knock_out": text, **record})
        table.add_row(text, number(record["loss_after"]), change)
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
    return record, with_error(change.mean, error, signed=True, digits=4)


def prune_table(
    report: PruneReport, plain: Survey, survey_again: Callable[..., Survey], console: Console
) -> dict[str, Any]:
    """Print the edges of little weight, and the loss without them."""
    record = report.to_dict()
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
            cells += [number(of_loss["loss_after"]), change]
        else:
            cells += ["", ""]
        table.add_row(title, *cells)
    console.print()
    console.print(table)
    labels = {part.name: part.label for read in plain.trace.layout for part in (read, *read.sources)}
    edges = [f"{labels[edge.read]} ← {labels[edge.source]} {number(edge.part)}" for edge in report.below("part")]
    if edges:
        more = f", {len(edges) - EDGES} more" if len(edges) > EDGES else ""
        say(console, f"least of a read by weight × rms: {', '.join(edges[:EDGES])}{more}")
    titles = ("weight", "weight × rms", "below by weight", "for 99% of tokens", "by weight × rms")
    sources = grid("source", right=("reads that have it", *titles))
    for use in report.sources:
        counts = (use.below_mean, use.below_high, use.below_part)
        sources.add_row(labels[use.source], str(use.reads), number(use.mean), number(use.part), *map(str, counts))
    console.print()
    console.print(sources)
    say(console, "traffic: the vectors that reads with a choice load, one a token and edge; the model is unchanged")
    return record


# ------------------------------------------------------------------ one prediction of a text


def edge(read: Read, source: Source) -> str:
    """Return the name of an edge: "L3 MLP ← block 2"."""
    return f"{read.label} ← {source.label}"


def print_table(console: Console, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below an empty line, as a notebook shows them; columns of numbers are flush right."""
    cells = [[notebook.cell(value) for value in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, column in zip(head, zip(*cells, strict=True), strict=True):
        is_number = all(re.fullmatch(r"[+−]?[\d,.]+|< 0.0001|–|", text) for text in column)
        table.add_column(title, justify="right" if is_number else "left")
    for row in cells:
        table.add_row(*row)
    console.print()
    console.print(table)


def next_tokens(effects: dict[str, Effect], console: Console) -> None:
    """Print the likeliest next tokens, with and without each source, by the name of the ablated edge."""
    rows = [
        (name if not place else "", *row)
        for name, change in effects.items()
        for place, row in enumerate(change.as_table()[2])
    ]
    print_table(console, ("without", "likeliest after the text", "p before", "p after"), rows)


def attribution_table(attribution: Attribution, prediction: PredictionTarget, console: Console) -> None:
    """Print the edges that the prediction depends on most."""
    what = prediction.what(attribution.target, attribution.against)
    say(console, f"\n{what}: {number(attribution.before)}")
    names = {(read.name, source.name): edge(read, source) for read in attribution.layout for source in read.sources}
    rows = [
        (names[one.read, one.source], number(one.knockout, signed=True), number(one.gradient, signed=True))
        for one in attribution.top(EDGES)
    ]
    print_table(console, ("edge", "when it is cut", "by gradient"), rows)
    agreement = attribution.agreement
    say(
        console,
        f"change of it in nats, of {agreement.edges} edges; the two ways agree: rank correlation "
        f"{number(agreement.spearman, 2)}, {agreement.overlap:.0%} of the {agreement.top} largest in common",
    )


def patching_table(patching: Patching, prediction: PredictionTarget, console: Console) -> None:
    """Print the edges whose vectors, taken from another text, restore most of that text's prediction."""
    what = prediction.what(patching.target, patching.against)
    say(console, f"\n{what}: {number(patching.corrupted)}; in the other text {number(patching.clean)}")
    edges = by_size(patching.layout, patching.restored)[:EDGES]
    rows = [(edge(read, source), number(value, signed=True)) for read, source, value in edges]
    print_table(console, ("edge", "restored"), rows)
    alone = sum(one is None for one in patching.aligned)
    how = "by what both have, from the last token on"
    if patching.aligned == list(range(len(patching.aligned))):
        how = "token by token"
    if alone:
        how += f"; {counted(alone, 'token')} of this text without a partner keep their own vectors"
    say(console, f"restored: 0 changes nothing, 1 gives the other text's number; the texts are aligned {how}")


def lens_table(lens: Lens, prediction: PredictionTarget, console: Console) -> None:
    """Print the logit lens: each read through the final norm and the head."""
    _, head, rows = lens.as_table()
    print_table(console, head, rows)
    ids, position = prediction.ids, prediction.position
    target = "the output's likeliest token"
    if prediction.target is not None:
        target = f"“{visible(prediction.target)}”"
    elif position + 1 < len(ids):
        target = prediction.word(ids[position + 1])
    at = prediction.word(ids[position])
    say(console, f"each read after {at} as if it were the last (logit lens); the target is {target}")


# ------------------------------------------------------------------ an earlier step of the training


MOVED = 10
"""Edges of which the change is listed."""


def since_table(
    change: StepChange, then: Inspection | None, now: Inspection, by: By, console: Console
) -> dict[str, Any]:
    """Print the changes since a step, of the reads too where the model of that step was inspected; return the
    record."""
    if any(value is not None for value in change.after):
        _, head, rows = change.as_table()
        print_table(console, head, rows)
    for name, largest in change.tables.items():
        say(console, f"{name}: a number changed by {number(largest)} at most")
    record = change.to_dict()
    if then is None:
        need = (
            f"contributions at step {change.first:,} need all weights of that step, and only the residual's were kept"
        )
        say(console, f"{need}: train with --keep-at {change.first}")
        return record
    losses = [number(one.losses["mean"]) for one in (then, now)]
    say(console, f"\nloss {losses[0]} at step {change.first:,}, {losses[1]} at {change.last:,}")
    earlier, later = Routing.of(then, by), Routing.of(now, by)
    if earlier is None or later is None:
        return record
    moved = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(earlier.values, later.values, strict=True)]
    edges = by_size(later.layout, moved)
    before = {(read, source): value for read, source, value in by_size(later.layout, earlier.values)}
    rows = [
        (edge(read, source), value := before[read, source], value + more, number(more, signed=True))
        for read, source, more in edges[:MOVED]
    ]
    print_table(console, ("edge", f"{later.by} at {change.first:,}", f"at {change.last:,}", "change"), rows)
    return record | {later.by: [{"read": r.name, "source": s.name, "change": more} for r, s, more in edges]}
