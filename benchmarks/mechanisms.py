"""Every mechanism for a few steps of training: whether it trains and every tool takes it, and what a step of it costs.

    python benchmarks/mechanisms.py                            # 100 steps of nano each on Python's own library
    python benchmarks/mechanisms.py --source TEXT --only block 'full query=input' --steps 20

Rows are the registered mechanisms with their default settings, and the variants of the depth read that are settings.
Each is trained in a process of its own, whose largest resident set is its peak memory, and is finished where an earlier
call left it. The held-out loss is that after the last step, as `attnres compare` trains by default. Then its recording
is read, and its report and all figures are drawn. Step times are those of whole steps taken in turn, a few mechanisms
at a time together with the standard residual and with the plain model of Transformers. With --add a result keeps its
other rows, each with the command, commit and date of its own run.
"""

import argparse
import dataclasses
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness

from attnres.commands.compare import Compare
from attnres.comparison.speed import StepOptions, step_times
from attnres.device import spread
from attnres.figures.write import write_figures
from attnres.files import write_json
from attnres.inspect import Inspection
from attnres.reading import read_json
from attnres.report.page import write_report
from attnres.report.runs import load_study
from attnres.report.sections import slug
from attnres.residuals import RESIDUALS
from attnres.residuals.registry import ships
from attnres.training.config import DataConfig, ModelConfig, TrainConfig, to_dict
from attnres.training.records import read_metrics

Rows = dict[str, tuple[str, dict[str, Any]]]

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {"query": "input"}),
    ("full", {"weights": "sigmoid"}),
    ("full", {"key_norm": False}),
    ("full", {"heads": 4}),
    ("full", {"values": "normed"}),
    ("full", {"read_temperature": "sqrt_width"}),
    ("full", {"null_source": True}),
    ("full", {"window": 8}),
    ("full", {"gate": "scalar"}),
    ("full", {"gate": "vector"}),
    ("full", {"alpha": "learnable"}),
    ("full", {"recency_bias": 3.0}),
    ("block", {"block_size": 4}),
    ("block", {"block_size": "2+2+4+4+12"}),
    ("block", {"block_sum": "rms"}),
    ("block", {"block_sum": "learned"}),
    ("block", {"summaries": "split"}),
    ("block", {"count_power": 1.0, "count_prior": 1.0}),
    ("block", {"block_scale": True}),
    ("full", {"keys": "sliced:32"}),
    ("full", {"embedding_key": "static"}),
    ("block", {"heads": 4}),
    ("block", {"key_norm": False}),
    ("cumulative", {"gate": "scalar", "recency_bias": 3.0}),
    ("adaptive", {"least_count": 2.0}),
    ("delta_attnres", {"num_blocks": 8, "gate_start": 0.0}),
    ("muddformer", {"prepost_norm": True}),
    ("muddformer", {"layers": "-2:"}),
    ("review", {"gate": "fixed"}),
    ("multi_gate", {"gate": "competitive"}),
    ("compose", {"rules": "block=0:10+muddformer=-2:"}),
)
"""A name and settings that are not its defaults, in a model of 24 sublayers."""
TOGETHER = 4
"""Mechanisms timed in one group, beside the standard residual and the plain model."""


def rows_of() -> Rows:
    """Label -> residual and settings: what is registered, then the variants."""
    variants = {f"{name} {','.join(f'{k}={v}' for k, v in given.items())}": (name, given) for name, given in VARIANTS}
    return {name: (name, {}) for name in RESIDUALS if ships(name)} | variants


@dataclasses.dataclass(frozen=True)
class Bench:
    """How rows are trained and timed.

    Attributes:
        base: the training run of each, its residual apart.
        runs: folder of the run folders.
        seconds: of timing for a group.
    """

    base: TrainConfig
    runs: Path
    seconds: float = 30.0

    def train(self, label: str, residual: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Train a row in a process of its own and return what is known of it; or the `reason` why there is none."""
        folder = self.runs / slug(label)
        model = dataclasses.replace(self.base.model, residual=residual, settings=dict(settings))
        config = to_dict(dataclasses.replace(self.base, model=model, out=str(folder), name=label))
        file, result = (self.runs / kind / f"{slug(label)}.json" for kind in ("configs", "results"))
        if result.is_file() and (row := read_json(result))["config"] == config:
            return row["row"]
        write_json(file, config)
        command = [sys.executable, "-m", "attnres", "train", "--config", str(file), "--resume", "--no-progress"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            return {"reason": (said[-1] if said else f"status {done.returncode}")[:200]}
        summary = read_json(folder / "summary.json")
        row = {key: summary[key] for key in ("val_loss", "val_se", "train_loss", "extra_parameters")}
        row |= {"peak_bytes": summary["peak_memory_bytes"], "tools": tools(folder)}
        write_json(result, {"config": config, "row": row})
        return row

    def times(self, group: Rows) -> dict[str, dict[str, Any]]:
        """Time steps of a group; label -> `ratio` to the standard residual's and `plain_ratio`, with quartiles."""
        base = self.base
        variants = {"plain": (None, {}), "standard": ("standard", {}), **group}
        options = StepOptions(
            size=base.model.size or "nano",
            seq_len=base.data.seq_len,
            batch_size=base.batch_size,
            optim=base.optim,
            dtype=base.dtype,
            device=base.device,
        )
        times = step_times(variants, options, baseline="standard", rounds=200, seconds=self.seconds)["variants"]
        rows = {}
        for label in group:
            row, plain = times[label], spread(times[label]["times"], times["plain"]["times"])
            rows[label] = {key: row[key] for key in ("median_s", "ratio", "ratio_quartiles")}
            rows[label] |= {"rounds": len(row["times"]), "plain_ratio": plain.ratio}
            rows[label] |= {"plain_ratio_quartiles": plain.ratio_quartiles}
        return rows

    def run(self, rows: Rows, say: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
        """Train all rows, then time those that trained; one that fails has a `reason`."""
        bar = harness.progress("mechanisms", len(rows))
        results: dict[str, dict[str, Any]] = {}
        for label, (residual, settings) in rows.items():
            results[label] = {"residual": residual, "settings": settings, **self.train(label, residual, settings)}
            bar.advance(1, label)
        standard = results.get("standard", {}).get("peak_bytes", math.nan)
        trained = [label for label in rows if "reason" not in results[label]]
        for place in range(0, len(trained), TOGETHER):
            group = {label: rows[label] for label in trained[place : place + TOGETHER]}
            say(f"timing {', '.join(group)} in turn")
            for label, times in self.times(group).items():
                results[label] |= {**times, "peak_ratio": results[label]["peak_bytes"] / standard}
        return results


def tools(folder: Path) -> dict[str, str | None]:
    """Whether what the run recorded is there and finite, and whether its report and figures are drawn: None for yes, or
    in one line why not."""

    def recorded() -> None:
        inspection = Inspection.load(folder / "inspection.json")
        depth = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "depth"]
        numbers = [value for line in depth for row in (line["output_rms"], line["grad_rms"]) for value in row]
        numbers += [*inspection.output_rms, *inspection.input_rms, inspection.losses["mean"]]
        if not depth or not all(value is not None and math.isfinite(value) for value in numbers):
            raise ValueError("a magnitude, a gradient or the loss is not finite, or was not recorded")

    with tempfile.TemporaryDirectory() as out:
        return {
            "record": harness.attempt(recorded),
            "report": harness.attempt(lambda: write_report(load_study(folder), out)),
            "figures": harness.attempt(
                lambda: write_figures(Inspection.load(folder / "inspection.json"), out, formats=("svg",))
            ),
        }


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a table."""
    head = ("mechanism", "parameters", "held-out loss", "step, of standard's", "of the plain model's", "peak memory")
    lines = [f"| {' | '.join((*head, 'record, report, figures'))} |", "|---|---:|---:|---:|---:|---:|---|"]
    for label, row in results.items():
        if "reason" in row:
            lines.append(f"| {label} | - | - | - | - | - | {row['reason']} |")
            continue
        ratios = [
            f"{row[key]:.2f} ({row[f'{key}_quartiles'][0]:.2f} to {row[f'{key}_quartiles'][1]:.2f})"
            for key in ("ratio", "plain_ratio")
        ]
        wrong = [f"{name}: {reason}" for name, reason in row["tools"].items() if reason is not None]
        cells = [f"{row['extra_parameters']:,}", f"{row['val_loss']:.3f}", *ratios, f"{row['peak_ratio']:.2f}"]
        lines.append(f"| {' | '.join((label, *cells, '; '.join(wrong) or 'ok'))} |")
    return "\n".join(lines)


def kept(earlier: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of an earlier result, each with the command, commit and date that it was measured by."""
    measured = {key: earlier["environment"][key] for key in ("commit", "date")} | {"command": earlier["command"]}
    return {label: {"measured": measured} | row for label, row in earlier["rows"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser, dtypes=("fp32", "bf16"))
    parser.set_defaults(seconds=30.0)
    parser.add_argument("--source", default="stdlib", help="text, as for attnres train")
    parser.add_argument("--size", default="nano", help="a name in attnres.models.SIZES")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=None, help="labels of rows; the standard residual is always there")
    parser.add_argument("--add", action="store_true", help="keep the rows of the file --out that are not run now")
    parser.add_argument("--runs", type=Path, default=Path("runs/mechanisms"), help="folder of the training runs")
    options = parser.parse_args()
    rows = rows_of()
    for label in options.only or []:
        if label not in rows:
            parser.error(f"there is no row '{label}': choose from {', '.join(rows)}")
    rows = {label: row for label, row in rows.items() if options.only is None or label in ("standard", *options.only)}
    device = harness.settle(options, "mechanisms")
    base = TrainConfig(
        model=ModelConfig(size=options.size),
        data=DataConfig(source=options.source),
        optim=Compare().optim,
        seed=options.seed,
        steps=options.steps,
        dtype=options.dtype,
        device=device.type,
        val_every=options.steps,
        depth_every=max(1, options.steps // 4),
        save_every=options.steps,
    )
    result = harness.head("mechanisms", device, options.dtype, options.seed)
    result |= {"training": to_dict(base), "rows": Bench(base, options.runs, options.seconds).run(rows)}
    print(f"\n{markdown(result['rows'])}\n")
    if options.add:
        result["rows"] = kept(read_json(options.out)) | result["rows"]
    ratios = {label: row["ratio"] for label, row in result["rows"].items() if "ratio" in row}
    title = f"Training step of {options.size}, {result['environment']['device']}"
    harness.finish(options.out, result, {"all mechanisms": ratios}, "time, as a ratio to standard", title)


if __name__ == "__main__":
    main()
