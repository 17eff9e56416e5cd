"""Evaluate models on tasks: read and check everything first, then load, score and free model after model."""

import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from attnres.errors import UserError
from attnres.evals import harness
from attnres.evals.config import EvalConfig
from attnres.evals.figures import TaskQuestions, ask, figures
from attnres.evals.scoring import Scored, TaskMeasure, cost, difference, score
from attnres.evals.tasks import LM_EVAL, TASKS, read_task
from attnres.files import write_json, write_text
from attnres.folders import refuse_other_file
from attnres.models.open import Checkpoint, open_checkpoint
from attnres.ops.devices import is_host, pick_device
from attnres.progress import Bars, grid, say, wide
from attnres.stats import or_none
from attnres.text import number, with_error
from attnres.training import environment

MAX_WINDOW = 2048
"""Longest perplexity window, as in published tables; windows are as long as the shortest context of the models."""

Row = dict[str, Any]


@dataclass
class Results:
    """The results of every model.

    Attributes:
        record: environment, settings, models and tasks as JSON values.
        measures: task -> a list of measures for each model.
        items: task -> for each model a list of rows, one an item.
    """

    record: Row
    measures: dict[str, list[list[TaskMeasure]]] = field(default_factory=dict)
    items: dict[str, list[list[Row]]] = field(default_factory=dict)

    def save(self, path: str | Path) -> Path:
        """Write the record to `path` and the items of the built-in tasks, a line each, to a file beside it; return that
        file."""
        path = refuse_out(path)
        items = path.with_name(_items_name(path))
        names = [model["name"] for model in self.record["models"]]
        lines = [
            json.dumps({"model": name, "task": task, **row}, ensure_ascii=False)
            for task, models in self.items.items()
            for name, rows in zip(names, models, strict=True)
            for row in rows
        ]
        write_json(path, self.record)  # first: the file of items is recognised by it
        write_text(items, "".join(f"{line}\n" for line in lines))
        return items


def refuse_out(path: str | Path) -> Path:
    """Return the file that `Results.save` may write. Raises UserError if it or the file of items is something else."""
    return refuse_other_file(path, {"environment", "settings", "models", "tasks"}, _items_name(Path(path)))


def _items_name(path: Path) -> str:
    return f"{path.stem}.items.jsonl"


def evaluate(config: EvalConfig, *, progress: bool = True) -> Results:
    """Score every model on every task.

    Raises:
        UserError: a model, task, file or setting that does not fit; raised before any model is loaded where possible.
    """
    _check(config)
    device = pick_device(config.device)
    checkpoints = [open_checkpoint(name, trust_remote_code=config.trust_remote_code) for name in config.models]
    width, stride = _window(config, checkpoints)  # before the tasks, which may be downloaded
    foreign = [name.removeprefix(LM_EVAL) for name in config.tasks if name.startswith(LM_EVAL)]
    tasks = [read_task(name, config.data, config.limit) for name in config.tasks if not name.startswith(LM_EVAL)]
    names = [task.name for task in tasks]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"task {twins[0]} is given twice: give each once, and files different names")
    manager = harness.find_tasks(foreign, config.lm_eval_tasks) if foreign else None
    questions_of = [
        [ask(task, checkpoint, width=width, stride=stride, limit=config.limit) for task in tasks]
        for checkpoint in checkpoints
    ]
    settings = {
        "tasks": list(config.tasks),
        "data": config.data,
        "limit": config.limit,
        "window": width,
        "stride": stride,
        "batch_tokens": config.batch_tokens,
    }
    results = Results({"environment": environment.describe(device, config.dtype), "settings": settings})
    models = []
    for checkpoint, questions in zip(checkpoints, questions_of, strict=True):
        model = checkpoint.load(config.dtype, str(device))
        models.append(_describe(checkpoint, model))
        for question, scored in zip(questions, _score(model, checkpoint, questions, config, progress), strict=True):
            results.measures.setdefault(question.task.name, []).append(figures(question, scored))
            results.items.setdefault(question.task.name, []).append(_rows(question, scored))
        if manager is not None:
            batch = max(1, config.batch_tokens // checkpoint.context)
            for name, task_measures in harness.run(
                model, checkpoint, foreign, manager, limit=config.limit, batch_size=batch
            ).items():
                results.measures.setdefault(f"{LM_EVAL}{name}", []).append(task_measures)
        del model  # the next model may need the memory
        gc.collect()
        if not is_host(device):
            torch.get_device_module(device).empty_cache()
    results.record["models"] = models
    of_lm_eval = "lm-eval", [list[str]() for _ in models]
    origins = {
        task.name: (task.source, [questions[index].notes for questions in questions_of])
        for index, task in enumerate(tasks)
    }
    results.record["tasks"] = {
        name: _task_record(measures, *origins.get(name, of_lm_eval)) for name, measures in results.measures.items()
    }
    return results


def _check(config: EvalConfig) -> None:
    if not config.models:
        raise UserError("no model given: expected attnres eval MODEL..., run folders, model folders or hub names")
    if not config.tasks:
        raise UserError(f"no task given: expected some of {', '.join(TASKS)}")
    for name, least in (("limit", 1), ("window", 2), ("stride", 1), ("batch_tokens", 1)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{name} is {value}: expected a whole number, at least {least}")
    if config.lm_eval_tasks is not None and not any(name.startswith(LM_EVAL) for name in config.tasks):
        raise UserError(f"lm_eval_tasks is given and no task of lm-eval: name one as {LM_EVAL}NAME, or leave it out")


def _window(config: EvalConfig, checkpoints: Sequence[Checkpoint]) -> tuple[int, int]:
    shortest = min(checkpoints, key=lambda checkpoint: checkpoint.context)
    width = config.window or min(shortest.context, MAX_WINDOW)
    if width > shortest.context:
        raise UserError(
            f"window is {width} and {shortest.name} takes {shortest.context} tokens: expected no more than that"
        )
    stride = config.stride or max(1, width // 2)
    if stride > width:
        raise UserError(f"stride is {stride} and the window {width}: expected at most the window")
    return width, stride


def _score(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    questions: Sequence[TaskQuestions],
    config: EvalConfig,
    progress: bool,
) -> list[list[Scored]]:
    limits = {"context": checkpoint.context, "batch_tokens": config.batch_tokens}
    total = sum(cost(checkpoint.vocab_size or 0, question.requests, **limits) for question in questions)
    scored = []
    with Bars(rate=lambda rate: f"{rate:,.0f} tokens/s", shown=progress) as bars:
        bar = bars.add(checkpoint.name, max(1, total))
        for question in questions:
            on_progress = partial(bar.advance, figures=question.task.name)
            scored.append(score(model, question.requests, on_progress=on_progress, **limits))
    return scored


def _rows(questions: TaskQuestions, scored: Sequence[Scored]) -> list[Row]:
    """Return the log-probabilities in nats, of each choice or window, from which the figures were computed."""
    if questions.task.kind == "text":
        kinds = ("non-overlapping", "sliding")
        return [
            {"item": k, "windows": kind, "tokens": len(scored[i].logprobs), "logprob": scored[i].total}
            for kind, group in zip(kinds, questions.groups, strict=True)
            for k, i in enumerate(group)
        ]
    rows = []
    for k, (item, group) in enumerate(zip(questions.task.items, questions.groups, strict=True)):
        answers = [scored[i] for i in group]
        row: Row = {"item": k, "logprobs": [s.total for s in answers], "tokens": [len(s.logprobs) for s in answers]}
        if questions.task.kind == "choice":
            row["gold"] = item.gold
        elif answers:
            row |= {"greedy": bool(answers[0].greedy.all()), "greedy_first": bool(answers[0].greedy[0])}
        rows.append(row)
    return rows


def _describe(checkpoint: Checkpoint, model: PreTrainedModel) -> Row:
    return {
        "name": checkpoint.name,
        "folder": str(checkpoint.folder),
        "model_type": model.config.model_type,
        "residual": getattr(model.config, "residual", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": checkpoint.context,
        "vocabulary": len(checkpoint.tokenizer),
    }


def _task_record(models: Sequence[Sequence[TaskMeasure]], source: str, notes: list[list[str]]) -> Row:
    figures: list[Row] = []
    for column in zip(*models, strict=True):
        first = column[0]
        figure: Row = {"key": first.key, "label": first.label, "chance": first.chance, "unit": first.unit, "values": []}
        for measure in column:
            value, error = measure.estimate()
            items = measure.count
            figure["values"].append({"value": or_none(value), "standard_error": or_none(error), "items": items})
        figure["differences"] = [_difference_record(first, other) for other in column[1:]]
        figures.append(figure)
    return {"source": source, "figures": figures, "notes": notes}


def _difference_record(first: TaskMeasure, second: TaskMeasure) -> Row:
    paired = difference(first, second)
    if or_none(paired.value) is None:
        return {"value": None, "reason": paired.reason or "one of the two is no number"}
    return {
        "value": paired.value,
        "standard_error": or_none(paired.error),
        "items": paired.count,
        "paired": paired.paired,
        "unit": second.unit,
    }


def show(record: dict[str, Any], console: Console | None = None) -> None:
    """Print the record of `evaluate`: a row a figure, a column a model, differences to the first model."""
    console = wide(console)
    models = record["models"]
    names = _short([model["name"] for model in models])
    differences = [f"{name} − {names[0]}" if len(models) > 2 else "difference" for name in names[1:]]
    chance = any(figure["chance"] for task in record["tasks"].values() for figure in task["figures"])
    table = grid("task", "figure", right=("items", *names, *differences, *(("chance",) if chance else ())))
    remarks = []
    for key, task in record["tasks"].items():
        title = TASKS[key].title if key in TASKS else key
        for i, figure in enumerate(task["figures"]):
            counts = sorted({value["items"] for value in figure["values"]})
            cells = [title if i == 0 else "", figure["label"], "–".join(f"{count:,}" for count in counts if count)]
            cells += [with_error(value["value"], value["standard_error"]) for value in figure["values"]]
            cells += [_difference(value) for value in figure["differences"]]
            if chance:
                cells.append(number(figure["chance"]) if figure["chance"] else "")
            table.add_row(*cells)
            remarks += [
                f"{title}, {figure['label']}: {d['reason']}" for d in figure["differences"] if d["value"] is None
            ]
        if all(notes == task["notes"][0] for notes in task["notes"]):
            remarks += [f"{title}: {note}" for note in task["notes"][0]]
        else:
            for name, notes in zip(names, task["notes"], strict=True):
                remarks += [f"{title}, {name}: {note}" for note in notes]
    console.print(table)
    for name, model in zip(names, models, strict=True):
        residual = f", residual {model['residual']}" if model["residual"] else ""
        remarks.append(
            f"{name}: {model['name']}, {model['parameters']:,} parameters{residual}, {model['dtype']}, context "
            f"{model['context']:,}, vocabulary {model['vocabulary']:,}"
        )
    if len(models) > 1:
        remarks.append("differences: item by item, in nats for a perplexity; ± one standard error")
    for remark in remarks:
        say(console, remark)


def _difference(value: dict[str, Any]) -> str:
    if value["value"] is None:
        return "no"
    mark = "" if value["paired"] else " (unpaired)"
    return with_error(value["value"], value["standard_error"], signed=True) + mark


def _short(names: list[str]) -> list[str]:
    """Return the last parts of paths, as few as tell them apart."""
    parts = [name.rstrip("/").split("/") for name in names]
    for depth in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-depth:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]
