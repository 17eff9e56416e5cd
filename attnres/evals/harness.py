"""Run tasks that are not built in with lm-eval's runner on its `HFLM`, with the same weights and tokenizer.

lm-eval is an extra. Figures that are means over documents have a standard error and are compared document by document;
for others (a median, a corpus score) only the figure itself is reported.
"""

import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from attnres.errors import UserError, first_line, install, require, unknown
from attnres.evals.scoring import TaskMeasure
from attnres.models.open import Checkpoint
from attnres.progress import errors_alone


def find_tasks(names: Sequence[str], folder: str | None) -> Any:
    """Return lm-eval's task manager with these tasks; `folder` has the user's task files, used in place of lm-eval's.

    Raises:
        UserError: lm-eval is not installed, the folder is missing, or a name is unknown.
    """
    tasks = require("lm_eval.tasks", f"tasks of lm-eval need its library: {install('eval')}")
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"lm-eval task folder {folder} does not exist: expected a folder with YAML files")
    manager = tasks.TaskManager(include_path=folder, include_defaults=folder is None)
    for name in names:
        if name not in manager.all_tasks and folder:
            raise unknown("lm-eval task", name, manager.all_tasks)
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise UserError(
                f"unknown lm-eval task '{name}': {hint}lm_eval ls tasks prints the {len(manager.all_tasks):,} there are"
            )
    return manager


def run(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    names: Sequence[str],
    manager: Any,
    *,
    limit: int | None,
    batch_size: int,
) -> dict[str, list[TaskMeasure]]:
    """Run the tasks and return the measures of each.

    Raises:
        UserError: lm-eval could not run (no connection to the hub, a task that needs code run, ...).
    """
    evaluator = importlib.import_module("lm_eval.evaluator")
    huggingface = importlib.import_module("lm_eval.models.huggingface")
    with errors_alone("lm_eval"):  # it warns of every default that it takes
        try:
            wrapped = huggingface.HFLM(
                pretrained=model,
                tokenizer=checkpoint.tokenizer,  # ty: ignore[invalid-argument-type]: lm-eval names the two base classes
                batch_size=batch_size,
                max_length=checkpoint.context,
            )
            results = evaluator.simple_evaluate(
                wrapped, tasks=list(names), task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=True
            )
        except Exception as error:  # lm-eval, datasets and connections raise many kinds
            raise UserError(f"lm-eval could not run {', '.join(names)} ({first_line(error)})") from error
    samples = results.get("samples", {})
    return {name: _measures(values, samples.get(name, [])) for name, values in results["results"].items()}


def _measures(values: dict[str, Any], samples: Sequence[dict[str, Any]]) -> list[TaskMeasure]:
    measures = []
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if name.endswith("_stderr") or not kind or not isinstance(value, int | float):
            continue
        label = name if kind == "none" else f"{name}, {kind}"  # the filter says which part of an answer was taken
        of_filter = [sample for sample in samples if sample.get("filter", kind) == kind]
        each = [sample.get(name) for sample in sorted(of_filter, key=lambda sample: sample["doc_id"])]
        numbers = np.array([v if isinstance(v, bool | int | float) else np.nan for v in each], dtype=float)
        if len(numbers) and np.isfinite(numbers).all() and abs(numbers.mean() - value) < 1e-9:
            measures.append(TaskMeasure(label, label, numbers, np.ones(len(numbers))))
        else:
            measures.append(TaskMeasure(label, label, numbers[:0], numbers[:0], fixed=(float(value), None)))
    return measures
