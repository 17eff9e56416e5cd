"""Measure whether two models compute the same: logits, or the outputs of a base model.

Models in 16 bits are compared in fp32 arithmetic on their own weights: in 16 bits rounding alone changes logits by a
percent, which would hide a real difference of that size.
"""

import inspect
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from attnres.head import evaluating
from attnres.ops.devices import forked_generators

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""By dtype: the largest difference of two logits, relative to the largest logit, that counts as rounding."""

_SIXTEEN = (torch.bfloat16, torch.float16)
_ROWS, _TOKENS = 2, 32


class LogitDifference(NamedTuple):
    """The difference between the logits of two models on one batch of tokens.

    Attributes:
        largest: largest absolute difference.
        scale: largest absolute logit of the first model.
        relative: largest / scale.
        bound: the largest `relative` that counts as rounding.
        arithmetic: the dtype of the computation.
        tokens: number of compared tokens.
    """

    largest: float
    scale: float
    relative: float
    bound: float
    arithmetic: str
    tokens: int

    @property
    def within(self) -> bool:
        """Return whether the difference is within the bound; False if a logit is not finite."""
        return self.relative <= self.bound


class Arithmetic(TorchDispatchMode):
    """Run operators in `dtype`, fp32 or fp64, whatever lower precision the weights and the code ask for.

    Every tensor of lower precision is cast when an operator takes it, so a weight exists in two precisions only during
    a call.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.lower = (*_SIXTEEN, torch.float32) if dtype is torch.float64 else _SIXTEEN

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:  # cast only the rows that are looked up, not the table
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


def fixed_tokens(model: PreTrainedModel, tokens: int = _TOKENS, rows: int = _ROWS) -> Tensor:
    """Return ids (rows, at most `tokens`) that are the same for every model of one vocabulary."""
    table: Any = model.get_input_embeddings().weight
    text: Any = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or tokens
    generator = torch.Generator().manual_seed(0)
    shape = (rows, min(tokens, longest))
    return torch.randint(0, table.shape[0], shape, generator=generator).to(table.device)


def fixed_inputs(model: PreTrainedModel, tokens: int = _TOKENS) -> dict[str, Tensor]:
    """Return arguments that are the same for every model of one configuration: ids, or noise as pictures or sound; and
    the decoder's ids for an encoder-decoder."""
    config: Any = model.config
    name, first = model.main_input_name, next(model.parameters())
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(first)

    # a classifier takes no batch of several rows without a padding id
    rows = 1 if "Classification" in type(model).__name__ else _ROWS
    if name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs = {name: noise(_ROWS, config.num_channels, height, width)}
    elif name == "input_features" and hasattr(config, "max_source_positions"):
        inputs = {name: noise(1, config.num_mel_bins, 2 * config.max_source_positions)}
    elif name == "input_values":
        inputs = {name: noise(1, 4000)}
    else:
        inputs = {name: fixed_tokens(model, tokens, rows)}
    if config.is_encoder_decoder:
        ids = torch.randint(0, config.vocab_size, (len(inputs[name]), min(tokens, 8)), generator=generator)
        inputs["decoder_input_ids"] = ids.to(first.device)
    return inputs


def compare_logits(
    one: PreTrainedModel, other: PreTrainedModel, arithmetic: torch.dtype | None = None
) -> LogitDifference:
    """Compare the logits (or the first outputs) of two models in evaluation mode on `fixed_inputs`.

    Args:
        arithmetic: the dtype to compute in, whatever the weights' dtype; by default fp64 for fp64 weights, else fp32.
    """
    dtype = arithmetic or (torch.float64 if one.dtype is torch.float64 else torch.float32)
    inputs = fixed_inputs(one)
    expected, actual = logits(one, inputs, dtype), logits(other, inputs, dtype)
    scale = expected.abs().max().item()
    actual.sub_(expected)
    largest = actual.abs_().max().item()
    name = str(dtype).removeprefix("torch.")
    return LogitDifference(
        largest, scale, largest / scale if scale else largest, BOUNDS[dtype], name, expected[..., 0].numel()
    )


def logits(
    model: PreTrainedModel, inputs: Tensor | Mapping[str, Tensor], arithmetic: torch.dtype | None = None
) -> Tensor:
    """Return logits (rows, tokens, vocabulary), or the first output of a model without them, in evaluation mode and
    without a cache; by default in the model's dtypes. `inputs` are ids or named arguments."""
    with evaluating(model):
        if arithmetic is None:
            return _main(_run(model, inputs))
        with Arithmetic(arithmetic):
            return _main(_run(model, inputs))


@torch.no_grad()
def _run(model: PreTrainedModel, inputs: Tensor | Mapping[str, Tensor]) -> Any:
    """Return a model's output for ids or named arguments, without a cache."""
    arguments: dict[str, Any] = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    return model(**arguments)


@torch.no_grad()
def training_difference(one: PreTrainedModel, other: PreTrainedModel) -> float | None:
    """Compare one pass of two models in training mode, with the same random numbers, in the weights' dtypes.

    Returns:
        The largest difference relative to the largest value; None if the first model cannot make such a pass. Buffers
        are restored.
    """
    inputs, results = fixed_inputs(one), list[Tensor]()
    buffers = [(buffer, buffer.clone()) for buffer in one.buffers()]
    # Transformers draws masks of sound with numpy's global generator
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    with forked_generators(parameter.device for parameter in one.parameters()):
        for model in (one, other):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            try:
                with evaluating(model):  # restores the mode of every module
                    results.append(_main(_run(model.train(), inputs)).float())
            except Exception:
                if model is other:
                    raise
                return None  # its code needs another kind of batch in training
            finally:
                random.setstate(states[0])
                np.random.set_state(states[1])  # noqa: NPY002
                for buffer, value in buffers:
                    buffer.copy_(value)
    expected, actual = results
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def _main(output: Any) -> Tensor:
    named = getattr(output, "logits", None)
    return output[0] if named is None else named
