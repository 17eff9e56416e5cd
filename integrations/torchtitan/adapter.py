"""Depth reads for torchtitan's dense decoders (llama3, qwen3), and its state-dict adapters with them.

    add_depth_reads(model, "block", num_blocks=4)     where the model is built, on the meta device too
    read_group(lr=8e-4)                               before the other groups of the optimizer's config
    with_reads(Llama3StateDictAdapter)                for ModelSpec.state_dict_adapter

Each layer gets a forward of reads and writes. What torchtitan does to layers one by one (checkpointing, compiling,
sharding) then meets functions of tuples of tensors.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

import attnres


class _Layer:
    """Mixed into the class of a layer, `x = x + f(norm(x))` twice."""

    def forward(self: Any, x: Any, attention_masks: Any = None, positions: Any = None) -> Any:
        residual, index = self.depth
        state = residual.start(x) if index == 0 else x
        x, state = residual.read(state, index, self.attention_norm)
        state = residual.write(state, index, self.attention(x, attention_masks, positions))
        x, state = residual.read(state, index + 1, self.ffn_norm)
        return residual.write(state, index + 1, self.feed_forward(x))


class _Norm:
    """Mixed into the class of the final norm."""

    def forward(self: Any, state: Any) -> Tensor:
        return self.depth[0].finish(state, super().forward)


class _Model:
    """Mixed into the class of the model, whose start values know torchtitan's own modules alone."""

    def init_states(self: Any, **options: Any) -> None:
        super().init_states(**options)
        self.residual.reset_parameters()


def add_depth_reads(model: nn.Module, residual: str = "block", read_scale: str = "sum", **settings: Any) -> None:
    """Give a decoder of torchtitan depth reads, in place, as `model.residual`. `init_states` gives them values."""
    titan: Any = model
    layers = list(titan.layers.values())
    with torch.device(next(model.parameters()).device):
        depth = attnres.DepthReads(2 * len(layers), titan.config.dim, residual, read_scale=read_scale, **settings)
    titan.residual = depth.residual
    for number, layer in enumerate(layers):
        _become(layer, _Layer).depth = (depth.residual, 2 * number)  # a tuple: the parameters are the model's
    _become(titan.norm, _Norm).depth = (depth.residual, 2 * len(layers))
    _become(model, _Model)


def _become(module: nn.Module, mixin: type) -> Any:
    module.__class__ = type(f"Depth{type(module).__name__}", (mixin, type(module)), {})
    return module


def read_group(lr: float, **options: Any) -> Any:
    """Return the `ParamGroupConfig` of queries and gains: no weight decay. The tenth of the rate is in `query_lr`.

    The first pattern that fits a parameter's name wins, so it goes before the others.
    """
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig

    options |= {"lr": lr, "weight_decay": 0.0}
    return ParamGroupConfig(pattern=r"(^|\.)residual\.", optimizer_name="AdamW", optimizer_kwargs=options)


# ---------------------------------------------------------------------------------------------- checkpoints of the hub

OURS = "residual."
"""What names begin with in a torchtitan model that holds its residual as `model.residual`."""
HF = "model.residual."
"""The same in Hugging Face's layout, where the residual belongs to the base model."""


class StateDictAdapter(Protocol):
    """What torchtitan asks of an adapter's class; it is made from a model's config and a folder."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give Hugging Face's names and shapes to torchtitan's tensors."""
        ...

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give torchtitan's names and shapes to Hugging Face's tensors."""
        ...


def with_reads(adapter: type[StateDictAdapter]) -> type[StateDictAdapter]:
    """Make a class for `ModelSpec.state_dict_adapter` which also carries `model.residual` of a torchtitan model.

    Everything else is `adapter`'s, one of torchtitan's own. What it writes has the names of our Hugging Face classes.
    """
    base: Any = adapter

    class WithReads(base):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            reads, others = _apart(state_dict, OURS)
            return super().to_hf(others) | {HF + name: tensor for name, tensor in reads.items()}

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            reads, others = _apart(hf_state_dict, HF)
            return super().from_hf(others) | {OURS + name: tensor for name, tensor in reads.items()}

    WithReads.__name__ = WithReads.__qualname__ = f"{adapter.__name__}WithReads"
    return WithReads


def _apart(tensors: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors below the prefix, by what follows it, and the others."""
    below = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return below, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
