"""The blog's three demonstrations with controls: norms that grow with depth, dilution, and the start at zero
queries."""

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnres.residuals import make_residual
from attnres.text import run_name
from lab.charts import Curves, Line
from lab.design import Arm, Computed, ComputedCall, Design, Measured, ResultTable, Setting, StudyResult

EPS = 1e-12


def normed(h: Tensor) -> Tensor:
    """Return h after an RMSNorm without a gain."""
    return F.rms_norm(h, (h.shape[-1],), eps=EPS)


class Mlps(nn.Module):
    """L sublayers W2 relu(W1 x) of width d, connected by a mechanism; with `norm`, every read ends with a norm.

    Args:
        settings: settings of the mechanism. generator: random generator for the weights (normal, scaled by fan-in).
    """

    def __init__(
        self, residual: str, layers: int, width: int, *, norm: bool, generator: torch.Generator, **settings: Any
    ) -> None:
        super().__init__()

        def matrix() -> nn.Parameter:
            return nn.Parameter(torch.randn(layers, width, width, generator=generator) / math.sqrt(width))

        self.first, self.second = matrix(), matrix()
        self.residual: Any = make_residual(residual, layers, width, **settings)
        self.norm = norm
        self.reads: list[float] = []
        self.streams: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) -> (..., d). Without gradients `reads` and `streams` then hold the RMS of each read before its
        norm, and of the state as one vector after each write."""
        self.reads, self.streams = [], []
        state = self.residual("start", x)
        # iterating unbinds the matrices, so that backward stacks their gradients once
        for index, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            read, state = self.residual("read", state, index, self._norm)
            output = F.relu(read @ first) @ second
            state = self.residual("write", state, index, output)
            if not torch.is_grad_enabled():
                self.streams.append(_rms(self.residual.hidden_state(state)))
        return self.residual("finish", state, self._norm)

    def _norm(self, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.reads.append(_rms(h))
        return normed(h) if self.norm else h


def _rms(h: Tensor) -> float:
    return float(h.detach().double().square().mean().sqrt())


# ------------------------------------------------------------------ study


VARIANTS: dict[str, dict[str, Any]] = {
    "standard, no norm": {"residual": "standard", "norm": False},
    "standard": {"residual": "standard", "norm": True},
    "rescaled, no norm": {"residual": "rescaled", "norm": False},
    "rescaled": {"residual": "rescaled", "norm": True},
    "full": {"residual": "full", "norm": True},
    "block": {"residual": "block", "norm": True, "num_blocks": 4},
    "full, queries drawn": {"residual": "full", "norm": True, "query": 1.0},
}


EXPLODES = 10
"""Ratio of two variants' growth above which the difference is called an explosion."""


def grow(
    residual: str, norm: bool, layers: int, width: int, seed: int, query: float = 0.0, **settings: Any
) -> list[dict]:
    """Pass random inputs through a random network of MLPs in fp64.

    Returns:
        Rows `stream` and `read` by depth (RMS after each write, and of each read before its norm); `dilution` (the
        relative change of the output when half of the first sublayer's input weights are removed, divided by that for
        the last sublayer); `from_standard` (the relative distance of the output to the standard residual's with the
        same weights).
    """
    with torch.no_grad():
        net = _network(residual, norm, layers, width, seed, settings)
        if query:
            net.residual.query.normal_(0, query, generator=torch.Generator().manual_seed(seed + 1))
        x = torch.randn(64, width, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
        out = net(x)
        rows = [{"quantity": "stream", "step": i + 1, "value": rms} for i, rms in enumerate(net.streams)]
        rows += [{"quantity": "read", "step": i, "value": rms} for i, rms in enumerate(net.reads)]
        change = []
        for layer in (0, layers - 1):
            kept = net.second[layer].clone()
            net.second[layer] /= 2
            change.append(float((net(x) - out).norm() / out.norm()))
            net.second[layer] = kept
        plain = _network("standard", norm, layers, width, seed, {})(x)
        rows.append({"quantity": "dilution", "value": change[0] / change[1]})
        rows.append({"quantity": "from_standard", "value": float((out - plain).norm() / plain.norm())})
    return rows


def _network(residual: str, norm: bool, layers: int, width: int, seed: int, settings: dict[str, Any]) -> Mlps:
    generator = torch.Generator().manual_seed(seed)
    return Mlps(residual, layers, width, norm=norm, generator=generator, **settings).double()


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request each variant with every seed, which takes seconds at any size."""
    small = setting.preset.small < 0.01
    layers, width = (8, 16) if small else (48, 256)
    flops = 64.0 * 4 * layers * width**2
    runs = {
        run_name(label, seed): ComputedCall({**values, "layers": layers, "width": width, "seed": seed}, flops)
        for seed in range(setting.seeds)
        for label, values in VARIANTS.items()
    }
    return [Arm("growth", computed=Computed("lab.studies.growth:grow", runs))]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Report the growth of each stream, the remaining effect of the first sublayer, and whether zero queries equal the
    standard model."""
    rows, lines, values = [], [], {}
    for label in VARIANTS:
        stream: dict[int, list[float]] = {}
        for row in measured.of("growth", label, "stream"):
            stream.setdefault(row.step, []).append(row.value)
        if not stream:
            continue
        curve = [statistics.fmean(stream[depth]) for depth in sorted(stream)]
        away, dilution = (measured.mean("growth", label, name) for name in ("from_standard", "dilution"))
        lines.append(Line(label, sorted(stream), curve))
        times = curve[-1] / curve[0]
        rows.append([label, f"{curve[0]:.3g}", f"{curve[-1]:.3g}", f"{times:.3g}", f"{dilution:.3g}", f"{away:.1e}"])
        values[label] = {"growth": times, "dilution": dilution, "from_standard": away}
    head = ["variant", "first", "last", "growth", "first sublayer's effect over the last's", "distance to standard"]
    table = ResultTable("The stream, random weights, no training", head, rows)
    if not rows:
        return StudyResult("Nothing has run yet.")
    zero = [values[label]["from_standard"] for label in ("full", "block") if label in values]
    exact = bool(zero) and max(zero) < 1e-6
    sentences = []
    if "standard, no norm" in values and "standard" in values:
        without, with_norm = (values[label]["growth"] for label in ("standard, no norm", "standard"))
        so = ", so it is the missing norm that explodes" if without > EXPLODES * with_norm else ""
        sentences.append(
            f"Without a norm the plain sum grows {without:.3g} times over the depth; with the norm before each "
            f"sublayer {with_norm:.3g} times{so}."
        )
    if zero:
        sentences.append(
            f"Zero queries {'are' if exact else 'are not'} the standard model: Full and Block start {max(zero):.0e} "
            "from it."
        )
    answer = " ".join(sentences) or "Too few variants have run."
    caption = "RMS of the stream after each sublayer of a network of random weights; mean over seeds."
    chart = Curves("growth", "Growth of the stream", caption, "sublayer", "RMS", {"": lines}, log_y=True)
    return StudyResult(answer, [table], [chart], {"variants": values, "zero_start_exact": exact})


STUDY = Design(
    "growth",
    "Do plain residuals explode, dilute, and does depth attention start as one?",
    "Random networks of MLPs, untrained: the size of the stream by depth with and without the norm before each "
    "sublayer, what halving the first and the last sublayer does to the output, and the distance of zero queries to "
    "the standard residual with the same weights.",
    "A blog on the paper shows norms growing from 72 to 730,954 and a zero start, without controls.",
    arms,
    analyse,
)
