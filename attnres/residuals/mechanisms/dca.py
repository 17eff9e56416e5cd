"""DeepCrossAttention: queries, keys and values each read a learned mixture, by channel, of all layers' outputs."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.ops.norms import one_over_rms
from attnres.residuals.layout import EMBEDDING, About, Learned, Source, Traits
from attnres.residuals.mechanisms.mixtures import Kept, Mixtures
from attnres.residuals.settings import positive, whole
from attnres.residuals.state import Ways, as_it_is
from attnres.residuals.watch import NormLike, looking, watched, with_norm

T = TypeVar("T")


class DeepCrossAttention(Mixtures):
    """x_c = sum_j (ReLU(N(y_j) . w_c) + b_cj) * y_j,    c = query, key, value    (the publication's GRN-v3)

    before each layer; y_0 is the embedding, y_j the sum of the outputs of layer j's attention and MLP, b_cj a number
    for each channel. The attention projects N(x_c); the MLP reads x_query plus the attention's output. The head has one
    more mixture. N is an RMSNorm whose gain the three ways of a layer share. w = 0, b = 1: the standard residual. ReLU
    has the derivative one at zero here: with torch's own, zero, w would never leave its start.

    `past_layers` k mixes the first k and the last k of y_0 .. y_l and, as one source, the sum of those between.

    Observers get the weights' means over channels, ReLU(..) + mean(b), and sources rescaled to them.

    Source: Heddes et al., "DeepCrossAttention", arXiv 2502.06785. The inside of a layer follows lucidrains'
    deep-cross-attention, which omits the layers between the first and last k.
    """

    name = "dca"
    traits = Traits(True, sums_to_one=False, has_query=False, starts_standard=True, linear=False)
    about = About(
        "for q, k, v each x = sum_j (ReLU(N(x_j) w) + b_j) * x_j over what layers wrote, b by channel",
        "w = 0, b = 1",
        "4 + L/4",
        "Heddes et al., arXiv 2502.06785",
    )

    def __init__(self, num_sublayers: int, width: int, *, past_layers: int | None = None, eps: float = 1e-6) -> None:
        super().__init__(num_sublayers, width)
        self.eps = positive("eps", eps)
        self.past_layers = None if past_layers is None else whole("past_layers", past_layers)
        counts = [len(self._mixed_sources(index)) for index in self._mixing]
        ways = [len(self.ways(index)) for index in self._mixing]
        self.gain = nn.Parameter(torch.empty(len(counts), width))
        self.weight = nn.ParameterList(torch.empty(c, width) for c in ways)
        self.bias = nn.ParameterList(torch.empty(c, n, width) for c, n in zip(ways, counts))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.ones_(self.gain)
        for weight, bias in zip(self.weight, self.bias):
            nn.init.zeros_(weight)
            nn.init.ones_(bias)

    @property
    def _mixing(self) -> list[int]:
        """Return the sublayers whose reads are mixtures: attentions, and the head (L)."""
        return [*range(0, self.num_sublayers, 2), self.num_sublayers]

    def ways(self, index: int) -> tuple[str | None, ...]:
        return Ways._fields if index % 2 == 0 and index < self.num_sublayers else (None,)

    def mix(self, index: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixtures and, as weights, the part that differs between tokens, (..., n, ways)."""
        place = (index + 1) // 2
        bias, weight, gain = (x[place].to(values.dtype) for x in (self.bias, self.weight, self.gain))
        scale = one_over_rms(values, self.eps)
        dynamic = (F.linear(values, weight * gain) * scale).clamp_min(0.0)
        static = torch.stack([(values * row).sum(-2) for row in bias], -2)
        return static + dynamic.mT @ values, dynamic

    def _mixtures(self, index: int, past: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the mixtures of the reads of sublayer `index` (L: of the head), (..., d), after observers and
        editors."""
        sources, row = _selected(past, self.past_layers, _sum), self.first_row(index)
        parts, dynamic = self.mixed(index, sources)
        if not self.watched:
            return list(parts)
        biases = self.bias[(index + 1) // 2].to(dynamic.dtype)
        return [self._shown(h, row + way, dynamic[..., way], biases[way], sources) for way, h in enumerate(parts)]

    def _shown(self, h: Tensor, row: int, dynamic: Tensor, bias: Tensor, sources: Sequence[Tensor]) -> Tensor:
        with looking(self):
            weights = dynamic + bias.mean(-1)
            least = torch.finfo(weights.dtype).tiny
            shares = (dynamic.unsqueeze(-1) + bias) / torch.where(weights.abs() > least, weights, least).unsqueeze(-1)
            values = [share * source for share, source in zip(shares.unbind(-2), sources)]
        return watched(self, h, row, weights.reshape(-1, len(sources)), values)

    def read(self, state: Kept, index: int, norm: NormLike) -> tuple[Tensor | Ways, Kept]:
        if index % 2:
            return self.normed(state.inside[0], self.first_row(index), norm, values=state.inside[:1]), state
        parts = self._mixtures(index, state.past)
        return Ways(*(with_norm(h, norm) for h in parts)), Kept(state.past, (parts[0],))

    def write(self, state: Kept, index: int, output: Tensor) -> Kept:
        if index % 2 == 0:
            return Kept(state.past, (state.inside[0] + output, output.to(state.past[0].dtype)))
        return Kept((*state.past, state.inside[1] + output))

    def finish(self, state: Kept, norm: NormLike) -> Tensor:
        (h,) = self._mixtures(self.num_sublayers, (*state.past, *state.inside[1:]))
        return with_norm(h, norm)

    def handed_on(self, state: Kept) -> Tensor:
        return self.finish(state, as_it_is)

    def hidden_state(self, state: Kept) -> Tensor:
        return _sum((*state.past, *state.inside[1:]))

    def _mixed_sources(self, index: int) -> tuple[Source, ...]:
        """Return the sources of the mixtures of sublayer `index` (L: of the head)."""
        layers = [Source("layer", i, range(2 * i + 1, 2 * i + 3)) for i in range(index // 2)]
        last = [Source("attention", index // 2, range(index, index + 1))] if index % 2 else []
        return _selected((EMBEDDING, *layers, *last), self.past_layers, _between)

    def sources(self, read: int) -> tuple[Source, ...]:
        sublayer = self.places()[read][0]
        if sublayer in self._mixing:
            return self._mixed_sources(sublayer)
        query = self.first_row(sublayer - 1)
        return (Source("stream", None, range(sublayer, sublayer + 1), open=True, after=query),)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        """Return b of each read, averaged over channels; NaN for reads that are no mixture."""
        most = max(bias.shape[1] for bias in self.bias)
        table = torch.full((len(self.places()), most), torch.nan)
        for index, bias in zip(self._mixing, self.bias):
            row = self.first_row(index)
            table[row : row + len(bias), : bias.shape[1]] = bias.mean(-1).float().cpu()
        return {"bias": Learned(table, ("read", "source"), "coefficient of what each layer wrote, mean over channels")}


def _selected(past: tuple[T, ...], k: int | None, joined: Callable[[tuple[T, ...]], T]) -> tuple[T, ...]:
    """Return the sources of a mixture: all, or the first k, the last k and those in between as one."""
    if k is None or len(past) <= 2 * k + 1:
        return past
    return (*past[:k], joined(past[k:-k]), *past[-k:])


def _sum(values: tuple[Tensor, ...]) -> Tensor:
    return functools.reduce(torch.add, values)


def _between(sources: tuple[Source, ...]) -> Source:
    spans = [source.span for source in sources if source.span is not None]
    return Source("middle", None, range(spans[0].start, spans[-1].stop))
