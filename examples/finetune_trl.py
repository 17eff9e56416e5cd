"""Put depth reads into a pretrained model and train it with TRL: SFT, DPO or a reward model (pip install trl).

    python examples/finetune_trl.py --method dpo --model Qwen/Qwen3-0.6B --data pairs.jsonl --out models/mine

A row of the data has `text`, or `prompt` and `completion`, for sft; `prompt`, `chosen` and `rejected` for the others.
Queries and gains are not decayed, whatever `weight_decay` is. What it leaves is loaded with `attnres.load`.
"""

from pathlib import Path
from typing import Literal

import torch
import tyro
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import attnres
from attnres.cli import carry_out

METHODS = {
    "sft": (AutoModelForCausalLM, {}, SFTConfig, SFTTrainer),
    "dpo": (AutoModelForCausalLM, {}, DPOConfig, DPOTrainer),
    "reward": (AutoModelForSequenceClassification, {"num_labels": 1}, RewardConfig, RewardTrainer),
}


def main(
    method: Literal["sft", "dpo", "reward"],
    model: str,
    data: Path,
    out: Path,
    steps: int = 100,
    batch: int = 4,
    length: int = 512,
    blocks: int = 4,
    lr: float = 2e-5,
) -> SFTTrainer | DPOTrainer | RewardTrainer:
    """Train `model`, a folder or hub name of a plain model, on the rows of a .jsonl, .csv or .parquet."""
    auto, options, settings_class, trainer_class = METHODS[method]
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = auto.from_pretrained(model, dtype=torch.float32, **options)
    plain.config.pad_token_id = tokenizer.pad_token_id
    network = attnres.convert(plain, "block", num_blocks=blocks)
    print(network.conversion)

    suffix = data.suffix.removeprefix(".")
    rows = load_dataset({"jsonl": "json"}.get(suffix, suffix), data_files=str(data), split="train")
    settings = settings_class(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=batch,
        max_length=length,
        learning_rate=lr,
        weight_decay=0.01,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        report_to=[],
    )
    trainer = trainer_class(network, args=settings, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    carry_out(lambda: tyro.cli(main))  # what is wrong with the input is one sentence
