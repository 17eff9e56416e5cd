"""The results as a table in the terminal."""

from typing import Any

from rich.console import Console

from attnres.evals.tasks import TASKS
from attnres.terminal import grid, say, wide
from attnres.text import number, with_error


def show(record: dict[str, Any], console: Console | None = None) -> None:
    """Print the record of `attnres.evals.run`: a row a figure, a column a model, differences to the first."""
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
    """The last parts of paths, as many as tell them apart."""
    parts = [name.rstrip("/").split("/") for name in names]
    for depth in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-depth:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]
