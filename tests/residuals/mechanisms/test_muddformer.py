"""MUDDFormer against the formula of arXiv 2502.12170, and its trimmed variant."""

import math

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


def formula(mixed_layers, prepost=False):
    """The network with mixtures after those of its layers that `mixed_layers` (a function of their number) says;
    `prepost`: of sources that are normed, added to what the layer gave, the stream's normed once more."""

    def compute(network, p):
        def unit(x):
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        def gelu(x):
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

        count = network.sublayers // 2
        chosen = list(mixed_layers(count))
        x, hiddens = network.embedding, [network.embedding]
        ways = [x] * 4
        for layer in range(count):
            query, key, value, stream = ways
            norm, index = network.norm, 2 * layer
            if len({*map(id, ways)}) == 1:
                attention = network.f(index, norm(index, query))
            else:
                attention = network.f(index, *(norm(index, h) for h in (query, key, value)))
            stream = stream + attention
            x = stream + network.f(index + 1, norm(index + 1, stream))
            hiddens.append(x)
            ways = [x] * 4
            if layer in chosen:
                place = chosen.index(layer)
                weights = gelu(unit(x) @ p[f"inner.{place}"].T) @ p[f"outer.{place}"].T
                table = p[f"bias.{place}"]
                taken = [p["pre"][j] * unit(y) for j, y in enumerate(hiddens)] if prepost else hiddens
                ways = [
                    sum(
                        (weights[..., c * len(hiddens) + j, None] + table[c, j]) * taken[j] for j in range(len(hiddens))
                    )
                    for c in range(len(table))
                ]
                if prepost:
                    ways[-1] = p["post"][place] * unit(ways[-1])
                    ways = [x + way for way in ways]
        if network.sublayers % 2:
            query, key, value, x = ways
            index = network.sublayers - 1
            x = x + network.f(index, *(network.norm(index, h) for h in (query, key, value)))
            return network.norm(network.sublayers, x)
        return network.norm(network.sublayers, ways[0])

    return compute


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_before_and_after_a_mixture(shape):
    check_formula("muddformer", formula(range, prepost=True), shape, prepost_norm=True)


def test_norms_before_and_after_start_as_the_standard_residual_to_the_bit():
    torch.manual_seed(0)
    residual, standard = make_residual("muddformer", 6, 8, prepost_norm=True), make_residual("standard", 6, 8)
    results = []
    for one in (residual, standard):
        state = one.start(torch.ones(3, 8))
        for index in range(6):
            x, state = one.read(state, index, torch.tanh)
            state = one.write(state, index, sum(x) / 3 if isinstance(x, tuple) else x)
        results.append(one.finish(state, torch.tanh))
    assert torch.equal(*results) or torch.allclose(*results, rtol=1e-6)
    results[0].sum().backward()
    assert all(outer.grad.any() for outer in residual.outer)  # W2 = 0 learns from the first step on
    assert not residual.traits.linear and residual.post.shape == (3, 8) and residual.pre.shape == (4, 8)
    with pytest.raises(UserError, match="prepost_norm is 'yes'"):
        make_residual("muddformer", 6, 8, prepost_norm="yes")


@pytest.mark.parametrize("shape", SHAPES)
def test_four_mixtures_after_each_layer_and_one_after_the_last(shape):
    check_formula("muddformer", formula(range), shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [1, 2, 9])
def test_trimmed_to_the_last_layers(shape, last):
    check_formula("muddformer", formula(lambda count: range(max(0, count - last), count)), shape, last_layers=last)


def test_start_values_are_the_published_ones():
    residual = make_residual("muddformer", 6, 64)
    for layer, (inner, outer, bias) in enumerate(zip(residual.inner, residual.outer, residual.bias)):
        ways = 4 if layer < 2 else 1
        assert inner.shape == (ways * (layer + 2), 64) and outer.shape == (ways * (layer + 2),) * 2
        assert not outer.any()
        assert torch.equal(bias, torch.tensor([0.0] * (layer + 1) + [1.0]).expand(ways, -1))
    drawn = torch.cat([inner.flatten() for inner in residual.inner])
    assert drawn.std().item() == pytest.approx(64**-0.5, rel=0.1) and abs(drawn.mean().item()) < 0.01


def test_reads_have_rows_of_their_own():
    reads = make_residual("muddformer", 5, 8).layout()
    assert [read.name for read in reads] == [
        "attention 0",
        "mlp 0",
        *(f"attention 1 {way}" for way in ("query", "key", "value", "stream")),
        "mlp 1",
        *(f"attention 2 {way}" for way in ("query", "key", "value", "stream")),
        "output",
    ]
    assert [source.name for source in reads[7].sources] == ["embedding", "layer 0", "layer 1"]
    assert reads[6].sources[0].after == 5 and reads[-1].sources[0].after == 10


@pytest.mark.parametrize("settings", [{"last_layers": 0}, {"last_layers": 1.5}, {"eps": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        make_residual("muddformer", 4, 8, **settings)
