"""Rules that differ in where a norm sits, each against its formula."""

import pytest
import torch
from formula import SHAPES, check_formula
from torch.nn import functional as F

from attnres import UserError, make_residual


@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_of_the_sum_is_the_new_stream(shape):
    def formula(network, parameters):
        x = network.norm(0, network.embedding)
        for index in range(network.sublayers):
            x = network.norm(index + 1, x + network.f(index, x))
        return x

    check_formula("postnorm", formula, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stream_is_scaled_up_before_each_norm(shape):
    def formula(network, parameters):
        layers = network.sublayers / 2
        x = network.norm(0, network.embedding)
        for index in range(network.sublayers):
            x = network.norm(index + 1, (2 * layers) ** 0.25 * x + network.f(index, x))
        return x

    check_formula("deepnorm", formula, shape)


def test_branches_start_smaller_with_depth():
    layers = 6
    assert make_residual("deepnorm", 2 * layers, 8).branch_scale() == pytest.approx((8 * layers) ** -0.25)
    assert make_residual("postnorm", 2 * layers, 8).branch_scale() == 1.0


@pytest.mark.parametrize("prenorm_layers", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_norm_before_an_mlp_is_its_stream(shape, prenorm_layers):
    def formula(network, parameters):
        x = network.embedding
        for attention in range(0, network.sublayers, 2):
            mlp = attention + 1
            y = x + network.f(attention, network.norm(attention, x))
            if mlp == network.sublayers:
                x = y
            elif attention // 2 < prenorm_layers:
                x = y + network.f(mlp, network.norm(mlp, y))
            else:
                x = network.norm(mlp, y) + network.f(mlp, network.norm(mlp, y))
        return network.norm(network.sublayers, x)

    check_formula("hybrid_norm", formula, shape, prenorm_layers=prenorm_layers)


def test_every_layer_may_be_prenorm():
    residual = make_residual("hybrid_norm", 4, 8, prenorm_layers=9)
    assert residual.prenorm_layers == 9
    with pytest.raises(UserError, match="prenorm_layers is -1: expected a whole number, at least 0"):
        make_residual("hybrid_norm", 4, 8, prenorm_layers=-1)


@pytest.mark.parametrize("alpha", [None, 2.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scaled_stream_and_the_normed_branch_are_normed_together(shape, alpha):
    def formula(network, parameters):
        gains, factor = parameters["gain"], network.sublayers if alpha is None else alpha
        x = network.embedding
        for index in range(network.sublayers):
            f = network.f(index, network.norm(index, x))
            if index < 2:
                x = x + f
            else:
                x = F.rms_norm(factor * x + f, (network.width,), gains[index - 2], 1e-5)
        return network.norm(network.sublayers, x)

    check_formula("keel", formula, shape, alpha=alpha, eps=1e-5)


def test_gains_start_at_one_and_the_first_layer_has_none():
    residual = make_residual("keel", 7, 8)
    assert torch.equal(residual.gain, torch.ones(5, 8)) and residual.alpha == 7.0
    assert make_residual("keel", 1, 8).gain.numel() == 0


def test_a_factor_that_is_no_factor_is_refused():
    with pytest.raises(UserError, match="alpha is 0: expected a positive number"):
        make_residual("keel", 4, 8, alpha=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_normed_before_they_are_added(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            output = network.f(index, network.norm(index, x))
            x = x + F.rms_norm(output, (network.width,), parameters["gain"][index], 1e-5)
        return network.norm(network.sublayers, x)

    check_formula("peri_ln", formula, shape, eps=1e-5)


def test_gains_start_at_one():
    assert torch.equal(make_residual("peri_ln", 6, 8).gain, torch.ones(6, 8))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layers_norms_are_divided_by_the_root_of_its_number(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            layer = index // 2 + 1
            x = x + network.f(index, network.norm(index, x) / layer**0.5)
        return network.norm(network.sublayers, x)

    check_formula("layernorm_scaling", formula, shape)
