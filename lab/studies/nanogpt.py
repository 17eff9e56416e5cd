"""The nanoGPT study's six configurations, and its final gates without a model."""

from attnres.comparison.plan import label_of
from attnres.text import number
from lab.charts import Chart, Curves, Line
from lab.contrast import contrast
from lab.design import Arm, Computed, Design, Measured, ResultTable, Setting, StudyResult
from lab.studies.null_gates import STEPS, VARIANTS, runs

CONFIGURATIONS = {
    "standard": "3.478",
    "boundary:block_size=2": "3.456 (its Full)",
    "boundary:num_blocks=4": "3.474 (its Block)",
    "standard:value_residual=layer": "3.483",
    "boundary:num_blocks=4,value_residual=layer": "3.475",
    "adaptive": "not published without its penalty",
    "block:num_blocks=4": "not in the study",
}
"""Variant -> validation loss on OpenWebText after 10,000 steps, GPT-2 124 M, one run each."""
NULL = "null gates"
DIFFERENT = (
    "Not as in the study: Muon and AdamW at one rate for all of them, queries at a tenth, where it has AdamW and "
    "10,000 steps; its value residual mixes a projection of the embeddings into the values, with a sigmoid, and ours "
    "those of the first layer, with a free factor."
)
"""Differences from the study, printed beside published numbers."""


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request the configurations in GPT-2's shape, and the simulation of the gates."""
    run = setting.config(model={"size": setting.preset.gpt2}, steps=setting.preset.many)
    steps = max(20, round(STEPS * min(1.0, 10 * setting.preset.small)))
    null = Computed("lab.studies.null_gates:simulate", runs(steps, setting.seeds))
    return [Arm(NULL, computed=null), setting.arm("configurations", setting.some(list(CONFIGURATIONS)), of=run)]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Compare the configurations with the standard one, and report gates that no loss depends on."""
    contrasts = contrast(measured, "configurations", "standard")
    published = {label_of(variant): text for variant, text in CONFIGURATIONS.items()}
    rows, panels = [], {"sum of the gates": list[Line]()}
    for label in VARIANTS:
        course = [row for row in measured.of(NULL, label, "count") if row.seed == 0]
        if not course:
            continue
        least = min(course, key=lambda row: row.value)
        cells = [f"{number(least.value, 3)} at step {least.step:,}", number(course[-1].value, 3)]
        rows.append([label, number(course[0].value, 2), *cells])
        panels["sum of the gates"].append(
            Line(label, [row.step for row in course], [row.value for row in course], dashed=label != "as published")
        )
    # Whether, for every seed, the sum of the published variant's gates falls below a tenth of its target of 4.
    seeds = set(measured.finals(NULL, "as published", "count"))
    below = {row.seed for row in measured.of(NULL, "as published", "count") if row.value < 0.4}
    closed = below == seeds if seeds else None
    sentence = {
        True: "Gates that no loss depends on close as the published ones do: the course needs no model.",
        False: "Gates that no loss depends on do not close as the published ones do.",
        None: "The simulation of the gates has not run.",
    }[closed]
    tables = [contrasts.table("The study's configurations", published)]
    tables[0].notes.append(DIFFERENT)
    tables.append(ResultTable("Gates that no loss depends on", ["variant", "sum at the start", "least", "end"], rows))
    caption = "Sum of 11 gates trained on annealing and penalty alone; the penalty's target is 4."
    charts: list[Chart] = [contrasts.chart("nanogpt", "The study's configurations")] if contrasts.others else []
    if panels["sum of the gates"]:
        charts.append(Curves("null-gates", "Gates without a loss", caption, "step", "sum of the gates", panels))
    values = {"configurations": contrasts.values(), "gates_close_without_a_loss": closed}
    return StudyResult(f"{contrasts.sentence()} {sentence}", tables, charts, values)


STUDY = Design(
    "nanogpt",
    "What of the nanoGPT study holds?",
    "Its six configurations in GPT-2's shape, the paper's Block beside them, and its block gates trained without a "
    "loss.",
    "github.com/aupadhyay/attnres-exp (GPT-2 124 M, 614 M tokens, one run each): Full 3.456 beats base 3.478; value "
    "residuals bring nothing on top (3.475 against 3.474); gates close.",
    arms,
    analyse,
)
