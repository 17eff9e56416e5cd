"""What hooks on layers see and may change: the stream answers as the plain model's hidden state would."""

import threading

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from attnres import UserError, convert
from attnres.streams.banked import start_stream

IDS = torch.arange(12).view(2, 6)


def plain():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=61, max_position_embeddings=64)).eval()


@pytest.fixture(scope="module")
def both():
    model = plain()
    return model, convert(model, block_size=2)


def hooked(model, layer, hook):
    handle = model.model.layers[layer].register_forward_hook(hook)
    try:
        return model(input_ids=IDS, use_cache=False).logits
    finally:
        handle.remove()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_adding_to_a_layers_output_is_adding_to_the_hidden_state(both, layer):
    vector = torch.randn(32, generator=torch.Generator().manual_seed(1))
    for hook in (
        lambda module, args, output: output + vector,
        lambda module, args, output: vector + output,
        lambda module, args, output: output - vector * output.norm(dim=-1, keepdim=True),
        lambda module, args, output: output + (output[:, :1] - output) * 0.5,
    ):
        expected, ours = (hooked(model, layer, hook) for model in both)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(ours, both[0](input_ids=IDS).logits, atol=1e-4)


@pytest.mark.parametrize("grad", [False, True])
def test_a_hook_on_a_norm_of_its_own_arithmetic_runs_once(grad):
    """Gemma's gain is 1 + weight, which no kernel takes; without gradients a bank makes the reads."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = GemmaConfig(**sizes, head_dim=8, intermediate_size=48, vocab_size=61, max_position_embeddings=64)
    model = GemmaForCausalLM(config).eval()
    calls, results = [], []

    def twice(module, args, output):
        calls.append(module)
        return 2 * output

    with torch.set_grad_enabled(grad):
        for one in (model, convert(model, block_size=2)):
            for norm in (one.model.layers[1].input_layernorm, one.model.norm):
                norm.register_forward_hook(twice)
            results.append(one(input_ids=IDS, use_cache=False).logits)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == 4


def test_what_a_hook_reads_is_the_hidden_state(both):
    calls = []

    def hook(module, args, output):
        first, other = output.detach().clone(), torch.nn.functional.normalize(output, dim=-1)
        calls.append(
            (first, output.norm(), output.mean(1), output[:, -1], torch.cosine_similarity(output, first, -1), other)
        )

    for model in both:
        hooked(model, 1, hook)
    for a, b in zip(*calls, strict=True):
        assert type(b) is torch.Tensor
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_vector_that_is_added_is_a_part_of_the_last_output():
    """What a mechanism makes of it is what it makes of that output."""
    model = convert(plain(), "full")
    with torch.no_grad():
        model.residual.query.normal_(0, 0.5)
    vector = torch.randn(32)
    ours = hooked(model, 1, lambda module, args, output: output + vector)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + vector)
    expected = model(input_ids=IDS, use_cache=False).logits
    handle.remove()
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_tensor_in_place_of_the_stream_is_refused(both, layer):
    with pytest.raises(UserError, match=r"where the depth stream goes on: .*return output \+ change"):
        hooked(both[1], layer, lambda module, args, output: output * 2)


def test_changes_in_place_are_refused(both):
    def set_part(module, args, output):
        output[:, 0] = 0

    for hook in (set_part, lambda module, args, output: output.add_(1), lambda m, a, output: torch.relu_(output)):
        with pytest.raises(TypeError, match=r"return `output \+ change`"):
            hooked(both[1], 0, hook)
    with pytest.raises(TypeError, match="no tensor of it has the gradient of a hidden state"):
        hooked(both[1], 0, lambda module, args, output: output.register_hook(print))
    stream = start_stream(both[1].residual, torch.randn(2, 3, 32))
    assert not hasattr(stream, "no_such_thing") and stream.dim() == 3
    with pytest.raises(TypeError, match="0 of 6 sublayers have read the stream"):
        both[1].model.norm(stream)


def test_routing_weights_of_two_threads_are_apart(both):
    model, counts = both[1], []

    def ask():
        for _ in range(5):
            counts.append(len(model(input_ids=IDS, use_cache=False, output_routing_weights=True).routing_weights))

    threads = [threading.Thread(target=work) for work in (ask, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [7] * 10


@pytest.mark.filterwarnings("ignore")  # of nnsight's own
def test_nnsight_reads_layers_and_adds_to_what_their_mlps_put_out(both):
    nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed")
    results, vector = [], torch.randn(32, generator=torch.Generator().manual_seed(1))
    for model in both:
        traced = nnsight.NNsight(model)
        with traced.trace(input_ids=IDS):
            state = traced.model.layers[1].output.save()
            logits = traced.lm_head.output.save()
        with traced.trace(input_ids=IDS):
            traced.model.layers[1].mlp.output = traced.model.layers[1].mlp.output + vector
            steered = traced.lm_head.output.save()
        state = state[0] if isinstance(state, tuple) else state
        results.append((state.detach(), logits, steered))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(results[0][1], results[0][2], atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of that library's own
def test_transformer_lens_refuses_what_is_not_on_its_list(both, save_tokenizer, tmp_path):
    bridge = pytest.importorskip("transformer_lens.model_bridge", reason="transformer_lens is not installed")
    both[1].save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 300)
    with pytest.raises(ValueError, match="Could not determine supported architecture from config"):
        bridge.TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
