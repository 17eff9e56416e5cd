"""A run that starts from a pretrained model begins where it was, trains what it says, and goes on bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lines import lines
from safetensors.torch import load_file
from tiny import NARROW, narrow_llama
from transformers import LlamaForCausalLM

from attnres import cli, head
from attnres.comparison.compare import compare
from attnres.comparison.plan import CompareConfig, make_plan, parse_variants
from attnres.data import prepare
from attnres.errors import UserError
from attnres.flags import config_file
from attnres.models import build, convert, load
from attnres.report.stats import equal_conditions
from attnres.residuals import settings_of
from attnres.training import TrainConfig, finetune, from_dict, to_dict, train
from attnres.training.config import FinetuneConfig, OptimConfig, differences
from attnres.training.layout import PlacedModel
from attnres.training.objective import divergence
from attnres.training.optim import OF_RESIDUAL, build_optimizers
from attnres.training.parallel import Processes
from attnres.training.prepare import prepare_run
from attnres.training.records import read_metrics
from attnres.training.run import Run

Configure = Callable[..., TrainConfig]
ONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="session")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in bf16, as one finds them, with the tokenizer of the corpus."""
    folder = tmp_path_factory.mktemp("plain")
    narrow_llama(json.loads((corpus / "header.json").read_text())["vocab_size"], 1).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(corpus / name, folder / name)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


@pytest.fixture
def tune(configure: Configure, plain: Path) -> Configure:
    """Makes the configuration of a small run that starts from `plain` with Block."""

    def make(out: str = "run", **values: Any) -> TrainConfig:
        config = configure(out=out, **{"model": {"size": None}, **values})
        if config.finetune.init_from is None:
            config.finetune.init_from = str(plain)
        return config

    return make


def begun(config: TrainConfig) -> Run:
    run = Run(prepare_run(config), ONE, progress=False)
    run.close()
    return run


def base_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in load_file(folder / "model.safetensors").items() if "residual." not in n}


def loss_of(model: Any, windows: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model.eval()(input_ids=windows[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


# ------------------------------------------------------------------ where it starts


@pytest.mark.long
def test_a_plain_model_starts_where_it_was(tune: Configure, plain: Path, tmp_path: Path) -> None:
    config = tune()
    summary = train(config, progress=False)
    run = tmp_path / "run"
    vals = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "val"]
    assert [line["step"] for line in vals] == [0, 4, 8] and (run / "val" / "000000.npy").exists()
    before = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert vals[0]["loss"] == pytest.approx(loss_of(before, begun(tune(out="other")).windows), rel=1e-5)
    assert vals[-1]["loss"] < vals[0]["loss"] and summary["val_loss"] == vals[-1]["loss"]

    model = load(run / "model")
    assert model.config.residual == "block" and model.config.residual_settings == {"num_blocks": 2, "read_scale": "sum"}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert (run / "model" / "chat_template.jinja").exists() and (run / "model" / "tokenizer.json").exists()
    assert json.loads((run / "config.json").read_text())["model"]["size"] is None
    record = json.loads((run / "start.json").read_text())
    assert record["init_from"] == str(plain) and record["kind"] == "plain" and record["residual"] is None
    assert record["logits"]["relative"] <= record["logits"]["bound"]
    assert record["trainable"] == summary["parameters"]


@pytest.mark.long
def test_the_residual_and_the_length_of_a_start_model_stand_where_none_was_given(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No `--residual` goes on with Full; the default of 256 tokens is no reason to refuse a model of 32 positions."""
    start = tmp_path / "full"
    words = json.loads((corpus / "header.json").read_text())["vocab_size"]
    build(NARROW, "full", vocab_size=words, max_positions=32).save_pretrained(start)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(corpus / name, start / name)
    flags = [
        "--init-from",
        str(start),
        "--source",
        str(corpus),
        "--steps",
        "1",
        "--val-windows",
        "2",
        "--device",
        "cpu",
    ]
    cli.main(["train", *flags, "--dtype", "fp32", "--no-progress", "--out", str(tmp_path / "more")])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("attnres: ")]
    assert [line.split(":")[1] for line in said] == [" model.residual is full", " data.seq_len is 32"]
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert (config["model"]["residual"], config["data"]["seq_len"]) == ("full", 32)
    for more in (["--residual", "block"], ["--seq-len", "64"]):
        with pytest.raises(SystemExit):
            cli.main(["train", *flags, *more, "--no-progress", "--out", str(tmp_path / "other")])
        assert more[1] in capsys.readouterr().err, "what was given is refused"


@pytest.mark.quick("block")
@pytest.mark.parametrize("residual", ["standard", "block", "full"])
def test_every_residual_starts_at_the_same_weights(tune: Configure, residual: str) -> None:
    config = tune()
    config.model.residual, config.model.num_blocks = residual, None
    run = begun(config)
    assert not any(p.any() for n, p in run.model.residual.named_parameters() if "query" in n)
    plain = LlamaForCausalLM.from_pretrained(config.finetune.init_from, dtype=torch.float32)
    ours = {n: p for n, p in run.model.named_parameters() if "residual." not in n}
    theirs = dict(plain.named_parameters())
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.long
def test_a_standard_run_gets_depth_reads_and_a_run_with_them_goes_on(configure: Configure, tmp_path: Path) -> None:
    first = configure(out="first", steps=4)
    first.model.residual, first.model.num_blocks = "standard", None
    trained = train(first, progress=False)["val_loss"]

    second = configure(out="second", steps=4, model={"size": None}, finetune={"init_from": str(tmp_path / "first")})
    train(second, progress=False)
    vals = [line["loss"] for line in read_metrics(tmp_path / "second" / "metrics.jsonl") if line["kind"] == "val"]
    assert vals[0] == pytest.approx(trained, rel=1e-5)
    assert json.loads((tmp_path / "second" / "start.json").read_text())["kind"] == "attnres"

    third = configure(out="third", steps=4, model={"size": None, "num_blocks": None})
    third.finetune.init_from = str(tmp_path / "second" / "model")
    train(third, progress=False)
    losses = [line["loss"] for line in read_metrics(tmp_path / "third" / "metrics.jsonl") if line["kind"] == "val"]
    assert losses[0] == vals[-1]  # queries and all
    written = json.loads((tmp_path / "third" / "config.json").read_text())["model"]
    assert written["settings"] == {**settings_of("block"), "num_blocks": 2, "read_scale": "sum"}
    assert json.loads((tmp_path / "third" / "start.json").read_text())["logits"] is None


@pytest.mark.long
def test_an_annealed_residual_is_not_annealed_again(configure: Configure, tmp_path: Path) -> None:
    gated = {"size": None, "residual": "adaptive", "num_blocks": None}
    first = configure(out="first", steps=2)
    first.model.residual, first.model.num_blocks = "adaptive", None
    train(first, progress=False)
    again = configure(out="again", steps=2, model=gated, finetune={"init_from": str(tmp_path / "first")})
    with pytest.raises(UserError, match="annealed over a run's steps"):
        train(again, progress=False)


@pytest.mark.long
def test_a_standard_model_gets_the_settings_that_are_asked_for(configure: Configure, tmp_path: Path) -> None:
    """Those have parameters of their own: the model that is written has them, and a stopped run goes on."""
    standard = {"size": None, "residual": "standard", "num_blocks": None}
    first = configure(out="first", steps=2, model={**standard, "size": NARROW})
    train(first, progress=False)
    model = {**standard, "settings": {"value_residual": "head"}}
    finetune = {"init_from": str(tmp_path / "first"), "inexact": True}
    second = configure(out="second", steps=4, save_every=2, model=model, finetune=finetune)
    train(second, progress=False)
    loaded = load(tmp_path / "second" / "model")
    assert loaded.config.residual_settings == {"value_residual": "head"}
    shares = [name for name, _ in loaded.get_submodule("residual").named_parameters() if name.endswith("share")]
    assert len(shares) == 1 and "share" in " ".join(load_file(tmp_path / "second" / "model" / "model.safetensors"))
    record = json.loads((tmp_path / "second" / "start.json").read_text())
    assert (record["residual"], record["settings"]) == ("standard", {}) and record["logits"]["relative"] > 0
    (tmp_path / "second" / "summary.json").unlink()
    second.resume = True
    assert train(second, progress=False)["step"] == 4


@pytest.mark.long
def test_what_is_trained_is_counted_in_the_whole_model(
    tune: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a pipeline has a few layers of it."""
    begun(tune(out="whole"))
    every = PlacedModel.named_parameters
    monkeypatch.setattr(PlacedModel, "named_parameters", lambda self: iter(list(every(self))[:2]))
    begun(tune(out="stage"))
    records = [json.loads((tmp_path / out / "start.json").read_text()) for out in ("whole", "stage")]
    assert records[0]["trainable"] == records[1]["trainable"] > 0


def test_the_tokenizer_of_a_model_of_the_hub_is_recorded_by_its_name(
    tune: Configure, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "hub" / "snapshots" / "0123"
    shutil.copytree(plain, fetched)
    monkeypatch.setattr("attnres.models.model_files.fetch", lambda name, patterns: fetched)
    (tmp_path / "text.txt").write_text("a few words " * 200)
    config = tune(finetune={"init_from": "someone/small"}, data={"source": str(tmp_path / "text.txt")})
    config = prepare_run(config).config
    assert config.data.tokenizer == "someone/small"
    earlier = to_dict(config)
    earlier["data"]["tokenizer"] = str(fetched)
    assert differences(to_dict(config), earlier) == []
    earlier["finetune"]["init_from"] = "someone/large"
    assert "finetune.init_from" in differences(to_dict(config), earlier)


@pytest.mark.long
def test_a_converted_model_in_16_bits_is_trained_in_32(tune: Configure, plain: Path, tmp_path: Path) -> None:
    convert(str(plain), "full", out=tmp_path / "converted")
    config = tune(finetune={"init_from": str(tmp_path / "converted")})
    config.model.residual, config.model.num_blocks = "full", None
    assert {parameter.dtype for parameter in begun(config).model.parameters()} == {torch.float32}


@pytest.mark.long
def test_the_tokenizer_is_the_models_unless_one_is_given(
    tune: Configure, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text(f"stream {index} reads a block of sources " * 8)
    config = prepare_run(tune(data={"source": str(tmp_path / "text"), "held_out": 0.2})).config
    assert config.data.tokenizer == str(plain) and prepare_run(config).config == config
    assert begun(config).prepared.vocab_size <= 280
    config.data.tokenizer, config.out = "bpe:4096", str(tmp_path / "other")
    with pytest.raises(UserError, match="were made by another tokenizer than that of"):
        begun(config)


@pytest.mark.long
def test_a_change_of_function_is_only_made_on_demand(tune: Configure, tmp_path: Path) -> None:
    config = tune(steps=2)
    config.model.residual, config.model.num_blocks = "deepnorm", None
    with pytest.raises(UserError, match=r"residual 'deepnorm' .* changes the logits of .*give --inexact"):
        train(config, progress=False)
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "config.json").exists()
    config.finetune.inexact = True
    train(config, progress=False)
    record = json.loads((tmp_path / "run" / "start.json").read_text())["logits"]
    assert record["relative"] > record["bound"]


# ------------------------------------------------------------------ what is trained


def test_only_the_residual_is_trained(tune: Configure, plain: Path, tmp_path: Path) -> None:
    summary = train(tune(finetune={"train_only": "residual"}), progress=False)
    before = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    after = base_weights(tmp_path / "run" / "model")
    assert after and all(torch.equal(after[name], before[name]) for name in after)
    assert load(tmp_path / "run" / "model").get_submodule("residual").get_parameter("query").any()
    assert json.loads((tmp_path / "run" / "start.json").read_text())["trainable"] == summary["extra_parameters"]


@pytest.mark.long
def test_low_rank_changes_are_merged_at_the_end(tune: Configure, plain: Path, tmp_path: Path) -> None:
    summary = train(tune(finetune={"train_only": "lora", "lora_rank": 2}), progress=False)
    run = tmp_path / "run"
    before = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    kept, after = base_weights(run / "checkpoint" / "model"), base_weights(run / "model")
    assert sorted(kept) == sorted(after)
    assert all(torch.equal(kept[name], before[name]) for name in kept)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {n for n in after if "proj" in n}
    name = "model.layers.0.mlp.up_proj"
    adapter = load_file(run / "checkpoint" / "adapter.safetensors")
    a, b = (adapter[f"{name}.lora_{part}.default.weight"] for part in "AB")
    torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + 16.0 / 2 * b @ a)
    model, windows = load(run / "model"), begun(tune(out="other")).windows
    assert loss_of(model, windows) == pytest.approx(summary["val_loss"], rel=1e-4)
    vals = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "val"]
    assert vals[0] == pytest.approx(
        loss_of(LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32), windows), rel=1e-5
    )


@pytest.mark.parametrize("size", ["nano", {"family": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}], ids=str)
def test_merging_changes_no_logit_and_leaves_no_trace(size: Any) -> None:
    model = build(size, "full", vocab_size=16, max_positions=8).eval()
    names, tokens = [name for name, _ in model.named_parameters()], torch.arange(8)[None]
    before = model(input_ids=tokens).logits
    finetune.choose_trained(model, FinetuneConfig(train_only="lora", lora_rank=2), seed=0)
    assert [name for name, _ in finetune.base_parameters(model)] == names
    assert torch.equal(model(input_ids=tokens).logits, before)
    for name, tensor in finetune.adapter_tensors(model).items():
        torch.nn.init.normal_(tensor, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    changed = model(input_ids=tokens).logits
    finetune.merge_adapter(model)
    assert [name for name, _ in model.named_parameters()] == names and not torch.allclose(changed, before, atol=1e-3)
    torch.testing.assert_close(model(input_ids=tokens).logits, changed, rtol=1e-4, atol=1e-4)


def test_low_rank_changes_need_peft(tune: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(finetune.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'attention-residuals\[finetune\]'"):
        finetune.import_peft()


def test_queries_have_a_rate_of_their_own() -> None:
    model = build("nano", "full", vocab_size=16, max_positions=8)
    for rate, expected in ((None, 0.01), (0.5, 0.5)):
        (adamw,) = build_optimizers(model, OptimConfig(lr=0.1, residual_lr=rate))
        rates = {group["kind"]: (group["lr"], group["peak_lr"]) for group in adamw.param_groups}
        assert rates.pop("read") == pytest.approx((expected, expected))
        assert set(rates.values()) == {(0.1, 0.1)}


def test_what_a_residual_learns_besides_queries_keeps_the_rate_of_the_rest() -> None:
    model = build("nano", "full", vocab_size=16, max_positions=8, settings={"gate": "scalar"})
    for decay in (0.0, 0.1):
        (adamw,) = build_optimizers(model, OptimConfig(lr=0.1, residual_decay=decay))
        own = [group for group in adamw.param_groups if group["kind"] in OF_RESIDUAL]
        rates = {name.rpartition(".")[2]: group["lr"] for group in own for name in group["names"]}
        assert rates == pytest.approx({"query": 0.01, "gain": 0.01, "gate": 0.1})


def test_divergence_is_the_formula_and_zero_for_equals() -> None:
    generator = torch.Generator().manual_seed(0)
    z, t = torch.randn(2, 3, 7, generator=generator), torch.randn(2, 3, 7, generator=generator)
    p, q = torch.softmax(t / 2, -1), torch.softmax(z / 2, -1)
    torch.testing.assert_close(divergence(z, t, 2.0), 4 * (p * (p / q).log()).sum(-1))
    assert not divergence(z, z, 3.0).any()


@pytest.mark.long
def test_a_large_vocabulary_is_taught_in_parts(
    tune: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distilled = {"distill_weight": 0.5, "distill_temperature": 2.0}
    for out in ("whole", "chunked"):
        train(tune(out=out, steps=4, loss=out, finetune=distilled), progress=False)
        monkeypatch.setattr(head, "PART", 5 * 280)
    runs = [read_metrics(tmp_path / out / "metrics.jsonl") for out in ("whole", "chunked")]
    for name in ("loss", "divergence", "grad_norm"):
        left, right = ([line[name] for line in lines if name in line] for lines in runs)
        assert left and right == pytest.approx(left, rel=1e-4, abs=1e-7), name


@pytest.mark.long
def test_distillation_pulls_towards_the_model_it_started_from(tune: Configure, tmp_path: Path) -> None:
    for out, weight in (("alone", 0.0), ("taught", 1.0)):
        train(tune(out=out, steps=6, finetune={"distill_weight": weight}), progress=False)
    first = {out: read_metrics(tmp_path / out / "metrics.jsonl") for out in ("alone", "taught")}
    taught = [line for line in first["taught"] if line["kind"] == "train"]
    assert all("divergence" in line for line in taught)
    assert not any("divergence" in line for line in first["alone"])
    losses = {out: [line["loss"] for line in lines if line["kind"] == "val"] for out, lines in first.items()}
    assert losses["alone"][0] == losses["taught"][0]
    # Alone it learns the text; a teacher that nothing but the start agrees with leaves it there.
    assert losses["alone"][-1] < losses["alone"][0] - 0.1 and abs(losses["taught"][-1] - losses["taught"][0]) < 0.05


@pytest.mark.long
def test_the_teacher_must_be_what_it_was(tune: Configure, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "teacher")
    config = tune(finetune={"init_from": str(tmp_path / "teacher"), "distill_weight": 0.5})
    train(config, progress=False)
    (tmp_path / "run" / "summary.json").unlink()
    model = LlamaForCausalLM.from_pretrained(tmp_path / "teacher")
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "teacher")
    config.resume = True
    with pytest.raises(UserError, match="has changed since the run started from it"):
        train(config, progress=False)


# ------------------------------------------------------------------ going on


@pytest.mark.quick("residual")
@pytest.mark.parametrize(
    "finetune",
    [{}, {"train_only": "residual"}, {"train_only": "lora"}, {"distill_weight": 0.5, "distill_temperature": 2.0}],
    ids=["all", "residual", "lora", "distilled"],
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    tune: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finetune: dict[str, Any]
) -> None:
    train(tune(out="whole", finetune=finetune), progress=False)
    measure = Run.measure

    def stop(run: Run) -> None:
        measure(run)
        if run.run_state.step == 6:  # two steps after the checkpoint
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "measure", stop)
        with pytest.raises(RuntimeError, match="power cut"):
            train(tune(out="parts", finetune=finetune), progress=False)
    train(tune(out="parts", resume=True, finetune=finetune), progress=False)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for file in whole.glob("**/*.safetensors"):
        left, right = load_file(file), load_file(parts / file.relative_to(whole))
        assert list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in left), file
    assert lines(whole) == lines(parts)
    for path in (whole / "val").iterdir():
        assert np.array_equal(np.load(path), np.load(parts / "val" / path.name))
    assert (whole / "start.json").read_text() == (parts / "start.json").read_text()


@pytest.mark.long
def test_a_run_that_stopped_before_its_first_checkpoint_measures_step_0_once(tune: Configure, tmp_path: Path) -> None:
    train(tune(), progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "summary.json").unlink()
    train(tune(resume=True), progress=False)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "val"] == [
        0,
        4,
        8,
    ]


@pytest.mark.long
def test_a_damaged_adapter_is_named(tune: Configure, tmp_path: Path) -> None:
    config = tune(finetune={"train_only": "lora"})
    train(config, progress=False)
    (tmp_path / "run" / "summary.json").unlink()
    path = tmp_path / "run" / "checkpoint" / "adapter.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 64
    path.write_bytes(content)
    config.resume = True
    with pytest.raises(UserError, match=r"adapter\.safetensors .*not those that were saved"):
        train(config, progress=False)


def test_a_pretrained_model_that_brings_code_is_refused_before_its_weights_are_looked_at(
    capsys: pytest.CaptureFixture[str], tune: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the hub as on disk; training has no --trust-remote-code that a message could name."""
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "a.Model"}}
    (fetched / "config.json").write_text(json.dumps(config))
    (fetched / "model.safetensors").touch()
    monkeypatch.setattr("attnres.models.model_files.fetch", lambda name, patterns: fetched)
    refused(capsys, "which training does not run", tune(), tmp_path, "--init-from", "someone/own-model")


def test_a_size_written_beside_init_from_by_an_earlier_version_is_no_difference() -> None:
    ours = to_dict(TrainConfig(finetune=FinetuneConfig(init_from="there")))
    assert differences(ours, {**ours, "model": {**ours["model"], "size": "nano"}}) == []
    new = to_dict(TrainConfig())
    assert differences(new, {**new, "model": {**new["model"], "size": "100m"}}) == ["model.size"]


def test_a_run_of_an_earlier_version_had_the_defaults() -> None:
    ours = to_dict(TrainConfig())
    theirs = {name: value for name, value in ours.items() if name != "finetune"}
    assert differences(ours, theirs) == []
    assert differences({**ours, "finetune": {**ours["finetune"], "train_only": "lora"}}, theirs) == [
        "finetune.train_only"
    ]


# ------------------------------------------------------------------ side by side


@pytest.mark.long
def test_finetune_are_compared(tune: Configure, tmp_path: Path) -> None:
    base = tune(steps=2, val_every=2)
    base.model.residual, base.model.num_blocks = "standard", None
    variants = ["standard", "full@train_only=residual,residual_lr=0.02"]
    study = compare(CompareConfig(variants=variants, base=base, out=str(tmp_path / "all"), jobs=2, timing_s=1.0))
    names = ["standard", "full-train_onlyresidual-residual_lr0.02"]
    assert study.labels == names and study.baseline == "standard" and equal_conditions(study)
    standard, full = study.runs if study.runs[0].label == "standard" else study.runs[::-1]
    assert full.val[0]["step"] == 0 and full.val[0]["loss"] == pytest.approx(standard.val[0]["loss"], rel=1e-5)
    assert full.config["finetune"]["train_only"] == "residual" and full.config["optim"]["residual_lr"] == 0.02
    assert not (tmp_path / "all" / "speed.json").exists()


def test_mistakes_in_a_comparison_show_first(tune: Configure) -> None:
    base = tune()
    base.model.residual, base.model.num_blocks = "standard", None
    for variant, message in (
        ("block:num_blocks=40", "num_blocks"),
        ("block@train_only=lorra", "did you mean 'lora'"),
        ("block@distill_weight=2", "finetune.distill_weight is 2.0: it is a fraction"),
    ):
        with pytest.raises(UserError, match=message):
            make_plan(CompareConfig(variants=["standard", variant], base=base))


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("recipes/*.yaml")), ids=lambda p: p.stem)
def test_recipes_can_be_read(path: Path) -> None:
    values, _ = config_file(["--config", str(path)])
    if "variants" in values:
        parse_variants(values.pop("variants"))
    for name in ("seeds", "jobs", "timing_s", "lrs"):
        values.pop(name, None)
    from_dict(values)


# ------------------------------------------------------------------ what cannot be


def refused(capsys: pytest.CaptureFixture[str], message: str, config: TrainConfig, tmp_path: Path, *more: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--config", str(path), "--no-progress", *more])
    output = capsys.readouterr().err
    assert left.value.code == 2 and output.startswith("attnres: error: ") and output.count("\n") == 1
    assert message in output, output


def test_models_that_are_none(
    capsys: pytest.CaptureFixture[str], tune: Configure, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished" / "checkpoint").mkdir(parents=True)
    shutil.copytree(plain, tmp_path / "code")
    config = json.loads((plain / "config.json").read_text())
    auto = {"AutoConfig": "a.Config", "AutoModelForCausalLM": "a.Model"}
    (tmp_path / "code" / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": auto}))
    for name, message in (
        (str(tmp_path / "none" / "there"), "does not exist: expected a run folder"),
        (str(tmp_path / "empty"), "holds no model: expected a run folder, or a folder with config.json"),
        (str(tmp_path / "unfinished"), "is not finished and has no model yet"),
        (str(tmp_path / "code"), "brings its own code, which training does not run"),
    ):
        refused(capsys, message, tune(), tmp_path, "--init-from", name)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.long
def test_settings_that_contradict_the_model(
    capsys: pytest.CaptureFixture[str], tune: Configure, plain: Path, tmp_path: Path
) -> None:
    refused(capsys, "both size 100m and init_from", tune(model={"size": "100m"}), tmp_path)
    refused(capsys, "both size nano and init_from", tune(), tmp_path, "--size", "nano")
    refused(capsys, 'both size {"family": "qwen3"', tune(), tmp_path, "--size", "{family: qwen3, hidden_size: 16}")
    config = tune()
    config.finetune.train_only = "lorra"
    refused(capsys, "unknown train_only 'lorra': did you mean 'lora'? Valid are all, lora, residual", config, tmp_path)
    refused(capsys, "must be a number above 0", tune(finetune={"lora_rank": 0}), tmp_path)
    refused(capsys, "it is a fraction", tune(finetune={"distill_weight": 1.5}), tmp_path)
    refused(capsys, "made for at most 32 tokens: give --seq-len 32", tune(data={"seq_len": 40}), tmp_path)
    config = tune(finetune={"train_only": "residual"})
    config.model.residual, config.model.num_blocks = "standard", None
    refused(capsys, "has no parameters to train", config, tmp_path)

    convert(str(plain), "block", out=tmp_path / "converted", num_blocks=2)
    config = tune(finetune={"init_from": str(tmp_path / "converted")})
    config.model.num_blocks = 1
    refused(capsys, "num_blocks is 1 and", config, tmp_path)
    config.model.residual, config.model.num_blocks = "full", None
    refused(capsys, "has the residual 'block' and 'full' was asked for", config, tmp_path)


def test_a_regime_without_a_model(capsys: pytest.CaptureFixture[str], configure: Configure, tmp_path: Path) -> None:
    for name, value in (("train_only", "residual"), ("distill_weight", 0.5), ("inexact", True)):
        refused(capsys, "the model is new: give init_from", configure(finetune={name: value}), tmp_path)


def test_another_tokenizer(
    capsys: pytest.CaptureFixture[str], tune: Configure, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNRES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text(f"other words {index} make another vocabulary " * 8)
    other = prepare(str(tmp_path / "text"), "bpe:270", out=tmp_path / "other", held_out=0.2, progress=False).path
    refused(capsys, "were made by another tokenizer than that of", tune(data={"source": str(other)}), tmp_path)
    bare = shutil.copytree(plain, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    refused(capsys, "holds no tokenizer", tune(finetune={"init_from": str(bare)}), tmp_path)


def test_fewer_rows_than_ids(tune: Configure, plain: Path, tmp_path: Path) -> None:
    small = shutil.copytree(plain, tmp_path / "small")
    model = LlamaForCausalLM.from_pretrained(plain)
    model.resize_token_embeddings(100)
    model.save_pretrained(small)
    with pytest.raises(UserError, match=r"token id \d+, and the embedding of .* has \d+ rows"):
        begun(tune(finetune={"init_from": str(small)}))
