"""Forward passes: modes come back module by module, losses are torch's own cross-entropy."""

import pytest
import torch
from tiny import SIZE
from torch.nn import functional as F

from attnres.head import POSITIONS, evaluating, log_probs, next_token_losses, token_losses
from attnres.models import build


def test_every_module_is_in_the_mode_it_was_in_afterwards():
    """A frozen part that was put into evaluation mode stays in it, its dropout off."""
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)))
    model.train()
    model[1].eval()
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == [True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_made_in_parts_are_the_cross_entropy(dtype):
    logits = torch.randn(3, POSITIONS, 7).to(dtype)
    targets = torch.randint(7, (3, POSITIONS))
    wide = logits.double() if dtype is torch.float64 else logits.float()
    expected = F.cross_entropy(wide.transpose(1, 2), targets, reduction="none")
    losses = token_losses(logits, targets)
    assert losses.dtype == expected.dtype
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(-log_probs(logits).gather(-1, targets[..., None])[..., 0], expected)
    assert torch.equal(token_losses(logits.requires_grad_(), targets), losses)


def test_losses_of_the_next_token():
    model, ids = build(SIZE, "block", vocab_size=30, max_positions=16).eval(), torch.randint(30, (2, 9))
    with torch.no_grad():
        losses = next_token_losses(model, ids)
        assert losses.mean().item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
        assert next_token_losses(model, ids[:, :1]).shape == (2, 0)
