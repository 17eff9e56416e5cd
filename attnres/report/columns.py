"""The columns of the comparison table, in the terminal and as CSV, and a CSV of all held-out losses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnres.report.runs import Study
from attnres.report.stats import Paired, paired_at, strongest_baseline, unequal
from attnres.report.table import ComparisonTable, VariantRow
from attnres.text import UNKNOWN, csv_text, memory, number, with_error

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        name: heading in the CSV file.
        value: the cell's value; NaN and None are empty cells.
        title: heading in the table; empty leaves the column out of the table. short: heading in the terminal.
        text: formats the value for the table.
        optional: the table shows the column only if some variant has a value.
    """

    name: str
    value: Callable[[VariantRow, ComparisonTable], Any]
    title: str = ""
    text: Callable[[VariantRow, ComparisonTable], str] = lambda row, table: UNKNOWN
    short: str = ""
    optional: bool = False


def _of_pair(name: str, value: Callable[[Paired], Any], **shown: Any) -> Column:
    return Column(name, lambda row, _: None if row.paired is None else value(row.paired), **shown)


def _difference(row: VariantRow, table: ComparisonTable) -> str:
    if row.label == table.baseline:
        return "baseline"
    return UNKNOWN if row.paired is None else with_error(row.paired.mean, row.paired.se, signed=True)


def _extra(row: VariantRow, table: ComparisonTable) -> str:
    count, base = row.largest("extra_parameters"), row.largest("parameters") - row.largest("extra_parameters")
    return number(count, 0) + (f" ({100 * count / base:.2f} %)" if count and base > 0 else "")


def _step_time(row: VariantRow, table: ComparisonTable) -> str:
    if table.doubt or math.isnan(row.step_ratio):
        return UNKNOWN
    low, high = row.step_quartiles
    return f"{row.step_ratio:.2f}×" + ("" if math.isnan(low) or low == high else f" ({low:.2f}–{high:.2f})")


def _tokens_saved(row: VariantRow, table: ComparisonTable) -> str:
    if row.saving is None or row.traits.is_chance or math.isnan(row.tokens_saved):
        return UNKNOWN
    return f"{row.tokens_saved:.2f}×"


def _time_saved(row: VariantRow, table: ComparisonTable) -> float:
    """Return the factor by which the baseline needs more time than this row for the same loss, each with its own time a
    step."""
    # both relative to the plain model, if it was timed
    base = table.row(table.baseline).step_ratio if table.baseline else math.nan
    return math.nan if row.saving is None else row.saving.of_compute(row.step_ratio / base)


def _time_saved_text(row: VariantRow, table: ComparisonTable) -> str:
    hidden = table.doubt or _tokens_saved(row, table) == UNKNOWN or math.isnan(_time_saved(row, table))
    return UNKNOWN if hidden else f"{_time_saved(row, table):.2f}×"


def _perplexity(row: VariantRow, table: ComparisonTable) -> str:
    return UNKNOWN if math.isnan(row.loss) else f"{row.perplexity:.{'2f' if row.perplexity < 1e6 else '2e'}}"


COLUMNS = (
    Column("label", lambda row, _: row.label, "Residual", lambda row, _: row.label),
    Column("residual", lambda row, _: row.residual),
    Column("seeds", lambda row, _: " ".join(str(run.seed) for run in row.runs)),
    Column("finished", lambda row, _: row.finished),
    Column("step", lambda row, _: row.step),
    Column("val_loss", lambda row, _: row.loss, "Held-out loss", lambda row, _: with_error(row.loss, row.loss_se)),
    Column("val_loss_se", lambda row, _: row.loss_se),
    Column("perplexity", lambda row, _: row.perplexity, "Perplexity", _perplexity, "PPL"),
    Column("baseline", lambda _, table: table.baseline),
    _of_pair("difference", lambda pair: pair.mean, title="Difference", text=_difference),
    _of_pair("difference_se", lambda pair: pair.se),
    _of_pair("difference_low95", lambda pair: pair.mean - pair.margin),
    _of_pair("difference_high95", lambda pair: pair.mean + pair.margin),
    _of_pair("se_basis", lambda pair: pair.basis),
    _of_pair("se_windows", lambda pair: pair.se_windows),
    _of_pair("se_seeds", lambda pair: pair.se_seeds),
    _of_pair("windows", lambda pair: pair.windows),
    _of_pair("difference_step", lambda pair: pair.step),
    Column("decided", lambda row, _: None if row.paired is None else row.decided),
    Column(
        "tokens_per_s",
        lambda row, _: row.tokens_per_s,
        "Tokens/s",
        text=lambda row, table: UNKNOWN if table.doubt else number(row.tokens_per_s, 0),
    ),
    Column(
        "step_time_ratio",
        lambda row, _: row.step_ratio,
        "Step time",
        text=_step_time,
    ),
    Column("step_time_interleaved", lambda _, table: table.interleaved),
    Column(
        "peak_memory_bytes",
        lambda row, _: row.largest("peak_memory_bytes"),
        "Peak memory",
        text=lambda row, _: memory(row.largest("peak_memory_bytes")),
    ),
    Column("parameters", lambda row, _: row.largest("parameters")),
    Column(
        "extra_parameters",
        lambda row, _: row.largest("extra_parameters"),
        "Extra parameters",
        text=_extra,
        short="Extra\nparams",
    ),
    Column("start_loss", lambda row, _: row.start_loss),
    Column("flops_per_s", lambda row, _: row.flops_per_s),
    Column(
        "mfu",
        lambda row, _: row.mfu,
        "MFU",
        text=lambda row, _: UNKNOWN if math.isnan(row.mfu) else f"{row.mfu:.1%}",
        optional=True,
    ),
    Column("step_time_low", lambda row, _: row.step_quartiles[0]),
    Column("step_time_high", lambda row, _: row.step_quartiles[1]),
    Column("plain_tokens_per_s", lambda _, table: table.plain_tokens_per_s),
    Column(
        "tokens_saved", lambda row, _: row.tokens_saved, "Tokens saved", _tokens_saved, "Tokens\nsaved", optional=True
    ),
    Column("time_saved", _time_saved, "Time saved", _time_saved_text, optional=True),
    # Of finished runs: the mean of the last three validations; the loss over four times as many windows as those have;
    # the loss around token 250 minus that around token 50, which falls when a run begins to copy.
    Column("last_three", lambda row, _: row.mean("last_three")),
    Column("final_loss", lambda row, _: row.mean("final_loss")),
    Column("in_context", lambda row, _: row.mean("in_context")),
)
"""All columns in the order of the CSV file; those with a title are in the table."""


def shown(table: ComparisonTable) -> list[Column]:
    """Return the columns that the table shows."""

    def known(column: Column) -> bool:
        return not column.optional or any(column.text(row, table) != UNKNOWN for row in table.rows)

    return [column for column in COLUMNS if column.title and known(column)]


def plain_cells(table: ComparisonTable, columns: list[Column]) -> list[str]:
    """Return the cells of the plain model's row, which was timed but not trained; empty if there is nothing to show."""
    if table.doubt or math.isnan(table.plain_tokens_per_s):
        return []
    cells = {"label": "plain model", "tokens_per_s": number(table.plain_tokens_per_s, 0), "step_time_ratio": "1.00×"}
    return [cells.get(column.name, "") for column in columns]


def print_table(table: ComparisonTable, headline: str, console: "Console | None" = None) -> None:
    """Print the table, the headline and the notes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = console or Console()
    grid = Grid(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    columns = shown(table)
    # the terminal has eighty columns: this column takes the place of others
    if any(column.name == "tokens_saved" for column in columns):
        left_out = ("perplexity", "extra_parameters", "time_saved")
        columns = [column for column in columns if column.name not in left_out]
    for column in columns:
        first = column is columns[0]
        heading = column.short or column.title.replace(" ", "\n")
        grid.add_column(heading, justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for row in table.rows:
        cells = {}
        # the terminal has eighty columns: details in brackets, and columns in the CSV, are left out
        for column in columns:
            text = column.text(row, table)
            text = text if column is columns[0] else text.split(" (")[0]
            cells[column.name] = Text(text if column.name == "difference" else text.split(" ± ")[0])
        if row.paired and row.decided and row.complete:
            cells["difference"].stylize("bold green" if row.paired.mean < 0 else "bold red")
        if not row.complete:
            cells["label"].append(" *", style="yellow")
        grid.add_row(*cells.values())
    if cells := plain_cells(table, columns):
        grid.add_row(*cells, style="dim")
    console.print(grid)
    console.print(Text(headline, style="bold"))
    for note in table.notes:
        console.print(Text(note, style="dim"))


def to_csv(table: ComparisonTable) -> str:
    """Return the table as CSV, a line a variant with plain numbers (SI units, nats), both standard errors and the 95 %
    interval."""
    rows = ([_plain(column.value(row, table)) for column in COLUMNS] for row in table.rows)
    return csv_text([column.name for column in COLUMNS], rows)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.10g}"
    return "" if value is None else str(value)


# ------------------------------------------------------------------ curves


CURVE_COLUMNS = ("label", "seed", "step", "tokens", "loss", "windows", "difference", "difference_se_windows")


def curves_csv(study: Study) -> str:
    """Return a CSV with a line for each measurement: the loss and the paired difference to the table's baseline, in
    nats per token. The difference is empty if the baseline has no run of that seed under equal conditions, and the
    error is empty for a single window.
    """
    baseline = strongest_baseline(study)
    lines: list[list[object]] = []
    partners = {} if baseline is None else {run.seed: run for run in study.of(baseline)}
    for label in study.labels:
        for run in study.of(label):
            partner = partners.get(run.seed) if label != baseline else None
            if partner is not None and unequal(run, partner):
                partner = None
            for step, losses in sorted(run.windows.items()):
                tokens, mean = round(run.tokens_at(step)), f"{losses.mean():.6f}"
                row: list[object] = [label, run.seed, step, tokens, mean, len(losses)]
                if partner is not None and step in partner.windows:
                    pair = paired_at([(run, partner)], step)
                    row += ["" if math.isnan(value) else f"{value:.6f}" for value in (pair.mean, pair.se_windows)]
                lines.append(row + [""] * (len(CURVE_COLUMNS) - len(row)))
    return csv_text(CURVE_COLUMNS, lines)
