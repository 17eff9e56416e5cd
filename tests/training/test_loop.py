"""A run writes what it promises, continues bit for bit, and stops cleanly for every reason there is to stop."""

import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from lines import CLOCK, lines
from safetensors.torch import load_file
from tiny import K3, NARROW
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnres import head
from attnres.comparison.speed import StepOptions, training_steps
from attnres.data import Batches, held_out_windows, open_tokens
from attnres.errors import Interrupted, UserError
from attnres.files import locked, write_json
from attnres.flags import config_file
from attnres.head import LossSums
from attnres.models import build, load
from attnres.models.model_files import snapshots
from attnres.residuals import Residual, settings_of
from attnres.residuals.check.interface import TAKEN
from attnres.scale.shard import shard
from attnres.training import TrainConfig, checkpoint, environment, from_dict, loop, to_dict, train, validate
from attnres.training.data import prepare_from
from attnres.training.inspection import magnitudes
from attnres.training.interrupt import Signals
from attnres.training.objective import Objective, loss_kind
from attnres.training.parallel import Processes
from attnres.training.prepare import prepare_run
from attnres.training.records import Metrics, read_metrics
from attnres.training.run import Run
from lab.branch import branch
from lab.design import branch_step

Configure = Callable[..., TrainConfig]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Parameters, optimizer state, metrics and held-out losses are equal bit for bit."""
    for name in ("checkpoint/model/model.safetensors", "checkpoint/optimizer.safetensors", "model/model.safetensors"):
        left, right = load_file(ours / name), load_file(theirs / name)
        assert list(left) == list(right)
        assert all(torch.equal(left[key], right[key]) for key in left), name
    assert lines(ours) == lines(theirs)
    states = [json.loads((run / "checkpoint" / "state.json").read_text()) for run in (ours, theirs)]
    assert states[0]["random"] == states[1]["random"] and states[0]["checksums"] == states[1]["checksums"]
    assert sorted(p.name for p in (ours / "val").iterdir()) == sorted(p.name for p in (theirs / "val").iterdir())
    for path in (ours / "val").iterdir():
        assert np.array_equal(np.load(path), np.load(theirs / "val" / path.name))
    learned = [{path.name: path.read_bytes() for path in (run / "residual").glob("*")} for run in (ours, theirs)]
    assert learned[0] == learned[1]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send this process a signal during the given step."""
    forward, count = Objective.forward, 0

    def with_signal(self: Objective, *batch: Any, **how: Any) -> LossSums:
        nonlocal count
        count += 1
        if count == step:
            signal.raise_signal(number)
        return forward(self, *batch, **how)

    monkeypatch.setattr(Objective, "forward", with_signal)


def spoil(monkeypatch: pytest.MonkeyPatch, value: float, step: int) -> None:
    """Make the loss of a step something else."""
    forward, count = Objective.forward, 0

    def broken(self: Objective, *batch: Any, **how: Any) -> LossSums:
        nonlocal count
        count += 1
        return LossSums(*(one * (value if count == step else 1) for one in forward(self, *batch, **how)))

    monkeypatch.setattr(Objective, "forward", broken)


# ------------------------------------------------------------------ what a run writes


def test_a_run_leaves_what_was_promised(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    summary = train(config, progress=False)
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert set(summary) == {
        *("step", "tokens", "val_loss", "val_se", "perplexity", "train_loss", "tokens_per_s", "step_s"),
        *("flops_per_token", "peak_flops", "last_three", "final_loss", "final_se", "final_windows", "in_context"),
        *("peak_memory_bytes", "parameters", "extra_parameters", "wall_s", "windows", "traits"),
    }
    assert (summary["step"], summary["tokens"], summary["windows"]) == (8, 8 * 4 * 16, 6)
    assert summary["perplexity"] == pytest.approx(math.exp(summary["val_loss"]))

    lines = read_metrics(run / "metrics.jsonl")
    steps = {kind: [line["step"] for line in lines if line["kind"] == kind] for kind in ("train", "val", "depth")}
    assert steps == {"train": [2, 4, 6, 8], "val": [4, 8], "depth": [4, 8]}
    train_line, val_line = lines[0], next(line for line in lines if line["kind"] == "val")
    assert list(train_line) == ["kind", "step", "tokens", "loss", "lr", "grad_norm", *CLOCK]
    assert train_line["flops_per_s"] == pytest.approx(summary["flops_per_token"] * train_line["tokens_per_s"])
    assert summary["peak_flops"] is None  # of this processor
    losses = np.load(run / "val" / "000004.npy")
    assert losses.dtype == np.float64 and losses.shape == (6,)
    assert val_line["loss"] == losses.mean() and val_line["se"] == pytest.approx(losses.std(ddof=1) / math.sqrt(6))

    written = json.loads((run / "config.json").read_text())
    assert written["model"]["residual"] == "block" and written["model"]["settings"] == {
        **settings_of("block"),
        "num_blocks": 2,
    }
    assert (written["seed"], written["name"], written["dtype"]) == (0, "block-seed0", "fp32")
    environment = json.loads((run / "environment.json").read_text())
    assert {"python", "torch", "transformers", "attnres", "device", "cpu", "threads", "dtype", "date"} <= set(
        environment
    )

    model = load(run / "model")
    kept = snapshots(run)
    assert list(kept) == [0, 4, 8] and not load_file(kept[0])["query"].any()
    assert torch.equal(load_file(kept[8])["query"], model.residual.query)
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert summary["extra_parameters"] == sum(p.numel() for p in model.get_submodule("residual").parameters())
    assert (run / "model" / "tokenizer.json").exists() and (run / "inspection.json").exists()
    assert [path.name for path in run.rglob(".*")] == []
    data = json.loads((run / "data.json").read_text())
    assert list(data) == ["tokenizer_sha256", "vocab_size", "splits", "windows_sha256"]
    assert data["splits"]["train"]["tokens"] > data["splits"]["val"]["tokens"] > 0


def test_depth_has_a_value_a_sublayer(configure: Configure, tmp_path: Path) -> None:
    train(configure(steps=4, accumulation=2), progress=False)
    (depth,) = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "depth"]
    assert [len(depth[name]) for name in ("output_rms", "input_rms", "grad_rms")] == [4, 5, 4]
    assert all(value > 0 for name in ("output_rms", "input_rms", "grad_rms") for value in depth[name])
    routing = json.loads((tmp_path / "run" / "inspection.json").read_text())["routing"]
    assert len(routing["weights"]) == len(routing["sources"]) == len(routing["reads"]) == 5
    assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in routing["weights"])


def test_depth_says_how_reads_choose_where_there_are_reads(configure: Configure, tmp_path: Path) -> None:
    settings = {"residual": "block", "settings": {"num_blocks": 2, "gate": "scalar"}}
    config = configure(out=tmp_path / "run", steps=4, depth_every=4)
    config.model.residual, config.model.settings = settings["residual"], settings["settings"]
    train(config, progress=False)
    (depth,) = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "depth"]
    assert [len(depth[name]) for name in ("entropy", "sharpness", "gate")] == [5, 5, 5]
    assert set(depth) == {*TAKEN, "gate"}, "names that attnres check keeps learned tables from"
    assert depth["entropy"][0] == 0 and all(0 < value <= 1.2 for value in depth["entropy"][1:])


def test_what_a_read_does_not_show_is_no_number_of_a_line(configure: Configure, tmp_path: Path) -> None:
    """A read without weights has no entropy."""
    model = build(configure().model.size, "block", vocab_size=16, max_positions=8, settings={"num_blocks": 2})
    trace = SimpleNamespace(output_rms=[1.0], input_rms=[1.0], grad_rms=[math.inf], entropy=[0.5, math.nan])
    metrics = Metrics(tmp_path)
    metrics.write("depth", 1, **magnitudes(trace, model, 2))
    metrics.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["entropy"], line["grad_rms"]) == ([0.5, None], [None])


@pytest.mark.long
def test_measuring_depth_changes_no_number(configure: Configure, tmp_path: Path) -> None:
    for out, every in (("with", 1), ("without", 0)):
        train(configure(out=out, depth_every=every), progress=False)
    kept = [line for line in lines(tmp_path / "with") if line["kind"] != "depth"]
    assert kept == lines(tmp_path / "without")


@pytest.mark.quick("rescaled", "hyper_connections")
@pytest.mark.parametrize("residual", ["standard", "rescaled", "full", "deepnorm", "hyper_connections", "denseformer"])
def test_every_residual_trains(configure: Configure, tmp_path: Path, residual: str) -> None:
    config = configure(steps=2, val_every=2)
    config.model.residual, config.model.num_blocks = residual, None
    train(config, progress=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2


def test_the_loss_falls(configure: Configure, tmp_path: Path) -> None:
    train(configure(steps=60, optim={"lr": 0.02}), progress=False)
    losses = [line["loss"] for line in lines(tmp_path / "run") if line["kind"] == "train"]
    assert losses[0] > 5 and losses[-1] < losses[0] - 1


def test_muon_bf16_and_wsd_train(configure: Configure, tmp_path: Path) -> None:
    train(configure(optim={"optimizer": "muon", "schedule": "wsd"}, dtype="bf16"), progress=False)
    tensors = load_file(tmp_path / "run" / "checkpoint" / "optimizer.safetensors")
    entries = {name.split("::")[1] for name in tensors}
    assert entries == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert all(parameter.dtype == torch.float32 for parameter in load(tmp_path / "run" / "model").parameters())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_run_is_the_same_to_rounding(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Inductor's C++ takes half a minute to build."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    size = {**NARROW, "num_hidden_layers": 1}
    for out, compiled in (("eager", False), ("compiled", True)):
        train(configure(out=out, compile=compiled, model={"size": size}), progress=False)
    losses = [[line.get("loss", 0.0) for line in lines(tmp_path / out)] for out in ("eager", "compiled")]
    assert len(losses[0]) == 8 and losses[1] == pytest.approx(losses[0], rel=1e-4)


# ------------------------------------------------------------------ what a step computes


def first_step(config: TrainConfig) -> tuple[float, float]:
    run = Run(prepare_run(config), Processes(0, 1, torch.device("cpu")), progress=False)
    run.step(Signals())
    run.close()
    return run.steps.loss, run.steps.norm


def test_a_step_is_the_mean_over_all_tokens(configure: Configure, corpus: Path) -> None:
    config = configure(optim={"clip": 0.0})
    model = build(
        size=config.model.size, residual="block", vocab_size=280, max_positions=16, settings={"num_blocks": 2}
    )
    tokens = open_tokens(corpus)
    x, y = Batches(tokens, seq_len=16, batch_size=4, seed=0).at(0)
    loss = torch.nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert first_step(config) == pytest.approx((loss.item(), norm.item()), rel=1e-5)


@pytest.mark.quick("2")
@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_is_the_same_mean(configure: Configure, accumulation: int) -> None:
    one = first_step(configure(out="a"))
    assert first_step(configure(out="b", accumulation=accumulation)) == pytest.approx(one, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_large_vocabulary_gets_its_losses_in_parts(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The losses of a run are those of all logits at once, held-out ones too; its record says how they were made."""
    train(configure(out="whole", dtype=dtype, accumulation=2), progress=False)
    monkeypatch.setattr(head, "PART", 5 * 280)
    train(configure(out="parts", dtype=dtype, accumulation=2), progress=False)
    losses = [[line["loss"] for line in lines(tmp_path / out) if "loss" in line] for out in ("whole", "parts")]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "fp32" else 1e-3)
    said = [json.loads((tmp_path / out / "environment.json").read_text())["loss"] for out in ("whole", "parts")]
    assert said == ["whole", "chunked"]


@pytest.mark.long
def test_a_stream_in_bf16_is_in_bf16_from_the_embedding_on(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where FSDP2 gathers: the root's parameters with the layers'; and with parameters in bf16. Losses stay near
    those of a stream in fp32."""
    dtypes: list[torch.dtype] = []
    original = Residual.normed

    def normed(self: Residual, h: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        dtypes.append(h.dtype)
        return original(self, h, *rest, **how)

    monkeypatch.setattr(Residual, "normed", normed)
    losses, model = {}, {"residual": "standard", "num_blocks": None}
    for stream in ("fp32", "bf16"):
        dtypes.clear()
        train(configure(out=stream, dtype="bf16", stream_dtype=stream, model=model), progress=False)
        metrics = read_metrics(tmp_path / stream / "metrics.jsonl")
        losses[stream] = [line["loss"] for line in metrics if line["kind"] == "train"]
        assert set(dtypes) == {torch.bfloat16 if stream == "bf16" else torch.float32}
    assert losses["bf16"] != losses["fp32"] and losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)

    dtypes.clear()
    options = StepOptions(NARROW, vocab_size=32, seq_len=8, batch_size=2, dtype="bf16-parameters")
    training_steps({"standard": ("standard", {})}, options)["standard"]()
    assert set(dtypes) == {torch.bfloat16}

    made = build(NARROW, vocab_size=32, max_positions=16)
    for stream in (None, torch.bfloat16):
        made.residual.stream_dtype = stream
        policies: dict[Any, Any] = {}

        def take(module: Any, mp_policy: Any = None, policies: dict[Any, Any] = policies, **how: Any) -> None:
            policies[module] = mp_policy

        monkeypatch.setattr("attnres.scale.shard.fully_shard", take)
        shard(made, made, cast(Any, None), dtype=torch.bfloat16)
        root = policies.pop(made)
        assert {policy.param_dtype for policy in policies.values()} == {torch.bfloat16}
        assert root is None if stream is None else root.param_dtype is torch.bfloat16


@pytest.mark.parametrize(("dtype", "shard", "stream"), [("bf16", 2, "bf16"), ("fp32", 2, "fp32"), ("bf16", 1, "fp32")])
def test_a_stream_is_bf16_by_itself_where_parameters_are_gathered_in_bf16(
    configure: Configure, dtype: Literal["fp32", "bf16"], shard: int, stream: str
) -> None:
    assert loop.stream_dtype(configure(stream_dtype="auto", parallel={"shard": shard}), dtype) == stream


def test_a_stream_narrower_than_products_is_refused(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"stream_dtype is bf16 and dtype fp32"):
        train(configure(stream_dtype="bf16"), progress=False)


def test_a_loss_that_cannot_be_made_so_is_refused(configure: Configure) -> None:
    model = build(configure().model.size, "block", vocab_size=16, max_positions=8)
    assert loss_kind("auto", model, 2 * head.PART // 16) == "whole"
    assert loss_kind("auto", model, 2 * head.PART // 16 + 1) == "chunked"
    model.lm_head = torch.nn.Sequential(model.lm_head)
    model.lm_head.weight = model.lm_head[0].weight
    assert loss_kind("auto", model, 2 * head.PART) == "whole"
    with pytest.raises(UserError, match="does more than attnres knows of: choose whole"):
        loss_kind("chunked", model, 1)


@pytest.mark.quick("reads")
@pytest.mark.parametrize("how", ["layer", "sublayer", "reads"])
def test_checkpointing_changes_no_number(configure: Configure, tmp_path: Path, how: Any) -> None:
    for out, kept in (("kept", "none"), ("remade", how)):
        train(configure(out=out, steps=4, gradient_checkpointing=kept), progress=False)
    losses = [[line.get("loss", 0.0) for line in lines(tmp_path / out)] for out in ("kept", "remade")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    summary = train(configure(out="remade", resume=True, steps=4), progress=False)  # which may be changed underway
    assert summary["step"] == 4


def read_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs read a step's numbers while the next one runs, as they do on CUDA."""
    init = Run.__init__

    def behind(self: Run, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        self.steps.arriving.behind = 1

    monkeypatch.setattr(Run, "__init__", behind)


@pytest.mark.long
def test_numbers_read_a_step_behind_are_the_same(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(configure(out="at-once", log_every=3), progress=False)
    read_behind(monkeypatch)
    train(configure(out="behind", log_every=3), progress=False)
    assert_same_run(tmp_path / "behind", tmp_path / "at-once")
    spoil(monkeypatch, math.nan, step=5)
    with pytest.raises(UserError, match=r"step 5: the loss is nan .*checkpoint of step 4 is kept"):
        train(configure(out="broken", log_every=8), progress=False)


def test_a_step_waits_for_no_number(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    read_behind(monkeypatch)
    config = configure(optim={"optimizer": "muon"}, accumulation=2)
    run = Run(prepare_run(config), Processes(0, 1, torch.device("cpu")), progress=False)
    run.step(Signals())
    calls = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Asked():
        run.step(Signals())
    run.close()
    assert len(calls) > 500
    assert not [name for name in calls if any(word in name for word in ("local_scalar", "nonzero", "is_all", "equal"))]


GATED = {"residual": "adaptive", "num_blocks": None, "settings": {"target_count": 0, "target_weight": 30.0}}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_penalty_is_minimised_once_and_no_part_of_the_loss(
    configure: Configure, corpus: Path, accumulation: int
) -> None:
    config = configure(model=GATED, optim={"clip": 0.0}, accumulation=accumulation)
    settings = config.model.settings
    model = build(config.model.size, "adaptive", vocab_size=280, max_positions=16, settings=settings)
    model.residual("set_progress", 1 / 8)
    x, y = Batches(open_tokens(corpus), seq_len=16, batch_size=4, seed=0).at(0)
    loss = torch.nn.functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())
    loss.backward()
    gate = torch.sigmoid(model.residual.logit / 5)  # of the one gate between two layers, not annealed yet
    (30 * gate.sum() ** 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert first_step(config) == pytest.approx((loss.item(), norm.item()), rel=1e-5)


@pytest.mark.long
def test_reported_losses_are_without_the_penalty(configure: Configure, tmp_path: Path) -> None:
    config = configure(model=GATED, steps=4)
    summary = train(config, progress=False)
    run = Run(prepare_run(configure(out="other")), Processes(0, 1, torch.device("cpu")), progress=False)
    run.close()
    model = load(tmp_path / "run" / "model").eval()
    assert model.residual.progress.item() == 1.0  # it evaluates as it did at its last step
    with torch.no_grad():
        logits = model(input_ids=run.windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), run.windows[:, 1:].flatten())
    assert summary["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    penalties = [line["penalty"] for line in metrics if line["kind"] == "train"]
    assert penalties[0] == pytest.approx(30 / (1 + math.exp(2 / 2.06)) ** 2, rel=0.02)  # t at half of the training
    assert all(line["loss"] < 6 for line in metrics if "loss" in line)
    (depth,) = [line for line in metrics if line["kind"] == "depth"]
    gate = 1 / (1 + math.exp(-model.residual.logit.item() / 0.1))
    assert (depth["temperature"], depth["boundaries"]) == (pytest.approx(0.1), sum(depth["gates"]))
    assert gate == pytest.approx(depth["gates"][0], abs=0.2) and len(depth["gates"]) == 1


def test_queries_are_zero_after_build(configure: Configure) -> None:
    run = Run(prepare_run(configure()), Processes(0, 1, torch.device("cpu")), progress=False)
    run.close()
    queries = [p for name, p in run.model.residual.named_parameters() if "quer" in name]
    assert queries and all(not query.any() for query in queries)


@pytest.mark.long
def test_variants_share_their_first_weights_and_batches(configure: Configure, tmp_path: Path) -> None:
    weights = []
    for residual in ("standard", "full"):
        config = configure(out=residual)
        config.model.residual, config.model.num_blocks = residual, None
        run = Run(prepare_run(config), Processes(0, 1, torch.device("cpu")), progress=False)
        run.close()
        names = {n: p.detach() for n, p in run.model.named_parameters() if "residual." not in n}
        weights.append((names, run.batches.at(3)[0], run.windows))
    (left, x, windows), (right, x2, windows2) = weights
    assert list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(x, x2) and torch.equal(windows, windows2)


# ------------------------------------------------------------------ going on


MUDDFORMER = {"residual": "muddformer", "num_blocks": None, "settings": {"value_residual": "head"}}
KIMI = {"size": "kimi-nano", "num_blocks": None, "block_size": 6}
KIMI_K3 = {"size": K3, "num_blocks": None, "block_size": 4}


@pytest.mark.quick("adamw")
@pytest.mark.parametrize(
    ("number", "extra"),
    [
        (signal.SIGINT, {}),
        (signal.SIGTERM, {}),
        (signal.SIGTERM, {"optim": {"optimizer": "muon"}, "dtype": "bf16"}),
        (signal.SIGTERM, {"model": {"residual": "adaptive", "num_blocks": None}}),
        (signal.SIGTERM, {"model": MUDDFORMER}),
        (signal.SIGTERM, {"model": KIMI, "optim": {"balance": "quantile", "optimizer": "muon"}}),
        (signal.SIGTERM, {"model": KIMI_K3, "optim": {"balance": "sign", "optimizer": "muon"}, "dtype": "bf16"}),
    ],
    ids=["SIGINT", "adamw", "muon-bf16", "annealed", "values", "kimi", "kimi-k3"],
)
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, extra: dict[str, Any]
) -> None:
    train(configure(out="whole", **extra), progress=False)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, number)
        with pytest.raises(Interrupted, match=r"stopped at step 3 of 8, saved in .* with --resume") as caught:
            train(configure(out="parts", **extra), progress=False)
    assert caught.value.code == 128 + number and signal.getsignal(number) == before
    assert not (tmp_path / "parts" / "summary.json").exists()
    summary = train(configure(out="parts", resume=True, **extra), progress=False)
    assert summary["val_loss"] == json.loads((tmp_path / "whole" / "summary.json").read_text())["val_loss"]
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.long
def test_a_finished_run_that_is_interrupted_while_it_writes_its_model_stops_at_once(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a worker of the tests has not
    try:
        with monkeypatch.context() as patch:
            patch.setattr("attnres.training.loop.write_inspection", lambda *_, **__: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                train(configure(), progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert train(configure(resume=True), progress=False)["step"] == 8


@pytest.mark.long
def test_more_micro_batches_go_on_with_the_same_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has as many tokens as before, of whose losses it is the mean."""
    train(configure(out="whole"), progress=False)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        with pytest.raises(Interrupted):
            train(configure(out="parts"), progress=False)
    train(configure(out="parts", accumulation=2, resume=True), progress=False)
    ours, theirs = ([line for line in lines(tmp_path / out) if "loss" in line] for out in ("parts", "whole"))
    assert [line.get("tokens") for line in ours] == [line.get("tokens") for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)


@pytest.mark.long
def test_a_run_killed_without_warning_goes_on_bit_for_bit(configure: Configure, tmp_path: Path) -> None:
    train(configure(out="whole"), progress=False)
    config = configure(out="parts")
    script = (
        "import json, os, signal, sys\n"
        "from attnres.training import from_dict, train\n"
        "from attnres.training.run import Run\n"
        "measure = Run.measure\n"
        "def kill(run):\n"
        "    measure(run)\n"
        "    if run.run_state.step == 7:\n"
        '        run.output.metrics.file.write(\'{"kind": "tr\')\n'
        "        run.output.metrics.file.flush()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "Run.measure = kill\n"
        "train(from_dict(json.loads(sys.argv[1])), progress=False)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, json.dumps(to_dict(config))], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "parts" / "metrics.jsonl").read_text().endswith('"tr')  # past step 4, the last checkpoint
    config.resume = True
    train(config, progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.long
def test_a_run_that_never_saved_starts_again(configure: Configure, tmp_path: Path) -> None:
    train(configure(out="whole"), progress=False)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoint")
    (tmp_path / "parts" / "summary.json").unlink()
    train(configure(out="parts", resume=True), progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.long
def test_a_run_killed_before_its_summary_only_finishes(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = train(configure(), progress=False)
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    monkeypatch.setattr(Run, "step", None)
    resumed = train(configure(resume=True), progress=False)
    assert {**resumed, "peak_memory_bytes": 0} == {**summary, "peak_memory_bytes": 0}


def test_a_finished_run_is_not_run_again(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = train(configure(), progress=False)
    monkeypatch.setattr(loop, "Run", None)
    assert train(configure(resume=True), progress=False) == summary
    with pytest.raises(UserError, match="holds a finished run: choose another --out"):
        train(configure(), progress=False)
    with pytest.raises(UserError, match="seed is 1 here, 0 there"):
        train(configure(resume=True, seed=1), progress=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_something_else_is_left_alone(configure: Configure, tmp_path: Path, resume: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and holds other files"):
        train(configure(resume=resume), progress=False)
    assert os.listdir(tmp_path / "run") == ["thesis.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        train(configure(out="file", resume=resume), progress=False)


def test_an_unfinished_run_needs_resume(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            train(configure(), progress=False)
    with pytest.raises(UserError, match="holds an unfinished run: continue it with --resume"):
        train(configure(), progress=False)


def test_a_wrong_configuration_writes_nothing(configure: Configure, tmp_path: Path) -> None:
    for values in ({"steps": 0}, {"model": {"num_blocks": 400}}, {"data": {"seq_len": 10**6}}):
        with pytest.raises(UserError):
            train(configure(**values), progress=False)
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_work_in_one_folder(configure: Configure, tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(UserError, match="another process is working in"):
        train(configure(), progress=False)
    assert not (tmp_path / "run").exists()
    train(configure(steps=2), progress=False)


@pytest.mark.long
def test_other_data_than_the_run_began_with_is_refused(configure: Configure, tmp_path: Path) -> None:
    train(configure(steps=2), progress=False)
    for name in ("summary.json", "checkpoint"):
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    record = json.loads((tmp_path / "run" / "data.json").read_text())
    (tmp_path / "run" / "data.json").write_text(json.dumps({**record, "windows_sha256": "0"}))
    with pytest.raises(UserError, match="was trained on other data: the text or the tokenizer"):
        train(configure(steps=2, resume=True), progress=False)
    (tmp_path / "run" / "data.json").unlink()  # as of an earlier version
    train(configure(steps=2, resume=True), progress=False)
    assert json.loads((tmp_path / "run" / "data.json").read_text()) == record


@pytest.mark.long
def test_peak_memory_is_of_all_sessions(configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnres.training.environment.peak_memory", lambda _: 2_000)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        with pytest.raises(Interrupted):
            train(configure(), progress=False)
    monkeypatch.setattr("attnres.training.environment.peak_memory", lambda _: 1_000)
    assert train(configure(resume=True), progress=False)["peak_memory_bytes"] == 2_000


def test_one_held_out_window_has_no_known_error(configure: Configure, tmp_path: Path) -> None:
    summary = train(configure(steps=2, data={"val_windows": 1}), progress=False)
    assert summary["windows"] == 1 and summary["val_se"] is None
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["se"] is None


def test_more_processes_than_held_out_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "sum", lambda self, values: values)
    model, windows = build("nano", "block", vocab_size=16, max_positions=8), torch.zeros(2, 9, dtype=torch.int64)
    for rank, measured in ((1, 1), (2, 0), (3, 0)):
        who = Processes(rank, 4, torch.device("cpu"))
        losses = validate.window_losses(model, windows, who, nullcontext, batch=4)
        assert losses.shape == (2, 2) and np.count_nonzero(losses.any(1)) == measured


def test_the_end_is_measured_on_more_windows_and_over_three_validations(configure: Configure, tmp_path: Path) -> None:
    """The summary's figures against the model's own losses, token by token."""
    config = configure(steps=8, val_every=2, data={"val_windows": 3})
    summary = train(config, progress=False)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "val"]
    assert len(losses) == 4 and summary["last_three"] == pytest.approx(np.mean(losses[1:]))
    windows = held_out_windows(prepare_from(config.data, progress=False).tokens("val"), config.data.seq_len, 12)
    stored = validate.read_windows(tmp_path / "run" / "val" / "final.npy")
    assert len(stored) == summary["final_windows"] == len(windows) > 3
    model = load(tmp_path / "run" / "model")
    with torch.no_grad():
        logits = model.eval()(input_ids=windows[:, :-1]).logits.double()
    tokens = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").numpy()
    np.testing.assert_allclose(stored, tokens.mean(1), rtol=1e-4)
    late, early = 250 * tokens.shape[1] // 256, 50 * tokens.shape[1] // 256
    assert summary["in_context"] == pytest.approx(tokens[:, late].mean() - tokens[:, early].mean(), abs=1e-3)


# ------------------------------------------------------------------ when it goes wrong


@pytest.mark.quick("nan")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    spoil(monkeypatch, value, step=6)
    with pytest.raises(
        UserError, match=r"step 6: the loss is (nan|inf) .*checkpoint of step 4 is kept.*try a lower"
    ) as e:
        train(configure(), progress=False)
    assert "optim.warmup" in str(e.value)
    state = json.loads((tmp_path / "run" / "checkpoint" / "state.json").read_text())
    assert state["step"] == 4
    monkeypatch.undo()
    assert train(configure(resume=True), progress=False)["step"] == 8


def test_a_learning_rate_far_too_high_is_named(configure: Configure) -> None:
    config = configure(optim={"lr": 1e30, "clip": 0.0, "warmup": 0.0}, steps=40)
    with pytest.raises(UserError, match="the training has diverged"):
        train(config, progress=False)


def test_cuda_where_there_is_none_is_refused(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="use --device cpu"):
        train(configure(device="cuda"), progress=False)


def test_a_file_gives_the_nested_fields_of_a_model(configure: Configure, tmp_path: Path) -> None:
    nested = "rope_parameters: {rope_type: default, rope_theta: 5e4}, layer_types: [sliding_attention, full_attention]"
    size = ", ".join(f"{name}: {json.dumps(value)}" for name, value in configure().model.size.items())
    (tmp_path / "a.yaml").write_text(f"model: {{size: {{{size}, {nested}, use_sliding_window: true}}}}\n")
    config = from_dict(config_file(["--config", str(tmp_path / "a.yaml")])[0], configure())
    train(config, progress=False)
    model = load(tmp_path / "run" / "model")
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert model.config.rope_parameters["rope_theta"] == 5e4
    assert train(dataclasses.replace(config, resume=True), progress=False)["step"] == 8  # the size is what it was


def test_plain_lines_where_there_is_no_terminal(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    train(configure())
    output = capsys.readouterr().err
    assert "block-seed0  step 8/8  loss" in output and "tokens/s" in output and "\x1b" not in output


@pytest.mark.long
def test_a_run_in_bf16_that_is_emulated_says_so(
    configure: Configure, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "has_bf16", lambda _: False)
    train(configure(dtype="bf16", steps=1))
    assert capsys.readouterr().err.count("block-seed0: bf16 is emulated here") == 1
    train(configure("other", dtype="auto", steps=1))
    assert "emulated" not in capsys.readouterr().err


# ------------------------------------------------------------------ branches


def wsd(steps: int, **values: Any) -> dict[str, Any]:
    """Two steps of warm-up and a decay over the last quarter."""
    return {"steps": steps, "optim": {"schedule": "wsd", "warmup": 2 / steps, "decay": 0.25, "lr": 0.01}, **values}


def keep_state(trunk: Path, config: TrainConfig) -> None:
    """What a run that kept its checkpoint of step 6 says of itself."""
    state = {
        "step": 6,
        "config": to_dict(prepare_run(config).config),
        "data": {},
        "random": [],
        "progress": {},
        "checksums": {},
    }
    checkpoint.kept(trunk, 6).mkdir(parents=True)
    write_json(checkpoint.kept(trunk, 6) / "state.json", {"format": checkpoint.FORMAT, **state})


@pytest.mark.long
def test_a_branch_ends_as_the_whole_run_does(configure: Configure, tmp_path: Path) -> None:
    train(configure("trunk", **wsd(16, keep_at=(6,))), progress=False)
    whole, short = configure("whole", **wsd(8)), prepare_run(configure("short", **wsd(8, resume=True))).config
    train(whole, progress=False)
    assert branch_step(short) == 6
    branch(tmp_path / "trunk", 6, short)
    assert read_metrics(tmp_path / "short" / "metrics.jsonl")[-1]["step"] == 6, "not what the trunk did later"
    train(short, progress=False)
    assert_same_run(tmp_path / "short", tmp_path / "whole")


@pytest.mark.parametrize(
    ("steps", "values", "message"),
    [
        (6, wsd(8, seed=1), "differs from it in seed: only the schedule may differ"),
        (6, {**wsd(8), "optim": {"schedule": "wsd", "warmup": 0.5, "lr": 0.01}}, "another learning rate at step 1 of"),
        (5, wsd(8), "kept no checkpoint of step 5: train it with keep_at 5"),
        (8, wsd(8), "a run of 8 steps cannot branch off at step 8"),
        (6, wsd(7), "another learning rate at step 6 of the 6 before it branches off"),
    ],
)
def test_a_branch_that_would_have_gone_another_way_is_refused(
    configure: Configure, tmp_path: Path, steps: int, values: dict[str, Any], message: str
) -> None:
    keep_state(tmp_path / "trunk", configure("trunk", **wsd(16, keep_at=(6,))))
    with pytest.raises(UserError, match=message):
        branch(tmp_path / "trunk", steps, prepare_run(configure("short", **values)).config)
    assert not (tmp_path / "short").exists()


def test_an_annealed_residual_has_no_branches(configure: Configure, tmp_path: Path) -> None:
    model = {"residual": "adaptive", "num_blocks": None}
    keep_state(tmp_path / "trunk", configure("trunk", **wsd(16, model=model)))
    with pytest.raises(UserError, match="annealed over a run's steps"):
        branch(tmp_path / "trunk", 6, prepare_run(configure("short", **wsd(8, model=model))).config)
    with pytest.raises(UserError, match="only runs with wsd branch off"):
        branch_step(configure())
