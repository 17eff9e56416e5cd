"""A step of Muon over a model's matrices: torch's, one matrix after the other, and ours, small ones in stacks.

    python benchmarks/muon.py                       # nano and 100m on a CPU, and one shape at a time
    python benchmarks/muon.py --device cuda
    python benchmarks/muon.py --cases nano          # where bf16 is emulated, torch takes minutes for the larger ones

Both take turns in one process. A shape alone is stacked however large it is: where that stops to pay is
`StackedMuon.small`.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import harness
import torch
from torch import nn

from attnres.models import build
from attnres.training.config import OptimConfig
from attnres.training.muon import StackedMuon, precision
from attnres.training.optim import kinds

SIZES = ("nano", "100m")
COUNT = 24
"""Matrices of a shape alone, as many as two of each of twelve layers."""
WIDTHS = (64, 128, 256, 512, 1024)


class AllStacked(StackedMuon):
    """Every matrix in a stack."""

    small = 1 << 62


def step_of(
    optimizer_class: type[torch.optim.Muon], shapes: Sequence[torch.Size], device: torch.device, seed: int
) -> Callable[[], Any]:
    """A step over matrices of these shapes whose gradients stay."""
    draw = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(harness.randn(shape, draw, device, torch.float32)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = harness.randn(parameter.shape, draw, device, torch.float32)
    rate = OptimConfig().muon_lr
    return optimizer_class(parameters, lr=rate, adjust_lr_fn="match_rms_adamw").step


def shapes_of(size: str) -> list[torch.Size]:
    """Those of the matrices that Muon has of a model."""
    model = build(size, "standard", vocab_size=4096, max_positions=256)
    parameters = dict(model.named_parameters())
    return [parameters[name].shape for name in kinds(model)["matrix"]]


def run(
    stacked: type[StackedMuon], shapes: Sequence[torch.Size], device: torch.device, *, seconds: float, seed: int
) -> dict[str, dict[str, Any]]:
    """Rows of torch's and of the stacked one."""
    classes = {"torch": torch.optim.Muon, "stacks": stacked}
    steps = {name: step_of(optimizer_class, shapes, device, seed) for name, optimizer_class in classes.items()}
    return harness.measure(steps, device, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser, ("fp32",))
    parser.add_argument("--cases", nargs="+", help="which of them; none is all")
    options = parser.parse_args()
    options.dtype = "fp32"
    device = harness.settle(options, "muon")
    steps_in = str(precision(device)).removeprefix("torch.")
    result: dict[str, Any] = harness.head("muon", device, options.dtype, options.seed)
    result |= {"small": StackedMuon.small, "steps_in": steps_in}
    result["rows"] = {}
    cases = {size: shapes_of(size) for size in SIZES}
    for width in WIDTHS:
        for rows in (width, 3 * width):
            cases[f"{COUNT} of {rows} x {width}"] = [torch.Size((rows, width))] * COUNT
    if unknown := set(options.cases or ()) - set(cases):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; expected {', '.join(cases)}")
    cases = {case: cases[case] for case in options.cases or cases}
    bar = harness.progress("muon", len(cases))
    for done, (case, shapes) in enumerate(cases.items(), 1):
        stacked = StackedMuon if case in SIZES else AllStacked
        rows = run(stacked, shapes, device, seconds=options.seconds, seed=options.seed)
        result["rows"][case] = rows
        print(f"{case}\n{harness.lines(rows)}\n", flush=True)
        bar.update(done)
    groups = {
        case: {name: row["median_s"] * 1e3 for name, row in rows.items()} for case, rows in result["rows"].items()
    }
    harness.finish(options.out, result, groups, "ms", "A step of Muon")


if __name__ == "__main__":
    main()
