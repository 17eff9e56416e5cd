"""Write report.html: all results of a comparison in one file that opens offline, in light and dark themes, on wide
screens and phones. It loads no script, font or address.
"""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from html import escape, unescape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from attnres.data.sources import title_of
from attnres.figures import Comparison, Plot, style
from attnres.figures.style import sheet
from attnres.files import write_text
from attnres.progress import wide
from attnres.report.columns import curves_csv, plain_cells, print_table, shown, to_csv
from attnres.report.headline import headline
from attnres.report.runs import Run, Study
from attnres.report.sections import Section, comparison_of, example, sections, slug
from attnres.report.stats import equal_conditions
from attnres.report.table import ComparisonTable, VariantRow, build_table
from attnres.typed import leaves

EXPLORER = "explorer.html"
"""The file of the explorer's page, which `attnres compare` writes beside the report."""
ZOOM = 1.36
"""Size of figures in this page relative to a paper, for whose columns they are drawn."""


def write_report(study: Study, folder: Path | str, images: str | None = None) -> list[Path]:
    """Write `report.html`, `table.csv` and `curves.csv` into `folder`, and figures as files if `images` is a suffix.

    `images`: "png" or "svg", into `folder/figures`. Returns the files. Raises `UserError` if one cannot be written.
    """
    folder = Path(folder)
    table, comparison = build_table(study), comparison_of(study)
    with style.style():
        drawn = sections(comparison)
    saved = (folder / EXPLORER).is_file()
    write_text(folder / "report.html", page(study, table, comparison, drawn, saved=saved))
    write_text(folder / "table.csv", to_csv(table))
    write_text(folder / "curves.csv", curves_csv(study))
    written = [folder / "report.html", folder / "table.csv", folder / "curves.csv"]
    for plot in [plot for section in drawn for plot in section.every] if images is not None else []:
        written.append(folder / "figures" / f"{plot.name}.{images}")
        style.save(plot.figure, written[-1])
    return written


def page(
    study: Study, table: ComparisonTable, comparison: Comparison, drawn: Sequence[Section], *, saved: bool = False
) -> str:
    """Return the page as HTML text; `saved`: the explorer's page lies beside it."""
    parts = [
        _section("Comparison", _table(table, comparison) + _explorer(study, saved)),
        *(_section(part.title, _part(part), part.lead or _same_conditions(study)) for part in drawn),
        _examples(comparison),
        _section("Configuration and environment", _configuration(study)),
    ]
    title = f"{study.title}: Attention Residuals"
    return framed(title, _kicker(study), headline(study, table), filter(None, parts), _footer(study))


def framed(title: str, kicker: str, text: str, sections: Iterable[str], footer: str) -> str:
    """Return a page that opens offline, as HTML. The first sentence of `text` becomes its headline; `sections` and
    `footer` are HTML already."""
    first, _, more = text.partition(". ")
    template = Template((files("attnres.report") / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        light=style.variables(dark=False),
        dark=style.variables(dark=True),
        kicker=escape(kicker),
        headline=_prose(first.rstrip(".") + "."),
        more=f'<p class="more">{_prose(more)}</p>' if more else "",
        sections="\n".join(_linked(list(sections))),
        footer=footer,
    )


def _linked(sections: list[str]) -> list[str]:
    """Return the sections, preceded by a list of links to their headings if there are several."""
    names = [unescape(h2[1]) for text in sections if (h2 := re.search(r"<h2>(.*?)</h2>", text))]
    if len(names) < 3:
        return sections
    links = "".join(f'<li><a href="#{anchor(name)}">{escape(name)}</a></li>' for name in names)
    parts = [
        re.sub(r"<h2>(.*?)</h2>", lambda h2: f'<h2 id="{anchor(unescape(h2[1]))}">{h2[1]}</h2>', text, count=1)
        for text in sections
    ]
    return [f'<nav aria-label="Contents"><ol>{links}</ol></nav>', *parts]


def anchor(title: str) -> str:
    """Return the id of a heading's element."""
    return "section-" + slug(title.lower())


def _section(title: str, body: str, lead: str = "") -> str:
    lead = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{lead}{body}\n</section>"


def _kicker(study: Study) -> str:
    seeds = sorted({run.seed for run in study.runs})
    size, source, steps = (_of_all(study, name) for name in ("model.size", "data.source", "steps"))
    pretrained = _of_all(study, "finetune.init_from")
    facts = [
        f"from {pretrained}" if pretrained else f"model {size}" if isinstance(size, str) else None,
        f"data {title_of(str(source))}" if source else None,
        f"{steps:,} steps" if steps else None,
        f"{len(seeds)} seeds" if len(seeds) > 1 else "one seed",
    ]
    return f"{study.title}  ·  " + ", ".join(fact for fact in facts if fact)


def _of_all(study: Study, name: str) -> Any:
    """Return a field of the configuration if all runs agree on it, else None."""
    values = [dict(leaves(run.config)).get(name) for run in study.runs]
    return values[0] if all(value == values[0] for value in values) else None


def _prose(text: str) -> str:
    """Escape text, and keep numbers on one line with their errors and units."""
    return escape(text).replace(" ± ", "&nbsp;±&nbsp;").replace(" %", "&nbsp;%")


def _same_conditions(study: Study) -> str:
    """Return a sentence on whether the runs were trained under equal conditions, judged by their configurations and
    data."""
    if len(study.labels) < 2:
        return ""
    if not equal_conditions(study):
        return "The runs were not trained under equal conditions: what differs is listed at the end of the page."
    scaled = [run.residual for run in study.runs if run.traits.scales_branches]
    weights = "the same initial shared weights" + (f" ({scaled[0]}'s branches scaled down)" if scaled else "")
    return f"Every variant: {weights}, the same batches in the same order."


def explored(study: Study) -> list[Run]:
    """Return the finished runs for the explorer to show side by side, at most two: depth reads first, the baseline
    last."""
    finished = {label: next((run for run in study.of(label) if run.finished), None) for label in study.labels}
    runs = sorted(
        (run for run in finished.values() if run is not None and not run.traits.is_chance),
        key=lambda run: (not run.traits.by_token, run.label == study.baseline),
    )
    return runs[:2]


def _explorer(study: Study, saved: bool) -> str:
    """Return a link to the saved page of the explorer, where there is one, and the command that opens its models;
    nothing where no run has finished."""
    runs = explored(study)
    if not runs:
        return ""
    command = f"<code>{escape(shlex.join(['attnres', 'app', *(str(run.folder) for run in runs), '--open']))}</code>"
    names = escape(" and ".join(run.label for run in runs))
    if not saved:
        return f'<p class="open">Open {names} in the explorer: {command}</p>'
    return (
        f'<p class="open"><a href="{EXPLORER}">{names} in the explorer</a>: what one prediction of each rests on. '
        f"For other texts, cuts and patches, open them in the explorer: {command}</p>"
    )


def _part(part: Section) -> str:
    """Return the figures of all variants visible, and those of single variants collapsed."""
    folded = (_details(label, figure_cards(plots), open_=False) for label, plots in part.folded.items())
    return (figure_cards(part.plots) if part.plots else "") + "".join(folded)


def _examples(comparison: Comparison) -> str:
    """Return the same held-out text for every variant whose weights differ by token."""
    variants = comparison.having("inspections").variants
    texts = {variant.label: text for variant in variants if (text := example(variant.mean))}
    folded = (_details(label, text, open_=i == 0) for i, (label, text) in enumerate(texts.items()))
    lead = (
        "The first tokens of the held-out text, in reads with which blocks begin (of a residual without blocks in some "
        "through its depth) and at the output. Of each read the source that differs most from token to token: the "
        "stronger the colour, the more of the read it is, from zero to the largest; orange points against the read. "
        "Pointing at a token names its kind and its largest sources."
    )
    if any(len(variant.seeds) > 1 for variant in variants if variant.label in texts):
        lead += " Of each variant the first seed."
    return _section("One text, token by token", "".join(folded), lead) if texts else ""


def figure_cards(plots: Sequence[Plot], anchor: str = "") -> str:
    """Lay out figures side by side where there is room; a figure as wide as a page gets a row, which scrolls on a
    phone.

    `anchor`: prefix of the figures' ids, to tell them from other figures with the same names in the page.
    """
    broad = any(plot.figure.get_figwidth() > sheet().column for plot in plots)
    grid = " broad" if broad else " three" if len(plots) == 3 else ""
    parts = []
    for plot in plots:
        svg = style.to_svg(plot.figure, anchor + plot.name, plot.title, ZOOM)
        if broad:
            svg = f'<div class="scroll">{svg}</div>'
        caption = f"<figcaption>{escape(plot.caption)}</figcaption>"
        parts.append(f'<figure class="card"><h3>{escape(plot.title)}</h3>\n{svg}\n{caption}</figure>')
    return f'<div class="figures{grid}">\n' + "\n".join(parts) + "\n</div>"


# ------------------------------------------------------------------ tables


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str, links: Sequence[str] = ()) -> str:
    """Return a table as HTML, all text escaped, without headings if `head` is empty.

    Args:
        kind: its CSS classes.
        links: ids of elements; the first cell of each row is a link to one.
    """
    body = []
    for number, (first, *rest) in enumerate(rows):
        name = f'<a href="#{links[number]}">{escape(first)}</a>' if links else escape(first)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{name}</th>{cells}</tr>\n')
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    return f'<table class="{kind}">{top}<tbody>\n{"".join(body)}</tbody></table>'


def _table(table: ComparisonTable, comparison: Comparison) -> str:
    colours = {one.label: look["color"] for one, look in zip(comparison.variants, comparison.looks(), strict=True)}
    columns = shown(table)
    head = "".join(f'<th scope="col">{escape(column.title)}</th>' for column in columns)
    body = "".join(f"<tr>{_row(table, row, colours[row.label])}</tr>\n" for row in table.rows)
    if cells := plain_cells(table, columns):
        name, *rest = (escape(cell) for cell in cells)
        body += f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>\n"
    notes = "".join(f"<li>{_prose(note)}</li>" for note in table.notes)
    return (
        f'<div class="card scroll"><table class="variants"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>\n"
        f'<ul class="notes">{notes}</ul>'
    )


def _row(table: ComparisonTable, row: VariantRow, colour: str) -> str:
    star = "" if row.complete else ' <span class="err">unfinished</span>'
    swatch = f'<span class="swatch" style="{style.declared("background", colour)}"></span>'
    out = [f'<th scope="row">{swatch}<span class="name">{escape(row.label)}{star}</span></th>']
    for column in shown(table)[1:]:
        number, sign, error = column.text(row, table).partition(" ± ")
        text = escape(number) + (f' <span class="err">± {escape(error)}</span>' if sign else "")
        if column.name == "difference":
            kind = "even"
            if row.paired is not None and row.decided and row.complete:
                kind = "good" if row.paired.mean < 0 else "bad"
            text = f'<span class="{kind}">{escape(number)}</span>' + text[len(escape(number)) :]
        out.append(f'<td data-title="{escape(column.title, quote=True)}">{text}</td>')
    return "".join(out)


def _configuration(study: Study) -> str:
    """Return tables of the settings that all runs share, of those that differ, and of the machine."""
    # Seed, name and folder differ by design.
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
        # Shorter labels first, so that numbers are in numeric order.
        values = sorted({_text(values[key]) for values in environments if key in values}, key=lambda x: (len(x), x))
        environment[key] = values[0] if len(values) == 1 else f"{values[0]} … {values[-1]}"
    parts = []
    if different:
        rows = [[key, *(_text(values.get(key)) for values in by_label.values())] for key in different]
        table = html_table(["", *by_label], rows, "plain wide")
        parts.append(_details("What differs between the variants", f'<div class="scroll">{table}</div>', open_=True))
    parts.append(_details("Shared configuration", _pairs(shared), open_=False))
    if environment:
        parts.append(_details("Environment", _pairs(environment), open_=False))
    return "\n".join(parts)


def _of_seeds(runs: list[Run], hidden: set[str]) -> dict[str, Any]:
    """Return a variant's configuration; a setting that differs between seeds has all its values."""
    configs = [{key: value for key, value in leaves(run.config) if key not in hidden} for run in runs]
    means = {}
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key) for config in configs]
        same = all(value == values[0] for value in values)
        means[key] = values[0] if same else ", ".join(dict.fromkeys(_text(value) for value in values))
    return means


def _details(title: str, body: str, open_: bool) -> str:
    return f'<details class="card"{" open" if open_ else ""}><summary>{escape(title)}</summary>{body}</details>'


def _pairs(values: dict[str, Any]) -> str:
    rows = [[key, _text(value)] for key, value in values.items()]
    return f'<div class="scroll">{html_table([], rows, "plain")}</div>'


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


# ------------------------------------------------------------------ files and terminal


def show(study: Study, out: Path, images: str | None = None) -> None:
    """Write table.csv, curves.csv and report.html of a study into `out`, and print the table.

    `images`: "png" or "svg" also writes every figure as a file. Raises `UserError`.
    """
    written = write_report(study, out, images)
    table = build_table(study)
    console = wide(Console())
    print_table(table, headline(study, table), console)
    console.print(f"\n{written[0]}", style="bold", highlight=False, soft_wrap=True)
