"""Captured steps on a CUDA device: the eager losses, no wait for the device, and what a failed capture leaves."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attnres.comparison.speed import StepOptions, TrainingStep, training_steps
from attnres.loss_kernel import losses_and_gradients

SIZE = {"family": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 2, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
VARIANTS = {"standard": ("standard", {}), "block": ("block", {"num_blocks": 2}), "full": ("full", {})}


def step_of(device: str, variant: str, *, captured: bool, **how: Any) -> TrainingStep:
    """A training step with dropout and two micro-batches."""
    shape: dict[str, Any] = {"vocab_size": 128, "seq_len": 32, "batch_size": 4, "accumulation": 2}
    options = StepOptions(SIZE, device=device, cuda_graphs=captured, **shape, **how)
    return training_steps({variant: VARIANTS[variant]}, options)[variant]


def losses(step: TrainingStep, count: int) -> list[float]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    values = []
    for _ in range(count):
        tokens = torch.randint(128, (4, 33), generator=generator).to(step.x.device)
        step.x, step.y = tokens[:, :-1], tokens[:, 1:]
        values.append(step()[0][0].clone())
    return torch.stack(values).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_steps_have_the_losses_of_eager_ones(cuda: str, variant: str, dtype: str) -> None:
    captured = step_of(cuda, variant, captured=True, dtype=dtype)
    ours, theirs = losses(captured, 30), losses(step_of(cuda, variant, captured=False, dtype=dtype), 30)
    assert captured.path == "captured"
    assert ours == pytest.approx(theirs, rel=1e-5 if dtype == "fp32" else 2e-3)
    assert ours[-1] < ours[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch's own: a prototype
def test_a_captured_step_waits_for_nothing(cuda: str) -> None:
    step = step_of(cuda, "block", captured=True, dtype="bf16")
    losses(step, 6)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_after_a_capture_that_fails_steps_are_the_eager_ones(cuda: str) -> None:
    """With the random numbers that they would have drawn, and on the stream they were on."""
    failing, eager = (step_of(cuda, "block", captured=captured) for captured in (True, False))
    failing.update.penalty = lambda: torch.zeros((), device=cuda) * torch.ones((), device=cuda).item()
    before = torch.cuda.current_stream()
    assert losses(failing, 12) == pytest.approx(losses(eager, 12), rel=1e-5)
    assert failing.path.startswith("eager: ") and torch.cuda.current_stream() == before


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_kernel_is_plain_torch(cuda: str, dtype: torch.dtype, cap: float | None) -> None:
    z = (5 * torch.randn(300, 50_257, device=cuda)).to(dtype)
    y = torch.randint(50_257, (300,), device=cuda)
    raw = z.float().requires_grad_()
    logits = raw if cap is None else cap * torch.tanh(raw / cap)
    expected = F.cross_entropy(logits, y, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), raw)
    torch.testing.assert_close(losses_and_gradients(z, y, cap=cap), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z.float(), gradient, rtol=1e-4 if dtype == torch.float32 else 2**-7, atol=1e-7)
