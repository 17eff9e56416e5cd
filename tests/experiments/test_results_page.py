"""The committed page of results is what its files say, and its headline is what other code reads from them."""

import csv
import json
import math
import re
import statistics
from collections import defaultdict

import claims_page
import power
import recipe_runs
import results_page
import study_pages

from attnres import stats

MAX_LINES = 60


def test_the_page_is_that_of_the_files():
    text = results_page.page()
    assert text == results_page.PAGE.read_text("utf-8"), "run python experiments/results_page.py"
    assert len(text.splitlines()) <= MAX_LINES


def test_readme_and_the_guide_have_the_tables_of_the_files():
    assert all(
        results_page.marked(path) == path.read_text("utf-8") for path in (results_page.README, results_page.GUIDE)
    ), "run python experiments/results_page.py"
    assert len(results_page.README.read_text("utf-8").splitlines()) <= 150


def test_the_table_of_cost_has_what_a_gpu_measured_last(tmp_path):
    file, block = tmp_path / "gpu.jsonl", {"variant": "block (8 blocks)", "of": {"device": "H200"}}
    assert results_page.gpu_steps(file) == []
    rows = [block | {"round": "step 0.6b graphs", "ratio": ratio} for ratio in (2.0, 1.5)]
    rows += [
        block | {"round": "step 100m graphs", "error": "its cause"},
        {"round": "step 0.6b graphs", "ended": "done"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"round": "cut')
    assert [(device, row["ratio"]) for _, device, row in results_page.gpu_steps(file)] == [("H200", 1.5)]


def test_the_claims_are_those_of_the_files_and_34():
    text = claims_page.page()
    assert text == claims_page.PAGE.read_text("utf-8"), "run python experiments/claims_page.py"
    numbers = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert [int(one) for one in numbers if one.isdecimal()] == list(range(1, 35))


def test_each_study_has_a_page_of_its_files():
    navigation = (results_page.ROOT / "mkdocs.yml").read_text("utf-8")
    pages = sorted(study_pages.PAGES.glob("*.md"))
    speed = {"mechanism_costs", "speed_cpu", "speed_gpu"}
    assert {path.stem for path in pages} == {*results_page.PAGES, *speed, "index", "claims"}
    for path in pages:
        text = path.read_text("utf-8")
        assert text == study_pages.page(text), f"{path.name}: run python experiments/study_pages.py"
        assert (path.stem in speed or len(text.encode()) <= 12 * 1024) and f"results/{path.name}" in navigation
    marks = [what.split() for path in pages for _, what, _ in study_pages.MARK.findall(path.read_text("utf-8"))]
    stored = (study_pages.DATA / "studies").glob("*/*/result.json")
    names = {"study": "{}", "budgets": "{}/budgets", "pool": "micro/{}"}
    shown = {names[words[0]].format(words[1]) for words in marks if words[0] in names}
    assert shown == {f"{path.parent.parent.name}/{path.parent.name}" for path in stored}


def test_no_page_of_results_has_a_word_for_a_verdict():
    """An interval excludes 0 or does not."""
    for path in [study_pages.PAGES / f"{name}.md" for name in (*results_page.PAGES, "index", "claims")]:
        words = set(re.findall(r"[a-z]+", path.read_text("utf-8").lower()))
        assert not words & {"decided", "undecided", "decides", "reproduced", "verdict", "verdicts"}, path.name


def test_a_course_is_the_mean_of_pairs():
    gaps = defaultdict(dict)
    with (results_page.DATA / "lasting_seeds" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            gaps[row["label"], row["seed"]][float(row["tokens"])] = float(row["loss"])
    last = max(gaps["block", "0"])
    mean = statistics.fmean(gaps["block", seed][last] - gaps["standard", seed][last] for seed in "012")
    row = next(line for line in study_pages.course("lasting_seeds", "block") if line.startswith("| block"))
    assert float(row.split("|")[-2].replace("−", "-")) == round(mean, 3)


def test_a_claims_difference_is_near_that_of_plain_means():
    """Seeds carry little at this size."""
    block, mhc = ([loss for name, _, loss in power.micro() if name == one] for one in ("block", "mhc"))
    cell = next(line for line in claims_page.page().splitlines() if "Block beside mHC" in line)
    difference = float(cell.split("Block beside mHC: ")[1].split(" ")[0].replace("−", "-"))
    assert math.isclose(difference, statistics.fmean(block) - statistics.fmean(mhc), abs_tol=0.005)


def test_every_file_that_the_page_names_is_there():
    for word in results_page.page().split("`")[1::2]:
        for name in word.split(", "):
            if "/" in name and not name.startswith("python"):
                first, _, rest = name.partition("{")
                inner, _, last = rest.partition("}")
                for part in inner.split(","):
                    assert (results_page.ROOT / f"{first}{part}{last}").is_file(), name


def test_tokens_saved_are_constant_at_42m_and_grow_at_3m():
    """At 42 M by straight lines in the logarithm of tokens between neighbouring measurements, which lie close."""
    curves = defaultdict(list)
    with (results_page.DATA / "one_gpu" / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves[row["label"], row["seed"]].append((float(row["tokens"]), float(row["loss"])))
    for low, high, factor in results_page.saved_at_42m():
        found = []
        for seed in "01":
            for tokens, loss in curves["block", seed]:
                if not low - 0.1 <= tokens / 1e6 <= high + 0.1:
                    continue
                for (n0, l0), (n1, l1) in zip(curves["standard", seed], curves["standard", seed][1:], strict=False):
                    if l0 > loss >= l1:
                        found.append(n0 * (n1 / n0) ** ((l0 - loss) / (l0 - l1)) / tokens)
        assert math.isclose(sum(found) / len(found), factor, abs_tol=0.015)
        assert 1.09 < factor < 1.14
    budgets = results_page.saved_by_budget("nano")
    saved = [one.saved for one in budgets]
    assert saved == sorted(saved) and saved[0] > 1 and [one.fitted for one in budgets] == [False, False, False, True]
    assert all(one.low < one.saved < one.high for one in budgets)


def test_a_comparison_has_one_interval_on_all_pages():
    """Of the 0.9 M recipe: the family of Holm is what is asked of the recipe, not what a page shows."""
    answers = recipe_runs.of_micro()
    denseformer = results_page.cell(answers["denseformer", "standard"])
    pages = [study_pages.PAGES / f"{name}.md" for name in ("index", "claims", "rivals", "ablations")]
    assert all(denseformer in path.read_text("utf-8") for path in pages)
    others = [pair for pair in answers if pair not in stats.QUESTIONS]
    names = {name for name, *_ in recipe_runs.micro()} - {"standard"}
    assert {name for name, _ in answers} == names and len(others) == len(answers) - len(stats.QUESTIONS)
    # The smallest p of the others is judged at 5 % over their number.
    assert math.isclose(min(answers[pair].level for pair in others), 0.05 / len(others))


def test_tokens_saved_by_a_difference_follow_the_runs_of_several_lengths():
    """A loss falls ever more slowly: a nat is worth more tokens than before this length, and fewer than beyond it."""
    ends = defaultdict(dict)
    with (results_page.DATA / "studies" / "micro" / "exchange" / "runs.csv").open() as file:
        for row in csv.DictReader(file):
            if row["quantity"] == "loss":
                ends[row["arm"]][float(row["tokens"])] = float(row["value"])
    points = sorted((max(one), one[max(one)]) for one in ends.values())
    (_, l0), (_, l1), (_, l2) = points[1:]  # each twice as long as the one before
    effect = stats.Effect(-0.04, 0.01, 50)
    found = recipe_runs.tokens_saved(effect, l1, recipe_runs.by_length())
    for factor, gain in zip(found, (-effect.difference, -effect.high, -effect.low), strict=True):
        assert 2 ** (gain / (l0 - l1)) < factor < 2 ** (gain / (l1 - l2))


def test_compute_saved_is_of_the_better_size():
    """Of each variant no measured run of either size reaches the loss with fewer FLOPs than what the page has."""
    for loss, best in results_page.at_the_frontier():
        for name, (flops, _, fitted) in best.items():
            runs = [end for size in results_page.PARAMETERS for end in results_page.ends(size)[name].values()]
            reached = [run_flops for _, run_loss, run_flops in runs if run_loss <= loss]
            assert all(flops <= each * (1 + 1e-9) for each in reached) or not reached
            assert reached or fitted


def test_simulated_studies_have_the_design_of_the_runs():
    result = power.measured(1)
    assert result["runs"] == len(power.micro()) and result["degrees"] > 80
    assert set(result["results"]) == {"own standard deviations", "equal standard deviations"}
