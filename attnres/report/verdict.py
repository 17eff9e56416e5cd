"""The headline, in words, made from the numbers alone. It claims nothing that lies inside an error bar."""

import math

from attnres.report.runs import Study
from attnres.report.stats import Paired, paired, sweeps_lr
from attnres.report.table import Row, Table, listed, number, with_error

CONTROL = "rescaled"
ATTENTION_RESIDUALS = ("full", "block")


def verdict(study: Study, table: Table) -> str:
    """One or a few sentences: who is better than the baseline, by how much, and who cannot be told from it."""
    done = [row for row in table.rows if row.complete and not math.isnan(row.loss)]
    if not done:
        return "No variant has finished yet: nothing can be said."
    if len(table.rows) == 1:
        row = done[0]
        return (
            f"Only {row.label} was trained: held-out loss {with_error(row.loss, row.loss_se)} nats per token "
            f"(perplexity {row.perplexity:.2f}), nothing to compare it with."
        )
    base = table.baseline
    if base is None:
        return "No run of the standard residual, the baseline: the losses below stand side by side, without a winner."
    if base not in [row.label for row in done]:
        return f"{base}, the baseline, has not finished yet: nothing can be said."
    if sweeps_lr(study):
        equal_rates = _at_equal_rates(study, done, table.row(base).residual)
        done = _best_of_each(done)
    else:
        equal_rates = []
    compared = [row for row in done if row.paired is not None]
    sentences = [_against_baseline(compared, base)] if compared else []
    sentences += equal_rates
    sentences += _against_control(study, done, base)
    sentences += _among_best(study, compared)
    waiting = [row.label for row in table.rows if not row.complete]
    if waiting:
        sentences.append(f"Not finished: {listed(waiting)}.")
    if not compared:
        sentences.insert(0, f"No finished variant can be paired with {base} yet: nothing can be said.")
    return " ".join(sentences)


def _against_baseline(rows: list[Row], base: str) -> str:
    """`full beats standard by 0.116 ± 0.004 nats per token, block by ...; rescaled is within its error ...`"""
    known = [(row.label, row.paired) for row in rows if row.paired is not None]
    known.sort(key=lambda item: item[1].mean)
    better = [(label, pair) for label, pair in known if pair.decided and pair.mean < 0]
    worse = [(label, pair) for label, pair in known if pair.decided and pair.mean > 0]
    tied = [(label, pair) for label, pair in known if not pair.decided]
    clauses = []
    for verb, group in (("beats", better), ("is worse than", worse)):
        if group:
            (first, pair), *rest = group
            parts = [f"{first} {verb} {base} by {_size(pair)} nats per token"]
            parts += [f"{label} by {_size(pair)}" for label, pair in rest]
            clauses.append(", ".join(parts))
    if tied:
        names = [f"{label} ({_interval(pair)})" for label, pair in tied]
        its = "is within its error" if len(tied) == 1 else "are within their errors"
        clauses.append(f"{listed(names)} {its} of {base}")
    return "; ".join(clauses) + "."


def _against_control(study: Study, done: list[Row], base: str) -> list[str]:
    """Whether Attention Residuals also beat the control, which has the scaling without the attention."""
    controls = [row for row in done if row.residual == CONTROL and row.label != base]
    tested = [row for row in done if row.residual in ATTENTION_RESIDUALS]
    if not controls or not tested:
        return []
    control = min(controls, key=lambda row: row.loss).label
    pairs = [(row.label, paired(study, row.label, control)) for row in tested]
    won = [(label, pair) for label, pair in pairs if pair and pair.decided and pair.mean < 0]
    rest = [label for label, pair in pairs if pair and not (pair.decided and pair.mean < 0)]
    sentences = []
    if won:
        sizes = listed([f"{_size(pair)} for {label}" for label, pair in sorted(won, key=lambda item: item[1].mean)])
        sentences.append(f"Over {control}, the control, the gain is {sizes}.")
    if rest:
        sentences.append(
            f"Over {control}, the control, {listed(rest)} {_verb(rest, 'gains', 'gain')} nothing beyond the error."
        )
    return sentences


def _among_best(study: Study, rows: list[Row]) -> list[str]:
    """Whether the two best can be told apart."""
    ranked = sorted((row for row in rows if row.paired and row.paired.decided and row.paired.mean < 0), key=_loss)
    if len(ranked) < 2:
        return []
    first, second = ranked[0].label, ranked[1].label
    pair = paired(study, first, second)
    if pair is None:
        return []
    if pair.decided and pair.mean < 0:
        return [f"{first} is ahead of {second} by {_size(pair)}."]
    return [f"{first} and {second} are within their error of one another ({_interval(pair)})."]


def _best_of_each(rows: list[Row]) -> list[Row]:
    """Of each residual the row with the lowest loss: in a sweep of learning rates each is judged at its best rate."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.residual not in best or row.loss < best[row.residual].loss:
            best[row.residual] = row
    return [row for row in rows if row is best[row.residual]]


def _at_equal_rates(study: Study, rows: list[Row], base: str) -> list[str]:
    """For each other residual: at how many of the learning rates it shares with the baseline's residual it wins."""
    lr_of = {row.label: study.of(row.label)[0].lr for row in rows}
    sentences = []
    for residual in dict.fromkeys(row.residual for row in rows if row.residual != base):
        pairs = [
            paired(study, row.label, other.label)
            for row in rows
            for other in rows
            if (row.residual, other.residual) == (residual, base) and lr_of[row.label] == lr_of[other.label]
        ]
        won = [pair for pair in pairs if pair and pair.decided and pair.mean < 0]
        if pairs:
            sentences.append(f"At equal learning rates {residual} beats {base} at {len(won)} of {len(pairs)}.")
    return sentences


def _loss(row: Row) -> float:
    return row.loss


def _size(pair: Paired) -> str:
    return with_error(abs(pair.mean), pair.se)


def _interval(pair: Paired) -> str:
    low, high = (number(pair.mean + sign * pair.margin, 3, signed=True) for sign in (-1, 1))
    return f"{number(pair.mean, 3, signed=True)}; 95 %: {low} to {high}"


def _verb(names: list[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many
