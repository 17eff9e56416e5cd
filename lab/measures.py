"""Measurements of a study's finished runs: computed, or read from run folders, and written as one CSV.

`python -m lab.measures RUN.json` computes one run in a child process: the file names a function of `lab.studies` and
its arguments, and the result is stored in the run's folder.
"""

import importlib
import math
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from attnres.comparison.children import Child
from attnres.errors import ERROR_FILE, UserError
from attnres.files import write_json
from attnres.reading import read_json
from attnres.report.runs import load_run
from attnres.residuals.registry import ships
from attnres.stats import plain
from attnres.text import csv_text, label_and_seed
from attnres.training.records import ADVICE, TIMES, Finished, Timing
from attnres.training.run_folder import DIVERGED
from attnres.typed import checked
from lab.cost import STANDARD, Mechanism, flops_a_token
from lab.design import Arm, MeasuredRow

COLUMNS = ("arm", "label", "seed", "step", "tokens", "flops", "quantity", "value")
MEASURES = "measures.json"
"""File in a run's folder with the results of the study's function."""
HOME, _FORMER_HOME = "lab.studies.", "attnres.studies.lab."
"""Module prefix of the studies' functions (others are not called), and the prefix that older files have."""


class Measure(TypedDict):
    """One row of measures.json; None stands for a value that is not finite."""

    quantity: str
    value: float | None
    step: NotRequired[int]


class Measures(TypedDict):
    """The content of measures.json; `arguments` are those of a computed run."""

    rows: list[Measure]
    function: NotRequired[str]
    arguments: NotRequired[dict[str, Any]]


def rows_of(arm: Arm, folder: Path, names: Sequence[str]) -> list[MeasuredRow]:
    """Read the finished ones of these runs of an arm. A diverged run has one row: an infinite loss at its last step."""
    rows = list[MeasuredRow]()

    def add(
        label: str, seed: int, quantity: str, value: float, step: int = 0, tokens: int = 0, flops: float = 0.0
    ) -> None:
        rows.append(MeasuredRow(arm.name, label, seed, step, tokens, flops, quantity, value))

    for name in names:
        run = None if arm.computed is not None else load_run(folder / name)
        label, seed = (label_and_seed(name) or (name, 0)) if run is None else (run.label, run.seed)
        for one in measures_of(folder / name)["rows"]:
            value = math.inf if one["value"] is None else one["value"]
            add(label, seed, one["quantity"], value, one.get("step", 0))
        if run is None:
            continue
        if run.summary is None:
            if (folder / name / DIVERGED).is_file():
                add(label, seed, "loss", math.inf, run.steps or 0)
            continue
        summary = checked(run.summary, Finished, folder / name / "summary.json", ADVICE)
        each = _flops(run.config, int(run.data.get("vocab_size") or 0), summary)
        for line in run.val:
            step = int(line["step"])
            tokens = round(run.tokens_at(step))
            values = {"loss": float(line["loss"])}
            if step == run.last_step:
                values |= {"parameters": summary["parameters"], "own_parameters": summary["extra_parameters"]}
                values["last_three"] = statistics.fmean(float(one["loss"]) for one in run.val[-3:])
                values |= {name: summary[name] for name in ("final_loss", "in_context") if name in summary}
            for quantity, value in values.items():
                add(label, seed, quantity, float(value), step, tokens, each * tokens)
        last = run.depth[-1] if run.depth else {}
        for quantity in arm.depth:
            for place, value in enumerate(last.get(quantity, [])):
                if value is not None:
                    add(label, seed, f"{quantity}/{place}", float(value), last["step"])
    return rows


def step_times(folder: Path) -> dict[str, list[float]]:
    """Return the step times of each variant in each round, for a comparison with an interleaved timing; else empty."""
    path = folder / TIMES
    variants = checked(read_json(path), Timing, path, ADVICE)["variants"] if path.is_file() else {}
    return {label: one.get("times") or [one["ratio"]] for label, one in variants.items()}


def measures_of(folder: Path) -> Measures:
    """Return the measurements in a run's folder; without rows if there is no such file. Raises UserError."""
    path = folder / MEASURES
    if not path.is_file():
        return {"rows": []}
    measures = checked(read_json(path), Measures, path, "remove that run's folder and run it again")
    if (name := measures.get("function", "")).startswith(_FORMER_HOME):
        measures["function"] = HOME + name.removeprefix(_FORMER_HOME)
    return measures


def _flops(config: dict[str, Any], vocabulary: int, summary: Finished) -> float:
    """Return the FLOPs a token; for a pretrained model, whose size the run does not name, from its number of
    parameters, and for a mechanism outside attnres without its reads."""
    model, length = config["model"], config.get("data", {}).get("seq_len")
    if model.get("size") is None or length is None:
        return 6.0 * summary["parameters"]
    mechanism = Mechanism.of(model["residual"], model.get("settings")) if ships(model["residual"]) else STANDARD
    return flops_a_token(model["size"], length, vocabulary, mechanism)


def to_csv(rows: Sequence[MeasuredRow]) -> str:
    """Return a CSV with a line for each measurement, sorted. It contains no times, so an interrupted study gives the
    same file."""
    lines = [
        (row.arm, row.label, row.seed, row.step, row.tokens, f"{row.flops:.6g}", row.quantity, f"{row.value:.8g}")
        for row in rows
    ]
    return csv_text(COLUMNS, sorted(lines))


# ------------------------------------------------------------------ computed runs


@dataclass
class Computation(Child):
    """A run that is one function call; its `config` names the function, its arguments and its folder."""

    saves: bool = False

    def variables(self) -> dict[str, str]:
        """Return the additional environment variables of its process, with the path of this `lab` package."""
        variables = super().variables()
        home = str(Path(__file__).parents[1])
        return variables | {"PYTHONPATH": os.pathsep.join([home, variables["PYTHONPATH"]])}

    def command(self, *, quiet: bool) -> list[str]:
        """Return the command line that computes the run."""
        return [sys.executable, "-m", "lab.measures", str(self.config)]


def function(name: str) -> Any:
    """Return the function "lab.studies.FILE:NAME". Raises UserError for any other name."""
    module, _, attribute = name.partition(":")
    if not module.startswith(HOME) or not attribute.isidentifier():
        raise UserError(f"'{name}' is no function of a study: expected {HOME}FILE:NAME")
    return getattr(importlib.import_module(module), attribute)


def compute(path: Path) -> None:
    """Compute the run that a file describes and write RUN/measures.json. Raises UserError."""
    run = read_json(path)
    rows = plain(function(run["function"])(**run["arguments"]), digits=17)
    write_json(Path(run["folder"]) / MEASURES, {key: run[key] for key in ("function", "arguments")} | {"rows": rows})


def main() -> None:
    """Run the command; a UserError is passed to the study that started it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        compute(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        with suppress(KeyError, OSError):
            Path(os.environ[ERROR_FILE]).write_text(str(error), encoding="utf-8")
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
