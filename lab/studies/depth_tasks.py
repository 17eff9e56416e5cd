"""Tasks whose answers take several steps in a row: does a mechanism make more steps with the same depth?"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from attnres.data.sources import DOCUMENTS, STEPS, task_documents, task_problems
from attnres.text import number
from lab.charts import Curves, Line
from lab.contrast import contrast
from lab.design import Arm, Design, Measured, ResultTable, Setting, StudyResult

NAMES = ("composition", "arithmetic")
VARIANTS = ("standard", "rescaled", "block", "full", "denseformer", "hyper_connections", "mhc_lite", "muddformer")
PROBLEMS = 400
"""Number of problems of each number of steps."""
EPOCHS = 2
"""Most passes over the documents, to avoid memorisation."""
WINDOW = 64
"""Most tokens of a window (a batch has correspondingly more windows): with 256 tokens for attention to choose from,
whether a model finds the relevant letter within four million tokens depends on the seed."""


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request an arm for each task, with a third of the recipe's layers, so that depth is scarce."""
    small = setting.preset.small < 0.01
    size, recipe = setting.preset.of_depth(max(2, setting.preset.depth // 3)), setting.config()
    window = min(WINDOW, recipe.data.seq_len)
    parts = []
    for name in NAMES:
        data = {"tokenizer": "bpe:257", "held_out": 0.05, "seq_len": window}
        batch = recipe.batch_size * (recipe.data.seq_len // window)
        run = setting.config(model={"size": size}, data=data, batch_size=batch, steps=setting.preset.many)
        count = 200 if small else documents_for(name, run.steps * run.batch_size * run.data.seq_len)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, source=f"task:{name}:{count}"))
        variants = [*setting.some(VARIANTS)] if not small else ["standard", "block"]
        parts.append(setting.arm(name, variants, of=run, measure=f"{__name__}:answers"))
    return parts


def documents_for(name: str, tokens: int) -> int:
    """Return the number of documents of a task that are read at most `EPOCHS` times in so many tokens; a token is a
    character or an end of text."""
    some = list(task_documents(f"task:{name}:100")())
    return max(DOCUMENTS, math.ceil(tokens / EPOCHS / (sum(map(len, some)) / len(some) + 1)))


def answers(folder: Path) -> list[dict[str, Any]]:
    """Return rows `accuracy/STEPS` of a trained model on problems outside its text, and `accuracy`, their mean. An
    answer counts if it is the likeliest of all characters."""
    from attnres.data import load_tokenizer
    from attnres.head import evaluating
    from attnres.models import load
    from attnres.reading import read_json

    config = read_json(folder / "config.json")
    name = config["data"]["source"].split(":")[1]
    model, tokenizer = load(folder / "model"), load_tokenizer(folder / "model")
    rows: list[dict[str, Any]] = []
    for steps in range(1, STEPS + 1):
        by_length: dict[int, list[tuple[list[int], str]]] = {}
        for text, answer in task_problems(name, steps, PROBLEMS):
            ids = tokenizer.encode(text, add_special_tokens=False).ids[-config["data"]["seq_len"] :]
            by_length.setdefault(len(ids), []).append((ids, answer))
        right = 0
        for many in by_length.values():
            with evaluating(model), torch.no_grad():
                logits = model(input_ids=torch.tensor([ids for ids, _ in many]), use_cache=False).logits[:, -1]
            likeliest = [tokenizer.decode([token]) for token in logits.argmax(-1).tolist()]
            right += sum(guess == answer for guess, (_, answer) in zip(likeliest, many, strict=True))
        rows.append({"quantity": f"accuracy/{steps}", "step": config["steps"], "value": right / PROBLEMS})
    mean = sum(row["value"] for row in rows) / len(rows)
    return [*rows, {"quantity": "accuracy", "step": config["steps"], "value": mean}]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report accuracy by the number of steps, and the mean accuracy relative to the standard model."""
    tables, panels, sentences, values = [], {}, [], {}
    for name in NAMES:
        lines, rows = [], []
        for label in measured.labels(name):
            curve = [(k, measured.mean(name, label, f"accuracy/{k}")) for k in range(1, STEPS + 1)]
            curve = [(k, value) for k, value in curve if not math.isnan(value)]
            if curve:
                lines.append(dataclasses.replace(Line.through(label, curve), **_band(measured, name, label)))
                rows.append([label, *(number(value, 3) for _, value in curve)])
        if not rows:
            continue
        panels[name] = lines
        head = ["variant", *map(str, range(1, STEPS + 1))]
        tables.append(ResultTable(f"{name}: share of right answers by steps", head, rows))
        # The resolution of an accuracy over this number of problems, a lower bound of its noise.
        floor = 0.5 / math.sqrt(STEPS * PROBLEMS)
        comparisons = sum(len(measured.asked_for(task)) - 1 for task in measured.planned)
        contrasts = contrast(measured, name, "standard", quantity="accuracy", comparisons=comparisons, floor=floor)
        tables.append(contrasts.table(f"{name}: share of right answers"))
        sentences.append(f"{name}, accuracy: {contrasts.sentence()}")
        values[name] = contrasts.values()
    caption = (
        "Problems answered rightly, by how many steps an answer takes; mean over seeds, band: from the least to the "
        "greatest seed of each of the two models that are one function. They are drawn apart from the training text, "
        "which has nearly all of one to four steps along permutations and of one to two of arithmetic as well."
    )
    charts = [Curves("depth-tasks", "Steps in depth", caption, "steps", "accuracy", panels)] if panels else []
    return StudyResult(" ".join(sentences) or "Nothing has finished yet.", tables, charts, values)


def _band(measured: Measured, name: str, label: str) -> dict[str, list[float]]:
    """Return the smallest and largest values over seeds of the standard model and its placebo control, which show the
    noise."""
    each = [list(measured.finals(name, label, f"accuracy/{k}").values()) for k in range(1, STEPS + 1)]
    if label not in VARIANTS[:2] or min(map(len, each)) < 2:
        return {}
    return {"low": [min(one) for one in each], "high": [max(one) for one in each]}


STUDY = Design(
    "depth-tasks",
    "Do depth reads make more steps in the same depth?",
    "Two tasks with known answers, steps along permutations and nested sums and products modulo five, answered at once "
    "by a model of a third of the recipe's layers.",
    "Physics of Language Models 4.1 finds that such tasks tell architectures apart by more than seeds; nobody has "
    "published one for depth attention.",
    arms,
    analyse,
)
