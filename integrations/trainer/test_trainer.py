"""A model of Transformers with depth reads in Hugging Face's own Trainer, on a CPU."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import attnres
from integrations import checks

pytest.importorskip("accelerate", reason="the Trainer needs it")
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 12))]
SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def build():
    torch.manual_seed(0)
    return checks.spread(Qwen3ForCausalLM(Qwen3Config(**SIZE)))


def connect(model, residual, **settings):
    settings = {} if residual == "standard" else settings | {"query_lr": 0.1}
    return attnres.convert(model, residual, **settings).train()


def run(model):
    logits = model(input_ids=IDS).logits
    return logits, checks.language_loss(logits, IDS)


QWEN = checks.Subject(build, connect, run)


def trained(model, folder, steps=10, resume=None, **options):
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **options,
    )
    made = Trainer(model, arguments, train_dataset=ROWS)
    made.train(resume_from_checkpoint=resume)
    return made


def test_zero_queries_are_the_model_of_transformers(note):
    note("how", "`attnres.convert`, 1 line")
    checks.zero_queries(QWEN, note)


def test_ten_steps_and_resuming(note, tmp_path):
    arguments = TrainingArguments(str(tmp_path / "none"), weight_decay=0.1, report_to=[], use_cpu=True)
    plain = Trainer(QWEN.connected(), arguments)
    note("its optimizer", f"{checks.groups(plain.create_optimizer(), plain.model)}, one rate; query_lr")
    whole = trained(QWEN.connected(), tmp_path / "whole")
    assert checks.reads(whole.model).query[1:].abs().max() > 0
    again = trained(QWEN.connected(), tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-5"))
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    loaded = attnres.load(tmp_path / "whole" / "checkpoint-10").train()
    assert checks.distance(run(loaded)[0], run(whole.model.train())[0]) == 0
    note("resume", "bit-equal")


@pytest.mark.long
def test_compile_with_checkpointing(note, tmp_path):
    note("compile", checks.compiled(QWEN, QWEN.random_queries()))
    ways = {
        "eager": {},
        "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    }
    ways["both"] = ways["checkpointed"] | {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    losses = {}
    for name, options in ways.items():
        torch._dynamo.reset()
        made = trained(QWEN.connected(), tmp_path / name, steps=6, **options)
        losses[name] = made.state.log_history[-1]["train_loss"]
    assert losses["checkpointed"] == losses["eager"]
    assert abs(losses["both"] - losses["eager"]) < 1e-4
    note("checkpointing", f"0, with compile {abs(losses['both'] - losses['eager']):.1e} of the loss")


def test_cache(note):
    model = QWEN.random_queries().eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))
    note("cache", "same tokens")


def test_record_intervene_and_explore(note):
    checks.tools(QWEN, note)
    checks.explored(QWEN)
