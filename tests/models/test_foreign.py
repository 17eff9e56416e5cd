"""Checkpoints of other projects against those projects' formulas; and back again."""

import json
import logging

import pytest
import torch
import transformers
from foreign_formats import (
    FLA,
    IDS,
    KIMI,
    NANO,
    OPEN,
    VOCAB,
    fla,
    fla_logits,
    kimi,
    kimi_logits,
    nanogpt,
    nanogpt_logits,
    open_attnres,
    open_attnres_logits,
    same_tensors,
)
from safetensors.torch import load_file, save_file

from attnres import UserError, convert
from attnres.inspect import record
from attnres.models import build, export_model, load
from attnres.models.foreign import WRITTEN

CASES = {f"open-attnres-{k}": ("open-attnres", open_attnres, v, open_attnres_logits) for k, v in OPEN.items()}
CASES |= {f"fla-{k}": ("fla", fla, v, fla_logits) for k, v in FLA.items()}
CASES |= {f"kimi-{k}": ("kimi", kimi, {**v, "wrapped": w}, kimi_logits) for k, (v, w) in KIMI.items()}
CASES |= {f"nanogpt-{k}": ("nanogpt", nanogpt, v, nanogpt_logits) for k, v in NANO.items()}
CASES["kimi-flagos"] = ("kimi", kimi, {"qwen": True}, kimi_logits)
cases = pytest.mark.parametrize(("kind", "make", "fields", "formula"), CASES.values(), ids=CASES)
kinds = pytest.mark.parametrize("make", [open_attnres, fla, kimi, nanogpt])
written = {open_attnres: "open-attnres", fla: "fla", kimi: "kimi"}


def fp64(model):
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


@cases
def test_logits_are_those_of_the_formula_and_what_is_written_comes_back_bit_for_bit(
    kind, make, fields, formula, tmp_path
):
    folder = make(tmp_path / "theirs", **fields)
    model = load(folder)
    if kind in WRITTEN and not fields.get("qwen"):
        export_model(model, tmp_path / "back", kind)
        same_tensors(folder, tmp_path / "back")
        written = json.loads((tmp_path / "back" / "config.json").read_text())
        stored = json.loads((folder / "config.json").read_text())
        assert stored.pop("text_config", {}).items() <= written.get("text_config", {}).items()
        assert {name: written[name] for name in stored} == stored
    with torch.no_grad():
        expected, actual = formula(folder), fp64(model)(input_ids=IDS, use_cache=False).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@kinds
def test_our_tools_take_them(make, tmp_path):
    model = load(make(tmp_path / "theirs"))
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        with record(model) as trace:  # what is watched takes no bank, whose sums round otherwise
            watched = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(watched, expected, rtol=0, atol=2e-5 * expected.abs().amax().item())
    assert len(trace.routing["weights"]) == model.residual.num_sublayers + 1
    for row, names in zip(trace.routing["weights"], trace.routing["sources"]):
        assert len(row) == len(names) and sum(row) == pytest.approx(1)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    cached = model.generate(IDS, use_cache=True, **options)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **options))
    model.save_pretrained(tmp_path / "ours")
    reloaded = load(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=IDS, use_cache=False).logits, expected)
    if make in written:
        export_model(reloaded, tmp_path / "back", written[make])
        same_tensors(tmp_path / "theirs", tmp_path / "back")
    model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert model.residual.query.grad.abs().sum(1).gt(0).sum() >= len(model.residual.query) - 1


@kinds
def test_16_bit_weights_stay_as_they_are(make, tmp_path):
    folder = make(tmp_path / "theirs", dtype=torch.bfloat16)
    model = load(folder)
    assert model.dtype is torch.bfloat16 and model.residual.query.dtype is torch.float32
    if make not in written:
        return
    export_model(model, tmp_path / "back", written[make])
    a, b = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert sorted(a) == sorted(b) and all(torch.equal(a[n], b[n].to(a[n].dtype)) for n in a)
    assert all(a[n].dtype == b[n].dtype for n in a if "res" in n or "depth" in n)


def test_trained_reads_are_not_rounded_to_16_bits(tmp_path):
    model = load(fla(tmp_path / "theirs", dtype=torch.bfloat16))
    with torch.no_grad():
        model.residual.query.add_(1e-4)
    export_model(model, tmp_path / "back", "fla")
    assert torch.equal(load(tmp_path / "back").residual.query, model.residual.query)


def test_compiled_and_sharded_checkpoints_load(tmp_path, monkeypatch):
    folder = fla(tmp_path / "theirs")
    state = load_file(folder / "model.safetensors")
    save_file({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, folder / "model.safetensors")
    model = load(folder)
    monkeypatch.setattr("attnres.models.export.SHARD", "20KB")
    out = tmp_path / "out"
    export_model(model, out, "fla")
    assert (out / "model.safetensors.index.json").is_file() and not (out / "model.safetensors").exists()
    assert torch.equal(load(out)(input_ids=IDS).logits, model(input_ids=IDS).logits)


# -- mistakes --------------------------------------------------------------------------------------------------------
def spoilt(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


def move(old, new):
    return lambda state: state.update({new: state.pop(old)})


FLA_PROJ, KIMI_PROJ = "model.layers.1.attn_res_proj.weight", "model.layers.1.self_attention_res_proj.weight"


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (fla, lambda s: s.pop(FLA_PROJ), f"lacks '{FLA_PROJ}' of depth reads"),
        (fla, move(FLA_PROJ, KIMI_PROJ), f"named '{KIMI_PROJ}' where 'fla' names '{FLA_PROJ}'"),
        (fla, lambda s: s.update({KIMI_PROJ: torch.zeros(1, 32)}), "for which its config"),
        (fla, lambda s: s.update({FLA_PROJ: torch.zeros(1, 31)}), r"shape \(1, 31\): expected \(1, 32\)"),
        (fla, lambda s: s.pop("model.layers.1.attn_norm.weight"), "lacks 'model.layers.1.attn_norm.weight'"),
        (fla, lambda s: s.update({"model.more": torch.zeros(2)}), "has, besides .* 'model.more'"),
        (fla, lambda s: s.update({"model.norm.weight": torch.zeros(3)}), "do not fit its config"),
        (open_attnres, lambda s: s.pop("model.layers.0.mlp_res_bias"), "lacks 'model.layers.0.mlp_res_bias'"),
        (open_attnres, lambda s: s.update({"model.layers.0.mlp_res_alpha": torch.zeros(())}), "no place"),
        (open_attnres, lambda s: s.update({"lm_head.weight": torch.zeros(VOCAB, 32)}), "holds two that differ"),
        (nanogpt, lambda s: s.pop("depth_attn.1.w"), "lacks 'depth_attn.1.w'"),
        (nanogpt, lambda s: s.pop("transformer.h.0.ln_1.weight"), "lacks 'transformer.h.0.ln_1.weight'"),
        (nanogpt, lambda s: s.update({"_orig_mod.lm_head.weight": torch.zeros(2)}), "only a decoder of text"),
        (kimi, lambda s: s.pop("model.output_attn_res_norm.weight"), "lacks 'model.output_attn_res_norm.weight'"),
    ],
)
def test_wrong_and_mixed_keys_are_one_sentence(make, change, message, tmp_path):
    folder = spoilt(make(tmp_path / "theirs"), change)
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (fla, {"hidden_act": "powlu"}, "hidden_act='powlu'"),
        (fla, {"model_type": "kda"}, "model_type='kda'"),
        (fla, {"attnres_block_size": 3}, "even number"),
        (fla, {"qk_norm": True}, "one eps"),
        (fla, {"qk_norm": True, "qkv_bias": True}, "together"),
        (fla, {"num_heads": None}, "no 'num_heads'"),
        (fla, {"attn_res_block_size": 2}, "fields of 'fla' and 'kimi': remove those"),
        (open_attnres, {"attnres_mode": "delta"}, "attnres_mode='delta'"),
        (open_attnres, {"attnres_gate_type": "tanh"}, "attnres_gate_type='tanh'"),
        (kimi, {"model_type": "qwen3_ar", "mla_use_output_gate": True}, "mla_use_output_gate=True"),
        (kimi, {"model_type": "qwen3_ar", "routed_expert_hidden_size": 16}, "routed_expert_hidden_size=16"),
        (kimi, {"attn_res_block_size": 0}, "at least 1"),
        (kimi, {"num_hidden_layers": "4"}, r"no valid one of format 'kimi' \("),
        (kimi, {"model_type": "kimi_k9"}, "'kimi_k9' with Kimi's names"),
        (nanogpt, {"use_moe": True}, "use_moe=True"),
        (nanogpt, {"residual_mode": "gated_blocks"}, "residual_mode='gated_blocks'"),
        (nanogpt, {"use_value_residual": True}, "use_value_residual=True"),
        (kimi, {"attn_res_output_route": False}, "attn_res_output_route=False"),
        (nanogpt, {"attnres_n_blocks": 3}, "divides the 4 layers"),
    ],
)
def test_what_no_class_computes_is_refused(make, fields, message, tmp_path):
    folder = make(tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_inkling2_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "inkling2"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for take in (load, convert):
        with pytest.raises(UserError, match=r"is an Inkling 2, which has depth reads of its own"):
            take(tmp_path)


def test_what_is_loaded_says_nothing_that_misleads(tmp_path, caplog, monkeypatch):
    """Biases that are zero are no missing weights, and no report comes before a refusal."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.logging.set_verbosity_warning()
    load(nanogpt(tmp_path / "no bias", bias=False))
    with pytest.raises(UserError):
        load(spoilt(nanogpt(tmp_path / "more"), lambda s: s.update({"transformer.more": torch.zeros(2)})))
    assert not caplog.records
    monkeypatch.setenv("ATTNRES_DEBUG", "1")
    load(tmp_path / "no bias")
    assert "MISSING" in caplog.text
    transformers.logging.set_verbosity_error()


def test_a_pickle_is_refused(tmp_path):
    folder = fla(tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="a pickle"):
        load(folder)


def test_a_model_that_a_format_cannot_hold_is_refused(tmp_path):
    size = {"family": "qwen3", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}

    def attempt(kind, residual, **settings):
        model = build({**size, "rms_norm_eps": 1e-5}, residual, vocab_size=VOCAB, settings=settings)
        with pytest.raises(UserError) as error:
            export_model(model, tmp_path / "out", kind)
        assert not (tmp_path / "out").exists()
        return str(error.value)

    assert "'cumulative'" in attempt("open-attnres", "block")
    assert "no number of blocks" in attempt("open-attnres", "cumulative", block_size=3, key_norm_eps=1e-5)
    assert "null_source" in attempt("open-attnres", "cumulative", block_size=2, null_source=True, key_norm_eps=1e-5)
    assert "'block' or 'full'" in attempt("fla", "cumulative")
    assert "read_scale" in attempt("fla", "block", block_size=2, read_scale="sum")
    assert "gates" in attempt("fla", "block", block_size=2, recency_bias=1.0)
    assert "block_sum" in attempt("fla", "block", block_size=2, block_sum="rms")
    assert "summaries=split" in attempt("fla", "block", block_size=4, summaries="split", key_norm_eps=1e-5)
    assert "count_power" in attempt("fla", "block", block_size=4, count_power=1.0, key_norm_eps=1e-5)
    assert "key_norm_eps" in attempt("fla", "block", block_size=2, key_norm_eps=1e-3)
    assert "even number" in attempt("fla", "block", block_size=3, key_norm_eps=1e-5)
    assert "did you mean 'fla'" in attempt("flaa", "full")
    assert "unknown format to write 'nanogpt'" in attempt("nanogpt", "full")
    assert "its family is qwen3" in attempt("kimi", "block", block_size=2, key_norm_eps=1e-5)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    folder = fla(tmp_path / "theirs")
    with pytest.raises(UserError, match="not empty"):
        export_model(load(folder), folder, "fla")
