"""Models and the pretraining loop of litgpt with depth reads, on a CPU."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import attnres
from integrations import checks

litgpt = pytest.importorskip("litgpt", reason="make integrations installs it")
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
SIZE = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_query_groups": 2,
    "head_size": 16,
    "intermediate_size": 48,
    "block_size": 32,
    "padded_vocab_size": 64,
    "sliding_window_size": None,
    "sliding_window_indices": None,
}


def build(name):
    torch.manual_seed(0)
    return checks.spread(litgpt.GPT(litgpt.Config.from_name(name, **SIZE)))


def run(model):
    logits = model(IDS)
    return logits, checks.language_loss(logits, IDS)


def subject(name, **options):
    return checks.Subject(partial(build, name), checks.attached(IDS, **options), run)


LLAMA = subject("Llama-3.2-1B")


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B", "Gemma-2-2b", "OLMo-2-1124-7B"])
def test_zero_queries_are_the_model_of_litgpt(name, note):
    checks.zero_queries(subject(name), note if name.startswith("Llama") else lambda *_: None)
    checks.switches(subject(name))


@pytest.mark.parametrize("name", ["pythia-14m", "phi-2"])
def test_layers_that_cannot_be_opened_have_one_read_each(name):
    with pytest.raises(attnres.UserError, match="norms=None"):
        subject(name).connected()
    whole = subject(name, norms=None)
    checks.zero_queries(whole, lambda *_: None)
    checks.ten_steps(whole, model := whole.connected(), torch.optim.AdamW(model.parameters(), 1e-2))


def test_cache(note):
    model = LLAMA.random_queries().eval()
    with torch.no_grad():
        whole = model(IDS)
        model.set_kv_cache(batch_size=2)
        parts = [model(IDS[:, :8], torch.arange(8))]
        parts += [model(IDS[:, i : i + 1], torch.tensor([i])) for i in range(8, 12)]
    far = checks.distance(torch.cat(parts, 1), whole)
    assert far < 1e-5
    note("cache", f"{far:.1e}")


@pytest.mark.long
def test_compile_and_checkpointing(note):
    note("compile", checks.compiled(LLAMA, LLAMA.random_queries()))
    model = LLAMA.random_queries()
    note("checkpointing", checks.checkpointed(LLAMA, model, model.transformer.h))
    checks.deep_copied(LLAMA)


@pytest.mark.long
def test_checkpointing_of_compiled_layers(note):
    model = LLAMA.random_queries()
    told = checks.checkpointed(LLAMA, model, model.transformer.h, compile_layers=True)
    note("checkpointing", f"{told}, with layers compiled")


def pretraining(folder, switched=True):
    """The page's edits, made in a copy of litgpt/pretrain.py."""
    installed = Path(litgpt.__file__).parents[1]
    checks.patched(Path(__file__).with_name("README.md"), installed, folder)
    path = folder / "litgpt" / "pretrain.py"
    spec = importlib.util.spec_from_file_location("patched_pretrain", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_pretraining_loop(tmp_path, note, monkeypatch):
    from litgpt.args import EvalArgs, TrainArgs

    module = pretraining(tmp_path)
    data = torch.utils.data.DataLoader(list(torch.randint(0, 64, (64, 33))), batch_size=2)
    monkeypatch.setattr(module, "get_dataloaders", lambda *_: (data, data))
    monkeypatch.setattr(module, "save_hyperparameters", lambda *_: None)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # its checkpoint has a DataLoader in it
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = litgpt.Config.from_name("Llama-3.2-1B", **SIZE)
    args = {"global_batch_size": 2, "micro_batch_size": 2, "save_interval": 5, "max_norm": 1.0, "tie_embeddings": False}
    args |= {"log_interval": 1, "lr_warmup_steps": 2}

    def train(steps, resume=False):
        module.setup(
            "llama",
            model_config=config,
            out_dir=tmp_path / "out",
            precision="32-true",
            devices=1,
            logger_name="csv",
            data="no data module is asked for",
            resume=resume,
            train=TrainArgs(max_tokens=steps * 64, **args),
            eval=EvalArgs(interval=100, max_iters=1),
        )

    train(10)
    state = torch.load(tmp_path / "out" / "final" / "lit_model.pth", weights_only=False)
    query = next(value for name, value in state["model"].items() if name.endswith("residual.query"))
    assert state["step_count"] == 10 and query[1:].abs().max() > 0
    groups = state["optimizer"]["param_groups"]
    assert sum(group["weight_decay"] == 0 and len(group["params"]) == 2 for group in groups) == 1
    train(12, resume=True)
    state = torch.load(tmp_path / "out" / "final" / "lit_model.pth", weights_only=False)
    assert state["step_count"] == 12
    note("resume", "step 10 to 12")
    added = len(re.findall(r"(?m)^\+[^+]", Path(__file__).with_name("README.md").read_text("utf-8")))
    note("how", f"`attnres.attach`, {added} lines of pretrain.py")


def test_its_optimizer(note):
    from litgpt.utils import instantiate_torch_optimizer

    model = LLAMA.connected()
    made = instantiate_torch_optimizer(
        {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}, model.parameters()
    )
    note("its optimizer", f"{checks.groups(made, model)}, schedule sets one rate; regroup, query_lr")

    def make(model):
        made = torch.optim.AdamW(model.parameters(), 1e-2)
        attnres.regroup(made, model)
        return made

    checks.resumes(LLAMA, make)


def test_record_intervene_and_explore(note):
    checks.tools(LLAMA, note)
    checks.explored(LLAMA)
