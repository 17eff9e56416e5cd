"""Inkling 2's depth reads against their formula, and against the module of Transformers."""

import pytest
import torch
from formula import SHAPES, check_formula
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual, Inkling2TextConfig

from attnres import UserError, make_residual
from attnres.residuals import Ways


def formula(size, every):
    """The network with blocks of `size` sublayers, and reads for queries, keys and values in every so many layers."""

    def compute(network, p):
        def read(sources, row):
            if len(sources) == 1:
                return sources[0]
            keys = [v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() for v in sources]
            logits = torch.stack([(k * p["query"][row]).sum(-1) / network.width**0.5 for k in keys])
            return sum(weight.unsqueeze(-1) * key for weight, key in zip(logits.softmax(0), keys))

        blocks, partial, row = [network.embedding], None, 0
        for index in range(network.sublayers):
            if index and index % size == 0:
                blocks, partial = [*blocks, partial], None
            sources = blocks if partial is None else [*blocks, partial]
            split = index % 2 == 0 and index > 0 and (index // 2 + 1) % every == 0
            inputs = [network.norm(index, read(sources, row + way)) for way in range(3 if split else 1)]
            row += len(inputs)
            output = network.f(index, *inputs)
            partial = output if partial is None else partial + output
        return network.norm(network.sublayers, read([*blocks, partial], row))

    return compute


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("size", "every"), [(1, 1), (2, 1), (3, 2)])
def test_normed_blocks_are_read_by_queries_keys_and_values_each(shape, size, every):
    check_formula("inkling2", formula(size, every), shape, block_size=size, split_every=every)


def test_reads_are_those_of_transformers():
    """Its modules, around the layers' own wiring, over blocks of two layers: fp32, as they compute."""
    config = Inkling2TextConfig(hidden_size=16, num_hidden_layers=5)
    residual = make_residual("inkling2", 10, 16, block_size=4)
    torch.manual_seed(0)
    with torch.no_grad():
        residual.query.normal_()
    names = [read.name for read in residual.layout()]

    def module(*reads):
        theirs = Inkling2BlockAttentionResidual(config, num_queries=len(reads))
        rows = residual.query.detach()[[names.index(name) for name in reads]]
        theirs.query.data = rows if len(reads) > 1 else rows[0]
        return theirs

    x = torch.randn(2, 3, 16)
    matrices = torch.randn(10, 16, 16) / 4
    blocks, hidden, state = x[..., None, :][..., :0, :], x, residual.start(x)
    for layer in range(5):
        inputs = [hidden] * 3
        if layer:
            inputs = module(*(f"attention {layer} {way}" for way in Ways._fields))(blocks, hidden)
        ours, state = residual.read(state, 2 * layer, lambda h: h)
        for a, b in zip(ours if layer else [ours] * 3, inputs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        output = torch.tanh(inputs[0] @ matrices[2 * layer] + inputs[2])
        state = residual.write(state, 2 * layer, output)
        if layer % 2 == 0:
            blocks, hidden = torch.cat([blocks, hidden.unsqueeze(-2)], -2), output
        else:
            hidden = hidden + output
        (theirs,) = module(f"mlp {layer}")(blocks, hidden)
        ours, state = residual.read(state, 2 * layer + 1, lambda h: h)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        output = torch.tanh(theirs @ matrices[2 * layer + 1])
        state = residual.write(state, 2 * layer + 1, output)
        hidden = hidden + output
    (theirs,) = module("output")(blocks, hidden)
    torch.testing.assert_close(residual.finish(state, lambda h: h), theirs, rtol=1e-5, atol=1e-6)


def test_queries_start_at_zero_a_row_each():
    residual = make_residual("inkling2", 12, 8, split_every=3)
    assert residual.query.shape == (12 + 1 + 2 * 2, 8) and not residual.query.any()
    assert [read.name for read in residual.layout() if read.into == "key"] == ["attention 2 key", "attention 5 key"]


@pytest.mark.parametrize("settings", [{"split_every": 0}, {"block_size": 9}, {"key_norm_eps": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        make_residual("inkling2", 8, 8, **settings)
