"""Multi-Gate Residuals: streams accumulate, then move towards each output; the limits that settle its start."""

import math

import pytest
import torch
from formula import SHAPES, Network, check_formula

from attnres import UserError, make_residual
from attnres.residuals.check.reads import Recording


def formula(streams, gate):
    def compute(network, p):
        d = network.width

        def score(s, w):
            return (s * w).sum(-1) / (s.pow(2).mean(-1) + 1e-6).sqrt() / math.sqrt(d)

        s = [network.embedding]
        for index in range(network.sublayers + 1):
            h = s[0]
            if index:
                a = torch.stack([score(one, p["read_weight"][index - 1]) for one in s]).softmax(0)
                h = sum(weight[..., None] * one for weight, one in zip(a, s, strict=True))
            if index == network.sublayers:
                return network.norm(index, h)
            f = network.f(index, network.norm(index, h))
            if len(s) < streams:
                s = [*s, f]
                continue
            place = index - streams + 1
            logits = [score(one, p["write_weight"][place]) for one in s]
            if gate == "independent":
                b = [torch.sigmoid(logit + p["bias"][place, i]) for i, logit in enumerate(logits)]
            else:
                total = p["bias"][place].exp() + sum(logit.exp() for logit in logits)
                b = [logit.exp() / total for logit in logits]
            s = [(1 - share[..., None]) * one + share[..., None] * f for share, one in zip(b, s, strict=True)]

    return compute


@pytest.mark.parametrize("gate", ["independent", "competitive"])
@pytest.mark.parametrize("streams", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streams_accumulate_and_then_move_towards_every_output(shape, streams, gate):
    check_formula("multi_gate", formula(streams, gate), shape, num_streams=streams, gate=gate)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("gate", ["independent", "competitive"])
def test_both_gates_start_at_the_share_that_the_publication_scales_with_depth(gate, streams):
    """sigmoid(-3) at 21 sublayers that mix, a half of it at four times as many, whatever the number of streams: of the
    two signs only these give it. The printed term, ln(q - n), is the competitive gate's."""
    for mixing in (21, 84):
        residual = make_residual("multi_gate", mixing + streams - 1, 8, num_streams=streams, gate=gate).double()
        share = residual.learned()["write"].values[streams - 1 :]
        expected = 1 / (1 + math.exp(3)) / math.sqrt(mixing / 21)
        torch.testing.assert_close(share.double(), torch.full_like(share, expected).double(), rtol=1e-6, atol=0)
        printed = math.log(math.sqrt(mixing / 21) * (math.exp(3) + 1) - streams)
        if gate == "competitive":
            torch.testing.assert_close(residual.bias.double(), torch.full_like(residual.bias, printed).double())


def test_an_open_read_is_a_mean_of_means_and_no_read_is_longer_than_its_sources():
    network, residual = Network(*SHAPES[0]), make_residual("multi_gate", 8, 16).double()
    with torch.no_grad():
        for parameter in residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    recording = residual.observer = Recording()
    network.run(residual)
    for index in range(9):
        h, weights, _ = recording.reads[index]
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights), dtype=weights.dtype))
        longest = torch.stack([output.norm(dim=-1) for output in recording.outputs[: index + 1]]).amax(0)
        assert (h.norm(dim=-1) <= longest * (1 + 1e-9)).all()


@pytest.mark.parametrize("streams", [4, 9])
def test_while_streams_accumulate_reads_are_those_of_full(streams):
    network = Network(3, 8, (5,))
    residual = make_residual("multi_gate", 3, 8, num_streams=streams).double()
    full = make_residual("full", 3, 8).double()
    with torch.no_grad():
        residual.read_weight.copy_(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))
        full.query[1:] = residual.read_weight / math.sqrt(8)
    torch.testing.assert_close(network.run(residual), network.run(full))
    assert not residual.write_weight.numel()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gate": "both"}, "unknown gate 'both'"),
        ({"num_streams": 0}, "num_streams is 0: expected a whole number, at least 1"),
        ({"gate": "competitive", "num_streams": 8}, "num_streams is 8 with gate=competitive: 2 sublayers mix"),
    ],
)
def test_impossible_settings(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_residual("multi_gate", 9, 8, **settings)
