"""Folders of Kimi K3's release, made here: loaded against its decoder written out, written back, and refused."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnres import cli
from attnres.models import export_model, load
from attnres.models.classes import CLASSES
from attnres.models.foreign import FORMATS
from attnres.models.foreign.mxfp4 import unpacked
from attnres.models.foreign.weights import foreign_config, foreign_state

D, VOCAB, LAYERS, EXPERTS, HEADS = 64, 61, 5, 4, 3
IDS = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
FP32 = ("A_log", "dt_bias", "e_score_correction_bias")
"""Ends of names of what is fp32 in the release, and here."""
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
TEXT = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4, 5],
        "num_heads": HEADS,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def tensors(quantised, experts=EXPERTS, inner=32):
    """Random weights by the release's names, in its shapes; `inner` is the width of a latent and of an expert."""
    generator = torch.Generator().manual_seed(1)
    state = {}

    def draw(name, *shape, mean=0.0, scale=0.3):
        state[name] = mean + scale * torch.randn(shape, generator=generator)

    draw("model.embed_tokens.weight", VOCAB, D, scale=1.0)
    draw("lm_head.weight", VOCAB, D)
    draw("model.norm.weight", D, mean=1.0)
    starts = [f"model.layers.{i}.{part}_res_" for i in range(LAYERS) for part in ("self_attention", "mlp")]
    for start in [*starts, "model.output_attn_res_"]:
        draw(f"{start}proj.weight", 1, D)
        draw(f"{start}norm.weight", D, mean=1.0)
    wide = HEADS * 16
    kda = {f"{part}_proj": (wide, D) for part in "qkvg"} | {f"{part}_conv1d": (wide, 1, 4) for part in "qkv"}
    kda |= {"f_a_proj": (16, D), "f_b_proj": (wide, 16), "b_proj": (HEADS, D), "o_proj": (D, wide)}
    mla = {"q_a_proj": (24, D), "q_b_proj": (24, 24), "kv_a_proj_with_mqa": (20, D), "kv_b_proj": (32, 16)}
    mla |= {"g_proj": (16, D), "o_proj": (D, 16)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            draw(f"{layer}{part}.weight", D, mean=1.0)
        for name, shape in (kda if i < 3 else mla).items():
            draw(f"{layer}self_attn.{name}.weight", *shape)
        if i < 3:
            draw(f"{layer}self_attn.dt_bias", wide)
            draw(f"{layer}self_attn.o_norm.weight", 16, mean=1.0)
            draw(f"{layer}self_attn.A_log", HEADS)
            state[f"{layer}self_attn.A_log"] = F.pad(state[f"{layer}self_attn.A_log"], (0, 128 - HEADS))
        else:
            draw(f"{layer}self_attn.q_a_layernorm.weight", 24, mean=1.0)
            draw(f"{layer}self_attn.kv_a_layernorm.weight", 16, mean=1.0)
        moe = f"{layer}block_sparse_moe."
        shared, width = (f"{moe}shared_experts.", 2 * inner) if i else (f"{layer}mlp.", 48)
        for name, shape in {"gate": (width, D), "up": (width, D), "down": (D, width)}.items():
            draw(f"{shared}{name}_proj.weight", *shape)
        if not i:
            continue
        draw(f"{moe}gate.weight", experts, D)
        draw(f"{moe}gate.e_score_correction_bias", experts)
        draw(f"{moe}routed_expert_down_proj.weight", inner, D)
        draw(f"{moe}routed_expert_up_proj.weight", D, inner)
        draw(f"{moe}routed_expert_norm.weight", inner, mean=1.0)
        for expert in (f"{moe}experts.{e}.{part}.weight" for e in range(experts) for part in ("w1", "w2", "w3")):
            if quantised:
                for part, low, high, per in (("packed", 0, 256, 2), ("scale", 122, 127, 32)):
                    values = torch.randint(low, high, (inner, inner // per), generator=generator, dtype=torch.uint8)
                    state[f"{expert}_{part}"] = values
            else:
                draw(expert, inner, inner)
    return state


def folder_of(path, state=None, quantised=False, dtype=None, config=None, shards=3, **fields):
    """Write a folder as the release has it. `dtype` is of the weights that are not fp32 there."""
    state = tensors(quantised) if state is None else state
    text = {**TEXT, "attn_res_block_size": 2, **({"quantization_config": MXFP4} if quantised else {}), **fields}
    nested = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}
    state = {name if name.startswith(("vision", "mm_")) else f"language_model.{name}": t for name, t in state.items()}
    state = {
        name: t if t.dtype == torch.uint8 or name.endswith(FP32) else t.to(dtype or t.dtype)
        for name, t in state.items()
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**nested, **(config or {})}))
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(state)}
    for file in sorted({*files.values()}):
        save_file({name: state[name] for name in state if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def stored(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def dequantised(packed, scale):
    """OCP Microscaling Formats 1.0, a byte after the other: sign, two bits of exponent (bias 1), one of mantissa."""
    rows = []
    for row, powers in zip(packed.tolist(), scale.tolist(), strict=True):
        codes = [half for byte in row for half in (byte & 15, byte >> 4)]
        values = []
        for i, code in enumerate(codes):
            exponent, mantissa = (code >> 1) & 3, code & 1
            size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
            values.append((-1) ** (code >> 3) * size * 2.0 ** (powers[i // 32] - 127))
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float64)


def logits_of_the_release(folder):
    """Its decoder on its names, a token of KDA after the other, in fp64."""
    state = {name.removeprefix("language_model."): tensor for name, tensor in stored(folder).items()}
    text = json.loads((folder / "config.json").read_text())["text_config"]
    w = {name: tensor.double() for name, tensor in state.items() if tensor.dtype != torch.uint8}
    for name in [name for name in state if name.endswith("_packed")]:
        matrix = name.removesuffix("_packed")
        w[matrix] = dequantised(state[name], state[f"{matrix}_scale"])
    bound, up_bound = text["activation_situ_beta"], text["activation_situ_linear_beta"]

    def rms(x, eps=1e-5):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def linear(x, name):
        return x @ w[f"{name}.weight"].mT

    def situ(gate, up):
        return bound * torch.tanh(gate / bound) * torch.sigmoid(gate) * up_bound * torch.tanh(up / up_bound)

    def mlp(x, p):
        return linear(situ(linear(x, f"{p}gate_proj"), linear(x, f"{p}up_proj")), f"{p}down_proj")

    def read(sources, p):
        values = torch.stack(sources, -2)
        logits = (rms(values) * (w[f"{p}norm.weight"] * w[f"{p}proj.weight"][0])).sum(-1)
        return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)

    def conv(x, p, part):
        kernel = w[f"{p}{part}_conv1d.weight"]
        y = F.conv1d(F.pad(linear(x, f"{p}{part}_proj").mT, (3, 0)), kernel, groups=len(kernel))
        return F.silu(y).mT.unflatten(-1, (HEADS, 16))

    def kda(x, p):
        q, k, v = (conv(x, p, part) for part in "qkv")
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        z = (linear(linear(x, f"{p}f_a_proj"), f"{p}f_b_proj") + w[f"{p}dt_bias"]).unflatten(-1, (HEADS, 16))
        decay = (-5 * torch.sigmoid(w[f"{p}A_log"][:HEADS].exp().unsqueeze(-1) * z)).exp()
        beta = torch.sigmoid(linear(x, f"{p}b_proj"))
        memory, outputs = torch.zeros(len(x), HEADS, 16, 16, dtype=torch.float64), []
        for t in range(x.shape[1]):
            memory = memory * decay[:, t].unsqueeze(-1)
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], memory)
            memory = memory + torch.einsum("bhk,bhv,bh->bhkv", k[:, t], error, beta[:, t])
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory) / 4)
        y = rms(torch.stack(outputs, 1)) * w[f"{p}o_norm.weight"]
        return linear((y * torch.sigmoid(linear(x, f"{p}g_proj").unflatten(-1, (HEADS, 16)))).flatten(-2), f"{p}o_proj")

    def mla(x, p):
        q = rms(linear(x, f"{p}q_a_proj"), 1e-6) * w[f"{p}q_a_layernorm.weight"]
        q = linear(q, f"{p}q_b_proj").unflatten(-1, (2, 12))
        latent, shared = linear(x, f"{p}kv_a_proj_with_mqa").split([16, 4], -1)
        k, v = (
            linear(rms(latent, 1e-6) * w[f"{p}kv_a_layernorm.weight"], f"{p}kv_b_proj")
            .unflatten(-1, (2, 16))
            .chunk(2, -1)
        )
        k = torch.cat([k, shared.unsqueeze(-2).expand(*k.shape[:-1], -1)], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 12**0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -torch.inf)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2)
        return linear(y * torch.sigmoid(linear(x, f"{p}g_proj")), f"{p}o_proj")

    def moe(x, p):
        scores = torch.sigmoid(linear(x, f"{p}gate"))
        chosen = (scores + w[f"{p}gate.e_score_correction_bias"]).topk(2, -1).indices
        picked = scores.gather(-1, chosen)
        shares = torch.zeros_like(scores).scatter(-1, chosen, 1.5 * picked / picked.sum(-1, keepdim=True))
        z, total = linear(x, f"{p}routed_expert_down_proj"), 0
        for e in range(EXPERTS):
            start = f"{p}experts.{e}."
            total = total + shares[..., e : e + 1] * linear(
                situ(linear(z, f"{start}w1"), linear(z, f"{start}w3")), f"{start}w2"
            )
        routed = linear(rms(total) * w[f"{p}routed_expert_norm.weight"], f"{p}routed_expert_up_proj")
        return routed + mlp(x, f"{p}shared_experts.")

    prefix, ended = w["model.embed_tokens.weight"][IDS], []
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        x = read([*ended, prefix], f"{p}self_attention_res_") if ended else prefix
        if i % text["attn_res_block_size"] == 0:
            ended, prefix = [*ended, prefix], 0
        x = rms(x) * w[f"{p}input_layernorm.weight"]
        prefix = prefix + (kda if i < 3 else mla)(x, f"{p}self_attn.")
        x = rms(read([*ended, prefix], f"{p}mlp_res_")) * w[f"{p}post_attention_layernorm.weight"]
        prefix = prefix + (moe(x, f"{p}block_sparse_moe.") if i else mlp(x, f"{p}mlp."))
    return linear(rms(read([*ended, prefix], "model.output_attn_res_")) * w["model.norm.weight"], "lm_head")


class InFp64(TorchFunctionMode):
    """Casts to fp32 in Transformers' layers are to fp64: what is left is what two ways to compute it differ by."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


@pytest.mark.quick("2-mxfp4")
@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "mxfp4"])
@pytest.mark.parametrize("block", [2, 3, 12])
def test_logits_are_those_of_the_releases_decoder(block, quantised, tmp_path):
    folder = folder_of(tmp_path / "k3", quantised=quantised, attn_res_block_size=block)
    model = load(folder, dtype="fp64").double()
    model.set_experts_implementation("eager")
    with torch.no_grad(), InFp64():
        actual = model(input_ids=IDS, use_cache=False).logits
    expected = logits_of_the_release(folder)
    assert (actual - expected).abs().max() < 1e-10 * expected.abs().max()


PUBLISHED = {
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "vocab_size": 163840,
    "intermediate_size": 33792,
    "moe_intermediate_size": 3072,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attn_res_block_size": 12,
    "linear_attn_config": {
        **TEXT["linear_attn_config"],
        "kda_layers": [i for i in range(1, 93) if i % 4],
        "full_attn_layers": [*range(4, 93, 4), 93],
        "num_heads": 96,
        "head_dim": 128,
    },
}
"""As public readers of the release give it, with the other fields of `TEXT`."""
LAYER_1 = {
    "self_attention_res_norm.weight": (7168,),
    "self_attention_res_proj.weight": (1, 7168),
    "input_layernorm.weight": (7168,),
    **{f"self_attn.{part}_proj.weight": (12288, 7168) for part in "qkvg"},
    **{f"self_attn.{part}_conv1d.weight": (12288, 1, 4) for part in "qkv"},
    "self_attn.f_a_proj.weight": (128, 7168),
    "self_attn.f_b_proj.weight": (12288, 128),
    "self_attn.A_log": (128,),
    "self_attn.dt_bias": (12288,),
    "self_attn.b_proj.weight": (96, 7168),
    "self_attn.o_norm.weight": (128,),
    "self_attn.o_proj.weight": (7168, 12288),
    "mlp_res_norm.weight": (7168,),
    "mlp_res_proj.weight": (1, 7168),
    "post_attention_layernorm.weight": (7168,),
    "block_sparse_moe.gate.weight": (896, 7168),
    "block_sparse_moe.gate.e_score_correction_bias": (896,),
    "block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
    "block_sparse_moe.routed_expert_norm.weight": (3584,),
    "block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
    "block_sparse_moe.shared_experts.gate_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.up_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
    **{f"block_sparse_moe.experts.{e}.{w}.weight": (3072, 3584) for e in range(896) for w in ("w1", "w3")},
    **{f"block_sparse_moe.experts.{e}.w2.weight": (3584, 3072) for e in range(896)},
}
"""The tensors of the release's layer 1 (KDA and experts), which a public converter lists with these shapes."""


@pytest.mark.long
def test_the_published_config_makes_the_published_layer_and_2_8_trillion_parameters():
    config = foreign_config("K3", {"model_type": "kimi_k3", "text_config": {**TEXT, **PUBLISHED}})
    with torch.device("meta"):
        model = CLASSES["kimi_k3"][1](config)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(2.8e12, rel=0.01)
    model.residual("itself").to_empty(device="cpu")  # whose numbers are looked at
    start = "language_model.model.layers.1."
    state = foreign_state(model, FORMATS["kimi"])
    assert {name.removeprefix(start): tuple(t.shape) for name, t in state.items() if name.startswith(start)} == LAYER_1


def test_mxfp4_is_what_the_specification_and_torchao_say():
    """Every byte with every scale that fp32 can say; E8M0 has no zero, and its largest is no number."""
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = torch.tensor([[0, 1, 64, 126, 127, 128, 130, 250], [3, 5, 7, 200, 251, 9, 100, 127]], dtype=torch.uint8)
    numbers = unpacked(packed, scale)
    assert torch.equal(numbers.double(), dequantised(packed, scale))
    theirs = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_dtype(
        packed, scale.view(torch.float8_e8m0fnu), torch.float4_e2m1fn_x2, 32, torch.float32
    )
    assert torch.equal(numbers, theirs)
    assert unpacked(packed, torch.full_like(scale, 255)).isnan().all()


def test_a_folder_goes_through_ours_and_back_bit_for_bit(tmp_path, caplog):
    folder = folder_of(tmp_path / "k3", dtype=torch.bfloat16, unheard_of=3)
    cli.main(["convert", str(folder), str(tmp_path / "ours")])
    cli.main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "kimi"])
    theirs, back = stored(folder), stored(tmp_path / "back")
    assert theirs.keys() == back.keys()
    assert all(theirs[name].dtype == back[name].dtype and torch.equal(theirs[name], back[name]) for name in theirs)
    config, written = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert config.pop("text_config").items() <= written.pop("text_config").items() and config == written
    assert "unheard_of" in caplog.text
    assert torch.equal(*(load(tmp_path / name)(input_ids=IDS).logits for name in ("ours", "back")))


@pytest.mark.long
def test_one_in_mxfp4_is_written_in_16_bits(tmp_path, caplog, monkeypatch):
    folder = folder_of(tmp_path / "k3", quantised=True, dtype=torch.bfloat16)
    monkeypatch.setattr("attnres.models.export.SHARD", "40KB")
    export_model(folder, tmp_path / "back", "kimi")
    assert "MXFP4" in caplog.text
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 5 and all(file.stat().st_size < 50_000 for file in files)
    theirs, back = stored(folder), stored(tmp_path / "back")
    for name in [name.removesuffix("_packed") for name in theirs if name.endswith("_packed")]:
        numbers = dequantised(theirs.pop(f"{name}_packed"), theirs.pop(f"{name}_scale"))
        assert back[name].dtype == torch.bfloat16 and torch.equal(back.pop(name).double(), numbers)
    assert theirs.keys() == back.keys() and all(torch.equal(theirs[name], back[name]) for name in theirs)
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()
    assert torch.equal(*(load(path)(input_ids=IDS).logits for path in (folder, tmp_path / "back")))


def test_what_sees_images_and_what_predicts_further_tokens_is_left_out_and_said(tmp_path, caplog):
    state = tensors(quantised=False)
    whole = {
        **state,
        "vision_tower.patch_embed.proj.weight": torch.zeros(2),
        "mm_projector.pre_norm.weight": torch.zeros(2),
    }
    ahead = f"model.layers.{LAYERS}."
    whole |= {f"{ahead}eh_proj.weight": torch.zeros(D, 2 * D), f"{ahead}mlp_res_proj.weight": torch.zeros(1, D)}
    flash = {"_attn_implementation": "flash_attention_2"}
    config = {"vision_config": flash, "media_placeholder_token_id": 7}
    folder = folder_of(tmp_path / "k3", whole, config=config, num_nextn_predict_layers=1, **flash)
    model = load(folder, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert all(word in caplog.text for word in ("mm_projector", "num_nextn_predict_layers=1", f"{ahead}eh_proj"))
    text = load(folder_of(tmp_path / "text", state), attn_implementation="eager")
    assert torch.equal(model(input_ids=IDS).logits, text(input_ids=IDS).logits)
    model.save_pretrained(tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "back", "kimi")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "vision_config" not in written and written["text_config"]["num_nextn_predict_layers"] == 0


IN_TWO_GIGABYTES = """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from attnres.models import kimi, load
before = int(re.search(r"VmSize:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
model = load(sys.argv[1])
print(before, sum(parameter.nbytes for parameter in model.parameters()), model.dtype)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_folder_is_loaded_where_its_experts_do_not_fit_twice(tmp_path):
    """The limit is a process' address space, in which the files are mapped too."""
    fields = {"num_experts": 80, "routed_expert_hidden_size": 512, "moe_intermediate_size": 512}
    folder = folder_of(tmp_path / "k3", tensors(True, 80, 512), quantised=True, dtype=torch.bfloat16, **fields)
    few = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}  # each thread reserves addresses
    child = [sys.executable, "-c", IN_TWO_GIGABYTES, str(folder)]
    done = subprocess.run(child, env=few, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, model, dtype = done.stdout.split()
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert dtype == "torch.bfloat16" and int(before) + files + 2 * int(model) > 2**31
    assert 3.9 * files > int(model) > 3.5 * files


L1 = "model.layers.1."
EXPERT = f"{L1}block_sparse_moe.experts."
WRONG = {
    "expert": (lambda s: s.pop(f"{EXPERT}3.w2.weight_packed"), f"'{EXPERT}3.w2.weight"),
    "scale": (lambda s: s.pop(f"{EXPERT}3.w2.weight_scale"), f"lacks '{EXPERT}3.w2.weight_scale'"),
    "packed": (lambda s: s.update({f"{EXPERT}0.w1.weight_packed": torch.zeros(32, 15, dtype=torch.uint8)}), "(32, 15)"),
    "latent": (lambda s: s.pop(f"{L1}block_sparse_moe.routed_expert_norm.weight"), "lacks '.*routed_expert_norm"),
    "conv": (lambda s: s.pop(f"{L1}self_attn.k_conv1d.weight"), "lacks '.*k_conv1d"),
    "gate": (lambda s: s.pop(f"{L1}self_attn.g_proj.weight"), "lacks '.*1.self_attn.g_proj"),
    "decay": (lambda s: s[f"{L1}self_attn.A_log"].fill_(1.0), "1.self_attn.A_log' .* 128 numbers: expected .* 3 heads"),
    "twice": (lambda s: s.update({f"{EXPERT}0.w1.weight": torch.zeros(32, 32)}), f"'{EXPERT}0.w1.weight' twice"),
    "unsaid": (lambda s: s.update({f"{EXPERT}9.w4.weight_packed": torch.zeros(2)}), "lacks '.*w4.weight_scale"),
    "read": (lambda s: s.pop(f"{L1}mlp_res_proj.weight"), f"lacks '{L1}mlp_res_proj.weight' of depth reads"),
    "more experts": (lambda s: s.update({f"{EXPERT}4.w1.weight": torch.zeros(32, 32)}), "experts.4.w1.* no place"),
    "more layers": (lambda s: s.update({f"model.layers.{LAYERS}.eh_proj.weight": torch.zeros(2)}), "'.*5.eh_proj"),
    "more": (lambda s: s.update({f"{L1}self_attn.s_proj.weight": torch.zeros(2)}), "has, besides .*s_proj"),
}


def refused(folder, out, capsys):
    """Return the sentence with which `attnres convert` refuses a folder."""
    with pytest.raises(SystemExit) as left:
        cli.main(["convert", str(folder), str(out)])
    sentence = capsys.readouterr().err
    assert left.value.code == 2 and not out.exists() and "Traceback" not in sentence
    return sentence


@pytest.mark.quick("expert", "more experts", "gate")
@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_one_sentence(change, message, tmp_path, capsys):
    state = tensors(quantised=True)
    change(state)
    assert re.search(message, refused(folder_of(tmp_path / "k3", state, quantised=True), tmp_path / "out", capsys))


def test_one_tensor_in_two_files_is_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "k3")
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    name = f"language_model.{L1}mlp_res_proj.weight"
    for file in (one, two):
        save_file(load_file(file) | {name: torch.zeros(1, D)}, file)
    assert f"'{name}' in two files" in refused(folder, tmp_path / "out", capsys)


def test_packed_weights_without_a_word_in_the_config_are_refused(tmp_path, capsys):
    folder = folder_of(tmp_path / "k3", tensors(quantised=True))
    assert f"lacks '{EXPERT}0.w1.weight'" in refused(folder, tmp_path / "out", capsys)


def test_a_missing_file_is_one_sentence(tmp_path, capsys):
    folder = folder_of(tmp_path / "k3")
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors" in refused(folder, tmp_path / "out", capsys)


INT4 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"format": "pack-quantized"}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "powlu"}, "hidden_act is powlu"),
        ({"activation_situ_beta": None}, "no 'activation_situ_beta'"),
        ({"mla_use_nope": False}, "mla_use_nope=False"),
        ({"num_expert_group": 2}, "num_expert_group is 2"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"linear_attn_config": {**TEXT["linear_attn_config"], "kda_layers": [1, 3]}}, "each of 1 to 5"),
        ({"linear_attn_config": None}, "each of 1 to 5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"quantization_config": INT4}, "'compressed-tensors, pack-quantized'"),
    ],
)
def test_a_field_that_nobody_implements_is_named(fields, message, tmp_path, capsys):
    assert message in refused(
        folder_of(tmp_path / "k3", {"x": torch.zeros(1)}, shards=1, **fields), tmp_path / "o", capsys
    )
