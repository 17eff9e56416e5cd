"""Named model sizes, as data: a family and the fields of its Hugging Face config."""

from typing import Any


def _narrow(width: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return a Qwen3 for a CPU: twelve layers, so that depth has something to show, and narrow."""
    return {
        "family": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": 12,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "intermediate_size": 3 * width,
        "tie_word_embeddings": True,
    }


def _llama(width: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "family": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": False,
    }


SIZES: dict[str, dict[str, Any]] = {
    # The models of the studies' presets of these names (lab/presets.py).
    "pico": _narrow(32, 1, 1),
    "micro": _narrow(64, 2, 1),
    "nano": _narrow(128, 4, 2),
    "100m": {
        "family": "qwen3",
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
    },
    # Qwen3-0.6B's shape.
    "0.6b": {
        "family": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "gpt2-124m": {
        "family": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    # Shapes of Llama 2 (arXiv 2307.09288; its 7B) and Llama 3 (arXiv 2407.21783, table 3), for `attnres plan`; their
    # vocabularies, 32,000 and 128,256 words, are `--vocab-size`.
    "7b": _llama(4096, 32, 32, 32, 11008),
    "8b": _llama(4096, 32, 32, 8, 14336),
    "70b": _llama(8192, 80, 64, 8, 28672),
}
