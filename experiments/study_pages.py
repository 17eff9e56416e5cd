"""Write the tables of the pages under docs/results from the result files, between marks that say what they are made of.

python experiments/study_pages.py

A mark is `<!-- made: WHAT WORDS -->`, its block ends with `<!-- end -->`:

    study PRESET/NAME [TABLE ...]   the answer, those tables (all by default) and the command of a laboratory's study
    pool NAME ARM                   an arm of a study at 0.9 M parameters, by all runs of the recipe
    runs FOLDER ...                 last losses of comparisons of one recipe, each difference to standard
    course FOLDER LABEL ...         those labels minus standard over training, the mean of common seeds
    halves FOLDER ONE OTHER         last losses of ONE/LABEL and OTHER/LABEL, and the difference with its interval
    rows FILE                       a table of docs/data as it is
    budgets PRESET                  Block beside the standard model after runs of several lengths
    power, cost, frontier           simulated studies of the rule; README's table of cost; compute for the same loss
"""

import csv
import json
import math
import re
from collections.abc import Callable

from recipe_runs import (
    DATA,
    Answers,
    Curves,
    by_length,
    curves,
    gaps,
    last_losses,
    mean_curve,
    of_folders,
    of_micro,
    own_base,
    rows,
    tokens_saved,
)
from results_page import (
    ROOT,
    TOO_WIDE,
    at_the_frontier,
    cell,
    cost,
    pairs_of,
    saved_by_budget,
    step_times,
    times,
    words,
    worth,
)

from attnres.files import write_text
from attnres.savings import saving
from attnres.stats import Recipe, judged
from attnres.text import number

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


LEVEL = (
    "Intervals are at 95 %: each for a question that was written down beforehand, jointly (Holm) for all other "
    "comparisons of the recipe."
)


def pool(name: str, arm: str) -> list[str]:
    """An arm of a study at 0.9 M parameters, its mechanisms by all runs of the recipe. Of "best", those that did better
    at another rate than the recipe's, judged together with what is asked of the recipe."""
    study, answers, clock = f"studies/micro/{name}", of_micro(), step_times(f"micro/{name}")
    asked = json.loads((DATA / study / "result.json").read_text("utf-8"))["values"][arm]
    labels = dict.fromkeys(label for one in asked.values() for label in one["variants"])
    stored = rows(f"{study}/runs.csv")
    pairs = [(label, own_base(label)) for label in labels]
    if arm == "best":
        pairs = [(label, "standard") for label in labels if label not in answers.recipe.names]
        last = max(int(row["step"]) for row in stored)
        own = [row for row in stored if (row["arm"], row["quantity"], int(row["step"])) == (arm, "loss", last)]
        more = [(row["label"], int(row["seed"]), float(row["value"])) for row in own]
        names = [label for label, _ in pairs]
        answers = Answers([*answers.runs, *(run for run in more if run[0] in names)], [*answers, *pairs])
    size, flops = dict[tuple[str, str], float](), dict[str, float]()
    for row in stored:
        if row["quantity"] in ("own_parameters", "parameters"):
            size[row["label"], row["quantity"]] = float(row["value"])
        elif row["quantity"] == "loss" and float(row["tokens"]):
            flops[row["label"]] = float(row["flops"]) / float(row["tokens"])
    curve, lines, beside = by_length(), [], len({other for _, other in pairs}) > 1
    for label, other in pairs:
        effect, base, known = answers[label, other], answers.recipe.means[other], asked.get(other, asked["standard"])
        saved = math.nan if effect.margin > TOO_WIDE else tokens_saved(effect, base, curve)[0]
        own, every = (size[label, quantity] for quantity in ("own_parameters", "parameters"))
        seconds = clock.get(re.sub(r"-(residual_)?lr[0-9.]+$", "", label), math.nan) / clock.get(other, math.nan)
        published = known["variants"].get(label, {}).get("published")
        lines.append(
            [
                *(label, *[other] * beside, number(answers.recipe.means[label], 3), str(answers.recipe.counts[label])),
                *(cell(effect), worth(effect, base, curve)),
                *(number(saved / each, 2) for each in (flops[label] / flops[other], seconds)),
                f"{number(100 * own / (every - own), 1)} %" if own else "",
                "" if published is None else number(published, 3, signed=True),
            ]
        )
    head = [
        "mechanism",
        *["beside"] * beside,
        "loss",
        "runs",
        "difference (95 %)" if beside else "minus standard (95 %)",
    ]
    return [
        *table([*head, "tokens saved", "compute", "time", "larger by", "published"], lines),
        "",
        f"{LEVEL} Tokens saved: how many times fewer for the same loss, by the standard model's runs of several "
        "lengths; compute and time: the same over FLOPs and over the time of a step (CPU, two threads, bf16). Larger "
        "by: the mechanism's own parameters.",
        "",
        f"`python -m lab {name} --preset micro`: `docs/data/{study}/`; all {len(answers.runs)} runs: "
        "`experiments/recipe_runs.py`.",
    ]


def budgets(size: str) -> list[str]:
    """Block beside the standard model after runs of several lengths."""
    lines = []
    for one in saved_by_budget(size):
        saved = times(one.saved, one.low, one.high) + " by a fit" * one.fitted
        cells = [f"{one.tokens / 1e6:.1f} M", f"{one.per:.1f}", number(one.loss - one.gap.difference, 3)]
        lines.append([*cells, number(one.loss, 3), cell(one.gap), saved, f"{one.compute:.2f}"])
    head = ["tokens", "a parameter", "standard", "block", "block minus standard (95 %)", "tokens saved", "compute"]
    return [
        *table(head, lines),
        "",
        f"{pairs_of(saved_by_budget(size)).capitalize()} of models. Intervals: the scatter of the standard model's "
        "runs in the recipe of this size, whose rate decays otherwise. Tokens saved: how many times Block's tokens the "
        "standard model needs for the same loss, between measured budgets, beyond the longest by a fit; compute: the "
        "same over FLOPs.",
        "",
        f"`python -m lab budgets --preset {size} --seeds 1`: `docs/data/studies/{size}/budgets/`.",
    ]


def runs(*folders: str) -> list[str]:
    """The last losses of comparisons of one recipe."""
    answers = of_folders(*folders)
    recipe = answers.recipe
    known = curves(*(folder for folder in folders if (DATA / folder / "curves.csv").is_file()))
    base = [number(recipe.means["standard"], 3), str(recipe.counts["standard"])]
    lines = [["standard", *base, "", *[""] * bool(known), ""]]
    for (name, other), effect in answers.items():
        if other == "standard":
            cells, saved = [name, number(recipe.means[name], 3), str(recipe.counts[name])], saved_within(known, name)
        else:
            cells, saved = [f"{name}, minus {other}", "", answers.counts((name, other))], ""
        said = words(effect) if effect.degrees else "no noise known"
        lines.append([*cells, cell(effect), *[saved] * bool(known), said])
    notes = [LEVEL] * (recipe.degrees > 0 and len(recipe.names) > 2)
    if known:
        notes.append("Tokens saved: at the lowest loss that both reach, within one schedule, so less than the truth.")
    notes.append(", ".join(f"`docs/data/{folder}/`" for folder in folders) + ".")
    head = ["variant", "loss", "runs", "minus standard (95 %)", *["tokens saved"] * bool(known), "the interval"]
    return [*table(head, lines), "", " ".join(notes)]


def saved_within(known: Curves, name: str) -> str:
    """How many times the tokens one of the two needs for the lowest loss that both reach, by the means over their
    curves: understated, because a rate falls along a curve."""
    found = saving(mean_curve(known, name), mean_curve(known, "standard"))
    return "–" if math.isnan(found.tokens) else f"{found.tokens:.2f}"


def frontier() -> list[str]:
    """The fewest FLOPs to a loss of the 0.9 and 2.9 M models, Block's and the standard model's."""
    lines = []
    for loss, best in at_the_frontier():
        cells = [
            f"{flops:.2e}, {size}{', by a fit' * fitted}"
            for flops, size, fitted in (best[name] for name in ("standard", "block"))
        ]
        lines.append([number(loss, 3), *cells, f"{best['standard'][0] / best['block'][0]:.2f}"])
    head = ["loss", "standard: fewest FLOPs, at", "Block: fewest FLOPs, at", "compute saved, times"]
    return [
        *table(head, lines),
        "",
        "`docs/data/studies/{micro,nano}/budgets/`, " + pairs_of(saved_by_budget("nano")) + " of models a size.",
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
    return [*table(head, lines), "", f"{LEVEL} `docs/data/{folder}/`."]


def course(folder: str, *labels: str) -> list[str]:
    """Labels minus standard over training."""
    known, lines = curves(folder), list[list[str]]()
    common = list(gaps(known, labels[0]))
    near = [min(common, key=lambda at, share=share: abs(at - common[-1] * share / 100)) for share in POINTS]
    at = list(dict.fromkeys(near))
    for label in labels:
        gap, pairs = gaps(known, label), sum(name == label and ("standard", seed) in known for name, seed in known)
        lines.append([label, str(pairs), *(number(gap[n], 3, signed=True) for n in at)])
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
    "pool": pool,
    "budgets": budgets,
    "frontier": frontier,
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
