"""Structured labels and random labels, with and without the norm, and teachers with several query temperatures."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from attnres.stats import Effect, Recipe, judged, or_none
from attnres.text import UNKNOWN, listed, run_name
from lab.charts import Curves, Line
from lab.contrast import ratio_interval
from lab.design import Arm, Computed, ComputedCall, Design, Measured, ResultTable, Setting, StudyResult
from lab.studies.growth import Mlps

WIDTH, SAMPLES = 32, 512
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
RATES = (0.001, 0.003, 0.01, 0.03)
TEMPERATURES = (0.01, 1.0, 100.0)
MECHANISMS = ("standard", "rescaled", "full")
OPERATIONS = 30
"""PyTorch operations in a step, forward and backward, for a sublayer and its norm."""
OPERATIONS_A_SOURCE = 3
"""The same for each source of each read."""


def mixture(residual: str, norm: bool, layers: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Train on y = alpha (W x) + (1 - alpha) noise for each alpha, at each learning rate of Adam.

    Returns:
        Rows `loss/ALPHA`: the lowest final training loss over the learning rates (mean squared error / variance of y).
    """
    rows = []
    for alpha in ALPHAS:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, WIDTH, generator=draw)
        teacher = torch.randn(WIDTH, WIDTH, generator=draw) / math.sqrt(WIDTH)
        y = alpha * (x @ teacher) + (1 - alpha) * torch.randn(SAMPLES, WIDTH, generator=draw)
        losses = [_fit(residual, norm, layers, x, y, rate, steps, seed) for rate in RATES]
        rows.append({"quantity": f"loss/{alpha:g}", "value": min(losses)})
    return rows


def taught(residual: str, layers: int, temperature: float, steps: int, seed: int) -> list[dict[str, Any]]:
    """Train on the outputs of a random Full network with queries drawn at 1 / temperature, at each learning rate of
    Adam.

    Returns:
        Rows `loss/RATE` as in `mixture`; infinite for a run that diverged.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=draw)
    teacher = Mlps("full", layers, WIDTH, norm=True, generator=draw)
    with torch.no_grad():
        teacher.residual.query.normal_(0, 1 / temperature / math.sqrt(WIDTH), generator=draw)
        y = teacher(x)
    rates = {rate: _fit(residual, True, layers, x, y, rate, steps, seed) for rate in RATES}
    return [{"quantity": f"loss/{rate:g}", "value": loss} for rate, loss in rates.items()]


def _fit(
    residual: str, norm: bool, layers: int, x: torch.Tensor, y: torch.Tensor, rate: float, steps: int, seed: int
) -> float:
    """Return the final training loss with full batches, relative to the variance of y."""
    net = Mlps(residual, layers, WIDTH, norm=norm, generator=torch.Generator().manual_seed(seed + 1))
    head = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    optimizer = torch.optim.Adam([*net.parameters(), head], lr=rate)
    scale = float(y.var())
    loss = torch.tensor(math.inf)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = F.mse_loss(net(x) @ head, y) / scale
        if not torch.isfinite(loss):
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request mixtures of labels at three depths with and without the norm; and teachers at three temperatures."""
    steps = max(2, round(20_000 * setting.preset.small))
    small = setting.preset.small < 0.01
    depths, mechanisms = ((2,), MECHANISMS[:2]) if small else ((4, 10, 30), MECHANISMS)
    mixtures, teachers = dict[str, ComputedCall](), dict[str, ComputedCall]()
    for seed in range(setting.seeds):
        for layers, norm, residual in itertools.product(depths, (True, False), mechanisms):
            name = run_name(f"{residual}, {layers} layers, {'norm' if norm else 'no norm'}", seed)
            arguments = {"residual": residual, "norm": norm, "layers": layers, "steps": steps, "seed": seed}
            mixtures[name] = _call(len(ALPHAS), arguments)
        for temperature, residual in itertools.product(TEMPERATURES, MECHANISMS):
            arguments = {"residual": residual, "layers": depths[-1], "temperature": temperature}
            teachers[run_name(f"{residual}, T {temperature:g}", seed)] = _call(
                1, {**arguments, "steps": steps, "seed": seed}
            )
    return [
        Arm("mixtures", computed=Computed(f"{__name__}:mixture", mixtures)),
        Arm("teachers", computed=Computed(f"{__name__}:taught", teachers)),
    ]


def _call(fits: int, arguments: dict[str, Any]) -> ComputedCall:
    """Return a run with this number of fits at each learning rate."""
    layers, steps = arguments["layers"], fits * len(RATES) * arguments["steps"]
    sources = layers * (layers + 1) / 2 if arguments["residual"] == "full" else 0
    calls = OPERATIONS * layers + OPERATIONS_A_SOURCE * sources
    return ComputedCall(arguments, 6.0 * 2 * WIDTH**2 * SAMPLES * layers * steps, float(calls * steps))


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Compare Full and rescaled with standard: at each alpha and depth, whether structure or memorisation favours
    either; for teachers at each learning rate."""
    kinds = list(dict.fromkeys(label.partition(", ")[2] for label in measured.labels("mixtures")))
    panels = {"norm": dict[str, list[Line]](), "no norm": dict[str, list[Line]]()}
    for kind in kinds:
        lines = []
        for name in MECHANISMS:
            each = [_logs(measured, "mixtures", f"{name}, {kind}", f"{alpha:g}") for alpha in ALPHAS]
            if all(each):
                lines.append(Line(name, ALPHAS, [math.exp(statistics.fmean(many.values())) for many in each]))
        if lines:
            panels[kind.partition(", ")[2]][kind] = lines
    caption = (
        "Training loss at the end over the variance of the labels, best of four rates; mean over seeds of its log."
    )
    titles = {"norm": "Structure to memorisation", "no norm": "The same without norms"}
    charts = [
        Curves(f"mixtures-{norm}".replace(" ", "-"), titles[norm], caption, "alpha", "loss", drawn, log_y=True)
        for norm, drawn in panels.items()
        if drawn
    ]
    students = measured.labels("teachers")
    taught_rows = [[label, *(_taught_cell(measured, label, rate) for rate in RATES)] for label in students]
    tables, sentences, values = [], [], {}
    for arm, (title, first, unit, places) in QUESTIONS.items():
        cells = _cells(measured, arm, places)
        head = [first, "residual", *(f"{unit}{place:g}" for place in places)]
        tables.append(ResultTable(title, head, _rows(cells, places), [NOTE]))
        for name in dict.fromkeys(one.name for one in cells):
            sentences.append(_sentence(arm, name, [one for one in cells if one.name == name]))
        values |= {
            f"{one.name}, {one.kind}/{one.place:g}": {"ratio": or_none(one.ratio), "interval": one.words}
            for one in cells
        }
    head = ["student, teacher's T", *map(str, RATES)]
    tables.insert(1, ResultTable("Taught by a random Full network", head, taught_rows))
    return StudyResult(" ".join(sentences) or "Nothing has run yet.", tables, charts, values)


QUESTIONS = {
    "mixtures": (
        "Loss over standard's by alpha (1: structure, 0: memorisation), best of four rates",
        "network",
        "alpha ",
        ALPHAS,
    ),
    "teachers": ("Loss of students over standard's by rate", "teacher", "", RATES),
}
"""Arm -> the title of its table, the headings of its first and its other columns, and the subject of these."""
NOTE = (
    "In brackets the interval of the ratio, all of the table together by Holm, by the noise of seeds there. Networks "
    "that diverged are left out; where more of a mechanism did than of standard it is not called below, where more of "
    "standard did not above."
)


@dataclass(frozen=True)
class Cell:
    """A mechanism compared with the baseline in one network (`kind`) at one place, an alpha or a learning rate.

    Attributes:
        effect: the logarithm of the ratio of their losses; None if all runs diverged.
        diverged: number of the mechanism's networks that diverged and are left out. more: how many more than of the
            baseline's.
    """

    kind: str
    name: str
    place: float
    effect: Effect | None
    diverged: int
    more: int

    @property
    def ratio(self) -> float:
        return math.nan if self.effect is None else math.exp(self.effect.difference)

    @property
    def words(self) -> str:
        """Return on which side of 1 the interval of the ratio lies."""
        if self.effect is None or not self.effect.excludes():
            return "includes 1"
        below = self.effect.difference < 0
        if (below and self.more > 0) or (not below and self.more < 0):
            return "others diverged"  # the remaining runs are those that happened not to diverge
        return "below 1" if below else "above 1"

    def __str__(self) -> str:
        lost = f", {self.diverged} diverged" if self.diverged else ""
        if self.effect is None:
            return lost.removeprefix(", ")
        bounds = ratio_interval(self.effect)
        return f"{self.ratio:.2g}{f' ({bounds})' * bool(bounds)}{lost}"


def _cells(measured: Measured, arm: str, places: Sequence[float]) -> list[Cell]:
    """Return the comparison of every mechanism with the baseline at all places where both have run."""
    baseline = MECHANISMS[0]
    asked = [label.partition(", ") for label in measured.asked_for(arm)]
    tested = len(places) * sum(name != baseline for name, _, _ in asked)
    cells = list[Cell]()
    for kind, place in itertools.product(dict.fromkeys(kind for _, _, kind in asked), places):
        labels = {name: f"{name}, {kind}" for name in MECHANISMS}
        logs = {name: _logs(measured, arm, label, f"{place:g}") for name, label in labels.items()}
        lost = {name: len(measured.diverged(arm, label, f"loss/{place:g}")) for name, label in labels.items()}
        runs = [(name, seed, value) for name, each in logs.items() for seed, value in each.items()]
        recipe = Recipe(runs) if logs[baseline] else None
        for name in MECHANISMS:
            known = recipe is not None and name != baseline and name in recipe.names
            if known or (name != baseline and lost[name]):
                effect = recipe.effect(name, baseline) if known and recipe is not None else None
                cells.append(Cell(kind, name, place, effect, lost[name], lost[name] - lost[baseline]))
    told = [cell for cell in cells if cell.effect is not None]
    effects = iter(judged([cell.effect for cell in told if cell.effect is not None], [False] * len(told), tested))
    return [cell if cell.effect is None else dataclasses.replace(cell, effect=next(effects)) for cell in cells]


def _rows(cells: Sequence[Cell], places: Sequence[float]) -> list[list[str]]:
    """Return a row for each network and mechanism."""
    by_place = {(one.kind, one.name, one.place): str(one) for one in cells}
    names = dict.fromkeys((one.kind, one.name) for one in cells)
    return [[*name, *(by_place.get((*name, place), UNKNOWN) for place in places)] for name in names]


def _sentence(arm: str, name: str, cells: Sequence[Cell]) -> str:
    """Return the sentence about a mechanism that its cells support."""
    parts = []
    for words in ("below 1", "above 1"):
        places = dict[str, list[str]]()
        for cell in cells:
            if cell.words == words:
                places.setdefault(cell.kind, []).append(f"{cell.place:g}")
        where = [f"{kind} ({', '.join(each)})" for kind, each in places.items()]
        parts.append(f"{words.removesuffix(' 1')} at {listed(where) if where else 'none'}")
    left = sum(cell.words not in ("below 1", "above 1") for cell in cells)
    return f"{name} beside {MECHANISMS[0]}, {arm}: {'; '.join(parts)}; not told at {left} of {len(cells)}."


def _taught_cell(measured: Measured, label: str, rate: float) -> str:
    """Return the mean loss of the students that did not diverge, and how many diverged."""
    logs = _logs(measured, "teachers", label, f"{rate:g}")
    lost = len(measured.diverged("teachers", label, f"loss/{rate:g}"))
    mean = f"{math.exp(statistics.fmean(logs.values())):.2g}" if logs else ""
    return ", ".join(filter(None, (mean, f"{lost} of {lost + len(logs)} diverged" * bool(lost)))) or UNKNOWN


def _logs(measured: Measured, arm: str, label: str, place: str) -> dict[int, float]:
    """Return the logarithms of a loss by seed, for seeds that did not diverge."""
    return {row.seed: math.log(max(row.value, 1e-12)) for row in measured.of(arm, label, f"loss/{place}")}


STUDY = Design(
    "structured-vs-memorised",
    "Does depth attention fit structure and fail to memorise?",
    "Networks of MLPs on labels between a linear teacher and noise, with and without the norm before each sublayer, "
    "the best of four rates; and students of a random Full network at three temperatures of its queries, at each rate.",
    "Ziming Liu's posts: the first claimed that memorisation favours standard residuals; he withdrew it (his network "
    "had no pre-norm) and found the rescaled residual competitive and steadier at high rates.",
    arms,
    analyse,
)
