"""Python frames of this package that a sublayer costs, forward and backward: what small batches and single tokens pay.

    python benchmarks/frames.py                    # Block, Full and the standard residual, 12 layers
    python benchmarks/frames.py --lines            # and which functions they are

Counted with `sys.setprofile` in a qwen3 of 12 layers and 4 tokens: calls of Python functions in files of attnres, those
of a pass's beginning and end included, divided by the sublayers. A pass without gradients is the decoding of one token.
Counts do not depend on the machine, except for which kernels it has.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import torch

import attnres
from attnres.models import build
from attnres.ops import cpu

ROOT = str(Path(attnres.__file__).parent)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("standard", {}),
    "block": ("block", {"num_blocks": 8}),
    "full": ("full", {}),
}
LAYERS = 12
STAGES = ("forward", "backward", "without gradients")


def frames_of(call: Callable[[], Any]) -> tuple[Counter[str], Any]:
    """Calls of Python functions of this package, by "file:line function", and what `call` returned."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            counts[f"{code.co_filename[len(ROOT) + 1 :]}:{code.co_firstlineno} {code.co_name}"] += 1

    sys.setprofile(count)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return counts, result


def stages(residual: str, settings: dict[str, Any], layers: int = LAYERS) -> dict[str, Counter[str]]:
    """The calls of a forward pass, its backward, and a pass without gradients; of the second pass of each."""
    size = {"family": "qwen3", "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32}
    model = build(size, residual, vocab_size=64, max_positions=16, settings=settings).train()
    ids = torch.zeros(1, 4, dtype=torch.long)
    counts: dict[str, Counter[str]] = {}
    with torch.autograd.set_multithreading_enabled(False):  # or the backward's frames are another thread's
        for _ in range(2):
            counts["forward"], out = frames_of(lambda: model(input_ids=ids, use_cache=False).logits)
            loss = out.sum()
            counts["backward"], _ = frames_of(loss.backward)
    with torch.no_grad():
        for _ in range(2):
            counts["without gradients"], _ = frames_of(lambda: model(input_ids=ids[:, :1], use_cache=False))
    return counts


def run() -> dict[str, dict[str, Any]]:
    """Frames a sublayer of each variant and stage, and the functions that they are, most frequent first."""
    rows: dict[str, dict[str, Any]] = {}
    for label, (residual, settings) in VARIANTS.items():
        counts = stages(residual, settings)
        rows[label] = {
            stage: {
                "frames_per_sublayer": sum(counts[stage].values()) / (2 * LAYERS),
                "functions": dict(counts[stage].most_common()),
            }
            for stage in STAGES
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="also the functions")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "frames_cpu.json")
    options = parser.parse_args()
    rows = run()
    text = [["frames a sublayer", *STAGES]]
    for label, row in rows.items():
        text.append([label, *(f"{row[stage]['frames_per_sublayer']:.1f}" for stage in STAGES)])
        for stage in STAGES if options.lines else ():
            for name, count in row[stage]["functions"].items():
                text.append([f"    {stage}: {name}", f"{count / (2 * LAYERS):.2f}", "", ""])
    print(harness.table(text))
    result = harness.head("frames", torch.device("cpu"), "fp32", 0)
    result |= {"cpu_kernels": cpu.load() is not None, "layers": LAYERS, "rows": rows}
    harness.write_json(options.out, result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
