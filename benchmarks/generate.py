"""Tokens a second of text generation beside the base model: Transformers' own `generate` with its KV cache, greedy.

    python benchmarks/generate.py                               # random models: nano and 100m on a CPU, 0.6b on a GPU
    python benchmarks/generate.py --models Qwen/Qwen3-0.6B      # pretrained ones, folders or names on the hub

Each model runs as its own class has it ("plain"), with the standard residual in our stream ("standard"), and converted
to Block and Full, all around the same weights; in turn, the order changing each round. Counted is the time from the
first new token to the last; the prompt's pass is not.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
from harness import DTYPES

from attnres import UserError, convert
from attnres.device import Spread, in_turn, spread
from attnres.evals.decoding import decode_rate
from attnres.models import SIZES, build_plain
from attnres.models.open import open_checkpoint
from attnres.training.environment import tune

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("standard", {}),
    "block": ("block", {"num_blocks": 8}),
    "full": ("full", {}),
}
"""Beside "plain", the base that ratios are to."""
VOCABULARY = 4096
SMALL = {"cuda": ["0.6b"], "cpu": ["nano", "100m"]}


def base_model(name: str, dtype: torch.dtype, positions: int, seed: int) -> Any:
    """A plain Transformers model: a name in `SIZES` with random weights, else a folder or a name on the hub."""
    if name not in SIZES:
        return open_checkpoint(name).load(dtype)
    return build_plain(name, vocab_size=VOCABULARY, max_positions=positions, seed=seed).to(dtype).eval()


def run(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    prompt: int,
    tokens: int,
    rounds: int,
    seed: int,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """One base model and what it converts to: label -> tokens/s and its ratio to the base model's."""
    plain = base_model(name, dtype, prompt + tokens, seed)
    models = {"plain": plain}
    models |= {label: convert(plain, residual, **settings) for label, (residual, settings) in VARIANTS.items()}
    for model in models.values():
        tune(model, device, prompt + tokens)
        model.to(device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(plain.config.vocab_size, VOCABULARY), (1, prompt), generator=generator).to(device)
    bar = harness.progress(f"generate {name}", rounds)
    measures = {label: partial(decode_rate, model, ids, tokens) for label, model in models.items()}
    rates = in_turn(measures, rounds=rounds, warm_up=1, on_round=lambda done: bar.advance(1, f"round {done}"))
    rows = {label: summary(rate, rates["plain"]) for label, rate in rates.items()}
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    say(f"{name}, {parameters:,} parameters, {tokens} tokens after {prompt}, {rounds} rounds\n{lines(rows)}\n")
    return {"parameters": parameters, "family": type(plain).__name__, "rows": rows}


def summary(rates: list[float], base: list[float]) -> dict[str, Any]:
    """Medians and quartiles of tokens/s and of the rounds' ratios to the base model's."""
    rate, *rest = spread(rates, base)
    return {"tokens_per_s": rate, **dict(zip(Spread._fields[1:], rest)), "rounds": len(rates)}


def lines(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as text."""
    text = [["", "tokens/s", "quartiles", "ratio to plain", "quartiles"]]
    for label, row in rows.items():
        spreads = [
            f"{low:.{d}f}-{high:.{d}f}" for (low, high), d in ((row["quartiles"], 1), (row["ratio_quartiles"], 3))
        ]
        text.append([label, f"{row['tokens_per_s']:.1f}", spreads[0], f"{row['ratio']:.3f}", spreads[1]])
    return harness.table(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser)
    parser.add_argument("--models", nargs="+", default=None, help="names in attnres.models.SIZES, folders, hub names")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens, at least 2")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one that warms up")
    options = parser.parse_args()
    if min(options.prompt, options.tokens - 1, options.rounds) < 1:
        parser.error("--prompt and --rounds are at least 1, --tokens at least 2")
    device = harness.settle(options, "generate")
    shape = {"prompt": options.prompt, "tokens": options.tokens}
    result = harness.head("generate", device, options.dtype, options.seed) | {"shape": shape, "models": {}}
    for name in options.models or SMALL[device.type]:
        how = {**shape, "rounds": options.rounds, "seed": options.seed}
        try:
            result["models"][name] = run(name, device, DTYPES[options.dtype], **how)
        except UserError as error:
            parser.error(str(error))
    panels = {name: {k: row["ratio"] for k, row in model["rows"].items()} for name, model in result["models"].items()}
    title = f"Text generation, {result['environment']['device']}"
    harness.finish(options.out, result, panels, "tokens/s, as a ratio to the base model's", title)


if __name__ == "__main__":
    main()
