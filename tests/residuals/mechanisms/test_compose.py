"""Rules for some layers: against networks written out, and as data."""

import itertools

import pytest
import torch
from formula import SHAPES, check_formula
from sample_mechanisms import REPRESENTATIVES

from attnres import UserError, compose, make_residual
from attnres.comparison.plan import parse_variant
from attnres.residuals import RESIDUALS
from attnres.residuals.check import CHECKS, outcomes
from attnres.residuals.check.subject import Subject
from attnres.residuals.mechanisms.compose import chosen_layers


def softmax_read(sources, query, gain):
    keys = [gain * v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() for v in sources]
    weights = torch.stack([(query * key).sum(-1) for key in keys]).softmax(0)
    return sum(v * weight[..., None] for v, weight in zip(sources, weights, strict=True))


def depth_reads(network, parameters, chosen, prefix="rules.0."):
    """The plain stream, but in sublayers `chosen` (a range): Full over the stream at their start and their outputs."""
    x, inside = network.embedding, []
    for index in range(network.sublayers + 1):
        if index == chosen.start:
            inside = [x]
        h, last = x, index == network.sublayers and chosen.stop == index
        if (index in chosen or last) and len(inside) > 1:
            row = index - chosen.start
            h = softmax_read(inside, parameters[f"{prefix}query"][row], parameters[f"{prefix}gain"][row])
        if index == network.sublayers:
            return network.norm(index, h)
        output = network.f(index, network.norm(index, h))
        x, inside = x + output, [*inside, output]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layers", ["1:", "0:1", "-1:"])
def test_depth_reads_in_some_layers_go_on_from_the_running_sum(shape, layers):
    count = (shape[0] + 1) // 2
    numbers = chosen_layers(layers, count)
    chosen = range(2 * numbers[0], min(2 * numbers[-1] + 2, shape[0]))
    check_formula("full", lambda network, p: depth_reads(network, p, chosen), shape, layers=layers)


def test_two_rules_in_one_network_are_their_formulas():
    """Full in layer 1 of four, ReZero in layers 2 and 3."""

    def formula(network, p):
        x = network.embedding
        for index in range(2):
            x = x + network.f(index, network.norm(index, x))
        first = network.f(2, network.norm(2, x))
        h = softmax_read([x, first], p["rules.0.query"][1], p["rules.0.gain"][1])
        x = x + first + network.f(3, network.norm(3, h))
        scale = next(value for name, value in p.items() if name.startswith("rules.1."))
        for index in range(4, 8):
            x = x + scale[index - 4] * network.f(index, network.norm(index, x))
        return network.norm(8, x)

    rules = compose("full", "1", "rezero", "-2:")
    check_formula("compose", formula, SHAPES[0], rules=rules)
    check_formula("compose", formula, SHAPES[0], rules="full=1+rezero=-2:")


def test_streams_hand_on_their_mean():
    residual = make_residual("hyper_connections", 6, 8, layers="0:2", num_streams=3).double()
    embedding, outputs = torch.randn(5, 8).double(), torch.randn(6, 5, 8).double()
    state = residual.start(embedding)
    for index in range(6):
        x, state = residual.read(state, index, lambda h: h)
        torch.testing.assert_close(x, embedding + outputs[:index].sum(0))
        state = residual.write(state, index, outputs[index])
    assert residual.traits.starts_standard


def check(name, **settings):
    all_but_compiling = {name: call for name, call in CHECKS.items() if name != "compile"}
    return {o.name: o.detail for o in outcomes(all_but_compiling, Subject.of(name, settings)) if not o.passed}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("block", {"layers": "1:3", "block_size": 2}),
        ("muddformer", {"layers": "-2:"}),
        ("compose", {"rules": "hyper_connections=even+block=-1"}),
        ("compose", {"rules": "block=0:1+peri_ln=2:"}),
    ],
)
def test_what_is_said_of_a_mixed_network_is_what_it_does(name, settings):
    assert not check(name, **settings)


BY_DEPTH = {"adaptive", "ancre", "boundary", "boundary_normed", "keel", "layernorm_scaling", "multi_gate", "post_block"}
"""In one layer they have a parameter of no effect (a query over one source, a gate of a write that no read follows),
or are the standard residual."""


EVERY = [(name, "odd") for name in sorted(set(RESIDUALS) - {"deepnorm", "compose"})]


@pytest.mark.long
@pytest.mark.parametrize(("name", "layers"), [*EVERY, *itertools.product(REPRESENTATIVES, ["1:3", "-1:", "even"])])
def test_every_rule_holds_on_some_layers(name, layers):
    """Odd layers of four are entered, left, entered again, and the output is read in the last."""
    failed = check(name, layers=layers)
    assert not failed or (name in BY_DEPTH and set(failed) <= {"gradients", "queries", "start"})


@pytest.mark.long
def test_a_mixed_network_is_one_graph():
    outcome = next(outcomes({"compile": CHECKS["compile"]}, Subject.of("compose", {"rules": "block=0:2+muddformer=3"})))
    assert outcome.passed, outcome.detail


def test_the_layout_names_what_enters_the_layers_of_a_rule():
    layout = make_residual("block", 8, 8, layers="2:", block_size=2).layout()
    assert [source.name for source in layout[2].sources] == ["embedding", "attention 0", "mlp 0"]
    assert [source.name for source in layout[7].sources] == ["entry 2", "block 1", "partial"]
    assert [source.span for source in layout[7].sources] == [range(5), range(5, 7), range(7, 8)]


def test_a_word_chooses_layers():
    assert [chosen_layers(text, 6) for text in ("12"[:1], "4:", "-2:", "::3", "even", "odd", -1)] == [
        *([1], [4, 5], [4, 5], [0, 3], [0, 2, 4], [1, 3, 5], [5])
    ]
    assert type(make_residual("standard", 4, 8, layers="5:9")).__name__ == "Standard"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("block", {"layers": "4:12"}, "'4:12': there are 4 layers"),
        ("block", {"layers": "2:1"}, "'2:1': these are no layers"),
        ("block", {"layers": "last"}, "'last'"),
        ("block", {"layers": "2:", "heads": 3}, "heads is 3"),
        ("block", {"layers": "2:", "block": 3}, "unknown setting of residual 'block' 'block'"),
        ("deepnorm", {"layers": "2:"}, "'deepnorm' scales the start values of all layers"),
        ("compose", {"rules": "block=0:3+full=2:"}, "layer 2 is given to 'block' and to 'full'"),
        ("compose", {"rules": "block"}, "layers is ''"),
        ("compose", {"rules": 3}, "rules is 3"),
        ("compose", {"rules": "blok=0:3"}, "did you mean 'block'"),
    ],
)
def test_impossible_layers_are_refused_with_a_sentence(name, settings, message):
    with pytest.raises(UserError, match=message):
        make_residual(name, 8, 16, **settings)


def test_layers_are_a_setting_of_a_variant_and_its_folder_has_no_colon():
    variant = parse_variant("muddformer:layers=-2:")
    assert variant.settings == {"layers": "-2:"} and variant.label == "muddformer-layers-2_"
    assert parse_variant("compose:rules=block=0:2+full=-1@lr=0.1").settings == {"rules": "block=0:2+full=-1"}


@pytest.mark.parametrize("words", [("block",), ({"heads": 2},), ("block", "1:", {}, {}), ("block", {})])
def test_rules_that_are_half_given_are_refused(words):
    with pytest.raises(UserError, match="compose"):
        compose(*words)
