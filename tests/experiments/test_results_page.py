"""The committed page of results is what its files say, and its headline is what other code reads from them."""

import csv
import math
import statistics
from collections import defaultdict

import claims_page
import power
import results_page

MAX_LINES = 60


def test_the_page_is_that_of_the_files():
    text = results_page.page()
    assert text == results_page.PAGE.read_text("utf-8"), "run python experiments/results_page.py"
    assert len(text.splitlines()) <= MAX_LINES


def test_readme_has_the_tables_of_the_files():
    assert results_page.readme() == results_page.README.read_text("utf-8"), "run python experiments/results_page.py"
    assert len(results_page.readme().splitlines()) <= 150


def test_the_claims_are_those_of_the_files_and_34():
    text = claims_page.page()
    assert text == claims_page.PAGE.read_text("utf-8"), "run python experiments/claims_page.py"
    numbers = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert [int(one) for one in numbers if one.isdecimal()] == list(range(1, 35))


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
    (_, first, *_), (_, second, *_), (_, third, far, _), (_, fourth, beyond, _) = results_page.saved_by_budget("nano")
    assert 1 < first < second < third < fourth and beyond and not far


def test_simulated_studies_have_the_design_of_the_runs():
    result = power.measured(1)
    assert result["runs"] == len(power.micro()) and result["degrees"] > 80
    assert set(result["results"]) == {"own standard deviations", "equal standard deviations"}
