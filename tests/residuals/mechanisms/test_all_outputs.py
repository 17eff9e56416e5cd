"""Static mixing (arXiv 2603.15031, Table 4) and DenseNet's concatenation (arXiv 1608.06993) against their formulas."""

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


@pytest.mark.parametrize("shape", SHAPES)
def test_a_read_projects_all_outputs_concatenated(shape):
    def formula(network, p):
        outputs, used = [network.embedding], 0
        for index in range(network.sublayers + 1):
            h = torch.cat(outputs, -1)
            if index:
                matrix = p["projection"][used : used + index + 1].reshape(-1, network.width)
                used += index + 1
                h = h @ matrix
            if index == network.sublayers:
                assert used == len(p["projection"])
                return network.norm(index, h)
            outputs.append(network.f(index, network.norm(index, h)))

    check_formula("densenet", formula, shape)


def test_every_matrix_starts_as_the_identity():
    residual = make_residual("densenet", 4, 8)
    assert torch.equal(residual.projection, torch.eye(8).expand(14, 8, 8))
