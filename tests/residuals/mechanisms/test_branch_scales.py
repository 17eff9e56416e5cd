"""Rules that scale branches, each against its formula, and their start values."""

import math

import pytest
import torch
from formula import SHAPES, check_formula

from attnres import UserError, make_residual


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_output_has_a_factor(shape, prenorm):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            f = network.f(index, network.norm(index, x) if prenorm else x)
            x = x + parameters["scale"][index] * f
        return network.norm(network.sublayers, x)

    check_formula("rezero", formula, shape, prenorm=prenorm)


def test_factors_start_at_zero_and_are_the_weights_of_reads():
    residual = make_residual("rezero", 6, 8)
    assert torch.equal(residual.scale, torch.zeros(6))
    assert torch.equal(residual.implied(3), torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_a_setting_that_is_no_truth_value():
    with pytest.raises(UserError, match="prenorm is 1: expected true or false"):
        make_residual("rezero", 4, 8, prenorm=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_channel_of_an_output_has_a_factor(shape):
    def formula(network, parameters):
        x = network.embedding
        for index in range(network.sublayers):
            x = x + network.f(index, network.norm(index, x)) @ torch.diag(parameters["scale"][index])
        return network.norm(network.sublayers, x)

    check_formula("layerscale", formula, shape)


@pytest.mark.parametrize(("layers", "start"), [(12, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6), (48, 1e-6)])
def test_factors_start_smaller_in_deeper_networks(layers, start):
    assert torch.equal(make_residual("layerscale", 2 * layers, 8).scale, torch.full((2 * layers, 8), start))
    assert torch.equal(
        make_residual("layerscale", 2 * layers, 8, scale_init=0.5).scale, torch.full((2 * layers, 8), 0.5)
    )


def test_a_start_of_nothing_is_refused():
    with pytest.raises(UserError, match="scale_init is 0: expected a positive number"):
        make_residual("layerscale", 4, 8, scale_init=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_squares_of_both_weights_sum_to_one(shape):
    def formula(network, parameters):
        layers = math.ceil(network.sublayers / 2)
        x = network.embedding
        for index in range(network.sublayers):
            beta = torch.log(1 + torch.exp(parameters["theta"][index // 2]))
            f = network.f(index, network.norm(index, x))
            x = torch.sqrt(1 - beta / layers) * x + torch.sqrt(beta / layers) * f
        return network.norm(network.sublayers, x)

    check_formula("norm_preserving", formula, shape)


def test_it_starts_at_log_two_and_stays_below_its_bound():
    residual = make_residual("norm_preserving", 12, 8)
    torch.testing.assert_close(residual.share(), torch.full((6,), math.log(2) / 6))
    with torch.no_grad():
        residual.theta.fill_(1e4)
    assert bool((residual.share() < 1).all()) and bool(residual.implied(12).isfinite().all())


@pytest.mark.parametrize("base_layers", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_divided_by_depth(shape, base_layers):
    def formula(network, parameters):
        multiplier = (network.sublayers / 2) / base_layers
        x = network.embedding
        for index in range(network.sublayers):
            x = x + multiplier**-1 * network.f(index, network.norm(index, x))
        return network.norm(network.sublayers, x)

    check_formula("completep", formula, shape, base_layers=base_layers)


def test_it_is_a_control_that_learns_nothing():
    residual = make_residual("completep", 8, 8)
    assert residual.traits.is_control and not list(residual.parameters())
    assert torch.equal(residual.implied(2), torch.tensor([1.0, 0.25, 0.25]))
    with pytest.raises(UserError, match="base_layers is 0"):
        make_residual("completep", 8, 8, base_layers=0)
