"""Whatever is made again in the backward pass: the gradients stay, and less is kept."""

import copy
import functools

import pytest
import torch
from sample_mechanisms import crossed
from tiny import NARROW
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_layers import GradientCheckpointingLayer

from attnres.errors import UserError
from attnres.models import build, convert
from attnres.models.bases import checkpoint_activations

IDS = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(0))


def stirred(name, **settings):
    """A small model whose residual is not at its start values."""
    model = build(NARROW, name, vocab_size=30, max_positions=8, settings=settings).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def gradients(model):
    """Of every parameter, and the bytes that the forward pass kept for them."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return grads, sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", crossed())
def test_gradients_stay_whatever_is_kept(name):
    expected, all_of_it = gradients(stirred(name))
    for how in ("layer", "sublayer", "reads"):
        model = stirred(name)
        checkpoint_activations(model, how)
        ours, kept = gradients(model)
        for left, right in zip(ours, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)
        assert kept <= all_of_it if how == "reads" else kept < all_of_it, how


@pytest.mark.parametrize("settings", [{"gate": "scalar"}, {"heads": 2}, {"value_residual": "head"}], ids=str)
def test_settings_of_depth_reads_are_made_again_too(settings):
    expected, all_of_it = gradients(stirred("block", num_blocks=2, **settings))
    for how in ("layer", "sublayer", "reads"):
        model = stirred("block", num_blocks=2, **settings)
        checkpoint_activations(model, how)
        ours, kept = gradients(model)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
        assert kept < all_of_it, how


def test_layers_of_three_sublayers_in_a_list_are_made_again_too():
    """T5's attentions and MLP, inside of modules that norm and add."""
    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 2}
    config = T5Config(**sizes, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0)
    torch.manual_seed(0)
    plain = T5ForConditionalGeneration(config).eval()
    results, kept = [], []
    for how in ("none", "sublayer"):
        model = convert(copy.deepcopy(plain), "full").train()
        mixers = [model.depth_layers[1].layer[0].SelfAttention, model.depth_layers[1].layer[2].DenseReluDense]
        calls = []
        for mixer in mixers:
            mixer.forward = functools.partial(counted, mixer.forward, calls)
        checkpoint_activations(model, how)
        size = {}

        def keep(tensor, size=size):
            size[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        results.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in size.values()))
        assert len(calls) == len(mixers) * (2 if how == "sublayer" else 1)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)
    assert kept[1] < kept[0]


def counted(forward, calls, *args, **kwargs):
    """Call `forward` and note that it was called."""
    calls.append(forward)
    return forward(*args, **kwargs)


def test_layers_without_an_attention_and_an_mlp_are_named():
    model = stirred("standard")
    model.model.layers[1] = torch.nn.Identity()
    with pytest.raises(UserError, match="no attention and no MLP is found in Identity: choose layer or reads"):
        checkpoint_activations(model, "sublayer")


def test_layers_that_know_no_checkpointing_are_named(monkeypatch):
    model = stirred("standard")
    monkeypatch.delattr(GradientCheckpointingLayer, "gradient_checkpointing")
    for module in model.modules():
        vars(module).pop("gradient_checkpointing", None)
    with pytest.raises(
        UserError, match="layers of AttnResQwen3ForCausalLM do not support checkpointing: choose sublayer"
    ):
        checkpoint_activations(model, "layer")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it where a graph breaks
@pytest.mark.parametrize("how", ["whole", "layers", "wrapped"])
def test_compiled_models_are_checkpointed_too(how):
    """A whole model with Transformers' checkpointing, its layers one by one, and layers in torch's own wrapper."""
    expected, _ = gradients(stirred("block", num_blocks=2))
    model = stirred("block", num_blocks=2)
    torch._dynamo.reset()
    if how == "wrapped":
        for index, layer in enumerate(model.depth_layers):
            model.depth_layers[index] = checkpoint_wrapper(layer)
    else:
        checkpoint_activations(model, "layer")
    # with no break in a graph: a layer is handed tuples of tensors
    for layer in model.depth_layers if how != "whole" else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "whole" else model
    loss = run(input_ids=IDS, labels=IDS, use_cache=False).loss
    ours = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    for left, right in zip(ours, expected, strict=True):
        assert (left - right).abs().max() <= 1e-5 * right.abs().max() + 1e-9
