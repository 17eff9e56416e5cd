"""Damaged files of every kind, each given to the commands that read it."""

import itertools
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.forked import Worker
from fuzz.material import SHORT, SIZE, STEPS, Material, damageable
from fuzz.mutations import mutate
from fuzz.tally import Tally

Words = Callable[[Path, Path], list[str]]
"""A command line from the copied folder and a folder to write."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: the folder that is copied, the file in it that is damaged, how, and who reads it.

    Attributes:
        content: as in `mutate`.
        call: of `fuzz.forked.CALLS_OF`.
        unfinished: take the run's summary away, so that it is resumed.
        turns: how often in a round it is damaged: those whose readers are quick more often.
    """

    name: str
    folder: str
    file: str
    content: str
    words: Words
    call: str = "command"
    unfinished: bool = False
    turns: int = 1


def kinds(material: Material) -> list[Kind]:
    """Every kind of file that is read back or taken in."""

    def report(here: Path, out: Path) -> list[str]:
        return ["report", str(here), "--out", str(out)]

    def read(here: Path, out: Path) -> list[str]:
        return [str(here)]

    def figures(here: Path, out: Path) -> list[str]:
        return ["figures", f"{here}/inspection.json", str(out), "--formats", "png"]

    def resume(here: Path, out: Path) -> list[str]:
        return material.train(here, "--resume")

    def generate(here: Path, out: Path) -> list[str]:
        return ["generate", str(here), "--prompt", "stream read", "--max-new-tokens", "3", "--device", "cpu"]

    def inspect(here: Path, out: Path) -> list[str]:
        return ["inspect", str(here), "--text", "stream read write", "--no-progress", "--device", "cpu"]

    def convert(here: Path, out: Path) -> list[str]:
        return ["convert", str(here), str(out)]

    def begin(here: Path, out: Path) -> list[str]:
        words = [word for word in material.train(out, "--steps", "1") if word not in ("--size", SIZE)]
        return [*words, "--init-from", str(here)]

    def score(here: Path, out: Path) -> list[str]:
        task = str(here / "task.jsonl")
        return ["eval", str(material.run), "--tasks", task, "--no-progress", "--device", "cpu"]

    def prepare(here: Path, out: Path) -> list[str]:
        return ["prepare", "--source", str(here), "--tokenizer", str(material.tokens), "--out", str(out)]

    def tokenise(here: Path, out: Path) -> list[str]:
        return ["prepare", "--source", str(material.corpus), "--tokenizer", str(here), "--out", str(out)]

    def train_on(here: Path, out: Path) -> list[str]:
        words = material.train(out, "--steps", "1")
        return [str(here) if word == str(material.tokens) else word for word in words]

    def studied(here: Path, out: Path) -> list[str]:
        return ["study", "--report", "--out", str(here)]

    def study(here: Path, out: Path) -> list[str]:
        return material.study(here)

    def planned(here: Path, out: Path) -> list[str]:
        return [*material.study(here), "--dry-run"]

    def continued(here: Path, out: Path) -> list[str]:
        return material.compare(here)

    def configured(name: str) -> Words:
        flags = [*SHORT, "--source", str(material.root / "absent")]  # refused once the rest is understood
        return lambda here, out: ["train", "--config", str(here / name), *flags, "--out", str(out)]

    def trained(here: Path, out: Path) -> list[str]:
        flags = [*SHORT, "--source", str(material.tokens), "--size", SIZE, "--seq-len", "16", "--batch-size", "2"]
        return ["train", "--config", str(here / "config.yaml"), *flags, "--val-windows", "2", "--out", str(out)]

    def compared(here: Path, out: Path) -> list[str]:
        flags = ["--source", str(material.root / "absent"), "--out", str(out)]
        return ["compare", "--config", str(here / "comparison.yaml"), *flags]

    measures = "seconds/growth/growth/block-seed0/measures.json"
    last = f"val/{STEPS:06d}.npy"
    run_files = ("config.json", "summary.json", "data.json", "environment.json", "inspection.json")
    resumed_files = ("config.json", "data.json", "checkpoint/state.json", "checkpoint/model/config.json")
    group = "standard-seed0"
    return [
        *(Kind(name, "run", name, "json", read, "table", turns=20) for name in run_files),
        Kind("metrics.jsonl", "run", "metrics.jsonl", "jsonl", read, "table", turns=20),
        Kind("val/STEP.npy", "run", last, "npy", read, "table", turns=20),
        Kind("compare.json", "comparison", "compare.json", "json", read, "table", turns=20),
        Kind("speed.json", "comparison", "speed.json", "json", read, "table", turns=20),
        Kind("config.json of a comparison", "comparison", f"{group}/config.json", "json", read, "table", turns=6),
        Kind("metrics.jsonl, reported", "run", "metrics.jsonl", "jsonl", report),
        Kind("inspection.json, drawn", "run", "inspection.json", "json", figures),
        Kind("compare.json, continued", "comparison", "compare.json", "json", continued),
        Kind("study.json", "studies", "seconds/growth/study.json", "json", studied, turns=6),
        Kind("measures.json", "studies", measures, "json", study, turns=6),
        Kind("result.json of a study", "studies", "seconds/noise/result.json", "json", planned, turns=6),
        Kind("environment.json, resumed", "run", "environment.json", "json", resume, unfinished=True),
        *(Kind(f"{name}, resumed", "run", name, "json", resume, unfinished=True, turns=2) for name in resumed_files),
        Kind("metrics.jsonl, resumed", "run", "metrics.jsonl", "jsonl", resume, unfinished=True),
        Kind(
            "checkpoint/optimizer",
            "run",
            "checkpoint/optimizer.safetensors",
            "safetensors",
            resume,
            unfinished=True,
            turns=2,
        ),
        Kind("model/config.json", "run", "model/config.json", "json", generate, turns=12),
        Kind("model/generation_config.json", "run", "model/generation_config.json", "json", generate, turns=6),
        Kind("model/tokenizer.json", "run", "model/tokenizer.json", "json", inspect, turns=2),
        Kind("model/tokenizer_config.json", "run", "model/tokenizer_config.json", "json", inspect, turns=2),
        Kind("model/model.safetensors", "run", "model/model.safetensors", "safetensors", generate, turns=12),
        Kind("plain config.json", "plain", "config.json", "json", convert, turns=12),
        Kind("plain config.json, trained", "plain", "config.json", "json", begin),
        Kind("plain model.safetensors", "plain", "model.safetensors", "safetensors", convert, turns=12),
        Kind("index of weights", "indexed", "model.safetensors.index.json", "json", convert, turns=6),
        Kind("plain tokenizer_config.json", "plain", "tokenizer_config.json", "json", convert, turns=6),
        Kind("header.json", "tokens", "header.json", "json", train_on, turns=4),
        Kind("shard", "tokens", "train-00000.bin", "binary", train_on, turns=2),
        Kind("tokenizer.json", "tokens", "tokenizer.json", "json", tokenise, turns=16),
        Kind("text", "corpus", "0.txt", "binary", prepare, turns=12),
        Kind("lines of text", "lines.jsonl", "lines.jsonl", "jsonl", prepare, turns=16),
        Kind("configuration, YAML", "config.yaml", "config.yaml", "text", configured("config.yaml"), turns=20),
        Kind("configuration, TOML", "config.toml", "config.toml", "text", configured("config.toml"), turns=12),
        Kind("configuration, JSON", "config.json", "config.json", "json", configured("config.json"), turns=16),
        Kind("configuration, trained", "config.yaml", "config.yaml", "text", trained, turns=2),
        Kind("configuration of a comparison", "comparison.yaml", "comparison.yaml", "text", compared, turns=8),
        Kind("task", "task.jsonl", "task.jsonl", "jsonl", score, turns=2),
    ]


def try_inputs(
    material: Material, tally: Tally, cases: int, *, quick: bool = False, more: Callable[[], bool] = lambda: True
) -> None:
    """Try so many damaged files, kind after kind, as long as there is `more` time; `quick` ones alone."""
    order = _order(material, quick)
    worker = Worker()
    try:
        for _ in itertools.repeat(None, cases):
            number = tally.tried("inputs")
            if not more():
                return
            kind, draw = order[number % len(order)], random.Random(number)
            verdict, said = _try(material, kind, draw, worker)
            tally.count("inputs", verdict, f"{kind.name}, seed {number}", said=said)
            tally.count_kind(kind.name)
    finally:
        worker.close()


def retry_inputs(material: Material, tally: Tally) -> None:
    """Try again what failed: what ends well now is counted so, and stands under `mended`."""
    order, worker = _order(material), Worker()
    for failure in tally.failures("inputs"):
        number = failure["case"]
        kind = order[number % len(order)]
        verdict, said = _try(material, kind, random.Random(number), worker)
        tally.again(failure, verdict, said)
    worker.close()


def _order(material: Material, quick: bool = False) -> list[Kind]:
    """The kinds of a round, those with more turns more often; `quick`: those whose readers are."""
    every = [kind for kind in kinds(material) if (material.root / kind.folder).exists() and kind.turns > 2 * quick]
    return [kind for turn in range(max(kind.turns for kind in every)) for kind in every if turn < kind.turns]


def _try(material: Material, kind: Kind, draw: random.Random, worker: Worker) -> tuple[str, str]:
    here, out = material.root / "case", material.root / "out"
    for folder in (here, out):
        shutil.rmtree(folder, ignore_errors=True)
    source = material.root / kind.folder
    if source.is_dir():
        shutil.copytree(source, here, copy_function=_link)
    else:
        here.mkdir()
        shutil.copyfile(source, here / kind.file)
    if kind.unfinished:
        shutil.rmtree(here / "model")
        (here / "summary.json").unlink()
    for path in (here / "metrics.jsonl", here / kind.file):  # those that are changed where they lie: here only
        if path.exists():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    path = here / kind.file
    path.write_bytes(mutate(path.read_bytes(), draw, kind.content))
    before = snapshot(material)
    outcome = worker.run(kind.words(here, out), name=kind.call)
    verdict = "changed" if snapshot(material) != before else outcome.verdict
    return verdict, outcome.said[-600:]


def _link(source: str, target: str) -> None:
    """Files are replaced and never changed where they lie, but for metrics.jsonl, which is appended to."""
    os.link(source, target)


def snapshot(material: Material) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of what no command may change."""
    files = [file for place in damageable(material) for file in sorted(place.rglob("*")) if file.is_file()]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
