"""Write the page of results, docs/results/index.md, and README's two tables from the result files.

python experiments/results_page.py
"""

import json
import math
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from recipe_runs import (
    DATA,
    Answers,
    by_length,
    curves,
    finals,
    gaps,
    of_folders,
    of_micro,
    own_base,
    rows,
    tokens_saved,
    without_copiers,
)

from attnres.files import write_text
from attnres.savings import LossCurve
from attnres.stats import Effect
from attnres.text import number

ROOT = DATA.parents[1]
PAGE = ROOT / "docs" / "results" / "index.md"
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
BENCHMARKS = ROOT / "benchmarks" / "results"
PUBLISHED = -0.020, -0.026
"""Block at the end of training, 194 to 528 M parameters (arXiv 2603.15031, Table 2)."""
BANDS = (6e6, 14e6), (14e6, 24e6), (24e6, 34e6), (34e6, 42e6)
"""Tokens of the 42 M runs, of which the factor is averaged: after warm-up, until the loss that the standard model never
reaches."""
AT_42M = 41.9e6
"""Parameters of the trained model of 12 layers of width 512, with 8,192 words."""
STEP_GPU = "12 layers of width 512, 32,768 words, 16 x 1,024 tokens"
"""The model and batch whose steps were timed on a GPU: 54 M parameters with its embedding."""
PAGES = {
    "early": "early",
    "budgets": "how long it lasts",
    "lasting": "queries' rate",
    "rates": "rates",
    "one_gpu": "42 M",
    "ablations": "parts of a read",
    "block-size": "block size",
    "rivals": "other rules",
    "scaling": "compute",
    "depth-width": "depth",
    "dynamics": "inside",
    "contribution": "edges",
    "cost": "cost",
    "retrofit": "retrofit",
    "nanogpt": "nanoGPT",
    "memorised": "memorising",
    "depth-tasks": "steps",
    "resnet": "ResNets",
    "growth": "exact",
    "noise": "method",
    "texts": "texts",
    "others": "others' results",
}
"""A page a study, and what it is called in a list."""
PARAMETERS = {"micro": "0.9 M", "nano": "2.9 M"}
EXACT = "block-num_blocks4"
"""The label of a converted model that starts as the plain one."""
TOO_WIDE = 0.4
"""Nats to a side from which on an interval says nothing: two or three runs that lie far apart."""
SEEDED = "x2"
"""The budget that docs/data/nano_pair has more seeds of: 10 tokens a parameter at 2.9 M."""
CPU_STEPS = (
    *(("step_cpu_plain.json", None, dtype) for dtype in ("fp32", "bf16")),
    *(("step_cpu_nano.json", "nano", dtype) for dtype in ("fp32", "bf16")),
)
"""Training steps that were timed on a CPU: file, size in it, dtype. Compiled ones have files beside."""
FILES = {
    "micro": "docs/data/studies/micro/{rivals,ablations,noise}/runs.csv, docs/data/processors_micro.csv",
    "nano": "docs/data/lasting_{seeds,runs}/curves.csv",
    "42 M": "docs/data/one_gpu/curves.csv",
}


def cell(effect: Effect, widest: float = TOO_WIDE) -> str:
    """A difference with its interval, if that is not too wide to say anything."""
    if effect.margin > widest:
        return f"{number(effect.difference, 3, signed=True)} (runs too far apart)"
    return effect.text


def words(effect: Effect, published: tuple[float, ...] = ()) -> str:
    """What the interval excludes: 0, and the published gains."""
    if effect.margin > TOO_WIDE:
        return "says nothing"
    said = ("lower" if effect.difference < 0 else "higher") + ": excludes 0" if effect.excludes() else "includes 0"
    if published:
        apart = all(effect.excludes(one) for one in published)
        where = "below" if effect.difference < min(published) else "above"
        values = " to ".join(number(one, 3, signed=True) for one in published)
        said += f", {where if apart else 'includes'} the paper's {values}"
    return said


def times(factor: float, low: float, high: float) -> str:
    """A factor with its interval."""
    return f"{factor:.2f} ({low:.2f} to {high:.2f})" if low > 0 else "–"


def worth(effect: Effect, base: float, curve: LossCurve) -> str:
    """The tokens saved by a difference, by the standard model's loss over lengths of runs."""
    return "–" if effect.margin > TOO_WIDE else times(*tokens_saved(effect, base, curve))


def question(what: str, answers: Answers, where: str, pair: tuple[str, str], published: tuple[float, ...] = ()) -> str:
    """A row of the first table."""
    effect, curve = answers[pair], {"micro": by_length, "nano": nano_by_length}.get(where)
    tokens = worth(effect, answers.recipe.means[pair[1]], curve()) if curve else "next table"
    return f"| {what} | {cell(effect)} | {tokens} | {answers.counts(pair)} | {words(effect, published)} |"


def factors_at_42m() -> dict[int, list[tuple[float, float]]]:
    """By seed, (tokens, how many times as many the standard model needs for Block's loss there)."""
    runs, found = curves("one_gpu"), dict[int, list[tuple[float, float]]]()
    for seed in (seed for label, seed in runs if label == "block"):
        base, own = (LossCurve(runs[label, seed].items()) for label in ("standard", "block"))
        readings = [(float(at), base.tokens(float(loss))) for at, loss in zip(own.at, own.losses, strict=True)]
        found[seed] = [(at, one.tokens / at) for at, one in readings if not one.extrapolated]
    return found


def saved_at_42m() -> list[tuple[float, float, float]]:
    """Of each band its first and last measurement in millions of tokens, and the mean factor over seeds."""
    every, bands = [one for points in factors_at_42m().values() for one in points], []
    for low, high in BANDS:
        inside = [(tokens, factor) for tokens, factor in every if low < tokens < high]
        at = [tokens / 1e6 for tokens, _ in inside]
        bands.append((min(at), max(at), float(np.mean([factor for _, factor in inside]))))
    return bands


def by_seed_at_42m() -> list[float]:
    """The mean factor over the bands, of each pair of runs."""
    low, high = BANDS[0][0], BANDS[-1][1]
    means = [np.mean([factor for at, factor in one if low < at < high]) for one in factors_at_42m().values()]
    return sorted(map(float, means))


class Budget(NamedTuple):
    """Block beside the standard model after runs of one length, each with a decay of its own.

    Attributes:
        per: tokens a parameter. pairs: of models. gap: Block minus standard, nats a token. saved, low, high: tokens
            saved, and the ends of its interval, by the scatter of the standard model's runs in the recipe of that size.
        fitted: whether `saved` is read beyond the longest run of the standard model. compute: the same factor in FLOPs,
            of a model of the same size. tokens, loss: Block's.
    """

    tokens: float
    per: float
    pairs: int
    gap: Effect
    saved: float
    low: float
    high: float
    fitted: bool
    compute: float
    loss: float


def ends(size: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By variant and budget, the (tokens, loss, FLOPs) of a run with a decay of its own; the mean loss over seeds where
    there are several."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {"standard": {}, "block": {}}
    for row in rows(f"studies/{size}/budgets/runs.csv"):
        if row["quantity"] == "loss":
            found[row["label"]][row["arm"]] = float(row["tokens"]), float(row["value"]), float(row["flops"])
    for name, more in more_seeds(size).items():
        tokens, loss, flops = found[name][SEEDED]
        found[name][SEEDED] = tokens, statistics.fmean([loss, *more]), flops
    return found


def more_seeds(size: str) -> dict[str, list[float]]:
    """By variant, last losses at `SEEDED` of the seeds besides the first that both variants were trained with."""
    if size != "nano" or not (DATA / "nano_pair").is_dir():
        return {}
    losses = {(name, seed): loss for name, seed, loss in finals("nano_pair")}
    both = [seed for name, seed in losses if name == "block" and ("standard", seed) in losses]
    return {name: [losses[name, seed] for seed in both] for name in ("standard", "block")}


def pairs_of(budgets: list[Budget]) -> str:
    """How many pairs of models budgets are of."""
    counts = [one.pairs for one in budgets]
    least, most = min(counts), max(counts)
    return f"{least} to {most} pairs" if most > least else f"{most} pair{'s' * (most > 1)}"


def parameters_of(size: str) -> float:
    """Parameters of the standard model of the budgets of this size."""
    found = [row for row in rows(f"studies/{size}/budgets/runs.csv") if row["quantity"] == "parameters"]
    return min(float(row["value"]) for row in found)


def nano_by_length() -> LossCurve:
    """The standard model's loss at 2.9 M parameters after runs of several lengths."""
    return LossCurve(end[:2] for end in ends("nano")["standard"].values())


def saved_by_budget(size: str) -> list[Budget]:
    """Block beside the standard model at each budget."""
    own, rules = ends(size), {"micro": of_micro, "nano": of_nano}[size]().recipe
    parameters = parameters_of(size)
    base, scatter = LossCurve(end[:2] for end in own["standard"].values()), rules.sd("standard")
    found = []
    for arm, (tokens, loss, flops) in sorted(own["block"].items(), key=lambda item: item[1]):
        others, pairs = own["standard"][arm], 1
        if arm == SEEDED:
            pairs += len(more_seeds(size).get("block", []))
        gap = Effect(loss - others[1], scatter * math.sqrt(2 / pairs), rules.counts["standard"] - 1)
        reading = base.tokens(loss)
        low, high = (base.tokens(others[1] + end).tokens / tokens for end in (gap.high, gap.low))
        saved, ratio = reading.tokens / tokens, flops / tokens * others[0] / others[2]
        found.append(
            Budget(tokens, tokens / parameters, pairs, gap, saved, low, high, reading.extrapolated, saved / ratio, loss)
        )
    return found


def of_nano() -> Answers:
    """The answers of the 2.9 M recipe of 10 M tokens."""
    return of_folders("lasting_seeds", "lasting_runs")


def at_the_frontier() -> list[tuple[float, dict[str, tuple[float, str, bool]]]]:
    """For each loss at which a run of Block ends: of either variant the fewest FLOPs to that loss at any of the two
    sizes, that size, and whether that is read off a fit, beyond the measured budgets."""
    found = []
    for loss in sorted((loss for size in PARAMETERS for _, loss, _ in ends(size)["block"].values()), reverse=True):
        best = {}
        for name in ("block", "standard"):
            ways = []
            for size in PARAMETERS:
                curve = LossCurve((flops, loss) for _, loss, flops in ends(size)[name].values())
                flops, fitted = curve.tokens(loss)
                if math.isnan(flops) and curve.law is not None:  # above the shortest run's loss
                    flops, fitted = curve.law.reached(loss), True
                ways.append((flops, PARAMETERS[size], fitted))
            best[name] = min(ways)
        found.append((loss, best))
    return found


def saved_at_the_frontier() -> dict[float, float]:
    """How many times fewer FLOPs Block needs, by loss, where a larger model of either variant was trained as well."""
    found = {loss: best["standard"][0] / best["block"][0] for loss, best in at_the_frontier()}
    return {loss: saved for loss, saved in found.items() if 3.9 < loss < 4.2}


def more_flops_at_42m() -> float:
    """FLOPs of a token in Block over the standard model's at 42 M."""
    from attnres.models.build import SIZES

    sys.path.append(str(ROOT))  # the laboratory is no part of the package
    from lab.cost import Mechanism, flops_a_token

    shape = SIZES["100m"], 512, 8192
    return flops_a_token(*shape, Mechanism.of("block", {"num_blocks": 8})) / flops_a_token(*shape)


def benchmark(name: str) -> dict:
    """A file of benchmarks/results."""
    return json.loads((BENCHMARKS / name).read_text("utf-8"))


def step(name: str, size: str, dtype: str) -> str:
    """Block's step over the plain model's, with quartiles over rounds, and on what."""
    record = benchmark(name)["sizes"][size][dtype]
    return f"{ratio(timed(name, size, dtype))}, {record['device']}"


def timed(name: str, size: str | None, dtype: str) -> dict:
    """Block's step as a timing has it, of one of its sizes or of the only one."""
    file = benchmark(name)
    return (file if size is None else file["sizes"][size])[dtype]["variants"]["block (8 blocks)"]


def compiled() -> dict:
    """Block's compiled step on a GPU, as the last timing has it."""
    return benchmark("busy_100m_compiled_cuda.json")["variants"]["block (8 blocks)"]


def ratio(timed: dict) -> str:
    """A ratio to the plain model's time with its quartiles."""
    low, high = timed["ratio_quartiles"]
    return f"{timed['ratio']:.2f} ({low:.2f} to {high:.2f})"


def evidence() -> list[str]:
    """README's table of evidence: differences in loss, and tokens saved where whole schedules or curves give them."""
    bands, saved = saved_at_42m(), dict[str, str]()
    for size in PARAMETERS:
        lowest, *_, highest = [one for one in saved_by_budget(size) if not one.fitted]
        saved[size] = (
            f"{lowest.saved:.2f} to {highest.saved:.2f} ({pairs_of([lowest, highest])}; {lowest.per:.1f} to "
            f"{highest.per:.1f} tokens a parameter)"
        )
    at42 = (
        f"{min(x for *_, x in bands):.2f} to {max(x for *_, x in bands):.2f} (2 pairs; "
        f"{bands[0][0] * 1e6 / AT_42M:.1f} to {bands[-1][1] * 1e6 / AT_42M:.1f} tokens a parameter)"
    )
    block, at_42m, nano, small = ("block", "standard"), of_folders("one_gpu"), of_nano(), of_micro()
    tuned = of_folders("finetune_layouts")
    rows = [
        (
            "194 M to 528 M ([paper](https://arxiv.org/abs/2603.15031))",
            "39 B to 119 B",
            "1 each",
            "−0.020 to −0.026",
            "not given; 1.25 times less compute, by a fit",
        ),
        ("42 M", "49 M", str(at_42m.recipe.counts["block"]), cell(at_42m[block]), at42),
        ("2.9 M", "10 M", str(nano.recipe.counts["block"]), cell(nano[block]), saved["nano"]),
        ("0.9 M", "4 M", str(small.recipe.counts["block"]), cell(small[block]), saved["micro"]),
        (
            "2.9 M, pretrained, converted, trained on",
            "1 M",
            str(tuned.recipe.counts[EXACT]),
            cell(tuned[EXACT, "standard"]),
            "–",
        ),
    ]
    head = ["| parameters | tokens | Block's runs | Block − baseline | tokens saved, times |", "|---|---|---|---|---|"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def cost() -> list[str]:
    """README's table of cost."""
    graphs, cpu = benchmark("decode_graphs_cuda.json"), benchmark("step_cpu_plain.json")["fp32"]["device"]
    gpu = benchmark("step_100m_cuda.json")["sizes"]["100m"]["bf16"]["device"]
    small = timed("step_cpu_nano.json", "nano", "fp32")
    rows = [
        ("training step, 12 layers of width 256", cpu, timed("step_cpu_plain.json", None, "fp32")),
        ("training step, 12 layers of width 128, 4 x 128 tokens", "the same", small),
        (f"**training step, {STEP_GPU}**", f"one {gpu}", timed("step_100m_cuda.json", "100m", "bf16")),
        ("the same, compiled", "the same", compiled()),
        *gpu_steps(BENCHMARKS / "gpu.jsonl"),
        ("prefill of 8,192 tokens, 0.6 B parameters", "the same", graphs["prefill"]["8192"]["block"]),
        ("decoding one text, 0.6 B, CUDA graphs", "the same", graphs["decode"]["1"]["block"]),
        ("decoding one text, 2.9 M", cpu, benchmark("decode_nano_fp32.json")["decode"]["1"]["block"]),
    ]
    head = ["| what | on | time |", "|---|---|---|"]
    return head + [f"| {what} | {device} | {ratio(timed)} |" for what, device, timed in rows]


def gpu_steps(path: Path) -> list[tuple[str, str, dict]]:
    """Block's captured training steps as `make gpu` measured them last; none where it has not."""
    rows = (
        [json.loads(line) for line in path.read_text("utf-8").splitlines() if line[-1:] == "}"] if path.exists() else []
    )
    newest = {row["round"]: row for row in rows if row.get("variant") == "block (8 blocks)" and "ratio" in row}
    shown = {
        "step 100m graphs": "the step of 12 layers, CUDA graphs",
        "step 100m compile+graphs": "the same, compiled, CUDA graphs",
        "step 0.6b graphs": "training step, 0.6 B parameters, 16,384 tokens, CUDA graphs",
    }
    return [(what, newest[name]["of"]["device"], newest[name]) for name, what in shown.items() if name in newest]


def marked(path: Path) -> str:
    """README or the guide with today's tables between its marks."""
    text = path.read_text("utf-8")
    for name, lines in (("who", who()), ("evidence", evidence()), ("settings", settings()), ("cost", cost())):
        if f"<!-- {name}: " not in text:
            continue
        mark = f"<!-- {name}: made by `python experiments/results_page.py` -->"
        before, rest = text.split(mark)
        text = "\n".join([before + mark, "", *lines, "", "<!-- end -->" + rest.split("<!-- end -->", 1)[1]])
    return text


def inside() -> dict[str, tuple[float, float]]:
    """What reads at 42 M are like, of attention and of MLPs, over what even weights would be (1 each): means over reads
    from the third layer on, where there is a choice."""
    reads: dict[tuple[str, str], list[float]] = {}
    for row in rows("one_gpu/reads.csv"):
        reads.setdefault((row["seed"], row["read"]), []).append(float(row["weight"]))
    found: dict[str, list[float]] = {}
    for kind in ("attention", "mlp"):
        of = [one for (_, name), one in reads.items() if name.startswith(kind) and int(name.split()[1]) > 1]
        at = [np.arange(len(one))[::-1] for one in of]  # sources back from the newest
        every = {
            "newest": [one[-1] * len(one) for one in of],
            "embedding": [one[0] * len(one) for one in of],
            "entropy": [-sum(w * math.log(w) for w in one if w) / math.log(len(one)) for one in of],
            "distance": [float(np.dot(one, back)) / back.mean() for one, back in zip(of, at, strict=True)],
        }
        for what, values in every.items():
            found.setdefault(what, []).append(float(np.mean(values)))
    return {what: (values[0], values[1]) for what, values in found.items()}


def settings() -> list[str]:
    """The table of settings and other rules at 0.9 M parameters."""
    answers, curve, clock = of_micro(), by_length(), step_times("micro/rivals")
    what = {
        "block": "`block`",
        "block-heads4": "four softmax heads for one",
        "block-gatescalar": "a gate that starts at the plain sum",
    }
    lines = []
    for name in (*what, "inkling2", "muddformer", "hyper_connections", "denseformer"):
        other = own_base(name)
        effect, base = answers[name, other], answers.recipe.means[other]
        faster = f"{tokens_saved(effect, base, curve)[0] / clock[name]:.2f}" if name in clock else "–"
        beside = other if other == "standard" else other.capitalize()
        cells = [what.get(name, f"`{name}`"), beside, cell(effect), worth(effect, base, curve), faster, words(effect)]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        "| rule or setting | beside | difference | tokens saved, times | time saved | the interval |",
        "|---" * 6 + "|",
        *lines,
    ]


def step_times(study: str) -> dict[str, float]:
    """How many times the standard model's step a mechanism's takes, the median of interleaved rounds (CPU, 2 threads,
    bf16, eager), by label."""
    lines = (DATA / "studies" / study / "runs.jsonl").read_text("utf-8").splitlines()
    timings = [files["speed.json"] for line in lines if "speed.json" in (files := json.loads(line)["files"])]
    measured = {label: one["times"] for timing in timings for label, one in timing["variants"].items()}
    base = measured.get("standard", [])
    return {
        label: statistics.median(mine / theirs for mine, theirs in zip(times, base, strict=True))
        for label, times in measured.items()
    }


def who() -> list[str]:
    """Who should use it, and who should not, today: the lines above everything, of the guide as well."""
    bands, nano = saved_at_42m(), [one for one in saved_by_budget("nano") if not one.fitted]
    factors, reached, last = [factor for *_, factor in bands], bands[-1][1] * 1e6 / AT_42M, nano[-1]
    eager = [timed(*which)["ratio"] for which in CPU_STEPS]
    by_compiler = [
        timed(name.replace(".json", "_compiled.json").replace("_plain", ""), size, dtype)["ratio"]
        for name, size, dtype in CPU_STEPS
    ]
    slowest, ranges = max(*eager, *by_compiler), [f"{min(one):.2f} to {max(one):.2f}" for one in (eager, by_compiler)]
    gpu = timed("step_100m_cuda.json", "100m", "bf16")["ratio"]
    tuned = of_folders("finetune_layouts")[EXACT, "standard"]
    return paragraphs(
        "**Text is what you lack: yes**, if you train from scratch. `block` with its defaults reached the baseline's "
        f"loss with {min(factors):.2f} to {max(factors):.2f} times fewer tokens at 42 M parameters, at each length up "
        f"to {reached:.1f} tokens a parameter (two pairs of runs), and at 2.9 M with "
        f"{times(nano[0].saved, nano[0].low, nano[0].high)} times fewer at {nano[0].per:.1f} and "
        f"{times(last.saved, last.low, last.high)} at {last.per:.0f} tokens a parameter ({pairs_of(nano)}).",
        f"**Time on a CPU: yes.** A step takes {ranges[0]} times the plain model's, compiled {ranges[1]}; at 2.9 M and "
        f"{last.per:.0f} tokens a parameter that is {last.saved / slowest:.2f} times less time for the same loss "
        f"({last.low / slowest:.2f} at the lower end).",
        f"**Time on a GPU: not yet.** A step took {gpu:.2f} times the plain model's on an H200 (26 November 2026; "
        f"today's kernels and captured steps are not measured). At 42 M and {reached:.1f} tokens a parameter that is "
        f"{gpu / factors[-1]:.2f} times more time for the same loss. With what 2.9 M saves at {last.per:.0f} tokens a "
        f"parameter it would be {last.saved / gpu:.2f} times less: not measured.",
        f"**A finished model: no.** At 2.9 M conversion and 1 M more tokens gain {cell(tuned)} nats a token; larger: "
        "not measured. **To study** what layers read: yes.",
        bullet="- ",
    )


def paragraphs(*texts: str, bullet: str = "") -> list[str]:
    """Return the lines of paragraphs, or of a list's points, broken between words."""
    look: dict[str, Any] = {"initial_indent": bullet, "subsequent_indent": " " * len(bullet)}
    look |= {"break_long_words": False, "break_on_hyphens": False}
    return [line for text in texts for line in textwrap.wrap(text, 206, **look)]


def first_table() -> list[str]:
    """The questions about the loss at the end."""
    small, nano, at_42m = of_micro(), of_nano(), of_folders("one_gpu")
    block, apart = ("block", "standard"), without_copiers()
    fixed = "Full beside weights that no token changes (`static_mix`)"
    return [
        "| what | difference | tokens saved, times | runs | the interval |",
        "|---|---|---|---|---|",
        question("Block, 0.9 M parameters, 4.8 tokens a parameter", small, "micro", block, PUBLISHED),
        question("Block, 2.9 M, 3.5 tokens a parameter", nano, "nano", block, PUBLISHED),
        question("Block, 42 M, 1.2 tokens a parameter, rates not searched", at_42m, "42 M", block, PUBLISHED),
        question("Full beside Block, 0.9 M", small, "micro", ("full", "block"), (-0.009,)),
        question(f"{fixed}, 0.9 M", small, "micro", ("full", "static_mix"), (-0.012,)),
        f"| the same without a run of `static_mix` that had learnt to copy, left out afterwards | {cell(apart)} | "
        f"{worth(apart, small.recipe.means['full'] - apart.difference, by_length())} | 3 and 2 | "
        f"{words(apart, (-0.012,))} |",
        question("Block beside mHC, 18 % more parameters, 0.9 M", small, "micro", ("block", "mhc"), (-0.001,)),
        question("`rescaled`, standard's own function (control), 0.9 M", small, "micro", ("rescaled", "standard")),
    ]


def tokens_table() -> list[str]:
    """How many times fewer tokens, by size and length of training."""
    bands, of_flops = saved_at_42m(), more_flops_at_42m()
    of_time = timed("step_100m_cuda.json", "100m", "bf16")["ratio"]
    seeds = " and ".join(f"{factor:.2f}" for factor in by_seed_at_42m())
    lines = [
        [
            "42 M",
            ", ".join(f"{(low + high) / 2 * 1e6 / AT_42M:.1f}" for low, high, _ in bands),
            "2",
            ", ".join(f"{x:.2f}" for *_, x in bands) + f" (means of the pairs {seeds})",
            ", ".join(f"{x / of_flops:.2f}" for *_, x in bands),
            ", ".join(f"{x / of_time:.2f}" for *_, x in bands) + ", H200",
        ]
    ]
    step = timed("step_cpu_nano.json", "nano", "fp32")["ratio"]
    for size, where in reversed(PARAMETERS.items()):
        found = [one for one in saved_by_budget(size) if not one.fitted]
        clock = ", ".join(f"{one.saved / step:.2f}" for one in found) + ", CPU" if size == "nano" else "–"
        lines.append(
            [
                where,
                ", ".join(f"{one.per:.1f}" for one in found),
                pairs_of(found).split(" pair")[0],
                ", ".join(times(one.saved, one.low, one.high) for one in found),
                ", ".join(f"{one.compute:.2f}" for one in found),
                clock,
            ]
        )
    head = "| size | tokens a parameter | pairs | tokens saved, times | compute saved | time saved (under 1: lost) |"
    return [head, "|---" * 6 + "|", *(f"| {' | '.join(cells)} |" for cells in lines)]


def page() -> str:
    """The page."""
    small, at_42m = of_micro(), of_folders("one_gpu")
    bands, tuned = saved_at_42m(), of_folders("finetune_layouts")
    exact, other = (tuned[name, "standard"] for name in (EXACT, "cumulative-num_blocks4"))
    longer = of_folders("finetune_long")["cumulative-num_blocks4", "standard"]
    reads = inside()
    gap = gaps(curves("one_gpu"), "block")
    early, late = (min(gap, key=lambda at, want=want: abs(at - want * 1e6)) for want in (bands[0][0], bands[-1][1]))
    frontier = saved_at_the_frontier().values()
    power = json.loads((DATA / "power_micro.json").read_text("utf-8"))["results"]["own standard deviations"]
    wrong = list(power["false positives"].values())
    graphs, gpu = benchmark("decode_graphs_cuda.json"), timed("step_100m_cuda.json", "100m", "bf16")
    cpu = timed("step_cpu_plain.json", None, "fp32")
    lines = [
        "# Should I use Attention Residuals?",
        "",
        *who(),
        *paragraphs(
            "**Settings**: `block` reads sums over 8 blocks of sublayers (`full`: every output), starts from queries "
            "of zero, and trains queries and key gains at 0.1 times AdamW's learning rate without weight decay "
            "([why](../explanation/query_rate.md); in fine-tuning at the model's). All else as in the plain model.",
            "**Not measured here**: above 42 M parameters; above 3 M, more than 1.2 tokens a parameter; a step at 0.6 "
            "B; several GPUs. [Others](others.md), one run each, 20 tokens a parameter: Block −0.021 to −0.034 at 0.5 "
            "B, Full −0.013 to −0.041 at 38 to 304 M; steps of 1.09 to 1.14 times; the "
            "[paper](https://arxiv.org/abs/2603.15031) −0.020 to −0.026 at 194 to 528 M, 1.25 times less compute.",
            bullet="- ",
        ),
        "",
        *paragraphs(
            "**Is the held-out loss lower at the end?** In nats a token, minus the standard residual where nothing "
            "else is named. 95 % intervals. Tokens saved: how many times fewer for the same loss. Of "
            + ", ".join(f"`{file}`" for file in FILES.values())
            + "."
        ),
        "",
        *first_table(),
        "",
        *paragraphs(
            f"**Does it fade?** In nats, at 42 M: {number(gap[early], 3, signed=True)} at {early / 1e6:.0f} M tokens, "
            f"{number(gap[late], 3, signed=True)} at {late / 1e6:.0f} M. In tokens saved: constant at 42 M, growing "
            "with the length of training at 2.9 and 0.9 M. These runs are others than above, each with a decay of its "
            "own at 2.9 and 0.9 M (`docs/data/studies/{micro,nano}/budgets/runs.csv`; in brackets 95 %, by the scatter "
            "of standard models). At 42 M the points lie on one curve, whose rate is lower where the standard model is "
            "read: probably too small. Compute saved is of models of one size ([of the better of two: "
            f"{min(frontier):.2f} to {max(frontier):.2f}](scaling.md))."
        ),
        "",
        *tokens_table(),
        "",
        *paragraphs(
            "**What does it cost?** Times the plain model's, medians with quartiles. A step: "
            f"{ratio(timed('step_cpu_nano.json', 'nano', 'fp32'))} on a CPU (12 layers of width 128, 4 x 128 "
            f"tokens), {ratio(gpu)} on an H200 ({STEP_GPU}), {ratio(compiled())} with both compiled. Peak memory: "
            f"{cpu['peak_ratio']:.2f} on a CPU (width 256), {gpu['peak_ratio']:.2f} on the H200. Inference on the H200 "
            f"at 0.6 B: prefill of 8,192 tokens {ratio(graphs['prefill']['8192']['block'])}, decoding "
            f"{ratio(graphs['decode']['1']['block'])}, below 1 by faster norms ([cost](cost.md))."
        ),
        "",
        *paragraphs(
            "**Other settings and rules** at 0.9 M, 2 to 6 runs each, one rate for all ([at their own](rivals.md)), "
            "judged together (Holm). Time: on a CPU, where Block and Full alone have kernels of their own."
        ),
        "",
        *settings(),
        "",
        *paragraphs(
            f"**A finished model**, trained on for 1 M tokens: Block {cell(exact)}. `cumulative`, which "
            f"begins elsewhere: {cell(other)}, after 10 M {cell(longer)} ([retrofit](retrofit.md)).",
            "**Inside** (42 M, `docs/data/one_gpu/reads.csv`), over equal weights (1), of attention and of MLPs: "
            + ", ".join(f"{what} {one:.2f} and {other:.2f}" for what, (one, other) in reads.items())
            + ". So reads are local and sharper in MLPs, as in the paper's Figure 8 ([42 M](one_gpu.md)). A weight is "
            "no cause ([edges](contribution.md)).",
            "**The rule**: least squares of loss = mechanism + seed over all runs of a recipe; Student's t, Welch "
            f"where variances differ. 0.9 M: {len(small.runs)} runs, sigma {small.recipe.sigma:.4f}, "
            f"{small.recipe.degrees} degrees of freedom; 42 M: {len(at_42m.runs)} runs, {at_42m.recipe.degrees} "
            f"degree. In simulated nulls the first table's questions exclude 0 in {min(wrong):.3f} to "
            f"{max(wrong):.3f}, any other in {power['any false positive of the others, by Holm']:.2f} "
            "([method](noise.md), [words](../reference/glossary.md), `python experiments/results_page.py`).",
            bullet="- ",
        ),
        "",
        f"**Studies**: {' · '.join(f'[{text}]({name}.md)' for name, text in PAGES.items())} · [all claims](claims.md).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(PAGE).parent.mkdir(exist_ok=True)
    write_text(PAGE, page())
    for path in (README, GUIDE):
        write_text(path, marked(path))
