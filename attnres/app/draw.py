"""Panes as HTML: what the page shows of a model and one text, of two beside each other, and of a search."""

from collections.abc import Sequence
from html import escape

import numpy as np

from attnres.app import figures
from attnres.app.explorer import Learned
from attnres.app.figures import BEFORE, bar, section, sentence, swatch, visible
from attnres.app.pane import Pane, Scales, token_heading, token_legend, token_text
from attnres.inspect.colours import LESS, MORE, MUTED, colours_by_name
from attnres.inspect.corpus import Search
from attnres.inspect.notebook import end_of_scale
from attnres.inspect.steps import StepChange
from attnres.residuals import Read
from attnres.text import number, short, tick


def pane(p: Pane, scales: Scales) -> str:
    """Everything the page shows of one model."""
    title = visible(p.title)
    colours = colours_by_name(p.reading.layout)
    of_token, of_text = f"of {p.of_token}", "mean over the text"
    if p.by == "contribution":
        depth, mean = f"What the reads {of_token} are made of", f"What the reads are made of, {of_text}"
    else:
        depth, mean = f"Weights of the reads {of_token}", f"Weights of the reads, {of_text}"
    means, short_names = p.reading.means(p.by), figures.key(p.reading.layout)
    bars = figures.stack(
        p.reading.layout,
        p.parts,
        colours,
        f"{depth}, {title}",
        lambda r, i: _edge_words(p, r, i, p.token),
        span=scales.span,
        out=p.cut_at(p.token),
    )
    cells = figures.heatmap(
        p.reading.layout,
        means,
        f"{mean}, {title}",
        lambda r, i: _edge_words(p, r, i, None),
        largest=scales.mean,
        out=p.cut_at(None),
        once=p.cut_once,
    )
    rows = f"Rows are reads, bars their sources: {short_names}. Every edge in place."
    if scales.span[0] < 0:
        rows += " Left of the line: sources that point against the read."
    of_weights = "its weight's size, a share of the sizes of all"
    share = "how much of the read it is, by projection on it" if p.by == "contribution" else of_weights
    click = (
        f"Rows are reads, columns sources: {share}, every edge in place; hatched where there is no such edge. Click a "
        "cell to knock its edge out."
    )
    left = [
        section(p.title, "next", f"Next token after {p.of_token}", _next(p, scales)),
        section(p.title, "stack", f"{depth}, through depth", bars, rows, save=True),
        section(p.title, "attended", f"What {p.of_token} attends to, over the text", *_attention(p), save=True),
    ]
    right = [
        section(p.title, "contributions", mean, cells, click, save=True),
        section(
            p.title, "scores", f"What the prediction after {p.of_token} depends on", *_scores(p, scales), save=True
        ),
        section(
            p.title,
            "graph",
            f"How the prediction after {p.of_token} is made",
            p.graph,
            "The largest of these edges that lead to it, each measured alone; depth runs downwards.",
            save=True,
        ),
        p.queries,
    ]
    coloured = token_text(p, colours, scales) + token_legend(p, colours, scales)
    return (
        f'<article class="pane" data-model="{p.number}" data-place="{p.place}" aria-label="{escape(title)}">'
        f"{_head(p)}{_effect(p)}{_cuts(p)}"
        f"{section(p.title, 'tokens', token_heading(p), coloured)}"
        f'<div class="body"><div>{"".join(left)}</div><div>{"".join(right)}</div></div></article>'
    )


def _edge_words(p: Pane, read: int, source: int, token: int | None) -> str:
    """Return an edge's numbers, at one token or on average."""
    rows = (p.reading.contributions[read], p.reading.weights[read])
    part, weight = (float(row[:, source].mean() if token is None else row[token, source]) for row in rows)
    of = p.reading.layout[read]
    return f"{of.name} reads {of.sources[source].name}: contribution {number(part)}, weight {number(weight)}"


def _head(p: Pane) -> str:
    """Return the model's name, what it is, and remarks on its reading."""
    notes = "".join(sentence(note, "note") for note in p.reading.notes)
    details = f'<p class="details">{escape(visible(p.details))}</p>'
    return f"<header><h2>{escape(visible(p.title))}</h2>{details}{notes}</header>"


def _effect(p: Pane) -> str:
    """Draw what the knock-outs do, in two lines that stay in sight."""
    after = ""
    if p.candidates:
        best = p.candidates[0]
        words = f"after {p.of_token}: “{visible(best.piece)}” {number(best.before)}"
        if p.effect is not None and best.after is not None:
            words += f" → {number(best.after)}"
        after = f'<span class="words" data-tip="{escape(words)}">{escape(words)}</span>'
        if p.effect is not None:
            divergence = f"KL {number(p.divergence)} nats"
            after += f'; <span class="divergence" data-tip="sum p ln(p/q), p before and q after">{divergence}</span>'
    return f'<div class="effect"><p class="loss">{summary(p)}</p><p class="after">{after}</p></div>'


def summary(p: Pane) -> str:
    """Return the text's loss, and what knock-outs do to it."""
    loss = p.reading.loss
    if loss is None:
        return "one token, no loss"
    if p.effect is None:
        return f"loss {number(loss)} nats per token"
    change = float(p.effect.losses.mean()) - loss
    count = f"{len(p.cuts)} edge{'s' if len(p.cuts) > 1 else ''}"
    return f"loss {number(loss)} → <b>{number(loss + change)}</b> nats ({number(change, signed=True)}) without {count}"


def _cuts(p: Pane) -> str:
    """Draw what is knocked out, each to be brought back."""
    items = []
    for cut in p.cuts:
        where = "at all tokens"
        if cut.token is not None:
            names = p.reading.names
            word = f" “{visible(names[cut.token])}”" if cut.token < len(names) else ", which this text has not"
            where = f"at token {cut.token}{word}"
        edge = f"{p.reading.reads[cut.read]} ← {p.reading.sources[cut.read][cut.source]}"
        token = "" if cut.token is None else f' data-at="{cut.token}"'
        items.append(
            f'<li>{escape(edge)} <span class="where">{escape(where)}</span> <button type="button" data-back="" '
            f'data-of-read="{cut.read}" data-of-source="{cut.source}"{token} '
            f'aria-label="bring back {escape(f"{edge} {where}")}">×</button></li>'
        )
    if not items:
        return '<p class="cuts note">Nothing is knocked out.</p>'
    return f'<ul class="cuts" aria-label="knocked out">{"".join(items)}</ul>'


def _next(p: Pane, scales: Scales) -> str:
    """Draw the likeliest next tokens as bars; with a knock-out, before above after."""
    rows = []
    for c in p.candidates:
        bars = bar(c.before, scales.probability, MUTED if c.after is None else BEFORE)
        words = number(c.before)
        if c.after is not None:
            same = number(c.after) == number(c.before)  # in the digits that are shown
            bars += bar(c.after, scales.probability, BEFORE if same else LESS if c.after < c.before else MORE)
            words = f"{number(c.before)} → {number(c.after)}"
        name = escape(visible(c.piece))
        rows.append(
            f'<tr><th scope="row" data-tip="{name}">{name}</th><td class="bars">{bars}</td>'
            f'<td class="number">{words}</td></tr>'
        )
    line, after = "The text ends here.", p.token + 1
    if after < len(p.reading.pieces):
        line = f"The text goes on with “{visible(p.reading.names[after])}”, loss {number(p.reading.losses[p.token], 2)}"
        line += f" → {number(p.effect.losses[p.token], 2)}." if p.effect is not None else "."
    line = escape(line)
    change = "Click a bar or a cell to see what it changes here."
    if p.effect is not None:
        change = f"{swatch(BEFORE)} before {swatch(MORE)} risen {swatch(LESS)} fallen"
    return f'<p class="note" data-tip="{line}">{line}</p><p class="note">{change}</p><table>{"".join(rows)}</table>'


def _attention(p: Pane) -> tuple[str, str]:
    """Draw attention over tokens beside depth, and what is said of it."""
    if p.attention is None:
        return "", ""
    shown = p.token + 1
    rows = {
        "mean over heads": p.attention.mean[:, p.token, :shown].numpy(),
        "largest of the heads": p.attention.largest[:, p.token, :shown].numpy(),
    }
    names = [visible(name) for name in p.reading.names[:shown]]
    title = f"Attention of {p.of_token}, {visible(p.title)}"
    body = figures.attention(p.attention.layers, rows, names, title)
    note = (
        "Rows are layers, columns the tokens up to it; every edge in place. Colours over the root, up to 1; "
        f"what is below {tick(figures.faint(shown))} is not drawn."
    )
    return body, note


def _scores(p: Pane, scales: Scales) -> tuple[str, str]:
    """Draw every edge cut alone, as cells and as a graph; the button that measures them before."""
    if p.scores is None:
        count = sum(map(len, p.reading.sources))
        return (
            f'<button type="button" data-score="{p.token}" aria-label="score all {count} edges of the prediction '
            f'after {escape(p.of_token)}, {escape(visible(p.title))}">score all {count} edges</button>',
            "Each edge is knocked out alone, at all tokens, with all others in place.",
        )
    one, numbers = p.scores, [np.array(row) for row in p.scores.knockout]
    cells = figures.heatmap(
        one.layout,
        numbers,
        f"Change of ln p after {p.of_token} without each edge, {visible(p.title)}",
        lambda r, i: (
            f"{one.reads[r]} reads {one.sources[r][i]}: ln p {short(float(numbers[r][i]), 3, signed=True)} without it"
        ),
        name="scores",
        largest=scales.score,
        out=p.cut_at(None),
        once=p.cut_once,
    )
    follows = p.token + 1 < len(p.reading.names)
    name = p.reading.names[p.token + 1] if follows else p.target
    target = f"“{visible(name)}”" + ("" if follows else ", the likeliest next token,")
    note = (
        f"Change of ln p of {target} ({number(one.log_probability)}) without each edge, in nats, measured: orange is "
        "what it relies on, hatched where there is no such edge. All others are in place, those that are knocked out "
        "too."
    )
    return cells, note


def queries(of: str, similarity: tuple[list[Read], np.ndarray] | None) -> str:
    """Draw which reads ask alike; nothing where there are no queries."""
    if similarity is None:
        return ""
    cells = figures.similarity(*similarity, f"Cosines between pseudo-queries, {visible(of)}")
    note = "Cosines between the vectors by which reads choose their sources."
    return section(of, "queries", "Pseudo-queries: how alike", cells, note, save=True)


def results(result: Search, title: str) -> str:
    """Draw tokens of a corpus, each to be looked at."""
    rows = []
    for place, hit in enumerate(result.hits):
        amount = short(getattr(hit, result.by), 3)
        rows.append(
            f'<tr><td class="number">{amount}</td><td class="before">{escape(hit.before)}</td>'
            f'<td><button type="button" data-hit="{place}">{escape(visible(hit.token))}</button></td>'
            f'<td class="after">{escape(hit.after)}</td></tr>'
        )
    how = "least" if result.least else "most"
    words = (
        f"{title}: where {result.source} is {how} of the read of {result.read}, by {result.by}; "
        f"{result.tokens:,} tokens of {result.documents:,} documents, mean {short(result.mean, 3)}. "
        f"Click a token to look at its text."
    )
    return f'<p class="note">{escape(visible(words))}</p><table class="hits">{"".join(rows)}</table>'


def live(panes: Sequence[Pane]) -> str:
    """Say what has changed, for those who do not see it; plain text."""
    plain = [summary(p).replace("<b>", "").replace("</b>", "") for p in panes]
    return "; ".join(f"{visible(p.title)}: {words}" for p, words in zip(panes, plain, strict=True))


def difference(first: Pane, second: Pane) -> str:
    """Draw the second pane less the first: what reads are made of, and the next token."""
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
    """Draw what the page shows of a step of which the residual alone was kept: its `queries`, HTML, and `why` there
    is no more."""
    title = visible(model.label)
    head = f'<h2>{escape(title)}</h2><p class="details">{escape(model.details)}</p>{sentence(why, "note")}'
    return (
        f'<article class="pane" data-model="{number}" data-place="{place}" aria-label="{escape(title)}">'
        f'<header>{head}</header><div class="body">{queries}</div></article>'
    )


def learned_between(change: StepChange, name: str) -> str:
    """Draw what a run's residual learned between the two steps shown: sharpness at both, and how far each query
    turned."""
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
