"""Depth reads for nanochat: `make_depth` for the constructor of its GPT, `depth_pass` for the loop over layers.

nanochat scales its hidden state before layer i and adds the embedding again, x <- a_i x + b_i x0, and takes half of
the hidden state away at the end. Divided by the product of the a so far, that is a plain sum, and a norm does not see
the factor. So outputs are written divided by it.
"""

from typing import Any

import torch
from torch import Tensor

import attnres


def make_depth(config: Any) -> attnres.DepthReads | None:
    """Return the depth reads of a GPTConfig, None where its `residual` is empty."""
    if not config.residual:
        return None
    return attnres.DepthReads(2 * config.n_layer, config.n_embd, config.residual, read_scale="sum")


def depth_pass(gpt: Any, ids: Tensor, x0: Tensor, cos_sin: Any, kv_cache: Any) -> tuple[Tensor, Tensor]:
    """Run the layers on x0, (B, T, d). Returns the hidden state after the last, and after the middle one."""
    residual, layers = gpt.depth.residual, gpt.transformer.h
    norm = attnres.Norm(eps=torch.finfo(x0.dtype).eps)  # what F.rms_norm takes where no eps is given
    scale = gpt.resid_lambdas.cumprod(0)
    again = gpt.x0_lambdas / scale
    state = residual.start((1 + again[0]) * x0)
    middle = x0
    for i, layer in enumerate(layers):
        ve = gpt.value_embeds[str(i)](ids).to(x0.dtype) if str(i) in gpt.value_embeds else None
        x, state = residual.read(state, 2 * i, norm)
        state = residual.write(state, 2 * i, layer.attn(x, ve, cos_sin, gpt.window_sizes[i], kv_cache) / scale[i])
        x, state = residual.read(state, 2 * i + 1, norm)
        output = layer.mlp(x) / scale[i]
        if i == len(layers) // 2:
            middle = scale[i] * (residual.hidden_state(state) + output)
        if i + 1 < len(layers):
            output = output + again[i + 1] * x0
        state = residual.write(state, 2 * i + 1, output)
    return scale[-1] * residual.finish(state, lambda h: h), middle
