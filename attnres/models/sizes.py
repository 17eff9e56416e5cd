"""Named model sizes, as data: a family and the fields of its Hugging Face config."""

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    # For a CPU: twelve layers, so that depth has something to show, and narrow.
    "nano": {
        "family": "qwen3",
        "hidden_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
    },
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
}
