"""A training step asks its device for no number."""

import pytest
import torch

from attnres.models import build
from attnres.training.config import OptimConfig
from attnres.training.feed import Moment, Numbers, to_device
from attnres.training.objective import Objective
from attnres.training.optim import build_optimizers


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch's own: a prototype
def test_a_step_waits_for_no_number(cuda):
    """The loop's own parts in the order of the loop, with losses in parts; numbers and times are read at the end."""
    on = torch.device(cuda)
    size = {"family": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    model = build(
        {**size, "num_key_value_heads": 2, "intermediate_size": 96}, "block", vocab_size=512, max_positions=32
    ).to(on)
    optimizers = build_optimizers(model, OptimConfig(optimizer="muon"))
    objective = Objective(model, "chunked", lambda: torch.autocast(on.type, torch.bfloat16))
    x = torch.randint(512, (2, 33)).pin_memory()

    def step() -> tuple[Numbers, Moment, Moment]:
        began, ids = Moment.now(on), x.to(on, non_blocking=True)
        sums = objective(ids[:, :-1], ids[:, 1:])
        sums.objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        counts = to_device([1, 0], norm)
        numbers = Numbers(torch.cat([counts, norm[None], sums.cross_entropy[None]]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return numbers, began, Moment.now(on)

    step()  # kernels are compiled and memory is found
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers, began, ended = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    one, zero, norm, loss = numbers.read()
    assert (one, zero) == (1, 0) and norm > 0 and loss > 0 and 0 < began.seconds_until(ended) < 60
