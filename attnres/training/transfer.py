"""Rates and start values that were found at one width, carried to a model of another: muP (arXiv 2203.03466, table 8).

With m = width / `optim.base_width`:

    what                                     start value       rate
    matrices under AdamW                     / sqrt(m)         / m
    matrices under Muon                      / sqrt(m)         / sqrt(m)
    the final norm's gain, once 1            1 / m             / m
    queries of a `slow` read, their makers   as they are       / m
    embedding, untied head, everything else  as they are       as they are

Weight decay is multiplied by what its rate is divided by: a step decays as much. Why each:

- An update of AdamW has entries of one size, and d of them act together: its effect grows as the width.
- Muon's is orthogonal and scaled to the RMS of AdamW's, so that its largest singular value grows as the square root.
- muP divides the logits by m. Here the final norm's gain does: the same function, updates and all, in any family, with
  tied embeddings too, and a saved model needs no code for it.
- A pseudo-query is an output weight: d products of one sign add up to a logit.

Heads have to be as wide in both models, else attention's 1 / sqrt(d) would have to change as well. CompleteP, which
does the same for depth, is the residual `completep`; depth reads have no sum that grows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

QUERY, QUERY_WEIGHT = "query", "query_weight"
"""The last part of the names of pseudo-queries and of the weights that make queries of the input, in every mechanism
that has them."""


@dataclass(frozen=True)
class Transfer:
    """What a width does to rates.

    Attributes:
        ratio: m. final: names of the parameters of the final norm.
    """

    ratio: float = 1.0
    final: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, model: Any, base_width: int | None) -> "Transfer":
        """That of a model of the package; of any model where there is no base width."""
        if base_width is None:
            return cls()
        own = {id(parameter) for parameter in _final_norm(model).parameters()}
        final = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in own)
        return cls(model.residual("itself").width / base_width, final)

    def divisor(self, kind: str, name: str, *, muon: bool = False) -> float:
        """What the rate of a parameter of this kind and name is divided by."""
        last = name.rpartition(".")[2]
        if kind == "matrix":
            return math.sqrt(self.ratio) if muon else self.ratio
        carried = name in self.final or (kind == "read" and last in (QUERY, QUERY_WEIGHT))
        return self.ratio if carried else 1.0


def carry_start(model: Any, base_width: int | None, names: Mapping[str, list[str]]) -> None:
    """Change the start values of a new model in place; `names` are those of its parameters by kind."""
    transfer = Transfer.of(model, base_width)
    if transfer.ratio == 1:
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names["matrix"]:
            parameters[name].div_(math.sqrt(transfer.ratio))
        gain = _final_norm(model).weight
        assert isinstance(gain, Tensor)
        gain.add_(1 / transfer.ratio - 1)  # whether it is stored as 1, or as 0 that 1 is added to


def _final_norm(model: Any) -> nn.Module:
    return model.depth_base.get_submodule(model.family.final_norm)
