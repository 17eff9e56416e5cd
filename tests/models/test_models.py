"""Depth reads inside Hugging Face decoders: everything a causal language model can do, it still does."""

import copy
import warnings

import pytest
import torch
from sample_mechanisms import REPRESENTATIVES
from tiny import SIZE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnres import UserError
from attnres.models import SIZES, build, build_plain, load
from attnres.models.step_cost import forward_flops
from lab.presets import PRESETS

SMALL = {
    "qwen3": SIZE,
    "llama": {
        "family": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    },
    "gpt2": {
        "family": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
PLAIN = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}
VOCAB = 61

families = pytest.mark.parametrize("family", sorted(SMALL))
mechanisms = pytest.mark.parametrize("residual", REPRESENTATIVES)
"""The others are saved, decoded with a cache and checkpointed in a model by tests/models/test_check.py."""


def make(family="qwen3", residual="block", seed=0, **settings):
    if residual == "block" and not settings:
        settings = {"block_size": 2}
    return build(SMALL[family], residual, vocab_size=VOCAB, max_positions=64, seed=seed, settings=settings)


def stir(model, scale=0.5):
    """Give the residual the parameters of a trained one."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))
    return model


@pytest.fixture
def ids():
    return torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))


def logits(model, ids, **kwargs):
    return model(input_ids=ids, use_cache=False, **kwargs).logits


@families
def test_a_standard_stream_is_the_plain_model(family, ids):
    model = make(family, "standard").eval()
    config_class, model_class = PLAIN[family]
    fields = {k: v for k, v in SMALL[family].items() if k != "family"}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    plain = model_class(config_class(**fields, **special, vocab_size=VOCAB, max_position_embeddings=64)).eval()
    plain.load_state_dict(model.state_dict(), strict=family != "gpt2")
    torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=1e-5, atol=1e-6)


@families
def test_a_plain_model_is_the_familys_own_with_the_weights_of_a_standard_stream(family):
    shape = {"vocab_size": VOCAB, "max_positions": 64, "seed": 3}
    ours, plain = build(SMALL[family], "standard", **shape), build_plain(SMALL[family], **shape)
    assert type(plain) is PLAIN[family][1]
    weights = dict(ours.named_parameters())
    assert [name for name, _ in plain.named_parameters()] == list(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.named_parameters())


@families
@pytest.mark.parametrize("residual", ["block", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_zero_queries_change_no_logit_of_a_plain_model(backend, family, residual, dtype, ids):
    standard = make(family, "standard").to(dtype).eval()
    ours = make(family, residual, read_scale="sum").to(dtype).eval()
    close = {"rtol": 1e-9, "atol": 1e-10} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 2e-6}
    torch.testing.assert_close(logits(ours, ids), logits(standard, ids), **close)


def test_shared_weights_are_the_same_whatever_the_residual():
    reference = dict(make("qwen3", "standard", seed=5).named_parameters())
    for residual in ("rescaled", "block", "full", "denseformer", "hyper_connections"):
        for name, parameter in make("qwen3", residual, seed=5).named_parameters():
            assert ".residual." in name or torch.equal(parameter, reference[name]), (residual, name)


def test_building_leaves_the_global_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    make()
    assert torch.equal(torch.rand(3), expected)


@families
def test_deepnorm_starts_with_scaled_branches(family):
    standard, deep = make(family, "standard").state_dict(), make(family, "deepnorm").state_dict()
    scale = (8 * 3) ** -0.25
    changed = {name.split(".")[-2] for name in standard if not torch.equal(standard[name], deep[name])}
    if family == "gpt2":
        assert changed == {"c_attn", "c_proj", "c_fc"}
        before, after = (s["transformer.h.0.attn.c_attn.weight"] for s in (standard, deep))
        torch.testing.assert_close(after[:, :64], before[:, :64], rtol=0, atol=0)  # queries and keys
        torch.testing.assert_close(after[:, 64:], before[:, 64:] * scale)
    else:
        assert changed == {"v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("residual", ["standard", "layernorm_scaling", "deepnorm"])
def test_what_wants_even_start_values_has_them_in_gpt2(residual):
    """Transformers draws the output weights of GPT-2 smaller with depth: M = 3 layers, by sqrt(2M)."""
    spread = {"standard": 6**-0.5, "layernorm_scaling": 1.0, "deepnorm": 24**-0.25}[residual]
    model = make("gpt2", residual)
    for layer in model.depth_layers:
        for part in (layer.attn, layer.mlp):
            assert part.c_proj.weight.std().item() == pytest.approx(0.02 * spread, rel=0.1)


@pytest.mark.quick("*-llama", "block-*", "full-*")
@families
@mechanisms
def test_saved_and_loaded_models_are_bit_equal(family, residual, ids, tmp_path):
    model = stir(make(family, residual)).eval()
    model.save_pretrained(tmp_path)
    for reloaded in (load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(reloaded) is type(model)
        assert torch.equal(logits(reloaded.eval(), ids), logits(model, ids))
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("residual", ["block", "full"])
def test_queries_are_exactly_zero_after_build_load_and_loading_a_plain_checkpoint(residual, tmp_path):
    model = make("qwen3", residual)
    assert not model.residual.query.any()
    model.save_pretrained(tmp_path / "ours")
    assert not load(tmp_path / "ours").residual.query.any()

    fields = {k: v for k, v in SMALL["qwen3"].items() if k != "family"}
    plain = Qwen3ForCausalLM(Qwen3Config(**fields, vocab_size=VOCAB))
    plain.save_pretrained(tmp_path / "plain")
    loaded, info = type(model).from_pretrained(tmp_path / "plain", config=model.config, output_loading_info=True)
    assert set(info["missing_keys"]) == {"model.residual.query", "model.residual.gain"}
    assert not loaded.residual.query.any() and (loaded.residual.gain == 1).all()
    torch.testing.assert_close(loaded.lm_head.weight, plain.lm_head.weight, rtol=0, atol=0)


def test_residual_parameters_stay_fp32_in_a_bf16_model(ids, tmp_path):
    stir(make()).save_pretrained(tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.residual.parameters())
    assert logits(model, ids).dtype == torch.bfloat16


@pytest.mark.quick("*-llama", "block-*", "full-*")
@families
@mechanisms
def test_cached_generation_is_uncached_generation(family, residual, ids):
    model = stir(make(family, residual)).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, use_cache=True, **options), model.generate(ids, use_cache=False, **options))
    full = model(input_ids=ids, use_cache=False).logits
    first = model(input_ids=ids[:, :7], use_cache=True)
    rest = model(input_ids=ids[:, 7:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), full, rtol=1e-4, atol=1e-5)


@families
@pytest.mark.parametrize("residual", ["block", "full"])
def test_left_padding_changes_nothing(family, residual, ids):
    model = stir(make(family, residual)).eval()
    pad = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.cat([pad, torch.ones_like(ids)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = logits(model, torch.cat([pad, ids], 1), attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(padded[:, 3:], logits(model, ids), rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :]
    generated = model.generate(torch.cat([pad, ids], 1), attention_mask=mask, **options)[:, ids.shape[1] + 3 :]
    assert torch.equal(generated, expected)


def checkpoint(model, **options):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


@pytest.mark.quick("*-llama", "block-*", "full-*")
@families
@mechanisms
def test_checkpointed_gradients_are_the_gradients(family, residual, ids):
    model = stir(make(family, residual)).train()

    def gradients():
        model.zero_grad()
        logits(model, ids).square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    assert all(grad is not None for grad in expected.values())
    checkpoint(model, use_reentrant=False)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    for name, grad in gradients().items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=0, msg=name)


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(UserError, match="use_reentrant=False"):
        checkpoint(make(), use_reentrant=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "residual", "compiler"),
    [
        ("qwen3", "block", "inductor"),
        ("gpt2", "full", "aot_eager"),
        ("llama", "hyper_connections", "aot_eager"),
        ("llama", "standard", "aot_eager"),
    ],
)
def test_a_whole_model_compiles_without_a_graph_break(family, residual, compiler, ids):
    """Hooks and norms of each family; that each mechanism is one graph is for tests/models/test_check.py."""
    torch._dynamo.reset()
    size = {**SMALL[family], "num_hidden_layers" if family != "gpt2" else "n_layer": 2}
    settings = {"block_size": 2} if residual == "block" else {}
    model = stir(build(size, residual, vocab_size=VOCAB, max_positions=64, settings=settings)).train()

    def gradients(forward):
        model.zero_grad()
        out = forward(input_ids=ids, use_cache=False).logits
        out.square().mean().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = gradients(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about the machine
        for a, b in zip(gradients(torch.compile(model, fullgraph=True, backend=compiler)), expected):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_copied_model_is_a_model_of_its_own(ids):
    model = stir(make()).eval()
    twin = copy.deepcopy(model)
    expected = logits(model, ids)
    with torch.no_grad():
        model.residual.query.zero_()
    assert torch.equal(logits(twin, ids), expected)
    assert not torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("residual", ["standard", "block", "full", "hyper_connections"])
def test_hidden_states_are_the_running_sums(residual, ids):
    model = stir(make("qwen3", residual), 0.0).eval()
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    assert [h.shape for h in out.hidden_states] == [(2, 11, 32)] * 4
    if residual in ("standard", "block", "full"):
        torch.testing.assert_close(out.hidden_states[0], model.model.embed_tokens(ids))
        torch.testing.assert_close(out.hidden_states[-1], model.model(input_ids=ids).last_hidden_state)


def test_bf16_autocast_trains_every_parameter(ids):
    for residual in ("standard", "block", "full"):
        model = stir(make("qwen3", residual))
        with torch.autocast("cpu", torch.bfloat16):
            out = logits(model, ids)
        out.float().square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_hugging_face_trainer_trains_it(ids, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = make("qwen3", "full")
    data = [{"input_ids": row, "labels": row} for row in ids.repeat(8, 1)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert model.residual.query.any()


VOCABULARIES = {"pico": 1024, "micro": 4096, "nano": 4096, "100m": 128_000, "0.6b": 151_936, "gpt2-124m": 50_257}
KIMI = ("kimi-48b", "kimi-nano")
VOCABULARIES |= {"7b": 32_000, "8b": 128_256, "70b": 128_256, "kimi-48b": 163_840, "kimi-nano": 4096}
VOCABULARIES |= {"k3-2.8t": 163_840, "k3-nano": 4096}


def test_named_sizes_are_what_they_are_called():
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in build(name, "standard", vocab_size=vocab).parameters())
            for name, vocab in VOCABULARIES.items()
        }
    assert counts["nano"] == pytest.approx(2.9e6, rel=0.02)
    assert counts["100m"] == pytest.approx(100e6, rel=0.15)
    assert counts["0.6b"] == pytest.approx(596e6, rel=0.01)
    assert counts["gpt2-124m"] == pytest.approx(124e6 + 1024 * 768, rel=0.01)
    # As published: arXiv 2307.09288's 7B, and the model cards of Llama 3.
    assert [counts[name] for name in ("7b", "8b", "70b")] == [6_738_415_616, 8_030_261_248, 70_553_706_496]
    # Kimi Linear 48B-A3B: 48 billion without the embedding and the head, 3 of them active.
    assert counts["kimi-48b"] - 2 * 163_840 * 2304 == pytest.approx(48e9, rel=0.01)
    assert counts["k3-2.8t"] == pytest.approx(2.8e12, rel=0.01)
    assert set(counts) == set(SIZES)
    for name in ("pico", "micro"):
        assert SIZES[name] == PRESETS[name].train["model"]["size"], "a study's preset has the model of its name"


def test_kimi_sizes_have_the_active_parameters_of_their_names():
    with torch.device("meta"):
        models = {name: build(name, vocab_size=VOCABULARIES[name], settings={"block_size": 6}) for name in KIMI}
    active = {name: forward_flops(model, 1) / 2 for name, model in models.items()}
    assert 2.9e9 < active["kimi-48b"] < 3.5e9 and 3e6 < active["kimi-nano"] < 5e6
    with torch.device("meta"):
        k3 = build("k3-2.8t", vocab_size=VOCABULARIES["k3-2.8t"], settings={"block_size": 24})
    assert forward_flops(k3, 1) / 2 == pytest.approx(104e9, rel=0.005)  # as published: 2.8 T, 104 B active
    assert len(k3.config.layer_types) == 93 and k3.config.layer_types.count("full_attention") == 24
    for model in models.values():
        kinds = model.config.layer_types
        assert len(kinds) == 27 and kinds[:4] == ["linear_attention"] * 3 + ["full_attention"]
        assert kinds.count("full_attention") == 7 and kinds[-1] == "full_attention"
        assert model.residual.num_sublayers == 54 and list(model.residual.block_sizes) == [6] * 9


def test_configs_know_their_residual_and_refuse_strays(tmp_path):
    model = make("gpt2", "block", num_blocks=3)
    model.config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.residual, config.residual_settings) == (
        "attnres_gpt2",
        "block",
        {"num_blocks": 3},
    )
    with pytest.raises(UserError, match="put it into residual_settings"):
        type(config)(residual="block", num_blocks=3)
    with pytest.raises(UserError, match="did you mean 'num_blocks'"):
        type(config)(residual="block", residual_settings={"num_blockz": 3})


@pytest.mark.parametrize(
    ("size", "residual", "says"),
    [
        ("nanno", "block", "did you mean 'nano'"),
        ("nano", "blok", "did you mean 'block'"),
        ({"family": "qwen", "hidden_size": 8}, "block", "did you mean 'qwen3'"),
        ({"family": "qwen3", "hiden_size": 8}, "block", "did you mean 'hidden_size'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(size, residual, says):
    with pytest.raises(UserError, match=says):
        build(size, residual, vocab_size=VOCAB)


def test_a_folder_that_is_no_model_of_ours_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    fields = {k: v for k, v in SMALL["qwen3"].items() if k != "family"}
    Qwen3ForCausalLM(Qwen3Config(**fields, vocab_size=VOCAB)).save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="plain 'qwen3' model"):
        load(tmp_path / "plain")


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        ("llama", {"hidden_size": 34}, "hidden_size is 34 and num_attention_heads 4"),
        ("gpt2", {"n_embd": 34}, "hidden_size is 34 and num_attention_heads 4"),
        ("qwen3", {"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
        ("qwen3", {"hidden_size": "wide"}, "hidden_size is 'wide': expected a whole number"),
        ("qwen3", {"intermediate_size": -4}, "cannot be built"),
    ],
)
def test_sizes_that_cannot_be_built_are_refused_with_a_sentence(family, changed, says):
    with pytest.raises(UserError, match=says):
        build({**SMALL[family], **changed}, "block", vocab_size=VOCAB)


def test_a_model_with_tensors_missing_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    make().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 'model.layers.1.mlp.up_proj.weight'"):
        load(tmp_path)


def test_nothing_is_unpickled(tmp_path):
    model = make()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="a pickle, which can run code and is not opened"):
        load(tmp_path)


def test_damaged_weights_are_refused_with_a_sentence(tmp_path):
    make().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load(tmp_path)
