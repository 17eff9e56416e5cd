"""What differs, as HTML: the second pane from the first, and what a residual learned between two steps of a run."""

from html import escape

import numpy as np

from attnres.app import figures
from attnres.app.markup import BEFORE, bar, section, sentence, visible
from attnres.app.pane import Pane
from attnres.app.steps import Learned
from attnres.inspect.colours import MUTED
from attnres.inspect.notebook import end_of_scale
from attnres.inspect.steps import StepChange
from attnres.residuals import Read
from attnres.text import number, short


def difference(first: Pane, second: Pane) -> str:
    """The second pane less the first: what reads are made of, and the next token."""
    theirs = second.reading.means(second.by)
    place = {
        (read.name, source): (r, i)  # a source with its span: "block 1" of other blocks is another
        for r, read in enumerate(second.reading.layout)
        for i, source in enumerate(read.sources)
    }
    mine, layout, values = first.reading.means(first.by), list[Read](), list[np.ndarray]()
    for r, read in enumerate(first.reading.layout):
        both = [i for i, source in enumerate(read.sources) if (read.name, source) in place]
        at = [place[read.name, read.sources[i]] for i in both]
        if both:
            layout.append(read._replace(sources=tuple(read.sources[i] for i in both)))
            values.append(np.array([theirs[j][k] - mine[r][i] for i, (j, k) in zip(both, at, strict=True)]))
    if not values:
        return sentence("these two models have no read and source in common: there is no difference to show", "note")
    cells = figures.heatmap(
        layout,
        values,
        f"Difference of {first.by}s, second less first",
        lambda r, i: (
            f"{layout[r].name} reads {layout[r].sources[i].name}: {first.by} {number(float(values[r][i]), signed=True)}"
        ),
        name="difference",
        largest=end_of_scale(np.concatenate(values)),
        click=False,
    )
    losses = [p.reading.loss for p in (first, second)]
    change = ""
    if losses[0] is not None and losses[1] is not None and first.reading.ids == second.reading.ids:
        apart = number(losses[1] - losses[0], signed=True)
        change = f"Loss {number(losses[0])} and {number(losses[1])} nats per token, {apart}. "
    note = (
        f"{change}Mean {first.by} over the text, second less first, every edge in place: blue where the second reads "
        "more of it, orange less. Hatched are edges that only one of them has, those of sums of other outputs, too."
    )
    return section(first.title, "difference", "Difference: second less first", cells, note, save=True)


def learned(number: int, place: int, model: Learned, queries: str, why: str) -> str:
    """What the page shows of a step of which the residual alone was kept: its `queries`, HTML, and `why` there is no
    more."""
    title = visible(model.label)
    head = f'<h2>{escape(title)}</h2><p class="details">{escape(model.details)}</p>{sentence(why, "note")}'
    return (
        f'<article class="pane" data-model="{number}" data-place="{place}" aria-label="{escape(title)}">'
        f'<header>{head}</header><div class="body">{queries}</div></article>'
    )


def learned_between(change: StepChange, name: str) -> str:
    """What a run's residual learned between the two steps shown: sharpness at both, and how far each query turned."""
    if not any(change.after) and not any(change.before):
        moved = "; ".join(f"{table} changed by {largest:.3g} at most" for table, largest in change.tables.items())
        return sentence(
            f"from step {change.first:,} to {change.last:,} {moved or 'the residual learned nothing'}", "note"
        )
    largest = max(value or 0.0 for value in (*change.before, *change.after))
    rows = []
    for read, turned, *sharp in zip(change.layout, change.turned, change.before, change.after, strict=True):
        bars = "".join(bar(value or 0.0, largest, colour) for value, colour in zip(sharp, (BEFORE, MUTED)))
        words = f"{short(sharp[0])} → {short(sharp[1])}, cosine {short(turned)}"
        rows.append(
            f'<tr><th scope="row">{escape(figures.row_name(read))}</th><td class="bars">{bars}</td>'
            f'<td class="number">{words}</td></tr>'
        )
    note = (
        f"Sharpness of each read, the largest logit that its query can give, at step {change.first:,} (above) and "
        f"{change.last:,}, and the cosine of its query at both: 1 where it did not turn."
    )
    return section(
        name, "learned", "What the residual learned between the steps", f"<table>{''.join(rows)}</table>", note
    )
