"""Context parallelism: the tokens of a pass are split over ranks, parameters are not; keys and values are gathered.

Everything in a layer but attention is per token. So a rank passes its tokens through whole layers, and each attention
gathers the keys and values of all tokens (B, heads, T, head_dim) for its rank's queries. No ring: all keys and values
are on every rank while a layer runs, T d of them, where the stream is T/P N d.
"""

from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attnres.errors import UserError
from attnres.models import DepthMixin
from attnres.scale.tensor import InputHook, TokenSlices

_numbers = count()


def share_out_tokens(model: DepthMixin, mesh: DeviceMesh) -> TokenSlices:
    """Split the tokens of a model's training passes over `mesh` (of one dimension).

    Every parameter gets gradients of this rank's tokens: their sum over the mesh is the gradient.

    Raises:
        UserError: layers that mix tokens by something other than softmax attention.
    """
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(config, "attn_logit_softcapping", None) is not None or model.residual.itself().value_mix:
        what = f"layers of {sorted(kinds)}" if kinds else "attention with capped logits or shared values"
        raise UserError(f"{type(model).__name__} has {what}, which cp does not gather: train it with dp, shard or pp")
    if not model._supports_sdpa:
        raise UserError(
            f"the attention of {type(model).__name__} is more than PyTorch's (sinks, say), which cp would leave out: "
            "train it with dp, shard or pp"
        )
    slices = TokenSlices(mesh)
    name = f"attnres_context_{next(_numbers)}"
    attention = _Attention(slices)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, partial(_mask, slices))
    model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise UserError(f"{type(model).__name__} keeps an attention of its own: train it with dp, shard or pp")
    layers = model.depth_layers
    layers[0].register_forward_pre_hook(InputHook(slices.begin), prepend=True, with_kwargs=True)
    layers[0].register_forward_pre_hook(attention.begin)
    for layer in layers:
        layer.register_forward_pre_hook(partial(_positions, slices), with_kwargs=True)
    layers[-1].register_forward_hook(attention.end(len(layers)))
    return slices


class _Attention:
    """Transformers' attention function, for a rank's queries and all keys and values."""

    def __init__(self, slices: TokenSlices) -> None:
        self.slices, self.calls = slices, 0

    def begin(self, *_: Any) -> None:
        self.calls = 0

    def end(self, layers: int) -> Any:
        """Return a hook that refuses a pass in which not every layer gathered."""

        def check(layer: nn.Module, *_: Any) -> None:
            if self.calls < layers:
                raise UserError(
                    f"{self.calls} of {layers} layers ({type(layer).__name__}) asked for their attention where tokens "
                    "are gathered: train the model with dp, shard or pp"
                )

        return check

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if key.shape[2] != query.shape[2]:
            raise UserError("a pass with cp was given a cache: cp trains, tp and plain models generate")
        self.calls += 1
        keys, values = self._gathered(key), self._gathered(value)
        options["is_causal"] = False
        return sdpa_attention_forward(module, query, keys, values, attention_mask, **options)

    def _gathered(self, part: Tensor) -> Tensor:
        """Return all tokens of keys or values (B, heads, T/P, head_dim); gradients of all ranks' queries are summed."""
        shape = torch.Size((*part.shape[:2], self.slices.shape[1], part.shape[3]))
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(part.contiguous(), self.slices.mesh, [Shard(2)], shape=shape, stride=stride)
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _mask(slices: TokenSlices, q_length: int, q_offset: Any = 0, **options: Any) -> Tensor | None:
    """Return Transformers' mask of a rank's queries, (B, 1, T/P, T): never None, because they may begin anywhere."""
    ours = slices.of(torch.arange(q_length)[None])[0]
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(q_length=len(ours), q_offset=q_offset + int(ours[0]), **options)


def _positions(slices: TokenSlices, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace a layer's rotary embeddings and positions by those of this rank's tokens."""
    whole, places, ours = kwargs.get("position_embeddings"), kwargs.get("position_ids"), {}
    if whole is not None:
        ours["position_embeddings"] = tuple(slices.of(part) for part in whole)
    if places is not None and places.ndim == 2:
        ours["position_ids"] = slices.of(places)
    return args, {**kwargs, **ours}
