"""Reads after blocks alone, against their formula."""

import pytest
import torch
from formula import SHAPES, check_formula


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_the_stream_after_a_block_is_a_read_of_all_blocks(shape, size):
    if size > shape[0]:
        pytest.skip("a block of more sublayers than there are")

    def formula(network, parameters):
        blocks, x, total = [network.embedding], network.embedding, torch.zeros_like(network.embedding)
        for index in range(network.sublayers):
            output = network.f(index, network.norm(index, x))
            x, total = x + output, total + output
            if (index + 1) % size == 0 or index + 1 == network.sublayers:
                w, g = (parameters[name][len(blocks) - 1] for name in ("query", "gain"))
                blocks, total = [*blocks, total], torch.zeros_like(total)
                keys = [b / (b.square().mean(-1, keepdim=True) + 1e-6).sqrt() * g for b in blocks]
                a = torch.stack([key @ w for key in keys]).softmax(0)
                x = len(blocks) * sum(b * one[..., None] for b, one in zip(blocks, a, strict=True))
        return network.norm(network.sublayers, x)

    check_formula("post_block", formula, shape, block_size=size)
