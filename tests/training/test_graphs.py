"""Captured steps are the eager ones, on a CPU: a tape of operators stands for a CUDA graph."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lines import lines
from safetensors.torch import load_file
from tapes import Tape, in_place_of_graphs
from transformers import PreTrainedModel

from attnres.comparison.speed import StepOptions, step_times, training_steps
from attnres.head import LossSums
from attnres.ops import cpu
from attnres.residuals.mechanisms.standard import Standard
from attnres.training import TrainConfig, graphs, train
from attnres.training.layout import Layout
from attnres.training.objective import Objective
from attnres.training.parallel import Processes
from attnres.training.step import Update

Configure = Callable[..., TrainConfig]
EXPERTS = {
    "family": "deepseek_v3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
GPT2 = {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.3, "attn_pdrop": 0.3}


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    """Steps are captured on this CPU; gives the tapes. Reads are operators, which C kernels are not."""
    with cpu.switched(on=False):
        yield in_place_of_graphs(monkeypatch)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


def path_of(run: Path) -> str:
    return json.loads((run / "environment.json").read_text())["step"]


class Fading(Standard):
    """A mechanism of a user's, with a number that no graph reads again."""

    def set_progress(self, fraction: float) -> None:
        self.fraction = fraction


@pytest.mark.quick("full")
@pytest.mark.parametrize(
    ("model", "accumulation"),
    [
        ({"residual": "standard", "num_blocks": None, "size": GPT2}, 4),
        ({"size": GPT2}, 2),
        ({"residual": "full", "num_blocks": None}, 1),
        ({"residual": "adaptive", "num_blocks": None, "settings": {"target_count": 0, "target_weight": 3.0}}, 4),
    ],
    ids=["standard with dropout", "block with dropout", "full", "adaptive"],
)
def test_captured_steps_are_the_eager_steps_bit_for_bit(
    configure: Configure,
    tmp_path: Path,
    tapes: list[Tape],
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    accumulation: int,
) -> None:
    """Three warm up, two are replayed, one is recorded by depth and eager, three are replayed, the last is eager."""
    monkeypatch.setattr(graphs, "why_not_optimizer", lambda optimizer: "not here")
    how = {"model": model, "accumulation": accumulation, "steps": 10, "depth_every": 6, "log_every": 1, "val_every": 5}
    for out in ("eager", "captured"):
        train(configure(out=out, cuda_graphs=out == "captured", **how), progress=False)
    assert len(tapes) == min(accumulation, 3) and tapes[0].replays == 5 and len(tapes[0].calls) > 100
    assert sum(tape.replays for tape in tapes) == 5 * accumulation
    attentions = [(args, kwargs) for func, args, kwargs, _ in tapes[0].calls if "scaled_dot_product" in str(func)]
    # Without a mask of all pairs, which fused kernels of a GPU do not take; with dropout a CPU has no kernel.
    assert len(attentions) == (0 if model.get("size") == GPT2 else 4)
    assert all(kwargs.get("attn_mask") is None and any(arg is True for arg in args) for args, kwargs in attentions)
    assert lines(tmp_path / "captured") == lines(tmp_path / "eager") and len(losses(tmp_path / "eager")) == 12
    for file in ("model/model.safetensors", "checkpoint/optimizer.safetensors"):
        ours, theirs = (load_file(tmp_path / out / file) for out in ("captured", "eager"))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (path_of(tmp_path / "eager"), path_of(tmp_path / "captured")) == (
        "eager",
        "captured, optimizer eager: not here",
    )


@pytest.mark.long
@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_experts_are_balanced_after_captured_steps_as_after_eager_ones(
    configure: Configure, tmp_path: Path, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """A router's tokens are counted on the device, by what is replayed too."""
    monkeypatch.setattr(graphs, "why_not_optimizer", lambda optimizer: "not here")
    # the way of CUDA, grouped products, asks for their sizes on a CPU
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", lambda *_: "batched_mm")
    how = {"model": {"size": EXPERTS}, "optim": {"balance": rule}, "steps": 7, "log_every": 1, "accumulation": 2}
    for out in ("eager", "captured"):
        train(configure(out=out, cuda_graphs=out == "captured", **how), progress=False)
    assert len(tapes) == 2 and all(tape.replays for tape in tapes), path_of(tmp_path / "captured")
    # a gradient that experts add up in no fixed order has another last bit in the same step made again
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)
    ours, theirs = (
        [line["expert_load"] for line in lines(tmp_path / out) if line["kind"] == "train"]
        for out in ("captured", "eager")
    )
    assert ours == theirs and len({*ours}) > 1
    biases = [load_file(tmp_path / out / "model/model.safetensors") for out in ("captured", "eager")]
    name = next(name for name in biases[0] if name.endswith("e_score_correction_bias"))
    assert torch.allclose(biases[0][name], biases[1][name], atol=1e-6) and biases[0][name].any()


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizers_are_captured_with_rates_that_change(
    configure: Configure, tmp_path: Path, tapes: list[Tape], optimizer: str
) -> None:
    """A rate on the device is fp32: losses are equal to rounding."""
    how = {"optim": {"optimizer": optimizer, "warmup": 0.5, "lr": 0.02}, "steps": 10, "depth_every": 6, "log_every": 1}
    for out in ("eager", "captured"):
        train(configure(out=out, cuda_graphs=out == "captured", **how), progress=False)
    assert [tape.replays for tape in tapes] == [5] * (2 + (optimizer == "muon"))
    assert losses(tmp_path / "captured") == pytest.approx(losses(tmp_path / "eager"), rel=1e-6)
    assert losses(tmp_path / "captured")[-1] < losses(tmp_path / "captured")[0] - 0.1
    assert path_of(tmp_path / "captured") == "captured"
    rates = [line["lr"] for line in lines(tmp_path / "captured") if "lr" in line]
    assert len(set(rates)) == 10


def test_what_cannot_be_captured_is_said_in_a_sentence() -> None:
    """Before anything is tried."""
    on = torch.device("cuda")
    assert graphs.why_not(on, None) is graphs.why_not(on, Standard(4, 8)) is None
    assert "runs on cpu" in (graphs.why_not(torch.device("cpu"), None) or "")
    assert "4 processes" in (graphs.why_not(on, None, processes=4) or "")
    assert "Fading.set_progress" in (graphs.why_not(on, Fading(4, 8)) or "")


def test_a_layout_of_several_processes_takes_eager_steps_and_says_so() -> None:
    """A stage of a pipeline too, which has no objective of its own."""
    model = torch.nn.Linear(2, 2)
    who = Processes(1, 4, torch.device("cuda"))
    staged: Any = SimpleNamespace(
        model=model, who=who, objective=None, layout=Layout(who), clip=max, named_parameters=model.named_parameters
    )
    assert Update(staged, [], 1.0, lambda: None, capture=True).path.startswith("eager: a step of 4 processes")


@pytest.mark.long
def test_on_a_cpu_steps_are_eager_and_the_run_says_why(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(configure(out="eager", steps=2), progress=False)
    train(configure(out="asked", steps=2, cuda_graphs=True), progress=True)
    assert losses(tmp_path / "asked") == losses(tmp_path / "eager")
    assert path_of(tmp_path / "asked").startswith("eager: ") and "cpu" in path_of(tmp_path / "asked")
    assert path_of(tmp_path / "asked") in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (RuntimeError("not permitted: cudaMalloc"), "cudaMalloc"),
    ],
)
def test_a_run_whose_capture_fails_goes_on_eagerly(
    configure: Configure,
    tmp_path: Path,
    tapes: list[Tape],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
) -> None:
    """In the second of two graphs, whose failure the driver reports in another error."""

    def fail(function: Callable[[], Any], pool: Any = None) -> Tape:
        if pool is None:
            return Tape(function)
        try:
            raise error
        finally:
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(graphs, "Graph", fail)
    for out in ("eager", "captured"):
        train(configure(out=out, cuda_graphs=out == "captured", accumulation=2), progress=False)
    assert len(tapes) == 1 and not tapes[0].replays
    assert lines(tmp_path / "captured") == lines(tmp_path / "eager")
    assert path_of(tmp_path / "captured").startswith("eager: ") and said in path_of(tmp_path / "captured")


@pytest.mark.quick("local_scalar")
@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda loss: loss.item(), "local_scalar"),
        (lambda loss: loss[None].tolist(), "tolist"),
        (lambda loss: loss.detach().cpu(), "cpu copies"),
        (lambda loss: loss[None][loss[None] > 0], "aten.index"),
        (lambda loss: torch.tensor([2.0], device=loss.device) * loss, "tensor copies"),
    ],
    ids=["local_scalar", "tolist", "cpu", "mask", "tensor"],
)
def test_a_step_that_asks_for_a_number_is_no_captured_step(
    configure: Configure,
    tmp_path: Path,
    tapes: list[Tape],
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[torch.Tensor], Any],
    said: str,
) -> None:
    forward = Objective.forward

    def asking(self: Objective, *batch: Any, **how: Any) -> LossSums:
        sums = forward(self, *batch, **how)
        if not how.get("held_out"):
            ask(sums.cross_entropy)
        return sums

    monkeypatch.setattr(Objective, "forward", asking)
    train(configure(out="asking", cuda_graphs=True), progress=False)
    assert not tapes and said in path_of(tmp_path / "asking")


def test_each_shape_is_captured_up_to_a_number_of_shapes(tapes: list[Tape]) -> None:
    size = {**GPT2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    how: dict[str, Any] = {"size": size, "vocab_size": 32, "seq_len": 12, "batch_size": 2}
    captured, eager = (
        training_steps({"block": ("block", {"num_blocks": 2})}, StepOptions(**how, cuda_graphs=on))["block"]
        for on in (True, False)
    )
    tokens = torch.cat([eager.x, eager.y[:, -1:]], 1)
    lengths = [12, 8] * 5 + [7, 6, 12, 5, 8, 12]  # of which 5 is one too many
    for length in lengths:
        for step in (captured, eager):
            step.x, step.y = tokens[:, :length], tokens[:, 1 : length + 1]
        torch.testing.assert_close(captured(), eager(), rtol=1e-5, atol=0)
    assert [tape.replays for tape in tapes] == [3, 3, 2, 2]  # passes and optimizer of either length
    assert f"more than {graphs.MOST_SHAPES} shapes, the last (2, 5)" in captured.path


def test_a_captured_pass_sees_the_strides_of_eager_ones(tapes: list[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    """For others a compiled model would be compiled anew, in the middle of a capture."""
    seen, sums = [], Objective._sums

    def noted(self: Objective, x: torch.Tensor, y: torch.Tensor) -> Any:
        seen.append((x.stride(), y.stride()))
        return sums(self, x, y)

    monkeypatch.setattr(Objective, "_sums", noted)
    options = StepOptions({**GPT2, "resid_pdrop": 0.0}, vocab_size=32, seq_len=8, batch_size=2, cuda_graphs=True)
    step = training_steps({"full": ("full", {})}, options)["full"]
    for _ in range(graphs.WARM_UP + 2):
        step()
    assert len(tapes) == 2 and set(seen) == {((9, 1), (9, 1))}


def test_steps_are_timed_captured_the_plain_model_too(tapes: list[Tape]) -> None:
    variants = {"plain": (None, {}), "full": ("full", {})}
    options = StepOptions({**GPT2, "resid_pdrop": 0.0}, vocab_size=32, seq_len=8, batch_size=2, cuda_graphs=True)
    rows = step_times(variants, options, rounds=3)["variants"]
    assert [row["step"] for row in rows.values()] == ["captured", "captured"]
    assert len(tapes) == 4 and all(len(row["times"]) == 3 for row in rows.values())
