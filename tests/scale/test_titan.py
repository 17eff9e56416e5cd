"""torchtitan's adapters with a residual: held against torchtitan's own where it is installed."""

import pytest
import torch

from attnres.models import build
from attnres.scale.titan import with_reads

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


NAMES = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
RESIDUAL = ("model.residual.query", "model.residual.gain")


class Strict:
    """Renames two tensors and leaves out whatever it does not know, as torchtitan's adapters do."""

    def __init__(self, model_config, hf_assets_path):
        self.arguments = (model_config, hf_assets_path)

    def to_hf(self, state_dict):
        return {NAMES[name]: tensor for name, tensor in state_dict.items() if name in NAMES}

    def from_hf(self, hf_state_dict):
        return {name: hf_state_dict[hf] for name, hf in NAMES.items() if hf in hf_state_dict}


def same(one, other):
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_an_adapter_leaves_out_is_carried_along():
    hf = build(SIZE, "block", vocab_size=11, max_positions=8).state_dict()
    adapter = with_reads(Strict)("config", None)
    assert adapter.arguments == ("config", None)
    titan = adapter.from_hf(hf)
    assert set(titan) == {"tok_embeddings.weight", "norm.weight", "residual.query", "residual.gain"}
    same(adapter.to_hf(titan), {name: hf[name] for name in (*NAMES.values(), *RESIDUAL)})
    assert not set(RESIDUAL) & set(Strict("config", None).to_hf(titan))


def test_a_checkpoint_of_torchtitan_is_a_folder_of_ours():
    qwen3 = pytest.importorskip("torchtitan.models.qwen3", reason="torchtitan is not installed")
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    config = qwen3.qwen3_configs["debugmodel_non_fused_qkv"]("varlen")
    config.enable_weight_tying = False
    model = build(SIZE, "block", vocab_size=11, max_positions=8)
    torch.nn.init.normal_(model.residual.query)
    hf = model.state_dict()
    adapter = with_reads(Qwen3StateDictAdapter)(config, None)
    titan = adapter.from_hf(dict(hf))
    assert {"residual.query", "layers.1.feed_forward.w2.weight"} <= set(titan)
    same(adapter.to_hf(titan), hf)
    assert set(hf) - set(Qwen3StateDictAdapter(config, None).to_hf(titan)) == set(RESIDUAL)  # lost without it
