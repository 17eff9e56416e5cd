"""The examples run as they stand, on a tiny model and generated text."""

import ast
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import SIZE, narrow_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnres.data.tokenizer import END_OF_TEXT, train_tokenizer
from attnres.models import build, load

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = ["stream", "read", "write", "source", "block", "depth", "query", "norm", "head", "layer", "<eos>"]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    narrow_llama(len(WORDS), 0).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def test_finetune_trainer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(random.Random(0).choices(WORDS[:4], k=2000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    paths = {"model": str(model), "text": tmp_path / "text.txt", "out": tmp_path / "out"}
    trainer = example("finetune_trainer").main(**paths, steps=20, length=16, blocks=2, lr=1e-2)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    by_rate = {group["weight_decay"]: group for group in trainer.optimizer.param_groups}
    assert set(by_rate) == {0.0, 0.1}
    trained = load(tmp_path / "out")
    assert trained.config.residual_settings == {"read_scale": "sum", "num_blocks": 2}
    assert trained.get_submodule("residual").get_parameter("query").any()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    assert "logits" in capsys.readouterr().out


TURNS = {
    "sft": {"prompt": "stream read", "completion": " write block <eos>"},
    "dpo": {"prompt": "stream read", "chosen": " write block", "rejected": " query norm"},
    "reward": {"prompt": "stream read", "chosen": " write block", "rejected": " query norm"},
}


@pytest.mark.quick("sft")
@pytest.mark.filterwarnings("ignore")  # of TRL's own
@pytest.mark.parametrize("method", TURNS)
def test_finetune_trl(method: str, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(TURNS[method]) + "\n" for _ in range(8)), encoding="utf-8")
    paths = {"model": str(model), "data": rows, "out": tmp_path / "out"}
    trainer = example("finetune_trl").main(method, **paths, steps=20, batch=2, length=16, blocks=2, lr=1e-2)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed = [
        names[id(p)] for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]
    ]
    assert decayed and not [name for name in decayed if "residual" in name]
    trained = load(tmp_path / "out")
    assert trained.get_submodule("model.residual").get_parameter("query").any()
    assert torch.equal(trained.model.residual.query, trainer.model.model.residual.query)


def shown(cell: str, names: dict[str, Any]) -> object:
    """Run a notebook's cell and give the value of its last expression, as a notebook does."""
    *before, last = ast.parse(cell).body
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    exec(compile(ast.Module([last], []), "cell", "exec"), names)
    return None


def test_look_inside(tmp_path: Path) -> None:
    """The notebook's cells, one after the other: each task is at most three lines and shows something."""
    backend, _ = train_tokenizer(300, ["def mean(values):\n    return sum(values)\n"] * 40)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT).save_pretrained(tmp_path)
    built = build(SIZE, "block", vocab_size=300, max_positions=512, settings={"block_size": 2})
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    built.save_pretrained(tmp_path)
    notebook = json.loads((EXAMPLES.parent / "docs" / "tutorials" / "look_inside.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    install, start, *tasks = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    assert install.startswith("%pip install") and 'open_checkpoint("example")' in start
    outputs = [bool(cell["outputs"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert outputs == [False, False] + [True] * 7  # docs/run_notebook.py writes them
    shown(start.replace('"example"', repr(str(tmp_path))), names)
    for task in tasks:
        assert len([line for line in task.splitlines() if line]) <= 3
        value: Any = shown(task, names)
        if hasattr(value, "_repr_html_"):
            assert "<td" in value._repr_html_()
        else:
            assert value._repr_png_().startswith(b"\x89PNG")
    assert len(tasks) == 7


def test_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(" ".join(random.Random(0).choices(WORDS[:4], k=2000)), encoding="utf-8")
    example("plain_pytorch").main(str(tmp_path / "text.txt"), steps=30, width=32, layers=2, context=32)
    lines = capsys.readouterr().out.splitlines()
    first, last = (dict(re.findall(r"(standard|block) (\d\.\d+)", line)) for line in (lines[1], lines[-4]))
    assert set(first) == {"standard", "block"} and all(float(last[name]) < float(first[name]) - 1 for name in first)
    assert lines[-1].startswith("block - standard: ")


def test_plain_pytorch_needs_no_transformers() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(EXAMPLES / "plain_pytorch.py")], check=True)


@pytest.mark.parametrize(("name", "lines"), [("finetune_trainer", 65), ("finetune_trl", 75), ("plain_pytorch", 160)])
def test_examples_are_short(name: str, lines: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < lines
