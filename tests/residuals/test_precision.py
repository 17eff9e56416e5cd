"""A stream of fp32 whose sublayers give bf16, as under autocast: nothing but these outputs is rounded."""

import contextlib

import pytest
import torch

from attnres.ops import Norm, cpu, plain_torch
from attnres.residuals import RESIDUALS, make_residual

DEPTH, WIDTH = 8, 32
SETTINGS = {
    "block": [{"block_size": 2}, {"block_size": 4}],
    "delta_attnres": [{"block_size": 4}],
    "dca": [{}, {"past_layers": 3}],
}


def read_through(residual, embedding, outputs):
    """What the head is given."""
    norm = Norm(torch.ones(WIDTH, dtype=embedding.dtype))
    state = residual("start", embedding)
    for index, output in enumerate(outputs):
        _, state = residual("read", state, index, norm)
        state = residual("write", state, index, output)
    return residual("finish", state, norm)


@pytest.mark.quick("*-plain", "block-*", "full-*")
@pytest.mark.parametrize("path", ["kernels", "eager", "plain"])
@pytest.mark.parametrize(
    ("name", "settings"),
    # densenet's products are the network's own kind, in its own precision
    [(name, settings) for name in RESIDUALS if name != "densenet" for settings in SETTINGS.get(name, [{}])],
)
def test_sums_are_not_rounded_to_the_dtype_of_outputs(name, settings, path):
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(6, WIDTH, generator=generator)
    outputs = [torch.randn(6, WIDTH, generator=generator).bfloat16() for _ in range(DEPTH)]
    residual = make_residual(name, DEPTH, WIDTH, **settings)
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    with plain_torch() if path == "plain" else contextlib.nullcontext(), cpu.switched(on=path == "kernels"):
        h = read_through(residual, embedding, outputs)
    expected = read_through(residual.double(), embedding.double(), [output.double() for output in outputs])
    torch.testing.assert_close(h.double(), expected, rtol=0, atol=2e-5)
