"""Variants of the depth read, each against the formula of its publication, in Full's and Block's layouts."""

import math

import pytest
import torch
from formula import SHAPES, Network, check_formula

from attnres import UserError, make_residual
from attnres.residuals import settings_of


def rms(v, eps=1e-6):
    return v / (v.square().mean(-1, keepdim=True) + eps).sqrt()


def paper(v, w, g, x):
    """The ablation's starting point: one softmax over keys that are normed."""
    return torch.stack([(w * g * rms(one)).sum(-1) for one in v]).softmax(0)


def mixed(v, a):
    return sum(one * weight[..., None] for one, weight in zip(v, a, strict=True))


def by_input(v, w, g, x, query_weight):
    queries = w + rms(x) @ query_weight.T
    return mixed(v, torch.stack([(queries * g * rms(one)).sum(-1) for one in v]).softmax(0))


def sigmoid(v, w, g, x):
    return mixed(v, torch.stack([(w * g * rms(one)).sum(-1) for one in v]).sigmoid())


def raw_keys(v, w, g, x):
    return mixed(v, torch.stack([(w * g * one).sum(-1) for one in v]).softmax(0))


def four_heads(v, w, g, x):
    parts = []
    for part in torch.arange(len(w)).chunk(4):
        a = torch.stack([(w * g * rms(one))[..., part].sum(-1) for one in v]).softmax(0)
        parts.append(mixed([one[..., part] for one in v], a))
    return torch.cat(parts, -1)


def normed_values(v, w, g, x):
    return mixed([rms(one) for one in v], paper(v, w / math.sqrt(len(w)), g, x))


def null(v, w, g, x):
    zeros = [*v, torch.zeros_like(v[0])]
    return mixed(zeros, paper(zeros, w, g, x))


def window(v, w, g, x):
    kept = v if len(v) <= 3 else [v[0], *v[-2:]]
    return mixed(kept, paper(kept, w, g, x))


def warm(v, w, g, x):
    return mixed(v, paper(v, w / 2.5, g, x))


VARIANTS = {
    "input": (by_input, {"query": "input"}),
    "sigmoid": (sigmoid, {"weights": "sigmoid"}),
    "no key norm": (raw_keys, {"key_norm": False}),
    "heads": (four_heads, {"heads": 4}),
    "inkling 2": (normed_values, {"values": "normed", "read_temperature": "sqrt_width"}),
    "null": (null, {"null_source": True}),
    "window": (window, {"window": 2}),
    "temperature": (warm, {"read_temperature": 2.5}),
}


def sliced(v, w, g, x):
    return mixed(v, torch.stack([(w * rms(one[..., -3:])).sum(-1) for one in v]).softmax(0))


def sliced_by_input(v, w, g, x, query_weight):
    queries = w + rms(x) @ query_weight.T
    return mixed([rms(one) for one in v], torch.stack([(queries * one[..., -3:]).sum(-1) for one in v]).softmax(0))


VARIANTS |= {
    "sliced": (sliced, {"keys": "sliced:3"}),
    "sliced, by input, normed values": (
        *(sliced_by_input, {"keys": "sliced:3", "query": "input", "key_norm": False, "values": "normed"}),
    ),
}


def network_formula(read, sizes, closed=sum):
    """A network of blocks of these sizes (1, 1, ... is Full) whose reads are made by `read`. A block is the plain sum
    of its outputs until it ends, and then what `closed` makes of them (and of the parameters, where it is no sum)."""
    ends = {sum(sizes[: i + 1]) for i in range(len(sizes))}
    empty = torch.zeros(sum(sizes) + 1)

    def formula(network, parameters):
        x, blocks, inside = network.embedding, [network.embedding], []
        for index in range(network.sublayers + 1):
            sources = [*blocks, sum(inside)] if inside else blocks
            h = sources[0]
            if len(sources) > 1:
                extra = [parameters[name][index] for name in parameters if name.startswith("weighting.")]
                h = read(sources, parameters["query"][index], parameters.get("gain", empty)[index], x, *extra)
            if index == network.sublayers:
                return network.norm(index, h)
            output = network.f(index, network.norm(index, h))
            x, inside = x + output, [*inside, output]
            if index + 1 in ends:
                last = sum(inside) if closed is sum else closed(inside, parameters, len(blocks) - 1)
                blocks, inside = [*blocks, last], []

    return formula


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_full_is_its_formula(variant, shape):
    read, settings = VARIANTS[variant]
    check_formula("full", network_formula(read, [1] * shape[0]), shape, **settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_block_is_its_formula(variant):
    read, settings = VARIANTS[variant]
    check_formula("block", network_formula(read, [3, 3, 1]), SHAPES[1], block_size=3, **settings)


@pytest.mark.parametrize("sizes", ["2+4+1", [1, 1, 5], [7]])
def test_blocks_may_differ_in_size(sizes):
    numbers = [int(size) for size in sizes.split("+")] if isinstance(sizes, str) else sizes
    formula = network_formula(lambda v, w, g, x: mixed(v, paper(v, w, g, x)), numbers)
    check_formula("block", formula, SHAPES[1], block_size=sizes)
    assert [len(read.sources) for read in make_residual("block", 7, 8, block_size="2+4+1").layout()] == [
        *(1, 2, 2, 3, 3, 3, 3, 4)
    ]


def by_gamma(exponent):
    """github.com/kimmichtank/rms-block-attnres: each output normed (gamma 0), and its proposal sum r^gamma y / r."""

    def closed(outputs, parameters, block):
        gamma = parameters["gamma"][block] if exponent == "learned" else exponent
        sizes = [(y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y in outputs]
        return sum(y / size * size**gamma for y, size in zip(outputs, sizes, strict=True))

    return closed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("block_sum", "gamma", "read"),
    [("rms", 0.0, "paper"), (0.25, 0.25, "paper"), ("learned", "learned", "paper"), ("rms", 0.0, "sliced")],
)
def test_a_finished_block_is_the_sum_of_its_outputs_at_a_power_of_their_size(shape, block_sum, gamma, read):
    sizes = {8: [3, 3, 2], 7: [3, 3, 1], 3: [3]}[shape[0]]
    make, settings = (lambda v, w, g, x: mixed(v, paper(v, w, g, x)), {}) if read == "paper" else VARIANTS["sliced"]
    formula = network_formula(make, sizes, by_gamma(gamma))
    check_formula("block", formula, shape, block_size=3, block_sum=block_sum, **settings)


def counted(sizes, split=False, power=0.0, prior=0.0, static=False):
    """Sums with their counts, as LR-AttnRes has them: value S s with s = c^-power or learned, logit + prior log c."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def formula(network, p):
        def source(sum_, count, last):
            factor = p["scale"][last] if "scale" in p else count**-power
            return sum_ * factor, count

        finished, partial = [(network.embedding, 1)], {}
        for index in range(network.sublayers + 1):
            sources = finished + [source(*one) for one in partial.values()]
            h = network.embedding
            if index:
                query, gain = p["query"][index], p["gain"][index]
                keys = [rms(value) for value, _ in sources]
                if static:
                    keys[0] = rms(p["weighting.embedding_key"]).expand_as(keys[0])
                beta = p["prior"][index] if "prior" in p else prior
                logits = [
                    (query * gain * k).sum(-1) + beta * math.log(c) for k, (_, c) in zip(keys, sources, strict=True)
                ]
                h = mixed([value for value, _ in sources], torch.stack(logits).softmax(0))
            if index == network.sublayers:
                return network.norm(index, h)
            output, kind = network.f(index, network.norm(index, h)), index % 2 if split else 0
            before, count, _ = partial.get(kind, (0, 0, None))
            partial[kind] = (before + output, count + 1, index)
            if index + 1 in ends:
                finished, partial = finished + [source(*one) for one in partial.values()], {}

    return formula


COUNTED = [
    ({"summaries": "split"}, {"split": True}, True),
    ({"count_power": 1.0}, {"power": 1.0}, False),
    ({"count_power": 0.5, "count_prior": 0.5}, {"power": 0.5, "prior": 0.5}, True),
    ({"count_prior": 1.0}, {"prior": 1.0}, False),
    ({"count_prior": "learned", "count_power": 1.0}, {"power": 1.0}, True),
    ({"block_scale": True, "summaries": "split"}, {"split": True}, True),
    ({"block_scale": True, "count_power": 0.5}, {}, False),
    ({"embedding_key": "static"}, {"static": True}, True),
    ({"summaries": "split", "count_power": 1.0, "count_prior": 1.0}, {"split": True, "power": 1.0, "prior": 1.0}, True),
]


@pytest.mark.parametrize(("settings", "how", "starts"), COUNTED, ids=[str(case[0]) for case in COUNTED])
@pytest.mark.parametrize(("shape", "sizes"), [(SHAPES[0], [3, 3, 2]), (SHAPES[1], [5, 2]), (SHAPES[2], [3])])
def test_sums_may_be_two_a_block_and_weigh_by_what_they_count(shape, sizes, settings, how, starts):
    check_formula("block", counted(sizes, **how), shape, block_size=sizes, **settings)
    assert make_residual("block", shape[0], 8, block_size=sizes, **settings).traits.starts_standard == starts


def test_blocks_of_one_layer_with_two_sums_are_full():
    network, full = Network(*SHAPES[1]), make_residual("full", 7, 12).double()
    split = make_residual("block", 7, 12, block_size=2, summaries="split").double()
    with torch.no_grad():
        for one in (full, split):
            one.query.copy_(torch.randn(8, 12, generator=torch.Generator().manual_seed(4)))
    torch.testing.assert_close(network.run(split), network.run(full))
    names = [source.name for source in make_residual("block", 8, 8, block_size=3, summaries="split").sources(5)]
    assert names == ["embedding", "mlp_sum 1", "attention_sum 1", "partial_mlp", "partial_attention"]
    spans = [source.span for source in make_residual("block", 8, 8, block_size=6, summaries="split").sources(5)]
    assert [list(span) for span in spans] == [[0], [2, 4], [1, 3, 5]]


@pytest.mark.parametrize("settings", [case[0] for case in COUNTED if case[2]], ids=str)
@pytest.mark.parametrize("layers", [None, "1:3"])
def test_a_summed_read_starts_as_the_standard_residual_at_any_eps(settings, layers, monkeypatch):
    monkeypatch.setattr("formula.EPS", 0.3)
    residual = make_residual("block", 8, 16, block_size=3, read_scale="sum", layers=layers, **settings).double()
    network = Network(*SHAPES[0])
    torch.testing.assert_close(network.run(residual), network.run(make_residual("standard", 8, 16)))


def test_the_size_of_an_output_does_not_count_once_its_block_has_ended():
    residual = make_residual("block", 4, 8, block_size=2, block_sum="rms", key_norm_eps=1e-12).double()
    ones, ends = torch.randn(5, 3, 8, dtype=torch.float64), []
    for factor in (1.0, 7.0):
        state = residual.start(ones[0])
        for index in range(2):
            _, state = residual.read(state, index, lambda h: h)
            inside, state = state, residual.write(state, index, ones[index + 1] * factor)
        assert torch.equal(inside.open[0], ones[1] * factor)
        ends.append(state.sealed[1])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)
    alone = make_residual("block", 2, 8, block_size=1, block_sum="rms").write(state, 1, ones[2]).open[0]
    torch.testing.assert_close(alone.square().mean(-1), torch.ones(3, dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_power_of_one_is_block_itself():
    for block_sum, starts in ((1, True), (1.0, True), ("learned", True), ("rms", False), (0.5, False)):
        assert make_residual("block", 6, 8, block_sum=block_sum).traits.starts_standard == starts
    assert make_residual("block", 6, 8, block_sum=1.0).traits.linear


def test_a_sliced_key_takes_a_query_of_its_own_width():
    residual = make_residual("block", 6, 16, keys="sliced:4", query_lr=0.1)
    assert residual.query.shape == (7, 4) and residual.gain is None
    with torch.no_grad():
        residual.query[2] = 10.0
    assert torch.equal(residual.direction(2), torch.tensor([0.0] * 12 + [1.0] * 4))
    assert residual.sharpness(2) == pytest.approx(4.0)  # |(1, 1, 1, 1)| sqrt(4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_starts_as_the_standard_residual_says_so(variant):
    starts = make_residual("full", 6, 8, **VARIANTS[variant][1]).traits.starts_standard
    assert starts == (variant not in ("inkling 2", "window", "sliced, by input, normed values"))
    assert make_residual("full", 6, 8, window=6).traits.starts_standard


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "divides the width, 16"),
        ({"heads": 0}, "at least 1"),
        ({"window": 0}, "window is 0"),
        ({"query": "inputs"}, "input"),
        ({"weights": "softmin"}, "softmax"),
        ({"values": 1}, "raw"),
        ({"weights": "sigmoid", "null_source": True}, "leave it out"),
        ({"read_temperature": 0}, "positive"),
        ({"read_temperature": "sqrt"}, "sqrt_width"),
        ({"key_norm": "no"}, "true or false"),
        ({"query_std": -0.1}, "at least 0"),
        ({"block_size": [2, 4]}, r"add up to 6: expected 8"),
        ({"block_size": "2+0+6"}, "one for each block"),
        ({"block_size": "two"}, "one for each block"),
        ({"block_size": [4, 4], "num_blocks": 2}, "one of them"),
        ({"keys": "sliced"}, "sliced:R with R from 1 to the width, 16"),
        ({"keys": "sliced:17"}, "sliced:17"),
        ({"keys": "sliced:4", "heads": 2}, "heads is 2 with keys=sliced:4"),
        ({"block_sum": "mean"}, "block_sum is 'mean'"),
        ({"block_sum": 1.5}, "block_sum is 1.5"),
        ({"block_sum": "rms", "gate": "scalar"}, "gate=scalar is given with block_sum=rms"),
        ({"block_sum": "rms", "query": "input"}, "query=input is given with block_sum=rms"),
        ({"block_sum": "rms", "count_power": 1.0}, "count_power=1.0 is given with block_sum=rms"),
        ({"block_sum": 0.5, "block_scale": True}, "block_scale=True is given with block_sum=0.5"),
        ({"count_power": 1.0, "gate": "scalar"}, "gate=scalar is given with count_power=1.0"),
        ({"block_scale": True, "query": "input"}, "query=input is given with block_scale=True"),
        ({"count_prior": 1.0, "weights": "sigmoid"}, "count_prior=1.0 is given with weights=sigmoid"),
        ({"count_prior": "log"}, "count_prior is 'log': expected a number"),
        ({"block_scale": 1}, "block_scale is 1: expected true or false"),
        ({"summaries": "two"}, "unknown summaries 'two'"),
        ({"embedding_key": "fixed"}, "unknown embedding_key 'fixed'"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(settings, message):
    with pytest.raises(UserError, match=message):
        make_residual("block", 8, 16, **settings)


def test_settings_of_a_reads_parts_are_the_mechanisms_own():
    assert {"heads", "window", "gate", "num_blocks", "null_source"} <= settings_of("block").keys()
    assert "window" not in settings_of("cumulative")


def test_queries_are_drawn_where_a_deviation_is_set():
    torch.manual_seed(0)
    residual = make_residual("block", 24, 256, query_std=0.02)
    assert residual.query.std().item() == pytest.approx(0.02, rel=0.05) and not residual.traits.starts_standard
    assert not make_residual("block", 24, 256, query_std=0).query.any()


def test_explain_names_the_setting_that_no_kernel_has():
    embedding = torch.zeros(2, 16)
    said = str(make_residual("full", 12, 16, heads=2, null_source=True).explain(embedding))
    assert "plain torch" in said and "heads=2" in said and "null_source=true" in said
    assert "gates" in str(make_residual("block", 12, 16, gate="scalar").explain(embedding))
    assert "keys=sliced:4" in str(make_residual("block", 12, 16, keys="sliced:4").explain(embedding))
    rms_block = make_residual("block", 12, 16, block_size=4, block_sum="rms")
    assert "two phases" in str(rms_block.explain(embedding, training=True))
    assert "block_sum" in str(rms_block.explain(embedding, training=False))
    split = make_residual("block", 12, 16, block_size=4, summaries="split")
    assert "two phases" in str(split.explain(embedding, training=True))
    scaled = make_residual("block", 12, 16, block_size=4, count_power=1.0)
    assert "two phases" in str(scaled.explain(embedding, training=True))
    assert "count_power=1.0" in str(scaled.explain(embedding, training=False))
    prior = make_residual("block", 12, 16, count_prior=1.0, embedding_key="static")
    assert "embedding_key=static, count_prior=1.0" in str(prior.explain(embedding))
    assert "window=3" in str(make_residual("full", 12, 16, window=3).explain(embedding))
    assert "two phases" in str(make_residual("block", 12, 16, block_size=4, read_temperature=2.0).explain(embedding))
