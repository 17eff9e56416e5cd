"""A depth stream for modules that are not of Transformers."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from attnres import Norm, UserError, attach, record

WIDTH = 16


class DiTBlock(nn.Module):
    """A layer of a diffusion transformer: norms without weights, scaled and shifted by a condition, gated outputs
    (Peebles and Xie, arXiv 2212.09748, figure 3)."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(h, h, h, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 4))

    def forward(self, x, condition):
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def encoder(layers=3):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def vit():
    timm = pytest.importorskip(
        "timm", reason="timm needs torchvision, which is as large as all else here", exc_type=Exception
    )
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


NETWORKS = {
    "encoder": (encoder, {}, lambda: (torch.randn(2, 5, WIDTH),)),
    "vit": (vit, {"layers": "blocks"}, lambda: (torch.randn(2, 3, 16, 16),)),
    "dit": (
        DiT,
        {"layers": "blocks", "final_norm": "head.0"},
        lambda: (torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH)),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_of_ones_own_computes_what_it_computed_and_learns_its_reads(name, training):
    network, paths, inputs = NETWORKS[name]
    torch.manual_seed(0)
    module, arguments = network().train(training), inputs()
    with torch.set_grad_enabled(training):
        expected = module(*arguments)
        residual = attach(module, "block", **paths, block_size=3)
        torch.testing.assert_close(module(*arguments), expected, rtol=1e-5, atol=1e-6)
    assert "residual.query" in module.state_dict()
    with torch.no_grad():
        residual.query.normal_(0, 0.5)
    with record(module) as trace:
        changed = module(*arguments)
    assert len(trace.weights) == 7 and not torch.allclose(changed, expected, atol=1e-4)
    changed.square().mean().backward()
    assert residual.query.grad[1:].abs().amax(1).min() > 0


class OffsetNorm(nn.Module):
    """As Llama's RMSNorm in its names, with a gain of 1 + weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.full((WIDTH,), 0.1)), 1e-6

    def forward(self, x):
        return nn.functional.rms_norm(x, (WIDTH,), 1 + self.weight, self.variance_epsilon)


@pytest.mark.parametrize("norm", [OffsetNorm, lambda: CohereLayerNorm(WIDTH), lambda: LlamaRMSNorm(WIDTH)])
def test_a_norm_is_what_it_computes_not_what_its_attributes_are_called(norm):
    torch.manual_seed(0)
    module, x = encoder(), torch.randn(2, 5, WIDTH)
    for layer in module.layers:
        layer.norm1, layer.norm2 = norm(), norm()
    expected = module(x)
    attach(module, "full")
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, LlamaRMSNorm, OffsetNorm])
def test_a_read_computes_a_known_norm_itself(norm, monkeypatch):
    torch.manual_seed(0)
    module = encoder()
    for layer in module.layers:
        layer.norm1, layer.norm2 = (OffsetNorm(), OffsetNorm()) if norm is OffsetNorm else (norm(WIDTH), norm(WIDTH))
    residual, given = attach(module, "full"), []
    monkeypatch.setattr(residual, "read", lambda *args: given.append(args[2]) or type(residual).read(residual, *args))
    module(torch.randn(2, 5, WIDTH))
    assert [type(one) is Norm for one in given[:6]] == [norm is not OffsetNorm] * 6


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, CohereLayerNorm, LlamaRMSNorm])
def test_a_hook_on_a_norm_runs_once(norm):
    """Whether its arithmetic is known or not."""
    torch.manual_seed(0)
    modules, x = (encoder(), encoder()), torch.randn(2, 5, WIDTH)
    modules[1].load_state_dict(modules[0].state_dict())
    calls = []

    def twice(norm, args, output):
        calls.append(norm)
        return 2 * output

    for module in modules:
        module.norm = norm(WIDTH)
        for layer in module.layers:
            layer.norm1, layer.norm2 = norm(WIDTH), norm(WIDTH)
    expected, ours = modules
    attach(ours, "full")
    for module in modules:
        module.norm.register_forward_hook(twice)
        module.layers[1].norm1.register_forward_hook(twice)
    torch.testing.assert_close(ours(x), expected(x), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), expected(x), rtol=1e-5, atol=1e-5)
    assert len(calls) == 8


@pytest.mark.parametrize("residual", ["denseformer", "mrla_light", "dca", "boundary", "post_block", "adaptive"])
def test_what_counts_whole_layers_is_refused_where_layers_have_other_sublayers(residual):
    with pytest.raises(UserError, match=f"'{residual}' takes every two sublayers for a layer, and layers have 1"):
        attach(encoder(), residual, norms=("norm1",), sublayers=("layer",))


class Checkpointed(nn.Module):
    """A layer whose activations are made again in backward."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, *args):
        return checkpoint(self.inner, *args, use_reentrant=self.use_reentrant)


class CheckpointedDiT(DiT):
    """As `DiT`, whose forward checkpoints its blocks."""

    use_reentrant = False

    def forward(self, x, condition):
        for block in self.blocks:
            x = checkpoint(block, x, condition, use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("where", ["layer", "module"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_keeps_gradients_or_says_why_not(use_reentrant, where):
    torch.manual_seed(0)
    plain, norms = DiT(), ("norm1", "norm2")
    module = copy.deepcopy(plain)
    if where == "layer":
        module.blocks = nn.ModuleList(Checkpointed(block, use_reentrant) for block in module.blocks)
        norms = ("inner.norm1", "inner.norm2")
    else:
        module.__class__ = CheckpointedDiT
        module.use_reentrant = use_reentrant
    for each, names in ((plain, ("norm1", "norm2")), (module, norms)):
        residual = attach(each, "full", layers="blocks", norms=names, final_norm="head.0", width=WIDTH)
        with torch.no_grad():
            residual.query.copy_(torch.linspace(-1, 1, residual.query.numel()).view_as(residual.query))
    embed, condition = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH, requires_grad=True)
    x = embed(torch.randn(2, 5, WIDTH))
    with torch.no_grad():
        module(x.detach(), condition)
    if use_reentrant:
        with pytest.raises(UserError, match="reentrant checkpointing runs the layers of a depth stream"):
            module(x, condition)
        return
    ours, expected = (
        torch.autograd.grad(each(x, condition).square().sum(), [x, condition, *each.parameters()], retain_graph=True)
        for each in (module, plain)
    )
    assert all(gradient.any() for gradient in expected)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_compiled_module_may_checkpoint_its_layers_where_they_hand_on_tuples():
    torch.manual_seed(0)
    module, x, condition = CheckpointedDiT(), torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH)
    plain = copy.deepcopy(module)
    gradients = []
    for each, tuples in ((plain, False), (module, True)):
        residual = attach(each, "block", example=(x, condition), num_blocks=3, tuples=tuples)
        with torch.no_grad():
            residual.query.copy_(torch.linspace(-1, 1, residual.query.numel()).view_as(residual.query))
        run = torch.compile(each, backend="aot_eager", fullgraph=True) if tuples else each
        gradients.append(torch.autograd.grad(run(x, condition).square().sum(), list(each.parameters())))
    for left, right in zip(*gradients, strict=True):
        assert (left - right).abs().max() <= 1e-5 * right.abs().max()


def test_reentrant_checkpointing_is_refused_where_the_first_input_has_no_gradient():
    """Of a frozen embedding, say: the condition's and the parameters' gradients would be lost all the same."""
    module = DiT()
    module.__class__ = CheckpointedDiT
    module.use_reentrant = True
    attach(module, "full", layers="blocks", norms=("norm1", "norm2"), final_norm="head.0", width=WIDTH)
    with pytest.raises(UserError, match="reentrant checkpointing runs the layers of a depth stream"):
        module(torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH, requires_grad=True) * 2)


@pytest.mark.parametrize("inner", [DiT, CheckpointedDiT])
def test_a_whole_module_may_be_checkpointed_reentrantly(inner):
    """It runs again from its beginning, so that no gradient is lost, also where its layers are checkpointed in it."""
    torch.manual_seed(0)
    module = DiT()
    attach(module, "full", layers="blocks", norms=("norm1", "norm2"), final_norm="head.0", width=WIDTH)
    module.__class__ = inner
    x, condition = torch.randn(2, 5, WIDTH, requires_grad=True), torch.randn(2, WIDTH, requires_grad=True)
    gradients = []
    for run in (module, lambda *args: checkpoint(module, *args, use_reentrant=True)):
        module.zero_grad()
        x.grad = condition.grad = None
        run(x * 1, condition).square().sum().backward()
        gradients.append([x.grad, condition.grad, *(one.grad for one in module.parameters())])
    torch.testing.assert_close(*gradients)


def test_blocks_that_a_module_runs_without_gradients_are_its_own_affair():
    class Frozen(DiT):
        """Its upper blocks are not trained."""

        def forward(self, x, condition):
            x = self.blocks[0](x, condition)
            with torch.no_grad():
                for block in self.blocks[1:]:
                    x = block(x, condition)
                return self.head(x)

    module, plain = Frozen(), DiT()
    plain.load_state_dict(module.state_dict())
    x, condition = torch.randn(2, 5, WIDTH), torch.randn(2, WIDTH)
    expected = plain(x, condition)
    attach(module, "full", layers="blocks", final_norm="head.0", width=WIDTH)
    torch.testing.assert_close(module(x, condition), expected, rtol=1e-5, atol=1e-5)


def test_constants_go_by_the_layers_that_there_are():
    one = {"norms": ("norm1",), "sublayers": ("layer",)}
    assert attach(encoder(layers=3), "norm_preserving", **one).share().tolist() == pytest.approx([math.log(2) / 3] * 3)
    assert attach(encoder(layers=20), "layerscale", **one).scale_init == 1e-5, "of twenty layers, not of ten"
    assert attach(encoder(layers=3), "keel", **one).gain.shape == (2, WIDTH)


@pytest.mark.parametrize("residual", ["standard", "full", "mhc", "densenet"])
def test_any_mechanism_can_be_attached_and_the_layers_output_read_without_a_norm(residual):
    torch.manual_seed(0)
    module, x = encoder(), torch.randn(2, 5, WIDTH)
    norm, module.norm = module.norm, None
    attach(module, residual, final_norm=None)
    y = module(x)
    assert y.shape == x.shape and type(y) is torch.Tensor and norm(y).isfinite().all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": "blocks"}, "TransformerEncoder has no 'blocks': print the module"),
        ({"norms": ("ln1", "ln2")}, "TransformerEncoderLayer has no 'ln1'"),
        ({"final_norm": "ln"}, "has no 'ln'"),
        ({"norms": ("norm1",)}, "1 norms and 2 sublayers were given"),
        ({"residual": "blokc"}, "did you mean 'block'"),
    ],
)
def test_mistakes_are_one_sentence(options, says):
    module = encoder()
    with pytest.raises(UserError, match=says):
        attach(module, **options)
    module(torch.randn(1, 2, WIDTH))
    attach(module)
    with pytest.raises(UserError, match="has a residual already"):
        attach(module)


def test_what_a_module_calls_residual_itself_is_left_to_it():
    module = encoder()
    module.residual = own = nn.Linear(2, 2)
    with pytest.raises(UserError, match="TransformerEncoder calls a Linear of its own 'residual', which is the name"):
        attach(module)
    assert module.residual is own
    module(torch.randn(1, 2, WIDTH))


def test_start_values_that_nobody_would_set_are_refused():
    with pytest.raises(UserError, match="residual 'deepnorm' scales the start values of a layer's branches"):
        attach(encoder(), "deepnorm")
    attach(encoder(), "postnorm")


def test_modules_that_stand_twice_are_refused_before_anything_is_hooked():
    module, x = encoder(), torch.randn(1, 2, WIDTH)
    module.layers = nn.ModuleList([module.layers[0], module.layers[1], module.layers[0]])
    expected = module(x)
    with pytest.raises(UserError, match="several layers are the same TransformerEncoderLayer"):
        attach(module)
    assert torch.equal(module(x), expected) and not hasattr(module, "residual")
    module = encoder()
    module.norm = module.layers[-1].norm2
    expected = module(x)
    with pytest.raises(UserError, match="the final norm 'norm' is also a norm of a layer"):
        attach(module)
    assert torch.equal(module(x), expected) and not hasattr(module, "residual")


def test_a_stream_by_another_name_is_one_sentence():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.norm = nn.ModuleList(DiTBlock() for _ in range(2)), nn.LayerNorm(WIDTH)

        def forward(self, x, condition):
            for layer in self.layers:
                x = layer(x=x, condition=condition)
            return self.norm(x)

    module = Network()
    attach(module, width=WIDTH)
    with pytest.raises(UserError, match="DiTBlock was called with x, condition by name: the stream is expected as its"):
        module(torch.randn(1, 2, WIDTH), torch.randn(1, WIDTH))


def test_values_of_a_module_of_ones_own_are_not_mixed():
    with pytest.raises(UserError, match="value_residual is 'layer', and attach does not know where"):
        attach(encoder(), "block", value_residual="layer")


def test_a_norm_that_is_not_named_is_found_out():
    module = encoder()
    attach(module, norms=("norm1",), sublayers=("attention",))
    with pytest.raises((TypeError, UserError), match=r"sublayer 1 wrote before it read"):
        module(torch.randn(1, 2, WIDTH))


def test_a_norm_with_more_arguments_names_the_one_inside():
    class Adaptive(nn.LayerNorm):
        def forward(self, x, scale):
            return super().forward(x) * scale

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = Adaptive(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.mlp(self.norm(x, 2.0))

    module = nn.Sequential(Layer(), Layer())
    module.layers = module[:]
    attach(module, norms=("norm",), sublayers=("mlp",), final_norm=None)
    with pytest.raises(UserError, match="Adaptive was named as a norm and takes more than the hidden state"):
        module(torch.randn(1, 2, WIDTH))


def _dit():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3, "sample_size": 4, "patch_size": 2}
    model = diffusers.DiTTransformer2DModel(**sizes, in_channels=4, out_channels=4, num_embeds_ada_norm=10).eval()
    names = {"layers": "transformer_blocks", "norms": ("norm1.norm", "norm3"), "final_norm": "norm_out", "width": 16}
    return model, (torch.randn(2, 4, 4, 4), torch.tensor([3, 5]), torch.tensor([1, 2])), names


@pytest.mark.filterwarnings("ignore")  # of that library's own
def test_the_dit_of_diffusers_computes_the_same_and_learns():
    torch.manual_seed(0)
    model, inputs, names = _dit()

    def run():
        output = model(*inputs)
        return output if torch.is_tensor(output) else output.sample

    expected = run()
    residual = attach(model, "full", **names)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        residual.query.normal_(0, 0.5)
    changed = run()
    assert not torch.allclose(changed, expected, atol=1e-4)
    changed.square().mean().backward()
    assert residual.query.grad[1:].abs().amax(1).min() > 0


def _replaced(path, module):
    def change(base):
        parent, _, name = path.rpartition(".")
        setattr(base.get_submodule(parent), name, module(base) if callable(module) else module)

    return change


CHANGES = {
    "norm": _replaced("norm", lambda base: nn.LayerNorm(WIDTH)),
    "layers.1.norm2": _replaced("layers.1.norm2", lambda base: nn.RMSNorm(WIDTH)),
    "layers.0": _replaced("layers.0", lambda base: encoder(1).layers[0]),
    "layers.2": _replaced("layers.2", lambda base: base.layers[1]),  # one layer twice
    "'layers' of TransformerEncoder has 2": _replaced("layers", lambda base: base.layers[:2]),
    "'layers' of TransformerEncoder has 4": lambda base: base.layers.append(encoder(1).layers[0]),
    "'norm' has not read": lambda base: setattr(base.norm, "forward", lambda x: x * 1.0),
}


@pytest.mark.parametrize("names", CHANGES)
def test_what_was_changed_after_depth_reads_were_attached_is_named(names):
    module = encoder()
    attach(module, "full")
    x = torch.randn(2, 5, WIDTH)
    expected = module(x)
    copies = [copy.deepcopy(module), module]
    copies[0].layers[0] = copy.deepcopy(copies[0].layers[0])  # the same layer with weights of its own
    assert torch.equal(copies[0](x), expected)
    for one in copies:
        CHANGES[names](one)
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), pytest.raises(UserError, match=names):
                one(x)


@pytest.mark.parametrize("final_norm", [nn.RMSNorm(WIDTH), nn.Identity()], ids=["norm", "identity"])
def test_a_replaced_final_norm_is_named_in_a_compiled_pass_too(final_norm):
    module = encoder()
    attach(module, "full")
    module.norm = final_norm
    with pytest.raises(UserError, match="'norm' of TransformerEncoder"):
        torch.compile(module, backend="eager")(torch.randn(2, 5, WIDTH))


def test_what_only_wraps_a_layer_or_a_norm_is_no_change():
    module = encoder()
    attach(module, "full")
    x = torch.randn(2, 5, WIDTH)
    expected = module(x)
    module.layers[1] = checkpoint_wrapper(module.layers[1])
    module.norm = checkpoint_wrapper(module.norm)
    for _ in range(2):
        assert torch.equal(module(x), expected)


def test_layers_in_a_dict_are_layers():
    class InDict(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict(dict(zip("abc", encoder().layers, strict=True)))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return self.norm(x)

    module, x = InDict(), torch.randn(2, 5, WIDTH)
    expected = module(x)
    attach(module, "block")
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
