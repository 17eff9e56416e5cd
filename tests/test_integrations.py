"""The folder of integrations: its pages and its lock, and what of its adapters runs without the code bases."""

import re
from pathlib import Path

import pytest
import torch

from attnres.models import build
from integrations.torchtitan.adapter import with_reads

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "integrations").glob("*/README.md"))
LOCK = (ROOT / "locks" / "integrations.txt").read_text() + (ROOT / "locks" / "dev.txt").read_text()
PINS = {name.lower(): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", LOCK)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_is_short_and_says_its_version_and_how_to_check(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and len(lines) <= 60
    assert not [line for line in lines if len(line) > 132 and not line.startswith(("+", "-", " "))]
    tried = re.fullmatch(r"Tried with (commit [0-9a-f]{7} \(.*\)|(\S+) ([\d.]+))\.", lines[2])
    assert tried and (tried[2] is None or PINS[tried[2].lower()] == tried[3])
    assert any(line.startswith("To check: ") for line in lines)


def test_rows_of_the_table_and_tests_are_those_of_pages():
    names = {page.parent.name for page in PAGES}
    rows = re.findall(
        r"\(`integrations/(\w+)`\)", (ROOT / "docs" / "how-to" / "integrations.md").read_text(encoding="utf-8")
    )
    tested = {test.parent.name for test in (ROOT / "integrations").glob("*/test_*.py")}
    assert len(names) == 13 and names == tested | {"llama_factory"} and set(rows) <= tested


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


def test_what_an_adapter_of_torchtitan_leaves_out_is_carried_along():
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    hf = build(
        {"family": "qwen3", "intermediate_size": 48, "tie_word_embeddings": False} | size,
        "block",
        vocab_size=11,
        max_positions=8,
    ).state_dict()
    adapter = with_reads(Strict)("config", None)
    assert adapter.arguments == ("config", None)
    titan = adapter.from_hf(hf)
    assert set(titan) == {"tok_embeddings.weight", "norm.weight", "residual.query", "residual.gain"}
    back = adapter.to_hf(titan)
    assert set(back) == {*NAMES.values(), *RESIDUAL} and all(torch.equal(back[name], hf[name]) for name in back)
    assert not set(RESIDUAL) & set(Strict("config", None).to_hf(titan))
