"""Operations of a step beside the count of them that torch makes, see also every family in test_families.py."""

import pytest
import torch
from tiny import NARROW
from torch.utils.flop_counter import FlopCounterMode

from attnres.models import build
from attnres.models.bases import checkpoint_activations
from attnres.models.step_cost import peak_flops, step_flops

IDS = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(0))


def counted(model):
    """Operations of a forward and a backward pass for each token."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return counter.get_total_flops() / IDS.numel()


def test_a_mechanism_is_counted_as_the_model_that_it_connects():
    expected = counted(build(NARROW, "standard", vocab_size=30, max_positions=8))
    for name in ("standard", "block", "muddformer"):
        model = build(NARROW, name, vocab_size=30, max_positions=8)
        assert step_flops(model, 8) == pytest.approx(expected, rel=0.02), name
        checkpoint_activations(model, "layer")
        assert step_flops(model, 8) == pytest.approx(expected, rel=0.02), name
    assert counted(model) > 1.2 * expected  # what it does besides, and again


def test_frozen_weights_have_no_gradient():
    model = build({**NARROW, "num_hidden_layers": 6}, "block", vocab_size=30, max_positions=8)
    whole = step_flops(model, 8)
    model.requires_grad_(False)
    model.residual.requires_grad_(True)
    assert step_flops(model, 8) < 0.75 * whole
    assert step_flops(model, 8) == pytest.approx(counted(model), rel=0.06)  # nothing goes back beyond the first read


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA L40", "bf16", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_data_sheet(name, dtype, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), dtype) == peak
    assert peak_flops(torch.device("cpu"), dtype) is None
