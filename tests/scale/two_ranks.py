"""What two processes do for the tests of this folder, in one launch: `torchrun ... two_ranks.py FOLDER`.

FOLDER/jobs.json holds {"cases": [...], "shares": [residual, ...], "slices": [...], "experts": [...], "second opinion":
[...], "plan": bool, "long": tokens,
"runs": [[name, configuration, steps or null], ...], "single": [...]}. Everything but a long prompt and the runs of
"single" is in fp64. Results go to FOLDER/results.json.
"""

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from experts import run_experts, run_second_opinion
from messages import Messages, StageCounts
from slices import run_long_prompt, run_plan, run_slices
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from attnres.errors import Interrupted, UserError
from attnres.head import called_losses
from attnres.models import build
from attnres.ops.dispatch import KERNELS
from attnres.scale.cut import vectors
from attnres.scale.pipeline import Pipeline, check_schedule, plan_cut, schedule_named
from attnres.scale.shard import local, mean_gradients, shard
from attnres.training import from_dict, start, train
from attnres.training.checkpoint import checksum
from attnres.training.interrupt import Signals
from attnres.training.layout import collected
from attnres.training.optim import state_tensors
from attnres.training.parallel import join_processes
from attnres.training.prepare import prepare_run
from attnres.training.run import Run

SIZE = {
    "family": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
}
WORDS, TOKENS, ROWS = 31, 5, 2


def model_of(case: dict[str, Any]) -> Any:
    """A model in fp64 whose residual has left its start values."""
    size = {**SIZE, **case.get("size", {}), "tie_word_embeddings": case.get("tie", False)}
    model = build(
        size, case["residual"], vocab_size=WORDS, max_positions=32, settings=case.get("settings", {})
    ).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter) * 0.2)
    return model.train()


def losses(model: Any, call: dict[str, Any], y: torch.Tensor) -> torch.Tensor:
    return called_losses(model, call, y, "whole")


def run_case(case: dict[str, Any], group: Any) -> dict[str, Any]:
    """A pipeline's step, held against the same model in this one process."""
    ranks, schedule, count = dist.get_world_size(), case["schedule"], case.get("microbatches", 4)
    virtual = case.get("virtual", 2 if schedule_named(schedule).several else 1)
    check_schedule(schedule, ranks, virtual, count)
    whole, model = model_of(case), model_of(case)
    layers = tuple(case["layers"]) if "layers" in case else None
    pipe = Pipeline(
        model,
        plan_cut(model, ranks, schedule, virtual, layers),
        schedule=schedule,
        microbatches=count,
        batch=ROWS,
        tokens=TOKENS,
        group=group,
        device=torch.device("cpu"),
        losses=losses,
        cached=case.get("cached", True),
    )
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randint(WORDS, (ROWS * count, TOKENS), generator=draw) for _ in "xy")
    held_out = pipe.evaluate(x, y)
    for _ in range(2):  # the second step's gradients, were anything left of the first
        for _, parameter in pipe.named_parameters():
            parameter.grad = None
        with StageCounts() as counts:
            total = pipe.step(x, y, 1 / y.numel())
    pipe.reduce_gradients()
    loss = losses(whole, {"input_ids": x}, y)[0] / y.numel()
    loss.backward()
    with torch.no_grad():
        wanted = losses(whole, {"input_ids": x}, y)
    theirs = dict(whole.named_parameters())
    errors = {}
    for name, parameter in pipe.named_parameters():
        gradient, largest = theirs[name].grad, theirs[name].grad.abs().max().clamp_min(1e-30)
        errors[name] = ((parameter.grad - gradient).abs().max() / largest).item()
    every: list[Any] = [None] * ranks
    off = max(abs(total - loss).item(), (held_out - wanted).abs().max().item()) if pipe.has_last else 0.0
    dist.all_gather_object(every, (errors, off, counts.forward, counts.backward, counts.buffers, counts.cache))
    names = {name for part in every for name in part[0]}
    return {
        "missing": sorted(set(theirs) ^ names),
        "gradient": max(error for part in every for error in part[0].values()),
        "loss": max(part[1] for part in every),
        "sent": [sum(part[place] for part in every) / (x.numel() * SIZE["hidden_size"]) for place in (2, 3)],
        "table": vectors(pipe.table),
        "buffers": [part[4] for part in every],
        "cache": [part[5] for part in every],
    }


def run_shares(residual: str, group: Any) -> float:
    """The largest relative error of a gradient of a model in shares (FSDP2), each rank with its half of a batch."""
    ranks, case = dist.get_world_size(), {"residual": residual, "size": {"num_hidden_layers": 3}}
    whole, model = model_of(case), model_of(case)
    shard(model, model, init_device_mesh("cpu", (ranks,)))
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randint(WORDS, (2 * ranks, TOKENS), generator=draw) for _ in "xy")
    losses(whole, {"input_ids": x}, y).sum().backward()
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    (losses(model, {"input_ids": x[mine]}, y[mine]).sum() * ranks).backward()
    mean_gradients(model.residual.parameters(), group)
    errors = []
    for (name, parameter), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            scale = other.grad.abs().max().clamp_min(1e-4)  # a softmax that has decided has gradients of 1e-9
            errors.append(((full - other.grad).abs().max() / scale).item())
    return max(errors)


def digest(run: Run) -> dict[str, int] | None:
    """Checksums of all tensors of a run, model and optimizer, whole, by name; on the first process."""
    tensors = {**dict(run.placed.named_parameters()), **run.placed.named_buffers(), **state_tensors(run.optimizers)}
    whole = collected(tensors, run.who)
    return whole and {name: checksum([(name, tensor)]) for name, tensor in whole.items()}


def resume(values: dict[str, Any]) -> dict[str, int] | None:
    """The digest of the run that a folder holds, with the layout of a configuration. No step is made."""
    who = join_processes("cpu")
    run = Run(prepare_run(from_dict(values), who.world_size), who, progress=False)
    try:
        return digest(run)
    finally:
        run.close()


def counted(values: dict[str, Any]) -> dict[str, Any]:
    """Of a step of a run: bytes sent in collectives and between stages, the mean over ranks; bytes of parameters,
    gradients and optimizer states, the most on a rank; the most bytes that each rank held for backward passes."""
    who, kernels = join_processes("cpu"), KERNELS["cpu"]
    KERNELS["cpu"] = kernels._replace(whole_scores=0)  # fused attention, as on a GPU
    run = Run(prepare_run(from_dict(values), dist.get_world_size()), who, progress=False)
    try:
        run.step(Signals())
        saved = Saved(run.placed)
        with saved:
            run.step(Signals())
        with Messages(who.world_size) as messages, StageCounts() as stages:
            run.step(Signals())
        parameters = [local(parameter) for _, parameter in run.placed.named_parameters()]
        states = [local(state) for state in state_tensors(run.optimizers).values() if state.ndim]
        held = sum(t.numel() * t.element_size() for t in [*parameters, *parameters, *states])
    finally:
        run.close()
        KERNELS["cpu"] = kernels
    between = 4 * (stages.forward + stages.backward)
    every = who.gather([messages.sent, between, held, saved.peak])
    return {
        "collectives": sum(part[0] for part in every) / len(every),
        "stages": sum(part[1] for part in every) / len(every),
        "states": max(part[2] for part in every),
        "saved": [part[3] for part in every],
    }


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """While this is on, `peak` becomes the most bytes that autograd held for backward passes at once, but for
    parameters, whole or in shares."""

    def __init__(self, layout: Any) -> None:
        self.peak = self._now = 0
        self._own = {_address(parameter) for _, parameter in layout.named_parameters()}
        roots = [layout.plain] if hasattr(layout, "plain") else layout.pipeline.stages
        modules = (module for root in roots for module in root.modules())
        states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
        self._groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        self._counts: Counter[int] = Counter()
        super().__init__(self._pack, lambda held: getattr(held, "tensor", held))

    def _pack(self, tensor: torch.Tensor) -> Any:
        together = (one for group in self._groups for one in group.fsdp_params if hasattr(one, "_unsharded_param"))
        if _address(tensor) in self._own | {_address(one._unsharded_param) for one in together}:
            return tensor
        return Held(self, tensor)

    def add(self, tensor: torch.Tensor, times: int) -> None:
        before = self._counts[key := _address(tensor)] > 0
        self._counts[key] += times
        self._now += ((self._counts[key] > 0) - before) * local(tensor).untyped_storage().nbytes()
        self.peak = max(self.peak, self._now)


def _address(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


class Held:
    """A tensor that a backward pass needs, until it has it."""

    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.add(tensor, 1)

    def __del__(self) -> None:
        self.saved.add(self.tensor, -1)


def train_run(values: dict[str, Any], until: int | None = None, dtype: torch.dtype = torch.float64) -> Any:
    """A run, with everything in `dtype`; with `until`, stopped after that step as by a signal.

    Attention is PyTorch's: at this length Transformers' own would be taken, whose softmax is fp32.
    """
    first, kernels = start.first_model, KERNELS["cpu"]
    step = Run.step

    def in_dtype(*args: Any) -> Any:
        model, record = first(*args)
        if dtype is torch.float64 and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # grouped products have no fp64
        return model.to(dtype), record

    def stopping(run: Any, signals: Any) -> None:
        if until is not None and run.run_state.step == until - 1:
            signals.terminations += 1
        step(run, signals)

    start.first_model, Run.step, KERNELS["cpu"] = in_dtype, stopping, kernels._replace(whole_scores=0)
    try:
        return train(from_dict(values), progress=False)["val_loss"]
    except (Interrupted, UserError) as error:
        return str(error)
    except SystemExit as error:
        return error.code
    finally:
        start.first_model, Run.step, KERNELS["cpu"] = first, step, kernels


def compiled(values: dict[str, Any]) -> int:
    """Make a run with what it compiles traced alone; give the largest number of graphs that a process had made."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        train_run(values)
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return max(counts)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    join_processes("cpu")
    group = dist.new_group(list(range(dist.get_world_size())))
    jobs = json.loads((folder / "jobs.json").read_text())
    results = {"cases": [run_case(case, group) for case in jobs["cases"]]}
    results["shares"] = {residual: run_shares(residual, group) for residual in jobs.get("shares", [])}
    results["slices"] = [run_slices(case) for case in jobs.get("slices", [])]
    results["experts"] = [run_experts(case) for case in jobs.get("experts", [])]
    results["second opinion"] = [run_second_opinion(case) for case in jobs.get("second opinion", [])]
    if jobs.get("long"):
        results["long"] = run_long_prompt(jobs["long"])
    if jobs.get("plan"):
        results["plan"] = run_plan(folder / "whole model")
    results["counted"] = {name: counted(values) for name, values in jobs.get("counted", [])}
    results["resumed"] = {name: resume(values) for name, values in jobs.get("resumed", [])}
    results["runs"] = {name: train_run(values, until) for name, values, until in jobs["runs"]}
    results["compiled"] = {name: compiled(values) for name, values in jobs.get("compiled", [])}
    single = jobs.get("single", [])
    results["single"] = {name: train_run(values, until, torch.float32) for name, values, until in single}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
