"""The geometry of queries bounds what reads can do, and gates are reported as they act."""

import math

import numpy as np
import pytest
import torch
from sample_mechanisms import crossed
from tiny import stir

from attnres.inspect import geometry
from attnres.residuals import make_residual


def drawn(name, scale=0.5, sublayers=6, width=16, **settings):
    residual = make_residual(name, sublayers, width, **settings)
    stir(residual, scale, seed=3)
    return residual


@pytest.mark.parametrize("name", ["full", "block", "cumulative", "boundary", "boundary_normed"])
def test_no_source_gets_a_logit_beyond_the_sharpness(name):
    residual = drawn(name)
    sharp = geometry.sharpness(residual)
    assert len(sharp) == 7
    sources = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    for index, limit in enumerate(sharp):
        query = residual.direction(index)
        if query is None:
            assert limit is None
            continue
        # What weighs a source's unit vector; `boundary_normed` takes its keys, gain and all, for values.
        normed = name == "boundary_normed"
        weighing = query * residual.gain[math.ceil(index / residual.block_size) - 1] / 4.0 if normed else query
        sources[0] = weighing  # the source that reaches it
        keys = sources / sources.square().mean(1, keepdim=True).sqrt()
        logits = keys @ weighing
        assert logits.max().item() == pytest.approx(limit, rel=1e-5)


def test_temperature_divides_the_sharpness():
    plain, warm = drawn("full"), drawn("full", read_temperature=2.0)
    assert geometry.sharpness(warm) == pytest.approx([value / 2 for value in geometry.sharpness(plain)])


def test_cosines_are_one_on_the_diagonal_and_absent_without_a_query():
    residual = drawn("block")
    with torch.no_grad():
        residual.query[2] = 0.0
        residual.query[4] = -3 * residual.query[3] * residual.gain[3] / residual.gain[4]
    cosine = geometry.query_cosine(residual)
    assert cosine[3][4] == pytest.approx(-1) and cosine[1][1] == pytest.approx(1)
    assert cosine[2] == [None] * 7 and all(row[2] is None for row in cosine)


@pytest.mark.parametrize("name", crossed())
def test_every_new_residual_is_described_or_left_out(name):
    residual = make_residual(name, 6, 16)
    assert geometry.query_cosine(residual) is None and geometry.query_pca(residual) is None
    sharp = geometry.sharpness(residual)
    assert sharp is None if not residual.traits.has_query else all(value in (0.0, None) for value in sharp)


def test_principal_axes_keep_the_distances_of_queries_that_lie_in_a_plane():
    residual = drawn("full")
    g = torch.Generator().manual_seed(1)
    plane, places = torch.randn(2, 16, generator=g), torch.randn(7, 2, generator=g)
    with torch.no_grad():
        residual.gain.fill_(1.0)
        residual.query.copy_(places @ plane)
    pca = geometry.query_pca(residual)
    points, queries = np.array(pca["points"]), residual.query.detach().double().numpy()
    for i in range(7):
        for j in range(i):
            assert math.dist(points[i], points[j]) == pytest.approx(np.linalg.norm(queries[i] - queries[j]), rel=1e-5)
    assert sum(pca["explained"]) == pytest.approx(1)
    assert pca["explained"][0] >= pca["explained"][1]


def test_equal_queries_have_no_axes():
    residual = make_residual("full", 4, 8)
    with torch.no_grad():
        residual.query.fill_(1.0)
    assert geometry.query_pca(residual) is None


def test_gates_are_reported_as_they_act():
    biased = make_residual("full", 4, 8, recency_bias=3.0, gate="scalar", gate_init=-2.0)
    tables = geometry.learned_mixing(biased)
    assert tables["recency_bias"] == [3.0] * 5
    assert tables["gate"] == pytest.approx([1 / (1 + math.exp(2))] * 5)
    vector = geometry.learned_mixing(make_residual("full", 4, 8, gate="vector", gate_init=0.0))
    assert vector == {"gate": [0.5] * 5}
    assert geometry.learned_mixing(make_residual("full", 4, 8, alpha="learnable")) == {"alpha": [0.0] * 5}
    dense = geometry.learned_mixing(make_residual("denseformer", 4, 8))
    assert dense == {"mix": [[0.0, 1.0], [0.0, 0.0, 1.0]]}
    streams = geometry.learned_mixing(make_residual("hyper_connections", 4, 8, num_streams=2))
    assert streams == {"read": [[1, 0], [0, 1], [1, 0], [0, 1]], "write": [[1, 1]] * 4}
    assert geometry.learned_mixing(make_residual("full", 4, 8)) is None
    assert geometry.learned_mixing(make_residual("standard", 4, 8)) is None
