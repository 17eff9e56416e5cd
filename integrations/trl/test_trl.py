"""TRL's SFT trainer on a converted model and on a converted folder, on a CPU."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import attnres
from integrations import checks

trl = pytest.importorskip("trl", reason="make integrations installs it")
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402

VOCAB = 320
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SIZE |= {"intermediate_size": 48, "max_position_embeddings": 64, "vocab_size": VOCAB}
DATA = Dataset.from_list([{"input_ids": row.tolist()} for row in torch.randint(3, VOCAB, (8, 12))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from saved import write_tokenizer

    place = tmp_path_factory.mktemp("block")
    torch.manual_seed(0)
    model = attnres.convert(Qwen3ForCausalLM(Qwen3Config(**SIZE)), "block", num_blocks=2, query_lr=0.1)
    model.save_pretrained(place)
    write_tokenizer(place, VOCAB)
    return place


def trained(model, place, steps=10, resume=None, **options):
    settings = trl.SFTConfig(
        str(place),
        max_steps=steps,
        save_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        **options.pop("config", {}),
    )
    made = trl.SFTTrainer(model, args=settings, train_dataset=DATA, **options)
    made.train(resume_from_checkpoint=resume)
    return made


def test_a_converted_folder_trains_and_resumes(folder, tmp_path, note):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = trained(attnres.load(folder).train(), tmp_path / "whole", processing_class=tokenizer)
    residual = checks.reads(whole.model)
    assert residual.query[1:].abs().max() > 0
    assert checks.group_of(whole.optimizer, residual.query)["weight_decay"] == 0 and residual.query_lr == 0.1
    resume = str(tmp_path / "whole" / "checkpoint-5")
    again = trained(attnres.load(folder).train(), tmp_path / "again", resume=resume, processing_class=tokenizer)
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    by_name = {"config": {"model_init_kwargs": {"trust_remote_code": True}}}
    named = trained(str(folder), tmp_path / "named", steps=2, processing_class=tokenizer, **by_name)
    assert checks.reads(named.model).query.abs().max() > 0
    note("how", "`attnres.convert` or a folder, 1 line")
    note("its optimizer", "as the Trainer")
    note("resume", "bit-equal")
    for column in ("off-switch", "zero queries: outputs, gradients", "compile", "checkpointing", "cache"):
        note(column, "as the Trainer")
    with attnres.record(named.model) as trace, torch.no_grad():
        named.model(input_ids=torch.tensor([DATA[0]["input_ids"]]))
    assert trace.tokens == 12
    note("record, intervene", "both")


def test_lora_trains_the_reads(folder, tmp_path):
    from transformers import AutoTokenizer

    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["residual"])
    made = trained(
        attnres.load(folder).train(),
        tmp_path,
        steps=2,
        peft_config=lora,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trained_reads = [p for name, p in made.model.named_parameters() if "residual" in name and p.requires_grad]
    assert trained_reads and max(p.abs().max() for p in trained_reads if p.ndim == 2) > 0
