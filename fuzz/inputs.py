"""Damaged files of every kind, each given to the commands that read it."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.forked import forked
from fuzz.material import SHORT, STEPS, Material
from fuzz.mutations import mutate
from fuzz.tally import Tally

Words = Callable[[Path, Path], list[str]]
"""A command line from the copied folder and a folder to write."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: the folder that is copied, the file in it that is damaged, how, and who reads it."""

    name: str
    folder: str
    file: str
    content: str
    words: Words
    unfinished: bool = False  # take the run's summary away, so that it is resumed


def kinds(material: Material) -> list[Kind]:
    """Every kind of file that is read back or taken in."""

    def report(here: Path, out: Path) -> list[str]:
        return ["report", str(here), "--out", str(out)]

    def resume(here: Path, out: Path) -> list[str]:
        return material.train(here, "--resume")

    def generate(here: Path, out: Path) -> list[str]:
        return ["generate", str(here), "--prompt", "stream read", "--max-new-tokens", "3", "--device", "cpu"]

    def inspect(here: Path, out: Path) -> list[str]:
        return ["inspect", str(here), "--text", "stream read write", "--no-progress", "--device", "cpu"]

    def convert(here: Path, out: Path) -> list[str]:
        return ["convert", str(here), str(out)]

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

    def configured(here: Path, out: Path) -> list[str]:
        flags = [*SHORT, "--source", str(material.tokens), "--size", "nano", "--steps", "0"]  # refused when it is read
        return ["train", "--config", str(here / "config.yaml"), *flags, "--out", str(out)]

    last = f"val/{STEPS:06d}.npy"
    return [
        *(Kind(name, "run", name, "json", report) for name in ("config.json", "summary.json", "data.json")),
        *(Kind(name, "run", name, "json", report) for name in ("environment.json", "inspection.json")),
        Kind("metrics.jsonl", "run", "metrics.jsonl", "jsonl", report),
        Kind("val/STEP.npy", "run", last, "binary", report),
        Kind(
            "inspection.json, drawn",
            "run",
            "inspection.json",
            "json",
            lambda h, o: ["figures", f"{h}/inspection.json", str(o), "--formats", "png"],
        ),
        *(
            Kind(f"{name}, resumed", "run", name, "json", resume, unfinished=True)
            for name in ("config.json", "data.json")
        ),
        Kind("metrics.jsonl, resumed", "run", "metrics.jsonl", "jsonl", resume, unfinished=True),
        Kind("checkpoint/state.json", "run", "checkpoint/state.json", "json", resume, unfinished=True),
        Kind("checkpoint/model/config.json", "run", "checkpoint/model/config.json", "json", resume, unfinished=True),
        Kind("checkpoint/optimizer", "run", "checkpoint/optimizer.safetensors", "binary", resume, unfinished=True),
        Kind("model/config.json", "run", "model/config.json", "json", generate),
        Kind("model/generation_config.json", "run", "model/generation_config.json", "json", generate),
        Kind("model/tokenizer.json", "run", "model/tokenizer.json", "json", inspect),
        Kind("model/tokenizer_config.json", "run", "model/tokenizer_config.json", "json", inspect),
        Kind("model/model.safetensors", "run", "model/model.safetensors", "binary", generate),
        Kind("plain config.json", "plain", "config.json", "json", convert),
        Kind("plain model.safetensors", "plain", "model.safetensors", "binary", convert),
        Kind("plain tokenizer_config.json", "plain", "tokenizer_config.json", "json", convert),
        Kind("header.json", "tokens", "header.json", "json", train_on),
        Kind("shard", "tokens", "train-00000.bin", "binary", train_on),
        Kind("tokenizer.json", "tokens", "tokenizer.json", "json", tokenise),
        Kind("text", "corpus", "0.txt", "binary", prepare),
        Kind("configuration", "config.yaml", "config.yaml", "text", configured),
        Kind("task", "task.jsonl", "task.jsonl", "jsonl", score),
    ]


def try_inputs(
    material: Material, tally: Tally, cases: int, *, only: str = "", more: Callable[[], bool] = lambda: True
) -> None:
    """Try so many damaged files, kind after kind, as long as there is `more` time."""
    every = [kind for kind in kinds(material) if only in kind.name]
    for _ in range(cases):
        number = tally.tried("inputs")
        if not more():
            return
        kind, draw = every[number % len(every)], random.Random(number)
        verdict, said = _try(material, kind, draw)
        tally.count("inputs", verdict, f"{kind.name}, seed {number}", said=said)


def _try(material: Material, kind: Kind, draw: random.Random) -> tuple[str, str]:
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
    path = here / kind.file
    damaged = mutate(path.read_bytes(), draw, kind.content)
    path.unlink()  # the original is a link
    path.write_bytes(damaged)
    before = snapshot(material)
    outcome = forked(kind.words(here, out))
    verdict = "changed" if snapshot(material) != before else outcome.verdict
    return verdict, outcome.said[-600:]


def _link(source: str, target: str) -> None:
    """Files of a run are replaced and never changed where they lie, but for metrics.jsonl, which is appended to."""
    os.link(source, target)


def snapshot(material: Material) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of what no command may change."""
    places = [material.corpus, material.tokens, material.run, material.plain]
    files = [file for place in places for file in sorted(place.rglob("*")) if file.is_file()]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
