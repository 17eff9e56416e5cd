"""The table of claims, docs/results/claims.md, written from the result files: no figure of ours in it is typed.

python experiments/claims_page.py
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from recipe_runs import DATA, Answers, of_folders, of_micro, rows, without_copiers
from results_page import (
    ROOT,
    TOO_WIDE,
    benchmark,
    cell,
    inside,
    of_nano,
    ratio,
    saved_at_42m,
    saved_at_the_frontier,
    saved_by_budget,
    step,
)

from attnres.files import write_text
from attnres.stats import Effect, Recipe, judged
from attnres.text import number

PAGE = ROOT / "docs" / "results" / "claims.md"
MICRO, NANO, LARGE = "0.9 M; 4.8", "2.9 M; 3.5", "42 M; 1.2"
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
    "`attnres.stats`: loss = mechanism + seed over all runs of a recipe; questions written down beforehand each at 5 "
    "%, all others of a recipe together by Holm.",
    "*Published*: the source's difference, of one run each. An interval that includes 0 says how large an effect can "
    "be, not that there is none. `lab` is `python -m lab`, `compare` is `attnres compare --config`.",
    "Paper: arXiv 2603.15031; OAR: github.com/wdlctc/open-attention-residuals; nanoGPT: "
    "github.com/aupadhyay/attnres-exp. Studies: [first page](index.md); [others' results](others.md).",
    "",
    f"| {' | '.join(COLUMNS)} |",
    "|---:" + "|---" * (len(COLUMNS) - 1) + "|",
)


@dataclass(frozen=True)
class Answer:
    """One row: a claim's first has its number and text, further ones are of other sizes or baselines.

    Attributes:
        published: the differences that others have. source: where, and in which words. what: minus what, where the
            claim does not say. runs: of both. shown: the answer where it is no difference. nats: whether it is one of
            losses.
    """

    source: str
    effect: Effect | None
    size: str
    runs: str
    command: str
    published: tuple[float, ...] = ()
    what: str = ""
    shown: str = ""
    nats: bool = True

    def cells(self) -> list[str]:
        """The row without the claim."""
        if self.effect is None:
            return [self.source, self.shown, self.size, self.runs, "–", "–", f"`{self.command}`"]
        one = self.effect
        unknown = not one.degrees or (one.margin > TOO_WIDE and self.nats)
        said = "not known" if unknown else "yes" if one.excludes() else "no"
        apart = "–" if not self.published or unknown else "no"
        if apart == "no" and all(map(one.excludes, self.published)):
            apart = "yes"
        source = self.source
        if self.published:
            values = " to ".join(number(value, 3, signed=True) for value in self.published)
            source = f"{values} ({self.source})"
        what = f"{self.what}: " if self.what else ""
        return [
            source,
            what + cell(one, TOO_WIDE if self.nats else math.inf),
            self.size,
            self.runs,
            said,
            apart,
            f"`{self.command}`",
        ]


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
    """Two variants of one contrast against one another, judged together with what the contrast asks."""
    known = values["variants"]

    def effect(difference: float, one: int, two: int) -> Effect:
        return Effect(difference, values["sigma"] * math.sqrt(1 / one + 1 / two), values["degrees"])

    one, two = known[label], known[other]
    runs = max(each["runs"] for each in known.values())  # of the baseline at least
    asked = [effect(each["difference"], each["runs"], runs) for each in known.values()]
    asked.append(effect(one["loss"] - two["loss"], one["runs"], two["runs"]))
    return judged(asked, [False] * len(asked))[-1]


def early() -> Recipe:
    """The 2.9 M recipe at 1.0 M tokens."""
    runs = [row for row in rows("lasting_seeds/curves.csv") if row["step"] == "500" and "-lr" not in row["label"]]
    return Recipe((row["label"], int(row["seed"]), float(row["loss"])) for row in runs)


def parameters(study: str) -> str:
    """How many a study's standard model has."""
    found = [row["value"] for row in rows(f"studies/{study}/runs.csv") if row["quantity"] == "parameters"]
    return f"{number(min(map(float, found)) / 1e6, 1)} M"


def shares(name: str) -> str:
    """The mean share of a way around the reads, at the start and at the end."""
    found = [row for row in rows("ways_around_micro.csv") if row["name"].startswith(f"{name}-seed")]
    start, end = (float(np.mean([float(row[key]) for row in found])) for key in ("start", "share"))
    return f"{number(start, 2)} at the start, {number(end, 2)} at the end"


def claims() -> list[tuple[str, list[Answer]]]:
    """Every claim with its answers."""
    recipe = of_micro()
    command = "lab ablations --preset micro"

    def of(
        answers: Answers, name: str, other: str, source: str, size: str, run: str, *published: float, what: str = ""
    ) -> Answer:
        pair = (name, other)
        return Answer(source, answers[pair], size, answers.counts(pair), run, published, what)

    def small(name: str, other: str, source: str, *published: float, what: str = "", run: str = command) -> Answer:
        return of(recipe, name, other, source, MICRO, run, *published, what=what)

    nano, first, large, tuned = of_nano(), early(), of_folders("one_gpu"), of_folders("finetune_layouts")
    gpt, rates = result("micro/nanogpt")["configurations"], result("micro/rates")
    sizes, tasks, images = result("pico/block-size")["sizes"], result("micro/depth-tasks"), result("pico/resnet")
    scaling, shapes, growth = result("pico-fp32/scaling"), result("pico/depth-width"), result("nano/growth")
    dynamics, memory = result("micro/dynamics"), result("pico/structured-vs-memorised")
    adamw, runs_adamw = stored(rates["tuned-adamw"], "block-lr0.016")
    own, runs_own = stored(rates["best"], "block-residual_lr0.004")
    budget = {size: saved_by_budget(size) for size in ("nano", "micro")}
    bands = saved_at_42m()
    table2 = (-0.020, -0.026)

    def saved(size: str) -> str:
        return ", ".join(f"{one.saved:.2f} at {one.per:.1f}" for one in budget[size] if not one.fitted)

    def of_study(values: dict[str, Any], label: str, *more: Any, **named: Any) -> Answer:
        effect, runs = stored(values, label)
        return Answer(more[0], effect, more[1], runs, more[2], *more[3:], **named)

    frontier = saved_at_the_frontier()
    losses, saves = [*frontier], frontier.values()
    graphs = benchmark("decode_graphs_cuda.json")
    far = [float(row["distance_contribution"]) for row in rows("locality_pico.csv")]
    bounds = "{:.2f} to {:.2f}".format
    size_runs = "2 and 2"
    retrofit = "compare recipes/finetune_layouts.yaml"
    regimes, boundary = of_folders("finetune_regimes_seeds"), "compare recipes/boundary.yaml"

    def regime(name: str, other: str, what: str) -> Answer:
        command = "compare recipes/finetune_regimes.yaml --seeds 0 1 2"
        return of(regimes, name, other, "fine-tuning", "2.9 M; 300 steps", command, what=what)

    return [
        (
            "Block lowers the loss, early in training",
            [
                Answer(
                    "torchtitan, step 500",
                    first.effect("block", "standard"),
                    "2.9 M; 0.35",
                    _counts(first),
                    "lab rates",
                    (-0.127,),
                )
            ],
        ),
        (
            "and at the end of training",
            [
                small("block", "standard", "paper, Table 2, 194 to 528 M", *table2),
                of(nano, "block", "standard", "the same", NANO, "lab rates", *table2),
                of(large, "block", "standard", "the same", LARGE, "make gpu", *table2),
            ],
        ),
        (
            "the gap shrinks as training goes on (in nats; in tokens saved it does not)",
            [
                Answer(
                    "−0.127 to −0.066 (torchtitan)",
                    None,
                    f"2.9 M; {budget['nano'][0].per:.1f} to {budget['nano'][2].per:.1f}",
                    "1 and 1",
                    "lab budgets",
                    shown=f"tokens saved {saved('nano')} tokens a parameter",
                ),
                Answer(
                    "the same",
                    None,
                    "0.9 M",
                    "1 and 1",
                    "lab budgets --preset micro",
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
                    "lab rates --preset micro",
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
                    "lab rates --preset micro",
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
                    "lab scaling --preset pico-fp32",
                    shown=f"{scaling['block']['multiplier']:.2f} ({bounds(*scaling['block']['interval'])})",
                ),
                Answer(
                    "the same",
                    None,
                    "the better of 0.9 and 2.9 M",
                    "1 and 1",
                    "lab budgets",
                    shown=f"{min(saves):.2f} to {max(saves):.2f} at losses of {losses[0]:.2f} to {losses[-1]:.2f}",
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
            "mHC gains what Block gains (here with 18 % more parameters), DenseFormer nothing",
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
                    "lab block-size --preset pico",
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
                    "lab dynamics --preset micro",
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
                    "lab depth-width --preset pico",
                    shown=f"Block {shapes['block']['at']:.0f}, standard {shapes['standard']['at']:.0f}; not told apart",
                ),
                *(
                    of(
                        of_folders(f"lasting_{depth}_layers"),
                        *("block", "standard", "–", NANO),
                        f"compare recipes/lasting_{depth}_layers.yaml --seeds 0 1",
                        what=f"{depth} layers",
                    )
                    for depth in (24, 48)
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
                    shown="of even weights, attention and MLP: "
                    + ", ".join(f"{what} {values[0]:.2f} and {values[1]:.2f}" for what, values in inside().items()),
                ),
                Answer(
                    "the same",
                    None,
                    "0.2 M; 21",
                    "4",
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
                    "lab growth",
                    shown=f"exact: {max(growth['variants'][k]['from_standard'] for k in ('full', 'block')):.0e} away",
                )
            ],
        ),
        (
            "starting at zero queries is best (here from scratch; the source: fine-tuning)",
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
                of(
                    tuned,
                    *("block-num_blocks4", "standard", "−0.003 and −0.021; OAR, 0.6 and 1.7 B, 10,000 steps"),
                    *("2.9 M; 500 steps", retrofit),
                )
            ],
        ),
        (
            "OAR's layout is a way to retrofit (here in a twentieth and half of its steps)",
            [
                of(
                    tuned,
                    *(name, "standard", "−0.021; OAR, 10,000 steps", "2.9 M; 500 steps", retrofit),
                    what=what,
                )
                for name, what in (
                    ("cumulative-num_blocks4", "four blocks"),
                    ("cumulative-block_size1", "every sublayer"),
                )
            ]
            + [
                of(
                    of_folders("finetune_long"),
                    *("cumulative-num_blocks4", "standard", "the same", "2.9 M; 5,000 steps"),
                    f"{retrofit} --steps 5000 --seeds 0",
                    what="four blocks",
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
                    "in the study's layout none",
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
                    "lab nanogpt --preset micro",
                    shown="its gates "
                    + ("close" if result("micro/nanogpt")["gates_close_without_a_loss"] else "do not close")
                    + " without a model: no evidence either way",
                )
            ],
        ),
        (
            "nanoGPT's Full beats GPT-2, its Block hardly (here Muon and slow queries, then the model's own rate)",
            [
                answer
                for label, gap, what in (
                    ("boundary-block_size2", -0.022, "its Full"),
                    ("boundary-num_blocks4", -0.004, "its Block"),
                )
                for answer in (
                    of_study(
                        gpt,
                        label,
                        f"{number(gap, 3, signed=True)}; nanoGPT, AdamW",
                        MICRO,
                        "lab nanogpt --preset micro",
                        what=what,
                    ),
                    of(
                        of_folders("boundary_muon"),
                        *(f"{label}-residual_lr0.004", "standard", "the same", MICRO, f"{boundary} --optimizer muon"),
                        what=f"{what}, Muon",
                    ),
                    of(
                        of_folders("boundary_adamw"),
                        *(f"{label}-residual_lr0.004", "standard", "nanoGPT", MICRO, f"{boundary} --optimizer adamw"),
                        gap,
                        what=f"{what}, AdamW",
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
                    "lab nanogpt --preset micro",
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
                    "lab structured-vs-memorised --preset pico",
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
                small("rescaled", "standard", "a post", run="lab noise --preset micro"),
                Answer(
                    "the same",
                    None,
                    "small MLPs",
                    "3 and 3",
                    "lab structured-vs-memorised --preset pico",
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
                    "lab growth",
                    shown=f"{growth['variants']['standard']['growth']:.1f} times over 48 sublayers, "
                    f"{growth['variants']['standard, no norm']['growth']:,.0f} without the norm",
                )
            ],
        ),
        (
            "training costs less than 4 % more time, inference less than 2 %",
            [
                Answer("paper", None, "2.9 M", "–", "make bench", shown=step("step_cpu_nano.json", "nano", "fp32")),
                Answer(
                    "the same",
                    None,
                    "54 M",
                    "–",
                    "make gpu",
                    shown=f"{step('step_100m_cuda.json', '100m', 'bf16')}: contradicted for ours",
                ),
                Answer(
                    "paper, inference",
                    None,
                    "0.6 B",
                    "–",
                    "make gpu",
                    shown=f"one H200: prefill {ratio(graphs['prefill']['8192']['block'])}, decoding "
                    f"{ratio(graphs['decode']['1']['block'])}",
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
                    "lab depth-tasks --preset micro",
                    what=f"{label}, right answers",
                    nats=False,
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
                    "lab resnet --preset pico --images FOLDER",
                    what=f"{layers} layers, percent of error",
                    nats=False,
                )
                for layers in (20, 32)
            ],
        ),
        (
            "weights that do not see the token gain as well, or nearly",
            [
                small("static_mix", "standard", "paper, Table 4", -0.017, what="beside standard"),
                small("full", "static_mix", "paper, Table 4", -0.012, what="Full beside them"),
                Answer(
                    *("the same", without_copiers(), MICRO, "3 and 2", command, (-0.012,)),
                    "the copying run left out afterwards",
                ),
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
