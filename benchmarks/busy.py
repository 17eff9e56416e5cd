"""What a training step waits for: its time, the host's, the device's, and every kernel.

    python benchmarks/busy.py --size 100m --graphs                        # plain, standard, Block, Full
    python benchmarks/busy.py --size 100m --compile --torch-reads 0       # reads and merges as our operators
    python benchmarks/busy.py --size 0.6b --batch 8 --length 2048 --variants "block (8 blocks)" --graphs

Times are medians of steps taken in turn with the plain Transformers model's, in the same mode and with the same loss,
to which ratios are; each variant is alone with it in memory, and its row is written at once. `host` is how long a
step's calls take to return, before the device has done them: where it is as long as the step, the device waits for it.
`busy` is the sum of all kernels' times in a profile of two steps. MFU counts 6 FLOPs a parameter and token and causal
attention. On a CPU, for trying the script, there are no kernels.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import harness
import torch
from step import SIZES, VARIANTS, Size
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_flatten, tree_unflatten

from attnres.comparison.speed import StepOptions, TrainingStep, training_steps
from attnres.device import in_turn, seconds_of, spread
from attnres.files import write_json
from attnres.models.step_cost import peak_flops, step_flops
from attnres.training import graphs
from attnres.training.config import OptimConfig
from attnres.training.environment import peak_memory, reset_peak_memory

PROFILED = 2
"""Steps of a profile."""
MODES = ("eager", "graphs", "compile", "compile+graphs", "graphs of passes", "graphs of layers", "reduce-overhead")
"""How a step is taken: without graphs or compiler, with either or both; with graphs, but optimizers without; with
graphs of each layer's attention and MLP; compiled in PyTorch's mode that captures by itself. Where a step cannot be
captured its row says why."""


def host_seconds(step: Callable[[], Any], on: torch.device) -> float:
    """Until a step's calls have returned, the median of five."""
    taken = []
    for _ in range(5):
        seconds_of(lambda: None, on)
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    seconds_of(lambda: None, on)
    return statistics.median(taken)


def kernels_of(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels of a step, those that take the most first: name, milliseconds and calls in a step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    taken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            taken[event.name][0] += event.self_device_time_total / 1e3 / PROFILED
            taken[event.name][1] += 1 / PROFILED
    rows = [{"name": name, "ms": ms, "calls": calls} for name, (ms, calls) in taken.items()]
    return sorted(rows, key=lambda row: -row["ms"])


class _Part(nn.Module):
    """A module that is called with tensors alone, in the order in which they are among the arguments of a call, and
    returns the tensors among its results."""

    def __init__(self, part: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.part, self.run = part, part.forward
        leaves, self.arguments = tree_flatten(arguments)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.sample = tuple(leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in self._tensors(leaves))

    def _tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        return [leaves[place] for place in self.places]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = self.others.copy()
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.arguments)
        leaves, self.results = tree_flatten(self.run(*args, **kwargs))
        self.returned = [isinstance(leaf, Tensor) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """Take the part's own arguments and return its own results."""
        tensors = iter(self(*self._tensors(tree_flatten((args, kwargs))[0])))
        return tree_unflatten([next(tensors) if returned else None for returned in self.returned], self.results)


def graph_layers(step: TrainingStep) -> str:
    """Let the attention and the MLP of each layer be replayed as graphs, forward and backward; return how the step is
    taken from then on."""
    model, cast = step.update.placed.model, step.update.placed.plain.cast
    layers = max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
    parts = [part for layer in layers for part in layer.children() if any(p.ndim > 1 for p in part.parameters())]
    calls: dict[nn.Module, Any] = {}

    def keep(part: nn.Module, args: Any, kwargs: Any) -> None:
        calls[part] = (args, kwargs)

    hooks = [part.register_forward_pre_hook(keep, with_kwargs=True) for part in parts]
    step()
    for hook in hooks:
        hook.remove()
    flat = [_Part(part, calls[part]) for part in parts]
    on = step.x.device.type
    with cast(), torch.autocast(on, enabled=torch.is_autocast_enabled(on), cache_enabled=False):
        torch.cuda.make_graphed_callables(tuple(flat), tuple(one.sample for one in flat))
    for part, one in zip(parts, flat, strict=True):
        part.forward = one.called
    return f"captured: {len(parts)} attentions and MLPs"


def measure(
    labels: Sequence[str],
    size: Size,
    on: torch.device,
    *,
    dtype: str = "bf16",
    mode: str = "eager",
    seconds: float = 8.0,
    optimizer: Literal["adamw", "muon"] = "adamw",
    loss: str = "auto",
    plains: dict[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row of each variant as soon as it is timed, and on a GPU again with its kernels; of one that fails, raise
    its error.

    Args:
        labels: of `VARIANTS` beside plain, each measured alone with it.
        dtype: of `training_steps`.
        mode: of `MODES`, for the plain model too.
        seconds: of timing for each.
        loss: of `StepOptions`, for the plain model too.
        plains: takes the plain model's step, by mode, and gives it to later calls; None for a new one each time.
    """
    how: dict[str, Any] = {"vocab_size": size.vocabulary, "seq_len": size.length, "batch_size": size.batch}
    how |= {"optim": OptimConfig(optimizer=optimizer), "dtype": dtype, "device": str(on), "loss": loss}
    how |= {
        "compile": "compile" in mode or mode == "reduce-overhead",
        "cuda_graphs": "graphs" in mode and mode != "graphs of layers",
    }
    for label in labels:
        gc.collect()  # of the variant before, or of one whose error held on to what its frames had made
        if on.type == "cuda":
            torch.cuda.empty_cache()
        with _taken(mode):
            steps: dict[str, TrainingStep] = {}
            peaks: dict[str, int] = {}
            paths: dict[str, str | None] = {}
            for name in dict.fromkeys(("plain", label)):
                if name == "plain" and plains and mode in plains:
                    steps[name], peaks[name], paths[name] = plains[mode]
                    continue
                before = torch.cuda.memory_allocated() if on.type == "cuda" else 0
                reset_peak_memory(on)
                steps |= training_steps({name: VARIANTS[name]}, StepOptions(size.model, **how))
                paths[name] = graph_layers(steps[name]) if mode == "graphs of layers" else None
                for _ in range(6):  # which compile and capture
                    steps[name]()
                seconds_of(lambda: None, on)
                peaks[name] = peak_memory(on) - before
                if name == "plain" and plains is not None:
                    plains[mode] = steps[name], peaks[name], paths[name]
            times = in_turn(
                {name: partial(seconds_of, step, on) for name, step in steps.items()}, rounds=200, seconds=seconds
            )
            rows: list[dict[str, Any]] = [
                _row(name, step, times, size, on, dtype)
                | {"mode": mode, "peak_bytes": peaks[name], "step": paths[name] or step.path}
                for name, step in steps.items()
                if name == label or label == labels[0]
            ]
            yield from rows
            for row in rows if on.type == "cuda" else ():  # a profiler slows the host for good, and may fail
                yield row | _busy(steps[row["variant"]])
            del steps, times
        if how["compile"] and not plains:
            torch.compiler.reset()  # it holds on to the models


@contextmanager
def _taken(mode: str) -> Generator[None]:
    """While steps are made and taken in a mode that training has no flag for."""
    with ExitStack() as stack:
        if mode == "graphs of passes":
            stack.enter_context(patch.object(graphs, "why_not_optimizer", lambda optimizer: "left out"))
        if mode == "reduce-overhead":
            stack.enter_context(patch.object(torch, "compile", partial(torch.compile, mode=mode)))
        yield


def _row(
    label: str, step: TrainingStep, times: dict[str, list[float]], size: Size, on: torch.device, dtype: str
) -> dict[str, Any]:
    timed = spread(times[label], times["plain"])
    flops = step_flops(step.update.placed.model, size.length) * size.batch * size.length
    peak = peak_flops(on, "fp32" if dtype == "fp32" else "bf16")
    return {
        "variant": label,
        "tokens": size.batch * size.length,
        "dtype": dtype,
        "ms": timed.median * 1e3,
        "quartiles_ms": [quartile * 1e3 for quartile in timed.quartiles],
        "ratio": timed.ratio,
        "ratio_quartiles": timed.ratio_quartiles,
        "rounds": len(times[label]),
        "host_ms": host_seconds(step, on) * 1e3,
        "mfu": None if peak is None else flops / timed.median / peak,
    }


def _busy(step: Callable[[], Any]) -> dict[str, Any]:
    kernels = kernels_of(step)
    return {
        "busy_ms": sum(kernel["ms"] for kernel in kernels),
        "launches": sum(kernel["calls"] for kernel in kernels),
        "kernels": kernels,
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `measure` as a table."""
    table = [["variant", "step", "ms", "ratio", "host, ms", "busy, ms", "kernels", "peak MB"]]
    for row in rows:
        busy, launches = (f"{row[name]:.4g}" if name in row else "-" for name in ("busy_ms", "launches"))
        numbers = [f"{row['ms']:.4g}", f"{row['ratio']:.3f}", f"{row['host_ms']:.4g}", busy, launches]
        table.append([row["variant"], row["step"], *numbers, f"{row['peak_bytes'] / 1e6:.0f}"])
    return harness.table(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=None, help="sequences a step, instead of the size's own")
    parser.add_argument("--length", type=int, default=None, help="tokens a sequence, instead of the size's own")
    default = ["standard", "block (8 blocks)", "full"]
    parser.add_argument("--variants", nargs="+", default=default, choices=list(VARIANTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "bf16-parameters"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--graphs", action="store_true", help="replay every step as CUDA graphs, the plain model's too")
    harness.add_compile(parser, "every variant")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing for each variant")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    harness.settle_compile(options, parser)
    on, mode = torch.device(options.device), MODES[options.graphs + 2 * options.compile]
    size = SIZES[options.size].sized(options.batch, options.length)
    parts = ["busy", options.size, *([] if mode == "eager" else [mode.replace("compile", "compiled")]), on.type]
    out = options.out or harness.RESULTS / f"{'_'.join(parts)}.json"
    result = harness.head("busy", on, options.dtype, 0)
    rows: dict[str, Any] = {}
    how: dict[str, Any] = {"dtype": options.dtype, "mode": mode, "optimizer": options.optimizer}
    for row in measure(options.variants, size, on, seconds=options.seconds, **how):
        rows[row["variant"]] = row
        write_json(out, result | {"tokens": row["tokens"], "variants": rows})
        print(json.dumps({name: value for name, value in row.items() if name != "kernels"}), flush=True)
    print(show(list(rows.values())))


if __name__ == "__main__":
    main()
