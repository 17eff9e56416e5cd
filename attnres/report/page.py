"""report.html: everything a comparison says, in one file that opens offline, in light and in dark, on a wide screen
and on a phone. No script, no font, no address is loaded.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from attnres.files import write_text
from attnres.report import style
from attnres.report.example import example
from attnres.report.heatmaps import heatmaps
from attnres.report.inside import Part, inspections, parts
from attnres.report.plots import Plot, curve_plots, depth_plots
from attnres.report.runs import Run, Study
from attnres.report.stats import equal_conditions, leaves
from attnres.report.table import SHOWN, Row, Table, build_table, to_csv
from attnres.report.verdict import verdict

ZOOM = 1.36
"""Of figures drawn for the width of a page of paper, in this page."""


def write_report(study: Study, folder: Path | str, images: str | None = None) -> list[Path]:
    """Write `report.html` and `table.csv` into `folder`, and the figures as files of their own if `images` is a suffix.

    `images`: "png" or "svg", into `folder/figures`. Returns what was written. Raises `UserError` if it cannot be.
    """
    folder = Path(folder)
    table = build_table(study)
    with style.style():
        curves, depth, maps = curve_plots(study, table), depth_plots(study), heatmaps(study)
        inner = parts(study)
    write_text(folder / "report.html", page(study, table, curves, depth, maps, inner))
    write_text(folder / "table.csv", to_csv(table))
    written = [folder / "report.html", folder / "table.csv"]
    if images is not None:
        many = [*(plots for _, plots in maps), *(part.every for part in inner)]
        for plot in [*curves, *depth, *(plot for plots in many for plot in plots)]:
            path = folder / "figures" / f"{plot.name}.{images}"
            style.save(plot.figure, path)
            written.append(path)
    return written


def page(
    study: Study,
    table: Table,
    curves: list[Plot],
    depth: list[Plot],
    maps: list[tuple[str, list[Plot]]],
    inner: Sequence[Part] = (),
) -> str:
    """The HTML text."""
    headline, _, more = verdict(study, table).partition(". ")
    template = Template((files("attnres.report") / "page.html").read_text(encoding="utf-8"))
    sections = [
        _section("Comparison", _table(study, table)),
        _section("Training", _figures(curves), _same_conditions(study)) if curves else "",
        _section(
            "Where each sublayer reads from",
            "".join(_figures(plots, "pair") for _, plots in maps),
            "Weights over earlier outputs, averaged over held-out tokens. A column is the same source in every row. "
            "Colours run over the square root of the weight.",
        )
        if maps
        else "",
        _section("Magnitudes by depth", _figures(depth, "three"), "How large values and gradients are along the depth.")
        if depth
        else "",
        *(_section(part.title, _part(part), part.lead) for part in inner),
        _example(study),
        _section("Configuration and environment", _configuration(study)),
    ]
    return template.substitute(
        title=escape(f"{study.title}: Attention Residuals"),
        light=style.css_variables(dark=False),
        dark=style.css_variables(dark=True),
        kicker=escape(_kicker(study)),
        headline=_prose(headline.rstrip(".") + "."),
        more=f'<p class="more">{_prose(more)}</p>' if more else "",
        sections="\n".join(section for section in sections if section),
        footer=_footer(study),
    )


def _section(title: str, body: str, lead: str = "") -> str:
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{lead}{body}\n</section>"


def _kicker(study: Study) -> str:
    seeds = sorted({run.seed for run in study.runs})
    size, source, steps = (_of_all(study, name) for name in ("model.size", "data.source", "steps"))
    pretrained = _of_all(study, "finetune.init_from")
    facts = [
        f"from {pretrained}" if pretrained else f"model {size}" if isinstance(size, str) else None,
        f"data {Path(str(source)).name}" if source else None,
        f"{steps:,} steps" if steps else None,
        f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed",
    ]
    return f"{study.title}  ·  " + ", ".join(fact for fact in facts if fact)


def _of_all(study: Study, name: str) -> Any:
    """A field of the configuration where all runs agree on it, else None."""
    values = [dict(leaves(run.config)).get(name) for run in study.runs]
    return values[0] if all(value == values[0] for value in values) else None


def _prose(text: str) -> str:
    """Escaped, with numbers kept together with their errors and units."""
    return escape(text).replace(" ± ", "&nbsp;±&nbsp;").replace(" %", "&nbsp;%")


def _same_conditions(study: Study) -> str:
    """What may be said of the runs' conditions, from their configurations and data."""
    if len(study.labels) < 2:
        return ""
    if not equal_conditions(study):
        return "The runs were not trained under equal conditions: what differs is listed at the end of the page."
    scaled = any(run.residual == "deepnorm" for run in study.runs)
    weights = "the same initial shared weights" + (" (deepnorm's branches scaled down)" if scaled else "")
    return f"Every variant: {weights}, the same batches in the same order."


def _part(part: Part) -> str:
    """Figures of all variants in the open, those of single variants folded."""
    if not part.broad:
        return _figures(part.plots)
    folded = (_details(label, _figures(plots, "broad"), open_=False) for label, plots in part.folded)
    return (_figures(part.plots, "broad") if part.plots else "") + "".join(folded)


def _example(study: Study) -> str:
    """The same held-out text for every variant that weighs its sources token by token."""
    texts = {label: example(seen) for label, seen in inspections(study).items()}
    texts = {label: text for label, text in texts.items() if text}
    folded = (_details(label, text, open_=i == 0) for i, (label, text) in enumerate(texts.items()))
    lead = (
        "The first tokens of the held-out text, in reads with which blocks begin (of a residual without blocks in some "
        "through its depth) and at the output. The stronger its colour, the more of the embedding a token reads, from "
        "zero to the largest; pointing at a token names its kind and its largest sources."
    )
    if any(len(study.of(label)) > 1 for label in texts):
        lead += " Of each variant the first seed."
    return _section("One text, token by token", "".join(folded), lead) if texts else ""


def _figures(plots: Iterable[Plot], extra: str = "") -> str:
    parts = []
    for plot in plots:
        svg = style.to_svg(plot.figure, plot.name, escape(plot.title, quote=True), ZOOM if extra == "broad" else None)
        if extra == "broad":
            svg = f'<div class="scroll">{svg}</div>'
        caption = f"<figcaption>{escape(plot.caption)}</figcaption>"
        parts.append(f'<figure class="card"><h3>{escape(plot.title)}</h3>\n{svg}\n{caption}</figure>')
    return f'<div class="figures {extra}">\n' + "\n".join(parts) + "\n</div>"


# ------------------------------------------------------------------ tables


def _table(study: Study, table: Table) -> str:
    looks = style.looks(study)
    head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in SHOWN)
    body = "".join(f"<tr>{_row(table, row, looks[row.label]['color'])}</tr>\n" for row in table.rows)
    notes = "".join(f"<li>{_prose(note)}</li>" for note in table.notes)
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'
        f'<ul class="notes">{notes}</ul>'
    )


def _row(table: Table, row: Row, colour: str) -> str:
    star = "" if row.complete else ' <span class="err">unfinished</span>'
    swatch = f'<span class="swatch" style="background: {style.css_variable(colour)}"></span>'
    out = [f'<th scope="row">{swatch}<span class="name">{escape(row.label)}{star}</span></th>']
    for column in SHOWN[1:]:
        number, sign, error = column.text(row, table).partition(" ± ")
        text = escape(number) + (f' <span class="err">± {escape(error)}</span>' if sign else "")
        if column.name == "difference":
            kind = "even"
            if row.paired is not None and row.paired.decided and row.complete:
                kind = "good" if row.paired.mean < 0 else "bad"
            text = f'<span class="{kind}">{escape(number)}</span>' + text[len(escape(number)) :]
        out.append(f"<td>{text}</td>")
    return "".join(out)


def _configuration(study: Study) -> str:
    """What all runs share, what differs from variant to variant, and the machine."""
    # Seed, name and folder are each run's own.
    hidden = {"seed", "name", "out", "resume"}
    by_label = {
        label: _of_seeds(study.of(label), hidden)
        | {"seeds": ", ".join(str(run.seed) for run in study.of(label))}
        | ({"held-out windows": str(text)[:12]} if (text := study.of(label)[0].data.get("windows_sha256")) else {})
        for label in study.labels
    }
    keys = list(dict.fromkeys(key for values in by_label.values() for key in values))
    shared, different = {}, []
    for key in keys:
        values = [values.get(key) for values in by_label.values()]
        if all(value == values[0] for value in values):
            shared[key] = values[0]
        else:
            different.append(key)
    environments = [dict(leaves(environment)) for run in study.runs for environment in run.environments]
    environment = {}
    for key in dict.fromkeys(key for values in environments for key in values):
        # By length first, so that numbers are in order too.
        values = sorted({_text(values[key]) for values in environments if key in values}, key=lambda x: (len(x), x))
        environment[key] = values[0] if len(values) == 1 else f"{values[0]} … {values[-1]}"
    parts = []
    if different:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ["", *by_label])
        body = "".join(
            f'<tr><th scope="row">{escape(key)}</th>'
            + "".join(f"<td>{escape(_text(values.get(key)))}</td>" for values in by_label.values())
            + "</tr>"
            for key in different
        )
        table = f'<table class="plain wide"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        parts.append(_details("What differs between the variants", f'<div class="scroll">{table}</div>', open_=True))
    parts.append(_details("Shared configuration", _pairs(shared), open_=False))
    if environment:
        parts.append(_details("Environment", _pairs(environment), open_=False))
    return "\n".join(parts)


def _of_seeds(runs: list[Run], hidden: set[str]) -> dict[str, Any]:
    """A variant's configuration; where its seeds were trained with different ones, all that they had."""
    configs = [{key: value for key, value in leaves(run.config) if key not in hidden} for run in runs]
    found = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key) for config in configs]
        same = all(value == values[0] for value in values)
        found[key] = values[0] if same else ", ".join(dict.fromkeys(_text(value) for value in values))
    return found


def _details(title: str, body: str, open_: bool) -> str:
    return f'<details class="card"{" open" if open_ else ""}><summary>{escape(title)}</summary>{body}</details>'


def _pairs(values: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{escape(_text(value))}</td></tr>' for key, value in values.items()
    )
    return f'<div class="scroll"><table class="plain"><tbody>{rows}</tbody></table></div>'


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "–" if value is None else json.dumps(value)


def _footer(study: Study) -> str:
    seeds = sorted({run.seed for run in study.runs})
    names = ", ".join(str(seed) for seed in seeds)
    which = f"seeds {names}" if len(seeds) > 1 else f"seed {names}"
    return (
        f"Made by <code>attnres report</code> from {len(study.runs)} run folders ({which}). "
        "The mechanism: Attention Residuals, Kimi Team, arXiv 2603.15031. "
        "Nats per token depend on the tokenizer and the text: compare them only within this page."
    )
