"""Where the prediction of a token read from, seen while it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from attnres.errors import UserError
from attnres.inspect.contribution import Contributions
from attnres.inspect.recording import find_residual
from attnres.models.encoding import piece
from attnres.residuals import Observer, Source, depths, watched_by

TOP = 3
"""Sources of the output read that are named, those of the largest contributions, along the read or against it."""

PARTS = 8
"""Parts into which the depth of a network without blocks is cut for the summary: as many as Block has by default."""


LEGEND = """\
each new token | the largest sources of the output read and their contributions, parts of the read that sum to one | for
each block b1, b2, ... of sublayers the source that contributes most to its reads on average
(emb embedding, part the block's own sum so far, b block, a attention, m mlp; stream the running sum, state an earlier
state of it)"""


@dataclass(frozen=True)
class TokenDepth:
    """One new token and where its prediction read from.

    Attributes:
        token: its id; `text` what it says.
        output: (source, contribution) of the output read, the largest first; contributions as in
            `attnres.inspect.contribution`, signed and summing to one.
        blocks: a part of the depth each (a block, where the residual has blocks): name, the source that contributes
            most to its reads on average, and how much.
    """

    token: int
    text: str
    output: list[tuple[str, float]]
    blocks: list[tuple[str, Source, float]]

    def line(self) -> str:
        """One line: the token, the largest sources of the output, and each block's largest source."""
        output = ", ".join(f"{source} {part:.2f}" for source, part in self.output[:TOP])
        blocks = "  ".join(f"{name} {source.short} {part:.2f}" for name, source, part in self.blocks)
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
        layout = residual.layout()
        self.contributions = Contributions(len(layout), keep=True)
        self.sources, self.depths = [read.sources for read in layout], depths(layout)

    def __enter__(self) -> Self:
        self.watching = watched_by(self.residual, observer=self)
        self.watching.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.watching.__exit__(kind, error, traceback)

    def on_start(self, embedding: Tensor) -> None:
        self.contributions.start(_last(embedding))

    @torch.no_grad()
    def on_read(self, index: int, h: Tensor, weights: Tensor | None, values: Sequence[Tensor]) -> None:
        assert weights is not None
        self.contributions.read(index, _last(h), _last(weights).float(), [_last(value) for value in values], None)

    def on_write(self, index: int, output: Tensor) -> None:
        self.contributions.write(_last(output))

    def read(self, token: int) -> TokenDepth:
        """What the pass that predicted `token` did; call it before the next pass."""
        sublayers = self.residual.num_sublayers
        rows = {index: parts[0].tolist() for index, parts in self.contributions.tokens.items()}
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
                for source, part in zip(self.sources[index], rows[index]):
                    sums[source.name] = sums.get(source.name, 0.0) + part / len(reads)
                    sources[source.name] = source
            largest = max(sums, key=lambda name: abs(sums[name]))
            blocks.append((f"b{number}", sources[largest], sums[largest]))
        return TokenDepth(token, piece(self.tokenizer, token), output, blocks)


def _last(values: Tensor) -> Tensor:
    """(1, ...): the last position of the pass, which is the one that predicts."""
    return values.flatten(0, -2)[-1:]
