"""What studies say of runs with known answers: finished in part, diverged, of one function, wild."""

import dataclasses
import math
import re
from collections import Counter
from functools import partial

import pytest

from attnres.files import write_json
from attnres.stats import ALPHA
from lab.design import KnownNoise, Measured, MeasuredRow, StudyResult
from lab.outcome import StudyOutcome, at_sizes, study_page, survey
from lab.studies import STUDIES
from lab.studies.depth_tasks import documents_for
from tests.lab.simulated import at, chance, draw, simulated

KNOWN = {steps: KnownNoise(0.01, 7, ()) for steps in (500, 1000, 2000, 4000, 5000)}


def standards(mean, sigma=0.01):
    """Eight runs of standard about a mean, as the study of noise has them, at every length."""
    side = sigma * math.sqrt(7 / 8)
    runs = tuple(("standard", 100 + seed, mean + side * (-1) ** seed) for seed in range(8))
    return {steps: one._replace(runs=runs) for steps, one in KNOWN.items()}


@pytest.mark.quick("seconds-*")
@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("preset", ["seconds", "micro"])
def test_a_study_speaks_of_whatever_has_finished(name, preset):
    """Nothing to all of it, some diverged: no analysis fails, no sentence holds a number that is none."""
    for world, share in enumerate((0.0, 0.2, 0.6, 0.9, 1.0)):
        noises = KNOWN if world % 2 else {}

        def finished(arm, run, world=world, share=share):
            return draw(world, arm, run).uniform() < share

        def loss(arm, label, seed, world=world):
            return math.inf if draw(world, arm.name, label, seed).uniform() < 0.1 else chance(arm, label, seed, world)

        measured = simulated(STUDIES[name], at(preset, 1 + world % 3), loss, finished, noises=noises)
        result = STUDIES[name].analyse(at(preset, 1 + world % 3), measured)
        assert result.answer and not re.search(r"nan|\binf\b", result.answer, flags=re.IGNORECASE)


def test_a_gap_that_changes_its_sign_is_said():
    def loss(arm, label, seed):
        budget = float(arm.name.removeprefix("x"))
        return 3 + 0.001 * seed + (label == "block") * (0.03 - 0.03 * math.log2(2 * budget))

    setting = at("micro")
    result = STUDIES["budgets"].analyse(setting, simulated(STUDIES["budgets"], setting, loss))
    assert "The gap changes its sign as training goes on" in result.answer


def test_a_further_seed_does_not_hide_what_the_first_one_gave():
    setting, done = at("micro", 2), {"standard-seed0", "block-seed0", "standard-seed1"}
    measured = simulated(STUDIES["budgets"], setting, finished=lambda arm, run: run in done)
    assert {arm: len(names) for arm, names in measured.planned.items()} == {"x4": 4, "x0.5": 2, "x1": 2, "x2": 2}
    assert set(STUDIES["budgets"].analyse(setting, measured).values["gaps"]) == {"0.5", "1", "2", "4"}


@pytest.mark.long
def test_a_further_seed_does_not_hide_the_rates_that_were_found():
    first, design = at("micro", 1), STUDIES["ablations"]
    done = simulated(design, first)
    assert set(done.planned) == {"recipe", "coarse", "best"}
    setting = dataclasses.replace(first, seeds=2)
    finished = {(arm, run) for arm, runs in done.planned.items() for run in runs}
    measured = simulated(
        design, setting, finished=lambda arm, run: (arm, run) in finished, begun=frozenset(done.planned)
    )
    assert {arm: len(names) for arm, names in measured.planned.items()}["best"] == 2 * len(done.planned["best"])
    before, after = design.analyse(first, done), design.analyse(setting, measured)
    assert "best" in before.values and after.values["rates"] == before.values["rates"] != {}
    assert "Losses by rate, seed 0" in {table.title for table in after.tables}
    assert "best" not in after.values  # a seed that chose a rate does not judge it alone
    second = simulated(
        design,
        setting,
        finished=lambda arm, run: (arm, run) in finished or arm == "best",
        begun=frozenset(done.planned),
    )
    assert "best" in design.analyse(setting, second).values
    assert set(simulated(design, setting, finished=lambda arm, run: run.endswith("seed0")).planned) == {"recipe"}


@pytest.mark.long
def test_what_was_not_tried_at_every_rate_has_no_best_one_and_has_not_diverged():
    design, setting, gate = STUDIES["ablations"], at("micro", 1), "block-gatescalar"

    def finished(arm, run):
        return arm != "coarse" or gate not in run or run == f"{gate}-seed0"

    measured = simulated(design, setting, finished=finished, begun=frozenset({"recipe", "coarse", "best"}))
    assert not [run for run in measured.planned["best"] if gate in run]
    assert "Diverged at every rate" not in design.analyse(setting, measured).answer
    lost = simulated(design, setting, lambda arm, label, seed: math.inf if gate in label else chance(arm, label, seed))
    both = "block:gate=scalar and block:gate=scalar,gate_init=2"
    assert f"Diverged at every rate: {both}." in design.analyse(setting, lost).answer


def test_what_one_seed_says_of_a_trend_is_judged_by_the_noise_of_the_recipe():
    """The committed pair at micro, whose slope is 3.8 standard errors, and at twice the noise."""
    gaps = {"x0.5": -0.027, "x1": -0.0857, "x2": -0.0791, "x4": -0.074}

    def loss(arm, label, seed):
        return 4 + (label == "block") * gaps[arm.name]

    setting = at("micro", 1)
    noises = {2000: KnownNoise(0.0166, 14)}
    measured = simulated(STUDIES["budgets"], setting, loss, noises=noises)
    assert "the interval includes 0" in STUDIES["budgets"].analyse(setting, measured).answer
    sure = dataclasses.replace(measured, noises={2000: KnownNoise(0.0083, 14)})
    assert "The gap grows" in STUDIES["budgets"].analyse(setting, sure).answer


def test_a_size_that_diverged_decides_nothing_about_scaling():
    setting = at("micro", 2)

    def loss(arm, label, seed, lost=("full",)):
        width = int(arm.name.partition("-")[0].removeprefix("d"))
        broken = label in lost and width == 48
        return math.inf if broken else 3 + 20 / width + 0.001 * draw(arm.name, label, seed).standard_normal()

    design = STUDIES["scaling"]
    result = design.analyse(setting, simulated(design, setting, loss))
    assert "full: " in result.answer and "0.000 to 0.000" not in result.answer
    assert all("nan" not in cell for table in result.tables for row in table.rows for cell in row)
    measured = simulated(design, setting, lambda arm, label, seed: loss(arm, label, seed, ("standard",)))
    sentences = design.analyse(setting, measured).answer.split(". ")
    ratios = [float(one.partition(": ")[2].partition(" ")[0]) for one in sentences]
    # Losses are alike and reads cost compute: a multiplier below 1 is true, one above is not.
    assert all("includes 1" in one or ratio < 1 for one, ratio in zip(sentences, ratios, strict=True)), sentences


@pytest.mark.long
def test_scaling_finds_a_planted_multiplier_and_none_where_there_is_none():
    setting, design, clear = at("micro", 2), STUDIES["scaling"], {"block": 0, "full": 0}
    for world in range(12):

        def loss(arm, label, seed, world=world):
            width = int(arm.name.partition("-")[0].removeprefix("d"))
            return 2 + 40 / width - 0.06 * (label == "block") + 0.004 * draw(world, arm.name, label, seed).normal()

        for sentence in design.analyse(setting, simulated(design, setting, loss)).answer.split(". "):
            clear[sentence.partition(":")[0]] += "excludes 1" in sentence
    assert clear["block"] >= 11 and clear["full"] <= 1


def test_rates_hold_each_arm_against_what_it_is_named_for():
    design, setting = STUDIES["rates"], at("micro")

    def loss(arm, label, seed):
        muon, adamw = {"standard-lr0.008": 0.2}, {"standard-lr0.002": 0.2, "standard-lr0.001": 0.4}
        gains = adamw if arm.compare.base.optim.optimizer == "adamw" else muon
        return chance(arm, label, seed) - gains.get(label, 0.0) - 0.2 * (label == "block")

    measured = simulated(design, setting, loss)
    values = design.analyse(setting, measured).values
    assert values["knobs"]["baseline"] == "block" and len(values["knobs"]["variants"]) == 2
    assert values["best"]["baseline"] == "standard"
    assert values["tuned"]["baseline"] == "standard-lr0.008"
    assert values["tuned-adamw"]["baseline"] == "standard-lr0.001" and len(values["adamw"]) == 5
    assert (values["best_model"], values["best_adamw"], values["turned_adamw"]) == (2.0, 0.25, True)
    without = simulated(design, setting, loss, lambda arm, run: arm != "tuned" or not run.startswith("standard"))
    assert design.analyse(setting, without).values["tuned"]["variants"] == {}
    runs = [(arm, run) for arm in ("own", "model") for run in measured.planned[arm]]
    assert len({run for _, run in runs}) == len(runs) and ("model", "standard-lr0.004-seed0") not in runs


@pytest.mark.parametrize(
    ("fast", "says"),
    [
        (math.inf, "at one seed, and the intervals of a lower and a higher one exclude 0."),
        (0.001, "at one seed, and the interval of a lower or a higher one includes 0."),
    ],
)
def test_a_search_of_rates_says_how_it_ended(fast, says):
    design, setting = STUDIES["rates"], at("micro")
    worse = {"standard-lr0.002": 0.5, "standard-lr0.008": fast}

    def loss(arm, label, seed):
        return 3.0 + worse.get(label, 0.0) + 0.001 * seed

    result = design.analyse(setting, simulated(design, setting, loss, noises=standards(3.0)))
    assert result.values["turned_model"] is True and result.values["best_model"] == 1.0
    assert f"The standard model is best at 1 times the recipe's rate {says}" in result.answer
    unfinished = simulated(design, setting, loss, lambda arm, run: not run.startswith("standard-lr0.008"))
    assert "best_model" not in design.analyse(setting, unfinished).values


@pytest.mark.long
def test_block_sizes_of_one_function_are_told_apart_seldom_even_if_one_is_wild():
    design, setting, apart = STUDIES["block-size"], at("micro"), 0
    for world in range(60):

        def loss(arm, label, seed, world=world):
            wild = 6 if label == "block-block_size4" else 1
            return 3 + 0.01 * wild * draw(world, label, seed).standard_normal()

        apart += "the interval excludes 0" in design.analyse(setting, simulated(design, setting, loss)).answer
    assert apart <= 12  # of 33 if all are judged by the noise that the others share


def test_a_mechanism_whose_lucky_seeds_are_left_is_not_better():
    design, setting = STUDIES["block-size"], at("micro")

    def loss(arm, label, seed):
        lost = label == "block-block_size2" and seed > 0
        return math.inf if lost else chance(arm, label, seed) - 0.2 * (label != "standard")

    base = 3 + 10 / math.sqrt(setting.preset.steps)
    result = design.analyse(setting, simulated(design, setting, loss, noises=standards(base)))
    clear = {label: one["excludes_0"] for label, one in result.values["sizes"]["variants"].items()}
    assert not clear["block-block_size2"] and clear["block-block_size4"]
    assert "diverged: block-block_size2 (2 seeds)" in result.answer

    def unlucky(arm, label, seed):
        lost = label == "standard" and seed > 0
        return math.inf if lost else chance(arm, label, seed) + 0.2 * (label != "standard")

    result = design.analyse(setting, simulated(design, setting, unlucky, noises=standards(base)))
    assert not any(one["excludes_0"] for one in result.values["sizes"]["variants"].values())

    design = STUDIES["nanogpt"]
    lost = simulated(design, setting, lambda *run: math.inf if run[1] == "standard" else chance(*run))
    assert "Nothing can be compared; diverged: standard (3 seeds)" in design.analyse(setting, lost).answer


def test_depth_reads_in_a_resnet_are_held_against_the_same_network_without_them():
    design, setting = STUDIES["resnet"], at("micro")
    result = design.analyse(setting, simulated(design, setting))
    reads = result.values["20, reads"]
    assert reads["baseline"] == "standard-20" and list(reads["variants"]) == ["full-20"]
    assert "of 8 compared" in result.answer, "four kinds at two depths, and depth reads against two of them"


def test_a_retrofit_of_a_model_that_diverged_ends():
    design, setting = STUDIES["retrofit"], at("micro")
    measured = simulated(design, setting, lambda arm, label, seed: math.inf)
    assert set(measured.planned) == {"pretrained"}
    assert "diverged" in design.analyse(setting, measured).answer


def test_structure_that_favours_a_mechanism_is_seen_and_nothing_else():
    """Full planted at half of standard's loss where alpha is 1, at twice where it is 0, and a student at the highest
    rate; the control nowhere."""
    design, setting = STUDIES["structured-vs-memorised"], at("micro")
    ratios = {"loss/1": 0.5, "loss/0": 2.0, "loss/0.03": 3.0}

    def planted(row):
        ratio = ratios.get(row.quantity, 1.0) if row.label.startswith("full") else 1.0
        chance = math.exp(0.05 * draw(row.arm, row.label, row.seed, row.quantity).standard_normal())
        return dataclasses.replace(row, value=ratio * chance)

    measured = simulated(design, setting)
    measured = dataclasses.replace(measured, rows=[planted(row) for row in measured.rows])
    values = design.analyse(setting, measured).values
    expected, seen = {"1": "below 1", "0": "above 1", "0.03": "above 1"}, []
    for where, one in values.items():
        name, place = where.split(", ")[0], where.rpartition("/")[2]
        if name == "full" and place in expected:
            seen.append(one["interval"] == expected[place])
        else:
            assert one["interval"] == "includes 1", where
    # Three runs whose variances differ by luck have few degrees of freedom left: of 15 one such is to be expected.
    assert len(seen) == 6 * 2 + 3 and sum(seen) >= 14
    assert len(values) == 2 * (6 * 5 + 3 * 4)


def test_a_student_that_diverged_is_counted_and_not_averaged():
    """Of each mechanism's three at one rate: with one of standard's and of the control's lost, Full is judged by those
    that are left; with one of Full's own lost it is not called better, with one of standard's not worse, with all of
    its own it is said."""
    design, setting = STUDIES["structured-vs-memorised"], at("micro")
    for lost, seeds, ratio, expected in (
        (("standard", "rescaled"), 1, 0.1, "below 1"),
        (("full",), 1, 0.1, "others diverged"),
        (("full",), 1, 10.0, "above 1"),
        (("standard",), 1, 10.0, "others diverged"),
        (("full",), 3, 0.1, "includes 1"),
    ):

        def planted(row, lost=lost, seeds=seeds, ratio=ratio):
            if row.quantity == "loss/0.01" and row.seed < seeds and row.label.startswith(lost):
                return dataclasses.replace(row, value=math.inf)
            chance = math.exp(0.05 * draw(row.arm, row.label, row.seed, row.quantity).standard_normal())
            return dataclasses.replace(row, value=chance * (ratio if row.label.startswith("full") else 1.0))

        measured = simulated(design, setting)
        measured = dataclasses.replace(measured, rows=[planted(row) for row in measured.rows])
        result = design.analyse(setting, measured)
        said = {place: one["interval"] for place, one in result.values.items() if place.startswith("full, T")}
        assert len(said) == 12
        assert {one for place, one in said.items() if place.endswith("/0.01")} == {expected}
        elsewhere = {one for place, one in said.items() if not place.endswith("/0.01")}
        assert elsewhere == {"below 1" if ratio < 1 else "above 1"}
        cells = [cell for table in result.tables for row in table.rows for cell in row]
        assert any(f"{seeds} diverged" in cell for cell in cells) == (lost != ("standard",))


@pytest.mark.quick("nanogpt-100-9")
@pytest.mark.parametrize(("name", "worlds", "chance_errors"), [("nanogpt", 100, 9), ("ablations", 25, 4)])
def test_whole_studies_of_one_function_find_nothing(name, worlds, chance_errors):
    """With rates that are chosen by the lowest loss, if the study does that. A family of comparisons errs in 5 of 100
    by Holm, and each question that was written down beforehand in its own 5: more than `chance_errors` has a chance of
    3 % in 100 worlds, 1 % in 25."""
    design, setting, wrong = STUDIES[name], at("micro"), Counter()
    for world in range(worlds):
        values = design.analyse(setting, simulated(design, setting, partial(chance, world=world))).values
        families = list(intervals(values))
        assert len(families) > 3
        wrong.update({family for family, excludes in families if excludes})
    assert max(wrong.values(), default=0) <= chance_errors, wrong


def intervals(values, table=""):
    """Each interval of a study's values, however deep: the family in which it was judged (a planned question, or the
    table of the others), and whether it excludes 0."""
    if not isinstance(values, dict):
        return
    if "excludes_0" in values:
        yield (table if values["level"] == ALPHA else table.partition(" ")[0]), values["excludes_0"]
        return
    for name, value in values.items():
        yield from intervals(value, f"{table} {name}".strip())


def test_regimes_are_asked_for_when_their_layouts_can_be_taken():
    design, setting = STUDIES["retrofit"], at("micro")
    planned = simulated(design, setting, finished=lambda arm, run: arm == "pretrained").planned
    assert set(planned) == {"pretrained", "layouts"}
    arms = design.arms(setting, simulated(design, setting))
    assert [arm.name for arm in arms] == ["pretrained", "layouts", "regimes"]
    begun = simulated(design, setting, finished=lambda arm, run: arm == "pretrained", begun=frozenset({"regimes"}))
    assert set(begun.planned) == set(planned) | {"regimes"}, "a further seed hides nothing"


def test_a_control_outside_the_noise_is_said_wherever_that_noise_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.outcome.texts_of", lambda folder: {"the same text"})
    setting = dataclasses.replace(at("micro"), out=tmp_path)
    values = {"by_steps": {"2000": {"sigma": 0.01, "degrees": 7}}, "control_inside": False}
    write_json(setting.folder("noise") / "result.json", {"source": None, "column": None, "values": values})
    measured = survey(STUDIES["ablations"], setting)[1]
    assert "OUTSIDE" in measured.noises[2000].remark
    page = study_page(StudyOutcome(STUDIES["ablations"], setting, measured, StudyResult("")))
    assert "its control, the same function, lies OUTSIDE it" in page


def test_two_presets_of_one_model_are_one_size():
    def outcome(preset, difference):
        low, high = difference - 0.01, difference + 0.01
        variants = {"block": {"difference": difference, "low": low, "high": high, "runs": 3, "excludes_0": True}}
        values = {"recipe": {"standard": {"baseline": "standard", "base": 3.0, "variants": variants}}}
        return StudyOutcome(STUDIES["ablations"], at(preset), Measured(), StudyResult("", values=values))

    assert at_sizes([outcome("demo", -0.2), outcome("nano", -0.06)]) == []
    (table,) = at_sizes([outcome("demo", -0.2), outcome("nano", -0.06), outcome("micro", -0.04)])
    assert "below 0 at 2 sizes" in table.rows[0] and "demo" not in table.head


def test_no_text_of_a_task_is_learned_by_heart():
    for name in ("composition", "arithmetic"):
        assert documents_for(name, 1_000_000) == 40_000
        long = documents_for(name, 655_360_000)
        assert 2_000_000 < long < 10_000_000


def test_outputs_that_stay_are_told_from_outputs_that_grow():
    """Standard's and its control's grow fourfold along the depth, Full's twofold, Block's not; seeds differ by 2 %.
    That the first sublayer's is far from the others in these two, as in trained models, makes no difference."""
    design, setting = STUDIES["dynamics"], at("micro", 2)
    measured = simulated(design, setting)
    rate = {"standard": math.log(4) / 24, "rescaled": math.log(4) / 24, "block": 0.0, "full": math.log(2) / 24}
    rows = [row for row in measured.rows if "/" not in row.quantity]
    for arm, label, seed in {(row.arm, row.label, row.seed) for row in rows}:
        luck = 0.001 * draw(arm, label, seed).standard_normal()
        rows += [
            MeasuredRow(arm, label, seed, 10, 0, 0.0, f"output_rms/{place}", math.exp((rate[label] + luck) * place))
            for place in range(1, 24)
        ]
        first = 0.05 if label in ("standard", "rescaled") else 1.0
        rows.append(MeasuredRow(arm, label, seed, 10, 0, 0.0, "output_rms/0", first))
    result = design.analyse(setting, dataclasses.replace(measured, rows=rows))
    for arm in ("recipe", "deep"):
        assert result.values[f"{arm}/standard/output_rms"]["ratio"] == pytest.approx(4 ** (18 / 24), rel=0.1)
        said = {label: result.values[f"{arm}/{label}/output_rms"]["beside_standard"] for label in rate}
        assert said == {"standard": "", "rescaled": "includes 1", "block": "less", "full": "less"}
    one = [row for row in rows if row.seed == 0]
    alone = design.analyse(setting, dataclasses.replace(measured, rows=one)).values
    assert {value["beside_standard"] for value in alone.values()} == {"", "includes 1"}, "one seed decides nothing"
