"""Time that the host takes to hand a step to a GPU, without one: Triton compiles for sm_90 and launches nothing.

    python benchmarks/host.py                # twelve layers of a few tokens, some minutes

All of Python, of PyTorch's dispatch and of Triton's launch is done but the call of the driver; vectors lie on the CPU
and are so small that their arithmetic takes no time. What CUDA's own calls take (a launch, memory from its allocator)
is left out. Times are of the process, in turn, in seconds; ratios are to the plain Transformers model, round by round.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch

from attnres.device import in_turn, spread
from attnres.files import write_json
from attnres.models import build, build_plain
from attnres.ops.dispatch import KERNELS

SIZE = {
    "family": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, dict[str, Any]] = {"standard": {}, "block": {"num_blocks": 8}, "full": {}}
PROPERTIES = {
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 2619000,
    "mem_bus_width": 5120,
    "warpSize": 32,
}


class Driver:
    """Stands for Triton's driver of an H100; `launches` counts what would have run."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = mock.Mock(
            load_binary=lambda *_: (1, 2, 32, 0, 1024),
            get_device_properties=lambda _: PROPERTIES,
            unload_module=lambda _: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return self._launched

    def _launched(self, *arguments: Any) -> None:
        self.launches += 1

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return ty_to_cpp(kind)


@contextlib.contextmanager
def on_a_stub() -> Generator[Driver]:
    """Take CUDA's path for vectors on the CPU, with a driver that launches nothing."""
    os.environ.pop("TRITON_INTERPRET", None)
    from triton.runtime import driver

    stub: Any = Driver()
    driver.set_active(stub)
    with mock.patch.dict(KERNELS, {"cpu": KERNELS["cuda"]}):
        yield stub


def forward(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, use_cache=False).logits.sum()


def timed(way: str, model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Seconds of the process for one way of a step."""
    began = time.process_time()
    loss = forward(model, ids)
    between = time.process_time()
    loss.backward()
    ended = time.process_time()
    model.zero_grad(set_to_none=True)
    return between - began if way == "forward" else ended - between


def run(layers: int, tokens: int, rounds: int, say: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Rows by variant: seconds of forward and backward, their ratios to plain, launches, and microseconds a sublayer
    beyond plain."""
    size, options = SIZE | {"num_hidden_layers": layers}, {"vocab_size": 64, "max_positions": 64}
    ids = torch.zeros(1, tokens, dtype=torch.long)
    models = {"plain": build_plain(size, **options)}
    models |= {name: build(size, name, settings=settings, **options) for name, settings in VARIANTS.items()}
    rows: dict[str, Any] = {name: {} for name in models}
    with on_a_stub() as driver:
        for way in ("forward", "backward"):
            calls = {name: partial(timed, way, model, ids) for name, model in models.items()}
            times = in_turn(calls, rounds=rounds, on_round=say)
            for name, row in rows.items():
                row[way] = harness.summary(times[name], times["plain"])
                beyond = [one - plain for one, plain in zip(times[name], times["plain"], strict=True)]
                row[way]["beyond_plain_us_a_sublayer"] = spread(beyond, times["plain"]).median * 1e6 / (2 * layers)
        for name, model in models.items():
            driver.launches = 0
            forward(model, ids).backward()
            rows[name]["launches"] = driver.launches
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "host.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = harness.head("host", torch.device("cpu"), "bf16", 0)
    result["rows"] = rows = run(options.layers, options.tokens, options.rounds)
    write_json(options.out, result)
    table = [["", "forward, ms", "backward, ms", "ratios", "beyond plain, us a sublayer", "launches"]]
    for name, row in rows.items():
        ways = [row[way] for way in ("forward", "backward")]
        beyond = " + ".join(f"{way['beyond_plain_us_a_sublayer']:.0f}" for way in ways)
        table.append(
            [
                name,
                *(f"{way['median_s'] * 1e3:.2f}" for way in ways),
                " ".join(f"{way['ratio']:.3f}" for way in ways),
                beyond,
                str(row["launches"]),
            ]
        )
    print(harness.table(table))


if __name__ == "__main__":
    main()
