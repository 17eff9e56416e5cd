"""Decoding token by token: static shapes, one graph for every step, the numbers of a whole forward pass."""

import warnings

import pytest
import torch
from transformers import StaticCache

from attnres.models import build
from attnres.ops import dispatch, two_phase

SIZE = {
    "family": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}


@pytest.mark.parametrize("residual", ["block", "full"])
def test_a_compiled_decode_step_serves_every_position(residual):
    model = build(SIZE, residual, vocab_size=97, max_positions=32, seed=0).eval()
    torch.nn.init.normal_(model.residual.query, 0, 0.5)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about the machine
        expected = model(input_ids=ids, use_cache=False).logits
        prompt = model(input_ids=ids[:, :5], past_key_values=cache, cache_position=torch.arange(5)).logits
        torch.testing.assert_close(prompt, expected[:, :5], rtol=1e-4, atol=1e-4)
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        for position in range(5, 9):
            at = torch.tensor([position])
            token = ids[:, position : position + 1]
            with torch._dynamo.config.patch(error_on_recompile=position > 6):
                out = step(input_ids=token, past_key_values=cache, cache_position=at).logits
            torch.testing.assert_close(out[:, 0], expected[:, position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual", ["block", "full"])
def test_a_step_calls_the_reads_kernels_once_a_block_and_once_a_sublayer(residual, monkeypatch):
    """However many sources there are: what a decode step launches must not grow with them."""
    calls = []

    class Counting:
        def __init__(self, module):
            self.module = module

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.module, name)

    monkeypatch.setattr(two_phase, "backend_for", lambda *a, **k: Counting(dispatch.backend_for(*a, **k)))
    settings = {"block_size": 4} if residual == "block" else {"group": 4}
    size = {**SIZE, "num_hidden_layers": 8}
    model = build(size, residual, vocab_size=97, max_positions=32, seed=0, settings=settings).eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]), use_cache=False, output_hidden_states=True)  # so without a bank
    assert calls.count("merge") == 16 + 1  # sublayers and the output
    assert calls.count("read_sealed") <= 4  # groups
