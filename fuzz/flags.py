"""Hostile values for the flags of every command."""

import itertools
import random
import shutil
from collections.abc import Callable

from fuzz.forked import Worker
from fuzz.inputs import snapshot
from fuzz.material import Material
from fuzz.tally import Tally

VALUES = (
    *("", " ", "-1", "0", "1e400", "nan", "inf", "9" * 5000, "x", "[[", "{{{{" * 600, "a" * 300, "~nosuchuser/x"),
    *("../..", "/dev/null", "/proc/self/mem", ".", "a\nb", "none", "True", "{}", "{a: 1}", "{family: llama}", "--help"),
    *("hub:", "hub:a:b:c:d", "bpe:1", "bpe:99999999999", "²", "\udcff", "name=\udcff", "block:num_blocks=x", "a=b"),
    *("task:", "task:nosuch", "full@lr=x", "nosuch.py:A", "\x1b[2J", "0x10", "1_000", "embedding@99", "-0.5"),
)
FLAGS = {
    "train": "config source tokenizer size residual steps batch-size lr seq-len seed out name device dtype betas "
    "init-from settings held-out limit column block-size accumulation save-every keep-at residual-lr residual-hold "
    "warmup decay momentum clip weight-decay val-every log-every depth-every val-windows pp-layers lora-rank",
    "compare": "variants seeds lrs jobs out timing-s config steps",
    "prepare": "source tokenizer column held-out limit out",
    "convert": "residual block-size num-blocks read-scale settings dtype to",
    "eval": "tasks data limit window stride batch-tokens dtype device out lm-eval-tasks",
    "generate": "prompt max-new-tokens temperature top-k top-p seed dtype device beside",
    "inspect": "text file corpus limit context kind out threshold knock-out batch-tokens dtype device column",
    "search": "by top text file corpus limit context out batch-tokens dtype device column",
    "figures": "formats limit text",
    "report": "out images",
    "app": "host port",
    "export": "model out",
    "study": "name preset seeds source images out jobs budget executor slurm adopt",
    "plan": "model gpus residual settings vocab-size dp shard pp schedule microbatches batch context gpu rows",
    "check": "residual settings",
    "mechanisms": "names format",
    "env": "nosuch",
    "families": "nosuch",
}
POSITIONAL = ("model", "name", "names")
"""Values without a flag. `residual` of check is one too, and refused as a flag."""


def try_flags(material: Material, tally: Tally, cases: int, *, more: Callable[[], bool] = lambda: True) -> None:
    """Try so many command lines with one or two hostile values each."""
    worker = Worker()
    try:
        for _ in itertools.repeat(None, cases):
            if not more():
                return
            words, verdict, said = _try(material, tally.tried("flags"), worker)
            tally.count("flags", verdict, " ".join(words), said=said)
    finally:
        worker.close()


def retry_flags(material: Material, tally: Tally) -> None:
    """Try again what failed."""
    worker = Worker()
    for failure in tally.failures("flags"):
        _, verdict, said = _try(material, failure["case"], worker)
        tally.again(failure, verdict, said)
    worker.close()


def _try(material: Material, number: int, worker: Worker) -> tuple[list[str], str, str]:
    """The command line of this number, how it ended and what it said."""
    elsewhere, draw = material.root / "elsewhere", random.Random(number)
    command = sorted(FLAGS)[number % len(FLAGS)]
    words, flags = _begin(material, command), FLAGS[command].split()
    for flag in draw.sample(flags, min(len(flags), draw.choice((1, 1, 2)))):
        words += [draw.choice(VALUES)] if flag in POSITIONAL else [f"--{flag}", draw.choice(VALUES)]
    shutil.rmtree(elsewhere, ignore_errors=True)
    elsewhere.mkdir()
    before = snapshot(material)
    outcome = worker.run(words, seconds=20, cwd=elsewhere)
    verdict = "changed" if snapshot(material) != before else outcome.verdict
    if verdict == "slow":
        verdict = "ran on"  # a legal value that asks for much
    return words, verdict, outcome.said[-600:]


def _begin(material: Material, command: str) -> list[str]:
    """The command with what it needs, doing little."""
    quick = ["--no-progress"]
    begin = {
        "train": [*material.train(material.root / "out")[1:], "--steps", "1"],
        "compare": ["--steps", "0"],
        "prepare": ["--source", str(material.corpus), "--tokenizer", "bpe:280"],
        "convert": [str(material.plain), str(material.root / "out")],
        "eval": [str(material.run), "--tasks", str(material.task), *quick],
        "generate": [str(material.run), "--prompt", "read", "--max-new-tokens", "2"],
        "inspect": [str(material.run), "--text", "stream read write", *quick],
        "search": [str(material.run), "embedding@output", "--text", "stream read write", *quick],
        "figures": [str(material.run / "inspection.json"), str(material.root / "out")],
        "report": [str(material.run), "--out", str(material.root / "out")],
        "app": [str(material.root / "absent")],
        "study": ["--dry-run"],
        "plan": ["--rows", "1"],
    }
    return [command, *begin.get(command, [])]
