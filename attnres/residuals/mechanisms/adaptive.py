"""Learned block boundaries: a gate after each layer decides how far a block ends there."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.residuals.layout import About, Learned
from attnres.residuals.mechanisms.boundary import Boundary
from attnres.residuals.mechanisms.weighting import weighted_sum
from attnres.residuals.settings import number, one_of, positive, start_at

SCHEDULES: dict[str, Callable[[float, float, Tensor], Tensor]] = {
    "linear": lambda first, last, part: first + (last - first) * part,
    "cosine": lambda first, last, part: last + (first - last) * (1 + torch.cos(math.pi * part)) / 2,
    "exponential": lambda first, last, part: first * (last / first) ** part,
    "none": lambda first, last, part: torch.full_like(part, first),
}
"""Temperature schedules, functions of the start and end temperature and the fraction of the annealing that is over, 0
to 1."""


class Adaptive(Boundary):
    """As `boundary`, but a block may end after every layer l = 1 .. M, to the degree that a gate g_l in (0, 1) is open:

        x <- sum_{i <= l} a_i e_i,   a = softmax_i( w_l . (k_l * e_i / rms(e_i)) + [i < l] log(g_i g_l) )
        g_l = sigmoid(b_l / t + s),   g_0 = g_M = 1,   penalty = target_weight (sum_{0<l<M} sigmoid(b_l / t) - target)^2

    e_0 is the embedding, e_i the stream after layer i. A state with a closed gate gets no weight in later reads, and
    its own read does not change the stream; with gates of 0 and 1 this is `boundary` with blocks that end where gates
    are 1.

    Args:
        target_count: target of the penalty for the sum of the M - 1 gates; by default 4, or M - 1 if that is less.
        least_count: lower bound of that sum: s >= 0 is the smallest common shift of all gates that satisfies it.
        gate_init: start value of each b_l; -2 is a gate of 0.40 at t = 5, a positive number starts mostly open.
        schedule: of t, which goes from `temperature_start` to `temperature_end` while training goes from `anneal_start`
            to `anneal_end`: linear, cosine, exponential, or none, which stays at `temperature_start`.

    Source: github.com/aupadhyay/attnres-exp, `residual_mode` adaptive_attnres, for gates, start, annealing and penalty.
    Its read is another one, for these faults: values were multiplied by their gates while keys are normed, so a closed
    source kept its share of the softmax and gave zeros for it; one with a gate below 0.01 was left out, and with it the
    gradient that might open it; how many were left decided which query read; sources were running sums of the stream's
    states and were read once, at the output, so that hard gates are not the blocks that study compares with. And its
    penalty, up to 1.6, is in the validation loss it reports.
    """

    name = "adaptive"
    about = About(
        "as boundary after each layer, log(g_i g_l) on the logits, g = sigmoid(b / t), t annealed",
        "w = 0, b = -2",
        "3 + L/8",
        "after github.com/aupadhyay/attnres-exp",
    )
    progress: Tensor

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        target_count: float | None = None,
        target_weight: float = 0.1,
        least_count: float = 0.0,
        gate_init: float = -2.0,
        schedule: str = "linear",
        temperature_start: float = 5.0,
        temperature_end: float = 0.1,
        anneal_start: float = 0.2,
        anneal_end: float = 0.7,
        key_norm_eps: float = 1e-6,
    ) -> None:
        gates = math.ceil(num_sublayers / 2) - 1
        super().__init__(num_sublayers, width, num_blocks=gates + 1, key_norm_eps=key_norm_eps)
        target = min(4, gates) if target_count is None else target_count
        self.target_count = number("target_count", target, 0, gates)
        self.least_count = number("least_count", least_count, 0, self.target_count)
        if gates and self.least_count == gates:
            raise UserError(
                f"least_count is {least_count}, the number of all gates: use residual boundary with block_size 2"
            )
        self.target_weight = number("target_weight", target_weight, 0)
        self.gate_init = number("gate_init", gate_init)
        self.schedule = one_of("schedule", schedule, list(SCHEDULES))
        self.first = positive("temperature_start", temperature_start)
        self.last = positive("temperature_end", temperature_end)
        self.begin, self.end = number("anneal_start", anneal_start, 0, 1), number("anneal_end", anneal_end, 0, 1)
        if self.begin >= self.end:
            raise UserError(f"anneal_start is {anneal_start} and anneal_end {anneal_end}: the end must come later")
        self.logit = nn.Parameter(torch.empty(gates))
        self.register_buffer("progress", torch.empty(()))
        self.init_parameters()

    def init_parameters(self) -> None:
        super().init_parameters()
        start_at(self.logit, torch.full_like(self.logit, self.gate_init))
        nn.init.zeros_(self.progress)

    def set_progress(self, fraction: float) -> None:
        self.progress.fill_(fraction)

    @property
    def temperature(self) -> Tensor:
        """Return t, a scalar."""
        return SCHEDULES[self.schedule](
            self.first, self.last, ((self.progress - self.begin) / (self.end - self.begin)).clamp(0, 1)
        )

    @property
    def opening(self) -> Tensor:
        """Return b / t + s, (M - 1,), the argument of the gates' sigmoid."""
        opening = self.logit / self.temperature
        return _lifted(opening, self.least_count) if self.least_count else opening

    def penalty(self) -> Tensor:
        # without s: a sum held at its bound would have no gradient
        count = torch.sigmoid(self.logit / self.temperature).sum()
        return self.target_weight * (count - self.target_count).square()

    def mix(self, sources: tuple[Tensor, ...], block: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        dtype = compute_dtype(sources[0].dtype)
        with full_precision(sources[0]):
            gates = F.logsigmoid(self.opening).to(dtype)
            held = F.pad(gates[:block], (1, 0)) + (gates[block] if block < len(gates) else 0.0)
            query = self.queries[block].to(dtype) * self.gains[block].to(dtype)
            values = [source.to(dtype) for source in sources]
            logits = [(v @ query) * (v.square().mean(-1) + self.key_norm_eps).rsqrt() for v in values]
            logits[:-1] = [logit + bias for logit, bias in zip(logits, held)]
            weights = torch.stack(logits).softmax(0)
            h = weighted_sum(values, weights.unsqueeze(-1))
        return h.to(sources[0].dtype), weights.detach(), sources

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        gates = torch.sigmoid(self.opening).float().cpu()
        return {
            "gates": Learned(gates, ("layer",), "gate of a block's end"),
            "boundaries": Learned(gates.sum(), (), "sum of the gates"),
            "temperature": Learned(self.temperature.float().cpu(), (), "temperature of the gates"),
        }


def _lifted(opening: Tensor, least: float) -> Tensor:
    """Return `opening` + s with the least s >= 0 for which sum sigmoid(opening + s) >= `least`, found by bisection; its
    gradient is that of s as a function of `opening`, ds = - sum_l p_l d opening_l, p in proportion to sigmoid'."""
    with torch.no_grad():
        even = math.log(least / (len(opening) - least))  # the gates' argument if `least` is spread evenly
        low, high = even - opening.max(), even - opening.min()
        for _ in range(50):
            middle = (low + high) / 2
            enough = torch.sigmoid(opening + middle).sum() >= least
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        gates = torch.sigmoid(opening + high)
        slopes = gates * (1 - gates)
        shares = slopes / slopes.sum().clamp_min(torch.finfo(slopes.dtype).tiny)
    shift = high - (shares * (opening - opening.detach())).sum()
    return opening + shift.clamp_min(0.0)
