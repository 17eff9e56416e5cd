"""torchtitan's llama3 with depth reads, in its own optimizer, checkpointing and compilation, on a CPU."""

import copy

import pytest
import torch

import attnres
from attnres.models import build
from integrations import checks
from integrations.torchtitan.adapter import add_depth_reads, read_group, with_reads

llama3 = pytest.importorskip("torchtitan.models.llama3", reason="make integrations installs it")

SIZE = {
    "family": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
}


def test_a_checkpoint_of_torchtitan_is_a_folder_of_ours():
    from torchtitan.models import qwen3
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    config = qwen3.qwen3_configs["debugmodel_non_fused_qkv"]("varlen")
    config.enable_weight_tying = False
    model = build(SIZE, "block", vocab_size=11, max_positions=8)
    torch.nn.init.normal_(model.residual.query)
    hf = model.state_dict()
    adapter = with_reads(Qwen3StateDictAdapter)(config, None)
    titan = adapter.from_hf(dict(hf))
    assert {"residual.query", "layers.1.feed_forward.w2.weight"} <= set(titan)
    back = adapter.to_hf(titan)
    assert set(back) == set(hf) and all(torch.equal(back[name], hf[name]) for name in hf)
    lost = set(hf) - set(Qwen3StateDictAdapter(config, None).to_hf(titan))
    assert lost == {name for name in hf if "residual" in name}


IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def config():
    """torchtitan's own debug model, narrow, with the attention that a CPU has."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import _LINEAR_INIT, _NORM_INIT, _output_linear_init

    made = copy.deepcopy(llama3.llama3_configs["debugmodel"]("flex"))
    norm, linear = type(made.norm), type(made.lm_head)
    made.dim, made.vocab_size, layers = 32, 64, made.layers[:2]
    made.tok_embeddings.num_embeddings, made.tok_embeddings.embedding_dim = 64, 32
    made.norm = norm(normalized_shape=32, param_init=_NORM_INIT)
    made.lm_head = linear(in_features=32, out_features=64, param_init=_output_linear_init(32))
    rope = copy.deepcopy(layers[0].attention.rope)
    rope.dim, rope.max_seq_len = 16, 64
    init = {"wqkv_param_init": _LINEAR_INIT, "wo_param_init": _LINEAR_INIT}
    ffn = {"w1_param_init": _LINEAR_INIT, "w2w3_param_init": _LINEAR_INIT}
    made.layers = [
        type(layer)(
            attention_norm=norm(normalized_shape=32, param_init=_NORM_INIT),
            ffn_norm=norm(normalized_shape=32, param_init=_NORM_INIT),
            attention=make_gqa_config(
                dim=32, n_heads=2, inner_attention=ScaledDotProductAttention.Config(), rope=rope, fuse_qkv=True, **init
            ),
            feed_forward=make_ffn_config(dim=32, hidden_dim=48, **ffn),
        )
        for layer in layers
    ]
    return made


def on_meta(residual=None, **settings):
    """Build, materialise and initialise a model in the order of torchtitan's trainer."""
    with torch.device("meta"):
        model = config().build()
        if residual is not None:
            add_depth_reads(model, residual, **settings)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model


def spread_weights(model):
    others = {name: p for name, p in model.named_parameters() if not name.startswith("residual.")}
    checks.spread(torch.nn.ParameterDict({name.replace(".", "/"): p for name, p in others.items()}))
    return model


def connect(model, residual, **settings):
    return spread_weights(on_meta(residual, **settings))


def run(model):
    logits = model(IDS)
    return logits, checks.language_loss(logits, IDS)


LLAMA = checks.Subject(lambda: spread_weights(on_meta()), connect, run)


def optimizers(model):
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    others = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1})
    own = OptimizersContainer.Config(param_groups=[read_group(1e-2), others], implementation="for-loop")
    return own.build(model_parts=[model])


def test_zero_queries_are_the_model_of_torchtitan(note):
    note("how", "adapter, 2 lines")
    checks.zero_queries(LLAMA, note)
    model = LLAMA.random_queries()
    attnres.load_plain(model, LLAMA.build().state_dict())


def test_its_optimizers_and_distributed_checkpoints(note, tmp_path):
    import torch.distributed.checkpoint as dcp

    model = LLAMA.connected()
    made = optimizers(model)
    checks.ten_steps(LLAMA, model, made, 3)
    group = checks.group_of(made.optimizers[0], model.residual.query)
    assert group["weight_decay"] == 0 and model.residual.query_lr == 0.1 and len(group["params"]) == 2
    dcp.save({"model": model.state_dict(), "optimizer": made.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    again = LLAMA.connected()
    other = optimizers(again)
    state = {"model": again.state_dict(), "optimizer": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    checks.ten_steps(LLAMA, model, made, 2)
    checks.ten_steps(LLAMA, again, other, 2)
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in model.state_dict().items())
    note("its optimizer", "regex groups: one `ParamGroupConfig`")
    note("resume", "DCP, bit-equal")


@pytest.mark.long
def test_its_checkpointing_and_compilation(note):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    model = LLAMA.random_queries()
    eager = checks.one_pass(LLAMA, model)
    told = {}
    for name, policy in (("full", FullAC), ("selective", SelectiveAC)):
        model = LLAMA.random_queries()
        policy.Config().build().apply(model)
        told[name] = checks.compare(checks.one_pass(LLAMA, model), eager)
        torch._dynamo.reset()
        for layer in model.layers.values():  # as its apply_compile does after it
            layer.compile(backend="aot_eager", fullgraph=True)
        told[f"{name}, compiled"] = checks.compare(checks.one_pass(LLAMA, model), eager)
    assert max(max(pair) for pair in told.values()) < 1e-4
    note("checkpointing", "; ".join(f"{name} {checks.tell(pair)}" for name, pair in told.items()))
    model = LLAMA.random_queries()
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    pair = checks.compare(checks.one_pass(LLAMA, model), eager)
    assert max(pair) < 1e-4
    note("compile", f"each layer, fullgraph {checks.tell(pair)}")
    note("cache", "has none")


def test_record_intervene_and_explore(note):
    checks.tools(LLAMA, note)
    checks.explored(LLAMA)
