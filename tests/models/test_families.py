"""Every family: conversion changes no logit, the cache changes no token, gradients reach every query."""

import copy
import functools

import pytest
import torch
import transformers
from one_graph import check_one_graph
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from attnres import UserError
from attnres.head import is_apart
from attnres.models import FAMILIES, build, kimi, load
from attnres.models.bases import checkpoint_activations
from attnres.models.convert import convert
from attnres.models.exactness import compare_logits
from attnres.models.families import BOTH, PROBED, REFUSED, SUM, families_table
from attnres.models.probe import probe
from attnres.models.step_cost import forward_flops, step_flops
from attnres.ops import cpu

VOCAB = 61
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
NARROW = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    **SPECIAL,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, **SPECIAL}
HEADS = {"head_dim": 8}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SMALL = {
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 8,
        **MLA,
        **MOE,
    },
    "gemma": HEADS,
    "gemma2": {**HEADS, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 7.0},
    "gemma3_text": HEADS,
    "glm": HEADS,
    "glm4": HEADS,
    "gpt_neox": {"use_parallel_residual": False},
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": {**HEADS, "num_experts": 4, "moe_topk": 2},
    # Five layers: KDA four times, MLA once, a dense MLP first.
    "kimi_linear": {
        "num_hidden_layers": 5,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "num_local_experts": 4,
        **MLA,
        **MOE,
    },
    # The same with K3's layers.
    "kimi_k3": {
        "num_hidden_layers": 5,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "num_local_experts": 4,
        "routed_expert_hidden_size": 16,
        "q_lora_rank": 8,
        **MLA,
        **MOE,
    },
    "ministral": HEADS,
    "ministral3": HEADS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16, **MOE},
    "qwen3": HEADS,
    "qwen3_moe": {"num_experts": 4, **MOE},
    "qwen3_next": {
        **HEADS,
        "num_hidden_layers": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        **MOE,
    },
}
IDS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))

families = pytest.mark.parametrize("family", sorted(FAMILIES))


def random_model(name, **fields):
    cls = getattr(kimi if name.startswith("KimiK3") else transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields)).eval()
    model.set_experts_implementation("eager")  # grouped products have no fp64
    return model


def fields_of(family):
    fields = GPT2 if family == "gpt2" else {**NARROW, **SMALL.get(family, {})}
    return {name: value for name, value in fields.items() if (family, name) != ("gpt_neox", "num_key_value_heads")}


@functools.cache
def plain(family):
    return random_model(FAMILIES[family].causal_lm, **fields_of(family))


@functools.cache
def stirred(family):
    """Converted, with the queries of a trained model."""
    model = convert(plain(family), block_size=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def check_exact(model, new):
    """Rounding and nothing else, in fp64 arithmetic throughout."""
    assert compare_logits(model, new, torch.float64).relative < 1e-13
    assert not new.residual.query.any()


@pytest.mark.quick("*-llama", "*-gpt2", "*-deepseek_v3", "*-olmo2")
@families
@pytest.mark.parametrize("residual", ["block", "full"])
def test_conversion_changes_no_logit(family, residual):
    new = convert(plain(family), residual, **({"block_size": 3} if residual == "block" else {}))
    check_exact(plain(family), new)
    assert new.conversion.relative_difference < 2e-6 and not new.conversion.probed


@pytest.mark.long
def test_kimi_linear_converts_in_its_27_layer_pattern():
    model = random_model("KimiLinearForCausalLM", **{**NARROW, **SMALL["kimi_linear"], "num_hidden_layers": 27})
    assert model.config.layer_types[:5] == ["linear_attention"] * 4 + ["full_attention"]
    assert model.config.layer_types.count("full_attention") == 6
    new = convert(model, block_size=6)
    check_exact(model, new)
    assert new.residual.num_sublayers == 54


def with_tiny_eps(model):
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-20)
    return model


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_means_are_exact_where_a_norm_removes_the_scale(family):
    twin = with_tiny_eps(random_model(FAMILIES[family].causal_lm, **fields_of(family)))
    twin.load_state_dict(plain(family).state_dict())
    if family == "olmo":  # its eps is written into its forward
        with torch.no_grad():
            twin.get_input_embeddings().weight.mul_(1e3)
        assert convert(twin, block_size=3, read_scale="mean").conversion.relative_difference < 1e-5
    elif FAMILIES[family].normed:
        check_exact(twin, convert(twin, block_size=3, read_scale="mean"))
    else:
        with pytest.raises(UserError, match=r"with no norm before them.*leave read_scale at 'sum'"):
            convert(twin, block_size=3, read_scale="mean")


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_cached_generation_is_uncached_generation_and_logits_need_no_gradients(family):
    model = stirred(family)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(IDS, use_cache=True, **options)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **options))
    general = model(input_ids=IDS, use_cache=False).logits.detach()  # with gradients, so without a bank
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, general, rtol=1e-4, atol=1e-5)
    assert cpu.load() is None or model.residual.banks._waiting


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_converted_generation_is_the_plain_models(family):
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    new = convert(plain(family), "full")
    assert torch.equal(new.generate(IDS, **options), plain(family).generate(IDS, **options))


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_gradients_reach_every_query_but_the_first(family):
    model = convert(plain(family), block_size=3)
    model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
    gradient = model.residual.query.grad
    assert gradient[1:].abs().amax(1).min() > 0
    assert not gradient[0].any()  # one source: the embedding
    plain(family).zero_grad()


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_hidden_states_are_the_plain_models(family):
    options = {"input_ids": IDS, "use_cache": False, "output_hidden_states": True}
    with torch.no_grad():
        expected = plain(family)(**options).hidden_states
        states = convert(plain(family), block_size=3)(**options).hidden_states
    assert len(states) == len(expected)
    for a, b in zip(states, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["olmo2", "gemma2", "gpt_neox", "granite"])
def test_checkpointed_gradients_are_the_gradients(family):
    model = copy.deepcopy(stirred(family)).train()

    def gradients():
        model.zero_grad()
        model(input_ids=IDS, use_cache=False).logits.square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    for how in ("sublayer", "layer"):  # one on top of the other, at last
        checkpoint_activations(model, how)
        for name, grad in gradients().items():
            torch.testing.assert_close(grad, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.long  # the families of tests/models/test_models.py compile in make test
@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_a_whole_model_compiles_without_a_graph_break(family):
    check_one_graph(copy.deepcopy(stirred(family)), lambda model: model(input_ids=IDS, use_cache=False).logits)


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_operations_are_those_that_torch_counts(family):
    """Of a forward and a backward pass; a recurrence of linear attention, which does not count, is more."""
    model = copy.deepcopy(plain(family)).train()
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    ours, counted = step_flops(model, IDS.shape[1]), counter.get_total_flops() / IDS.numel()
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        assert 0.1 * counted < ours < counted
    else:
        assert ours == pytest.approx(counted, rel=0.02)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=IDS, use_cache=False)
        assert forward_flops(model, IDS.shape[1]) == pytest.approx(counter.get_total_flops() / IDS.numel(), rel=0.02)


@pytest.mark.quick("llama", "gpt2", "deepseek_v3", "olmo2")
@families
def test_saved_and_loaded_models_are_bit_equal(family, tmp_path):
    model = stirred(family)
    assert is_apart(model), "its head is one of which losses are made in parts"
    model.save_pretrained(tmp_path)
    expected = model(input_ids=IDS, use_cache=False).logits
    for reloaded in (load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        reloaded.set_experts_implementation("eager")
        assert type(reloaded) is type(model)
        assert torch.equal(reloaded(input_ids=IDS, use_cache=False).logits, expected)


@families
def test_a_family_can_be_built_from_scratch(family):
    fields = {k: v for k, v in fields_of(family).items() if k not in ("vocab_size", *SPECIAL)}
    fields.pop(FAMILIES[family].positions)
    model = build({"family": family, **fields}, "block", vocab_size=VOCAB, max_positions=64)
    assert model(input_ids=IDS).logits.shape == (2, 11, VOCAB)
    for path in FAMILIES[family].branch_weights:
        assert model.depth_layers[0].get_parameter(f"{path.partition('[')[0]}.weight").numel()


def test_deepnorm_is_refused_where_its_start_values_are_not_worked_out():
    fields = {**NARROW, **SMALL["mixtral"]}
    for name in ("vocab_size", "max_position_embeddings"):
        fields.pop(name)
    with pytest.raises(UserError, match="not implemented for MixtralForCausalLM"):
        build({"family": "mixtral", **fields}, "deepnorm", vocab_size=VOCAB)


# ------------------------------------------------------------------ architectures that nobody listed

TINY_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB, **SPECIAL}
MPT = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB}
NEO = {**TINY, "attention_types": [[["global", "local"], 1]]}
GPT_NEO = {k: v for k, v in NEO.items() if k not in ("num_hidden_layers", "num_attention_heads")}
GPT_NEO |= {"num_layers": 2, "num_heads": 4}
OPT = {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 4}


@pytest.mark.parametrize(
    ("name", "fields", "reads", "normed"),
    [
        ("ApertusForCausalLM", NARROW, ("attention_layernorm", "feedforward_layernorm"), True),
        ("BloomForCausalLM", TINY, ("input_layernorm", "post_attention_layernorm"), True),
        ("Exaone4ForCausalLM", NARROW, ("self_attn", "mlp"), False),
        ("FalconForCausalLM", {**TINY, "parallel_attn": False}, ("input_layernorm", "post_attention_layernorm"), True),
        ("GPTNeoForCausalLM", GPT_NEO, ("ln_1", "ln_2"), True),
        ("Lfm2ForCausalLM", NARROW, ("operator_norm", "ffn_norm"), True),
        ("MptForCausalLM", MPT, ("norm_1", "norm_2"), True),
        ("NemotronForCausalLM", NARROW, ("input_layernorm", "post_attention_layernorm"), True),
    ],
)
def test_unlisted_architectures_are_probed(name, fields, reads, normed, tmp_path):
    model = random_model(name, **fields)
    new = convert(model, block_size=3)
    assert (new.family.reads, new.family.normed, new.conversion.probed) == (reads, normed, True)
    check_exact(model, new)
    assert "(probed)" in str(new.conversion)
    assert type(convert(model, "full")) is type(new)  # the classes are made once
    new.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(input_ids=IDS).logits, new(input_ids=IDS).logits)


def test_a_probed_family_is_made_again_from_its_config(tmp_path, monkeypatch):
    from attnres.models import classes

    new = convert(random_model("HeliumForCausalLM", **NARROW, **HEADS), block_size=3)
    new.save_pretrained(tmp_path)
    monkeypatch.delitem(classes.CLASSES, "helium_heliumforcausallm")  # as in a new process
    assert torch.equal(load(tmp_path)(input_ids=IDS).logits, new(input_ids=IDS).logits)


@families
def test_probing_finds_what_the_table_says(family):
    probed, listed = probe(plain(family)), FAMILIES[family]
    for name in ("config", "causal_lm", "layers", "reads", "final_norm", "normed"):
        assert getattr(probed, name) == getattr(listed, name), name


PARALLEL = "attention and MLP read one stream side by side"


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("CohereForCausalLM", NARROW, PARALLEL),
        ("Cohere2ForCausalLM", NARROW, PARALLEL),
        ("PhiForCausalLM", NARROW, PARALLEL),
        ("GPTJForCausalLM", {**TINY_GPT, "rotary_dim": 4}, PARALLEL),
        ("CodeGenForCausalLM", {**TINY_GPT, "rotary_dim": 4}, PARALLEL),
        ("FalconForCausalLM", TINY, PARALLEL),
        ("GPTNeoXForCausalLM", NARROW, PARALLEL),
        ("StableLmForCausalLM", {**NARROW, "use_parallel_residual": True}, PARALLEL),
        ("OpenAIGPTLMHeadModel", TINY_GPT, "a norm or a gate follows the addition"),
        ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}, "follows the addition"),
        ("OPTForCausalLM", OPT, "uses 'reshape' of its hidden state"),
        ("MambaForCausalLM", STATES, "uses 'to' of its hidden state"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(name, fields, says):
    model = random_model(name, **fields)
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    with pytest.raises(UserError, match=f"{name} cannot have depth reads: .*{says}"):
        convert(model)
    assert hooks == sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    model(input_ids=IDS)  # and it is what it was


@pytest.mark.parametrize("family", ["gpt_neox", "stablelm"])
def test_parallel_residuals_cannot_be_built(family):
    fields = {k: v for k, v in fields_of(family).items() if k not in ("vocab_size", "max_position_embeddings")}
    with pytest.raises(UserError, match=f"use_parallel_residual is on: {PARALLEL}"):
        build({"family": family, **fields, "use_parallel_residual": True}, vocab_size=VOCAB)


def test_the_table_names_every_family_and_says_how_exact_it_is():
    rows = families_table()
    assert {row.model_types[0] for row in rows if row.kind in (BOTH, SUM)} == set(FAMILIES)
    assert {row.kind for row in rows} == {BOTH, SUM, PROBED, REFUSED}
    assert all(row.note for row in rows if row.kind in (SUM, PROBED, REFUSED))
    assert {row.checked for row in rows} == {"5.23.0"}
    assert next(row for row in rows if row.model_types == ("olmo2",)).kind == SUM
