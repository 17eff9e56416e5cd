"""DeepCrossAttention against the formula of arXiv 2502.06785 (GRN-v3), inside a layer as in lucidrains' code."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


def formula(k=None):
    """The network with mixtures of all that layers wrote, or of the first and last k and the sum of the rest."""

    def chosen(outputs):
        if k is None or len(outputs) <= 2 * k + 1:
            return outputs
        return [*outputs[:k], torch.stack(outputs[k:-k]).sum(0), *outputs[-k:]]

    def compute(network, p):
        def mixture(place, way, outputs):
            total = torch.zeros_like(network.embedding)
            for y, output in enumerate(outputs):
                normed = p["gain"][place] * output / (output.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                logit = (normed * p[f"weight.{place}"][way]).sum(-1, keepdim=True)
                total = total + (torch.where(logit >= 0, logit, 0.0) + p[f"bias.{place}"][way, y]) * output
            return total

        written, index = [network.embedding], 0
        while index < network.sublayers:
            query, key, value = (mixture(index // 2, way, chosen(written)) for way in range(3))
            attention = network.f(index, *(network.norm(index, h) for h in (query, key, value)))
            if index + 1 == network.sublayers:
                written.append(attention)
                break
            written.append(attention + network.f(index + 1, network.norm(index + 1, query + attention)))
            index += 2
        return network.norm(network.sublayers, mixture((network.sublayers + 1) // 2, 0, chosen(written)))

    return compute


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_keys_and_values_are_mixed_apart(shape):
    check_formula("dca", formula(), shape)


@pytest.mark.parametrize("shape", [*SHAPES, (13, 8, (3,))])
@pytest.mark.parametrize("k", [1, 2])
def test_of_the_first_and_last_layers(shape, k):
    check_formula("dca", formula(k), shape, past_layers=k)


def test_start_values_are_the_published_ones():
    residual = make_residual("dca", 6, 8)
    assert [tuple(bias.shape) for bias in residual.bias] == [(3, 1, 8), (3, 2, 8), (3, 3, 8), (1, 4, 8)]
    assert all(bool((bias == 1).all()) for bias in residual.bias) and bool((residual.gain == 1).all())
    assert not any(weight.any() for weight in residual.weight)


def test_weights_leave_their_start():
    """ReLU's derivative at zero, where all of them start, must not be zero."""
    residual, x = make_residual("dca", 2, 8), torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    ways, _ = residual.read(residual.start(x), 0, lambda h: h)
    sum((way * x).sum() for way in ways).backward()
    assert bool((residual.weight[0].grad != 0).all())


def test_sources_are_what_layers_wrote():
    residual = make_residual("dca", 10, 8, past_layers=1)
    read = residual.layout()[-1]
    assert [(source.name, source.span) for source in read.sources] == [
        ("embedding", range(1)),
        ("middle", range(1, 9)),
        ("layer 4", range(9, 11)),
    ]


@pytest.mark.parametrize("settings", [{"past_layers": 0}, {"eps": -1.0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        make_residual("dca", 4, 8, **settings)
