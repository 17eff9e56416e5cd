"""A Llama's layers written out in plain torch, with rotary positions and grouped-query attention, from its weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from attnres.models.classes import CLASSES

HEADS, SHARED, HEAD, WIDTH, VOCAB = 4, 2, 6, 16, 31


def grouped_llama(residual: str, layers: int = 3, **fields: Any) -> Any:
    """A fp64 Llama with a residual, four query heads and two of keys and values; all its parameters are random."""
    config, model = CLASSES["llama"]
    size = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": layers}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": SHARED, "head_dim": HEAD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = model(config(residual=residual, **size, **heads, max_position_embeddings=32, **fields)).double().eval()
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    assert issubclass(config, LlamaConfig)
    return built


class Explicit:
    """The same network from the model's weights. `values` changes a layer's values, (B, T, heads, head_dim) each:
    values(layer, own, x) for x the vectors (B, T, d) that they were made of."""

    def __init__(self, model: Any, values: Callable[[int, Tensor, Tensor], Tensor] | None = None) -> None:
        self.p = {name.removeprefix("model."): parameter for name, parameter in model.named_parameters()}
        self.eps, self.values, self.sublayers = model.config.rms_norm_eps, values, model.residual.num_sublayers

    def embedding(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.p["embed_tokens.weight"])

    def norm(self, index: int, h: Tensor) -> Tensor:
        """The norm before sublayer `index`, or of L the head's."""
        kind = ("input", "post_attention")[index % 2]
        gain = self.p["norm.weight" if index == self.sublayers else f"layers.{index // 2}.{kind}_layernorm.weight"]
        return gain * h / (h.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def f(self, index: int, x: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Sublayer `index` of its normed input, or of those of its queries, keys and values."""
        layer = f"layers.{index // 2}."
        if index % 2:
            gate, up, down = (self.p[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            return (F.silu(x @ gate) * (x @ up)) @ down
        key, value = x if key is None else key, x if value is None else value
        parts = zip("qkv", (x, key, value), (HEADS, SHARED, SHARED))
        q, k, v = (
            (h @ self.p[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(-1, (heads, HEAD))
            for name, h, heads in parts
        )
        if self.values is not None:
            v = self.values(index // 2, v, value)
        q, k = turned(q), turned(k)
        outputs = []
        for head in range(HEADS):
            group = head // (HEADS // SHARED)
            scores = q[:, :, head] @ k[:, :, group].mT / HEAD**0.5
            later = torch.ones_like(scores[0]).triu(1).bool()
            outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, :, group])
        return torch.cat(outputs, -1) @ self.p[f"{layer}self_attn.o_proj.weight"].T

    def logits(self, h: Tensor) -> Tensor:
        """Of the head's normed input."""
        return h @ self.p["lm_head.weight"].T


def turned(x: Tensor) -> Tensor:
    """Rotary positions of (B, T, heads, head_dim): channel i turns with channel i + head_dim / 2, by angles in fp32, as
    Transformers has them."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None, None] * (1.0 / 10000.0 ** (torch.arange(0, 2 * half, 2) / (2 * half)))
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def check_same(model: Any, expected: Callable[[], Tensor], ids: Tensor) -> None:
    """Hold a model's logits, and the gradients of all its parameters, against those written out."""
    actual = model(input_ids=ids, use_cache=False).logits
    theirs = expected()
    torch.testing.assert_close(actual, theirs, rtol=1e-9, atol=1e-9)
    probe = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours, written = (
        torch.autograd.grad((logits * probe).sum(), leaves, allow_unused=True, materialize_grads=True)
        for logits in (actual, theirs)
    )
    for a, b in zip(ours, written, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
