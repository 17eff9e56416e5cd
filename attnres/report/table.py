"""The comparison table: one row a variant, in the terminal and as CSV."""

import csv
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnres.report.runs import Run, Study
from attnres.report.stats import (
    SEEDS_FOR_SEED_ERROR,
    Paired,
    kind_name,
    mean_loss,
    paired,
    strongest_baseline,
    why_unpaired,
)

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """What is known of one variant. NaN or None: not known."""

    label: str
    residual: str
    seeds: tuple[int, ...]
    finished: int  # runs, of len(seeds)
    step: int
    steps: int | None
    loss: float  # nats per token, mean over seeds
    loss_se: float
    paired: Paired | None  # against the baseline
    tokens_per_s: float
    step_ratio: float
    peak_memory: float  # bytes
    parameters: float
    extra_parameters: float
    start_loss: float  # nats per token before the first step, of runs that begin from a trained model

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # what fp64 can hold

    @property
    def complete(self) -> bool:
        return self.finished == len(self.seeds)


@dataclass(frozen=True)
class Table:
    """Rows in the study's order, what they are held against, and the notes that belong under them."""

    rows: list[Row]
    baseline: str | None
    interleaved: bool  # speeds and step-time ratios come from variants timed in turn, not from separate runs
    notes: list[str]

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)


def build_table(study: Study) -> Table:
    """Everything the table shows, computed from a study; nothing is formatted yet."""
    baseline = strongest_baseline(study)
    interleaved = _interleaved(study, baseline)
    base_time = _median_of(study.counted(baseline), "step_s") if baseline else math.nan
    rows = []
    for label in study.labels:
        runs, counted = study.of(label), study.counted(label)
        loss, loss_se = mean_loss(study, label)
        if interleaved:
            ratio = _timed(study, label) / _timed(study, baseline or "")
            speed = _tokens_a_step(runs[0]) / _timed(study, label)
        else:
            ratio = _median_of(counted, "step_s") / base_time
            speed = _median_of(counted, "tokens_per_s")
        rows.append(
            Row(
                label=label,
                residual=runs[0].residual,
                seeds=tuple(run.seed for run in runs),
                finished=sum(run.finished for run in runs),
                step=min(run.last_step for run in runs),
                steps=runs[0].steps,
                loss=loss,
                loss_se=loss_se,
                paired=paired(study, label, baseline) if baseline else None,
                tokens_per_s=speed,
                step_ratio=ratio,
                peak_memory=max((_known(run, "peak_memory_bytes") for run in runs), default=math.nan),
                parameters=_known(counted[0], "parameters"),
                extra_parameters=_known(counted[0], "extra_parameters"),
                start_loss=_start_loss(runs),
            )
        )
    return Table(rows, baseline, interleaved, _notes(study, rows, baseline, interleaved))


# ------------------------------------------------------------------ what a run knows


def _known(run: Run, key: str) -> float:
    value = (run.summary or {}).get(key)
    return math.nan if value is None else float(value)


def _median_of(runs: list[Run], key: str) -> float:
    """Median over seeds; an unfinished run gives the median of its training lines so far."""
    values = [_known(run, key) for run in runs]
    for i, run in enumerate(runs):
        lines = [float(record[key]) for record in run.train if record.get(key) is not None]
        if math.isnan(values[i]) and lines:
            values[i] = float(np.median(lines))
    values = [value for value in values if not math.isnan(value)]
    return float(np.median(values)) if values else math.nan


def _start_loss(runs: list[Run]) -> float:
    """Mean over seeds of the held-out loss at step 0; NaN where a run has none."""
    first = [next((float(record["loss"]) for record in run.val if record["step"] == 0), math.nan) for run in runs]
    return float(np.mean(first)) if first else math.nan


def _timed(study: Study, label: str) -> float:
    entry = (study.speed or {}).get("variants", {}).get(label) or {}
    return float(entry.get("median_s") or math.nan)


def _tokens_a_step(run: Run) -> float:
    size, length = run.config.get("batch_size"), run.config.get("data", {}).get("seq_len")
    return math.nan if size is None or length is None else float(size * length)


def _interleaved(study: Study, baseline: str | None) -> bool:
    return baseline is not None and not math.isnan(_timed(study, baseline))


# ------------------------------------------------------------------ notes under the table


def _notes(study: Study, rows: list[Row], baseline: str | None, interleaved: bool) -> list[str]:
    notes = _what_the_losses_error_is(rows)
    pairs = [row.paired for row in rows if row.paired is not None]
    if pairs:
        notes.append(_what_the_error_is(pairs, baseline or ""))
        early = [row for row in rows if row.paired and row.paired.step < max(row.step, _last(study, baseline))]
        if early:
            steps = ", ".join(f"{row.label} at step {row.paired.step:,}" for row in early if row.paired)
            notes.append(f"Differences are taken at the last step that both runs have: {steps}.")
    if baseline and baseline != study.baseline:
        notes.append(f"The baseline is {baseline}: the best of the {kind_name(study, baseline)} runs.")
    reasons: dict[str, list[str]] = {}
    for row in rows if baseline else []:
        if row.paired is None and row.label != baseline:
            reasons.setdefault(why_unpaired(study, row.label, baseline or ""), []).append(row.label)
    notes += [f"No difference to {baseline} for {listed(labels)}: {reason}." for reason, labels in reasons.items()]
    if any(not math.isnan(row.step_ratio) for row in rows) and len(rows) > 1:
        if interleaved:
            device = str((study.speed or {}).get("device") or "")
            notes.append(
                "Tokens/s and step time: whole training steps of the variants taken in turn in one process, medians"
                + (f" ({device})." if device else ".")
            )
        else:
            notes.append(
                "Nothing was timed in turn: tokens/s and step time are medians of each run's own steps, of runs that "
                "had the machine at other times or shared it, so that small differences say nothing."
            )
    started = [f"{row.label} {number(row.start_loss)}" for row in rows if not math.isnan(row.start_loss)]
    if started:
        notes.append(f"Held-out loss before the first step: {listed(started)}.")
    unfinished = [_how_far(row) for row in rows if not row.complete]
    if unfinished:
        notes.append(f"Unfinished, so preliminary: {', '.join(unfinished)}.")
    if study.missing:
        notes.append(f"Planned but not started: {listed(study.missing)}.")
    return notes


def _how_far(row: Row) -> str:
    if row.finished:
        return f"{row.label} ({row.finished} of {len(row.seeds)} seeds finished, whose numbers these are)"
    return f"{row.label} at step {row.step:,}" + (f" of {row.steps:,}" if row.steps else "")


def _last(study: Study, baseline: str | None) -> int:
    return min((run.last_step for run in study.of(baseline)), default=0) if baseline else 0


def _what_the_losses_error_is(rows: list[Row]) -> list[str]:
    """Over what the errors in the column of losses are, see `stats.mean_loss`."""
    seeds = [row.finished or len(row.seeds) for row in rows if not math.isnan(row.loss_se)]
    if not seeds:
        return []
    many = [count >= SEEDS_FOR_SEED_ERROR for count in seeds]
    over = "seeds" if all(many) else "windows, or seeds where they are three or more" if any(many) else "windows"
    shared = (
        ", some of it common to all variants, which the difference leaves out"
        if any(row.paired for row in rows)
        else ""
    )
    return [f"Held-out loss: ± is its standard error over {over}{shared}."]


def _what_the_error_is(pairs: list[Paired], baseline: str) -> str:
    windows = listed([str(count) for count in sorted({pair.windows for pair in pairs})])
    what = f"Difference: loss minus that of {baseline} on the same {windows} held-out windows, seed by seed. "
    seeds = sorted({len(pair.per_seed) for pair in pairs})
    if seeds[-1] < SEEDS_FOR_SEED_ERROR:
        return what + (
            "± is its standard error over windows; it does not include what other seeds would change "
            f"(that takes {SEEDS_FOR_SEED_ERROR} seeds)."
        )
    counts = listed([str(count) for count in seeds])
    by_windows = [pair for pair in pairs if pair.basis == "windows"]
    if len(by_windows) == len(pairs):
        return what + f"± is its standard error over windows, wider here than that over {counts} seeds."
    exception = " (over windows where that interval is wider, or seeds are fewer than three)" if by_windows else ""
    return what + f"± is its standard error over {counts} seeds{exception}; 95 % intervals by Student's t."


def listed(names: list[str]) -> str:
    """Names in a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ------------------------------------------------------------------ formatting

UNKNOWN = "–"


def number(value: float, digits: int = 3, signed: bool = False) -> str:
    """Fixed digits with a true minus sign; a dash for NaN.

    >>> number(-0.1162, 3, signed=True)
    '−0.116'
    """
    if math.isnan(value):
        return UNKNOWN
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def digits_for(se: float) -> int:
    """Digits of a number in nats with that standard error: three, or more where the error is below 0.001."""
    return max(3, min(6, math.ceil(-math.log10(se)))) if se > 0 else 3


def with_error(value: float, se: float, signed: bool = False) -> str:
    """Value ± standard error, to `digits_for` it."""
    digits = digits_for(se)
    return number(value, digits, signed) + ("" if math.isnan(se) else f" ± {number(se, digits)}")


def whole(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:,.0f}"


def memory(size: float) -> str:
    """Bytes in GB or MB (powers of ten)."""
    if math.isnan(size):
        return UNKNOWN
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def extra(row: Row) -> str:
    if math.isnan(row.extra_parameters):
        return UNKNOWN
    base = row.parameters - row.extra_parameters
    share = f" ({100 * row.extra_parameters / base:.2f} %)" if row.extra_parameters and base > 0 else ""
    return whole(row.extra_parameters) + share


COLUMNS = (
    "Residual",
    "Held-out loss",
    "Perplexity",
    "Difference",
    "Tokens/s",
    "Step time",
    "Peak memory",
    "Extra parameters",
)


def cells(table: Table, row: Row) -> tuple[str, ...]:
    """The row as text, one cell for each of `COLUMNS`."""
    if row.label == table.baseline:
        difference = "baseline"
    else:
        difference = with_error(row.paired.mean, row.paired.se, signed=True) if row.paired else UNKNOWN
    return (
        row.label,
        with_error(row.loss, row.loss_se),
        UNKNOWN if math.isnan(row.loss) else f"{row.perplexity:.{'2f' if row.perplexity < 1e6 else '2e'}}",
        difference,
        whole(row.tokens_per_s),
        UNKNOWN if math.isnan(row.step_ratio) else f"{row.step_ratio:.2f}×",
        memory(row.peak_memory),
        extra(row),
    )


def print_table(table: Table, verdict: str, console: "Console | None" = None) -> None:
    """The table, the verdict and the notes in the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = console or Console()
    grid = Grid(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in COLUMNS:
        heading = {"Perplexity": "PPL", "Extra parameters": "Extra\nparams"}.get(name, name.replace(" ", "\n"))
        first = name == "Residual"
        grid.add_column(heading, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for row in table.rows:
        # Eighty columns: what is in brackets or can be had from the CSV is left out.
        values = [Text(cell.split(" (")[0]) for cell in cells(table, row)]
        values[1] = Text(number(row.loss))
        if row.paired and row.paired.decided and row.complete:
            values[COLUMNS.index("Difference")].stylize("bold green" if row.paired.mean < 0 else "bold red")
        if not row.complete:
            values[0].append(" *", style="yellow")
        grid.add_row(*values)
    console.print(grid)
    console.print(Text(verdict, style="bold"))
    for note in table.notes:
        console.print(Text(note, style="dim"))


CSV_COLUMNS = (
    "label",
    "residual",
    "seeds",
    "finished",
    "step",
    "val_loss",
    "val_loss_se",
    "perplexity",
    "baseline",
    "difference",
    "difference_se",
    "difference_low95",
    "difference_high95",
    "se_basis",
    "se_windows",
    "se_seeds",
    "windows",
    "difference_step",
    "decided",
    "tokens_per_s",
    "step_time_ratio",
    "step_time_interleaved",
    "peak_memory_bytes",
    "parameters",
    "extra_parameters",
    "start_loss",
)


def to_csv(table: Table) -> str:
    """One line a variant with plain numbers (SI units, nats), both standard errors and the 95 % interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in table.rows:
        pair = row.paired
        difference = [""] * 10
        if pair is not None:
            difference = [
                *(_plain(value) for value in (pair.mean, pair.se, pair.mean - pair.margin, pair.mean + pair.margin)),
                pair.basis,
                *(_plain(value) for value in (pair.se_windows, pair.se_seeds)),
                str(pair.windows),
                str(pair.step),
                str(pair.decided).lower(),
            ]
        writer.writerow(
            [
                row.label,
                row.residual,
                " ".join(str(seed) for seed in row.seeds),
                row.finished,
                row.step,
                *(_plain(value) for value in (row.loss, row.loss_se, row.perplexity)),
                table.baseline or "",
                *difference,
                *(_plain(value) for value in (row.tokens_per_s, row.step_ratio)),
                str(table.interleaved).lower(),
                *(_plain(value) for value in (row.peak_memory, row.parameters, row.extra_parameters, row.start_loss)),
            ]
        )
    return out.getvalue()


def _plain(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"
