"""A whole training step of every residual against the plain model: time, memory, bytes kept for backward.

    python benchmarks/step.py                      # d=256, 12 layers, 2,048 tokens, fp32 and bf16; about five minutes
    python benchmarks/step.py --device cuda --sizes 100m 0.6b deep-narrow --compile

Times are medians of steps taken in turn in one process, ratios are to the plain Transformers model in the same run, the
second to `standard`; with --compile every variant is compiled, the plain one too. Kept bytes are those of distinct
storages that one forward pass saves for backward, without parameters. Peak memory is that of a process which takes
three steps of one variant alone. Peers (peers.py) take the place of the naive read; those that take bf16 alone get a
bf16 stream. Where the models of all variants do not fit into a GPU at once, each is timed with plain and standard
alone.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from naive import block_name, register_naive
from peers import PEERS

from attnres.comparison.speed import StepOptions, step_times
from attnres.device import in_turn, seconds_of, spread
from attnres.files import write_json
from attnres.models import build, build_plain
from attnres.models.build import SIZES as NAMED
from attnres.ops import cpu
from attnres.progress import Bar
from attnres.training.environment import peak_memory, reset_peak_memory, tune

Variants = dict[str, tuple[str | None, dict[str, Any]]]


@dataclass(frozen=True)
class Size:
    """A model and the batch it is trained with."""

    model: Mapping[str, Any]
    vocabulary: int
    batch: int
    length: int

    def sized(self, batch: int | None, length: int | None) -> "Size":
        """Return this size with another batch or length, where one is given."""
        return replace(self, batch=batch or self.batch, length=length or self.length)

    @property
    def width(self) -> int:
        return self.model["hidden_size"]

    @property
    def sublayers(self) -> int:
        return 2 * self.model["num_hidden_layers"]


def _qwen3(width: int, layers: int) -> dict[str, Any]:
    return {
        "family": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 3 * width,
        "tie_word_embeddings": True,
    }


# A small vocabulary is a short step, on which depth reads weigh more.
SIZES = {
    "nano-bench": Size(_qwen3(256, 12), 4096, 8, 256),
    "nano": Size(NAMED["nano"], 4096, 4, 128),
    "100m": Size(NAMED["100m"], 32_768, 16, 1024),
    "0.6b": Size(NAMED["0.6b"], 32_768, 4, 2048),
    "1.7b": Size(dict(NAMED["0.6b"]) | {"hidden_size": 2048, "intermediate_size": 6144}, 32_768, 4, 4096),
    "deep-narrow": Size(_qwen3(256, 48), 32_768, 16, 1024),
}
VARIANTS: Variants = {
    "plain": (None, {}),
    "standard": ("standard", {}),
    "rescaled": ("rescaled", {}),
    "block (8 blocks)": ("block", {"num_blocks": 8}),
    "block (6 blocks)": ("block", {"num_blocks": 6}),
    "block (4 blocks)": ("block", {"num_blocks": 4}),
    "full": ("full", {}),
    "mhc": ("mhc", {}),
    "hyper_connections": ("hyper_connections", {}),
    "naive block (8 blocks)": ("naive_block", {"num_blocks": 8}),
    "naive full": ("naive_full", {}),
}
BASES = ("plain", "standard")
ON_SMALL = tuple(label for label in VARIANTS if label not in ("block (4 blocks)", "mhc", "hyper_connections"))
ON_LARGE = ("plain", "standard", "block (8 blocks)", "full", "naive block (8 blocks)")
"""Of these, for the first size and for all others."""


def variants_of(
    name: str, dtype: str, device: torch.device, only: Sequence[str] = ()
) -> tuple[Variants, dict[str, str]]:
    """What is timed at this size: ours, naive ones and the peers that can; and why the other peers cannot. `only` are
    some of ours beside the bases, and nothing else; empty for all."""
    if only:
        return {label: VARIANTS[label] for label in VARIANTS if label in (*BASES, *only)}, {}
    variants = {label: VARIANTS[label] for label in (ON_SMALL if name == "nano-bench" else ON_LARGE)}
    source = torch.bfloat16 if dtype == "bf16" else torch.float32
    reasons = {peer.name: peer.available(device, source, SIZES[name].width) for peer in PEERS}
    ready = [peer for peer in PEERS if reasons[peer.name] is None]
    register_naive(ready)
    peers = {f"{peer.name} block": (block_name(peer), {"num_blocks": 8}) for peer in ready}
    return variants | peers, {f"{label} block": reason for label, reason in reasons.items() if reason is not None}


def kept_for_backward(size: Size, variant: tuple[str | None, dict[str, Any]], device: torch.device) -> dict[str, float]:
    """What one fp32 forward pass saves, in MB and in (tokens, width) vectors a sublayer."""
    residual, settings = variant
    shape: dict[str, Any] = {"vocab_size": size.vocabulary, "max_positions": size.length}
    plain = residual is None
    model = build_plain(size.model, **shape) if plain else build(size.model, residual, settings=settings, **shape)
    model = model.to(device)
    tune(model, device, size.length)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(tensor)
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(size.vocabulary, (size.batch, size.length), device=device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    total = sum(storages.values())
    vectors = total / (4 * size.batch * size.length * size.width)
    return {"MB": total / 1e6, "vectors_per_sublayer": vectors / size.sublayers}


@dataclass(frozen=True)
class Run:
    """One size in one precision on one device."""

    name: str
    size: Size
    dtype: str
    device: torch.device
    compile: bool
    only: Sequence[str] = ()
    torch_reads: int | None = None
    graphs: bool = False

    def times(self, variants: Variants, **how: Any) -> dict[str, Any]:
        """`step_times` of these variants."""
        options = StepOptions(
            size=self.size.model,
            vocab_size=self.size.vocabulary,
            seq_len=self.size.length,
            batch_size=self.size.batch,
            dtype=self.dtype,
            device=str(self.device),
            compile=self.compile,
            cuda_graphs=self.graphs,
        )
        return step_times(variants, options, **how)

    def three_steps(self, label: str) -> int:
        """Peak bytes of this process while it takes three steps of one variant."""
        variants, _ = variants_of(self.name, self.dtype, self.device, self.only)
        reset_peak_memory(self.device)
        self.times({label: variants[label]}, rounds=1, least=1)
        return peak_memory(self.device)

    def peak_of(self, label: str) -> int | str:
        """The same in a process of its own; or in a line why it failed."""
        command = [sys.executable, __file__, "--peak", label, "--sizes", self.name, "--dtypes", self.dtype]
        command += ["--batch", str(self.size.batch), "--length", str(self.size.length), "--device", str(self.device)]
        command += ["--compile"] if self.compile else []
        command += ["--graphs"] if self.graphs else []
        command += [] if self.torch_reads is None else ["--torch-reads", str(self.torch_reads)]
        command += ["--variants", *self.only] if self.only else []
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return int(done.stdout.split()[-1])
        return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it died")[:200]

    def together(self) -> int:
        """How many models fit into half of the device's memory with their optimizer's state."""
        if self.device.type != "cuda":
            return len(VARIANTS) + len(PEERS)
        with torch.device("meta"):
            model = build(self.size.model, "standard", vocab_size=self.size.vocabulary)
        state = 16 * sum(parameter.numel() for parameter in model.parameters())
        return max(3, torch.cuda.get_device_properties(self.device).total_memory // 2 // state)

    def measure(
        self, seconds: float, bar: Bar, *, peaked: bool = True, keep: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> dict[str, Any]:
        """Times and peaks (unless not `peaked`) of all variants; a row with a reason for each that does not run. `keep`
        is given what there is whenever that is more."""
        variants, reasons = variants_of(self.name, self.dtype, self.device, self.only)
        peaks: dict[str, int] = {}
        for label in variants if peaked else ():
            peak = self.peak_of(label)
            if isinstance(peak, int):
                peaks[label] = peak
            else:
                reasons[label] = peak
            bar.advance(1, f"{self.name}, {self.dtype}: peak of {label}")
        for label in BASES:
            if peaked and label not in peaks:
                raise SystemExit(f"{self.name}, {self.dtype}: the {label} model does not run: {reasons[label]}")
        others = [label for label in variants if label not in BASES and (label in peaks or not peaked)]
        size = min(len(others), self.together() - len(BASES)) or 1
        groups = [others[i : i + size] for i in range(0, len(others), size)]
        speed: dict[str, Any] = {"variants": {}}
        for group in groups:
            labels = [*BASES, *group]
            print(f"{self.name}, {self.dtype}: timing {', '.join(labels)} in turn", flush=True)
            made: list[dict[str, Any]] = []
            turn = {label: variants[label] for label in labels}
            how = {"seconds": seconds / len(groups), "rounds": 200}
            reason = harness.attempt(lambda made=made, turn=turn, how=how: made.append(self.times(turn, **how)))
            if self.compile:
                torch.compiler.reset()  # it holds on to the models
            if reason is not None:
                reasons |= dict.fromkeys(group, reason)
                continue
            part = made[0]
            standard = part["variants"]["standard"]["times"]
            for row in part["variants"].values():
                row["second_ratio"] = spread(row["times"], standard).ratio
            new = {label: row for label, row in part["variants"].items() if label not in speed["variants"]}
            for label, values in new.items() if peaked else ():
                values |= {"peak_bytes": peaks[label], "peak_ratio": peaks[label] / peaks["plain"]}
            speed = part | {"variants": speed["variants"] | new}  # the first group's bases stay
            keep(speed | {"not_timed": reasons})
        return speed | {"not_timed": reasons}


def import_ratio(rounds: int = 7) -> dict[str, float]:
    """Seconds of `import torch` and of `import attnres`, each in a new interpreter, in turn."""
    commands = {module: [sys.executable, "-c", f"import {module}"] for module in ("torch", "attnres")}
    run, device = partial(subprocess.run, check=True), torch.device("cpu")
    measures = {name: partial(seconds_of, partial(run, command), device) for name, command in commands.items()}
    times = in_turn(measures, rounds=rounds, warm_up=0)
    ours = spread(times["attnres"], times["torch"])
    return {"torch_s": spread(times["torch"]).median, "attnres_s": ours.median, "ratio": ours.ratio}


def show(speed: Mapping[str, Any], kept: Mapping[str, Mapping[str, float]]) -> str:
    """One precision of one size as a table."""
    rows = [["variant", "ms", "ratio", "quartiles", "to standard", "peak MB", "peak ratio", "kept MB (fp32)", ""]]
    for label, values in speed["variants"].items():
        low, high = values["ratio_quartiles"]
        mb = f"{kept[label]['MB']:.0f}" if label in kept else "-"
        row = [f"{values['median_s'] * 1e3:.4g}", f"{values['ratio']:.3f}", f"{low:.3f}-{high:.3f}"]
        row.append(f"{values['second_ratio']:.3f}")
        peak = (
            [f"{values['peak_bytes'] / 1e6:.0f}", f"{values['peak_ratio']:.3f}"]
            if "peak_bytes" in values
            else ["-", "-"]
        )
        rows.append([label, *row, *peak, mb, ""])
    rows += [[label, *["-"] * 7, reason] for label, reason in speed["not_timed"].items()]
    return harness.table(rows)


def out_path(options: argparse.Namespace) -> Path:
    """Where the results go: step_cpu.json for the default run."""
    parts = ["step", torch.device(options.device).type]
    parts += [] if options.sizes == ["nano-bench"] else options.sizes
    parts += ["compiled"] if options.compile else []
    parts += ["graphs"] if options.graphs else []
    parts += [] if options.torch_reads is None else [f"torch_reads_{options.torch_reads}"]
    return harness.RESULTS / ("_".join(parts) + ".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["nano-bench"], choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=None, help="sequences a step, instead of the size's own")
    parser.add_argument("--length", type=int, default=None, help="tokens a sequence, instead of the size's own")
    parser.add_argument("--dtypes", nargs="+", default=None, choices=["fp32", "bf16"], help="on a GPU bf16, else both")
    parser.add_argument("--device", default="cpu")
    harness.add_compile(parser, "every variant")
    parser.add_argument("--graphs", action="store_true", help="replay every step as CUDA graphs, the plain model's too")
    parser.add_argument("--no-peaks", action="store_true", help="leave out peaks, for which each variant has a process")
    parser.add_argument("--variants", nargs="+", default=[], choices=list(VARIANTS), help="beside plain and standard")
    parser.add_argument("--seconds", type=float, default=90.0, help="of timing for each dtype")
    parser.add_argument("--out", default=None)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtypes = options.dtypes or (["bf16"] if device.type == "cuda" else ["fp32", "bf16"])
    harness.settle_compile(options, parser)
    sizes = {name: SIZES[name].sized(options.batch, options.length) for name in options.sizes}
    how = {"only": options.variants, "torch_reads": options.torch_reads, "graphs": options.graphs}
    if options.peak:
        name, size = next(iter(sizes.items()))
        print(Run(name, size, dtypes[0], device, options.compile, **how).three_steps(options.peak))
        return
    result: dict[str, Any] = harness.head("step", device, ",".join(dtypes), 0)
    result["command"] = shlex.join(["python", "benchmarks/step.py", *sys.argv[1:]])
    result["cpu_kernels"] = cpu.load() is not None
    parts: dict[str, dict[str, Any]] = {}
    counts = [len(variants_of(name, dtype, device, options.variants)[0]) for name in sizes for dtype in dtypes]
    bar = harness.progress("step", 0 if options.no_peaks else sum(counts))
    out = Path(options.out) if options.out else out_path(options)
    for name, size in sizes.items():
        part: dict[str, Any] = {"model": {**size.model, "vocab_size": size.vocabulary}}
        part["tokens"] = size.batch * size.length
        kept: dict[str, dict[str, float]] = {}
        if name == "nano-bench":
            part["import"] = import_ratio()
            print(f"import attnres: {part['import']['ratio']:.2f} times import torch")
            for label, variant in variants_of(name, "fp32", device, options.variants)[0].items():
                kept[label] = kept_for_backward(size, variant, device)
            part["kept_for_backward_fp32"] = kept
        parts[name] = part
        for dtype in dtypes:
            run = Run(name, size, dtype, device, options.compile, **how)

            def keep(speed: dict[str, Any], part: dict[str, Any] = part, dtype: str = dtype) -> None:
                part[dtype] = speed
                write_json(out, result | (parts["nano-bench"] if list(sizes) == ["nano-bench"] else {"sizes": parts}))

            keep(run.measure(options.seconds, bar, peaked=not options.no_peaks, keep=keep))
            print(show(part[dtype], kept), flush=True)
    result |= parts["nano-bench"] if list(sizes) == ["nano-bench"] else {"sizes": parts}
    ratios = {
        f"{name}, {dtype}": {label: row["ratio"] for label, row in part[dtype]["variants"].items()}
        for name, part in parts.items()
        for dtype in dtypes
    }
    title = f"Training step, {'compiled, ' if options.compile else ''}{result['environment']['device']}"
    harness.finish(out, result, ratios, "time, as a ratio to the plain model's", title)


if __name__ == "__main__":
    main()
