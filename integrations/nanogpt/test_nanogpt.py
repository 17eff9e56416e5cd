"""nanoGPT's own train.py with the edits of the page, on a CPU."""

import importlib.util
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import attnres
from integrations import checks

PAGE = Path(__file__).with_name("README.md")
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
FLAGS = """
    --max_iters=9 --eval_interval=5 --eval_iters=1 --batch_size=2 --block_size=16 --n_layer=2 --n_head=2 --n_embd=32
    --device=cpu --dtype=float32 --compile=False --gradient_accumulation_steps=1 --dataset=bytes
    --always_save_checkpoint=True --warmup_iters=2 --lr_decay_iters=9 --learning_rate=1e-2 --weight_decay=0.1""".split()


@pytest.fixture
def subject(checkout):
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout("nanoGPT") / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32, dropout=0.0, bias=False)

    def build():
        torch.manual_seed(0)
        return checks.spread(module.GPT(config))

    def run(model):
        return model(IDS[:, :-1], IDS[:, 1:].contiguous())

    return checks.Subject(build, checks.attached(IDS), run)


def optimizer(model):
    made = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu")
    attnres.regroup(made, model)
    return made


def test_the_model(subject, note):
    checks.zero_queries(subject, note)
    checks.switches(subject)
    model = subject.connected()
    told = checks.groups(model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), "cpu"), model)
    note("its optimizer", f"{told}, schedule sets one rate; regroup, query_lr")
    checks.resumes(subject, optimizer)
    note("compile", checks.compiled(subject, subject.random_queries()))
    model = subject.random_queries()
    note("checkpointing", f"has none; {checks.checkpointed(subject, model, model.transformer.h)}")
    note("cache", "has none")
    model = subject.random_queries().eval()
    assert model.generate(IDS[:, :3], 4, top_k=1).shape == (2, 7)
    checks.tools(subject, note)
    # without targets it gives the last token's logits alone
    checks.explored(subject, lambda model: lambda ids: model(ids, ids)[0])


@pytest.fixture
def train(checkout, tmp_path, monkeypatch):
    """`train("--residual=block")` runs train.py, edited, or as it is; gives its variables."""
    source = checkout("nanoGPT")
    for name in ("edited", "plain"):
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns(".git", "data", "assets"))
        data = tmp_path / name / "data" / "bytes"
        data.mkdir(parents=True)
        for part in ("train", "val"):
            np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16).tofile(data / f"{part}.bin")
    checks.patched(PAGE, source, tmp_path / "edited")

    def script(*flags, folder="edited"):
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "argv", ["train.py", *FLAGS, *flags])
        monkeypatch.delitem(sys.modules, "model", raising=False)
        with monkeypatch.context() as context:
            context.syspath_prepend(str(tmp_path / folder))
            return runpy.run_path("train.py", run_name="__main__")

    return script


def test_its_train_py(train, note):
    plain, off = train(folder="plain"), train("--residual=")
    assert off["lossf"] == plain["lossf"] and torch.equal(off["losses"]["val"], plain["losses"]["val"])
    block = train("--residual=block", "--out_dir=block")
    assert block["iter_num"] == 10
    raw = block["raw_model"]
    group = checks.group_of(block["optimizer"], raw.residual.query)
    assert group["weight_decay"] == 0 and raw.residual.query_lr == 0.1 and raw.residual.query.abs().max() > 0
    again = train("--residual=block", "--out_dir=block", "--init_from=resume", "--max_iters=12")
    assert again["iter_num"] == 13 and again["local_iter_num"] == 8
    assert checks.group_of(again["optimizer"], again["raw_model"].residual.query)["weight_decay"] == 0
    added = len(re.findall(r"(?m)^\+[^+]", PAGE.read_text("utf-8")))
    note("how", f"`attnres.attach`, {added} lines of train.py")
    note("resume", "its --init_from=resume")
