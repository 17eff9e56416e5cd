"""What one forward pass shows of layers, and what is attached by it, in models of Transformers and of torch."""

import copy

import pytest
import torch
import transformers
from torch import nn

from attnres import UserError, attach, convert, detach, disabled, record
from attnres.residuals import settings_of
from attnres.training.config import from_dict
from attnres.training.prepare import prepare_run

IDS = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def hugging_face(kind, model="ForCausalLM", **fields):
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields})
    return lambda: getattr(transformers, f"{kind}{model}")(config)


def torch_layers(kind, layers=3, norm=None, **options):
    layer = getattr(nn, f"Transformer{kind}Layer")(32, 4, 64, dropout=0.0, batch_first=True, **options)
    extra = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    return lambda: getattr(nn, f"Transformer{kind}")(layer, layers, norm, **extra)


GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
# Gemma-2 norms what sublayers put out too, OLMo-2 that alone; Phi has one norm before attention and MLP side by side.
MODELS = {
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **GPT2)), (IDS,), 2),
    "llama": (hugging_face("Llama"), {"input_ids": IDS}, 2),
    "gemma2": (
        hugging_face("Gemma2", head_dim=8, num_key_value_heads=4),
        (IDS,),
        2,
    ),
    "olmo2": (hugging_face("Olmo2"), (IDS,), 2),
    "phi": (hugging_face("Phi"), (IDS,), 1),
    "neox": (hugging_face("GPTNeoX"), (IDS,), "read, read, write"),
    "bert": (hugging_face("Bert", "Model"), (IDS,), "a norm or a gate follows"),
    "encoder": (torch_layers("Encoder", norm_first=True, norm=nn.LayerNorm(32)), (X,), 2),
    "no final norm": (torch_layers("Encoder", norm_first=True), (X,), 2),
    "post-norm": (torch_layers("Encoder"), (X,), "a norm or a gate follows"),
    "decoder": (torch_layers("Decoder", norm_first=True, norm=nn.LayerNorm(32)), (X, X[:, :3]), 3),
}


def run(model, example):
    output = model(**example) if isinstance(example, dict) else model(*example)
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("norms", ["auto", None])
@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_all_that_is_needed(name, norms):
    make, example, reads = MODELS[name]
    torch.manual_seed(0)
    plain = make().eval()
    model = copy.deepcopy(plain)
    expected = run(plain, example)
    if norms == "auto" and isinstance(reads, str):
        with pytest.raises(UserError, match=reads) as error:
            attach(model, "block", example=example)
        assert "norms=None" in str(error.value) and torch.equal(run(model, example), expected)
        return
    residual = attach(model, "block", example=example, norms=norms, num_blocks=3)
    assert residual.num_sublayers == 3 * (reads if norms == "auto" else 1) and residual.width == 32
    torch.testing.assert_close(run(model, example), expected, rtol=2e-5, atol=2e-6)
    with torch.no_grad():
        residual.query.normal_(0, 0.5)
    with record(model) as trace:
        changed = run(model.train(), example)
    assert len(trace.weights) == residual.num_sublayers + 1 and not torch.allclose(changed, expected, atol=1e-4)
    changed.square().mean().backward()
    assert residual.query.grad[1:].abs().amax(1).min() > 0
    with disabled(model.eval()):
        assert torch.equal(run(model, example), expected)
    assert detach(model) is residual
    assert torch.equal(run(model, example), expected) and model.state_dict().keys() == plain.state_dict().keys()
    assert [type(one) for one in model.modules()] == [type(one) for one in plain.modules()]


@pytest.mark.parametrize("kind", ["GPTNeoX", "Phi", "Olmo2"])
def test_whole_layers_have_a_cache(kind):
    torch.manual_seed(0)
    model = hugging_face(kind)().eval()
    with torch.no_grad():
        attach(model, "full", example=(IDS,), norms=None).query.normal_(0, 0.5)
        whole = model(IDS).logits
        first = model(IDS[:, :4], use_cache=True)
        rest = model(IDS[:, 4:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, rtol=1e-4, atol=1e-5)


def encoder():
    return torch_layers("Encoder", norm_first=True, norm=nn.LayerNorm(32))()


UNNAMED = {
    "neox": ("GPTNeoX", ("input_layernorm", "post_attention_layernorm"), "final_layer_norm"),
    "olmo2": ("Olmo2", ("post_attention_layernorm", "post_feedforward_layernorm"), "norm"),
    "bert": ("Bert", ("attention.output.LayerNorm", "output.LayerNorm"), None),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_layers_of_another_kind_without_an_example_are_told_of_both_ways_out(name):
    kind, norms, final = UNNAMED[name]
    model = hugging_face(kind, "Model")()
    layers = "encoder.layer" if name == "bert" else "layers"
    attach(model, "block", layers=layers, norms=norms, final_norm=final, num_blocks=3)
    with pytest.raises(UserError, match=r"example=.*norms=None"):
        model(IDS)


def test_standard_takes_the_settings_of_others_and_nobody_elses():
    module = encoder()
    expected = module(X)
    attach(module, "standard", example=X, num_blocks=3, gate="scalar")
    torch.testing.assert_close(module(X), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="num_blokcs"):
        attach(encoder(), "standard", num_blokcs=3)
    with pytest.raises(UserError, match="num_blocks"):
        attach(encoder(), "full", num_blocks=3)
    plain = MODELS["llama"][0]().eval()
    model = convert(plain, "standard", num_blocks=3, query_lr=0.1)
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="num_blokcs"):
        convert(plain, "standard", num_blokcs=3)
    config = prepare_run(
        from_dict({"model": {"residual": "standard", "num_blocks": 3, "settings": {"gate": "scalar"}}})
    )
    assert not set(config.config.model.settings) - set(settings_of("standard"))


class InPlace(nn.Module):
    """A layer that adds to what it is given."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        x += self.mlp(self.norm(x))
        return x


class Gate(nn.Module):
    """A layer that scales its hidden state: x = 0.9 x + f(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        return 0.9 * x + self.mlp(self.norm(x))


class Loop(nn.Module):
    """Layers and a change of the hidden state between them."""

    def __init__(self, layer, between=0.0):
        super().__init__()
        self.blocks, self.between, self.norm = nn.ModuleList(layer() for _ in range(2)), between, nn.LayerNorm(32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if not self.between else block(x) * self.between
        return self.norm(x)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda: Loop(Gate), {}, "something else than the sum"),
        (lambda: Loop(Gate, 2.0), {"norms": None}, "between|compute something else|tensor came"),
        (lambda: Loop(InPlace), {"norms": None}, "in place"),
        (lambda: torch.compile(encoder(), backend="eager"), {}, "compiled already"),
        (lambda: nn.Linear(32, 32), {}, "no list of layers"),
        (encoder, {"norms": ("norm1",)}, "does not run|compute something else"),
        (encoder, {"norms": ("norm1", "norm3")}, "norm3"),
        (encoder, {"example": (X, X, X, X, X, X)}, "does not run on the example"),
        (torch_layers("Encoder"), {"norms": None, "read_scale": "mean"}, "compute something else"),
    ],
)
def test_what_has_no_place_for_reads_is_refused_at_once_and_left_as_it_was(make, options, says):
    torch.manual_seed(0)
    module = make().eval()
    expected, before = module(X.clone()), {path: type(one) for path, one in module.named_modules()}
    with pytest.raises(UserError, match=says):
        attach(module, "block", **{"example": (X,), **options})
    assert torch.equal(module(X.clone()), expected)
    assert {path: type(one) for path, one in module.named_modules()} == before
