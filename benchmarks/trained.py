"""Tables of docs/results/one_gpu.md, from the rows of `round.py`'s training runs."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from round import Training

    from attnres.stats import Effect

Row = dict[str, Any]
BLOCK = "block:num_blocks=8"
TABLE: Mapping[str, tuple[str, str]] = {
    "standard": ("", "3.444, 3.199, 2.841, 2.475"),
    BLOCK: ("", "–"),
    "full": (BLOCK, "−0.041, −0.013, −0.032, –"),
    "static_mix": ("full", "–"),
    "full:weights=sigmoid": ("full", "–"),
    "full:key_norm=false": ("full", "–"),
    f"{BLOCK},heads=4": (BLOCK, "–"),
    "full:window=8": ("full", "–"),
    "full:query=input": ("full", "–"),
    "mhc": (BLOCK, "−0.062, −0.050, −0.040, −0.029"),
    "denseformer": ("", "–"),
    "muddformer": ("", "−0.112, −0.070, diverged, –"),
    "muddformer:prepost_norm=true": ("muddformer", "–, −0.065, −0.071, −0.061"),
    "dca": ("", "–"),
    "inkling2": ("", "–"),
    f"{BLOCK},block_sum=rms": (BLOCK, "–"),
    "full:keys=sliced:64": ("full", "–"),
}
"""Table 4 and the rivals: rule -> the rule that it is compared with besides the standard residual; at 38, 85, 304 M,
1.2 B the loss of hyper-connection-factory's baseline, and what its rule adds to that (commit cb51c55). A rule that is
not there yet, or not under this name, is passed over with a row."""
SCORES = {
    "wikitext2": ("bits_per_byte", "WikiText-2, bits a byte"),
    "lambada": ("acc", "LAMBADA, accuracy"),
    "hellaswag": ("acc_norm", "HellaSwag, accuracy by characters"),
}
"""Task -> which of its figures the page has."""
RATES = ("rates, `--only`", "loss", "runs", "minus standard")
SIZES = (
    *("sizes, `--only`", "tokens a parameter, wanted", "reached", "loss", "runs", "minus standard"),
    *("tokens saved, times, by seed", "compute saved"),
)
RULES = (
    *("rules, `--only`", "loss", "runs", "minus standard", "minus another rule"),
    "hyper-connection-factory, 38, 85, 304 M, 1.2 B",
)
LOOKED_AT = (
    *("looked at, `--only`", *(label for _, label in SCORES.values()), "newest source: attention, MLPs"),
    *("it weighs most in", "embedding: attention, MLPs", "outputs, last quarter over first"),
)
PAPER = (
    *("[paper](https://arxiv.org/abs/2603.15031), 194 to 528 M", "", "about 200", "", "1 each", "−0.020 to −0.026"),
    *("", "1.25, by its fit"),
)
UNMEASURED = "not measured"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])


def training_page(rows: Sequence[Row], runs: Mapping[str, "Training"]) -> str:
    """Return the tables of training runs by rate, by size and by rule, and of the largest models' scores and reads;
    "not measured" where there is no row."""
    made = Trained(rows, runs)
    rates = [[label, *made.loss(names), made.gain(names)] for label, names in made.by_label("rates").items()]
    sizes = [
        [label, *made.tokens(names), *made.loss(names), made.gain(names), *made.saved(runs[names[0]])]
        for label, names in made.by_label("ladder").items()
    ]
    effects, rules = made.judged(), list[list[str]]()
    for label, names in made.by_label("table").items():
        rule = runs[names[0]].variant
        other, published = TABLE[rule]
        beside = told(effects.get((rule, other)))
        differences = told(effects.get((rule, "standard"))), beside and f"`{other}`: {beside}"
        rules.append([label, *made.loss(names), *differences, published])
    looked_at = [[f'`"{name}"`', *made.looked_at(name)] for name, run in runs.items() if run.looked_at]
    tables = (RATES, rates), (SIZES, [*sizes, PAPER]), (RULES, rules), (LOOKED_AT, looked_at)
    return "\n\n".join(table(*each) for each in tables)


class Trained:
    """Training runs and all that the rows say of each. A loss is held out, after the last step."""

    def __init__(self, rows: Sequence[Row], runs: Mapping[str, "Training"]) -> None:
        self.runs, self.rows = runs, {name: Row() for name in runs}
        for row in rows:
            if row["round"] in runs:
                self.rows[row["round"]].update(row)

    def by_label(self, kind: str) -> dict[str, list[str]]:
        """Return what stands for the runs of "rates", "ladder" or "table", and their names, one for each seed."""
        found: dict[str, list[str]] = {}
        for name in sorted((each for each in self.runs if each.split()[1] == kind), key=self._place):
            found.setdefault(f'`"{name.partition(" seed ")[0]}"`', []).append(name)
        return found

    def _place(self, name: str) -> tuple[Any, ...]:
        run, rules = self.runs[name], [*TABLE]
        return run.size, rules.index(run.variant) if " table " in name else 0

    def finished(self, run: "Training") -> list[tuple[str, int, Row]]:
        """Return rule, seed and row of each finished run of the same recipe."""
        every = [(each, self.rows[name]) for name, each in self.runs.items() if each.recipe == run.recipe]
        return [(each.variant, each.seed, row) for each, row in every if row.get("final_loss")]

    def effect(self, run: "Training", other: str) -> "Effect | None":
        """Return how a run's rule differs from another by all runs of the recipe; None where one of them has none."""
        from attnres.stats import Recipe

        losses = [(rule, seed, row["final_loss"]) for rule, seed, row in self.finished(run)]
        both = run.variant != other and {run.variant, other} <= {rule for rule, *_ in losses}
        return Recipe(losses).effect(run.variant, other) if both else None

    def judged(self) -> dict[tuple[str, str], "Effect"]:
        """Return the differences of `TABLE`: questions that were asked beforehand at 5 %, all others together."""
        from attnres.stats import QUESTIONS, judged

        beforehand = [{BLOCK if rule == "block" else rule for rule in pair} for pair in QUESTIONS]
        pairs = [(rule, base) for rule, (other, _) in TABLE.items() for base in ("standard", other) if base]
        others = sum(rule != base and {rule, base} not in beforehand for rule, base in pairs)
        run = next(run for name, run in self.runs.items() if " table " in name)
        effects = {(rule, base): self.effect(replace(run, variant=rule), base) for rule, base in pairs}
        known = {pair: effect for pair, effect in effects.items() if effect is not None}
        planned = [{*pair} in beforehand for pair in known]
        return dict(zip(known, judged([*known.values()], planned, others), strict=True))

    def loss(self, names: Sequence[str]) -> list[str]:
        """Return the cells of a rule's mean loss over seeds and of their number, or why there is none."""
        run = self.runs[names[0]]
        losses = [row["final_loss"] for rule, _, row in self.finished(run) if rule == run.variant]
        if losses:
            return [f"{statistics.mean(losses):.3f}", str(len(losses))]
        return [next((state for state in map(self.state, names) if state != UNMEASURED), UNMEASURED), ""]

    def state(self, name: str) -> str:
        """Return why a run has no figures."""
        row = self.rows[name]
        return "passed over" if "passed_over" in row else row.get("ended", UNMEASURED)

    def gain(self, names: Sequence[str]) -> str:
        """Return the cell of a rule's difference from the standard residual."""
        return told(self.effect(self.runs[names[0]], "standard"))

    def tokens(self, names: Sequence[str]) -> list[str]:
        """Return the cells of the tokens a parameter that were wanted, and that were reached: the text has an end."""
        reached = [
            f"{row['tokens_a_parameter']:.1f}" for name in names if "tokens_a_parameter" in (row := self.rows[name])
        ]
        return [f"{self.runs[names[0]].tokens_a_parameter}", ", ".join(dict.fromkeys(reached))]

    def saved(self, run: "Training") -> list[str]:
        """Return the cells of tokens and of compute saved at the lowest loss that a rule and the standard residual have
        both reached, seed by seed."""
        from attnres.savings import LossCurve, saving

        curves = {(rule, seed): LossCurve(row["val"]) for rule, seed, row in self.finished(run)}
        seeds = [seed for rule, seed in curves if rule == run.variant != "standard" and ("standard", seed) in curves]
        found = [saving(curves[run.variant, seed], curves["standard", seed]) for seed in seeds]
        ratio = run.more_flops() if found else 1.0
        factors = [each.tokens for each in found], [each.of_compute(ratio) for each in found]
        return [", ".join(f"{factor:.2f}" for factor in each) for each in factors]

    def looked_at(self, name: str) -> list[str]:
        """Return the cells of a model's scores, and of what its reads and outputs are by depth."""
        row, state = self.rows[name], self.state(name)
        figures = [row["scores"][task][key] for task, (key, _) in SCORES.items()] if "scores" in row else []
        scores = [f"{each['value']:.3f} ± {each['standard_error']:.3f}" for each in figures] or [state, "", ""]
        inside = by_depth(self.runs[name].variant, row["by_depth"]) if "by_depth" in row else [state, "", "", ""]
        return scores + inside


def by_depth(variant: str, made: Row) -> list[str]:
    """Return the cells of Figures 8 and 5: of reads from the third layer on, where there is a choice, the weight of the
    newest source and of the embedding times the number of sources (attention, MLPs) and how often the newest has the
    largest; the median size of the outputs in the last quarter of the depth over that in the first."""
    rms = made["output_rms"]
    quarter = len(rms) // 4
    growth = f"{statistics.median(rms[-quarter:]) / statistics.median(rms[:quarter]):.2f}"
    if variant == "standard":
        return ["–", "–", "–", growth]
    reads = list(zip(made["routing"]["reads"], made["routing"]["weights"], strict=True))
    kinds = [
        [weights for name, weights in reads if name.startswith(kind) and int(name.split()[1]) > 1]
        for kind in ("attention", "mlp")
    ]
    newest, first = (
        ", ".join(f"{statistics.mean(weights[place] * len(weights) for weights in kind):.2f}" for kind in kinds)
        for place in (-1, 0)
    )
    largest = [weights[-1] == max(weights) for kind in kinds for weights in kind]
    return [newest, f"{sum(largest)} of {len(largest)}", first, growth]


def told(effect: "Effect | None") -> str:
    """Return the cell of a difference."""
    return "" if effect is None else effect.text
