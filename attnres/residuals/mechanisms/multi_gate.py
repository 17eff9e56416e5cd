"""Multi-Gate Residuals: a few streams that move towards every output, and a softmax that reads them."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.ops import compute_dtype, full_precision
from attnres.ops.norms import normed_product
from attnres.residuals.base import Residual
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.settings import one_of, positive, start_at, whole
from attnres.residuals.state import as_it_is
from attnres.residuals.watch import NormLike, looking


class MultiGate(Residual):
    """h_l = sum_i a_i s_i,  a = softmax_i( w_l . N(s_i) / sqrt(d) ),  over up to n streams s_i (d,); h_0 = v_0.

    The embedding and the first n - 1 outputs are streams of their own. Each later output f goes into all of them:

        s_i <- (1 - b_i) s_i + b_i f
        independent   b_i = sigmoid( u . N(s_i) / sqrt(d) + c_i )
        competitive   b = softmax( c, u . N(s_1) / sqrt(d), .., u . N(s_n) / sqrt(d) ) without its first entry

    N is an RMSNorm without gain. `read_weight` w is (L, d), for reads 1 to L, `write_weight` u (M, d) for the
    M = L - n + 1 outputs that are mixed in; both start at 0. c is (M, n) or (M,) and starts where every b_i is
    sigmoid(-3) / sqrt(M / 21), so that 21 sublayers have b = .047. Means of means: not the standard residual.

    The publication's start is printed as ln(q - n), q = sqrt(M / 21) (e^3 + 1). That is c of the competitive gate, for
    which it gives b_i = 1 / q exactly; the independent gate has b_i = 1 / q at c = -ln(q - 1). (Another project takes
    the printed term with a minus there, b_i = 1 / (q - n + 1).)

    Source: "Multi-Gate Residuals", arXiv 2605.23259, without code; github.com/swfsql/burn-mamba has the independent
    gate.
    """

    name = "multi_gate"
    traits = Traits(True, sums_to_one=True, has_query=False, starts_standard=False)
    about = About(
        "h_l = sum_i softmax_i(w_l . N(s_i) / sqrt(d)) s_i; s_i = (1 - b_i) s_i + b_i f, b_i = sigmoid(u . N(s_i) / "
        "sqrt(d) + c_i), n streams",
        "w = u = 0, b = sigmoid(-3) / sqrt(M / 21), M = L - n + 1",
        "3n + 2",
        "arXiv 2605.23259",
        "claimed: ahead of full, block and mHC-lite at 0.12 to 0.77 B (no loss or seed found); not measured by us",
    )
    watched_from_start = True

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        num_streams: int = 4,
        gate: Literal["independent", "competitive"] = "independent",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(num_sublayers, width)
        self.num_streams, self.eps = whole("num_streams", num_streams), positive("eps", eps)
        self.competitive = one_of("gate", gate, ("independent", "competitive")) == "competitive"
        mixing = max(0, num_sublayers - num_streams + 1)
        if self.competitive and mixing and _reciprocal(mixing) <= num_streams:
            raise UserError(
                f"num_streams is {num_streams} with gate=competitive: {mixing} sublayers mix, too few for their "
                f"start value, which needs sqrt({mixing} / 21) (e^3 + 1) above {num_streams}; give fewer streams"
            )
        self.read_weight = nn.Parameter(torch.empty(num_sublayers, width))
        self.write_weight = nn.Parameter(torch.empty(mixing, width))
        self.bias = nn.Parameter(torch.empty((mixing,) if self.competitive else (mixing, num_streams)))
        self._weights: dict[int, Tensor] = {}
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.zeros_(self.read_weight)
        nn.init.zeros_(self.write_weight)
        if mixing := len(self.bias):
            others = self.num_streams if self.competitive else 1
            start = math.log(_reciprocal(mixing) - others)
            start_at(self.bias, torch.full_like(self.bias, start if self.competitive else -start))

    def forget(self) -> None:
        self._weights = {}

    def start(self, embedding: Tensor) -> Tensor:
        self._weights = {0: embedding.new_ones(*embedding.shape[:-1], 1, 1)} if self.watched else {}
        return embedding.unsqueeze(-2)

    def _scores(self, streams: Tensor, weight: Tensor) -> Tensor:
        """Return w . N(s_i) / sqrt(d) of streams (..., k, d), in the compute dtype: (..., k)."""
        weight = weight.to(streams.dtype).unsqueeze(-1) * self.width**-0.5
        return normed_product(streams, weight, self.eps).squeeze(-1)

    def read(self, state: Tensor, index: int, norm: NormLike) -> tuple[Tensor, Tensor]:
        if index == 0:
            return self.normed(state.squeeze(-2), 0, norm), state
        streams = state.to(compute_dtype(state.dtype))
        with full_precision(streams):
            alpha = self._scores(streams, self.read_weight[index - 1]).softmax(-1).unsqueeze(-2)
            h = (alpha @ streams).squeeze(-2).to(state.dtype)
        weights = None
        if self.watched:
            with looking(self):
                weights = (alpha @ self._weights[index].to(alpha)).reshape(-1, index + 1)
        return self.normed(h, index, norm, weights), state

    def write(self, state: Tensor, index: int, output: Tensor) -> Tensor:
        streams, new = state.to(compute_dtype(state.dtype)), output.unsqueeze(-2)
        if index + 1 < self.num_streams:
            if self.watched:
                with looking(self):
                    weights = nn.functional.pad(self._weights[index], (0, 1, 0, 1))
                    weights[..., -1, -1] = 1.0
                    self._weights[index + 1] = weights
            return torch.cat([state, new.to(state.dtype)], -2)
        place = index + 1 - self.num_streams
        with full_precision(streams):
            scores, bias = self._scores(streams, self.write_weight[place]), self.bias[place].to(streams.dtype)
            if self.competitive:
                beta = torch.cat([bias.expand_as(scores[..., :1]), scores], -1).softmax(-1)[..., 1:]
            else:
                beta = (scores + bias).sigmoid()
            beta = beta.unsqueeze(-1)
            mixed = torch.lerp(streams, new.to(streams.dtype), beta).to(state.dtype)
        if self.watched:
            with looking(self):
                self._weights[index + 1] = torch.cat([self._weights[index].to(beta) * (1.0 - beta), beta], -1)
        return mixed

    def hidden_state(self, state: Tensor) -> Tensor:
        return state.mean(-2)

    def handed_on(self, state: Tensor) -> Tensor:
        return self.finish(state, as_it_is)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        bias, n = self.bias.float().cpu(), self.num_streams
        table = torch.full((self.num_sublayers, n), torch.nan)
        # without the token every score of a competitive gate is 0
        table[n - 1 :] = 1.0 / (n + bias.exp().unsqueeze(-1)) if self.competitive else bias.sigmoid()
        return {"write": Learned(table, ("sublayer", "stream"), "share of an output, without what the token adds")}


def _reciprocal(mixing: int) -> float:
    """Return 1 / b at the start, sqrt(M / 21) / sigmoid(-3)."""
    return math.sqrt(mixing / 21) * (math.e**3 + 1.0)
