"""Write the page of results, docs/results/index.md, and README's two tables from the result files.

python experiments/results_page.py
"""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from recipe_runs import DATA, Run, finals, micro, rows

from attnres.files import write_text
from attnres.savings import LossCurve, saving
from attnres.stats import Effect, Recipe, judged
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


def cell(effect: Effect) -> str:
    """A difference with its interval in nats per token."""
    if not effect.margin >= 0:
        return f"{number(effect.difference, 3, signed=True)} (one seed)"
    values = [number(value, 3, signed=True) for value in (effect.difference, effect.low, effect.high)]
    return "{} ({} to {})".format(*values)


def words(effect: Effect, published: tuple[float, ...] = ()) -> str:
    """What the interval excludes: 0, and the published gains."""
    said = ("lower" if effect.difference < 0 else "higher") + ": excludes 0" if effect.excludes() else "includes 0"
    if published:
        apart = all(effect.excludes(one) for one in published)
        than = "larger than" if effect.difference < min(published) else "smaller than"
        said += f"; {than if apart else 'includes'} the paper's gain"
    return said


def question(what: str, runs: list[Run], file: str, pair: tuple[str, str], published: tuple[float, ...] = ()) -> str:
    """A row of the first table."""
    recipe = Recipe(runs)
    effect, counts = recipe.effect(*pair), [recipe.counts[name] for name in pair]
    return f"| {what} | {cell(effect)} | {counts[0]} and {counts[1]} runs | {words(effect, published)} | `{file}` |"


def one_gpu() -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Curves of the 42 M runs, (tokens, loss) by label and seed."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows("one_gpu/curves.csv"):
        points = curves.setdefault(row["label"], {}).setdefault(row["seed"], [])
        points.append((float(row["tokens"]), float(row["loss"])))
    return curves


def saved_at_42m() -> list[tuple[float, float, float]]:
    """Of each band its first and last measurement in millions of tokens, and the mean factor over seeds."""
    curves, found = one_gpu(), list[tuple[float, float]]()
    for seed, points in curves["block"].items():
        base, own = LossCurve(curves["standard"][seed]), LossCurve(points)
        for tokens, loss in zip(own.at, own.losses, strict=True):
            reading = base.tokens(float(loss))
            if not reading.extrapolated:
                found.append((float(tokens), reading.tokens / float(tokens)))
    bands = []
    for low, high in BANDS:
        inside = [(tokens, factor) for tokens, factor in found if low < tokens < high]
        at = [tokens / 1e6 for tokens, _ in inside]
        bands.append((min(at), max(at), float(np.mean([factor for _, factor in inside]))))
    return bands


def saved_by_budget(size: str) -> list[tuple[float, float, bool, float]]:
    """At each decayed budget: tokens a parameter, tokens saved, whether that is extrapolated, and FLOPs saved."""
    ends: dict[str, dict[str, tuple[float, float, float]]] = {"standard": {}, "block": {}}
    parameters = 1.0
    for row in rows(f"studies/{size}/budgets/runs.csv"):
        if row["quantity"] == "loss":
            ends[row["label"]][row["arm"]] = float(row["tokens"]), float(row["value"]), float(row["flops"])
        elif row["quantity"] == "parameters" and row["label"] == "standard":
            parameters = float(row["value"])
    base = LossCurve(end[:2] for end in ends["standard"].values())
    own = LossCurve(end[:2] for end in ends["block"].values())
    tokens, _, flops = ends["block"]["x4"]
    ratio = flops / tokens * ends["standard"]["x4"][0] / ends["standard"]["x4"][2]
    found = []
    for tokens, loss, _ in sorted(ends["block"].values()):
        one = saving(own, base, loss)
        found.append((tokens / parameters, one.tokens, one.extrapolated, one.of_compute(ratio)))
    return found


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


def timed(name: str, size: str, dtype: str) -> dict:
    """Block's step as a timing has it."""
    return benchmark(name)["sizes"][size][dtype]["variants"]["block (8 blocks)"]


def compiled() -> dict:
    """Block's compiled step on a GPU, as the last timing has it."""
    return benchmark("busy_100m_compiled_cuda.json")["variants"]["block (8 blocks)"]


def ratio(timed: dict) -> str:
    """A ratio to the plain model's time with its quartiles."""
    low, high = timed["ratio_quartiles"]
    return f"{timed['ratio']:.2f} ({low:.2f} to {high:.2f})"


def evidence() -> list[str]:
    """README's table of evidence: differences in loss, and tokens saved where whole schedules or curves give them."""
    nano = [*finals("lasting_seeds"), *finals("lasting_runs")]
    tuned = Recipe(fine_tuned()).effect("block-num_blocks4", "standard")
    bands, saved = saved_at_42m(), dict[str, str]()
    for size in PARAMETERS:
        found = [(per, fewer) for per, fewer, far, _ in saved_by_budget(size) if not far]
        lowest, highest = min(found), max(found)
        saved[size] = (
            f"{lowest[1]:.2f} to {highest[1]:.2f} (1 pair; {lowest[0]:.1f} to {highest[0]:.1f} tokens a parameter)"
        )
    at42 = (
        f"{min(x for *_, x in bands):.2f} to {max(x for *_, x in bands):.2f} (2 pairs; "
        f"{bands[0][0] * 1e6 / AT_42M:.1f} to {bands[-1][1] * 1e6 / AT_42M:.1f} tokens a parameter)"
    )
    rows = [
        (
            "194 M to 528 M ([paper](https://arxiv.org/abs/2603.15031))",
            "39 B to 119 B",
            "1 each",
            "−0.020 to −0.026",
            "1.25 (by a fit; about 200 tokens a parameter)",
        ),
        (
            "42 M",
            "49 M",
            "2",
            cell(Recipe(finals("one_gpu")).effect("block", "standard")),
            at42,
        ),
        ("2.9 M", "10 M", "3", cell(Recipe(nano).effect("block", "standard")), saved["nano"]),
        ("0.9 M", "4 M", "6", cell(Recipe(micro()).effect("block", "standard")), saved["micro"]),
        ("2.9 M, pretrained, converted, trained on", "1 M", "3", cell(tuned), "–"),
    ]
    head = ["| parameters | tokens | Block's runs | Block − baseline | tokens saved, times |", "|---|---|---|---|---|"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def cost() -> list[str]:
    """README's table of cost."""
    cpu, small, graphs = (
        benchmark("step_cpu_plain.json"),
        benchmark("step_cpu_nano.json"),
        benchmark("decode_graphs_cuda.json"),
    )
    gpu = benchmark("step_100m_cuda.json")["sizes"]["100m"]["bf16"]
    block = "block (8 blocks)"
    rows = [
        ("training step, 12 layers of width 256", cpu["fp32"]["device"], cpu["fp32"]["variants"][block]),
        (
            "training step, 12 layers of width 128, 4 x 128 tokens",
            "the same",
            small["sizes"]["nano"]["fp32"]["variants"][block],
        ),
        (f"**training step, {STEP_GPU}**", f"one {gpu['device']}", gpu["variants"][block]),
        ("the same, compiled", "the same", compiled()),
        *gpu_steps(BENCHMARKS / "gpu.jsonl"),
        ("prefill of 8,192 tokens, 0.6 B parameters", "the same", graphs["prefill"]["8192"]["block"]),
        ("decoding one text, 0.6 B, CUDA graphs", "the same", graphs["decode"]["1"]["block"]),
        ("decoding one text, 2.9 M", cpu["fp32"]["device"], benchmark("decode_nano_fp32.json")["decode"]["1"]["block"]),
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
    bands, text = saved_at_42m(), path.read_text("utf-8")
    today = who(bands, saved_by_budget("nano")[-2])
    for name, lines in (("who", today), ("evidence", evidence()), ("settings", settings()), ("cost", cost())):
        if f"<!-- {name}: " not in text:
            continue
        mark = f"<!-- {name}: made by `python experiments/results_page.py` -->"
        before, rest = text.split(mark)
        text = "\n".join([before + mark, "", *lines, "", "<!-- end -->" + rest.split("<!-- end -->", 1)[1]])
    return text


def fine_tuned() -> list[Run]:
    """Losses of the fine-tuned models at their last step."""
    last = {row["run"]: float(row["val_loss"]) for row in rows("finetune_layouts/curves.csv")}
    return [(run.rsplit("-seed", 1)[0], int(run.rsplit("-seed", 1)[1]), loss) for run, loss in last.items()]


def inside() -> tuple[float, float, float, float]:
    """At 42 M, means over reads from the third layer on, where there is a choice: the newest's weight times how many
    sources there are, of attention and of MLPs; then the embedding's."""
    reads: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in rows("one_gpu/reads.csv"):
        reads.setdefault((row["seed"], row["read"]), []).append((row["source"], float(row["weight"])))
    found = []
    for which in (-1, 0):
        for kind in ("attention", "mlp"):
            of = [read for (_, name), read in reads.items() if name.startswith(kind) and int(name.split()[1]) > 1]
            found.append(float(np.mean([read[which][1] * len(read) for read in of])))
    return found[0], found[1], found[2], found[3]


def settings() -> list[str]:
    """The table of settings and other rules at 0.9 M parameters, judged together."""
    recipe = Recipe(micro())
    asked = [
        ("four softmax heads for one, beside Block", "block-heads4", "block"),
        ("a window of 8, beside the standard residual", "full-window8", "standard"),
        ("keys without norm, beside Block", "block-key_normFalse", "block"),
        ("a gate that starts at the plain sum, beside Block", "block-gatescalar", "block"),
    ]
    rules = ("inkling2", "hyper_connections", "mhc_lite", "mhc", "dca", "denseformer")
    asked += [(f"`{name}`, beside the standard residual", name, "standard") for name in rules]
    effects = judged([recipe.effect(name, other) for _, name, other in asked], [False] * len(asked))
    lines = [f"| {row[0]} | {cell(effect)} | {words(effect)} |" for row, effect in zip(asked, effects, strict=True)]
    return ["| rule or setting, beside | difference | the interval |", "|---|---|---|", *lines]


def who(bands: list[tuple[float, float, float]], last: tuple) -> list[str]:
    """Who should use it, and who should not, today: the lines above everything, of the guide as well."""
    tuned = Recipe(fine_tuned()).effect("block-num_blocks4", "standard")
    cpu, gpu = (
        timed("step_cpu_nano.json", "nano", "fp32")["ratio"],
        timed("step_100m_cuda.json", "100m", "bf16")["ratio"],
    )
    factors = [factor for *_, factor in bands]
    reached = bands[-1][1] * 1e6 / AT_42M
    return paragraphs(
        "**Use it today** if you train from scratch and data, not time, is scarce. At 42 M parameters `block` with its "
        f"defaults reached the same loss with {min(factors):.2f} to {max(factors):.2f} times fewer "
        f"tokens (two pairs of "
        f"runs, up to {reached:.1f} tokens a parameter, Muon), at 2.9 M with {last[1]:.2f} times fewer (one pair, "
        f"{last[0]:.0f} tokens a parameter). Or if you train on a CPU, where a step takes at most {cpu:.2f} times as "
        "long; or to study what layers read.",
        f"**Do not use it today** if time on a GPU is scarce: a step took {gpu:.2f} times as long "
        f"on one H200, more than "
        f"{max(factors):.2f} saves; nor to improve a finished model ({cell(tuned)} nats a token).",
        bullet="- ",
    )


def paragraphs(*texts: str, bullet: str = "") -> list[str]:
    """Return the lines of paragraphs, or of a list's points, broken between words."""
    look: dict[str, Any] = {"initial_indent": bullet, "subsequent_indent": " " * len(bullet)}
    look |= {"break_long_words": False, "break_on_hyphens": False}
    return [line for text in texts for line in textwrap.wrap(text, 206, **look)]


def page() -> str:
    """The page."""
    small, runs42 = micro(), finals("one_gpu")
    recipe = Recipe(small)
    bands, budgets = saved_at_42m(), {size: saved_by_budget(size) for size in PARAMETERS}
    nano = [*finals("lasting_seeds"), *finals("lasting_runs")]
    studies = "docs/data/studies/micro/{rivals,ablations,noise}/runs.csv, docs/data/processors_micro.csv"
    file42 = "docs/data/one_gpu/curves.csv"
    nanos = "docs/data/lasting_{seeds,runs}/curves.csv"
    first = [
        question("Block, 0.9 M parameters, 4.5 tokens each", small, studies, ("block", "standard"), PUBLISHED),
        question("Block, 2.9 M, 3.5 tokens each", nano, nanos, ("block", "standard"), PUBLISHED),
        question("Block, 42 M, 1.2 tokens each, rates untuned", runs42, file42, ("block", "standard"), PUBLISHED),
        question("Full beside Block, 0.9 M", small, studies, ("full", "block")),
        question(
            "Full beside weights that no token changes (`static_mix`), 0.9 M", small, studies, ("full", "static_mix")
        ),
        question("Block beside mHC, which has 18 % more parameters, 0.9 M", small, studies, ("block", "mhc")),
        question("`rescaled`, the placebo control, 0.9 M", small, studies, ("rescaled", "standard")),
    ]
    of_flops, of_time = more_flops_at_42m(), timed("step_100m_cuda.json", "100m", "bf16")["ratio"]
    cells = [
        "42 M",
        ", ".join(f"{(low + high) / 2 * 1e6 / AT_42M:.1f}" for low, high, _ in bands),
        "2",
        ", ".join(f"{x:.2f}" for *_, x in bands),
        ", ".join(f"{x / of_flops:.2f}" for *_, x in bands),
        ", ".join(f"{x / of_time:.2f}" for *_, x in bands),
        f"`{file42}`",
    ]
    tokens = [f"| {' | '.join(cells)} |"]
    for size, found in reversed(budgets.items()):
        cells = [
            PARAMETERS[size],
            ", ".join(f"{per:.1f}" for per, *_ in found),
            "1",
            ", ".join(f"{x:.2f}{' (by a fit)' * far}" for _, x, far, _ in found),
            ", ".join(f"{work:.2f}" for *_, work in found),
            "–",
            f"`docs/data/studies/{size}/budgets/runs.csv`",
        ]
        tokens.append(f"| {' | '.join(cells)} |")
    tuned = Recipe(fine_tuned())
    exact, other = (tuned.effect(name, "standard") for name in ("block-num_blocks4", "cumulative-block_size1"))
    newest_a, newest_m, first_a, first_m = inside()
    power = json.loads((DATA / "power_micro.json").read_text("utf-8"))["results"]["own standard deviations"]
    wrong = list(power["false positives"].values())
    lines = [
        "# Should I use Attention Residuals?",
        "",
        *who(bands, budgets["nano"][-2]),
        *paragraphs(
            "**Settings**: `block` with its defaults: 8 blocks, queries at zero, queries and key "
            "gains at 0.1 times the "
            "model's learning rate and without weight decay ([why](../explanation/query_rate.md)). "
            "Everything else as in "
            "the plain model.",
            "**Not measured here**: anything above 42 M parameters; above 3 M, more than 1.2 tokens "
            "a parameter; the time "
            "of a step at 0.6 B or on several GPUs; the best rates at 42 M. Others report at 20 "
            "tokens a parameter Block "
            "−0.021 to −0.034 at 0.5 B, Full −0.013 to −0.041 at 38 to 304 M, steps of 1.09 to 1.14 times; the paper "
            "−0.020 to −0.026 at 194 to 528 M; one run each ([others](others.md)).",
            bullet="- ",
        ),
        "",
        *paragraphs(
            "**Is the held-out loss lower at the end?** The rule minus the standard residual, "
            "unless another is named, in "
            "nats a token: lower is better. 95 % intervals. `python experiments/results_page.py` "
            "writes this page from the "
            "files named; the [glossary](../reference/glossary.md) has the words."
        ),
        "",
        "| what | difference | runs | the interval | file |",
        "|---|---|---|---|---|",
        *first,
        "",
        *paragraphs(
            "**How many times fewer tokens does Block need for the same loss?** Intervals are not "
            "known. At 42 M from two "
            "pairs of training curves, where the standard model is read later in the same schedule, "
            "at a lower rate: the "
            "true factor is probably larger. Below from one pair of models a size, each budget with "
            "its own decay. Compute "
            "counts Block's extra FLOPs, time the ratio of a step: under 1, Block takes longer."
        ),
        "",
        "| size | tokens a parameter | pairs | tokens, times fewer | compute | time, H200 | file |",
        "|---|---|---|---|---|---|---|",
        *tokens,
        "",
        *paragraphs(
            "**What does it cost?** A training step takes, with the plain Transformers model's as 1 and quartiles in "
            f"brackets, {ratio(timed('step_cpu_nano.json', 'nano', 'fp32'))} on a CPU (12 layers of width 128, 4 x 128 "
            f"tokens, fp32) and {ratio(timed('step_100m_cuda.json', '100m', 'bf16'))} on an H200 ({STEP_GPU}, bf16), "
            f"{ratio(compiled())} compiled. Memory, prefill, decoding: [cost](cost.md)."
        ),
        "",
        "**Other settings and rules** at 0.9 M, 2 or 3 runs each, judged together (Holm); files as in the first table.",
        "",
        *settings(),
        "",
        *paragraphs(
            f"**A finished model** of 2.9 M, converted and trained on for 1 M tokens, 3 runs: Block {cell(exact)}; the "
            f"cumulative layout, another function at the start, {cell(other)} and still falling "
            "(`docs/data/finetune_layouts/curves.csv`).",
            f"**Inside** (42 M, `docs/data/one_gpu/reads.csv`): the newest source has {newest_a:.1f} (attention) and "
            f"{newest_m:.1f} (MLP) times the weight that equal weights would give it, the embedding {first_a:.2f} and "
            f"{first_m:.2f}.",
        ),
        "",
        f"**Studies**: {' · '.join(f'[{text}]({name}.md)' for name, text in PAGES.items())} · [all claims](claims.md).",
        *paragraphs(
            "**The rule**: least squares of loss = rule + seed over all runs of a recipe; Student's t, Welch where "
            f"variances differ. 0.9 M: {len(small)} runs, residual deviation {recipe.sigma:.4f} with {recipe.degrees} "
            f"degrees of freedom; 42 M: {len(runs42)} runs, {Recipe(runs42).degrees} degree. In "
            f"simulated studies without "
            f"a difference questions of the first table exclude 0 in {min(wrong):.2f} to "
            f"{max(wrong):.2f} of cases, any "
            f"row of the second in {power['any false positive of the others, by Holm']:.2f} ([method](noise.md), "
            "`docs/data/power_micro.json`)."
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(PAGE).parent.mkdir(exist_ok=True)
    write_text(PAGE, page())
    for path in (README, GUIDE):
        write_text(path, marked(path))
