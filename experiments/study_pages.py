"""Write the tables of the pages under docs/results from the result files, between marks that say what they are made of.

python experiments/study_pages.py

A mark is `<!-- made: WHAT WORDS -->`, its block ends with `<!-- end -->`:

    study PRESET/NAME [TABLE ...]   the answer, those tables (all by default) and the command of a laboratory's study
    runs FOLDER                     last losses of a comparison, each difference to standard with its interval
    course FOLDER LABEL ...         those labels minus standard over training, the mean of common seeds
    halves FOLDER ONE OTHER         last losses of ONE/LABEL and OTHER/LABEL, and the difference with its interval
    rows FILE                       a table of docs/data as it is
    power, cost                     simulated studies of the rule; README's table of cost
"""

import csv
import json
import re
import statistics
from collections.abc import Callable

from recipe_runs import DATA, Run, finals, rows
from results_page import ROOT, cell, cost, words

from attnres.files import write_text
from attnres.stats import Recipe, judged
from attnres.text import label_and_seed, number

PAGES = ROOT / "docs" / "results"
MARK = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
POINTS = 1, 2, 5, 10, 20, 30, 50, 75, 100
"""Percent of a run at which its course is told, as far as it was measured there."""


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def study(name: str, *which: str) -> list[str]:
    """A study of the laboratory, as its result.json has it."""
    result = json.loads((DATA / "studies" / name / "result.json").read_text("utf-8"))
    parts, said = [result["answer"], ""], set[str]()
    for place in map(int, which or map(str, range(len(result["tables"])))):
        one = result["tables"][place]
        parts += [f"**{one['title']}**", "", *table(one["head"], one["rows"]), ""]
        notes = [note for note in one["notes"] if note not in said]
        said.update(notes)
        parts += [" ".join(notes), ""] if notes else []
    command = f"python -m lab {result['study']} --preset {result['preset']} --seeds {result['seeds']}"
    runs = f"{result['finished']} of {result['planned']} runs"
    return [*parts, f"`{command}`, {runs}: `docs/data/studies/{name}/`."]


def last_losses(folder: str) -> list[Run]:
    """The last loss of each run of a comparison, as its runs.json has it, or its curves.csv."""
    path = DATA / folder / "runs.json"
    named = json.loads(path.read_text("utf-8")).get("runs", {}) if path.is_file() else {}
    ends = {label_and_seed(name): one["val_loss"] for name, one in named.items()}
    return [(*name, loss) for name, loss in ends.items() if name is not None] or finals(folder)


def runs(folder: str) -> list[str]:
    """The last losses of a comparison."""
    recipe = Recipe(last_losses(folder))
    others = [name for name in recipe.names if name != "standard"]
    effects = judged([recipe.effect(name, "standard") for name in others], [name == "block" for name in others])
    lines = [["standard", number(recipe.means["standard"], 3), str(recipe.counts["standard"]), "", ""]]
    for name, effect in zip(others, effects, strict=True):
        known = words(effect) if effect.degrees else "no noise known"
        lines.append([name, number(recipe.means[name], 3), str(recipe.counts[name]), cell(effect), known])
    return [
        *table(["variant", "loss", "runs", "minus standard (95 %)", "the interval"], lines),
        "",
        f"`docs/data/{folder}/`.",
    ]


def halves(folder: str, one: str, other: str) -> list[str]:
    """The last losses of two comparisons of the same variants that lie in one file, one minus the other."""
    recipe = Recipe(last_losses(folder))
    labels = [name.removeprefix(f"{one}/") for name in recipe.names if name.startswith(f"{one}/")]
    effects = [recipe.effect(f"{one}/{label}", f"{other}/{label}") for label in labels]
    lines = []
    for label, effect in zip(labels, judged(effects, [False] * len(effects)), strict=True):
        names = (f"{one}/{label}", f"{other}/{label}")
        losses = [number(recipe.means[name], 3) for name in names]
        runs = " and ".join(str(recipe.counts[name]) for name in names)
        lines.append([label, *losses, runs, cell(effect), words(effect)])
    head = ["variant", one, other, "runs", f"{one} minus {other} (95 %)", "the interval"]
    return [*table(head, lines), "", f"`docs/data/{folder}/`."]


def course(folder: str, *labels: str) -> list[str]:
    """Labels minus standard over training."""
    losses: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows(f"{folder}/curves.csv"):
        losses.setdefault((row["label"], row["seed"]), {})[float(row["tokens"])] = float(row["loss"])
    common = sorted(set.intersection(*(set(one) for one in losses.values())))
    near = [min(common, key=lambda at, share=share: abs(at - common[-1] * share / 100)) for share in POINTS]
    at, lines = list(dict.fromkeys(near)), []
    for label in labels:
        seeds = [seed for name, seed in losses if name == label and ("standard", seed) in losses]
        gaps = [statistics.fmean(losses[label, s][n] - losses["standard", s][n] for s in seeds) for n in at]
        lines.append([label, str(len(seeds)), *(number(gap, 3, signed=True) for gap in gaps)])
    head = ["minus standard", "pairs", *(f"{n / 1e6:.1f} M" for n in at)]
    return [*table(head, lines), "", f"`docs/data/{folder}/curves.csv`, tokens on top."]


def file_rows(name: str) -> list[str]:
    """A table of docs/data, as it is."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    return [*table(head, lines), "", f"`docs/data/{name}`."]


def power() -> list[str]:
    """How often the rule is wrong in simulated studies without a difference, and how often it sees a true one."""
    found = json.loads((DATA / "power_micro.json").read_text("utf-8"))
    lines = []
    for case, one in found["results"].items():
        what = [f"{pair}, no difference" for pair in one["false positives"]]
        shares = [*one["false positives"].values()]
        for name, share in list(one.items())[1:]:
            what.append(name)
            shares.append(share)
        lines += [[case, text, number(share, 3)] for text, share in zip(what, shares, strict=True)]
    design = f"{found['studies']} simulated studies in the design of the {found['runs']} runs at 0.9 M parameters"
    head = ["noise", "question", "share whose interval excludes 0"]
    return [f"{design} (sigma {found['sigma']:.4f}): `python experiments/power.py`.", "", *table(head, lines)]


MAKERS: dict[str, Callable[..., list[str]]] = {
    "study": study,
    "runs": runs,
    "course": course,
    "halves": halves,
    "rows": file_rows,
    "power": power,
    "cost": cost,
}


def page(text: str) -> str:
    """A page with today's tables between its marks."""

    def made(match: re.Match[str]) -> str:
        what, *arguments = match[2].split()
        return "\n".join([match[1], *MAKERS[what](*arguments), "", match[3]])

    return MARK.sub(made, text)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        write_text(path, page(path.read_text("utf-8")))
