"""Write the headline from the table's numbers. It calls nothing better or worse whose interval includes 0."""

import math
from collections.abc import Iterable, Sequence

from attnres.report.runs import Study
from attnres.report.stats import Paired, kind, kind_name, paired, sweeps_lr, why_unpaired
from attnres.report.table import ComparisonTable, VariantRow
from attnres.text import digits_for, listed, number, with_error

Pairs = list[tuple[str, Paired]]


def headline(study: Study, table: ComparisonTable) -> str:
    """Return one or a few sentences: which variants are better than the baseline, by how much, and which differences
    are not significant."""
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
    equal_rates = []
    if sweeps_lr(study):  # each variant is judged at its best rate
        equal_rates = _at_equal_rates(study, done, base)
        best = {kind(row.runs[0]): row for row in sorted(done, key=lambda row: -row.loss)}
        done = [row for row in done if row is best[kind(row.runs[0])]]
    compared = [row for row in done if row.paired is not None]
    controls = [row for row in compared if row.traits.is_control]
    tested = [row for row in compared if not row.traits.is_control]
    same = [row for row in controls if row.traits.is_chance]
    other = [row for row in compared if not row.traits.is_chance]
    controls = [row for row in controls if not row.traits.is_chance]  # a gain over a placebo control is not reported
    chance = [number(pair.mean, digits_for(pair.mean, pair.se), signed=True) for row in same if (pair := row.paired)]
    placebo = f" (placebo control: {listed(chance)})" if chance else ""
    sentences = [_against_baseline(other, base, placebo)] if other else []
    sentences += [_chance(row, base) for row in same]
    reasons: dict[str, list[str]] = {}
    for row in unpaired:
        reasons.setdefault(why_unpaired(study, row.label, base), []).append(row.label)
    for reason, labels in reasons.items():
        sentences.append(f"No interval for {listed(labels)} against {base}: {reason}.")
    sentences += equal_rates
    sentences += _against_control(study, tested, controls)
    sentences += _among_best(study, compared)
    waiting = [row.label for row in table.rows if not row.complete]
    if waiting:
        sentences.append(f"Not finished: {listed(waiting)}.")
    if not compared:
        sentences.insert(0, f"No finished variant can be compared with {base}: nothing can be said.")
    return " ".join(sentences)


def _apart(pairs: Iterable[tuple[str, Paired | None]]) -> tuple[Pairs, Pairs, Pairs]:
    """Split pairs by significance, each part sorted by size: significantly better, significantly worse, and not
    significant."""
    by_size = sorted(((label, pair) for label, pair in pairs if pair is not None), key=lambda item: item[1].mean)
    decided = [(label, pair) for label, pair in by_size if pair.decided]
    tied = [(label, pair) for label, pair in by_size if not pair.decided]
    return [item for item in decided if item[1].mean < 0], [item for item in decided if item[1].mean > 0], tied


def _against_baseline(rows: list[VariantRow], base: str, placebo: str) -> str:
    """Return `full is below standard by 0.116 ± 0.004 (placebo control: +0.013) nats per token, block by ...; rescaled
    (...): the interval includes 0`; of one seed `full ends below ...`, and that other seeds may differ."""
    better, worse, tied = _apart((row.label, row.paired) for row in rows)
    many = all(row.paired.over_seeds for row in rows if row.paired is not None)
    verb = "is" if many else "ends"
    clauses = []
    for side, group in (("below", better), ("above", worse)):
        for label, pair in group[:1]:
            parts = [f"{label} {verb} {side} {base} by {_size(pair)}{placebo} nats per token"]
            clauses.append(", ".join(parts + [f"{label} by {_size(pair)}{placebo}" for label, pair in group[1:]]))
    if tied:
        names = [f"{label} ({_interval(pair)})" for label, pair in tied]
        clauses.append(f"{listed(names)}: {_includes_0(names)}")
    fewest = min(len(row.paired.per_seed) for row in rows if row.paired is not None)
    unseen = f" From {fewest} seed{'s' * (fewest > 1)}: no error here covers what another seed would change."
    return "; ".join(clauses) + "." + ("" if many else unseen)


def _chance(row: VariantRow, base: str) -> str:
    """Return the sentence about a placebo control's difference: it is never better or worse."""
    assert row.paired is not None
    size = number(row.paired.mean, digits_for(row.paired.mean, row.paired.se), signed=True)
    count = len(row.paired.per_seed)
    runs = "a run" if count == 1 else f"the mean of {count} runs"
    unseen = "; the ± covers only the choice of held-out windows" if row.paired.basis == "windows" else ""
    return (
        f"{row.label}, the placebo control, is mathematically the same as {base}: its {size} is what chance alone does "
        f"to {runs}{unseen}."
    )


def _against_control(study: Study, tested: list[VariantRow], controls: list[VariantRow]) -> list[str]:
    """Return the sentence on whether the variants also beat the control, which has the scaling and learns nothing."""
    if not controls or not tested:
        return []
    control = min(controls, key=lambda row: row.loss).label
    won, lost, tied = _apart((row.label, paired(study, row.label, control)) for row in tested)
    sentences = []
    if won:
        sizes = listed([f"{_size(pair)} for {label}" for label, pair in won])
        sentences.append(f"Over {control}, the control, the gain is {sizes}.")
    if lost:
        sizes = listed([f"{label} by {_size(pair)}" for label, pair in lost])
        sentences.append(f"Worse than {control}, the control: {sizes}.")
    if tied:
        names = [label for label, _ in tied]
        sentences.append(f"Over {control}, the control, {listed(names)}: {_includes_0(names)}.")
    return sentences


def _among_best(study: Study, rows: list[VariantRow]) -> list[str]:
    """Return the sentence on whether the two best variants differ significantly."""
    better = {label for label, _ in _apart((row.label, row.paired) for row in rows)[0]}
    ranked = [row.label for row in sorted(rows, key=lambda row: row.loss) if row.label in better]
    pair = paired(study, ranked[0], ranked[1]) if len(ranked) > 1 else None
    if pair is None:
        return []
    if not pair.decided:
        return [f"{ranked[0]} and {ranked[1]} are not told apart: the interval includes 0 ({_interval(pair)})."]
    ahead, behind = ranked[:2] if pair.mean < 0 else ranked[1::-1]
    return [f"{ahead} is below {behind} by {_size(pair)}."]


def _at_equal_rates(study: Study, rows: list[VariantRow], base: str) -> list[str]:
    """Return for each variant a sentence on how many of the learning rates shared with the baseline it wins at, unless
    the baseline has only one, which other sentences cover. Placebo controls are left out."""
    first = {row.label: row.runs[0] for row in rows if row.label == base or not row.traits.is_chance}
    against = [label for label in first if kind(first[label]) == kind(first[base])]
    counts = []
    for which in dict.fromkeys(kind(run) for run in first.values() if kind(run) != kind(first[base])):
        labels = [label for label in first if kind(first[label]) == which]
        met = [(label, other) for label in labels for other in against if first[label].lr == first[other].lr]
        won, lost, tied = _apart((label, paired(study, label, other)) for label, other in met)
        if any(other != base for _, other in met) and (count := len(won + lost + tied)):
            counts.append((kind_name(study, labels[0]), f"at {len(won)} of {count}"))
    if not counts:
        return []
    (name, share), *rest = counts
    parts = [f"{name} is below {kind_name(study, base)} {share}", *(f"{name} {share}" for name, share in rest)]
    return [f"At equal learning rates {', '.join(parts)}."]


def _size(pair: Paired) -> str:
    return with_error(abs(pair.mean), pair.se)


def _interval(pair: Paired) -> str:
    values = (pair.mean, pair.mean - pair.margin, pair.mean + pair.margin)
    mean, low, high = (number(value, digits_for(pair.mean, pair.se), signed=True) for value in values)
    return f"{mean}; 95 %: {low} to {high}" if pair.margin >= 0 else f"{mean}, its error unknown"


def _includes_0(names: Sequence[str]) -> str:
    return "the interval includes 0" if len(names) == 1 else "the intervals include 0"
