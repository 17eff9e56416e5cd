"""LAuReL: learned weights, a low-rank map or earlier streams in the residual connection."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.errors import UserError
from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.standard import ScalarMix
from attnres.residuals.settings import one_of, start_at, whole
from attnres.residuals.watch import NormLike

_FORMS = ("rw", "lr", "pa", "rw+lr", "rw+pa")


class Laurel(ScalarMix):
    """x_{l+1} = a f_l(N x_l) + b (x_l + B A x_l), or with `form` "pa" in it, a f + b (x_l + B A sum_j g_j x_{l-j}).

    `form` says which parts there are: "rw" the numbers a, b (else 1), "lr" the matrices A (r, d) and B (d, r), "pa"
    these and g, a number for each of the last k streams, the present one first.

    a and b are 2 sigmoid of learned numbers that start at 0 (the publication bounds them by a softmax or sigmoid and
    leaves the start open), A at 1 / sqrt(r d) where row and channel are equal modulo r and 0 elsewhere, B at 0 (as
    published), g at 1: the standard residual. With "lr" or "pa" reads are no sums of outputs with one number each.

    State: the last streams, (..., d) each, at most k of them; one without "pa".

    Args:
        rank: r, 32 or d, whichever is less, where none is given. previous: k, 3 where none is given.

    Costs 2 (rw), 2 r d (lr), 2 r d + k (pa) parameters a sublayer.

    Source: Menghani et al., "LAuReL: Learned Augmented Residual Layer", arXiv 2411.07501, sections 2 and 3.3.
    """

    name = "laurel"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=True, linear=False)
    about = About(
        "a f(N x) + b (x + B A x)", "a = b = 1, B = 0", "4 (rw: 3, pa: 3 + k)", "Menghani et al., arXiv 2411.07501"
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        form: str = "rw+lr",
        rank: int | None = None,
        previous: int | None = None,
    ) -> None:
        super().__init__(num_sublayers, width)
        self.weighed = one_of("form", form, _FORMS).startswith("rw")
        for name, value, unused in (("rank", rank, form == "rw"), ("previous", previous, not form.endswith("pa"))):
            if value is not None and unused:
                raise UserError(f"{name}={value} is given, and form '{form}' has none: leave it out")
        self.rank = 0 if form == "rw" else whole("rank", min(32, width) if rank is None else rank)
        self.previous = whole("previous", 3 if previous is None else previous) if form.endswith("pa") else 0
        if self.rank > width:
            raise UserError(f"rank is {rank} and the width {width}: expected a rank of at most the width")
        self.traits = self.traits._replace(linear=form == "rw")
        if self.weighed:
            self.logits = nn.Parameter(torch.empty(num_sublayers, 2))
        if self.rank:
            self.down = nn.Parameter(torch.empty(num_sublayers, self.rank, width))
            self.up = nn.Parameter(torch.empty(num_sublayers, width, self.rank))
        if self.previous:
            self.shares = nn.Parameter(torch.empty(num_sublayers, self.previous))
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.weighed:
            nn.init.zeros_(self.logits)
        if self.rank:
            rows = torch.arange(self.width) % self.rank == torch.arange(self.rank).unsqueeze(-1)
            start_at(self.down, rows / (self.rank * self.width) ** 0.5)
            nn.init.zeros_(self.up)
        if self.previous:
            nn.init.ones_(self.shares)

    def branch(self, index: int) -> Tensor | float:
        return 2.0 * torch.sigmoid(self.logits[index, 0]) if self.weighed else 1.0

    def shortcut(self, index: int) -> Tensor | None:
        return 2.0 * torch.sigmoid(self.logits[index, 1]) if self.weighed else None

    def implied(self, read: int) -> Tensor | None:
        return super().implied(read) if self.traits.linear else None

    def start(self, embedding: Tensor) -> tuple[Tensor, ...]:
        return (embedding,)

    def read(self, state: tuple[Tensor, ...], index: int, norm: NormLike) -> tuple[Tensor, tuple[Tensor, ...]]:
        return super().read(state[-1], index, norm)[0], state

    def write(self, state: tuple[Tensor, ...], index: int, output: Tensor) -> tuple[Tensor, ...]:
        x = mapped = state[-1]
        if self.previous:
            mapped = x * self.shares[index, 0]
            for place, past in enumerate(reversed(state[:-1]), 1):
                mapped = mapped + past * self.shares[index, place]
        if self.rank:
            down, up = self.down[index].to(x.dtype), self.up[index].to(x.dtype)
            x = x + F.linear(F.linear(mapped, down), up).to(x.dtype)
        return (*state, super().write(x, index, output))[-max(1, self.previous) :]

    def hidden_state(self, state: tuple[Tensor, ...]) -> Tensor:
        return state[-1]

    def finish(self, state: tuple[Tensor, ...], norm: NormLike) -> Tensor:
        return super().finish(state[-1], norm)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        if not self.weighed:
            return {}
        a, b = (2.0 * torch.sigmoid(self.logits)).float().cpu().unbind(-1)
        return {
            "output": Learned(a, ("sublayer",), "a, the weight of an output"),
            "stream": Learned(b, ("sublayer",), "b, the weight of the stream"),
        }
