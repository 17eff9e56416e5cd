"""A GPTModel of Megatron core with depth reads, one process, on a CPU."""

import contextlib

import pytest
import torch

import attnres
from integrations import checks

pytest.importorskip("megatron.core", reason="make integrations installs it")
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
PLACES = {"layers": "layers", "final_norm": "final_layernorm", "width": 32}
MASK = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """One process of gloo; buffers and generators that Megatron asks of CUDA are the CPU's."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *_, **__: contextlib.nullcontext())
    store = f"file://{tmp_path_factory.mktemp('store') / 'ranks'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patch.undo()


def build(**options):
    torch.manual_seed(0)
    size = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 48, "hidden_dropout": 0.0}
    size |= {"attention_dropout": 0.0, "use_cpu_initialization": True, "gradient_accumulation_fusion": False}
    config = TransformerConfig(**size, **options)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    return checks.spread(GPTModel(config, spec, vocab_size=64, max_sequence_length=32))


def connect(model, residual, norms=("input_layernorm", "pre_mlp_layernorm"), **settings):
    final = None if norms is None else PLACES["final_norm"]
    attnres.attach(model.decoder, residual, norms=norms, **PLACES | {"final_norm": final}, **settings)
    return model


def run(model):
    logits = model(IDS, torch.arange(12).expand(2, -1), MASK)
    return logits, checks.language_loss(logits, IDS)


GPT = checks.Subject(build, connect, run)


def test_zero_queries_are_the_model_of_megatron(note):
    note("how", "`attnres.attach`, 1 line")
    checks.zero_queries(GPT, note)
    checks.switches(GPT)
    llama = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    checks.zero_queries(
        GPT._replace(build=lambda: build(**llama, activation_func=torch.nn.functional.silu)), lambda *_: None
    )


def test_layers_with_one_read_each():
    whole = GPT._replace(connect=lambda model, residual, **settings: connect(model, residual, norms=None, **settings))
    checks.zero_queries(whole, lambda *_: None)


def test_groups_of_its_optimizer(note):
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.optimizer.optimizer_config import ParamKey

    model = GPT.connected()
    query = checks.reads(model).query
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1)

    def group(overrides):
        return next(g for g in _get_param_groups([model], config, overrides) if any(p is query for p in g["params"]))

    assert group(None)["wd_mult"] == 1.0
    own = group({ParamKey(name="*residual.*"): {"wd_mult": 0.0}})
    assert own["wd_mult"] == 0.0 and len(own["params"]) == 2 and checks.reads(model).query_lr == 0.1
    note("its optimizer", "decayed queries (`wd_mult` 1); an override of its own")


def test_training_and_sharded_state(note):
    def adam(model):
        made = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        attnres.regroup(made, model)
        return made

    checks.ten_steps(GPT, model := GPT.connected(), adam(model))
    checks.resumes(GPT, adam)
    note("resume", "bit-equal")
    assert {"decoder.residual.query", "decoder.residual.gain"} <= set(model.sharded_state_dict())


def test_compile_checkpointing_and_tools(note):
    model = GPT.random_queries()
    note("checkpointing", f"its own needs CUDA; {checks.checkpointed(GPT, model, model.decoder.layers)}")
    checks.tools(GPT, note)


def test_explore_refuses_a_stream_of_time_before_batch():
    def logits(model):
        return lambda ids: model(
            ids, torch.arange(ids.shape[1]).expand_as(ids), MASK[..., : ids.shape[1], : ids.shape[1]]
        )

    with pytest.raises(attnres.UserError, match=r"\(2, 1, 32\).*batch"):
        checks.explored(GPT, logits)
