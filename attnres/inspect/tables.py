"""An inspection as tables in the terminal."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from attnres.inspect.edits import Ablate
from attnres.inspect.inspection import FIELD, By, ByLabel, Example, Inspection, Weights, by_in, source_spike
from attnres.inspect.prune import PruneReport
from attnres.inspect.survey import Survey, loss_change
from attnres.models.encoding import spelled
from attnres.progress import grid, say, wide
from attnres.residuals import Read, depths
from attnres.stats import or_none
from attnres.text import counted, short, with_error, with_settings

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
LONG = ("is made of", "weighs most")
"""Columns of names, which may take several lines."""
CLEAR = 3.0
"""Standard errors from which a kind of token counts as unlike the average: about 300 weights are looked through."""


def show(
    inspection: Inspection, console: Console | None = None, *, example: bool = True, by: By = "contribution"
) -> None:
    """Print what was measured: the model, a row a read, a row a kind of token, the example token by token; `by` says
    which numbers of sources are shown."""
    by = by_in(by, inspection.routing, inspection.kinds, inspection.example)
    console = wide(console)
    say(console, _heading(inspection))
    for table in _reads(inspection, console.width, by):
        console.print(table)
    for line in _notes(inspection, by):
        say(console, line)
    if inspection.kinds is not None and inspection.routing is not None and max(inspection.kinds["documents"]) > 1:
        console.print()
        console.print(_labels("kind of token", inspection.kinds, inspection.routing, by))
    if example and inspection.example is not None:
        console.print()
        console.print(_example(inspection.example, inspection.layout, console.width, by))


def top(names: Sequence[str], weights: Sequence[float | None], count: int = TOP) -> str:
    """Return the largest sources and their numbers: "embedding .41, block 2 .30"."""
    pairs = [(name, weight) for name, weight in zip(names, weights, strict=True) if weight is not None]
    if len(pairs) > 1 and all(abs(weight - pairs[0][1]) < 1e-6 for _, weight in pairs):
        return f"all {len(pairs)} alike, {short(pairs[0][1])} each"
    pairs.sort(key=lambda pair: -abs(pair[1]))
    return ", ".join(f"{name} {short(weight)}" for name, weight in pairs[:count])


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
    """Return a row a read: where it comes from and what it is; two tables where one is wider than the terminal."""
    routing, sharpness = inspection.routing, inspection.sharpness
    where: dict[str, list[str]] = {}
    what: dict[str, list[str]] = {}
    if routing is not None:
        pairs = zip(routing["sources"], routing[FIELD[by]], strict=True)
        where["is made of" if by == "contribution" else "weighs most"] = [
            top(sources, weights) for sources, weights in pairs
        ]
        where["entropy"] = [short(value) for value in inspection.entropy["nats"]]
        where["effective"] = [short(value, 1) for value in inspection.entropy["effective"]]
        where["of"] = [str(len(sources)) for sources in routing["sources"]]
    if inspection.distance is not None and inspection.persistence is not None:
        what["distance"] = [short(value, 1) for value in inspection.distance]
        shares = inspection.mixing_contribution if by == "contribution" else None
        embedding = inspection.persistence if shares is None else [row[0] for row in shares]
        what["embedding"] = [short(value) for value in embedding]
    if sharpness is not None:
        what["sharpness"] = [short(value) for value in sharpness]
    what["rms read"] = [short(value) for value in inspection.input_rms]
    written = depths(inspection.layout)
    lasts = [place != later for place, later in zip(written, [*written[1:], None])]  # of each sublayer's reads
    rms = [*inspection.output_rms, None]
    what["rms written"] = [short(rms[i]) if last and rms[i] is not None else "" for i, last in zip(written, lasts)]
    parts = [{**where, **what}] if width >= WIDE else [part for part in (where, what) if part]
    return [_table(inspection.reads, part) for part in parts]


def _table(reads: Sequence[str], columns: dict[str, list[str]]) -> Table:
    table = grid()
    table.add_column("read", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="left" if title in LONG else "right", no_wrap=title not in LONG)
    for cells in zip(reads, *columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _notes(inspection: Inspection, by: By) -> list[str]:
    """Return lines that say what the columns mean, and the largest source."""
    lines = [""]
    if inspection.routing is not None:
        numbers = (
            "contribution: what a source is of the read, its weighted vector's projection on it, mean over tokens; "
            "rows sum to one, negative points against the read (the weights: --by weight)"
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
        names, rms = inspection.routing["sources"][-1], inspection.source_rms[-1]
        place = max(range(len(rms)), key=rms.__getitem__)
        lines.append(
            f"largest source of the output: {names[place]}, rms {short(rms[place])}, "
            f"{short(float(spikes[0]), 1)} times the median of its sources"
        )
    for table in (inspection.learned or {}).values():
        values = np.array(table["values"], dtype=float) if len(table["axes"]) < 2 else np.empty(0)
        if values.size:
            over = "".join(f" to {short(values.max())} over the {axis}s" for axis in table["axes"])
            lines.append(f"{table['title']}: {short(values.min())}{over}")
    return lines


def _labels(title: str, part: ByLabel, routing: Weights, by: By) -> Table:
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
        for r, read in enumerate(routing["reads"]):
            for s, source in enumerate(routing["sources"][r]):
                weight, error, average = rows[k][r][s], errors[k][r][s], averages[r][s]
                if weight is None or error is None or abs(weight - average) <= CLEAR * error:
                    continue
                text = f"{read} ← {source} {with_error(weight, error, form=short, digits=2)} ({short(average)})"
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
    for title in ("loss of\nthe next", "embedding in\nattention reads", "in MLP\nreads"):
        table.add_column(title, justify="right")
    table.add_column(f"output, by {by}")
    most = TOP if width >= NARROW else 1
    count = len(example["tokens"])
    of_kind = {
        kind: [i for i, read in enumerate(layout) if read.kind == kind and len(read.sources) > 1]
        for kind in ("attention", "mlp")
    }
    for t in range(min(count, TOKENS)):
        cells = [str(t), spelled(example["tokens"][t]), example["kinds"][t] if example["kinds"] else "–"]
        cells.append(short(example["losses"][t]))
        for where in of_kind.values():
            weights = [
                rows[i][t][example["sources"][i].index("embedding")]
                for i in where
                if "embedding" in example["sources"][i]
            ]
            cells.append(short(sum(weights) / len(weights) if weights else None))
        cells.append(top(example["sources"][-1], rows[-1][t], most))
        table.add_row(*cells)
    if count > TOKENS:
        table.add_row("…", f"{count - TOKENS} more")
    return table


EDGES = 12
"""Edges that are named."""


def knock_out_table(
    knock_outs: list[tuple[str, Ablate]], plain: Survey, survey_again: Callable[..., Survey], console: Console
) -> list[dict[str, Any]]:
    """Print the loss without each source; return the records."""
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


def prune_table(
    report: PruneReport, plain: Survey, survey_again: Callable[..., Survey], console: Console
) -> dict[str, Any]:
    """Print what hardly any weight goes through, and the loss without it."""
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
