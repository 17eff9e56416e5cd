"""LR-AttnRes with keys projected from outputs, against the routing formula of its author's notes."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


def normed(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(("rank", "scale"), [(1, "mean"), (4, "mean"), (4, "sum")])
@pytest.mark.parametrize("shape", SHAPES)
def test_static_queries_score_narrow_keys_of_outputs(shape, rank, scale):
    def formula(network, p):
        values = [network.embedding]
        for index in range(network.sublayers + 1):
            h = values[0]
            if index:
                keys = torch.stack([normed(normed(v) @ p["projection"][i]) for i, v in enumerate(values)])
                logits = (keys * p["query"][index - 1]).sum(-1) / rank**0.5
                h = (torch.softmax(logits, 0).unsqueeze(-1) * torch.stack(values)).sum(0)
                h = h * (index + 1 if scale == "sum" else 1)
            if index == network.sublayers:
                return network.norm(index, h)
            values.append(network.f(index, network.norm(index, h)))

    check_formula("lr_attnres", formula, shape, rank=rank, read_scale=scale)


def test_the_embedding_s_key_may_be_a_vector_of_its_own():
    def formula(network, p):
        values, keys = [network.embedding], [normed(p["embedding_key"]).expand(*network.embedding.shape[:-1], 3)]
        for index in range(network.sublayers + 1):
            h = values[0]
            if index:
                logits = (torch.stack(keys) * p["query"][index - 1]).sum(-1) / 3**0.5
                h = (torch.softmax(logits, 0).unsqueeze(-1) * torch.stack(values)).sum(0)
            if index == network.sublayers:
                return network.norm(index, h)
            values.append(network.f(index, network.norm(index, h)))
            keys.append(normed(normed(values[-1]) @ p["projection"][index]))

    check_formula("lr_attnres", formula, SHAPES[1], rank=3, embedding_key="static")


def test_start_values_are_the_published_ones():
    torch.manual_seed(0)
    residual = make_residual("lr_attnres", 8, 128)
    assert residual.query.shape == (8, 64) and not residual.query.any()
    assert residual.projection.std().item() == pytest.approx(0.02, rel=0.05)
    assert make_residual("lr_attnres", 8, 16).rank == 16


def test_a_rank_beyond_the_width_is_refused():
    with pytest.raises(UserError, match="rank is 17: expected at most the width 16"):
        make_residual("lr_attnres", 4, 16, rank=17)
    with pytest.raises(UserError, match="rank is 0"):
        make_residual("lr_attnres", 4, 16, rank=0)
    with pytest.raises(UserError, match="unknown embedding_key 'learned'"):
        make_residual("lr_attnres", 4, 16, embedding_key="learned")
    with pytest.raises(UserError, match="read_scale is 'max': expected 'mean'"):
        make_residual("lr_attnres", 4, 16, read_scale="max")
