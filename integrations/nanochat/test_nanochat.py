"""nanochat's own gpt.py, optimizer and KV cache with the edits of the page, on a CPU."""

import re
import shutil
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import attnres
from integrations import checks

HERE = Path(__file__).parent
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
SIZE = {"sequence_len": 32, "vocab_size": 64, "n_layer": 3, "n_head": 2, "n_kv_head": 2, "n_embd": 32}


@pytest.fixture
def gpt(checkout, tmp_path, monkeypatch):
    """The module `nanochat.gpt` with the edits; what it compiles is compiled without inductor."""
    source = checkout("nanochat")
    shutil.copytree(source / "nanochat", tmp_path / "nanochat")
    checks.patched(HERE / "README.md", source, tmp_path)
    shutil.copy(HERE / "adapter.py", tmp_path / "nanochat")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import nanochat.gpt

    yield nanochat.gpt
    for name in [name for name in sys.modules if name.partition(".")[0] == "nanochat"]:
        del sys.modules[name]


def make(gpt, residual=""):
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(**SIZE, residual=residual))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    others = {name.replace(".", "/"): p for name, p in model.named_parameters() if not name.startswith("depth.")}
    checks.spread(torch.nn.ParameterDict(others))
    return model


def run(model):
    logits = model(IDS)
    return logits, model(IDS, IDS.roll(-1, 1))


@pytest.fixture
def subject(gpt):
    return checks.Subject(lambda: make(gpt), lambda model, residual, **_: make(gpt, residual), run)


def test_the_model(subject, gpt, note):
    assert torch.float32 == gpt.COMPUTE_DTYPE
    checks.zero_queries(subject, note)
    model, plain = subject.random_queries(), subject.build()
    attnres.load_plain(model, plain.state_dict())
    assert model.num_scaling_params()["total"] == sum(p.numel() for p in model.parameters())
    note("compile", checks.compiled(subject, subject.random_queries()))
    note("checkpointing", "has none")
    checks.tools(subject, note)
    checks.explored(subject)
    added = len(re.findall(r"(?m)^\+[^+]", (HERE / "README.md").read_text("utf-8")))
    note("how", f"adapter, {added} lines of gpt.py")


def test_its_optimizer(subject, note):
    model = subject.connected()
    made = model.setup_optimizer()
    group = checks.group_of(made, model.depth.residual.query)
    assert group["kind"] == "adamw" and group["weight_decay"] == 0 and model.depth.residual.query_lr == 0.1
    before = [group["lr"] for group in made.param_groups]
    attnres.regroup(made, model)
    assert checks.group_of(made, model.depth.residual.query)["lr"] in before
    checks.ten_steps(subject, model, model.setup_optimizer())
    checks.resumes(subject, lambda model: model.setup_optimizer())
    note("its optimizer", "refuses parameters that it does not know; a group of its own")
    note("resume", "bit-equal")


def test_its_cache(subject, gpt, note, monkeypatch):
    for name in ("rustbpe", "tiktoken"):  # of its tokenizer, which its engine imports
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from nanochat.engine import KVCache

    model = subject.random_queries().eval()
    cache = KVCache(2, 2, 32, 16, 3, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        parts = [model(IDS[:, :8], kv_cache=cache)]
        parts += [model(IDS[:, i : i + 1], kv_cache=cache) for i in range(8, 12)]
        far = checks.distance(torch.cat(parts, 1), model(IDS))
    assert far < 1e-5
    note("cache", f"{far:.1e}")
