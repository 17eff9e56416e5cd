"""MUDDFormer against the formula of arXiv 2502.12170, and its trimmed variant."""

import math

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


def formula(mixed_layers):
    """The network with mixtures after those of its layers that `mixed_layers` (a function of their number) says."""

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
                ways = [
                    sum(
                        (weights[..., c * len(hiddens) + j, None] + table[c, j]) * hiddens[j]
                        for j in range(len(hiddens))
                    )
                    for c in range(len(table))
                ]
        if network.sublayers % 2:
            query, key, value, x = ways
            index = network.sublayers - 1
            x = x + network.f(index, *(network.norm(index, h) for h in (query, key, value)))
            return network.norm(network.sublayers, x)
        return network.norm(network.sublayers, ways[0])

    return compute


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
