"""Every held-out loss of a study's runs and its difference to the baseline's, as CSV."""

import math

from attnres.report.runs import Study
from attnres.report.stats import paired_at, strongest_baseline, unequal
from attnres.text import csv_text

COLUMNS = ("label", "seed", "step", "tokens", "loss", "windows", "difference", "difference_se_windows")


def curves_csv(study: Study) -> str:
    """Give one line a measurement: losses and paired differences in nats per token to the table's baseline; nothing
    where a run has no partner of its seed under equal conditions, nor for the error over one window.
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
                lines.append(row + [""] * (len(COLUMNS) - len(row)))
    return csv_text(COLUMNS, lines)
