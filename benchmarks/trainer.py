"""Our training loop beside Hugging Face's `Trainer`: the same weights, batches, precision and AdamW, steps in turn.

    python benchmarks/trainer.py                          # nano at 4 x 128 and 8 x 256 tokens, fp32 and bf16; minutes
    python benchmarks/trainer.py --device cuda --shapes 16x1024

Rows: the plain model in `Trainer`; the same with the standard residual, and with Block, in our loop. Each row is a
process of its own, which waits while the others take their turn of a few steps. What counts is the time of a turn:
batches, forward, backward, clipping, the optimizer, and what either writes of it.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import harness
import torch

from attnres.device import in_turn
from attnres.training import TrainConfig, from_dict

ROWS = {"Trainer, plain": None, "attnres, standard": "standard", "attnres, block": "block"}
STEPS, TURNS, WARM_UP = 5, 200, 4


def config_of(residual: str | None, options: argparse.Namespace, folder: Path) -> TrainConfig:
    """The run whose steps are timed; it validates and saves only after them."""
    batch, length = map(int, options.shape.split("x"))
    never = STEPS * (TURNS + WARM_UP + 2)
    values: dict[str, Any] = {
        "model": {"size": options.size, "residual": residual or "standard"},
        "data": {"seq_len": length, "val_windows": 1, "source": options.source},
        "out": str(folder / "run"),
        "steps": never,
        "batch_size": batch,
        "dtype": options.dtype,
        "device": options.device,
        "depth_every": 0,
        **dict.fromkeys(("val_every", "save_every"), never),
    }
    if residual == "block":
        values["model"]["num_blocks"] = 4
    return from_dict(values)


def wait(began: float | None, answers: TextIO) -> float:
    """Say how long the turn took that began then, if one did, and wait for the next one; return when it begins."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if began is not None:
        print(time.perf_counter() - began, file=answers, flush=True)
    if not sys.stdin.readline():
        sys.exit(0)
    return time.perf_counter()


def run_ours(config: TrainConfig) -> None:
    """Take turns of `STEPS` steps in our loop."""
    from attnres.training.interrupt import Signals
    from attnres.training.parallel import join_processes
    from attnres.training.prepare import prepare_run
    from attnres.training.run import Run

    run, signals = Run(prepare_run(config), join_processes(config.device), progress=False), Signals()
    began = wait(None, sys.stdout)
    while True:
        for _ in range(STEPS):
            run.step(signals)
            run.measure()
        began = wait(began, sys.stdout)


def run_trainer(config: TrainConfig, folder: Path) -> None:
    """The same in `Trainer`, with the plain model."""
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from attnres.models import build_plain
    from attnres.training.data import open_data
    from attnres.training.environment import tune
    from attnres.training.parallel import join_processes
    from attnres.training.prepare import prepare_run

    answers, sys.stdout = sys.stdout, sys.stderr  # what it logs is no answer
    config = prepare_run(config).config
    who = join_processes(config.device)
    prepared, batches, _ = open_data(config.data, who, batch_size=config.batch_size, seed=config.seed, progress=False)
    length = config.data.seq_len
    model: Any = build_plain(config.model.size or "nano", vocab_size=prepared.vocab_size, max_positions=length)
    tune(model, who.device, length)

    class Windows(Dataset):
        """The windows that our loop takes, in its order."""

        def __len__(self) -> int:
            return config.steps * config.batch_size

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            start = int(batches.starts(index // config.batch_size)[index % config.batch_size])
            ids = torch.from_numpy(batches.tokens[start : start + length + 1])
            return {"input_ids": ids[:-1], "labels": ids[:-1]}

    class Turns(TrainerCallback):
        began: float | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % STEPS == 0:
                self.began = wait(self.began, answers)

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=config.batch_size,
        max_steps=config.steps,
        learning_rate=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        adam_beta2=config.optim.betas[1],
        max_grad_norm=config.optim.clip,
        optim="adamw_torch_fused",
        bf16=config.dtype == "bf16",
        use_cpu=who.device.type == "cpu",
        logging_steps=config.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows(), callbacks=[Turns()])
    trainer.train()


class Child:
    """A row's process."""

    def __init__(self, row: str, options: argparse.Namespace, folder: Path) -> None:
        command = [sys.executable, __file__, "--row", row, "--folder", str(folder), "--shape", options.shape]
        for name in ("size", "dtype", "device", "source"):
            command += [f"--{name}", getattr(options, name)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self) -> float:
        """Seconds of a step in the row's next turn."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a row ended with status {self.process.wait()}")
        return float(answer) / STEPS

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows: seconds of a step and ratios to `Trainer`'s."""
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        try:
            for number, row in enumerate(ROWS):  # one after the other: the first prepares the data
                children[row] = Child(row, options, Path(folder) / str(number))
                children[row].turn()
            turns: dict[str, Callable[[], float]] = {row: child.turn for row, child in children.items()}
            times = in_turn(turns, rounds=TURNS, seconds=options.seconds, warm_up=2)
        finally:
            for child in children.values():
                child.close()
    base = times[next(iter(ROWS))]
    return {row: harness.summary(values, base) for row, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_device(parser, ("fp32", "bf16"))
    parser.add_argument("--size", default="nano")
    parser.add_argument("--shapes", nargs="+", default=["4x128", "8x256"], help="sequences x tokens of a batch")
    parser.add_argument("--source", default="stdlib")
    for hidden in ("--row", "--folder", "--shape"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtypes = [options.dtype] if options.dtype else ["fp32", "bf16"]
    device = harness.settle(options, "trainer")
    if options.row:
        config = config_of(ROWS[options.row], options, Path(options.folder))
        return run_ours(config) if ROWS[options.row] else run_trainer(config, Path(options.folder))
    result = harness.head("trainer", device, ",".join(dtypes), 0) | {"size": options.size, "steps_a_turn": STEPS}
    groups: dict[str, dict[str, float]] = {}
    shapes = list(options.shapes)
    for options.shape in shapes:
        for options.dtype in dtypes:
            rows = result[f"{options.shape}, {options.dtype}"] = measure(options)
            table = [["loop", "ms a step", "ratio", "quartiles", "turns"]]
            for row, values in rows.items():
                low, high = values["ratio_quartiles"]
                numbers = [f"{values['median_s'] * 1e3:.4g}", f"{values['ratio']:.3f}", f"{low:.3f}-{high:.3f}"]
                table.append([row, *numbers, str(values["rounds"])])
            print(f"{options.size}, {options.shape}, {options.dtype}\n{harness.table(table)}\n", flush=True)
            groups[f"{options.shape}, {options.dtype}"] = {row: values["ratio"] for row, values in rows.items()}
    harness.finish(options.out, result, groups, "time, as a ratio to Trainer", "A training step in two loops")


if __name__ == "__main__":
    main()
