"""Where a run happens is written down, and what it takes is measured."""

import json
from pathlib import Path

import pytest
import torch

from attnres import build
from attnres.training import environment, muon
from attnres.training.environment import tune

CPU = torch.device("cpu")


def test_the_environment_is_described() -> None:
    description = environment.describe(CPU, "fp32")
    assert description["torch"] == torch.__version__ and description["threads"] == torch.get_num_threads()
    assert description["dtype"] == "fp32" and description["device_type"] == "cpu" and description["cpu"]


FEATURES: list[tuple[dict[str, object], bool]] = [
    ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
    ({"architecture": "x86_64", "avx2": True, "avx512_bf16": True, "amx_bf16": False}, True),
    ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
    ({"architecture": "aarch64", "sve": True, "arm_bf16": False}, False),
    ({"architecture": "aarch64", "sve": True, "arm_bf16": True}, True),
    ({}, False),
]
"""What torch says of processors, and whether they compute in bf16."""


@pytest.mark.parametrize(("features", "native"), FEATURES)
def test_bf16_is_chosen_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, object], native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert environment.has_bf16(CPU) is native
    assert not environment.has_bf16(torch.device("meta"))
    steps = torch.bfloat16 if native else torch.float32
    assert muon.precision.__wrapped__(CPU) is steps, "that of Muon's Newton-Schulz steps"


def test_emulated_bf16_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_bf16", lambda _: False)
    said = environment.emulated(CPU, "bf16")
    assert said is not None and environment.processor() in said and "fp32" in said
    assert environment.emulated(CPU, "fp32") is None
    monkeypatch.setattr(environment, "has_bf16", lambda _: True)
    assert environment.emulated(CPU, "bf16") is None


def test_peak_memory_sees_what_was_used() -> None:
    environment.reset_peak_memory(CPU)
    before = environment.peak_memory(CPU)
    block = torch.ones(16, 1024, 1024)
    assert environment.peak_memory(CPU) >= before + block.nbytes // 2


def test_a_resumed_run_keeps_its_first_environment_and_lists_others(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    first, other = {"threads": 1, "date": "a"}, {"threads": 2, "date": "c"}
    later = [{**first, "date": "b"}, other, {**other, "date": "d"}]
    for index, entry in enumerate([first, *later]):
        environment.record(path, entry, resumed=index > 0)
    assert json.loads(path.read_text()) == {**first, "resumed": [other]}
    environment.record(path, other, resumed=False)
    assert json.loads(path.read_text()) == other


@pytest.mark.parametrize(("family", "long"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3", "sdpa")])
def test_attention_is_fused_where_sequences_are_long_and_the_family_can(family, long):
    size = {
        "family": family,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    }
    model = build(size, "block", vocab_size=64)
    for device, length, expected in (("cpu", 128, "eager"), ("cpu", 1024, long), ("cuda", 128, long)):
        tune(model, torch.device(device), length)
        assert model.config._attn_implementation == expected
