"""The table of claims, docs/results/claims.md, written from the result files: no figure of ours in it is typed.

python experiments/claims_page.py
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from recipe_runs import DATA, finals, micro, rows
from results_page import ROOT, fine_tuned, inside, saved_at_42m, saved_by_budget, step

from attnres.files import write_text
from attnres.stats import QUESTIONS, Effect, Recipe, judged
from attnres.text import number

PAGE = ROOT / "docs" / "results" / "claims.md"
MICRO, NANO, LARGE = "0.9 M; 4.5", "2.9 M; 3.5", "42 M; 1.2"
"""Parameters, and tokens for each of them."""
COLUMNS = (
    *("#", "claim", "published", "ours (95 %)", "size; tokens a parameter", "runs"),
    *("excludes 0", "excludes the published", "command"),
)
HEAD = (
    "# The claims, one by one",
    "",
    "Written by `python experiments/claims_page.py` from docs/data. Differences are nats per held-out token, lower is "
    "better, with 95 % intervals by",
    "`attnres.stats`: loss = mechanism + seed over all runs of a recipe; five questions written down beforehand at "
    "5 %, the others of the 0.9 M recipe",
    "together by Holm. *Published* is the difference that the source has, of one run each. An interval that includes 0 "
    "says how large an effect can be,",
    "not that there is none. Sources: paper is arXiv 2603.15031, OAR github.com/wdlctc/open-attention-residuals, "
    "nanoGPT github.com/aupadhyay/attnres-exp.",
    "Each study has a page, listed on [the first one](index.md); [others' results](others.md) stand beside ours.",
    "",
    f"| {' | '.join(COLUMNS)} |",
    "|---:" + "|---" * (len(COLUMNS) - 1) + "|",
)


@dataclass(frozen=True)
class Answer:
    """One row: a claim's first has its number and text, further ones are of other sizes or baselines.

    Attributes:
        published: the differences that others have. source: where, and in which words. what: minus what, where the
            claim does not say. runs: of both. shown: the answer where it is no difference of losses.
    """

    source: str
    effect: Effect | None
    size: str
    runs: str
    command: str
    published: tuple[float, ...] = ()
    what: str = ""
    shown: str = ""

    def cells(self) -> list[str]:
        """The row without the claim."""
        if self.effect is None:
            return [self.source, self.shown, self.size, self.runs, "–", "–", f"`{self.command}`"]
        one = self.effect
        ours = f"{number(one.difference, 3, signed=True)}"
        if one.degrees:
            ours += f" ({number(one.low, 3, signed=True)} to {number(one.high, 3, signed=True)})"
        said = "not known" if not one.degrees else "yes" if one.excludes() else "no"
        apart = "–" if not self.published or not one.degrees else "no"
        if apart == "no" and all(map(one.excludes, self.published)):
            apart = "yes"
        source = self.source
        if self.published:
            values = " to ".join(number(value, 3, signed=True) for value in self.published)
            source = f"{values} ({self.source})"
        what = f"{self.what}: " if self.what else ""
        return [source, what + ours, self.size, self.runs, said, apart, f"`{self.command}`"]


def result(study: str) -> dict[str, Any]:
    """`values` of a stored study's result.json."""
    return json.loads((DATA / "studies" / study / "result.json").read_text("utf-8"))["values"]


def stored(values: dict[str, Any], label: str) -> tuple[Effect, str]:
    """A difference of a contrast's values, as an effect whose interval is the stored one, and its runs."""
    one = values["variants"][label]
    if one["low"] is None:
        return Effect(one["difference"], math.nan, 0), str(one["runs"])
    level, degrees = one["level"], 1e6  # the interval is what was stored, whatever its degrees of freedom were
    unit = Effect(0.0, 1.0, degrees, level).margin
    return Effect(one["difference"], (one["high"] - one["low"]) / 2 / unit, degrees, level), str(one["runs"])


def between(values: dict[str, Any], label: str, other: str) -> Effect:
    """Two variants of one contrast against one another, by its sigma and degrees of freedom."""
    one, two = (values["variants"][name] for name in (label, other))
    error = values["sigma"] * math.sqrt(1 / one["runs"] + 1 / two["runs"])
    return Effect(one["loss"] - two["loss"], error, values["degrees"])


def early() -> Recipe:
    """The 2.9 M recipe at 1.0 M tokens."""
    runs = [row for row in rows("lasting_seeds/curves.csv") if row["step"] == "500" and "-lr" not in row["label"]]
    return Recipe((row["label"], int(row["seed"]), float(row["loss"])) for row in runs)


def parameters(study: str) -> str:
    """How many a study's standard model has."""
    found = [row["value"] for row in rows(f"studies/{study}/runs.csv") if row["quantity"] == "parameters"]
    return f"{number(min(map(float, found)) / 1e6, 1)} M"


def at_depth(name: str) -> tuple[Effect, str]:
    """Block of a deeper 2.9 M model, and its runs."""
    runs = finals(name)
    recipe = Recipe(runs)
    return recipe.effect("block", "standard"), f"{recipe.counts['block']} and {recipe.counts['standard']}"


def shares(name: str) -> str:
    """The mean share of a way around the reads, at the start and at the end."""
    found = [row for row in rows("ways_around_micro.csv") if row["name"].startswith(f"{name}-seed")]
    start, end = (float(np.mean([float(row[key]) for row in found])) for key in ("start", "share"))
    return f"{number(start, 2)} at the start, {number(end, 2)} at the end"


def claims() -> list[tuple[str, list[Answer]]]:
    """Every claim with its answers."""
    recipe = Recipe(micro())
    asked = [  # of the 0.9 M recipe, beside the questions written down beforehand
        *(("full-queryinput", "full"), ("full-weightssigmoid", "full"), ("full-weightssigmoid", "standard")),
        *(("full-key_normFalse", "full"), ("block-key_normFalse", "block"), ("full-window8", "full")),
        *(("block-heads4", "block"), ("mhc", "standard"), ("denseformer", "standard")),
        *(("block-query_std0.02", "block"), ("static_mix", "standard"), ("block-gatescalar", "block")),
    ]
    pairs = [*QUESTIONS, *asked]
    effects = judged([recipe.effect(*pair) for pair in pairs], [pair in QUESTIONS for pair in pairs])
    known = dict(zip(pairs, effects, strict=True))
    command = "python -m lab ablations --preset micro"

    def small(name: str, other: str, source: str, *published: float, what: str = "", run: str = command) -> Answer:
        runs = f"{recipe.counts[name]} and {recipe.counts[other]}"
        effect = known[name, other] if (name, other) in known else recipe.effect(name, other)
        return Answer(source, effect, MICRO, runs, run, published, what)

    nano = Recipe([*finals("lasting_seeds"), *finals("lasting_runs")])
    first, large, tuned = early(), Recipe(finals("one_gpu")), Recipe(fine_tuned())
    gpt, rates = result("micro/nanogpt")["configurations"], result("micro/rates")
    own_recipe = Recipe(finals("boundary_adamw"))
    sizes, tasks, images = result("pico/block-size")["sizes"], result("micro/depth-tasks"), result("pico/resnet")
    scaling, shapes, growth = result("pico-fp32/scaling"), result("pico/depth-width"), result("nano/growth")
    dynamics, memory = result("micro/dynamics"), result("pico/structured-vs-memorised")
    adamw, runs_adamw = stored(rates["tuned-adamw"], "block-lr0.016")
    own, runs_own = stored(rates["best"], "block-residual_lr0.004")
    budget = {size: saved_by_budget(size) for size in ("nano", "micro")}
    bands, newest = saved_at_42m(), inside()
    table2 = (-0.020, -0.026)

    def saved(size: str) -> str:
        inner = [one for one in budget[size] if not one[2]]
        return ", ".join(f"{tokens:.2f} at {per:.1f}" for per, tokens, *_ in inner)

    def of_study(values: dict[str, Any], label: str, *more: Any, **named: Any) -> Answer:
        effect, runs = stored(values, label)
        return Answer(more[0], effect, more[1], runs, more[2], *more[3:], **named)

    far = [float(row["distance_contribution"]) for row in rows("locality_pico.csv")]
    bounds = "{:.2f} to {:.2f}".format
    size_runs = "2 and 2"
    retrofit = "attnres compare --config recipes/finetune_layouts.yaml"
    regimes = Recipe(finals("finetune_regimes_seeds"))

    def regime(name: str, other: str, what: str) -> Answer:
        runs = f"{regimes.counts[name]} and {regimes.counts[other]}"
        command = "attnres compare --config recipes/finetune_regimes.yaml"
        return Answer("fine-tuning", regimes.effect(name, other), "2.9 M; 300 steps", runs, command, what=what)

    return [
        (
            "Block lowers the loss, early in training",
            [
                Answer(
                    "torchtitan, step 500",
                    first.effect("block", "standard"),
                    "2.9 M; 0.35",
                    _counts(first),
                    "python -m lab rates",
                    (-0.127,),
                )
            ],
        ),
        (
            "and at the end of training",
            [
                small("block", "standard", "paper, Table 2, 194 to 528 M", *table2),
                Answer(
                    "the same", nano.effect("block", "standard"), NANO, _counts(nano), "python -m lab rates", table2
                ),
                Answer("the same", large.effect("block", "standard"), LARGE, _counts(large), "make gpu", table2),
            ],
        ),
        (
            "the gap shrinks as training goes on (in nats: see the budgets; in tokens saved it does not)",
            [
                Answer(
                    "−0.127 to −0.066 (torchtitan)",
                    None,
                    f"2.9 M; {budget['nano'][0][0]:.1f} to {budget['nano'][2][0]:.1f}",
                    "1 and 1",
                    "python -m lab budgets",
                    shown=f"tokens saved {saved('nano')} tokens a parameter",
                ),
                Answer(
                    "the same",
                    None,
                    "0.9 M",
                    "1 and 1",
                    "python -m lab budgets --preset micro",
                    shown=f"tokens saved {saved('micro')} tokens a parameter",
                ),
                Answer(
                    "does not (paper)",
                    None,
                    LARGE,
                    size_runs,
                    "make gpu",
                    shown="tokens saved "
                    + ", ".join(f"{x:.2f} at {low:.0f} to {high:.0f} M" for low, high, x in bands),
                ),
            ],
        ),
        ("Full is better than Block", [small("full", "block", "paper, Table 4", -0.009)]),
        ("Block is better than Full in small models", [small("full", "block", "OAR, 100 M", 0.013)]),
        (
            "the gain is there with AdamW",
            [
                Answer(
                    "all of OAR's runs; 100 M",
                    adamw,
                    MICRO,
                    runs_adamw,
                    "python -m lab rates --preset micro",
                    (-0.034,),
                    "both at the best of five rates",
                )
            ],
        ),
        (
            "the gain is not the learning rate's",
            [
                Answer(
                    "one rate a size (paper)",
                    own,
                    MICRO,
                    runs_own,
                    "python -m lab rates --preset micro",
                    what="each at its best",
                )
            ],
        ),
        (
            "1.25 times the compute at 5.6 PFLOP/s-days",
            [
                Answer(
                    "1.25 (paper)",
                    None,
                    "0.04 to 0.36 M; 20",
                    size_runs,
                    "python -m lab scaling --preset pico-fp32",
                    shown=f"{scaling['block']['multiplier']:.2f} ({bounds(*scaling['block']['interval'])})",
                ),
                *(
                    Answer(
                        "the same",
                        None,
                        f"{name}; {budget[size][2][0]:.1f}",
                        "1 and 1",
                        f"python -m lab budgets --preset {size}",
                        shown=f"{budget[size][2][3]:.2f} times the compute, one pair",
                    )
                    for size, name in (("micro", "0.9 M"), ("nano", "2.9 M"))
                ),
            ],
        ),
        ("input-dependent queries are better still", [small("full-queryinput", "full", "paper, Table 4", -0.006)]),
        (
            "sigmoid weights are worse than a softmax",
            [
                small("full-weightssigmoid", "full", "paper, Table 4", 0.004),
                small("full-weightssigmoid", "standard", "paper, Table 4", -0.025, what="beside standard"),
            ],
        ),
        (
            "keys need their norm",
            [
                small("full-key_normFalse", "full", "paper, Table 4", 0.006),
                small("block-key_normFalse", "block", "paper, Table 4", 0.004, what="Block"),
            ],
        ),
        ("a sliding window loses the gain", [small("full-window8", "full", "paper, Table 4", 0.027)]),
        ("several heads do not help", [small("block-heads4", "block", "paper, Table 4, 16 heads", 0.006)]),
        (
            "mHC gains what Block gains, DenseFormer nothing",
            [
                small("block", "mhc", "paper, Table 4", -0.001, what="Block beside mHC"),
                small("mhc", "standard", "paper, Table 4", -0.019, what="mHC beside standard"),
                small("denseformer", "standard", "paper, Table 4", 0.001, what="DenseFormer beside standard"),
            ],
        ),
        (
            "blocks of a few sublayers keep the gain",
            [
                Answer(
                    "paper, Figure 6: S = 4 beside 1",
                    between(sizes, "block-block_size4", "block-block_size1"),
                    "0.2 M; 21",
                    "1 and 1",
                    "python -m lab block-size --preset pico",
                    (0.009,),
                )
            ],
        ),
        (
            "outputs stay of one size along the depth",
            [
                Answer(
                    "bounded (paper, Figure 5)",
                    None,
                    MICRO,
                    size_runs,
                    "python -m lab dynamics --preset micro",
                    shown="last quarter over first: Block {:.2f}, standard {:.2f}; the interval {}".format(
                        dynamics["recipe/block/output_rms"]["ratio"],
                        dynamics["recipe/standard/output_rms"]["ratio"],
                        dynamics["recipe/block/output_rms"]["beside_standard"],
                    ),
                )
            ],
        ),
        (
            "depth reads want deeper models",
            [
                Answer(
                    "best at d / layers 45, baseline at 60 (paper, Figure 7)",
                    None,
                    "0.2 M, equal FLOPs",
                    "1 and 1",
                    "python -m lab depth-width --preset pico",
                    shown=f"Block {shapes['block']['at']:.0f}, standard {shapes['standard']['at']:.0f}; not told apart",
                ),
                *(
                    Answer("–", effect, NANO, runs, "python -m lab rates", what=f"{depth} layers")
                    for depth, (effect, runs) in ((n, at_depth(f"lasting_{n}_layers")) for n in (24, 48))
                ),
            ],
        ),
        (
            "reads are local and keep the embedding",
            [
                Answer(
                    "paper, Figure 8",
                    None,
                    LARGE,
                    "2",
                    "make gpu",
                    shown=f"weight over an even share: newest {newest[0]:.1f} (attention) and {newest[1]:.1f} (MLP), "
                    f"embedding {newest[2]:.2f} and {newest[3]:.2f}",
                ),
                Answer(
                    "the same",
                    None,
                    "0.2 M; 21",
                    "2",
                    "python experiments/locality.py",
                    shown=f"reach over the plain sum's: {bounds(min(far), max(far))}",
                ),
            ],
        ),
        (
            "zero queries are the standard model",
            [
                Answer(
                    "paper, section 4",
                    None,
                    "random weights",
                    "8",
                    "python -m lab growth",
                    shown=f"exact: {max(growth['variants'][k]['from_standard'] for k in ('full', 'block')):.0e} away",
                )
            ],
        ),
        (
            "starting at zero queries is best (here from scratch; the source says it of fine-tuning)",
            [
                small("block-query_std0.02", "block", "OAR"),
                *(
                    regime(name, "block-num_blocks4", what)
                    for name, what in (
                        ("block-num_blocks4-gatescalar-gate_init-2", "a gate besides"),
                        ("cumulative-num_blocks4-recency_bias5", "OAR's layout with a bias of 5"),
                    )
                ),
            ],
        ),
        (
            "a finished model gains little",
            [
                Answer(
                    "OAR, 0.6 and 1.7 B, 10,000 steps",
                    tuned.effect("block-num_blocks4", "standard"),
                    "2.9 M; 500 steps",
                    _counts(tuned, "block-num_blocks4"),
                    retrofit,
                    (-0.003, -0.021),
                )
            ],
        ),
        (
            "OAR's layout is a way to retrofit (here at a twentieth of its length, still falling: another question)",
            [
                Answer(
                    "OAR, 10,000 steps",
                    tuned.effect(name, "standard"),
                    "2.9 M; 500 steps",
                    _counts(tuned, name),
                    retrofit,
                    (-0.021,),
                    what,
                )
                for name, what in (
                    ("cumulative-num_blocks4", "four blocks"),
                    ("cumulative-block_size1", "every sublayer"),
                )
            ],
        ),
        (
            "the embedding spikes at statement starts, at the last boundary",
            [
                Answer(
                    "nanoGPT",
                    None,
                    "–",
                    "3",
                    "python experiments/findings.py",
                    shown="over the same token, Block, code: +0.050 at the first boundary, +0.010 at the last; "
                    "in the study's layout none ([page](nanogpt.md#does-the-embedding-spike-where-a-statement-begins))",
                )
            ],
        ),
        (
            "the model eliminates block boundaries",
            [
                Answer(
                    "nanoGPT",
                    None,
                    "no model",
                    "–",
                    "python -m lab nanogpt --preset micro",
                    shown="its gates "
                    + ("close" if result("micro/nanogpt")["gates_close_without_a_loss"] else "do not close")
                    + " without a model: no evidence either way",
                )
            ],
        ),
        (
            "nanoGPT's Full beats GPT-2, its Block hardly (here Muon and slow queries, then its AdamW at one rate)",
            [
                answer
                for label, gap, what in (
                    ("boundary-block_size2", -0.022, "its Full"),
                    ("boundary-num_blocks4", -0.004, "its Block"),
                )
                for answer in (
                    of_study(gpt, label, "nanoGPT", MICRO, "python -m lab nanogpt --preset micro", (gap,), what),
                    Answer(
                        "nanoGPT",
                        own_recipe.effect(f"{label}-residual_lr0.004", "standard"),
                        MICRO,
                        str(own_recipe.counts[f"{label}-residual_lr0.004"]),
                        "attnres compare --config recipes/boundary.yaml --optimizer adamw",
                        (gap,),
                        f"{what}, AdamW",
                    ),
                )
            ],
        ),
        (
            "value residuals do not help depth reads",
            [
                Answer(
                    "nanoGPT",
                    between(gpt, "boundary-num_blocks4-value_residuallayer", "boundary-num_blocks4"),
                    MICRO,
                    "3 and 3",
                    "python -m lab nanogpt --preset micro",
                    (0.001,),
                )
            ],
        ),
        (
            "memorisation favours standard residuals (withdrawn by its author)",
            [
                Answer(
                    "a post",
                    None,
                    "small MLPs",
                    "3 and 3",
                    "python -m lab structured-vs-memorised --preset pico",
                    shown="labels of noise, Full's loss over standard's: "
                    + ", ".join(
                        f"{memory[f'full, {kind}/0']['ratio']:.2g} ({kind}; {memory[f'full, {kind}/0']['interval']})"
                        for kind in ("10 layers, norm", "30 layers, norm", "30 layers, no norm")
                    ),
                )
            ],
        ),
        (
            "a rescaled residual does as well and is steadier at high rates",
            [
                small("rescaled", "standard", "a post", run="python -m lab noise --preset micro"),
                Answer(
                    "the same",
                    None,
                    "small MLPs",
                    "3 and 3",
                    "python -m lab structured-vs-memorised --preset pico",
                    shown="over standard's at rate 0.03: "
                    + ", ".join(
                        f"{one['ratio']:.2g} ({one['interval']})"
                        for key, one in memory.items()
                        if key.startswith("rescaled, T") and key.endswith("/0.03") and one["ratio"] is not None
                    ),
                ),
            ],
        ),
        (
            "plain pre-norm residuals explode with depth",
            [
                Answer(
                    "72 to 730,954 (a blog, without a norm)",
                    None,
                    "random weights",
                    "8",
                    "python -m lab growth",
                    shown=f"{growth['variants']['standard']['growth']:.1f} times over 48 sublayers, "
                    f"{growth['variants']['standard, no norm']['growth']:,.0f} without the norm",
                )
            ],
        ),
        (
            "training costs less than 4 % more time",
            [
                Answer("paper", None, "2.9 M", "–", "make bench", shown=step("step_cpu_nano.json", "nano", "fp32")),
                Answer(
                    "the same",
                    None,
                    "54 M",
                    "–",
                    "make gpu",
                    shown=step("step_100m_cuda.json", "100m", "bf16"),
                ),
            ],
        ),
        (
            "depth attention does more steps in the same depth",
            [
                of_study(
                    tasks["composition"],
                    label,
                    "nobody",
                    parameters("micro/depth-tasks"),
                    "python -m lab depth-tasks --preset micro",
                    what=f"{label}, share of right answers",
                )
                for label in ("block", "full", "rescaled")
            ],
        ),
        (
            "depth attention helps a ResNet",
            [
                of_study(
                    images[f"{layers}, reads"],
                    f"full-{layers}",
                    "nobody",
                    "CIFAR-10, 4 epochs",
                    "python -m lab resnet --preset pico --images FOLDER",
                    what=f"{layers} layers, percent of error",
                )
                for layers in (20, 32)
            ],
        ),
        (
            "weights that do not see the token gain as well",
            [
                small("static_mix", "standard", "paper, Table 4", -0.017, what="beside standard"),
                small("full", "static_mix", "paper, Table 4", -0.012, what="Full beside them"),
            ],
        ),
        (
            "a way around the reads (no escape hatch) would be used (here from scratch; the source: fine-tuning)",
            [
                small("block-gatescalar", "block", "OAR, in fine-tuning", what="a gate from 0.12 of the read"),
                regime(
                    "cumulative-num_blocks4-recency_bias5", "cumulative-num_blocks4", "OAR's layout with a bias of 5"
                ),
                Answer(
                    "the same",
                    None,
                    MICRO,
                    "3",
                    "python experiments/ways_around.py",
                    shown="share of the read: "
                    + "; ".join(shares(name) for name in ("block-gatescalar", "block-gatescalar-gate_init2")),
                ),
            ],
        ),
    ]


def _counts(recipe: Recipe, name: str = "block") -> str:
    return f"{recipe.counts[name]} and {recipe.counts['standard']}"


def page() -> str:
    """The page."""
    lines = []
    for place, (text, answers) in enumerate(claims(), 1):
        for first, answer in enumerate(answers):
            lines.append("| " + " | ".join([str(place), text] if not first else ["", ""]) + " | ")
            lines[-1] += " | ".join(answer.cells()) + " |"
    return "\n".join([*HEAD, *lines]) + "\n"


if __name__ == "__main__":
    write_text(PAGE, page())
