"""Where the prediction of a token read from, seen while it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from attnres.errors import UserError
from attnres.inspect.pieces import piece
from attnres.inspect.record import find_residual
from attnres.residuals import Observer, Source, depths, watched_by

TOP = 3
"""Sources of the output read that are named."""

PARTS = 8
"""Parts into which the depth of a network without blocks is cut for the summary: as many as Block has by default."""


LEGEND = """\
each new token | the heaviest sources of the output read | for each block b1, b2, ... of sublayers the source that its
reads weigh most on average, and its weight
(emb embedding, part the block's own sum so far, b block, a attention, m mlp; stream the running sum, state an earlier
state of it)"""


@dataclass(frozen=True)
class TokenDepth:
    """One new token and where its prediction read from.

    Attributes:
        token: its id; `text` what it says.
        output: (source, weight) of the output read, the heaviest first.
        blocks: a part of the depth each (a block, where the residual has blocks): name, the source that its reads
            weighed most on average, and that weight.
    """

    token: int
    text: str
    output: list[tuple[str, float]]
    blocks: list[tuple[str, Source, float]]

    def line(self) -> str:
        """One line: the token, the heaviest sources of the output, and each block's heaviest source."""
        output = ", ".join(f"{source} {weight:.2f}" for source, weight in self.output[:TOP])
        blocks = "  ".join(f"{name} {source.short} {weight:.2f}" for name, source, weight in self.blocks)
        return f"{self.text!r:16} output: {output} | {blocks}"


class DepthReader(Observer):
    """Watches the reads of a model while it generates, one sequence at a time; changes no number.

    Raises:
        UserError: the model's residual has no weights to show, or is being recorded already.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            residual = find_residual(model)
        except UserError as error:
            raise UserError(
                f"{type(model).__name__} has no depth reads to show: give a model of attnres, or leave out --show-depth"
            ) from error
        if not residual.traits.by_token:
            raise UserError(
                f"residual '{residual.name}' weighs its sources alike for every token: --show-depth needs one that "
                "does not, such as block"
            )
        if residual.observer is not None:
            raise UserError("this model is being recorded already: leave the first recording before a second")
        self.residual, self.tokenizer = residual, tokenizer
        self.weights: dict[int, Tensor] = {}
        layout = residual.layout()
        self.sources, self.depths = [read.sources for read in layout], depths(layout)

    def __enter__(self) -> Self:
        self.watching = watched_by(self.residual, observer=self)
        self.watching.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.watching.__exit__(kind, error, traceback)

    def on_read(self, index: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        assert weights is not None
        self.weights[index] = weights[-1].detach()  # the last position of the pass is the one that predicts

    def read(self, token: int) -> TokenDepth:
        """What the pass that predicted `token` did; call it before the next pass."""
        sublayers = self.residual.num_sublayers
        rows = {index: weights.float().tolist() for index, weights in self.weights.items()}
        names = [source.name for source in self.sources[-1]]
        output = sorted(zip(names, rows[len(self.sources) - 1]), key=lambda pair: -abs(pair[1]))
        blocks = []
        sealed = [source for row in self.sources for source in row if source.kind in ("block", "state")]
        ends = {source.span.stop - 1 for source in sealed if source.span} or set(
            range(0, sublayers, -(-sublayers // PARTS))
        )
        bounds = sorted({0, *ends, sublayers})
        for number, (start, stop) in enumerate(pairwise(bounds), 1):
            reads = [index for index, sublayer in enumerate(self.depths) if start <= sublayer < stop]
            sums: dict[str, float] = {}
            sources: dict[str, Source] = {}
            for index in reads:
                for source, weight in zip(self.sources[index], rows[index]):
                    sums[source.name] = sums.get(source.name, 0.0) + weight / len(reads)
                    sources[source.name] = source
            heaviest = max(sums, key=lambda name: abs(sums[name]))
            blocks.append((f"b{number}", sources[heaviest], sums[heaviest]))
        return TokenDepth(token, piece(self.tokenizer, token), output, blocks)
