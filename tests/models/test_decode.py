"""Decoding token by token: static shapes, one graph for every step, the numbers of a whole forward pass."""

import warnings

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache

from attnres.models import build, build_plain
from attnres.ops import cpu, dispatch, two_phase

SIZE = {
    "family": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}


@pytest.mark.long
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


PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 8, 30, 2], [11]]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    model = build(SIZE, "block", vocab_size=97, max_positions=64, seed=0, settings={"block_size": 3}).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model.residual.query.normal_(0, 0.5)
    return model


@pytest.fixture(scope="module")
def alone(model):
    """Each prompt's greedy continuation without a cache: what every other way must give."""
    return [model.generate(torch.tensor([prompt]), use_cache=False, **GREEDY)[0, len(prompt) :] for prompt in PROMPTS]


def test_prompts_padded_on_the_left_go_on_as_each_does_alone(model, alone):
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    together = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(together[:, longest:], torch.stack(alone))


@pytest.mark.parametrize("how", ["static cache", "another model's drafts", "its own drafts", "drafts from the prompt"])
def test_every_way_of_greedy_decoding_gives_the_same_tokens(model, alone, how):
    other = build_plain(SIZE, vocab_size=97, max_positions=64, seed=1).eval()
    options = {
        "static cache": {"cache_implementation": "static", "disable_compile": True},
        "another model's drafts": {"assistant_model": other},
        "its own drafts": {"assistant_model": model},  # all accepted; one pass of several tokens checks them
        "drafts from the prompt": {"prompt_lookup_num_tokens": 2},
    }[how]
    for prompt, expected in zip(PROMPTS[1:], alone[1:], strict=True):
        if how == "drafts from the prompt":
            prompt = prompt * 2
            expected = model.generate(torch.tensor([prompt]), use_cache=False, **GREEDY)[0, len(prompt) :]
        out = model.generate(torch.tensor([prompt]), **GREEDY, **options)
        assert torch.equal(out[0, len(prompt) :], expected)
    assert cpu.load() is None or model.residual.banks._waiting  # sources lay in a bank


def test_beam_search_with_a_cache_is_beam_search_without_one(model):
    ids, options = torch.tensor(PROMPTS[1:2]), {**GREEDY, "num_beams": 3, "num_return_sequences": 3}
    beams = model.generate(ids, **options)
    assert torch.equal(beams, model.generate(ids, use_cache=False, **options))
    assert len({tuple(row.tolist()) for row in beams}) == 3


@pytest.mark.long
def test_prompts_batched_continuously_go_on_as_each_does_alone(model, alone):
    """Transformers packs the tokens of all requests into one row, over pages of one cache."""
    options = GenerationConfig(**GREEDY, eos_token_id=-1)
    pages = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32)
    answers = model.generate_batch(inputs=PROMPTS, generation_config=options, continuous_batching_config=pages)
    assert [answers[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))] == [row.tolist() for row in alone]
