"""Layouts of other projects, and gates, through the tools: trained, cut short, resumed, scored, spoken with, recorded,
compared, reported, exported. What they compute is tested in tests/residuals and tests/models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import K3

from attnres import UserError, cli, convert, generate
from attnres.comparison.compare import compare
from attnres.comparison.plan import CompareConfig
from attnres.evals.config import EvalConfig
from attnres.evals.generate import open_speaker
from attnres.evals.run import evaluate
from attnres.inspect import record
from attnres.models import export_model, load
from attnres.models.foreign import WRITTEN
from attnres.training import TrainConfig, train

Configure = Callable[..., TrainConfig]

GPT2 = {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "cumulative": ("cumulative", {"num_blocks": 2, "recency_bias": 3.0}, "open-attnres"),
    "cumulative, full, a gate": (
        "cumulative",
        {"block_size": 1, "gate": "scalar", "recency_bias": 0.0},
        "open-attnres",
    ),
    "boundary": ("boundary", {"num_blocks": 2, "key_norm_eps": 1e-8}, "nanogpt"),
    "boundary_normed": ("boundary_normed", {"block_size": 2}, None),
    "gates in the paper's": ("block", {"block_size": 2, "gate": "vector", "null_source": True}, None),
    "kimi k3": ("block", {"block_size": 4, "key_norm_eps": 1e-5}, "kimi"),
    "fla": ("full", {}, "fla"),
}
"""Residual, settings, and the format that holds it."""


@pytest.fixture
def layout(configure: Configure) -> Callable[..., TrainConfig]:
    def make(name: str, **values: Any) -> TrainConfig:
        residual, settings, kind = LAYOUTS[name]
        config = configure(**{"steps": 4, "val_every": 4, "save_every": 2, **values})
        config.model.residual, config.model.num_blocks, config.model.settings = residual, None, settings
        if kind == "nanogpt":
            config.model.size = GPT2 | {"activation_function": "gelu"}
        elif kind == "kimi":
            kinds = ["linear_attention", "full_attention"]
            config.model.size = {**K3, "num_hidden_layers": 2, "layer_types": kinds}
        elif kind == "fla":
            assert isinstance(config.model.size, dict)
            config.model.size = {**config.model.size, "family": "llama"}
        return config

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("stream read write source block depth query norm head layer " * 6, encoding="utf-8")
    return path


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tool_takes_every_layout(
    name: str, layout: Callable[..., TrainConfig], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kind = tmp_path / "run", LAYOUTS[name][2]
    summary = train(layout(name), progress=False)
    assert summary["step"] == 4
    routing = json.loads((run / "inspection.json").read_text())["routing"]
    assert len(routing["weights"]) == 5 and all(abs(sum(row) - 1) < 1e-5 for row in routing["weights"] if row)

    measured = evaluate(EvalConfig((str(run),), tasks=(str(text),), window=16, device="cpu"), progress=False).record
    assert measured["models"]

    speaker = open_speaker(run, device="cpu")
    lines: list[str] = []
    spoken = generate(speaker, "stream read", max_new_tokens=4, greedy=True, on_token=lambda t: lines.append(t.line()))
    assert spoken == generate(speaker, "stream read", max_new_tokens=4, greedy=True)
    assert len(lines) == 4 and "output:" in lines[0]

    model = load(run / "model")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with record(model) as trace:
            assert torch.equal(model(input_ids=ids).logits, expected)
    assert trace.routing is not None and len(trace.routing["weights"]) == 5

    cli.main(["report", str(run)])
    assert LAYOUTS[name][0] in capsys.readouterr().out and (run / "report.html").is_file()
    with pytest.raises(UserError, match="has depth reads already"):
        convert(run / "model")

    if kind in WRITTEN:
        export_model(run, tmp_path / "theirs", kind)
        export_model(tmp_path / "theirs", tmp_path / "ours")
        with torch.no_grad():
            for written in ("theirs", "ours"):
                assert torch.equal(load(tmp_path / written)(input_ids=ids).logits, expected)
        # What was fetched from another project is trained on as it is, its tokenizer found beside it.
        more = layout(name, out="more", steps=2)
        more.model.size, more.model.settings, more.finetune.init_from = None, {}, str(tmp_path / "theirs")
        train(more, progress=False)
        assert json.loads((tmp_path / "more" / "start.json").read_text())["kind"] == "foreign"
        start, after = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (tmp_path / "more", run)
        )
        vals = [[line["loss"] for line in lines if line["kind"] == "val"] for lines in (start, after)]
        assert vals[0][0] == pytest.approx(vals[1][-1], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["cumulative, full, a gate", "boundary", "boundary_normed", "gates in the paper's"])
def test_a_run_that_was_cut_short_goes_on_bit_for_bit(
    name: str, layout: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnres.training.run import Run

    train(layout(name, out="whole"), progress=False)
    save = Run.save

    def cut(self: Any, *arguments: Any) -> None:
        save(self, *arguments)
        raise KeyboardInterrupt

    config = layout(name, out="cut")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", cut)
        with pytest.raises(KeyboardInterrupt):
            train(config, progress=False)
    assert not (tmp_path / "cut" / "summary.json").exists()
    config.resume = True
    train(config, progress=False)
    whole, again = (load(tmp_path / out / "model").state_dict() for out in ("whole", "cut"))
    assert all(torch.equal(whole[key], again[key]) for key in whole)


@pytest.mark.long
def test_layouts_are_compared(configure: Configure, tmp_path: Path) -> None:
    base = configure(steps=2, val_every=2)
    base.model.residual, base.model.num_blocks = "standard", None
    variants = ["cumulative:num_blocks=2,recency_bias=3", "boundary:num_blocks=2"]
    study = compare(CompareConfig(variants=variants, base=base, out=str(tmp_path / "all"), jobs=2, timing_s=0.5))
    assert len(study.labels) == 2 and all(run.finished for run in study.runs)
    assert (tmp_path / "all" / "report.html").is_file() and (tmp_path / "all" / "speed.json").is_file()


@pytest.mark.quick("cumulative-*")
@pytest.mark.parametrize(("residual", "settings"), [("cumulative", {"num_blocks": 1}), ("boundary", {"num_blocks": 1})])
def test_a_plain_model_converts_to_them_only_knowingly(
    residual: str, settings: dict[str, Any], configure: Configure, tmp_path: Path
) -> None:
    """Their first logits are not the plain model's."""
    base = configure(out="base", steps=2, val_every=2)
    base.model.residual, base.model.num_blocks = "standard", None
    train(base, progress=False)
    config = configure(steps=2, val_every=2, finetune={"init_from": str(tmp_path / "base")})
    config.model.size, config.model.residual, config.model.settings = None, residual, settings
    config.model.num_blocks = None
    with pytest.raises(UserError, match="changes the logits"):
        train(config, progress=False)
    config.finetune.inexact = True
    assert train(config, progress=False)["step"] == 2
    record = json.loads((tmp_path / "run" / "start.json").read_text())
    assert record["logits"]["relative"] > record["logits"]["bound"]
