"""One command for a machine with a GPU: experiments in a fixed order of worth, none of which can lose another's rows.

    python benchmarks/round.py --budget 540        # nine minutes; again goes on where that stopped
    python benchmarks/round.py --list              # the experiments, their limits and what became of them
    python benchmarks/round.py --only "step 0.6b" train
    python benchmarks/round.py --page              # the tables of the documentation and README, from the rows

Each experiment is a process with a limit. A row is a line of `gpu.jsonl`, written the moment it exists, with the hash
of the kernels' sources, the device and the versions; an experiment that has ended with the same ones is not repeated.
What fails leaves its traceback, and the next prepared way to capture a step is tried. No network is used: `make
gpu-pack` packs what a machine with PyTorch and Transformers alone lacks, which is put on the path; what one machine
has compiled comes back as an archive (`--caches`) that the next machine's pack may hold. A machine that is thrown away
afterwards sends its rows home with `--rows build/round/gpu.jsonl --copy FOLDER/gpu.jsonl`.
"""

import argparse
import atexit
import hashlib
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from trained import BLOCK, TABLE, table, training_page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROWS = HERE / "results" / "gpu.jsonl"
TRIED = ROOT / "build" / "round" / "cpu.jsonl"
"""Rows of everything in small, which stand on no page."""
PACK = ROOT / "build" / "gpu-pack"
KERNELS = (
    *("attnres/ops", "attnres/streams", "attnres/residuals/mechanisms"),
    *(f"attnres/{name}.py" for name in ("device", "head", "loss_kernel", "comparison/speed", "scale/shard")),
    *(f"attnres/models/{name}.py" for name in ("build", "families", "outputs")),
    *(f"attnres/residuals/{name}.py" for name in ("base", "program", "queries", "values", "watch")),
    *(f"attnres/training/{name}.py" for name in ("graphs", "layout", "muon", "objective", "optim", "step")),
    *("benchmarks/busy.py", "benchmarks/step.py"),
)
"""What the time of a step depends on: rows of other sources are rows of another program."""
WARMED = 2
"""Experiments of steps whose kernels are compiled beforehand, side by side."""
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Folders of the pack for compiled kernels."""
CACHED = 10 << 20
"""Bytes of an archive of them, from which nothing is added to it."""
IMPORTS = 180.0
"""Seconds that all imports may take: ten where they were read before, more from a disk that has not read them yet."""
LEAST = 20.0
"""Seconds below which no experiment is begun."""
NEEDED = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "yaml"),
    *("tyro", "docstring_parser", "typeguard", "rich", "pygments"),
    "attnres.training",
)
"""Without these no experiment runs: those that come with PyTorch, Triton and Transformers; those of the pack; ours."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where an experiment runs: the device, whether everything is tiny, the packed folder, the folder of the rows."""

    device: str
    tiny: bool
    pack: Path
    out: Path


# ------------------------------------------------------------------ kinds of experiments


@dataclass(frozen=True)
class Steps:
    """Training steps of some variants beside the plain model's (`busy.py`); a row each."""

    seconds: float
    size: str
    variants: tuple[str, ...]
    mode: str
    batch: int
    length: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    vocabulary: int | None = None
    loss: str = "auto"

    NEXT: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "graphs": ("graphs", "graphs of passes", "graphs of layers", "reduce-overhead"),
        "compile+graphs": ("compile+graphs", "reduce-overhead", "graphs of layers"),
    }
    """What is tried in turn until a step is captured."""

    def _size(self, place: Place) -> Any:
        from step import SIZES, Size, _qwen3

        size = Size(_qwen3(32, 4), 64, 2, 16) if place.tiny else SIZES[self.size].sized(self.batch, self.length)
        return size if self.vocabulary is None or place.tiny else replace(size, vocabulary=self.vocabulary)

    def warm(self, place: Place, label: str) -> None:
        """Take two steps of a variant, of one sequence: they compile the kernels that its steps launch."""
        from step import VARIANTS

        from attnres.comparison.speed import StepOptions, training_steps

        size = self._size(place)
        shape: dict[str, Any] = {"vocab_size": size.vocabulary, "seq_len": size.length, "batch_size": 1}
        options = StepOptions(size.model, **shape, dtype=self.dtype, device=place.device, loss="whole")
        step = training_steps({label: VARIANTS[label]}, options)[label]
        for _ in range(2):
            step()

    def rows(self, place: Place, done: Sequence[Row]) -> Iterator[Row]:
        import busy
        import torch

        size = self._size(place)
        how: dict[str, Any] = {"dtype": self.dtype, "optimizer": self.optimizer, "seconds": 0.0 if place.tiny else 6.0}
        # One plain model serves all variants: a build of 0.6 B takes seconds, a compile more.
        how |= {"loss": self.loss, "plains": {}}
        measured = {row["variant"] for row in done if "ms" in row}
        failed = {(row["variant"], row["mode"]) for row in done if "error" in row and "mode" in row}
        for label in self.variants:
            if label in measured:
                continue
            for mode in self.NEXT.get(self.mode, (self.mode,)):
                if (label, mode) in failed:
                    continue
                if mode not in how["plains"]:  # another mode's plain model would keep its graphs' memory
                    how["plains"].clear()
                    measured.discard("plain")
                shapes = {"variant": label, "mode": mode, "size": self.size, "tokens": size.batch * size.length}
                known, taken = "plain" in measured, ""
                try:
                    for row in busy.measure([label], size, torch.device(place.device), mode=mode, **how):
                        if row["variant"] == label or not known:
                            yield shapes | row
                            measured.add(row["variant"])
                        taken = row["step"] if row["variant"] == label else taken
                except Exception:
                    yield shapes | {"dtype": self.dtype, "error": traceback.format_exc()}
                    how["plains"].clear()
                    if is_lost(place.device):
                        raise
                if taken and ("graphs" not in mode or taken.startswith("captured")):
                    break
                measured.discard(label)


@dataclass(frozen=True)
class Equality:
    """Losses of captured steps beside the eager ones', with accumulation and dropout, and of eager ones made again."""

    seconds: float
    steps: int = 200
    TOLERANCE: ClassVar[float] = 1e-4

    def rows(self, place: Place, done: Sequence[Row]) -> Iterator[Row]:
        import torch

        from attnres.comparison.speed import StepOptions, training_steps

        # Of few layers: eager steps wait for the host, some 7 ms a sublayer with accumulation.
        size = {"family": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
        batch, length, vocabulary, count = 8, 128, 512, self.steps
        if place.tiny:
            size, batch, length, count = size | {"n_embd": 16, "n_layer": 2, "n_head": 2}, 2, 8, 8
        on, generator = torch.device(place.device), torch.Generator().manual_seed(0)
        # A language to learn, so that losses move: each token follows from the one before, nine times in ten.
        tokens = torch.randint(vocabulary, (count, batch, length + 1), generator=generator)
        follows = torch.rand(tokens.shape, generator=generator) < 0.9
        for index in range(1, length + 1):
            tokens[..., index] = torch.where(
                follows[..., index], (tokens[..., index - 1] * 7 + 3) % vocabulary, tokens[..., index]
            )
        tokens = tokens.to(on)
        variants = {"standard": ("standard", {}), "block": ("block", {"block_size": 2}), "full": ("full", {})}
        for label, variant in variants.items():
            if label in {row["variant"] for row in done if "captured" in row}:
                continue
            losses, paths = {}, {}
            for kind in ("eager", "again", "captured"):
                shape: dict[str, Any] = {"size": size, "vocab_size": vocabulary, "seq_len": length, "batch_size": batch}
                options = StepOptions(**shape, accumulation=2, device=str(on), cuda_graphs=kind == "captured")
                step = training_steps({label: variant}, options)[label]
                torch.manual_seed(0)
                values = []
                for each in tokens:
                    step.x, step.y = each[:, :-1], each[:, 1:]
                    values.append(step()[0][0].clone())
                losses[kind], paths[kind] = torch.stack(values).tolist(), step.path
            apart = {kind: _apart(losses[kind], losses["eager"]) for kind in ("again", "captured")}
            yield {
                "variant": label,
                "steps": count,
                "accumulation": 2,
                "dropout": 0.1,
                "step": paths["captured"],
                **apart,
                "equal": paths["captured"].startswith("captured")
                and apart["captured"] <= max(self.TOLERANCE, 3 * apart["again"]),
                "losses": {kind: [round(loss, 6) for loss in losses[kind]] for kind in ("eager", "captured")},
            }


@dataclass(frozen=True)
class Wrapper:
    """What Inductor writes for a compiled step on a GPU, which it does nowhere else: a row of each variant."""

    seconds: float
    size: str
    variants: tuple[str, ...]
    batch: int
    length: int
    layers: int = 4

    def rows(self, place: Place, done: Sequence[Row]) -> Iterator[Row]:
        if place.tiny:
            yield {"passed_over": "it needs a CUDA device"}
            return
        from step import SIZES, VARIANTS
        from torch._inductor import config, utils

        from attnres.comparison.speed import StepOptions, training_steps

        size = SIZES[self.size].sized(self.batch, self.length)
        shape: dict[str, Any] = {"vocab_size": size.vocabulary, "seq_len": size.length, "batch_size": size.batch}
        model = dict(size.model) | {"num_hidden_layers": self.layers}
        options = StepOptions(model, **shape, dtype="bf16", device=place.device, compile=True)
        for label in self.variants:
            if label in {row.get("variant") for row in done}:
                continue
            step = training_steps({label: VARIANTS[label]}, options)[label]
            with config.patch(force_disable_caches=True):  # of a graph that is cached no wrapper is written
                _, written = utils.run_and_get_code(step)
            if not written:
                raise RuntimeError("Inductor wrote no wrapper")
            yield {"variant": label, "wrappers": len(written), **calls_in(written)}


def calls_in(wrappers: Sequence[str]) -> dict[str, int]:
    """Return how many launches the wrappers of Inductor hold, how many of them are of our kernels, and how many calls
    of our operators, which cost the host some 30 launches each: there should be none."""
    lines = [line.strip() for wrapper in wrappers for line in wrapper.splitlines()]
    launched = [line for line in lines if re.match(r"\w+\.run\(.*stream=", line)]
    operators = [line for line in lines if "torch.ops.attnres." in line and not line.startswith("#")]
    ours = [line for line in launched if line.startswith("flat_")]  # so `ops.gpu.launch.flattened` names them
    return {"launches": len(launched), "our_launches": len(ours), "our_operators": len(operators)}


def is_lost(device: str) -> bool:
    """Return whether an error has left the process no use of the device: then only another process goes on."""
    import torch

    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return True
    return False


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Script:
    """A benchmark of this folder, whose results are a file of theirs beside the rows, and in the row.

    Attributes:
        words: after its name on a GPU; `tiny` on a CPU, None for one that needs a GPU.
    """

    seconds: float
    script: str
    words: str
    tiny: str | None

    def rows(self, place: Place, done: Sequence[Row]) -> Iterator[Row]:
        words = self.tiny if place.tiny else self.words
        if words is None:
            yield {"script": self.script, "passed_over": "it needs a CUDA device"}
            return
        run_script(self.script, [*words.split(), "--out", str(self._file(place))])
        yield self._row(place)

    def left(self, place: Place, since: float) -> Iterator[Row]:
        """What a process wrote before it was stopped, if it wrote since then: scripts write as they measure."""
        file = self._file(place)
        if file.is_file() and file.stat().st_mtime >= since:
            yield self._row(place) | {"cut": "the script was stopped"}

    def _file(self, place: Place) -> Path:
        graphs = "_graphs" if "--graphs" in self.words and not place.tiny else ""
        return place.out / f"{self.script.removesuffix('.py')}{graphs}_{place.device}.json"

    def _row(self, place: Place) -> Row:
        words = self.tiny if place.tiny else self.words
        return {"script": self.script, "words": words, "result": json.loads(self._file(place).read_text("utf-8"))}


def run_script(script: str, words: Sequence[str], folder: Path = HERE) -> None:
    """Run a benchmark, or another folder's script, in this process."""
    before = sys.argv
    sys.argv = [script, *words]
    try:
        runpy.run_path(str(folder / script), run_name="__main__")
    finally:
        sys.argv = before


@dataclass(frozen=True)
class Tests:
    """Tests of tests/gpu that need the device; the row counts them and has what failed."""

    seconds: float
    words: tuple[str, ...]

    def rows(self, place: Place, done: Sequence[Row]) -> Iterator[Row]:
        if importlib.util.find_spec("pytest") is None:
            yield {"passed_over": "pytest is not installed: make gpu-pack packs it"}
            return
        import pytest

        counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        failures: list[str] = []
        end = time.monotonic() + 0.75 * self.seconds  # the rest is for imports, and for the test that is running then

        class Reports:
            def pytest_sessionstart(self, session: Any) -> None:
                self.session = session

            def pytest_collectreport(self, report: Any) -> None:
                if report.failed:
                    failures.append(f"{report.nodeid}\n{report.longreprtext[-4000:]}")

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.when == "call" or not report.passed:
                    counts[report.outcome] += 1
                if report.failed:
                    failures.append(f"{report.nodeid}\n{report.longreprtext[-4000:]}")
                    print(failures[-1], flush=True)  # should the limit come before the row
                if time.monotonic() > end:
                    self.session.shouldstop = "its time is spent"

        os.chdir(ROOT)
        # Warnings are no errors here: the versions are others than those that tests are made on.
        words = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", *self.words]
        said = io.StringIO()
        with redirect_stderr(said):  # where pytest says why it does not begin
            status = pytest.main(words, plugins=[Reports()])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            raise RuntimeError(f"pytest ended with {status!r}: {said.getvalue() or failures}")
        cut = {"cut": "its time is spent"} if time.monotonic() > end else {}
        yield {"tests": list(self.words), "status": int(status), **counts, **cut, "failures": failures}


@dataclass(frozen=True)
class Training:
    """A run of a mechanism: its curve, the losses of held-out windows after the last step, its summary.

    Attributes:
        variant: as `attnres compare --variants` takes it, e.g. "block:num_blocks=8".
        epochs: passes over the packed text; or `tokens_a_parameter`, at most `most_epochs`.
        looked_at: rows also have the model's scores on the pack's evaluation sets, and by depth what sublayers read and
            write. The model itself is not kept.
    """

    seconds: float
    variant: str
    size: tuple[int, int, int, int] = (512, 12, 8, 1536)
    optimizer: str = "muon"
    rate: float = 1.0
    seed: int = 0
    epochs: float = 1.0
    tokens_a_parameter: float | None = None
    most_epochs: float = 3.0
    looked_at: bool = False

    @property
    def recipe(self) -> tuple[Any, ...]:
        """Return what runs have in common that differ in their mechanism and seed alone."""
        return self.size, self.optimizer, self.rate, self.epochs, self.tokens_a_parameter

    def rows(self, place: Place, done: Sequence[Row]) -> Iterator[Row]:
        import torch

        from attnres.comparison.plan import parse_variant
        from attnres.data import open_tokens
        from attnres.errors import UserError
        from attnres.models import build
        from attnres.training import from_dict, train
        from lab.presets import qwen3

        about: Row = {"variant": self.variant, "optimizer": self.optimizer, "rate": self.rate, "seed": self.seed}
        text = place.pack / "text"
        if not text.is_dir():
            yield about | {"passed_over": f"there is no text in {text.name} of the pack: make gpu-pack TEXT=SOURCE"}
            return
        try:
            variant = parse_variant(self.variant)
        except UserError as error:
            yield about | {"passed_over": str(error)}
            return
        batch, length = (2, 16) if place.tiny else (BATCH, LENGTH)
        size = qwen3(*((64, 4, 2, 32) if place.tiny else self.size))
        with torch.device("meta"):
            standard = build(size, "standard", vocab_size=WORDS, max_positions=length)
        parameters = sum(p.numel() for p in standard.parameters())
        steps = 6 if place.tiny else max(1, int(self.tokens(len(open_tokens(text)), parameters) / (batch * length)))
        about |= {"tokens_a_parameter_wanted": self.tokens_a_parameter} if self.tokens_a_parameter else {}
        about["tokens_a_parameter"] = steps * batch * length / parameters
        folder = place.out / "runs" / hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        shutil.rmtree(folder, ignore_errors=True)
        values = {
            "model": {"size": size, "residual": variant.residual, "settings": dict(variant.settings)},
            "data": {"source": str(text), "seq_len": length, "val_windows": 4 if place.tiny else 1024},
            "optim": {"optimizer": self.optimizer, "lr": 0.002 * self.rate},
            "out": str(folder),
            "seed": self.seed,
            "steps": steps,
            "batch_size": batch,
            "device": place.device,
            "dtype": "fp32" if place.tiny else "bf16",
            "cuda_graphs": True,
            "loss": "chunked",  # fused; this many logits are just few enough for the whole ones by default
            "save_every": steps,
            "depth_every": 0,
            "val_every": max(1, steps // 10),
            "log_every": max(1, steps // 50),
        }
        if self.optimizer == "muon":
            values["optim"]["muon_lr"] = 0.01 * self.rate
        summary = train(from_dict(values), progress=False)
        yield about | self._outcome(folder, summary)
        if self.looked_at:
            yield about | self._scores(folder, place)
            yield about | self._by_depth(folder)
        shutil.rmtree(folder, ignore_errors=True)

    def tokens(self, text: int, parameters: int) -> float:
        """Return how many tokens a model of so many parameters is trained on, of a text of so many tokens."""
        if self.tokens_a_parameter is None:
            return self.epochs * text
        return min(self.tokens_a_parameter * parameters, self.most_epochs * text)

    def more_flops(self) -> float:
        """Return the FLOPs of training the mechanism on a token over those of the standard residual."""
        from attnres.comparison.plan import parse_variant
        from lab.cost import Mechanism, flops_a_token
        from lab.presets import qwen3

        variant, shape = parse_variant(self.variant), (qwen3(*self.size), LENGTH, WORDS)
        return flops_a_token(*shape, Mechanism.of(variant.residual, variant.settings)) / flops_a_token(*shape)

    def _by_depth(self, folder: Path) -> Row:
        file = folder / "inspection.json"
        if not file.is_file():
            return {"passed_over": "the run wrote no inspection.json, and said why"}
        made = json.loads(file.read_text("utf-8"))
        names = ("reads", "routing", "output_rms", "input_rms")
        return {"by_depth": {name: made[name] for name in names}}

    def _scores(self, folder: Path, place: Place) -> Row:
        from attnres.evals import EvalConfig
        from attnres.evals.run import evaluate

        sets = place.pack / "evaluation"
        if not sets.is_dir():
            return {"passed_over": f"there is no {sets.name} in the pack: make gpu-pack EVALUATION=FOLDER"}
        limit, batch = (2, 512) if place.tiny else (None, 32_768)
        config = EvalConfig((str(folder),), data=str(sets), limit=limit, batch_tokens=batch, device=place.device)
        tasks = evaluate(config, progress=False).record["tasks"]
        return {
            "scores": {
                name: {figure["key"]: figure["values"][0] for figure in task["figures"]} for name, task in tasks.items()
            }
        }

    def _outcome(self, folder: Path, summary: Mapping[str, Any]) -> Row:
        import numpy as np

        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        windows = np.load(folder / "val" / "final.npy")
        names = ("step", "tokens", "parameters", "final_loss", "final_se", "last_three", "in_context")
        names += ("val_loss", "val_se", "tokens_per_s", "step_s", "peak_memory_bytes")
        return {
            **{name: summary.get(name) for name in names},
            "how": json.loads((folder / "environment.json").read_text("utf-8"))["step"],
            "val": [[line["step"], line["loss"]] for line in lines if line.get("kind") == "val"],
            "train": [[line["step"], line["loss"]] for line in lines if line.get("kind") == "train"],
            "windows": [round(float(value), 4) for value in windows],
        }


BLOCK8, BLOCK4 = "block (8 blocks)", "block (4 blocks)"
FOUR = (BLOCK8, "full", "standard", BLOCK4)
BATCH, LENGTH, WORDS = 64, 512, 8192
"""Windows of a training run's step, tokens of a window, words of the vocabulary."""

LADDER = {
    "3m": ((128, 10, 2, 384), 20, 120),
    "8.4m": ((256, 8, 4, 768), 20, 180),
    "21m": ((384, 10, 6, 1152), 10, 300),
    "42m": ((512, 12, 8, 1536), 5, 500),
}
"""Name -> width, layers, heads and width of the MLP; tokens a parameter; seconds at most."""
*_, LARGEST = LADDER


def _training() -> dict[str, Any]:
    """Return the runs of the evidence, those first that decide most."""
    rates = {
        f"train rates {variant} {optimizer} x{rate}": Training(90, variant, optimizer=optimizer, rate=rate)
        for optimizer in ("muon", "adamw")
        for rate in (1.0, 0.5, 2.0)
        for variant in ("standard", BLOCK)
    }
    ladder = {
        f"train ladder {name} {variant} seed {seed}": Training(
            limit, variant, size, tokens_a_parameter=tokens, seed=seed, looked_at=name == LARGEST
        )
        for seed in range(2)
        for name, (size, tokens, limit) in LADDER.items()
        for variant in ("standard", "block", *(["full"] if name == "8.4m" else []))  # of 10 layers no 8 blocks are made
    }
    table = {
        f"train table {name} seed {seed}": Training(90, name, seed=seed)
        for seed in range(2)
        for name in TABLE
        if seed or name not in ("standard", BLOCK)  # those are of `rates`, once
    }
    first = [f"train ladder 8.4m {variant} seed 0" for variant in ("standard", "block")]
    first += [f"train table {name} seed 0" for name in ("full", "static_mix")]
    every = {**rates, **ladder, **table}
    rest = {name: run for name, run in every.items() if name not in {*rates, *first}}
    return {**rates, **{name: every[name] for name in first}, **rest}


ROUNDS: dict[str, Any] = {
    "tests": Tests(
        45, ("tests/gpu/test_graphs.py", "tests/gpu/test_models.py", "-k", "(captured or graphs) and not compiled")
    ),
    "equality of captured steps": Equality(90),
    "step 100m graphs": Steps(120, "100m", FOUR, "graphs", 16, 1024, loss="whole"),
    "step 0.6b graphs": Steps(120, "0.6b", (BLOCK8, "full", "standard"), "graphs", 8, 2048),
    "step 100m compile+graphs": Steps(150, "100m", (BLOCK8, "full"), "compile+graphs", 16, 1024),
    "step 100m eager, 64k tokens": Steps(60, "100m", ("standard", BLOCK8), "eager", 64, 1024),
    "step 1.7b graphs, bf16 parameters": Steps(100, "1.7b", (BLOCK8, "full"), "graphs", 4, 4096, "bf16-parameters"),
    "step 100m graphs, bf16 parameters": Steps(60, "100m", FOUR[:3], "graphs", 16, 1024, "bf16-parameters"),
    "step 0.6b graphs, 152k words": Steps(120, "0.6b", (BLOCK8, "full"), "graphs", 8, 2048, vocabulary=151_936),
    "step 0.6b compiled": Steps(350, "0.6b", (BLOCK8,), "compile", 8, 2048),
    "tests of compiled models": Tests(150, ("tests/gpu/test_models.py", "-k", "compile")),
    "tests of reads": Tests(240, ("tests/gpu/test_reads.py", "-k", "not two_to_the_31")),
    "step 100m eager, parallel streams": Steps(60, "100m", ("standard", "mhc", "hyper_connections"), "eager", 16, 1024),
    "step 100m eager": Steps(50, "100m", (BLOCK8, "full", "standard"), "eager", 16, 1024),
    "step 100m graphs, muon": Steps(60, "100m", ("standard", BLOCK8), "graphs", 16, 1024, optimizer="muon"),
    "step 100m graphs, fused loss": Steps(60, "100m", (BLOCK8, BLOCK4), "graphs", 16, 1024, loss="chunked"),
    "prefill and decode": Script(
        150,
        "decode.py",
        "--device cuda --size 0.6b --batches 1 --prefill 8192 --seconds 2 --graphs --variants block full",
        "--device cpu --size nano --batches 1 --prefill 8 --context 6 --seconds 0",
    ),
    "held": Script(150, "held.py", "", None),
    "kernels": Script(
        240,
        "reads.py",
        "--device cuda --seconds 1 --no-compile --no-peers",  # who tune themselves, before ours is timed
        "--device cpu --seconds 0 --only read",
    ),
    "loss": Script(
        150, "loss.py", "--device cuda --seconds 5", "--device cpu --seconds 0 --vocabulary 64 --tokens 16 --dtype fp32"
    ),
    "muon": Script(60, "muon.py", "--device cuda --seconds 5 --cases 100m", "--device cpu --seconds 0 --cases nano"),
    "wrapper of a compiled step": Wrapper(150, "100m", (BLOCK8, "full"), 16, 1024),
    "peers": Script(
        500,  # peers tune themselves for 20 to 60 s for each count of sources
        "stack.py",
        "--device cuda --seconds 1 --no-compile --tuning 240",
        "--device cpu --seconds 0 --sublayers 4 --block-size 2 --tokens 16 --width 16 --no-compile",
    ),
    **_training(),
}


# ------------------------------------------------------------------ rows


def kernels_hash() -> str:
    """Return the hash of the sources that a time depends on."""
    digest = hashlib.sha256()
    for file in hashed():
        digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def hashed() -> list[Path]:
    """Return the files of `KERNELS`."""
    paths = [ROOT / name for name in KERNELS]
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def facts(device: str) -> dict[str, str | None]:
    """Return what rows are keyed by."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    return {"kernels": kernels_hash(), "device": name, "python": platform.python_version(), **versions}


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; a line that a kill has cut is left out."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def add_row(path: Path, row: Row) -> None:
    """Append a row, to the disk before this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------ the page

PAGE = ROOT / "docs" / "explanation" / "kernels.md"
TRAINED = ROOT / "docs" / "results" / "one_gpu.md"
EXPERIMENTS, FIGURES = ROOT / "experiments", ("results_page.py", "study_pages.py")
"""The commands that write README's figures, and those of the page of cost."""
MARKS = ("<!-- made by `python benchmarks/round.py --page` -->", "<!-- end -->")
GOALS: tuple[tuple[str, str, str, str], ...] = (
    ("40 M, 16k tokens, captured", "step 100m graphs", BLOCK8, "1.08"),
    ("40 M, 16k tokens, captured", "step 100m graphs", BLOCK4, "1.05"),
    ("40 M, 16k tokens, captured", "step 100m graphs", "full", ""),
    ("40 M, 16k tokens, fused loss, captured", "step 100m graphs, fused loss", BLOCK8, "1.09"),
    ("40 M, 16k tokens, fused loss, captured", "step 100m graphs, fused loss", BLOCK4, "1.06"),
    ("40 M, 16k tokens, compiled and captured", "step 100m compile+graphs", BLOCK8, ""),
    ("0.6 B, 16k tokens, captured", "step 0.6b graphs", BLOCK8, "1.045"),
    ("0.6 B, 16k tokens, captured", "step 0.6b graphs", "full", "1.09"),
    ("0.6 B, 152k words, captured", "step 0.6b graphs, 152k words", BLOCK8, "1.035"),
    ("0.6 B, 152k words, captured", "step 0.6b graphs, 152k words", "full", "1.08"),
    ("0.6 B, compiled", "step 0.6b compiled", BLOCK8, ""),
    ("1.7 B, 16k tokens, bf16 parameters, captured", "step 1.7b graphs, bf16 parameters", BLOCK8, "1.03"),
    ("40 M, bf16 parameters, captured", "step 100m graphs, bf16 parameters", BLOCK8, ""),
    ("40 M, Muon, captured", "step 100m graphs, muon", BLOCK8, ""),
    ("40 M, eager", "step 100m eager", BLOCK8, "1.15"),
    ("40 M, 64k tokens, eager", "step 100m eager, 64k tokens", BLOCK8, ""),
)
"""What the page has of steps: (what, experiment, variant, goal as a ratio to plain)."""


def page(rows: Sequence[Row]) -> str:
    """Return the tables of docs/explanation/kernels.md: the last row of each experiment, "not measured" where there
    is none."""
    last = _last(rows)
    measured_by = f"captured beside eager, `{_command('equality of captured steps')}`"
    names = ("largest difference of a loss", "of eager steps made again", "equal to rounding", "taken, device")
    lines = []
    for variant in ("standard", "block", "full"):
        row, cells = last.get(("equality of captured steps", variant)), ["not measured", "", "", ""]
        if row is not None:
            equal = "yes" if row["equal"] else "**no**"
            cells = [f"{row['captured']:.1e}", f"{row['again']:.1e}", equal, f"{row['step']}, {row['of']['device']}"]
        lines.append([f"{variant}, {row['steps'] if row else 200} steps", *cells])
    return "\n\n".join([table([measured_by, *names], lines), steps_table(rows, GOALS), others_table(rows)])


def _command(experiment: str) -> str:
    return f'python benchmarks/round.py --only "{experiment}"'


OTHERS: tuple[tuple[str, str, str, Callable[[Any], str]], ...] = (
    (
        "prefill of 8,192 tokens, 0.6 B, Block, of plain's time",
        "prefill and decode",
        "1.02",
        lambda result: f"{result['prefill']['8192']['block']['ratio']:.3f}",
    ),
    (
        "decode, 0.6 B, one sequence, Block, of plain's time",
        "prefill and decode",
        "0.88",
        lambda result: f"{result['decode']['1']['block']['ratio']:.3f}",
    ),
    (
        "read at d = 7168, 9 sources, 8,192 tokens",
        "kernels",
        "450 us",
        lambda result: f"{result['read'][0]['stages']['forward']['ours']['median_s'] * 1e6:.0f} us",
    ),
    (
        "32 identity sublayers: the fastest, and ours beside it",
        "peers",
        "ours is the first",
        lambda result: _first_of(result["kinds"]["identity"]),
    ),
    *(
        (
            f"tokens a second of `attnres train --cuda-graphs`, 40 M, {variant}",
            f"train rates {name} adamw x1.0",
            goal,
            lambda row: f"{row['tokens_per_s']:,.0f}",
        )
        for variant, name, goal in (("standard", "standard", "650,000"), ("Block", BLOCK, "610,000"))
    ),
)
"""What the page has besides steps: (what, experiment, goal, what a script's result or a run's row says of it)."""


def _first_of(rows: Mapping[str, Row]) -> str:
    """Return the fastest of reads that were timed in a stack of sublayers, and the time of ours relative to it."""
    times = {label: row["median_s"] for label, row in rows.items() if "median_s" in row and label != "standard"}
    fastest = min(times, key=times.__getitem__)
    return f"{fastest}, ours {times['ours'] / times[fastest]:.3f} of its time"


def others_table(rows: Sequence[Row]) -> str:
    """Return the table of what is measured besides steps, and the command that measures it."""
    lines = []
    for what, experiment, goal, found in OTHERS:
        made = [row for row in rows if row.get("round") == experiment and ("result" in row or "tokens_per_s" in row)]
        value = "not measured"
        if made:
            try:
                value = found(made[-1].get("result", made[-1]))
            except (KeyError, IndexError, ValueError):  # a candidate that failed has its reason in place of a time
                value = "failed or cut, its row says why"
            value += f", {made[-1]['of']['device']}"
        lines.append([what, goal, value, f"`{_command(experiment)}`"])
    return table(("measure", "goal", "found", "command"), lines)


def steps_table(rows: Sequence[Row], goals: Sequence[tuple[str, str, str, str]]) -> str:
    """Return a table of training steps: of each goal its row."""
    last, lines = _last(rows), list[list[str]]()
    names = (
        "step (goal of every peak: 1.05)",
        "goal",
        "time of plain's",
        "host",
        "kernels",
        "peak",
        "taken, device",
        "`--only`",
    )
    for what, experiment, variant, goal in goals:
        row, plain = last.get((experiment, variant)), last.get((experiment, "plain"))
        cells = ["not measured", "", "", "", ""]
        if row is not None and plain is not None:
            low, high = row["ratio_quartiles"]
            ratios = (_ratio(row, plain, name) for name in ("host_ms", "busy_ms", "peak_bytes"))
            time = f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
            cells = [time, *ratios, f"{row['step']}, {row['of']['device']}"]
        lines.append([f"{what}, {variant}", goal, *cells, f'`"{experiment}"`'])
    return table(names, lines)


def _last(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row["round"], row["variant"]): row for row in rows if "ms" in row or "captured" in row}


def _ratio(row: Row, plain: Row, name: str) -> str:
    return f"{row[name] / plain[name]:.3f}" if plain.get(name) else ""


def pages(rows: Sequence[Row]) -> dict[Path, str]:
    """Return what stands between the marks of each page."""
    runs = {name: run for name, run in ROUNDS.items() if isinstance(run, Training)}
    return {PAGE: page(rows), TRAINED: training_page(rows, runs)}


def write_page(tables: str, path: Path) -> None:
    """Write the tables of a page anew, between its marks."""
    before, made = path.read_text("utf-8").split(MARKS[0])
    after = made.split(MARKS[1], 1)[1]
    path.write_text(f"{before}{MARKS[0]}\n\n{tables}\n\n{MARKS[1]}{after}", "utf-8")


def write_figures() -> None:
    """Write README's figures anew, and the pages of results that show the same; say so where what that imports is not
    there."""
    sys.path.append(str(EXPERIMENTS))
    for script in FIGURES:
        try:
            run_script(script, [], EXPERIMENTS)
        except ImportError as error:
            print(f"README's figures stay as they are, for {script} cannot run here: {error}")
            return


# ------------------------------------------------------------------ one experiment, all experiments


@dataclass
class Command:
    """What a call of this command works with."""

    place: Place
    of: dict[str, Any] = field(default_factory=dict)
    path: Path = ROWS
    copy: Path | None = None

    def add(self, name: str, row: Row) -> None:
        """Append a row of an experiment to the file of rows, and to its copy."""
        for path in filter(None, (self.path, self.copy)):
            add_row(path, {"round": name, "of": self.of} | row)

    def done(self, name: str) -> list[Row]:
        """Return an experiment's rows so far, made with the same sources, device and versions: those that are in the
        repository first."""
        kept = read_rows(ROWS) if self.path != ROWS and self.place.device == "cuda" else []
        return [row for row in kept + read_rows(self.path) if row.get("round") == name and row.get("of") == self.of]

    def ended(self, name: str) -> bool:
        return any("ended" in row for row in self.done(name))

    def run(self, name: str) -> None:
        """Carry out an experiment in this process: what is left of it, or all of it where it has ended."""
        began, done = time.monotonic(), self.done(name)
        last = max((place for place, row in enumerate(done) if "ended" in row), default=-1)
        try:
            for row in ROUNDS[name].rows(self.place, done[last + 1 :]):
                self.add(name, _finite(row))
                shown = {key: value for key, value in row.items() if not isinstance(value, list | dict)}
                print(f"{name}: {json.dumps(shown)[:400]}", flush=True)
            ended = "done"
        except BaseException as error:
            self.add(name, {"error": traceback.format_exc(), "experiment": repr(ROUNDS[name])})
            if not isinstance(error, Exception | SystemExit):
                raise
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            if is_lost(self.place.device):
                return  # and another process goes on with what is left of it
            ended = "failed"
        self.add(name, {"ended": ended, "seconds": time.monotonic() - began})


def _finite(value: Any) -> Any:
    """Return a row without what JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _asked(name: str, only: Sequence[str]) -> bool:
    """Return whether an experiment is one of those named, or begins with the words of a name that is nobody's."""
    words = (re.escape(one) + ("$" if one in ROUNDS else r"(?![\w:,])") for one in only)  # a rule, not its settings too
    return any(re.match(begin, name) for begin in words)


def broken(pack: Path) -> str | None:
    """Import what is needed in another process, as experiments do, and return a sentence about the first module that
    cannot be; None if all can. A process of its own, because an import may also hang or crash."""
    command = [sys.executable, __file__, "--pack", str(pack), "--imports", *NEEDED]
    try:
        done = subprocess.run(command, capture_output=True, timeout=IMPORTS, check=False)
    except subprocess.TimeoutExpired as error:
        return f"importing {_last_line(error.stdout)} takes more than {IMPORTS:.0f} s here"
    if done.returncode == 0:
        return None
    why = _last_line(done.stderr) or f"status {done.returncode}"
    packs = "make gpu-pack, where there is a network, packs what PyTorch and Transformers do not bring"
    return f"{_last_line(done.stdout)} cannot be imported here ({why}): {packs}"


def _last_line(said: bytes | None) -> str:
    return (said or b"").decode("utf-8", "replace").rstrip().rpartition("\n")[2]


def pack_caches(pack: Path, file: Path) -> None:
    """Write what Triton and Inductor have compiled into an archive, the newest first, up to `CACHED` bytes. Of Triton's
    the programs and what describes them: its intermediate forms are five times as large."""

    def needed(each: tarfile.TarInfo) -> tarfile.TarInfo | None:
        is_intermediate = each.name.startswith(f"{CACHES['TRITON_CACHE_DIR']}/") and each.isfile()
        return None if is_intermediate and not each.name.endswith((".cubin", ".json", ".so")) else each

    made = [each for name in CACHES.values() if (pack / name).is_dir() for each in (pack / name).iterdir()]
    made.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for count, each in enumerate(made):
            if out.tell() > CACHED:
                print(f"{file}: {count} of {len(made)} compiled parts, for {CACHED >> 20} MiB are full")
                return
            archive.add(each, each.relative_to(pack), filter=needed)
    print(f"{file}: {len(made)} compiled parts, {file.stat().st_size >> 20} MiB")


def use_pack(pack: Path) -> None:
    """Put the packed folder last on the path: nothing in it takes the place of what is installed. It is unpacked where
    its archive alone is there, and so are compiled kernels that an earlier round's machine has sent."""
    sent = {pack.with_name(f"{pack.name}.tar.xz"): ["site"], pack / "caches.tar.gz": [*CACHES.values()]}
    for file, folders in sent.items():
        if file.is_file() and not any((pack / name).is_dir() for name in folders):
            with tarfile.open(file) as archive:
                archive.extractall(file.parent, filter="data")
            for group in (pack / CACHES["TRITON_CACHE_DIR"]).glob("*/__grp__*.json"):
                # It names a kernel's files by whole paths, those of another machine.
                names = json.loads(group.read_text("utf-8"))["child_paths"]
                here = {name: str(group.parent / name) for name in names if (group.parent / name).is_file()}
                group.write_text(json.dumps({"child_paths": here}), "utf-8")
    for place in (str(HERE), str(ROOT), str(pack / "site")):
        if place not in sys.path:
            sys.path.append(place)
    os.environ.setdefault("ATTNRES_PEERS", str(pack / "peers"))
    for name, folder in CACHES.items():
        os.environ.setdefault(name, str(pack / folder))
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # what peers have tuned is among the compiled kernels
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def warmed(chosen: Sequence[str], command: Command) -> list[subprocess.Popen[bytes]]:
    """Begin to compile the kernels of the first timed steps, each variant's in a process of its own, while what is not
    timed runs: Triton compiles one at a time, and a machine has many processors."""
    first = [name for name in chosen if isinstance(ROUNDS[name], Steps) and not command.ended(name)][:WARMED]
    words = [sys.executable, __file__, "--device", command.place.device, "--pack", str(command.place.pack), "--warm"]
    return [
        subprocess.Popen([*words, name, label], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in first
        for label in ROUNDS[name].variants
    ]


def wait_for(processes: list[subprocess.Popen[bytes]], seconds: float = 60.0) -> None:
    """Wait until they have ended, and end those that take longer: what they compiled is kept."""
    end = time.monotonic() + seconds
    while processes:
        process = processes.pop()
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--only", nargs="+", default=None, help="experiments, or how their names begin, done or not")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="on a CPU everything is tiny")
    parser.add_argument("--pack", type=Path, default=PACK, help="the folder of make gpu-pack, or where it is unpacked")
    parser.add_argument("--rows", type=Path, help=f"the file of rows; {ROWS.name}, or on a CPU {TRIED.name} of build")
    parser.add_argument("--copy", type=Path, help="a second file that each row is appended to")
    parser.add_argument(
        "--list", action="store_true", help="list the experiments, and what became of them on any device"
    )
    parser.add_argument("--page", action="store_true", help="write the tables of the documentation and README anew")
    parser.add_argument(
        "--caches", type=Path, help="pack compiled kernels into this file: caches.tar.gz of another pack"
    )
    parser.add_argument("--in-process", action="store_true", help="no process for each: limits are not kept")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--warm", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--imports", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.caches:
        pack_caches(options.pack, options.caches)
        return 0
    if options.page:
        use_pack(options.pack)
        for path, tables in pages(read_rows(options.rows or ROWS)).items():
            write_page(tables, path)
        write_figures()
        return 0
    end = time.monotonic() + options.budget
    use_pack(options.pack)
    if options.imports:
        for name in options.imports:
            print(name, flush=True)
            importlib.import_module(name)
        return 0
    options.rows = options.rows or (ROWS if options.device == "cuda" else TRIED)
    chosen = [name for name in ROUNDS if options.only is None or _asked(name, options.only)]
    if not chosen:
        parser.error(f"no experiment begins with {' or '.join(options.only)}: --list shows them")
    if options.list:
        today = kernels_hash()
        ended = {
            row["round"]: f"{row['ended']}, {row['of']['device']}"
            for row in read_rows(options.rows)
            if "ended" in row and row["of"]["kernels"] == today
        }
        for name in chosen:
            print(f"{ROUNDS[name].seconds:5.0f} s  {name:46s} {ended.get(name, 'not measured')}")
        return 0
    if not options.one and not options.in_process and (why := broken(options.pack)):
        parser.error(why)
    from attnres.errors import UserError
    from attnres.ops.devices import pick_device

    try:
        pick_device(options.device)
    except UserError as error:
        parser.error(str(error))
    command = Command(
        Place(options.device, options.device == "cpu", options.pack, options.rows.parent),
        facts(options.device),
        options.rows,
        options.copy,
    )
    paths = os.environ.get("PYTHONPATH"), str(ROOT), str(options.pack / "site")  # for processes that scripts start
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if options.one:
        command.run(options.one)
        return 0
    if options.warm:
        name, label = options.warm
        ROUNDS[name].warm(command.place, label)
        return 0
    warming = [] if options.in_process or options.device == "cpu" else warmed(chosen, command)
    atexit.register(wait_for, warming, 0.0)
    for name in chosen:
        ended, limit = command.ended(name), ROUNDS[name].seconds
        if ended and options.only is None:
            continue
        words = ["--one", name, "--device", options.device, "--pack", options.pack, "--rows", options.rows]
        words += ["--copy", options.copy] if options.copy else []
        going_on = True
        while going_on:
            left, before = end - time.monotonic(), len(command.done(name))
            if left < LEAST:
                print(f"the budget is spent before {name}: the same command goes on there", flush=True)
                return 0
            if left < limit / 2:
                print(f"{name}: too little time is left for it, a later call takes it", flush=True)
                break
            if options.in_process:
                command.run(name)
                break
            if not isinstance(ROUNDS[name], Equality | Tests):  # which time nothing
                wait_for(warming)
            began = time.time()
            try:
                status = subprocess.run(
                    [sys.executable, __file__, *map(str, words)], timeout=min(limit, left), check=False
                ).returncode
                ending = f"died with status {status}"  # killed, for memory or by the driver, or its device was lost
            except subprocess.TimeoutExpired:
                print(f"{name}: ran past {min(limit, left):.0f} s", flush=True)
                ending = f"stopped after {limit:.0f} s" if limit <= left else None  # else the budget cut it
            made = command.done(name)[before:]
            # With a row more, another process goes on with what it lacks: now, or where it took long in the next call.
            going_on = bool(made) and "ended" not in made[-1] and str(ending).startswith("died")
            if not made and isinstance(ROUNDS[name], Script):
                for row in ROUNDS[name].left(command.place, began):
                    command.add(name, row)
            if not made and ending is not None:
                # What was compiled until then lets a second call get further.
                again = ending.startswith("stopped") and not any("stopped" in row for row in command.done(name))
                command.add(name, {"stopped" if again else "ended": ending})
    return 0


if __name__ == "__main__":
    sys.exit(main())
