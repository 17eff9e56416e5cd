"""Mixing that depends on no input (arXiv 2603.15031, Table 4)."""

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("weights", ["softmax", "raw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_read_weighs_all_outputs_by_numbers_of_its_own(shape, weights):
    def formula(network, p):
        outputs = [network.embedding]
        for index in range(network.sublayers + 1):
            a = p["logits"][index, : len(outputs)]
            if weights == "softmax":
                a = torch.exp(a) / torch.exp(a).sum()
            h = torch.tensordot(a, torch.stack(outputs), 1)
            if index == network.sublayers:
                return network.norm(index, h)
            outputs.append(network.f(index, network.norm(index, h)))

    check_formula("static_mix", formula, shape, weights=weights)


def test_the_start_is_the_mean_or_the_sum():
    assert make_residual("static_mix", 4, 8).implied(2).tolist() == pytest.approx([1 / 3] * 3)
    raw = make_residual("static_mix", 4, 8, weights="raw")
    assert raw.implied(2).tolist() == [1, 1, 1] and not raw.traits.sums_to_one


def test_weights_of_no_kind():
    with pytest.raises(UserError, match="weights"):
        make_residual("static_mix", 4, 8, weights="sigmoid")
