"""Decode fast, and time it: a model's passes as CUDA graphs, and the tokens per second of greedy decoding.

Without a graph, a token waits for the host's kernel launches. A graph needs fixed addresses: its memory pool holds the
sources of a pass, as a bank holds those of a pass on a CPU. The KV cache must not move either, so it is Transformers'
static cache, and each prompt length has a graph.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

from attnres.errors import first_line
from attnres.residuals import Residual
from attnres.training import graphs

_log = logging.getLogger("attnres")

STEP = 256
"""A cache's length is a multiple of this; a longer prompt needs a new cache and new graphs."""
MOST = 16
"""Largest number of graphs of a model: each holds the memory of a pass."""


def why_not_captured(model: Any) -> str | None:
    """Return the reason why a generating model's passes cannot be captured; None if they can, as far as known before
    trying."""
    if model.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and this model is on {model.device.type}"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} takes no static cache"
    return None


class Replays:
    """Stores the CUDA graphs of a model by the arguments of its `forward`, and its KV cache, for later prompts."""

    def __init__(self) -> None:
        self.cache: StaticCache | None = None
        self.length = 0
        self.graphs: dict[Any, tuple[graphs.Graph, list[Any]]] = {}
        self.seen: Counter[Any] = Counter()
        self.failed: str | None = None

    @contextmanager
    def of(self, model: Any, length: int) -> Generator[StaticCache | None]:
        """Give a cleared static cache of at least `length` tokens; inside the block `model.forward` replays a graph
        once it was called often enough with the same shapes and this cache. Gives None if nothing can be captured."""
        if self.cache is None or self.length < length:
            self.length = -(-length // STEP) * STEP
            self.cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=self.length)
            self.graphs.clear()
            self.seen.clear()
        if self.failed is not None or any(type(layer) is not StaticLayer for layer in self.cache.layers):
            yield None  # layers of other classes count tokens in Python
            return
        self.cache.reset()
        forward: Callable[..., Any] = model.forward
        residual = next((module for module in model.modules() if isinstance(module, Residual)), None)

        @functools.wraps(forward)
        def replaying(*args: Any, **kwargs: Any) -> Any:
            if self.failed is not None or (residual is not None and residual.watched):
                return forward(*args, **kwargs)
            return self._call(forward, args, kwargs)

        model.forward = replaying
        try:
            yield self.cache
        finally:
            del model.forward

    def _call(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not self.cache:
            return forward(*args, **kwargs)
        leaves, form = tree_flatten((args, {**kwargs, "past_key_values": None}))
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = (form, *kinds)
        if key not in self.graphs:
            self.seen[key] += 1
            if self.seen[key] <= graphs.WARM_UP or len(self.graphs) == MOST:
                return forward(*args, **kwargs)
            inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own_args, own_kwargs = tree_unflatten(inputs, form)
            own_kwargs["past_key_values"] = self.cache
            try:
                graph = graphs.Graph(functools.partial(forward, *own_args, **own_kwargs))
            except Exception as error:  # any exception of a kernel or the driver
                self.failed = first_line(error)
                _log.warning("attnres: passes are not captured, which makes each token slower: %s", self.failed)
                return forward(*args, **kwargs)
            self.graphs[key] = graph, inputs
        graph, inputs = self.graphs[key]
        for graph_input, leaf in zip(inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                graph_input.copy_(leaf)
        graph.replay()
        return graph.output


# ------------------------------------------------------------------ speed


class _Clock(BaseStreamer):
    """Records when the prompt and each token arrived."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())  # the value is on the CPU: the device has finished this token

    def end(self) -> None:
        pass


def decode_rate(model: PreTrainedModel, ids: Tensor, tokens: int) -> float:
    """Return tokens per second of greedy decoding with a KV cache, from the first new token after `ids` (1, T) to the
    last."""
    clock = _Clock()
    settings = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, num_beams=1, pad_token_id=0, use_cache=True
    )
    with torch.inference_mode():
        model.generate(  # ty: ignore[not-callable]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=clock
        )
    return (tokens - 1) / (clock.times[-1] - clock.times[1])
