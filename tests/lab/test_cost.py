"""Operations of mechanisms beside formulas and beside torch's own counter on real tensors."""

import pytest
import torch
from sample_mechanisms import crossed
from torch.utils.flop_counter import FlopCounterMode

from attnres.ops import plain_torch
from attnres.ops.norms import Norm
from attnres.residuals import make_residual
from lab.cost import operations

LAYERS, WIDTH = 6, 64
READS = 2 * LAYERS + 1


@pytest.mark.parametrize("name", crossed())
def test_matrix_products_are_those_that_torch_counts(name):
    """They are a part of the count, elementwise arithmetic the rest: more than the running sum's in all but five."""
    residual = make_residual(name, 2 * LAYERS, WIDTH)
    norm, tokens = Norm(torch.ones(WIDTH)), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
    with plain_torch(), FlopCounterMode(display=False) as counter:
        state = residual("start", tokens)
        for index in range(2 * LAYERS):
            x, state = residual("read", state, index, norm)
            state = residual("write", state, index, x[0] if isinstance(x, tuple) else x)
        residual("finish", state, norm)
    products, ours = counter.get_total_flops() / 5, operations(name, {}, 2 * LAYERS, WIDTH)
    assert products <= ours <= products + 40 * READS**2 * WIDTH
    assert (ours > 0) == (name not in ("standard", "postnorm", "deepnorm", "hybrid_norm", "compose"))  # without rules


def test_full_reads_every_source_with_a_product_and_a_sum():
    sources = sum(range(1, READS + 1))
    assert 4 * sources * WIDTH < operations("full", {}, 2 * LAYERS, WIDTH) < 7 * sources * WIDTH


def test_denseformer_mixes_the_outputs_of_layers():
    """After each layer one factor for each output before it and the embedding: a product and a sum for each value."""
    sources = sum(range(2, LAYERS + 2))
    assert operations("denseformer", {}, 2 * LAYERS, WIDTH) == pytest.approx(2 * sources * WIDTH, rel=0.15)


def test_settings_count():
    few, many = (operations("block", {"num_blocks": blocks}, 24, WIDTH) for blocks in (2, 12))
    assert many > 1.5 * few


def test_counting_draws_nothing_from_the_generator():
    """Of a process that trains: the weights that are drawn for the count would change what it draws next."""
    before = torch.get_rng_state()
    operations("muddformer", {}, 2 * LAYERS, WIDTH + 1)
    assert torch.equal(torch.get_rng_state(), before)
