"""Generation: one-token decode at several batch sizes and prefill, each against the plain Transformers model.

    python benchmarks/decode.py                                     # 0.6b on a GPU, nano on a CPU
    python benchmarks/decode.py --size 150m --dtype bf16 --batches 1 8 --prefill 2048
    python benchmarks/decode.py --size nano --compile --batches 1 --variants block
    python benchmarks/decode.py --size 0.6b --batches 1 64 --prefill 8192 --graphs

A decode step is one token for each sequence after `--context` tokens, in a static KV cache, set back before each step;
with --graphs the step is captured once as a CUDA graph and replayed, and so is the prefill; with --compile the step is
compiled. Prefill is one sequence without gradients; where it cannot be captured its row says why and has the time
without. All models have the same weights; the second ratio is to the standard residual.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import DTYPES
from naive import register_naive
from torch import Tensor
from transformers import StaticCache

from attnres.files import write_json
from attnres.head import whole_sequences
from attnres.models import build, build_plain
from attnres.models.build import SIZES as NAMED
from attnres.training import graphs as graphs_of_training
from attnres.training.environment import tune

VARIANTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "standard": ("standard", {}),
    "block": ("block", {"num_blocks": 8}),
    "full": ("full", {}),
    "naive block": ("naive_block", {"num_blocks": 8}),
}
BASES = ("plain", "standard")
SIZES: dict[str, Any] = NAMED | {
    "150m": NAMED["100m"]
    | {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
}
VOCABULARY = 4096
DEFAULTS = {
    "cuda": {"size": "0.6b", "batches": [1, 4, 16, 64], "context": 1024, "prefill": 8192},
    "cpu": {"size": "nano", "batches": [1, 4], "context": 64, "prefill": 256},
}


class Step:
    """One decode step of a model with a filled static cache."""

    def __init__(self, model: Any, batch: int, context: int, seed: int):
        self.model, self.context = model, context
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (batch, context + 1), generator=generator).to(device)
        self.cache = StaticCache(config=model.config, max_cache_len=context + 8)
        self.token, self.logits = ids[:, -1:].contiguous(), torch.empty(0)
        self.model(input_ids=ids[:, :-1], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.call: Callable[[], Tensor] = self.eager

    def back(self) -> None:
        """Forget the token that the last step added."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)  # ty: ignore

    def eager(self) -> Tensor:
        return self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits

    def compile(self) -> None:
        """Compile the model for steps of one token."""
        self.model = torch.compile(self.model)

    def capture(self) -> None:
        """Record the step as a CUDA graph."""
        self.call = captured(self.eager, self.token.device, self.back)

    def __call__(self) -> Tensor:
        return self.call()


def captured(call: Callable[[], Any], device: torch.device, before: Callable[[], None] = lambda: None) -> Any:
    """Record a call as a CUDA graph and return what replays it, after a few calls on another stream as PyTorch asks.
    `before` is called before each."""
    with whole_sequences():  # in a capture Transformers makes a mask of all pairs, and attention takes a slower kernel
        with graphs_of_training.side_stream(device):
            for _ in range(3):
                before()
                call()
        before()
        graph = graphs_of_training.Graph(call)

    def replayed() -> Any:
        graph.replay()
        return graph.output

    return replayed


def _models(
    size: str, device: torch.device, dtype: torch.dtype, positions: int, seed: int, only: Sequence[str] = ()
) -> dict[str, Any]:
    register_naive()
    models = {}
    for label, (residual, settings) in VARIANTS.items():
        if only and label not in (*BASES, *only):
            continue
        shape: dict[str, Any] = {"vocab_size": VOCABULARY, "max_positions": positions, "seed": seed}
        with device:  # drawing 0.6 B weights takes a processor six seconds
            if residual is None:
                model: Any = build_plain(SIZES[size], **shape).to(dtype)
            else:
                model = build(SIZES[size], residual, settings=settings, **shape).to(dtype)
                model.residual.float()
        tune(model, device, positions)
        models[label] = model.to(device).eval()
    return models


def decode(
    models: dict[str, Any], batch: int, context: int, *, graphs: bool, compiled: bool, seconds: float, seed: int
) -> dict[str, dict[str, Any]]:
    """One decode step of each model, in turn."""
    steps: dict[str, Step] = {}
    reasons: dict[str, dict[str, Any]] = {}

    def prepare(label: str) -> None:
        step = Step(models[label], batch, context, seed)
        if compiled:
            step.compile()
        if graphs:
            step.capture()
        steps[label] = step

    for label in models:
        reason = harness.attempt(partial(prepare, label))
        if reason is not None:
            reasons[label] = {"reason": reason}
    device, back = next(models["plain"].parameters()).device, lambda label: steps[label].back()
    return harness.measure(steps, device, seconds=seconds, before=back, second="standard") | reasons


@torch.no_grad()
def run(
    device: torch.device,
    dtype: torch.dtype,
    *,
    size: str,
    batches: list[int],
    context: int,
    prefill: int,
    graphs: bool,
    compiled: bool,
    seconds: float,
    seed: int,
    only: Sequence[str] = (),
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Decode at each batch size and one prefill; `say` is given each table as it is finished, `keep` all that is."""
    models = _models(size, device, dtype, max(prefill, context + 8), seed, only)
    result: dict[str, Any] = {"decode": {}, "prefill": {}}
    bar = harness.progress("decode", len(batches) + 1)
    for batch in batches:
        rows = decode(models, batch, context, graphs=graphs, compiled=compiled, seconds=seconds, seed=seed)
        result["decode"][str(batch)] = rows
        kind = ("", ", CUDA graph")[graphs] + ("", ", compiled")[compiled]
        say(f"decode, batch {batch}, after {context} tokens{kind}\n{harness.lines(rows)}\n")
        keep(result)
        bar.advance(1, f"batch {batch}")
    ids = torch.randint(VOCABULARY, (1, prefill), generator=torch.Generator().manual_seed(seed)).to(device)
    candidates: dict[str, Callable[[], Any]] = {
        label: partial(model, input_ids=ids, use_cache=True, logits_to_keep=1) for label, model in models.items()
    }
    eager: dict[str, str] = {}

    def capture(label: str) -> None:
        candidates[label] = captured(candidates[label], device)

    for label in models if graphs else ():
        if reason := harness.attempt(partial(capture, label)):
            eager[label] = reason
    rows = harness.measure(candidates, device, seconds=seconds, second="standard")
    for label, reason in eager.items():
        rows[label]["not_captured"] = reason
    result["prefill"][str(prefill)] = rows
    say(f"prefill of {prefill} tokens{', CUDA graph' if graphs else ''}\n{harness.lines(rows)}\n")
    bar.advance(1, "prefill")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser)
    parser.add_argument("--size", default=None, choices=list(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--context", type=int, default=None, help="tokens in the cache before the decode step")
    parser.add_argument("--prefill", type=int, default=None, help="tokens of the prefill")
    parser.add_argument("--variants", nargs="+", default=[], choices=list(VARIANTS), help="beside plain and standard")
    parser.add_argument("--graphs", action="store_true", help="replay the decode step and the prefill as CUDA graphs")
    harness.add_compile(parser, "the decode step")
    options = parser.parse_args()
    device = harness.settle(options, "decode")
    harness.settle_compile(options, parser)
    if options.graphs and device.type != "cuda":
        parser.error("--graphs needs a GPU: CUDA graphs do not exist on a CPU")
    values = {name: getattr(options, name) for name in DEFAULTS["cpu"]}
    shape: dict[str, Any] = DEFAULTS[device.type] | {name: value for name, value in values.items() if value is not None}
    head = harness.head("decode", device, options.dtype, options.seed) | {"shape": shape, "graphs": options.graphs}
    how: dict[str, Any] = {"graphs": options.graphs, "compiled": options.compile}
    how |= {"seconds": options.seconds, "seed": options.seed, "only": options.variants}
    result = head | run(
        device, DTYPES[options.dtype], **shape, **how, keep=lambda parts: write_json(options.out, head | parts)
    )
    panels = {f"decode, batch {batch}": rows for batch, rows in result["decode"].items()}
    panels |= {f"prefill, {tokens} tokens": rows for tokens, rows in result["prefill"].items()}
    ratios = {
        panel: {name: row["ratio"] for name, row in rows.items() if "ratio" in row} for panel, rows in panels.items()
    }
    title = f"Generation, {shape['size']}, {result['environment']['device']}"
    harness.finish(options.out, result, ratios, "time, as a ratio to the plain model's", title)


if __name__ == "__main__":
    main()
