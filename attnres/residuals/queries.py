"""Queries and key gains of a softmax over depth, stored so that they have their own learning rate."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attnres.residuals.base import Residual
from attnres.residuals.settings import positive

QUERY_LR = 0.1
"""Learning rate of queries and gains relative to the model's. At 1.0 a model ends permanently worse
(docs/results/lasting.md)."""


class Queried(Residual):
    """A residual whose reads score sources with queries w and key gains g, parameters `query` and `gain` (reads, d).

        w = r * query,    g = 1 + r * gain  (r != 1),    g = gain  (r = 1),    r = `query_lr`

    An optimizer whose steps do not depend on the scale of gradients (Adam, Muon, Lion) changes w and g at r times the
    learning rate of the parameters, with any groups and schedules; weight decay pulls g to 1. Gradient norms are those
    of the parameters, r times those of w and g.

    A state dict with r != 1 has r as `query_scale`. `load_state_dict` converts queries and gains stored at another r;
    one without `query_scale`, as of earlier versions, is stored at 1.
    """

    query_lr: float = 1.0
    query: nn.Parameter
    gain: nn.Parameter | None
    query_scale: Tensor

    def add_queries(self, reads: int, rank: int | None = None) -> None:
        """Make the parameters of `reads` reads, uninitialised; with `rank`, queries of that width and no gains."""
        self.query = nn.Parameter(torch.empty(reads, self.width if rank is None else rank))
        self.gain = nn.Parameter(torch.empty(reads, self.width)) if rank is None else None

    def init_queries(self, std: float = 0.0) -> None:
        """Set queries to zero, or draw w from N(0, std^2), and gains g to 1."""
        nn.init.normal_(self.query, std=std / self.query_lr) if std else nn.init.zeros_(self.query)
        if self.gain is not None:
            nn.init.constant_(self.gain, 1.0 if self.query_lr == 1.0 else 0.0)
        if "query_scale" in self._buffers:
            nn.init.constant_(self.query_scale, self.query_lr)

    @property
    def queries(self) -> Tensor:
        """Return the queries w, (reads, d)."""
        return self.query if self.query_lr == 1.0 else self.query * self.query_lr

    @property
    def gains(self) -> Tensor:
        """Return the key gains g, (reads, d); ones if there are none."""
        if self.gain is None:
            return torch.ones_like(self.query)
        return self.gain if self.query_lr == 1.0 else 1.0 + self.gain * self.query_lr

    @torch.no_grad()
    def set_query_lr(self, rate: float) -> None:
        """Store queries and gains so that they train at `rate` times the learning rate; the computed function does not
        change."""
        before, rate = self.query_lr, positive("query_lr", rate)
        for name, parameter in self.named_parameters():
            if name in type(self).slow and not parameter.is_meta:
                parameter.copy_(_stored(name, parameter, before, rate))
        self.query_lr = rate
        self._buffers.pop("query_scale", None)
        if rate != 1.0:
            self.register_buffer("query_scale", torch.tensor(rate, dtype=torch.float32, device=self.query.device))

    def _load_from_state_dict(  # ty: ignore[incompatible-method-override]
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        stored = state_dict.pop(f"{prefix}query_scale", None)
        before = 1.0 if stored is None else float(stored)
        if not math.isclose(before, self.query_lr, rel_tol=1e-4):
            for name in type(self).slow:
                if (value := state_dict.get(prefix + name)) is not None:
                    state_dict[prefix + name] = _stored(name, value, before, self.query_lr)
        if self.query_lr != 1.0:
            state_dict[f"{prefix}query_scale"] = torch.tensor(self.query_lr)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _stored(name: str, value: Tensor, before: float, after: float) -> Tensor:
    """Convert a parameter stored at one `query_lr` to another."""
    if name != "gain":
        return value * (before / after)
    gain = value if before == 1.0 else 1.0 + value * before
    return gain if after == 1.0 else (gain - 1.0) / after
