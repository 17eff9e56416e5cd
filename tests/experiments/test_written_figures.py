"""Figures that stand in a page's prose or in a table written by hand are those of their files."""

import json

import mixture
import numpy as np
import recipe_runs
import results_page

from attnres.stats import QUESTIONS, Recipe, judged, standard_error
from attnres.text import number

PAGES = results_page.ROOT / "docs"


def test_the_table_of_the_queries_rates_is_by_the_rule_over_all_runs_of_the_recipe():
    recipe = Recipe([*recipe_runs.finals("lasting_seeds"), *recipe_runs.finals("lasting_runs")])
    pairs = [(name, "standard") for name in recipe.names if name != "standard"]
    effects = judged([recipe.effect(*pair) for pair in pairs], [pair in QUESTIONS for pair in pairs])
    text = (PAGES / "explanation" / "query_rate.md").read_text("utf-8")
    known = {name: effect for (name, _), effect in zip(pairs, effects, strict=True)}
    rates = {"0.1": "", "0.3": "-residual_lr0.00133", "0.01": "-residual_lr4e-05", "1": "-residual_lr0.004"}
    rows = {line.split(" × ")[0]: line for line in text.splitlines() if " × " in line}
    for rate, suffix in rates.items():
        one = known[f"block{suffix}"]
        mean, low, high = (number(value, 3, signed=True) for value in (one.difference, one.low, one.high))
        assert rows[f"| {rate}"].endswith(f"| {mean} ({low} to {high}) | {recipe.counts[f'block{suffix}']} |")
    last = [row for row in recipe_runs.rows("lasting_rates/curves.csv") if row["step"] == "5000"]
    (slow,), (fast,) = ([row for row in last if row["label"].endswith(rate)] for rate in ("lr0.000133", "lr0.004"))
    slow, fast = (number(float(row["difference"]), 3, signed=True) for row in (slow, fast))
    assert f"{slow} at 0.03 ×" in text and f"{fast} at 1 ×" in text.replace("\n", " ")


def test_rank_correlations_are_means_over_documents_or_over_seeds():
    text = (PAGES / "results" / "contribution.md").read_text("utf-8")
    of_one, of_three = (
        json.loads((recipe_runs.DATA / "contribution" / f"{name}.json").read_text("utf-8"))["models"]
        for name in ("contribution", "seeds")
    )
    found = [[tuple(values) for values in model["spearman"].values()] for model in of_one]
    for residual in ("block", "full"):
        seeds = [list(model["spearman"].values()) for model in of_three if model["residual"] == residual]
        means = np.array(seeds)[..., 0]
        found.append([(values.mean(), standard_error(values)) for values in means.T])
    for row in found:
        cells = " | ".join(f"{mean:.2f} ± {error:.2f}".replace("0.", ".") for mean, error in row)
        assert f" | {cells} |" in text
    edges = [[mean for mean, _ in (row[place] for row in found)] for place in (2, 0)]
    for low, high in ((min(edge), max(edge)) for edge in edges):
        assert f"{low:.2f} to {high:.2f}".replace("0.", ".") in text


def test_texts_have_the_hashes_of_the_mixtures_books():
    text = (PAGES / "results" / "texts.md").read_text("utf-8")
    for name, digest in mixture.recipe(mixture.RECIPE.read_text("utf-8")).books.items():
        assert f"| `{name}` |" in text and f"| {digest[:16]} |" in text
