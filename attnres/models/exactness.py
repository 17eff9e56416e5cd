"""Whether two models compute the same logits, measured.

Models in 16 bits are compared in fp32 arithmetic on their own weights: in 16 bits rounding alone moves logits by a
percent, and would hide a real difference of that size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnres.forward import evaluating

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""By arithmetic: the largest difference of two logits, as a part of the largest logit, that counts as rounding."""

_SIXTEEN = (torch.bfloat16, torch.float16)
_ROWS, _TOKENS = 2, 32


class Difference(NamedTuple):
    """How far the logits of two models are apart on one batch of tokens.

    Attributes:
        largest: largest absolute difference.
        scale: largest absolute logit of the first model.
        relative: largest / scale.
        bound: what `relative` may be.
        arithmetic: the dtype that was computed in.
        tokens: how many tokens were compared.
    """

    largest: float
    scale: float
    relative: float
    bound: float
    arithmetic: str
    tokens: int

    @property
    def within(self) -> bool:
        """Whether the difference is rounding; False where one of the two is not finite."""
        return self.relative <= self.bound


class Arithmetic(TorchDispatchMode):
    """Compute in `dtype`, fp32 or fp64, whatever lower precision the weights and the code ask for.

    Every tensor of lower precision is cast when an operator takes it, so that no weight is held in two precisions for
    longer than one call.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.lower = (*_SIXTEEN, torch.float32) if dtype is torch.float64 else _SIXTEEN

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:  # a few rows of a large table
            return self._raised(func(*args, **kwargs))
        written = {
            i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        }
        args = tuple(a if i in written else tree_map(self._raised, a) for i, a in enumerate(args))
        names = {func._schema.arguments[i].name for i in written}
        kwargs = {name: a if name in names else tree_map(self._raised, a) for name, a in kwargs.items()}
        return func(*args, **kwargs)

    def _raised(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.dtype) if value.dtype in self.lower else value
        return self.dtype if isinstance(value, torch.dtype) and value in self.lower else value


def fixed_tokens(model: PreTrainedModel) -> Tensor:
    """The same ids (2, at most 32) for every model of one vocabulary."""
    table: Any = model.get_input_embeddings().weight
    longest = getattr(model.config, "max_position_embeddings", None) or _TOKENS
    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, min(_TOKENS, longest))
    return torch.randint(0, table.shape[0], shape, generator=generator).to(table.device)


def compare_logits(one: PreTrainedModel, other: PreTrainedModel, arithmetic: torch.dtype | None = None) -> Difference:
    """Compare the logits of two models in evaluation mode on `fixed_tokens`.

    Args:
        arithmetic: what to compute in, whatever the weights' dtype; by default fp64 for fp64 weights, else fp32.
    """
    dtype = arithmetic or (torch.float64 if one.dtype is torch.float64 else torch.float32)
    tokens = fixed_tokens(one)
    expected, actual = logits(one, tokens, dtype), logits(other, tokens, dtype)
    scale = expected.abs().max().item()
    actual.sub_(expected)
    largest = actual.abs_().max().item()
    name = str(dtype).removeprefix("torch.")
    return Difference(largest, scale, largest / scale if scale else largest, BOUNDS[dtype], name, tokens.numel())


def logits(model: PreTrainedModel, tokens: Tensor, arithmetic: torch.dtype | None = None) -> Tensor:
    """Logits (rows, tokens, vocabulary) in evaluation mode, without a cache; in the model's own dtypes by default."""
    with evaluating(model), torch.no_grad():
        if arithmetic is None:
            return model(input_ids=tokens, use_cache=False).logits
        with Arithmetic(arithmetic):
            return model(input_ids=tokens, use_cache=False).logits
