"""Passes of a model that generates, replayed as CUDA graphs: not captured, a token waits for the host's launches.

A graph has addresses of its own, which its memory pool keeps: what a pass without gradients makes of its sources lies
there from one token to the next, as the sources of a pass on a CPU lie in a bank. The KV cache has to stay where it is
too, so it is Transformers' static one, and a prompt's pass has a graph for its length.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from attnres.errors import first_line
from attnres.residuals import Residual
from attnres.training import graphs

STEP = 256
"""Of a cache's length: a longer prompt wants a new one, and its graphs anew."""
MOST = 16
"""Graphs of a model: each keeps the memory of a pass."""

_log = logging.getLogger("attnres")


def why_not(model: Any) -> str | None:
    """Return why passes of a model that generates cannot be captured; None if they can, as far as can be told before
    one is tried."""
    if model.device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and this model is on {model.device.type}"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"{type(model).__name__} takes no static cache"
    return None


class Replays:
    """The graphs of a model, by what its `forward` is called with, and its KV cache: kept for later prompts."""

    def __init__(self) -> None:
        self.cache: StaticCache | None = None
        self.length = 0
        self.graphs: dict[Any, tuple[graphs.Graph, list[Any]]] = {}
        self.seen: Counter[Any] = Counter()
        self.failed: str | None = None

    @contextmanager
    def of(self, model: Any, length: int) -> Generator[StaticCache | None]:
        """While the block runs, `model.forward` replays a graph where it was called often enough with tensors of these
        shapes and the cache that this gives, an empty one of `length` tokens or more; None where none is captured."""
        if self.cache is None or self.length < length:
            self.length = -(-length // STEP) * STEP
            self.cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=self.length)
            self.graphs.clear()
            self.seen.clear()
        if self.failed is not None or any(type(layer) is not StaticLayer for layer in self.cache.layers):
            yield None  # other layers count tokens in Python
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
            except Exception as error:  # of whatever a kernel or the driver refuses
                self.failed = first_line(error)
                _log.warning("attnres: passes are not captured, which makes each token slower: %s", self.failed)
                return forward(*args, **kwargs)
            self.graphs[key] = graph, inputs
        graph, inputs = self.graphs[key]
        for own, leaf in zip(inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                own.copy_(leaf)
        graph.replay()
        return graph.output
