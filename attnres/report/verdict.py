"""The headline, in words, made from the numbers alone. It claims nothing that lies inside an error bar."""

import math

from attnres.report.runs import Study
from attnres.report.stats import Paired, kind, kind_name, paired, sweeps_lr, why_unpaired
from attnres.report.table import Row, Table
from attnres.text import digits_for, listed, number, with_error


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
    unpaired = [row for row in done if row.paired is None and row.label != base]
    if sweeps_lr(study):
        equal_rates = _at_equal_rates(study, done, base)
        done = _best_of_each(study, done)
    else:
        equal_rates = []
    compared = [row for row in done if row.paired is not None]
    controls = [row for row in compared if row.traits.is_control]
    tested = [row for row in compared if not row.traits.is_control]
    sentences = [_against_baseline(tested, base)] if tested else []
    sentences += [_chance(row, base) for row in controls]
    reasons: dict[str, list[str]] = {}
    for row in unpaired:
        reasons.setdefault(why_unpaired(study, row.label, base), []).append(row.label)
    sentences += [
        f"{listed(labels)} {_verb(labels, 'stands', 'stand')} beside {base} without a verdict: {reason}."
        for reason, labels in reasons.items()
    ]
    sentences += equal_rates
    sentences += _against_control(study, tested, controls)
    sentences += _among_best(study, compared)
    waiting = [row.label for row in table.rows if not row.complete]
    if waiting:
        sentences.append(f"Not finished: {listed(waiting)}.")
    if not compared:
        sentences.insert(0, f"No finished variant can be compared with {base}: nothing can be said.")
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


def _chance(row: Row, base: str) -> str:
    """What the control's difference says: never that it is better or worse."""
    assert row.paired is not None
    size = number(row.paired.mean, digits_for(row.paired.mean, row.paired.se), signed=True)
    runs = "a run" if len(row.counted) == 1 else f"the mean of {len(row.counted)} runs"
    return f"{row.label}, the control, computes what {base} computes: its {size} is what chance does to {runs}."


def _against_control(study: Study, tested: list[Row], controls: list[Row]) -> list[str]:
    """Whether the others also beat the control, which has the scaling and nothing that is learned."""
    if not controls or not tested:
        return []
    control = min(controls, key=lambda row: row.loss).label
    pairs = [(row.label, paired(study, row.label, control)) for row in tested]
    won = [(label, pair) for label, pair in pairs if pair and pair.decided and pair.mean < 0]
    lost = [(label, pair) for label, pair in pairs if pair and pair.decided and pair.mean > 0]
    rest = [label for label, pair in pairs if pair and not pair.decided]
    sentences = []
    if won:
        sizes = listed([f"{_size(pair)} for {label}" for label, pair in sorted(won, key=lambda item: item[1].mean)])
        sentences.append(f"Over {control}, the control, the gain is {sizes}.")
    if lost:
        sizes = listed([f"{label} by {_size(pair)}" for label, pair in sorted(lost, key=lambda item: item[1].mean)])
        sentences.append(f"Worse than {control}, the control: {sizes}.")
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
    if pair.decided:
        ahead, behind = (first, second) if pair.mean < 0 else (second, first)
        return [f"{ahead} is ahead of {behind} by {_size(pair)}."]
    return [f"{first} and {second} are within their error of one another ({_interval(pair)})."]


def _best_of_each(study: Study, rows: list[Row]) -> list[Row]:
    """Of each variant the row with the lowest loss: in a sweep of learning rates each is judged at its best rate."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        which = kind(study.of(row.label)[0])
        if which not in best or row.loss < best[which].loss:
            best[which] = row
    return [row for row in rows if any(row is chosen for chosen in best.values())]


def _at_equal_rates(study: Study, rows: list[Row], base: str) -> list[str]:
    """For each other variant: at how many of the learning rates it shares with the baseline it wins."""
    first = {row.label: study.of(row.label)[0] for row in rows}
    sentences = []
    for which in dict.fromkeys(kind(run) for run in first.values() if kind(run) != kind(first[base])):
        labels = [label for label in first if kind(first[label]) == which]
        pairs = [
            paired(study, label, other)
            for label in labels
            for other in first
            if kind(first[other]) == kind(first[base]) and first[label].lr == first[other].lr
        ]
        pairs = [pair for pair in pairs if pair is not None]
        won = [pair for pair in pairs if pair.decided and pair.mean < 0]
        if pairs:
            names = kind_name(study, labels[0]), kind_name(study, base)
            sentences.append(f"At equal learning rates {names[0]} beats {names[1]} at {len(won)} of {len(pairs)}.")
    return sentences


def _loss(row: Row) -> float:
    return row.loss


def _size(pair: Paired) -> str:
    return with_error(abs(pair.mean), pair.se)


def _interval(pair: Paired) -> str:
    values = (pair.mean, pair.mean - pair.margin, pair.mean + pair.margin)
    mean, low, high = (number(value, digits_for(pair.mean, pair.se), signed=True) for value in values)
    return f"{mean}; 95 %: {low} to {high}" if pair.margin >= 0 else f"{mean}, its error unknown"


def _verb(names: list[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many
