"""A decoder of x-transformers with depth reads, on a CPU."""

from functools import partial

import pytest
import torch

import attnres
from integrations import checks

x_transformers = pytest.importorskip("x_transformers", reason="make integrations installs it")
from integrations.x_transformers.adapter import add_depth_reads  # noqa: E402

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def build(layers=x_transformers.Decoder, **options):
    torch.manual_seed(0)
    stack = layers(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, **options)
    return checks.spread(x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=stack))


def connect(model, residual, **settings):
    add_depth_reads(model.attn_layers, residual, **settings)
    return model


def run(model):
    logits = model(IDS)
    return logits, checks.language_loss(logits, IDS)


DECODER = checks.Subject(build, connect, run)


def optimizer(model):
    made = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    attnres.regroup(made, model)
    return made


def test_zero_queries_are_the_model_of_x_transformers(note):
    note("how", "adapter, 1 line")
    checks.zero_queries(DECODER, note)
    variants = [{"use_rmsnorm": True, "ff_glu": True}, {"layers": x_transformers.Encoder}, {"add_value_residual": True}]
    for options in variants:
        checks.zero_queries(DECODER._replace(build=partial(build, **options)), lambda *_: None)
    model, plain = DECODER.random_queries(), build()
    attnres.load_plain(model, plain.state_dict())
    with pytest.raises(attnres.UserError, match="GRUGating"):
        add_depth_reads(build(gate_residual=True).attn_layers)


def test_its_muon_and_adam(note):
    model = DECODER.connected()
    residual = checks.reads(model)
    assert not {id(p) for p in model.attn_layers.muon_parameters()} & {id(p) for p in residual.parameters()}
    made = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    checks.groups(made, model)
    checks.ten_steps(DECODER, model, made)
    checks.resumes(DECODER, optimizer)
    note("its optimizer", "makes none, `muon_parameters()` leaves reads out; regroup")
    note("resume", "bit-equal")


def test_cache_and_hidden_states(note):
    model = DECODER.random_queries().eval()
    prompt = IDS[:, :4]
    greedy = {"temperature": 0.0}
    wrapped = x_transformers.AutoregressiveWrapper(model)
    with_cache = wrapped.generate(prompt, 8, cache_kv=True, **greedy)
    assert torch.equal(with_cache, wrapped.generate(prompt, 8, cache_kv=False, **greedy))
    note("cache", "same tokens")
    hidden, _ = model(IDS, return_embeddings=True, return_intermediates=True)
    assert hidden.shape == (2, 12, 32)


def test_compile_and_copies(note):
    note("compile", checks.compiled(DECODER, DECODER.random_queries()))
    note("checkpointing", "has none")
    checks.deep_copied(DECODER)


def test_record_intervene_and_explore(note):
    checks.tools(DECODER, note)
    checks.explored(DECODER)
