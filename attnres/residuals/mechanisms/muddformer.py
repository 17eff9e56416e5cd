"""MUDDFormer: after each layer, four mixtures of all layers' outputs so far, with weights computed for each token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnres.residuals.layout import EMBEDDING, About, Learned, Source, Traits
from attnres.residuals.mechanisms.mixtures import Kept, Mixtures
from attnres.residuals.settings import positive, start_at, true_or_false, whole
from attnres.residuals.state import Ways, as_it_is
from attnres.residuals.watch import NormLike, watched

WAYS = (*Ways._fields, "stream")


class MuddFormer(Mixtures):
    """x_c = sum_{j <= i} (b_cj + [W2 GELU(W1 N(y_i))]_cj) y_j,    c = query, key, value, stream

    after layer i; y_0 is the embedding and y_j the output of layer j. The next attention projects N(x_c), c its query,
    key and value; its output and the MLP's are added to x_stream. After the last layer there is one mixture, the
    head's. N is an RMSNorm without gain. W1 is (C (i+2), d) with C = 4 or 1, from N(0, 1/d); W2 = 0; b = [0 .. 0, 1].

    The publication's code rounds the rows of W1 up to a multiple of 64 and has four times as many after the last layer.

    `last_layers` mixes only after this many of the last layers. With 2 it resembles a speedrun's record, which mixed
    only values and stream, over some of the sources. The publication norms queries, keys and values with a gain each;
    here they share one, since the following projection can absorb a gain.

    `prepost_norm` norms before and after: sources are u_j = g_j * N(y_j), and a mixture D_c of them (b = 0) is added to
    y_i, as it is for query, key and value, as p_i * N(D) for the stream. g starts at 1, p at 0.001: with D = 0 every
    x_c is y_i to the bit. It keeps 24 layers and more from diverging (hyper-connection-factory; one seed each).

    Source: Xiao et al., "MUDDFormer", arXiv 2502.12170; trimmed: github.com/KellerJordan/modded-nanogpt; norms:
    github.com/wdlctc/hyper-connection-factory, where the publication's Eq. 10 norms all four mixtures.
    """

    name = "muddformer"
    traits = Traits(True, sums_to_one=False, has_query=False, starts_standard=True, colour="#cc79a7")
    about = About(
        "for q, k, v and the stream x = sum_j (b_j + [W2 GELU(W1 N(x))]_j) x_j over what layers gave",
        "W1 normal, W2 = 0, b = [0 .. 0, 1]",
        "5 + L/4",
        "Xiao et al., arXiv 2502.12170",
    )

    def __init__(
        self,
        num_sublayers: int,
        width: int,
        *,
        last_layers: int | None = None,
        prepost_norm: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(num_sublayers, width)
        layers, self.eps = num_sublayers // 2, positive("eps", eps)
        self.first = 0 if last_layers is None else max(0, layers - whole("last_layers", last_layers))
        shapes = [(len(self.ways(2 * i + 2)), i + 2) for i in range(self.first, layers)]
        self.inner = nn.ParameterList(torch.empty(ways * count, width) for ways, count in shapes)
        self.outer = nn.ParameterList(torch.empty(ways * count, ways * count) for ways, count in shapes)
        self.bias = nn.ParameterList(torch.empty(ways, count) for ways, count in shapes)
        self.prepost_norm = true_or_false("prepost_norm", prepost_norm)
        if prepost_norm:
            self.traits = self.traits._replace(linear=False)
            self.pre = nn.Parameter(torch.empty(layers + 1, width))
            self.post = nn.Parameter(torch.empty(layers - self.first, width))
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.prepost_norm:
            nn.init.ones_(self.pre)
            nn.init.constant_(self.post, 0.001)
        for inner, outer, bias in zip(self.inner, self.outer, self.bias):
            nn.init.normal_(inner, std=self.width**-0.5)
            nn.init.zeros_(outer)
            one = 0.0 if self.prepost_norm else 1.0
            start_at(bias, one * torch.eye(bias.shape[1])[-1:].expand_as(bias))

    def mixes(self, index: int) -> bool:
        """Return whether the reads of sublayer `index` (L: of the head) are mixtures: those after layer `first` and
        later."""
        return index % 2 == 0 and index // 2 > self.first

    def ways(self, index: int) -> tuple[str | None, ...]:
        return WAYS if self.mixes(index) and index < self.num_sublayers else (None,)

    def mix(self, index: int, values: Tensor) -> tuple[Tensor, Tensor]:
        place = index // 2 - 1 - self.first
        inner, outer, bias = (table[place].to(values.dtype) for table in (self.inner, self.outer, self.bias))
        newest = F.rms_norm(values[..., -1, :], (self.width,), None, self.eps)
        weights = bias + F.linear(F.gelu(F.linear(newest, inner)), outer).unflatten(-1, bias.shape)
        if not self.prepost_norm:
            return weights @ values, weights
        count = values.shape[-2]
        units = F.rms_norm(values, (self.width,), None, self.eps) * self.pre[:count].to(values.dtype)
        (*inputs, stream), y = (weights @ units).unbind(-2), values[..., -1, :]
        stream = self.post[place].to(y.dtype) * F.rms_norm(stream, (self.width,), None, self.eps)
        return torch.stack([y + h for h in (*inputs, stream)], -2), weights

    def read(self, state: Kept, index: int, norm: NormLike) -> tuple[Tensor | Ways, Kept]:
        past, row = state.past, self.first_row(index)
        if not self.mixes(index):
            stream = state.inside[0] if index % 2 else past[-1]
            return self.normed(stream, row, norm, values=[stream]), Kept(past, (stream,))
        (*inputs, stream), weights = self.mixed(index, past)
        rows = weights.reshape(-1, *weights.shape[-2:]).unbind(-2)
        ways = Ways(*(self.normed(h, row + way, norm, rows[way], past) for way, h in enumerate(inputs)))
        if self.watched:
            stream = watched(self, stream, row + len(inputs), rows[-1], past)
        return ways, Kept(past, (stream,))

    def write(self, state: Kept, index: int, output: Tensor) -> Kept:
        stream = state.inside[0] + output
        return Kept((*state.past, stream)) if index % 2 else Kept(state.past, (stream,))

    def finish(self, state: Kept, norm: NormLike) -> Tensor:
        past, last = state.past, self.num_sublayers
        if not self.mixes(last):
            stream = self.hidden_state(state)
            return self.normed(stream, self.first_row(last), norm, values=[stream])
        (h,), weights = self.mixed(last, past)
        return self.normed(h, self.first_row(last), norm, weights.reshape(-1, len(past)), past)

    def handed_on(self, state: Kept) -> Tensor:
        return self.finish(state, as_it_is)

    def hidden_state(self, state: Kept) -> Tensor:
        return (*state.past, *state.inside)[-1]

    def sources(self, read: int) -> tuple[Source, ...]:
        sublayer = self.places()[read][0]
        if self.mixes(sublayer):
            layers = (self._stream_before(2 * i + 2)._replace(kind="layer", number=i) for i in range(sublayer // 2))
            return (EMBEDDING, *layers)
        return (EMBEDDING if sublayer == 0 else self._stream_before(sublayer)._replace(open=True),)

    def _stream_before(self, index: int) -> Source:
        """Return the unmixed stream before sublayer `index`: the stream before its layer, plus the outputs since."""
        begin = (index - 1) // 2 * 2
        if not self.mixes(begin):
            return Source("stream", None, range(index + 1))
        return Source("stream", None, range(begin + 1, index + 1), after=self.first_row(begin) + len(Ways._fields))

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        """Return b of each read; NaN for reads that are no mixture."""
        table = torch.full((len(self.places()), self.num_sublayers // 2 + 1), torch.nan)
        for i, bias in enumerate(self.bias, self.first):
            row = self.first_row(2 * i + 2)
            table[row : row + len(bias), : i + 2] = bias.float().cpu()
        return {"bias": Learned(table, ("read", "source"), "coefficient of what the embedding and each layer gave")}
