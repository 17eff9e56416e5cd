"""LAuReL against its formulas, form by form, and its published start values."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("form", ["rw", "lr", "pa", "rw+lr", "rw+pa"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_is_its_formula(shape, form):
    k = 3

    def formula(network, parameters):
        streams = [network.embedding]
        for index in range(network.sublayers):
            x = streams[-1]
            output, kept = network.f(index, network.norm(index, x)), x
            if form.endswith(("lr", "pa")):
                product = parameters["up"][index] @ parameters["down"][index]
                if form.endswith("pa"):
                    for j in range(min(k, len(streams))):
                        earlier = streams[len(streams) - 1 - j]
                        kept = kept + parameters["shares"][index, j] * (earlier @ product.T)
                else:
                    kept = kept + x @ product.T
            if form.startswith("rw"):
                alpha, beta = 2 / (1 + torch.exp(-parameters["logits"][index]))
                output, kept = alpha * output, beta * kept
            streams.append(output + kept)
        return network.norm(network.sublayers, streams[-1])

    settings = {"rank": 3} if form != "rw" else {}
    check_formula("laurel", formula, shape, form=form, **settings, **({"previous": k} if form.endswith("pa") else {}))


def test_the_low_rank_map_starts_column_orthogonal_and_without_effect():
    residual = make_residual("laurel", 4, 6, rank=3)
    expected = torch.tensor([[1.0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1]]) / 18**0.5
    torch.testing.assert_close(residual.down[2], expected)
    gram = residual.down[0] @ residual.down[0].T
    torch.testing.assert_close(gram, torch.eye(3) * gram[0, 0])
    assert not residual.up.any() and not residual.logits.any()
    assert make_residual("laurel", 4, 6).rank == 6 and make_residual("laurel", 4, 64).rank == 32


def test_only_scalar_weights_make_reads_weighted_sums():
    for form in ("rw", "lr", "pa", "rw+lr", "rw+pa"):
        residual = make_residual("laurel", 4, 8, form=form)
        assert residual.traits.linear == bool(residual.sources(2)) == (form == "rw")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"form": "rl"}, "unknown form 'rl'.*Valid are lr, pa, rw, rw.lr, rw.pa"),
        ({"rank": 9}, "rank is 9 and the width 8: expected a rank of at most the width"),
        ({"form": "rw", "rank": 4}, "rank=4 is given, and form 'rw' has none: leave it out"),
        ({"form": "lr", "previous": 2}, "previous=2 is given, and form 'lr' has none: leave it out"),
        ({"form": "pa", "previous": 0}, "previous is 0: expected a whole number, at least 1"),
    ],
)
def test_impossible_settings(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        make_residual("laurel", 4, 8, **settings)
