"""A whole model under the compiler."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_one_graph(model: Any, logits: Callable[[Any], Tensor]) -> None:
    """Compile a model with no break of its graph, and hold what `logits` makes of it against the model's own."""
    torch._dynamo.reset()
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about the machine
        compiled = logits(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)
