"""Parallel lanes: attention reads one stream, the MLP another, and both write to both."""

import torch
from torch import Tensor, nn

from attnres.residuals.layout import About, Learned, Traits
from attnres.residuals.mechanisms.streams import ParallelStreams
from attnres.residuals.settings import start_at


class ParallelLanes(ParallelStreams):
    """x = norm(H_r),  H' = c H + w (outer) f(x), over two lanes H (2, d): r = 1 for an MLP, 0 for any other sublayer.

    `carry` c is a number and `write` w two for each sublayer. c starts at sqrt(1.1), w at 1, but that of an attention
    for lane 1 at 1.5: not the standard residual. Both lanes start as the embedding; the head reads their mean. Every
    layer has two lanes; the speedrun's model had them from layer 7 of 11 on, and more besides (skips, the embedding
    anew) that is not here.

    Source: github.com/KellerJordan/modded-nanogpt, pull request 230 (a speedrun record, 45 steps fewer).
    """

    name = "parallel_lanes"
    traits = Traits(False, sums_to_one=False, has_query=False, starts_standard=False)
    about = About(
        "H = c H + w f(N(H_r)), two lanes: attention reads lane 0, the MLP lane 1",
        "c = sqrt(1.1), w = 1, but attention's for lane 1 1.5",
        "5",
        "modded-nanogpt, pull request 230",
    )

    def __init__(self, num_sublayers: int, width: int) -> None:
        super().__init__(num_sublayers, width, 2)
        self.carry = nn.Parameter(torch.empty(num_sublayers))
        self.write_share = nn.Parameter(torch.empty(num_sublayers, 2))
        self.init_parameters()

    def lane(self, index: int) -> int:
        """Return the lane that sublayer `index` reads."""
        return int(self.sublayers[index % len(self.sublayers)] == "mlp")

    def init_parameters(self) -> None:
        nn.init.constant_(self.carry, 1.1**0.5)
        shares = [[1.0, 1.0 if self.lane(index) else 1.5] for index in range(self.num_sublayers)]
        start_at(self.write_share, torch.tensor(shares))

    def connections(self, streams: Tensor, index: int) -> tuple[Tensor, Tensor]:
        eye = torch.eye(2, dtype=streams.dtype, device=streams.device)
        alpha = torch.cat([eye[:, self.lane(index), None], self.carry[index].to(streams.dtype) * eye], -1)
        return alpha, self.write_share[index].to(streams.dtype)

    def merged(self, streams: Tensor) -> Tensor:
        return streams.mean(-2)

    @torch.no_grad()
    def implied(self, index: int) -> Tensor:
        made_of = torch.ones(2, 1)
        for sublayer in range(index):
            carried = self.carry[sublayer].float().cpu() * made_of
            made_of = torch.cat([carried, self.write_share[sublayer].float().cpu().unsqueeze(-1)], -1)
        return made_of[self.lane(index)] if index < self.num_sublayers else self.merged(made_of)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        carry, share = self.carry.float().cpu(), self.write_share.float().cpu()
        return {
            "carry": Learned(carry, ("sublayer",), "factor on both lanes"),
            "write": Learned(share, ("sublayer", "stream"), "share of an output for each lane"),
        }
