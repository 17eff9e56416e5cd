"""Delta Attention Residuals against the formula of arXiv 2605.18855."""

import pytest
import torch
from formula import SHAPES, check_formula
from torch.nn import functional as F

from attnres import UserError, make_residual


def formula(bounds):
    def compute(network, p):
        stream, sources, block = network.embedding, [network.embedding], None
        for index in range(network.sublayers):
            h = stream
            if index:
                keys = [F.rms_norm(v, (network.width,), p["gain"][index], 1e-6) for v in sources]
                weights = torch.stack([key @ p["query"][index] for key in keys]).softmax(0)
                gate = p["gate"][index] if "gate" in p else 1.0
                h = stream + gate * sum(weight.unsqueeze(-1) * v for weight, v in zip(weights, sources, strict=True))
            out = network.f(index, network.norm(index, h))
            stream, block = stream + out, out if block is None else block + out
            if index + 1 in bounds:
                sources.append(block)
                block = None
        return network.norm(network.sublayers, stream)

    return compute


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_read_is_the_stream_and_what_a_softmax_takes_of_earlier_deltas(shape, size):
    check_formula("delta_attnres", formula(range(size, shape[0], size)), shape, block_size=size)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gate_from_zero_starts_at_the_standard_residual(shape):
    check_formula("delta_attnres", formula(range(2, shape[0], 2)), shape, block_size=2, gate_start=0.0)
    assert make_residual("delta_attnres", 6, 8, block_size=2, gate_start=0).traits.starts_standard
    assert not make_residual("delta_attnres", 6, 8, block_size=2, gate_start=1.0).traits.starts_standard
    with pytest.raises(UserError, match="gate_start is 'zero'"):
        make_residual("delta_attnres", 6, 8, gate_start="zero")


def test_blocks_may_differ_in_size():
    check_formula("delta_attnres", formula((1, 4)), SHAPES[1], block_size="1+3+3")


def test_blocks_are_their_own_sums_and_the_one_in_progress_is_no_source_of_the_softmax():
    residual = make_residual("delta_attnres", 7, 8, block_size=3)
    embedding, *outputs = torch.eye(8)
    state = residual.start(embedding)
    for index, output in enumerate(outputs[:5]):
        _, state = residual.read(state, index, lambda h: h)
        state = residual.write(state, index, output)
    assert [source.short for source in residual.sources(5)] == ["emb", "b1", "part"]
    first = outputs[0] + outputs[1] + outputs[2]
    h, _ = residual.read(state, 5, lambda h: h)
    torch.testing.assert_close(h, embedding + sum(outputs[:5]) + (embedding + first) / 2)
    assert [source.short for source in residual.sources(7)] == ["emb", "b1", "b2", "b3"]


def test_only_per_sublayer_does_it_start_as_the_standard_residual():
    assert make_residual("delta_attnres", 6, 8).traits.starts_standard
    blocks = make_residual("delta_attnres", 6, 8, num_blocks=3)
    assert blocks.bounds == (0, 2, 4, 6) and not blocks.traits.starts_standard
    assert not blocks.query.any() and (blocks.gain == 1).all()


def test_settings_that_are_impossible():
    with pytest.raises(UserError, match="both block_size=2 and num_blocks=2 are given"):
        make_residual("delta_attnres", 4, 8, block_size=2, num_blocks=2)
    with pytest.raises(UserError, match="block_size is 5: expected 1 to 4 sublayers"):
        make_residual("delta_attnres", 4, 8, block_size=5)
