"""A study's page, and one page of all studies on disk: each in one file that opens offline."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from attnres.figures import style
from attnres.report.page import figure_cards, framed
from attnres.studies.design import Table
from attnres.studies.sizes import at_sizes

if TYPE_CHECKING:
    from attnres.studies.outcome import Outcome

FOOTER = (
    "Made by <code>attnres study</code>. The mechanism: Attention Residuals, Kimi Team, arXiv 2603.15031. "
    "Losses depend on the tokenizer and the text: compare them only within a table."
)


def study_page(outcome: "Outcome") -> str:
    """The page of one study, as HTML."""
    title = f"{outcome.design.title} ({outcome.setting.name})"
    return framed(title, _kicker(outcome), outcome.result.verdict, _sections(outcome), FOOTER)


def report_page(outcomes: Sequence["Outcome"]) -> str:
    """The page of several studies: a table of them, what holds at several sizes, then each."""
    rows = [
        [one.design.title, one.setting.name, "{} of {}".format(*one.counts), one.result.verdict] for one in outcomes
    ]
    table = _table(
        Table("", ["study", "preset", "runs", "verdict"], rows), "worded", [_anchor(one) for one in outcomes]
    )
    parts = [f"<section>\n<h2>All studies</h2>\n{table}</section>"]
    parts += map(_section, at_sizes(outcomes))
    for one in outcomes:
        body = f'<p class="lead">{escape(one.result.verdict)}</p>' + "\n".join(_sections(one))
        title = f"{escape(one.design.title)} · {escape(one.setting.name)}"
        parts.append(f'<section id="{_anchor(one)}">\n<h2>{title}</h2>\n{body}\n</section>')
    finished = sum(one.counts[0] == one.counts[1] for one in outcomes)
    headline = f"{finished} of {len(outcomes)} are complete"
    return framed("Studies of depth reads", "The laboratory", headline, parts, FOOTER)


def _kicker(outcome: "Outcome") -> str:
    done, planned = outcome.counts
    setting = outcome.setting
    source = setting.source or setting.config().data.source
    return f"{outcome.design.title}  ·  preset {setting.name}, data {source}, {done} of {planned} runs"


def _sections(outcome: "Outcome") -> list[str]:
    design, result = outcome.design, outcome.result
    parts = [*map(_section, result.tables)]
    if result.charts:
        with style.style():
            plots = [chart.draw() for chart in result.charts]
        parts.append(f"<section>\n{figure_cards(plots, f'{_anchor(outcome)}-')}\n</section>")
    done, planned = outcome.counts
    known = outcome.measured.noises
    floor = ", ".join(
        f"sigma {one.sigma:.4f} at {steps:,} steps ({one.degrees + 1} seeds)" for steps, one in known.items()
    )
    if known and not outcome.measured.recipe:
        floor = f"as the tables say; the preset's recipe, which none of these runs is, has {floor}"
    facts = [
        ["what is done", design.about],
        ["published", design.published],
        ["runs", f"{done} of {planned} that were asked for so far"],
        ["noise floor", floor or "attnres study noise: not run at this preset and text"],
        *([["not used", outcome.not_used]] if outcome.not_used else []),
        ["command", command(outcome)],
    ]
    how = _table(Table("", ["", ""], facts), "plain")
    parts.append(f"<section>\n<h2>How</h2>\n{how}\n</section>")
    return parts


def command(outcome: "Outcome") -> str:
    """The command that carries the study out again."""
    setting = outcome.setting
    words = ["attnres study", outcome.design.name, "--preset", setting.name, "--seeds", str(setting.seeds)]
    places = {"--source": setting.source, "--column": setting.column, "--images": setting.images}
    return " ".join([*words, *(word for flag, value in places.items() if value for word in (flag, value))])


def _anchor(outcome: "Outcome") -> str:
    return f"{outcome.setting.name}-{outcome.design.name}"


def _section(table: Table) -> str:
    kind = "worded" if table.head[-1] == "published" else "numbers"
    return f"<section>\n<h2>{escape(table.title)}</h2>\n{_table(table, kind)}\n</section>"


def _table(table: Table, kind: str = "numbers", anchors: Sequence[str] = ()) -> str:
    """A table; with `anchors` each row's first cell leads to one."""
    firsts = [escape(row[0]) for row in table.rows]
    if anchors:
        firsts = [f'<a href="#{anchor}">{first}</a>' for anchor, first in zip(anchors, firsts, strict=True)]
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>\n"
        for first, row in zip(firsts, table.rows, strict=True)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    top = f"<thead><tr>{head}</tr></thead>" if any(table.head) else ""
    return f'<div class="card scroll"><table class="{kind}">{top}<tbody>\n{body}</tbody></table></div>\n' + (
        f'<ul class="notes">{notes}</ul>' if notes else ""
    )
