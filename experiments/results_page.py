"""Write the page of results, docs/results/index.md, and README's two tables from the result files.

python experiments/results_page.py
"""

import json
from pathlib import Path

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
"""Tokens of the 42 M runs, of which the factor is averaged: after warm-up, until the end that "
"standard never reaches."""
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
    """What the interval excludes."""
    said = "excludes 0" if effect.excludes() else "includes 0"
    if published:
        apart = all(effect.excludes(one) for one in published)
        said += f", {'excludes' if apart else 'includes'} the published effect"
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
    from lab.cost import Mechanism, flops_a_token

    shape = SIZES["100m"], 512, 8192
    return flops_a_token(*shape, Mechanism.of("block", {"num_blocks": 8})) / flops_a_token(*shape)


def step(name: str, size: str, dtype: str) -> str:
    """Block's step over the plain model's, with quartiles over rounds, and on what."""
    record = json.loads((BENCHMARKS / name).read_text("utf-8"))["sizes"][size][dtype]
    return f"{ratio(timed(name, size, dtype))}, {record['device']}"


def timed(name: str, size: str, dtype: str) -> dict:
    """Block's step as a timing has it."""
    sizes = json.loads((BENCHMARKS / name).read_text("utf-8"))["sizes"]
    return sizes[size][dtype]["variants"]["block (8 blocks)"]


def ratio(timed: dict) -> str:
    """A ratio to the plain model's time with its quartiles."""
    low, high = timed["ratio_quartiles"]
    return f"{timed['ratio']:.2f} ({low:.2f} to {high:.2f})"


def evidence() -> list[str]:
    """README's table of evidence: differences in loss, and tokens saved where whole schedules or curves give them."""
    nano = [*finals("lasting_seeds"), *finals("lasting_runs")]
    (*_, first), (*_, last) = saved_at_42m()[0], saved_at_42m()[-1]
    budgets = {size: [saved for _, saved, far, _ in saved_by_budget(size) if not far] for size in PARAMETERS}
    tuned = Recipe(fine_tuned()).effect("block-num_blocks4", "standard")
    saved = {size: f"{min(found):.2f} to {max(found):.2f}, growing with the budget" for size, found in budgets.items()}
    rows = [
        (
            "194 M to 528 M ([paper](https://arxiv.org/abs/2603.15031))",
            "39 B to 119 B",
            "1 each",
            "−0.020 to −0.026",
            "1.25",
        ),
        (
            "42 M",
            "49 M",
            "2",
            cell(Recipe(finals("one_gpu")).effect("block", "standard")),
            f"{first:.2f} to {last:.2f}",
        ),
        ("2.9 M", "10 M", "3", cell(Recipe(nano).effect("block", "standard")), saved["nano"]),
        ("0.9 M", "4 M", "6", cell(Recipe(micro()).effect("block", "standard")), saved["micro"]),
        ("2.9 M, pretrained, converted, trained on", "1 M", "3", cell(tuned), "–"),
    ]
    head = ["| parameters | tokens | Block's runs | Block − baseline | tokens saved, times |", "|---|---|---|---|---|"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def cost() -> list[str]:
    """README's table of cost."""

    def read(name: str) -> dict:
        return json.loads((BENCHMARKS / name).read_text("utf-8"))

    cpu, small, graphs = read("step_cpu_plain.json"), read("step_cpu_nano.json"), read("decode_graphs_cuda.json")
    gpu, compiled = (read(f"step_100m{name}_cuda.json")["sizes"]["100m"]["bf16"] for name in ("", "_compiled"))
    block = "block (8 blocks)"
    rows = [
        ("training step, 12 layers of width 256", cpu["fp32"]["device"], cpu["fp32"]["variants"][block]),
        ("training step, 2.9 M parameters", "the same", small["sizes"]["nano"]["fp32"]["variants"][block]),
        ("**training step, 42 M parameters**", f"one {gpu['device']}", gpu["variants"][block]),
        ("the same, compiled", "the same", compiled["variants"][block]),
        ("prefill of 8,192 tokens, 0.6 B", "the same", graphs["prefill"]["8192"]["block"]),
        ("decoding, 0.6 B, CUDA graphs", "the same", graphs["decode"]["1"]["block"]),
        ("decoding, 2.9 M parameters", cpu["fp32"]["device"], read("decode_nano_fp32.json")["decode"]["1"]["block"]),
    ]
    head = ["| what | on | time |", "|---|---|---|"]
    return head + [f"| {what} | {device} | {ratio(timed)} |" for what, device, timed in rows]


def marked(path: Path) -> str:
    """README or the guide with today's tables between its marks."""
    bands, text = saved_at_42m(), path.read_text("utf-8")
    today = who([factor for *_, factor in bands], bands, saved_by_budget("nano")[-2])
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
    return ["| beside | difference | the interval |", "|---|---|---|", *lines]


def who(factors: list[float], bands: list[tuple[float, float, float]], last: tuple) -> list[str]:
    """Who should use it, and who should not, today: the lines above everything, of the guide as well."""
    tuned = Recipe(fine_tuned()).effect("block-num_blocks4", "standard")
    cpu, gpu = timed("step_cpu_nano.json", "nano", "fp32"), timed("step_100m_cuda.json", "100m", "bf16")
    return [
        "**Use it today** if you train from scratch and tokens are what you lack: `block` with its defaults needed",
        f"{min(factors):.2f} to {max(factors):.2f} times fewer from {bands[0][0]:.0f} to {bands[-1][1]:.0f} M tokens "
        f"at 42 M parameters, and {last[1]:.2f} times fewer at {last[0]:.0f} tokens",
        f"a parameter at 2.9 M (one pair); if you train on a CPU (a step costs {ratio(cpu)} times); or if you study "
        "what layers read.",
        f"**Do not use it today** if time on a GPU is what you lack (a step costs {ratio(gpu)} times at 42 M,",
        f"more than the tokens saved); to improve a finished model ({cell(tuned)} nats); or on the word of",
        "this page above 42 M parameters, where nothing was trained here.",
    ]


def page() -> str:
    """The page."""
    small, runs42 = micro(), finals("one_gpu")
    recipe = Recipe(small)
    bands, budgets = saved_at_42m(), {size: saved_by_budget(size) for size in PARAMETERS}
    factors = [factor for *_, factor in bands]
    nano = [*finals("lasting_seeds"), *finals("lasting_runs")]
    studies = "docs/data/studies/micro/{rivals,ablations,noise}/runs.csv, docs/data/processors_micro.csv"
    file42 = "docs/data/one_gpu/curves.csv"
    first = [
        question("Is the loss lower at the end? 0.9 M", small, studies, ("block", "standard"), PUBLISHED),
        question(
            "the same, 2.9 M", nano, "docs/data/lasting_{seeds,runs}/curves.csv", ("block", "standard"), PUBLISHED
        ),
        question("the same, 42 M, rates untuned", runs42, file42, ("block", "standard"), PUBLISHED),
        question("Full beside Block, 0.9 M", small, studies, ("full", "block")),
        question("Full beside weights that no token changes (static mix)", small, studies, ("full", "static_mix")),
        question("Block beside mHC (18 % more parameters)", small, studies, ("block", "mhc")),
        question("the control beside the standard residual", small, studies, ("rescaled", "standard")),
    ]
    at42 = ", ".join(f"{x:.2f}" for *_, x in bands)
    steps = {
        "42 M": timed("step_100m_cuda.json", "100m", "bf16")["ratio"],
        "2.9 M": timed("step_cpu_nano.json", "nano", "fp32")["ratio"],
    }
    cells = [
        "42 M",
        f"{bands[0][0]:.0f} to {bands[-1][1]:.0f} M tokens",
        at42,
        ", ".join(f"{x / more_flops_at_42m():.2f}" for *_, x in bands),
        ", ".join(f"{x / steps['42 M']:.2f}" for *_, x in bands) + " (H200)",
        f"`{file42}`",
    ]
    tokens = [f"| {' | '.join(cells)} |"]
    for size, found in budgets.items():
        budget = ", ".join(f"{per:.1f}" for per, *_ in found)
        fewer = ", ".join(f"{x:.2f}{' (by a fit)' * far}" for _, x, far, _ in found)
        less = ", ".join(f"{work:.2f}" for *_, work in found)
        file = f"docs/data/studies/{size}/budgets/runs.csv"
        of_time = steps.get(PARAMETERS[size], float("nan"))
        clock = ", ".join(f"{x / of_time:.2f}" for _, x, *_ in found) + " (CPU)" if of_time > 0 else "–"
        cells = [PARAMETERS[size], f"{budget} tokens a parameter", fewer, less, clock, f"`{file}`"]
        tokens.append(f"| {' | '.join(cells)} |")
    tuned = Recipe(fine_tuned())
    retrofit = [
        (what, tuned.effect(name, "standard"))
        for what, name in (
            ("exact conversion (block), 500 steps", "block-num_blocks4"),
            ("the cumulative layout, 500 steps and still falling", "cumulative-block_size1"),
        )
    ]
    newest_a, newest_m, first_a, first_m = inside()
    last = budgets["nano"][-2]
    gpu, compiled = (step(f"step_100m{name}_cuda.json", "100m", "bf16") for name in ("", "_compiled"))
    power = json.loads((DATA / "power_micro.json").read_text("utf-8"))["results"]["own standard deviations"]
    wrong = list(power["false positives"].values())
    lines = [
        "# Should I use Attention Residuals?",
        "",
        *who(factors, bands, last),
        "",
        "Written by `python experiments/results_page.py` from the files named; losses in nats per "
        "held-out token, 95 % intervals.",
        "",
        "| question | difference | from | the interval | file |",
        "|---|---|---|---|---|",
        *first,
        "",
        "**Tokens saved at equal loss** (does it fade? in nats at 42 M yes, in tokens no). At 42 M read "
        "inside one schedule, a lower",
        "bound, two pairs; below it one pair a size of whole schedules. Compute: the extra FLOPs paid; time: by the "
        "ratio of a step below.",
        "",
        "| size | at | tokens, times fewer | compute, times less | time, times less | file |",
        "|---|---|---|---|---|---|",
        *tokens,
        "",
        "**What a step costs**, beside the plain model, quartiles in brackets: "
        f"{step('step_cpu_nano.json', 'nano', 'fp32')} in fp32; {gpu}; compiled {compiled}",
        "(`benchmarks/results/step_{cpu_nano,100m_cuda,100m_compiled_cuda}.json`). Where that exceeds "
        "the tokens saved, the clock loses.",
        "",
        "**What to set, other rules** (0.9 M; looked at together, by Holm; files as in the first table)",
        "",
        *settings(),
        "",
        "**Retrofit** of a trained 2.9 M model (`docs/data/finetune_layouts/curves.csv`): "
        + "; ".join(f"{what} {cell(effect)}" for what, effect in retrofit)
        + ".",
        f"**Inside** (42 M, `docs/data/one_gpu/reads.csv`): the newest source has {newest_a:.1f} "
        f"(attention) and {newest_m:.1f} (MLP) "
        f"times an even share of the weight, the embedding {first_a:.2f} and {first_m:.2f}.",
        "",
        f"**Studies**: {' · '.join(f'[{text}]({name}.md)' for name, text in PAGES.items())} · [all claims](claims.md).",
        "**What nobody knows**: a step's cost at 0.6 B; tokens saved above 42 M, or above 3 M at more "
        "than 1.2 tokens a parameter; the best",
        "rates at 42 M; published gains at 194 to 528 M (−0.020 to −0.026) are of one run each.",
        f"**The rule**: loss = mechanism + seed over all runs of a recipe (0.9 M: {len(small)} runs, "
        f"sigma {recipe.sigma:.4f}, "
        f"{recipe.degrees} degrees), Student's t,",
        "Welch where variances differ, small ones drawn up to the others'. The first table was asked beforehand, at "
        "5 % each: of simulated studies without "
        f"a difference {min(wrong):.2f} to {max(wrong):.2f} exclude 0; Holm's",
        f"list errs somewhere in {power['any false positive of the others, by Holm']:.2f}: read it as a hint "
        "(`docs/data/power_micro.json`).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(PAGE).parent.mkdir(exist_ok=True)
    write_text(PAGE, page())
    for path in (README, GUIDE):
        write_text(path, marked(path))
