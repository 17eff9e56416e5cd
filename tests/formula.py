"""Small networks in fp64 on which a mechanism is held against its formula, as a test writes it from the publication."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnres import Norm, Residual, make_residual
from attnres.residuals import Ways

SHAPES = [(8, 16, (2, 3)), (7, 12, (5,)), (3, 8, (2, 1, 2))]
"""Sublayers, width, tokens: even and odd depths, batches of several ranks."""
EPS = 1e-9


class Network:
    """Sublayers f_l(x) = tanh(W_l x) with a norm before each and one at the end; everything has a gradient."""

    def __init__(self, sublayers: int, width: int, tokens: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(sublayers)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.sublayers, self.width = sublayers, width
        self.embedding = leaf(*tokens, width).requires_grad_()
        self.weights = [(leaf(width, width) / width**0.5).requires_grad_() for _ in range(3 * sublayers)]
        self.gains = [(1 + leaf(width) / 4).requires_grad_() for _ in range(sublayers + 1)]
        self.probe = leaf(*tokens, width)

    def f(self, index: int, x: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        """Sublayer `index` of its normed input, or of those of its queries, keys and values."""
        query = x @ self.weights[index]
        if key is None or value is None:
            return torch.tanh(query)
        return torch.tanh(
            query + key @ self.weights[index + self.sublayers] * (value @ self.weights[index - self.sublayers])
        )

    def norm(self, index: int, h: Tensor) -> Tensor:
        """The norm in front of sublayer `index`, or, of L, of the head."""
        return F.rms_norm(h, (self.width,), self.gains[index], EPS)

    def run(self, residual: Residual) -> Tensor:
        """The network's output with this residual."""
        state = residual.start(self.embedding)
        for index in range(self.sublayers):
            x, state = residual.read(state, index, Norm(self.gains[index], eps=EPS))
            state = residual.write(state, index, self.f(index, *(x if isinstance(x, Ways) else [x])))
        return residual.finish(state, Norm(self.gains[-1], eps=EPS))


def on_logarithms(logits: Tensor, steps: int = 20) -> Tensor:
    """Sinkhorn's normalisation by its definition: columns and then rows of (..., n, n) sum to one, `steps` times."""
    for _ in range(steps):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()


Formula = Callable[[Network, Mapping[str, Tensor]], Tensor]
"""What a test writes from the publication: the network's output from its parts and the residual's parameters."""


def check_formula(name: str, formula: Formula, shape: tuple[int, int, tuple[int, ...]], **settings: Any) -> None:
    """Hold mechanism `name` against `formula`, output and every gradient, at its start and at random parameters."""
    network = Network(*shape)
    residual = make_residual(name, shape[0], shape[1], **settings).double()
    _compare(network, residual, formula)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in residual.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.3)
    _compare(network, residual, formula)


def _compare(network: Network, residual: Residual, formula: Formula) -> None:
    parameters = dict(residual.named_parameters())
    leaves = [network.embedding, *network.weights, *network.gains, *parameters.values()]
    actual, expected = network.run(residual), formula(network, parameters)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)
    gradients = [
        torch.autograd.grad((output * network.probe).sum(), leaves, allow_unused=True, materialize_grads=True)
        for output in (actual, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
