"""Value residuals: mix the values of an attention with those of the first layer, with any residual."""

import torch
from torch import Tensor, nn

from attnres.ops import compute_dtype, full_precision
from attnres.residuals.layout import Learned

VALUE_KINDS = ("none", "fixed", "layer", "head", "token", "first")
"""Valid values of the setting `value_residual`."""


class ValueResidual(nn.Module):
    """v_l <- (1 - lambda) v_l + lambda v_1,    l = 2 .. M,    v_1 the first layer's values

        fixed   lambda = 1/2                                        layer   one learned lambda a layer, from 1/2
        first   lambda = 1 (SVFormer): later layers have no         head    one a layer and key-value head, from 1/2
                values of their own, and v_proj is not called       token   lambda = sigmoid(W x + b) of each head, x
                                                                            the input of v_l; W = 0, b = 0: from 1/2

    Attention uses and caches the mixed values, for each key-value head under grouped-query attention.

    Source: Zhou et al., "Value Residual Learning", arXiv 2410.17897 (fixed, learned, SVFormer); `token` is lucidrains'
    x-transformers, whose W starts as torch draws it. SVFormer's smaller cache is not implemented: every layer has its
    copy.

    Args:
        kind: one of `VALUE_KINDS`, not "none".
        layers, heads, width: M, key-value heads of each, d.
    """

    def __init__(self, kind: str, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.share = self.weight = self.bias = None
        if kind in ("layer", "head"):
            self.share = nn.Parameter(torch.empty((layers - 1, heads) if kind == "head" else (layers - 1,)))
        elif kind == "token":
            self.weight = nn.Parameter(torch.empty(layers - 1, heads, width))
            self.bias = nn.Parameter(torch.empty(layers - 1, heads))
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.share is not None:
            nn.init.constant_(self.share, 0.5)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.zeros_(parameter)

    reset_parameters = init_parameters

    @property
    def replaces(self) -> bool:
        """Return whether later layers have no values of their own."""
        return self.kind == "first"

    def forward(self, layer: int, value: Tensor, first: Tensor, x: Tensor) -> Tensor:
        """Return the values of layer `layer` (counted from 0, not the first).

        Args:
            value, first: the layer's values and the first layer's, (..., heads * head_dim).
            x: the input of the layer's value projection, (..., d).
        """
        dtype = compute_dtype(value.dtype)
        with full_precision(value):
            share = self._share(layer - 1, x.to(dtype))
            shape = (*value.shape[:-1], self.heads, value.shape[-1] // self.heads)
            mixed = torch.lerp(value.to(dtype).view(shape), first.to(dtype).view(shape), share.expand(shape))
        return mixed.reshape(value.shape).to(value.dtype)

    def _share(self, place: int, x: Tensor) -> Tensor:
        """Return lambda in a shape that broadcasts to (..., heads, head_dim)."""
        if self.weight is not None and self.bias is not None:
            logits = nn.functional.linear(x, self.weight[place].to(x.dtype), self.bias[place].to(x.dtype))
            return logits.sigmoid().unsqueeze(-1)
        if self.share is not None:
            return self.share[place].to(x.dtype).unsqueeze(-1)
        return x.new_full((), 0.5)

    @torch.no_grad()
    def learned(self) -> dict[str, Learned]:
        """Return lambda by layer (NaN for the first) and head; for `token`, its value at W x = 0, sigmoid(b)."""
        shares = self.share if self.bias is None else self.bias.sigmoid()
        if shares is None:
            return {}
        values = torch.cat([shares.new_full((1, *shares.shape[1:]), torch.nan), shares]).float().cpu()
        title = "share of layer 0's values" + (", without what the token adds" if self.kind == "token" else "")
        return {"value_residual": Learned(values, ("layer", "head")[: values.dim()], title)}
