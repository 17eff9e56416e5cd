"""Small checkpoints of other projects, made key by key in their own names, and those projects' formulas for their
logits, written out on plain layers."""

import json
import math

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from attnres.models.kda import use_tiles

VOCAB, WIDTH, LAYERS, INNER = 61, 32, 5, 48
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


class Draw:
    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, scale=0.4, mean=0.0):
        return torch.randn(shape, generator=self.generator) * scale + mean


def written(folder, config, tensors, dtype=None):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.to(dtype or v.dtype).contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


# -- plain layers ----------------------------------------------------------------------------------------------------
class Plain:
    """A plain Transformers model in fp64, one sublayer at a time: f(h) with the sublayer's own norm."""

    def __init__(self, name, state, **fields):
        cls = getattr(transformers, name)
        self.model = cls(cls.config_class(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, **fields))
        self.model.load_state_dict(state)
        self.model.double().eval()
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")
        self.base = self.model.model
        window = getattr(self.model.config, "sliding_window", None) or IDS.shape[1]
        far = torch.arange(IDS.shape[1])[:, None] - torch.arange(IDS.shape[1])
        mask = torch.zeros(far.shape, dtype=torch.float64).masked_fill((far < 0) | (far >= window), -math.inf)
        self.mask = mask[None, None]

    def embed(self):
        return self.base.embed_tokens(IDS)

    @staticmethod
    def norm(module, h):
        """The module's norm in fp64; Transformers' own rounds to fp32 inside."""
        return F.rms_norm(h, h.shape[-1:], module.weight, module.variance_epsilon)

    def sublayer(self, index, h):
        layer = self.base.layers[index // 2]
        if index % 2:
            return layer.mlp(self.norm(layer.post_attention_layernorm, h))
        x, extra = self.norm(layer.input_layernorm, h), {}
        if hasattr(self.base, "rotary_emb"):
            extra["position_embeddings"] = self.base.rotary_emb(h, torch.arange(h.shape[1])[None])
        linear = getattr(layer, "block_type", "") == "linear_attention"
        out = layer.self_attn(hidden_states=x, attention_mask=None if linear else self.mask, **extra)
        return out if linear else out[0]

    def head(self, h):
        return self.model.lm_head(self.norm(self.base.norm, h))


def softmax_read(sources, proj, norm, eps, bias=0.0):
    values = torch.stack(sources)
    logits = F.rms_norm(values, values.shape[-1:], norm.double(), eps) @ proj.double().flatten()
    logits = torch.cat([logits[:-1], logits[-1:] + bias])
    return (logits.softmax(0).unsqueeze(-1) * values).sum(0)


def qwen_like(draw, *, bias=False, qk_norm=False, kv=2, heads=4, tied=False):
    """Weights in Transformers' names."""
    size = WIDTH // heads
    state = {"model.embed_tokens.weight": draw(VOCAB, WIDTH, scale=1.0), "model.norm.weight": draw(WIDTH, mean=1.0)}
    if not tied:
        state["lm_head.weight"] = draw(VOCAB, WIDTH)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for part, out in (("q", heads), ("k", kv), ("v", kv)):
            state[f"{p}self_attn.{part}_proj.weight"] = draw(out * size, WIDTH)
            if bias:
                state[f"{p}self_attn.{part}_proj.bias"] = draw(out * size)
        if qk_norm:
            state |= {f"{p}self_attn.{n}_norm.weight": draw(size, mean=1.0) for n in "qk"}
        state[f"{p}self_attn.o_proj.weight"] = draw(WIDTH, WIDTH)
        for part in ("gate", "up"):
            state[f"{p}mlp.{part}_proj.weight"] = draw(INNER, WIDTH)
        state[f"{p}mlp.down_proj.weight"] = draw(WIDTH, INNER)
        for part in ("input", "post_attention"):
            state[f"{p}{part}_layernorm.weight"] = draw(WIDTH, mean=1.0)
    return state


# -- open-attention-residuals ----------------------------------------------------------------------------------------
OPEN = {"block": {"attnres_num_blocks": 3}, "full": {"attnres_mode": "full"}, "eight": {"attnres_num_blocks": 8}}
OPEN |= {g: {"attnres_gate_type": g, "attnres_num_blocks": 2} for g in ("sigmoid_scalar", "sigmoid_vector")}
OPEN["learnable_alpha"] = {"attnres_gate_type": "learnable_alpha", "attnres_mode": "full"}


def open_attnres(folder, dtype=None, tied=True, **fields):
    draw = Draw()
    config = {
        "model_type": "qwen3_attnres",
        "architectures": ["Qwen3AttnResForCausalLM"],
        "attnres_num_blocks": 8,
        "attnres_mode": "block",
        "attnres_gate_type": "bias",
        "attnres_recency_bias_init": 3.0,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": INNER,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        **fields,
    }
    state = qwen_like(draw, qk_norm=True, tied=tied)
    for i in range(LAYERS):
        for part in ("attn", "mlp"):
            p = f"model.layers.{i}.{part}_res_"
            state |= {f"{p}proj.weight": draw(1, WIDTH), f"{p}norm.weight": draw(WIDTH, mean=1.0), f"{p}bias": draw()}
            if config["attnres_gate_type"] == "sigmoid_scalar":
                state[f"{p}gate_logit"] = draw(mean=-1.0)
            if config["attnres_gate_type"] == "sigmoid_vector":
                state |= {f"{p}gate_proj.weight": draw(WIDTH, WIDTH), f"{p}gate_proj.bias": draw(WIDTH)}
            if config["attnres_gate_type"] == "learnable_alpha":
                state[f"{p}alpha"] = draw()
    return written(folder, config, state, dtype)


def open_attnres_logits(folder):
    """blocks = [embedding], partial = embedding; the partial is never reset and is read itself at the end."""
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    base = {k: v for k, v in state.items() if "_res_" not in k}
    base["lm_head.weight"] = base.get("lm_head.weight", base["model.embed_tokens.weight"])
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": INNER}
    plain = Plain("Qwen3ForCausalLM", base, rms_norm_eps=1e-5, rope_parameters=ROPE, **sizes)
    blocks, partial = [plain.embed()], plain.embed()
    per_block = max(1, (LAYERS + config["attnres_num_blocks"] - 1) // config["attnres_num_blocks"])
    for index in range(2 * LAYERS):
        p = f"model.layers.{index // 2}.{'mlp' if index % 2 else 'attn'}_res_"
        bias = state[f"{p}bias"].double()
        h = softmax_read([*blocks, partial], state[f"{p}proj.weight"], state[f"{p}norm.weight"], 1e-5, bias)
        if f"{p}gate_logit" in state:
            share = state[f"{p}gate_logit"].double().sigmoid()
        elif f"{p}gate_proj.weight" in state:
            gate = (state[f"{p}gate_proj.{part}"].double() for part in ("weight", "bias"))
            share = F.linear(partial, *gate).sigmoid()
        else:
            share = state.get(f"{p}alpha", torch.ones(())).double()
        partial = partial + plain.sublayer(index, (1 - share) * partial + share * h)
        if config["attnres_mode"] == "full" or (index % 2 and (index // 2 + 1) % per_block == 0):
            blocks.append(partial)
    return plain.head(partial)


# -- the paper's layout ----------------------------------------------------------------------------------------------
def paper_logits(plain, size, start, eps):
    """Finished block sums and the partial one; `start(index)` gives proj and norm of a read."""
    blocks, partial = [], plain.embed()
    for index in range(2 * LAYERS + 1):
        boundary = index % size == 0 and index < 2 * LAYERS
        h = softmax_read([*blocks, partial], *start(index), eps) if blocks else partial
        if index == 2 * LAYERS:
            return plain.head(h)
        if boundary:
            blocks, partial = [*blocks, partial], None
        out = plain.sublayer(index, h)
        partial = out if partial is None else partial + out
    raise AssertionError


FLA = {
    "llama": {},
    "full": {"attnres_block_size": 1},
    "uneven": {"attnres_block_size": 4},
    "one": {"attnres_block_size": 64},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True, "norm_eps": 1e-5},
    "window": {"window_size": 4},
}


def fla(folder, dtype=None, **fields):
    draw = Draw(1)
    config = {
        "model_type": "transformer",
        "architectures": ["TransformerForCausalLM"],
        "attnres_block_size": 2,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": INNER,
        "hidden_act": "swish",
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "fuse_norm": True,
        **fields,
    }
    state = {}
    renamed = (
        ("embed_tokens", "embeddings"),
        ("self_attn.", "attn."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "mlp_norm"),
    )
    for name, tensor in qwen_like(draw, bias=config.get("qkv_bias"), qk_norm=config.get("qk_norm")).items():
        for ours, theirs in renamed:
            name = name.replace(ours, theirs)
        state[name] = tensor
    for start in [f"layers.{i}.{part}_res" for i in range(LAYERS) for part in ("attn", "mlp")] + ["res"]:
        state[f"model.{start}_proj.weight"] = draw(1, WIDTH)
        state[f"model.{start}_norm.weight"] = draw(WIDTH, mean=1.0)
    return written(folder, config, state, dtype)


def fla_logits(folder):
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    base = {}
    for name, tensor in state.items():
        if "res_" in name:
            continue
        name = name.replace("embeddings", "embed_tokens").replace(".attn.", ".self_attn.")
        base[name.replace("attn_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")] = tensor
    names = {"qkv_bias": "Qwen2", "qk_norm": "Qwen3", "window_size": "Mistral"}
    family = next((names[key] for key in names if config.get(key)), "Llama")
    more = {"sliding_window": config["window_size"]} if config.get("window_size") else {}
    more |= {"head_dim": 8} if family == "Qwen3" else {}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": INNER}
    plain = Plain(f"{family}ForCausalLM", base, rms_norm_eps=config["norm_eps"], rope_parameters=ROPE, **sizes, **more)

    def start(index):
        p = f"model.layers.{index // 2}.{'mlp' if index % 2 else 'attn'}_res" if index < 2 * LAYERS else "model.res"
        return state[f"{p}_proj.weight"], state[f"{p}_norm.weight"]

    return paper_logits(plain, config["attnres_block_size"], start, config["norm_eps"])


KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": INNER,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mla_use_nope": True,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5],
        "full_attn_layers": [4],
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
KIMI = {
    "linear": ({}, False),
    "wrapped": ({"attn_res_block_size": 3}, True),
    "one": ({"attn_res_block_size": 12}, False),
}


def kimi_linear(draw):
    """Weights in the names of the published modeling file."""
    state = {"model.embed_tokens.weight": draw(VOCAB, WIDTH, scale=1.0), "model.norm.weight": draw(WIDTH, mean=1.0)}
    state["lm_head.weight"] = draw(VOCAB, WIDTH)
    shapes = {"q_proj": (16, 32), "k_proj": (16, 32), "v_proj": (16, 32), "f_a_proj": (8, 32), "f_b_proj": (16, 8)}
    shapes |= {"b_proj": (2, 32), "g_a_proj": (8, 32), "g_b_proj": (16, 8), "o_proj": (32, 16), "o_norm": (8,)}
    shapes |= {f"{n}_conv1d": (16, 1, 4) for n in "qkv"}
    mla = {"q_proj": (48, 32), "kv_a_proj_with_mqa": (12, 32), "kv_a_layernorm": (8,), "kv_b_proj": (64, 8)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        for name, shape in ((mla | {"o_proj": (32, 32)}) if i == 3 else shapes).items():
            state[f"{p}self_attn.{name}.weight"] = draw(*shape, mean=float(len(shape) == 1))
        if i != 3:
            state |= {f"{p}self_attn.A_log": draw(1, 1, 2, 1), f"{p}self_attn.dt_bias": draw(16)}
        inner = f"{p}block_sparse_moe." if i else f"{p}mlp."
        for start, names, size in [
            (inner + "shared_experts." if i else inner, ("gate_proj", "up_proj", "down_proj"), 0)
        ] + [(f"{inner}experts.{e}.", ("w1", "w3", "w2"), 16) for e in range(4) if i]:
            size = size or (16 if i else INNER)
            state |= {f"{start}{name}.weight": draw(size, WIDTH) for name in names[:2]}
            state[f"{start}{names[2]}.weight"] = draw(WIDTH, size)
        if i:
            state |= {f"{inner}gate.weight": draw(4, WIDTH), f"{inner}gate.e_score_correction_bias": draw(4)}
        for part in ("input", "post_attention"):
            state[f"{p}{part}_layernorm.weight"] = draw(WIDTH, mean=1.0)
    return state


def with_kimi_names(draw, state):
    starts = [f"layers.{i}.{part}_res" for i in range(LAYERS) for part in ("self_attention", "mlp")]
    for start in [*starts, "output_attn_res"]:
        state[f"model.{start}_proj.weight"] = draw(1, WIDTH)
        state[f"model.{start}_norm.weight"] = draw(WIDTH, mean=1.0)
    return state


QWEN = {
    "model_type": "qwen3_ar",  # of FlagOS's modeling_qwen3_ar.py, which has K3's `_apply_attn_res` in a Qwen3
    "architectures": ["Qwen3ARForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_qwen3_ar.Qwen3ARConfig"},
    "attn_res_output_route": True,
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": INNER,
    "rms_norm_eps": 1e-5,
}


def kimi(folder, dtype=None, wrapped=False, qwen=False, **fields):
    config = {**(QWEN if qwen else KIMI_LINEAR), "attn_res_block_size": 2, **fields}
    draw = Draw(2)
    state = with_kimi_names(draw, qwen_like(draw, qk_norm=True) if qwen else kimi_linear(draw))
    if wrapped:
        config = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": config}
        state = {f"language_model.{name}": tensor for name, tensor in state.items()}
    return written(folder, config, state, dtype)


def kimi_logits(folder):
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = config.get("text_config", config)
    state = {name.removeprefix("language_model."): tensor for name, tensor in state.items()}
    config["model_type"] = config["model_type"].removesuffix("_ar")
    plain_folder = written(folder / "plain", config, {k: v for k, v in state.items() if "_res_" not in k})
    model = AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float64)
    use_tiles(model)  # Transformers computes KDA in fp32 whatever the dtype; tests/ops/test_kda.py holds ours
    plain = Plain.__new__(Plain)
    plain.model, plain.base = model.eval(), model.model
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    plain.mask = torch.full((9, 9), -math.inf, dtype=torch.float64).triu(1)[None, None]

    def start(index):
        p = f"layers.{index // 2}.{'mlp' if index % 2 else 'self_attention'}" if index < 2 * LAYERS else "output_attn"
        return state[f"model.{p}_res_proj.weight"], state[f"model.{p}_res_norm.weight"]

    return paper_logits(plain, 2 * config["attn_res_block_size"], start, 1e-5)


# -- the nanoGPT study -----------------------------------------------------------------------------------------------
NANO = {
    "full": {"residual_mode": "full_attnres"},
    "block": {"attnres_n_blocks": 2},
    "each": {"attnres_n_blocks": 4},
    "no bias": {"bias": False},
}


def nanogpt(folder, dtype=None, **fields):
    draw = Draw(3)
    config = {"n_layer": 4, "n_head": 4, "n_embd": WIDTH, "block_size": 64, "bias": True, "vocab_size": VOCAB}
    config |= {"dropout": 0.0, "residual_mode": "block_attnres", "attnres_n_blocks": 2, **fields}
    state = {"transformer.wte.weight": draw(VOCAB, WIDTH), "transformer.wpe.weight": draw(64, WIDTH)}
    state |= {
        "lm_head.weight": state["transformer.wte.weight"].clone(),
        "transformer.ln_f.weight": draw(WIDTH, mean=1.0),
    }
    matrices = {"attn.c_attn": (96, 32), "attn.c_proj": (32, 32), "mlp.c_fc": (128, 32), "mlp.c_proj": (32, 128)}
    for i in range(4):
        p = f"transformer.h.{i}."
        state |= {f"{p}{name}.weight": draw(*shape) for name, shape in matrices.items()}
        state |= {f"{p}ln_{j}.weight": draw(WIDTH, mean=1.0) for j in (1, 2)}
        if config["bias"]:
            state |= {f"{p}{name}.bias": draw(shape[0]) for name, shape in matrices.items()}
            state |= {f"{p}ln_{j}.bias": draw(WIDTH) for j in (1, 2)}
    if config["bias"]:
        state["transformer.ln_f.bias"] = draw(WIDTH)
    for i in range(4 if config["residual_mode"] == "full_attnres" else config["attnres_n_blocks"]):
        state |= {f"depth_attn.{i}.w": draw(WIDTH), f"depth_attn.{i}.key_norm.weight": draw(WIDTH, mean=1.0)}
    return written(folder, config, state, dtype)


def nanogpt_logits(folder):
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    w = {name.removeprefix("transformer."): tensor.double() for name, tensor in state.items()}

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def layer(x, p):
        q, k, v = (
            part.unflatten(-1, (4, 8)).transpose(1, 2)
            for part in linear(norm(x, p + "ln_1"), p + "attn.c_attn").split(WIDTH, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(mixed, p + "attn.c_proj")
        return x + linear(F.gelu(linear(norm(x, p + "ln_2"), p + "mlp.c_fc")), p + "mlp.c_proj")

    x = w["wte.weight"][IDS] + w["wpe.weight"][: IDS.shape[1]]
    ends = [x]
    per_block = 1 if config["residual_mode"] == "full_attnres" else 4 // config["attnres_n_blocks"]
    for i in range(4):
        x = layer(x, f"h.{i}.")
        if (i + 1) % per_block == 0:
            ends.append(x)
            p = f"depth_attn.{len(ends) - 2}."
            x = softmax_read(ends, w[p + "w"], w[p + "key_norm.weight"], 1e-8)
    return F.linear(norm(x, "ln_f"), w["lm_head.weight"])


def same_tensors(one, two):
    a, b = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
