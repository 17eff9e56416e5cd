"""A residual's description of its reads: their places, their sources and weights, and learned parameters."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from attnres.residuals.layout import About, Learned, Read, Source, Traits, outputs
from attnres.residuals.values import ValueResidual


class Described(nn.Module):
    """The description of a residual as data, which recording, edits, figures and reports use.

    Reads are numbered from 0 as in `layout`, the output's last: `read` is such a number, `index` a sublayer's.

    By default every sublayer has one read, of the embedding and all earlier outputs if the traits are linear. `implied`
    gives the weights if they are the same for every token.
    """

    traits: Traits
    about: ClassVar[About | None] = None
    """The row in the table of `attnres mechanisms`; a mechanism outside the package may leave it out."""
    num_sublayers: int
    width: int
    sublayers: Sequence[str] = ("attention", "mlp")
    """Kinds of a layer's sublayers, in order; `make_residual` sets them for a network of other layers before it calls
    the constructor."""
    whole_layers: ClassVar[bool] = False
    """Whether it treats every two sublayers, an attention and an MLP, as one layer."""
    value_kind: str = "none"
    # not called ..residual: adapters select modules by the end of their name, and would select this one
    value_mix: ValueResidual | None

    def ways(self, index: int) -> tuple[str | None, ...]:
        """Return the purposes of the reads of sublayer `index`; by default one read (None).

        "query", "key", "value" are the projections of an attention, "stream" is the stream that its output is added to.
        """
        return (None,)

    def places(self) -> tuple[tuple[int, str | None], ...]:
        """Return for each read the sublayer that it belongs to (L: the head), and its purpose (see `ways`)."""
        inner = ((index, way) for index in range(self.num_sublayers) for way in self.ways(index))
        return (*inner, (self.num_sublayers, None))

    def first_row(self, index: int) -> int:
        """Return the number of the first read of sublayer `index`; for L the output's."""
        return sum(len(self.ways(earlier)) for earlier in range(index))

    def sources(self, read: int) -> tuple[Source, ...]:
        """Return the sources of read number `read`, which depend on depth alone; empty if the read is no weighted sum.
        By default the embedding and all earlier outputs if the traits are linear, else empty."""
        return outputs(self.places()[read][0] + 1, self.sublayers) if self.traits.linear else ()

    def layout(self) -> tuple[Read, ...]:
        """Return the reads with their sources, in order; the output's is the last."""
        kinds, places = self.sublayers, self.places()
        inner = (
            Read(kinds[sublayer % len(kinds)], sublayer // len(kinds), self.sources(index), way)
            for index, (sublayer, way) in enumerate(places[:-1])
        )
        return (*inner, Read("output", None, self.sources(len(places) - 1)))

    def implied(self, read: int) -> Tensor | None:
        """Return the weights (sources,) of read number `read` if they are the same for every token, else None."""
        return None

    def direction(self, read: int) -> Tensor | None:
        """Return the vector (d,) whose angle to a source determines the source's logit; None without a query."""
        return None

    def sharpness(self, read: int) -> float | None:
        """Return the largest logit that read number `read` can give; None without a query.

        |w . (g * v / rms(v))| <= |w * g| |v / rms(v)| = |w * g| sqrt(d)    (Cauchy-Schwarz)
        """
        query = self.direction(read)
        return None if query is None else float(query.detach().double().norm()) * math.sqrt(self.width)

    def learned(self) -> dict[str, Learned]:
        """Return the learned parameters other than queries and gains, as tables by name."""
        return {}

    def tables(self) -> dict[str, Learned]:
        """Return all learned tables other than queries and gains, with those of a value residual."""
        return self.learned() | ({} if self.value_mix is None else self.value_mix.learned())

    def mixing_row(self, read: int, weights: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
        """Return the row of read number `read` in the depth mixing matrix, h_l = sum_i M_{i->l} v_i, for each token.

        Args:
            weights: (tokens, sources) of read number `read`. rows: the rows (tokens, L+1) of the reads before it.

        Returns:
            (tokens, L+1), column 0 the embedding; None if h is no sum of outputs with one number each.
        """
        if not self.traits.linear:
            return None
        row = weights.new_zeros(1, self.num_sublayers + 1)
        for place, source in enumerate(self.sources(read)):
            weight = weights[:, place, None]
            if source.span is not None:
                row = row + weight * self.spanned(source.span).to(weights)
            if source.after is not None:
                row = row + weight * rows[source.after].to(weights)
        return row

    def spanned(self, span: range) -> Tensor:
        """Return (1, L+1): one for the outputs in `span`, zero for others."""
        row = torch.zeros(1, self.num_sublayers + 1)
        row[:, span.start : span.stop : span.step] = 1.0
        return row

    def mix_values(self, layer: int, value: Tensor, first: Tensor, x: Tensor) -> Tensor:
        """Return the values of a layer's attention, mixed with the first layer's by `value_mix`."""
        assert self.value_mix is not None
        return self.value_mix(layer, value, first, x)
